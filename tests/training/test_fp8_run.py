"""FP8 through the command: its checkpoints go on bit for bit, in any layout and with or without
FP8; bad input."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from megaprec.checkpoint.atomic import latest
from tests.refusals import sentence, shows
from tests.runs import (
    checkpoint,
    edit_index,
    losses,
    rewind,
    steps,
    tensors,
    train,
    train_on,
    write_run,
)

KEYS = (
    "fp8.kind=delayed",
    "fp8.pad=true",
    "fp8.history_length=8",
    "precision.compute=bf16",
    "log.progress=false",
)
FP32 = (*KEYS[:3], "precision.compute=fp32")
BF16 = ("precision.compute=bf16", "fp8.kind=current")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("fp8"))


@pytest.fixture(scope="module")
def whole(file: Path) -> Path:
    """Six steps in FP8 on one process."""
    return train_on(file, *KEYS, "checkpoint.keep=9")


def into(folder: Path) -> str:
    return f"train.folder={folder}"


def require_bitwise_resume(file: Path, whole: Path, folder: Path) -> None:
    again = train_on(file, *KEYS, into(rewind(whole, folder, 3)))
    assert steps(again) == steps(whole)
    ours = tensors(checkpoint(again, 6))
    theirs = tensors(checkpoint(whole, 6))
    assert ours.keys() == theirs.keys()
    assert sum(key.startswith("fp8/") for key in ours) == 2 * 3 * 8
    assert all(torch.equal(values, theirs[key]) for key, values in ours.items())


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit(file: Path, whole: Path, tmp_path: Path) -> None:
    require_bitwise_resume(file, whole, tmp_path / "again")


def test_a_checkpoint_is_plain_float32_tensors_by_logical_name(whole: Path) -> None:
    found = tensors(checkpoint(whole, 6))
    scale, history = (
        found[f"fp8/layers.1.mlp.down.weight.gradient.{what}"] for what in ("scale", "history")
    )
    assert (scale.shape, history.shape, history.dtype) == ((1,), (1, 8), torch.float32)
    assert history[0, :2].tolist() == [0, 0] and (history[0, 2:] > 0).all()
    assert scale.item() == pytest.approx(57344 / history.max().item())
    assert (checkpoint(whole, 6) / "fp8-00000.safetensors").is_file()


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout_with_the_same_scales(file: Path, tmp_path: Path) -> None:
    """The first step after the change has the scales of before, and a loss that differs in the last
    bits of FP32."""
    one = train_on(file, *FP32, into(tmp_path / "one"), "checkpoint.keep=9")
    for n, layout in enumerate(({"tensor": 2, "pipeline": 2}, {"data": 2})):
        other = train_on(file, *FP32, into(rewind(one, tmp_path / f"other{n}", 3)), **layout)
        assert losses(other)[3] == pytest.approx(losses(one)[3], rel=1e-5)
        assert losses(other)[4:] == pytest.approx(losses(one)[4:], rel=1e-2)
        ours = tensors(checkpoint(other, 6))
        theirs = tensors(checkpoint(one, 6))
        histories = [key for key in theirs if key.endswith(".history")]
        assert len(histories) == 3 * 8
        for key in histories:
            assert torch.equal(ours[key][0, 2:5], theirs[key][0, 2:5]), (
                "three steps before the change"
            )
            torch.testing.assert_close(
                ours[key][0, 5], theirs[key][0, 5], rtol=1e-5, atol=0, msg=key
            )


@pytest.mark.slow
def test_a_bf16_checkpoint_begins_a_run_in_fp8_that_calibrates_first(
    file: Path, tmp_path: Path
) -> None:
    plain = train_on(file, *KEYS[3:], into(tmp_path / "plain"), "checkpoint.keep=9")
    ours = train_on(file, *KEYS, "fp8.calibrate=2", into(rewind(plain, tmp_path / "fp8", 3)))
    assert losses(ours)[3:5] == losses(plain)[3:5] and losses(ours)[5] != losses(plain)[5]
    assert losses(ours)[5] == pytest.approx(losses(plain)[5], rel=1e-2)
    found = tensors(checkpoint(ours, 6))
    assert (found["fp8/layers.0.mlp.gate.weight.input.history"][0] > 0).sum() == 3
    index = json.loads((checkpoint(ours, 6) / "checkpoint.json").read_text())
    assert index["fp8"] == {"rolls": 3}


@pytest.mark.slow
def test_an_fp8_checkpoint_goes_on_without_fp8_and_with_another_history(
    file: Path, whole: Path, tmp_path: Path
) -> None:
    plain = train_on(file, *KEYS[3:], into(rewind(whole, tmp_path / "plain", 3)))
    assert losses(plain)[3:] != losses(whole)[3:] and losses(plain)[3:] == pytest.approx(
        losses(whole)[3:], rel=1e-2
    )
    assert not any(key.startswith("fp8/") for key in tensors(checkpoint(plain, 6)))
    short = train_on(
        file, *KEYS, "fp8.history_length=2", into(rewind(whole, tmp_path / "short", 3))
    )
    name = "fp8/layers.0.attention.output.weight.weight.history"
    assert tensors(checkpoint(short, 6))[name].shape == (1, 2)
    assert losses(short)[3] == losses(whole)[3], "the scale is that of the longer history"


def test_damaged_scales_are_refused(
    file: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = rewind(whole, tmp_path / "damaged", 3)
    path = latest(folder / "checkpoints")
    assert path
    name = "fp8/layers.0.mlp.down.weight.input.history"
    edit_index(path, lambda index: index["tensors"][name].update(chunks=[]))
    assert train(file, *KEYS, into(folder)) == 2
    assert shows(
        capsys.readouterr().err,
        "checkpoint.tensor_incomplete",
        key="fp8/layers.0.mlp.down.weight.input.history",
    )


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (["fp8.kind=int8"], re.escape('fp8.kind = "int8" (command line): must be')),
        (
            ["fp8.kind=delayed", "fp8.format=e5m2"],
            re.escape('fp8.format = "e5m2" (command line): must be'),
        ),
        (
            ["fp8.kind=delayed", "fp8.history_length=0"],
            re.escape("fp8.history_length = 0 (command line): must be greater than 0"),
        ),
        (
            ["fp8.kind=delayed", "precision.compute=fp64"],
            "precision." + sentence("precision.fp8_in_fp64"),
        ),
        (
            ["fp8.kind=mx", 'fp8.wide=["layers.9.*"]'],
            sentence("training.fp8_wide_unused", pattern="layers.9.*"),
        ),
        (
            ["fp8.kind=mx", 'fp8.wide=["*.key.weight"]'],
            sentence("fp8.fp8_wide_part_of_weight"),
        ),
        (
            ["fp8.kind=current", "fp8.margin=1"],
            "fp8." + sentence("fp8.margin", margin=1),
        ),
        (
            ["fp8.kind=mx", "fp8.backend=transformer_engine"],
            "fp8." + sentence("fp8.backend_kind", backend="transformer_engine"),
        ),
        (["fp8.kind=mx", "fp8.calibrate=2"], "fp8." + sentence("fp8.calibrate", calibrate=2)),
        (
            ["fp8.kind=mx", "fp8.parameters=true"],
            sentence(
                "training.fp8_not_computed",
                field="parameters",
                origin="command line",
                reason=re.compile(r"with fp8\.kind = mx a weight"),
            ),
        ),
        (
            ["fp8.kind=delayed", "fp8.parameters=true", "fp8.calibrate=1"],
            "fp8." + sentence("fp8.parameters_calibrated"),
        ),
        (
            [*BF16, "fp8.parameters=true", "precision.masters=none"],
            sentence("precision.fp8_masters"),
        ),
        (
            [
                "precision.nemo.recipe=bf16_with_fp8_mixed",
                "precision.nemo.fp8_dot_product_attention=true",
            ],
            sentence("training.fp8_not_computed", key="precision.nemo.fp8_dot_product_attention"),
        ),
        (
            ["precision.nemo.recipe=bf16_with_mxfp8_mixed"],
            sentence("training.fp8_not_computed", key="precision.nemo.fp8_param_gather"),
        ),
    ],
    ids=str,
)
def test_what_fp8_cannot_do_is_one_line_before_anything_is_written(
    keys: list[str], line: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(file, *keys, into(tmp_path / "run")) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert re.search(line, said)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mx", "blockwise", "delayed"])
def test_a_run_that_goes_on_keeps_its_format_and_says_so_where_it_is_unusual(
    kind: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint of the time when every kind was hybrid; a key still decides."""
    keys = (f"fp8.kind={kind}", "precision.compute=bf16", "fp8.pad=true", "checkpoint.keep=9")
    hybrid = train_on(file, *keys, "fp8.format=hybrid", into(tmp_path / "hybrid"))
    capsys.readouterr()
    folder = rewind(hybrid, tmp_path / "again", 3)
    assert train(file, *keys, "parallel.tensor=1", into(folder)) == 0
    said = capsys.readouterr().out
    assert losses(folder) == losses(hybrid), "bit for bit"
    assert "fp8.format:" not in said
    assert ("the run keeps it" in said) == (kind != "delayed")
    other = rewind(hybrid, tmp_path / "other", 3)
    assert train(file, *keys, "fp8.format=auto", "parallel.tensor=1", into(other)) == 0
    assert (losses(other) == losses(hybrid)) == (kind == "delayed")


@pytest.mark.slow
def test_a_run_says_what_is_in_fp8_and_what_is_not(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = (
        "fp8.first_layers=1",
        "parallel.tensor=1",
        "train.steps=1",
        "fp8.kind=mx",
        "precision.compute=bf16",
    )
    assert train(file, *keys, into(tmp_path / "run")) == 0
    said = capsys.readouterr().out
    assert "fp8        mx, e4m3: products of 0 of 8 weights\n" in said
    assert "layers.0.mlp.down.weight: in bf16, for fp8.first_layers = 1\n" in said
    reason = "16 outputs (dim 0) are no multiple of 32, and fp8.pad = false"
    assert f"layers.1.mlp.down.weight: in bf16, for {reason}\n" in said
    shutil.rmtree(tmp_path / "run")
    assert train(file, *keys[2:], "fp8.pad=true", into(tmp_path / "run")) == 0
    said = capsys.readouterr().out
    assert "products of 8 of 8 weights\n" in said and ": in bf16, for" not in said
