"""FP8 weights in blocks are read as their publishers dequantize them, in pieces or whole, or
refused by name."""

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
from tests.other_systems import CONFIGS, write_folder
from tests.refusals import raises, sentence
from tools.cli import main
from tools.convert.formats import open_source
from tools.convert.hf.config import from_hugging_face
from tools.convert.verify import logits

SAID: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [10, 7],
}
KV_B = "model.layers.1.self_attn.kv_b_proj.weight"
Tensors = dict[str, Tensor]


def grid(size: tuple[int, ...], block: list[int]) -> tuple[int, int]:
    return -(-size[0] // block[0]), -(-size[1] // block[1])


def dequantized(codes: Tensor, scales: Tensor, block: list[int]) -> Tensor:
    """README_WEIGHTS.md of DeepSeek-V3: each block times its scale. In float64, where the product
    is exact."""
    out = torch.empty(codes.shape, dtype=torch.float64)
    for i, j in torch.cartesian_prod(*(torch.arange(n) for n in scales.shape)).tolist():
        part = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
        out[part] = codes.double()[part] * scales[i, j].double()
    return out


def folder(
    path: Path,
    change: Callable[[Tensors], Any] = lambda tensors: None,
    said: Any = SAID,
    kind: str = "deepseek_v3",
    dtype: torch.dtype = torch.float32,
) -> Path:
    """A folder like the published ones: matrices of linear layers in FP8, routers, embeddings and
    the rest in bf16."""
    write_folder(path, kind, torch.bfloat16)
    (path / "config.json").write_text(json.dumps({**CONFIGS[kind], "quantization_config": said}))
    tensors = load_file(path / "model.safetensors")
    dice = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("_proj.weight") or "with_mqa" in name]:
        tensors[name] = (
            torch.randn(tensors[name].shape, generator=dice).mul(60).to(torch.float8_e4m3fn)
        )
        scales = (
            torch.rand(grid(tensors[name].shape, SAID["weight_block_size"]), generator=dice)
            .mul(0.01)
            .add(1e-4)
        )
        tensors[f"{name}_scale_inv"] = scales.to(dtype)
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("deepseek_v3", torch.float32),
        ("qwen3_moe", torch.bfloat16),
        ("qwen3", torch.float8_e8m0fnu),
    ],
    ids=["FP32 scales", "bf16 scales", "E8M0 scales"],
)
def test_every_weight_is_its_code_times_the_scale_of_its_block_rounded_to_bf16_once(
    kind: str, dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(tmp_path / "hf", kind=kind, dtype=dtype)
    assert main(["convert", str(path), str(tmp_path / "ours"), "--no-verify"]) == 0
    assert "weights are in FP8 blocks; they are read as bf16" in " ".join(
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
    assert after.keys() == {name for name in before if not name.endswith("_scale_inv")}
    quantized = [name for name in after if before[name].dtype == torch.float8_e4m3fn]
    assert len(quantized) > 20
    for name, tensor in after.items():
        exact = before[name].double()
        if name in quantized:
            exact = dequantized(before[name], before[f"{name}_scale_inv"], [10, 7]).float()
        assert torch.equal(tensor, exact.bfloat16()), name
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_rows_are_those_of_the_whole_wherever_they_are_cut(tmp_path: Path) -> None:
    """Blocks of 128 x 128, of which the last of a row and a column are smaller; each rank of a run
    reads some rows."""
    path = tmp_path / "hf"
    write_folder(path, "qwen3", torch.bfloat16, intermediate_size=300, hidden_size=200)
    said = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    config = {
        **CONFIGS["qwen3"],
        "intermediate_size": 300,
        "hidden_size": 200,
        "quantization_config": said,
    }
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    codes = tensors[name].mul(100).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2) + 0.01
    save_file(
        {**tensors, name: codes, f"{name}_scale_inv": scales},
        path / "model.safetensors",
        {"format": "pt"},
    )
    source = open_source(path)
    key = "weight/layers.0.mlp.up.weight"
    whole = dequantized(codes, scales, [128, 128]).float().bfloat16()
    assert torch.equal(source.read(key), whole)
    assert torch.equal(torch.cat([*source.pieces(key)]), whole)
    for top, bottom in ((0, 128), (1, 2), (100, 300), (127, 129), (128, 256), (257, 299)):
        assert torch.equal(source.rows(key, top, bottom), whole[top:bottom])


def test_blocks_that_divide_a_matrix_are_dequantized_as_by_transformers() -> None:
    module: Any = pytest.importorskip(
        "transformers.integrations.finegrained_fp8", exc_type=ImportError
    )
    if not hasattr(module, "Fp8Dequantize"):
        pytest.skip("this version of transformers has no Fp8Dequantize")
    dice = torch.Generator().manual_seed(2)
    codes = torch.randn(256, 384, generator=dice).mul(90).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=dice)
    theirs = module.Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
    assert torch.equal(theirs, dequantized(codes, scales, [128, 128]).float().bfloat16())


def drop(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def rename(name: str, other: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({other: tensors.pop(name)})


def put(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: make(tensors[name]).contiguous()})


SCALES = f"{KV_B}_scale_inv"
UNSAID = {key: value for key, value in SAID.items() if key != "weight_block_size"}
REFUSED: dict[str, tuple[Callable[[Tensors], Any], Any, str]] = {
    "no scales": (
        drop(SCALES),
        SAID,
        sentence("convert.fp8_scale_missing", name=KV_B, remedy=re.compile("fetch the folder")),
    ),
    "scales of another name": (
        rename(SCALES, f"{KV_B}_scale"),
        SAID,
        sentence(
            "convert.fp8_scale_missing",
            name=KV_B,
            remedy=re.compile(f"^if {KV_B}_scale holds .* save it under that name"),
        ),
    ),
    "no matrix": (
        drop(KV_B),
        SAID,
        sentence("convert.fp8_scale_without_weight", name=SCALES, matrix=KV_B),
    ),
    "a matrix in bf16": (
        put(KV_B, Tensor.bfloat16),
        SAID,
        sentence("convert.fp8_scale_without_weight", name=SCALES, matrix=KV_B),
    ),
    "transposed": (
        put(SCALES, Tensor.t),
        SAID,
        sentence(
            "convert.fp8_scale_shape",
            expected="[4, 2]",
            scale_shape="[2, 4]",
            cause=": they are transposed",
        ),
    ),
    "one scale too many": (
        put(SCALES, lambda s: s.repeat(2, 1)),
        SAID,
        sentence("convert.fp8_scale_shape", expected="[4, 2]", scale_shape="[8, 2]"),
    ),
    "another block": (
        lambda t: None,
        UNSAID,
        sentence("convert.fp8_scale_shape", block_rows=128, block_columns=128, expected="[1, 1]"),
    ),
    "scales of bytes": (
        put(SCALES, Tensor.byte),
        SAID,
        sentence("convert.fp8_scale_dtype", scales="_scale_inv", dtype="uint8"),
    ),
    "per matrix": (
        lambda t: None,
        {**SAID, "weight_block_size": None},
        sentence("convert.fp8_block_null"),
    ),
    "a size of a block": (
        lambda t: None,
        {**SAID, "weight_block_size": [0, 7]},
        sentence("convert.fp8_block_size"),
    ),
    "static": (
        lambda t: None,
        {**SAID, "activation_scheme": "static"},
        sentence("convert.fp8_config_key", key="activation_scheme", value="'static'"),
    ),
    "another key": (
        lambda t: None,
        {**SAID, "bits": 4},
        sentence("convert.fp8_config_key", key="bits", value=4),
    ),
    "kept": (
        lambda t: None,
        {**SAID, "modules_to_not_convert": ["kv_b_proj"]},
        sentence("convert.fp8_excluded_weight"),
    ),
    "kept by a pattern": (
        lambda t: None,
        {**SAID, "modules_to_not_convert": ["lm_head", "model.layers.*.self_attn"]},
        sentence("convert.fp8_excluded_weight"),
    ),
    "no FP8": (
        lambda t: [
            t.pop(name) if "_scale_inv" in name else t.update({name: t[name].bfloat16()})
            for name in [*t]
        ],
        SAID,
        sentence("convert.fp8_config_without_weights"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(case: str, tmp_path: Path) -> None:
    change, said, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        open_source(folder(tmp_path / "hf", change, said))


def test_fp8_weights_of_which_the_config_says_nothing_are_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "hf")
    (path / "config.json").write_text(json.dumps(CONFIGS["deepseek_v3"]))
    with raises("convert.fp8_without_config"):
        open_source(path)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_scale_that_is_no_number_above_0_is_refused(wrong: float, tmp_path: Path) -> None:
    path = folder(tmp_path / "hf", lambda tensors: tensors[SCALES][3, 1:].fill_(wrong))
    with pytest.raises(
        UserError,
        match=sentence("convert.fp8_scale", name=KV_B, scales="_scale_inv"),
    ):
        open_source(path).read("weight/layers.1.attention.key_up.weight")


@pytest.mark.parametrize(
    "make", [lambda c: c.fill_(float("nan")), lambda c: c.fill_(448)], ids=["NaN", "overflow"]
)
def test_a_number_that_bf16_does_not_hold_is_refused(
    make: Callable[[Tensor], Any], tmp_path: Path
) -> None:
    def change(tensors: Tensors) -> None:
        make(tensors[KV_B][35:36, 9:10])
        tensors[SCALES][3, 1] = 3.4e38 / 440

    with pytest.raises(UserError, match=sentence("convert.fp8_not_finite", name=KV_B)):
        open_source(folder(tmp_path / "hf", change)).read("weight/layers.1.attention.key_up.weight")


def in_16_bits(tensors: Tensors) -> None:
    """Layer 1 as a publisher leaves it who does not quantize it."""
    for name in [
        name
        for name in tensors
        if name.startswith("model.layers.1.") and f"{name}_scale_inv" in tensors
    ]:
        tensors[name] = tensors[name].bfloat16()
        del tensors[f"{name}_scale_inv"]


@pytest.mark.parametrize(
    ("kept", "change"),
    [
        (["lm_head", "model.layers.0.mlp.gate", "gate", "q_pro"], lambda tensors: None),
        (["model.layers.1"], in_16_bits),
        ([], in_16_bits),
        (None, lambda tensors: None),
    ],
)
def test_modules_that_are_not_converted_are_found_by_whole_names_only(
    kept: list[str] | None, change: Callable[[Tensors], Any], tmp_path: Path
) -> None:
    """`gate` is not `gate_proj`. What is in 16 bits without being named is read too, as routers
    are."""
    source = open_source(folder(tmp_path / "hf", change, {**SAID, "modules_to_not_convert": kept}))
    assert {source.dtype(key) for key in source.keys("weight")} == {torch.bfloat16}


METHODS = (
    "gptq",
    "awq",
    "bitsandbytes",
    "compressed-tensors",
    "mxfp4",
    "aqlm",
    "hqq",
    "quanto",
    "torchao",
    "modelopt",
)
METHODS += (
    "fbgemm_fp8",
    "eetq",
    "higgs",
    "bitnet",
    "auto-round",
    "quark",
    "nvfp4",
    "none that is known",
)


@pytest.mark.parametrize("method", METHODS)
def test_every_other_method_is_refused_by_its_name_with_a_way_out(method: str) -> None:
    said = {"quant_method": method, "bits": 4}
    with pytest.raises(
        UserError,
        match=sentence(
            "convert.quantized_unreadable",
            description=re.compile(re.escape(f"quant_method = '{method}'")),
            remedy=re.compile("^convert"),
        ),
    ):
        from_hugging_face(CONFIGS["llama"] | {"quantization_config": said})


@pytest.mark.parametrize(
    "file", ["quantize_config.json", "quant_config.json", "hf_quant_config.json"]
)
def test_a_file_that_says_that_weights_are_quantized_is_refused_by_its_name(
    file: str, tmp_path: Path
) -> None:
    path = write_folder(tmp_path / "hf", "llama")
    (path / file).write_text("{}")
    with pytest.raises(
        UserError,
        match=sentence("convert.quantized_by_config", path=file, remedy=re.compile("^convert")),
    ):
        open_source(path)


def test_logits_are_compared_without_a_word_of_transformers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers refuses smaller last blocks, and does not round to bf16: so ours computes that
    side."""
    pytest.importorskip("transformers", exc_type=ImportError)
    path = folder(tmp_path / "hf", kind="qwen3")
    assert (
        main(
            [
                "convert",
                str(path),
                str(tmp_path / "back"),
                "--to",
                "hf",
                "--no-verify",
                "--verify",
                "logits",
            ]
        )
        == 0
    )
    said = capfd.readouterr()
    assert (
        "is in FP8, which transformers rounds otherwise: megaprec ran it" in said.out
        and not said.err
    )


def test_a_folder_that_transformers_does_not_load_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("transformers", exc_type=ImportError)
    path = write_folder(tmp_path / "hf", "llama")
    (path / "generation_config.json").write_text("[1]")
    with raises("convert.verify_not_loaded"):
        logits(path, torch.zeros(1, 3, dtype=torch.int64), torch.float32)
