"""MXFP4 weights of gpt-oss are read bit for bit as transformers dequantizes them, or refused by
name."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megaprec.errors import UserError
from models.presets import preset
from tests.other_systems import CONFIGS, write_folder
from tests.refusals import raises, sentence
from tools.cli import main
from tools.convert.formats import open_source
from tools.convert.hf.config import from_hugging_face
from tools.convert.hf.mxfp4 import dequantized
from tools.convert.probe import check_config

QUANTIZED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_local_experts": 3}
SIZES |= {"num_experts_per_tok": 2}
Tensors = dict[str, Tensor]


def their(blocks: Tensor, scales: Tensor) -> Tensor:
    module: Any = pytest.importorskip("transformers.integrations.mxfp4", exc_type=ImportError)
    return module.convert_moe_packed_tensors(blocks, scales)


def folder(
    path: Path, change: Callable[[Tensors], Any] = lambda tensors: None, **config: Any
) -> Path:
    """A folder like the published ones: experts' weights in blocks and scales, the rest in bf16."""
    write_folder(path, "gpt_oss", torch.bfloat16, **SIZES)
    said = {**CONFIGS["gpt_oss"], **SIZES, "quantization_config": QUANTIZED, **config}
    (path / "config.json").write_text(json.dumps(said))
    tensors = load_file(path / "model.safetensors")
    dice = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, inner, outer = tensors.pop(name).shape
        shape = experts, outer, inner // 32
        tensors[f"{name}_blocks"] = torch.randint(
            256, (*shape, 16), dtype=torch.uint8, generator=dice
        )
        tensors[f"{name}_scales"] = torch.randint(
            110, 130, shape, dtype=torch.uint8, generator=dice
        )
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_all_numbers_with_all_scales_are_those_of_transformers() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(256, 1).view(1, -1, 1, 16)
    scales = torch.arange(256, dtype=torch.uint8).repeat_interleave(16).view(1, -1, 1)
    ours = dequantized(blocks[0], scales[0]).t().bfloat16()
    theirs = their(blocks, scales)[0]
    finite = theirs.isfinite()
    assert torch.equal(finite, ours.isfinite()) and finite[:, : 253 * 16].all()
    assert torch.equal(ours.view(torch.int16)[finite], theirs.view(torch.int16)[finite])


def test_a_folder_is_read_as_bf16_and_written_back_as_transformers_dequantizes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(tmp_path / "hf")
    assert main(["convert", str(path), str(tmp_path / "ours"), "--no-verify"]) == 0
    assert "weights of experts are in MXFP4; they are read as bf16" in " ".join(
        capsys.readouterr().out.split()
    )
    assert (
        main(
            ["convert", str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "hf", "--no-verify"]
        )
        == 0
    )
    before = load_file(path / "model.safetensors")
    after = load_file(tmp_path / "back" / "model.safetensors")
    halves = ("_blocks", "_scales")
    expected = {name: tensor for name, tensor in before.items() if not name.endswith(halves)}
    for name in (name.removesuffix("_blocks") for name in before if name.endswith("_blocks")):
        expected[name] = their(before[f"{name}_blocks"], before[f"{name}_scales"])
    assert after.keys() == expected.keys()
    assert all(
        torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype
        for name, tensor in expected.items()
    )
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def one_scale(value: int) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors["model.layers.1.mlp.experts.down_proj_scales"].fill_(value)


def pop(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(f"model.layers.0.mlp.experts.{name}")


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (
            lambda t: None,
            {"quantization_config": None},
            sentence(
                "convert.quantization_mismatch",
                stores=re.compile("^stores .*_blocks$"),
                stated="missing",
            ),
        ),
        (
            pop("down_proj_scales"),
            {},
            sentence(
                "convert.mxfp4_pair_missing",
                name=re.compile("down_proj$"),
                blocks="_blocks",
                scales="_scales",
            ),
        ),
        (
            pop("down_proj_blocks"),
            {},
            sentence("convert.mxfp4_blocks_missing", half=re.compile("down_proj_scales")),
        ),
        (
            lambda t: None,
            {"quantization_config": {"quant_method": "awq"}},
            sentence("convert.mxfp4_method", value=re.compile(r"'awq'\}")),
        ),
        (
            lambda t: None,
            {"quantization_config": {**QUANTIZED, "bits": 3}},
            sentence("convert.mxfp4_config_key", unknown="bits"),
        ),
        (lambda t: None, {"hidden_size": 32}, sentence("convert.tensor_shape")),
    ],
    ids=["not said", "no scales", "no blocks", "another method", "another key", "another size"],
)
def test_what_is_not_understood_is_refused_by_name(
    change: Callable[[Tensors], Any], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        open_source(folder(tmp_path / "hf", change, **config))


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    source = open_source(folder(tmp_path / "hf", one_scale(255)))
    with raises("convert.mxfp4_scales", number=0):
        source.read("weight/layers.1.mlp.experts.0.down.weight")


def test_weights_that_are_not_quantized_though_the_config_says_so_are_refused(
    tmp_path: Path,
) -> None:
    path = write_folder(tmp_path / "hf", "gpt_oss", torch.bfloat16, quantization_config=QUANTIZED)
    with raises("convert.quantization_mismatch", stores="stores no MXFP4 blocks", stated="mxfp4"):
        open_source(path)


PUBLISHED: dict[str, Any] = {  # gpt-oss-20b's config.json
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": QUANTIZED,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}


def test_the_published_config_is_the_preset() -> None:
    model = from_hugging_face(PUBLISHED)
    assert model == preset("gpt-oss-20b")


@pytest.mark.parametrize("said", ["mxfp4", {}, [1], True, {"quant_method": "fp8"}])
def test_another_quantization_is_refused_as_it_is_written(said: object) -> None:
    with raises("convert.mxfp4_method", value=repr(said)):
        from_hugging_face(PUBLISHED | {"quantization_config": said})


@pytest.mark.parametrize("key", ["experts_per_token", "initial_context_length"])
def test_a_second_name_that_says_something_else_is_refused(key: str) -> None:
    with pytest.raises(UserError, match=key):
        from_hugging_face(PUBLISHED | {key: 3})


@pytest.mark.filterwarnings("ignore")
def test_a_small_model_of_the_published_config_computes_what_that_of_transformers_does() -> None:
    pytest.importorskip("transformers", exc_type=ImportError)
    assert "computes what that of transformers does" in check_config(PUBLISHED, "it")
