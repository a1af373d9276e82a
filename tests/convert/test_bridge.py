"""Checkpoints as Megatron-Bridge leaves them: tensors by Megatron-core's own writer, and in place of
args a run_config.yaml with all fields of the model."""

import argparse
import dataclasses
import enum
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.device_mesh import DeviceMesh

from models.equivalence import TRAINING_ONLY_KEYS
from tests.convert.test_megatron import PADDED, build, save_in_chunks
from tests.other_systems import MEGATRON, NEEDS_MEGATRON, megatrons
from tests.ranks import run_ranks
from tests.refusals import raises
from tools.convert.formats import open_source
from tools.convert.hf.config import differing_fields, from_hugging_face
from tools.convert.megatron.args import args_of, model_of_args
from tools.convert.megatron.bridge import BRIDGE, bridge_arguments
from tools.convert.megatron.keys import unknown_arguments

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of megatron-core
    pytest.mark.usefixtures("torch_files_read_here"),
]
PRELOADED = MEGATRON
# What the provider of a GPTModel has besides Megatron-core's configuration.
SPEC = {
    "_target_": "megatron.bridge.models.gpt_provider.default_layer_spec",
    "_call_": False,
}
PROVIDER = {
    "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
    "fp16_lm_cross_entropy": False,
    "logit_dtype": None,
    "parallel_output": True,
    "make_vocab_size_divisible_by": 64,
    "scatter_embedding_sequence_parallel": True,
    "transformer_layer_spec": SPEC,
    "should_pad_vocab": True,
    "hf_model_id": "somebody/model",
    "generation_config": None,
    "rope_scaling": False,
    "rope_scaling_factor": 1.0,
    "seq_len_interpolation_factor": None,
}
FROM_ARGS = (
    *("position_embedding_type", "rotary_base", "rotary_percent", "vocab_size", "seq_length"),
    *("moe_router_load_balancing_type", "moe_aux_loss_coeff"),
)


def dumped(value: Any) -> Any:
    """A field's value as Megatron-Bridge dumps it."""
    if isinstance(value, torch.dtype):
        return {"_target_": str(value), "_call_": False}
    if isinstance(value, enum.Enum):
        return {"_target_": f"megatron.core.{type(value).__name__}", "_args_": [value.value]}
    if callable(value):
        name = getattr(value, "__qualname__", "init_")
        module = "torch._C._nn" if name == "gelu" else getattr(value, "__module__", "megatron")
        return {"_target_": f"{module}.{name}", "_call_": False}
    if isinstance(value, list | tuple):
        return [dumped(item) for item in value]
    return value


def provider_fields(config: Any, args: dict[str, Any]) -> dict[str, Any]:
    """All fields of a model as run_config.yaml has them. config: Megatron-core's. args: of it."""
    fields = {
        field.name: dumped(getattr(config, field.name)) for field in dataclasses.fields(config)
    }
    fields |= {name: args[name] for name in FROM_ARGS if args.get(name) is not None}
    fields["share_embeddings_and_output_weights"] = not args["untie_embeddings_and_output_weights"]
    # The model of the test computes it unfused, and args of Megatron-LM say nothing of that.
    return {**fields, **PROVIDER, "bias_activation_fusion": True}


def write_config(folder: Path, fields: dict[str, Any], **tables: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {"model": fields, "peft": None, "train": {"train_iters": 9}, **tables}
    (folder / BRIDGE).write_text(yaml.safe_dump(content))


def save_both(mesh: DeviceMesh, kind: str, folder: Path, tp: int, nested: bool) -> None:
    """The same model with Megatron-LM's args, and with what Megatron-Bridge saves."""
    model = build(kind, tp, 1)
    args = args_of(from_hugging_face(megatrons(kind)), PADDED[tp], tp, 1, False, torch.float32)
    state = model.sharded_state_dict()
    save_in_chunks({**state, "args": argparse.Namespace(**args)}, folder / "args")
    save_in_chunks({**state, "iteration": 5}, folder / "bridge/iter_0000005")
    if mesh.get_rank() == 0:
        fields = provider_fields(model.config, args)
        if nested:
            inner = {field.name for field in dataclasses.fields(model.config)}
            transformer = {name: fields.pop(name) for name in inner & fields.keys()}
            target = "megatron.bridge.models.gpt.model_config.BridgeGPTModelConfig.from_dict"
            fields = {**fields, "_target_": target, "transformer": transformer}
        write_config(folder / "bridge/iter_0000005", fields)
        (folder / "bridge/latest_checkpointed_iteration.txt").write_text("5")


@pytest.mark.cases(0, sample=2)
@NEEDS_MEGATRON
@pytest.mark.parametrize(
    ("kind", "nested"),
    [("llama", False), ("llama", True), ("gpt2", False), ("mixtral", False), ("qwen3", True)],
)
def test_a_checkpoint_of_megatron_bridge_is_the_model_that_args_would_say(
    kind: str, nested: bool, tmp_path: Path
) -> None:
    run_ranks(save_both, {"tp": 2}, kind=kind, folder=tmp_path, tp=2, nested=nested)
    ours = open_source(tmp_path / "bridge")
    theirs = open_source(tmp_path / "args")
    differing = set(differing_fields(ours.model, theirs.model)) - {*TRAINING_ONLY_KEYS}
    assert not differing, [(getattr(ours.model, d), getattr(theirs.model, d)) for d in differing]
    assert ours.shapes.keys() == theirs.shapes.keys()
    for key in ours.shapes:
        assert torch.equal(ours.read(key), theirs.read(key)), key
    assert not [note for note in ours.facts.notes if "not known" in note], ours.facts.notes


MODEL: dict[str, Any] = {
    **PROVIDER,
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 10,
    "ffn_hidden_size": 40,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-5,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
    "position_embedding_type": "rope",
    "rotary_base": 500000,
    "seq_length": 48,
    "share_embeddings_and_output_weights": False,
    "vocab_size": 131,
}


def changed(**changes: Any) -> dict[str, Any]:
    return {**MODEL, **changes}


def test_the_fields_are_those_of_the_model_and_old_ones_of_llama_are_its_scaling(
    tmp_path: Path,
) -> None:
    write_config(tmp_path, MODEL)
    model = model_of_args(bridge_arguments(tmp_path / BRIDGE), None)
    assert (model.kv_heads, model.head_dim, model.vocab, model.max_positions) == (2, 10, 131, 48)
    assert (model.mlp, model.tied, model.rope_base) == ("swiglu", False, 500000.0)
    stretched = {
        "_target_": "megatron.bridge.models.llama.llama_provider.Llama31ModelProvider",
        "scale_factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "old_context_len": 8192,
    }
    write_config(tmp_path, changed(**stretched))
    scaling = model_of_args(bridge_arguments(tmp_path / BRIDGE), None).rope_scaling
    assert (scaling.kind, scaling.factor) == ("llama3", 4.0)


def _other(name: str) -> dict[str, Any]:
    return {"_target_": name, "_call_": False}


@pytest.mark.parametrize(
    ("fields", "tables", "code"),
    [
        (changed(_target_="megatron.bridge.models.gemma.gemma2_provider.G"), {}, "bridge_class"),
        (MODEL, {"peft": {"dim": 8}}, "bridge_adapter"),
        (changed(transformer_layer_spec=_other("my.layers.spec")), {}, "bridge_layers"),
        (changed(activation_func=_other("my.squares")), {}, "bridge_activation"),
        (changed(low_freq_factor=2.0), {}, "bridge_rope"),
        (changed(qk_l2_norm=True), {}, "megatron_argument_only"),
        (changed(vocab_size=None), {}, "bridge_vocab"),
        (None, {}, "bridge_no_model"),
    ],
)
def test_another_model_is_refused_by_the_name_of_the_field(
    fields: dict[str, Any] | None, tables: dict[str, Any], code: str, tmp_path: Path
) -> None:
    write_config(tmp_path, fields or {}, **tables)
    if fields is None:
        (tmp_path / BRIDGE).write_text("train: {}\n")
    (tmp_path / ".metadata").write_bytes(b"")
    (tmp_path / "metadata.json").write_text("{}")
    with raises(f"convert.{code}"):
        open_source(tmp_path)


def test_a_field_that_is_not_known_is_named(tmp_path: Path) -> None:
    write_config(tmp_path, changed(attention_twist=3))
    assert [*unknown_arguments(bridge_arguments(tmp_path / BRIDGE))] == ["attention_twist = 3"]
