"""Sizes and keys that families allow and few models have: read, written so that transformers loads
them, or named."""

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.attention.rope import frequencies
from models.config import ModelConfig
from models.parameter_counts import num_parameters
from tests.other_systems import CONFIGS, slow, usually, write_folder
from tests.refusals import raises, sentence, shows
from tools.cli import main
from tools.convert.formats import open_source
from tools.convert.hf.config import config_of, from_hugging_face
from tools.convert.probe import BOUND, difference, parameters, reduced

transformers: Any = pytest.importorskip(
    "transformers",
    reason="needs the package transformers (pip install transformers)",
    exc_type=ImportError,
)
pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers
HELD = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "gpt_neox",
)
ODD: dict[str, Any] = {
    "hidden_size": 28,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 8,
}
FULL = {"layer_types": ["full_attention"] * 4}
GROUPS = {"n_group": 4, "topk_group": 4, "n_routed_experts": 8}
YARN = {
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 24,
    "truncate": False,
}


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize(
    ("kind", "changes", "written"),
    [
        ("mistral", {**ODD, "sliding_window": None}, "mistral"),
        ("glm4_moe", GROUPS, "glm4_moe"),
        ("gemma2", FULL, "gemma2"),
        ("gpt_oss", FULL, "gpt_oss"),
        *slow(
            ("mistral", ODD, "mistral"),
            ("mixtral", ODD, "mixtral"),
            ("qwen3", ODD, "qwen3"),
            ("qwen2", {**ODD, "sliding_window": None}, "qwen2"),
            ("deepseek_v3", {"hidden_size": 25}, "deepseek_v3"),
            ("deepseek_v3", GROUPS, "deepseek_v3"),
            ("gemma3_text", FULL, "gemma3_text"),
            ("olmo3", FULL, "olmo2"),
        ),
    ],
)
def test_an_export_is_of_a_family_whose_class_takes_its_sizes(
    kind: str, changes: dict[str, Any], written: str, tmp_path: Path
) -> None:
    write_folder(tmp_path / "given", kind, **changes)
    assert main(["convert", str(tmp_path / "given"), str(tmp_path / "ours")]) == 0
    assert (
        main(
            [
                "convert",
                str(tmp_path / "ours"),
                str(tmp_path / "out"),
                "--to",
                "hf",
                "--verify",
                "logits",
            ]
        )
        == 0
    )
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] in (written, kind)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_yarn_in_fractions_of_pairs_is_written_as_the_family_that_reads_it() -> None:
    """OLMo 3's class does not look for `truncate`, OLMo 2's does. Without a window both are one
    model."""
    scaling = {**YARN, "kind": "yarn", "beta_fast": 4.0}
    scaling.pop("rope_type")
    olmo3 = from_hugging_face(deepcopy(CONFIGS["olmo3"]) | FULL)
    fields = olmo3.model_dump() | {"rope_base": 50.0, "rope_scaling": scaling}
    model = ModelConfig.model_validate(fields)
    config = config_of(model, "float32")
    assert config["model_type"] == "olmo2"
    assert from_hugging_face(config).rope_scaling == model.rope_scaling
    assert difference(json.dumps(config)) <= BOUND
    # The setting has an effect on these positions.
    rounded = model.rope_scaling.model_copy(update={"truncate": True})
    base, dims, longest = model.rope_base, model.rotary_dims, model.max_positions
    fractional = frequencies(model.rope_scaling, base, dims, longest)
    assert not torch.allclose(fractional, frequencies(rounded, base, dims, longest), rtol=1e-3)
    with raises("convert.hf_not_expressible", own_kind="olmo3"):
        config_of(ModelConfig.model_validate(fields | {"window": 5}), "float32")


def test_sizes_that_its_class_refuses_are_named_with_the_config_and_a_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "given", "arcee", **ODD, attention_bias=True)
    assert main(["convert", str(folder), str(tmp_path / "ours")]) == 2
    said = capsys.readouterr().err
    config = f"{folder}/config.json: "
    assert re.search(f"{config}{sentence('convert.probe_no_model')}", said)
    assert main(["convert", str(folder), str(tmp_path / "ours"), "--no-verify"]) == 0
    assert (
        main(
            ["convert", str(tmp_path / "ours"), str(tmp_path / "out"), "--to", "hf", "--no-verify"]
        )
        == 2
    )
    assert shows(capsys.readouterr().err, "convert.hf_no_family")


@pytest.mark.cases(0, sample=8)
@pytest.mark.parametrize("kind", usually(("gpt2", "deepseek_v3", "gpt_oss"), CONFIGS))
def test_the_class_of_a_config_has_as_many_parameters_as_our_model(kind: str) -> None:
    assert parameters(json.dumps(CONFIGS[kind])) == num_parameters(
        from_hugging_face(deepcopy(CONFIGS[kind]))
    )


@pytest.mark.parametrize(
    ("hidden", "heads", "head_dim"), [(28, 3, 8), (48, 6, 8), (36, 6, 8), (32, 4, 8), (33, 4, 8)]
)
def test_a_reduced_config_keeps_what_divides_what(hidden: int, heads: int, head_dim: int) -> None:
    sizes = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
    }
    config = deepcopy(CONFIGS["mistral"]) | sizes
    small = reduced(config)
    few = small["num_attention_heads"]
    assert (small["hidden_size"] == few * small["head_dim"]) == (hidden == heads * head_dim)
    assert (small["hidden_size"] % few == 0) == (hidden % heads == 0)


@pytest.mark.parametrize("kind", ["gemma3_text", "olmo3"])
def test_a_range_in_fractions_of_pairs_is_read_as_transformers_5_reads_it_and_noted(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path / "given", kind, rope_scaling=YARN)
    assert (
        main(["convert", str(tmp_path / "given"), str(tmp_path / "ours"), "--verify", "logits"])
        == 0
    )
    assert (
        "truncate = false in rope_scaling: transformers 5 does not read it"
        in capsys.readouterr().out
    )


@pytest.mark.cases(None, sample=2)
@pytest.mark.parametrize("kind", usually(("mixtral", "deepseek_v3"), HELD))
def test_what_transformers_5_saves_as_it_holds_it_is_read_bit_for_bit(
    kind: str, tmp_path: Path
) -> None:
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**deepcopy(CONFIGS[kind]))
    )
    model.save_pretrained(tmp_path / "published")
    model.save_pretrained(tmp_path / "held", save_original_format=False)
    published = open_source(tmp_path / "published")
    held = open_source(tmp_path / "held")
    assert published.shapes == held.shapes
    for key in published.shapes:
        assert torch.equal(published.read(key), held.read(key)), key


@pytest.mark.slow
def test_experts_in_one_tensor_are_read_of_torch_files_too_and_others_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**deepcopy(CONFIGS["mixtral"]))
    )
    model.save_pretrained(tmp_path / "held", save_original_format=False)
    expected = open_source(tmp_path / "held")
    tensors = {key: expected.read(key) for key in expected.shapes}
    stored = load_file(tmp_path / "held/model.safetensors")
    (tmp_path / "held/model.safetensors").unlink()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    matrices = {key: one for key, one in stored.items() if one.dim() > 1}
    turned = stored | {key: one.mT.contiguous().mT for key, one in matrices.items()}
    torch.save(turned | {name: stored[name]}, tmp_path / "held/pytorch_model.bin")
    found = open_source(tmp_path / "held")
    assert all(torch.equal(found.read(key), one) for key, one in tensors.items())
    (tmp_path / "held/pytorch_model.bin").unlink()
    save_file(stored | {name: stored[name][0].contiguous()}, tmp_path / "held/model.safetensors")
    assert main(["inspect", str(tmp_path / "held")]) == 2
    assert shows(
        capsys.readouterr().err,
        "convert.hf_expert_shape",
        name=name,
        shape="[80, 24]",
        form="[experts, 2 ffn, hidden]",
    )


def test_a_head_that_differs_from_its_embedding_names_a_way_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "given", "llama", tie_word_embeddings=True)
    stored = load_file(folder / "model.safetensors")
    head = stored["model.embed_tokens.weight"] + 1
    save_file(
        stored | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    assert main(["convert", str(folder), str(tmp_path / "ours")]) == 2
    assert shows(capsys.readouterr().err, "convert.hf_tied_differs")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert main(["convert", str(folder), str(tmp_path / "ours"), "--verify", "logits"]) == 0
    assert torch.equal(open_source(tmp_path / "ours").read("weight/head.weight"), head)
