"""`megaprec compare`: several runs in one picture, and where they ended."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.runs import losses, train, write_run
from tools import cli
from tools.commands.compare import read_curves
from tools.journal.records import METRICS
from tools.plots.compare_plot import COLORS, LAST, Curve, by_loss

MODES = {
    "fp32": ["precision.compute=fp32"],
    "FSDP bf16": ['precision.smp.mixed_precision.param_dtype="bfloat16"'],
    "TORCH $1_$2": ["precision.colossalai.fp16.mode=TORCH"],
}


def written(folder: Path, records: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    (folder / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def record(step: int, loss: Any, outcome: str = "applied", **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": loss, "outcome": outcome, "grad_norm": 1.0, "loss_scale": 1.0, **more}


def test_runs_in_several_modes_make_one_picture_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image  # noqa: PLC0415  # comes with matplotlib, which is optional

    file, picture = write_run(tmp_path), tmp_path / "modes.png"
    folders = [tmp_path / name for name in MODES]
    for folder, keys in zip(folders, MODES.values(), strict=True):
        assert train(file, *keys, f"train.folder={folder}", "checkpoint.every=0") == 0
    capsys.readouterr()
    assert cli.main(["compare", *map(str, folders), "-o", str(picture)]) == 0
    said = capsys.readouterr().out
    for folder in folders:
        mean = sum(losses(folder)) / len(losses(folder))
        assert f"{mean:.4f}" in next(line for line in said.splitlines() if folder.name in line)
    colors = {color for _, color in Image.open(picture).convert("RGB").getcolors(1 << 24) or ()}
    drawn = [tuple(bytes.fromhex(color[1:])) in colors for color in COLORS[: len(MODES) + 1]]
    assert drawn == [True] * len(MODES) + [False]


def test_the_final_loss_is_the_mean_of_the_last_applied_steps() -> None:
    steps = [record(n, float(n)) for n in range(1, 31)] + [record(31, math.inf, "skipped_overflow")]
    curve = Curve("a", [*steps, record(32, 100.0, eval_loss=3.5), record(33, math.nan, "skipped_overflow")])
    assert curve.final == (sum(range(30 - LAST + 2, 31)) + 100.0) / LAST
    assert (curve.skipped, curve.held_out) == (2, 3.5)
    none = Curve("b", [record(1, math.nan, "skipped_overflow")])
    assert math.isnan(none.final) and math.isnan(none.held_out)
    assert by_loss([none, curve]) == [curve, none]


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    folders = [written(tmp_path / where / "run", [record(1, 2.0)]) for where in "ab"]
    assert [curve.name for curve in read_curves(folders)] == list(map(str, folders))


def test_what_cannot_be_compared_is_said_in_one_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, empty, absent = written(tmp_path / "run", [record(1, 2.0)]), written(tmp_path / "empty", []), tmp_path / "no"
    assert cli.main(["compare", str(run), str(empty), str(absent), "-o", str(tmp_path / "a.png")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"{f} has no steps in {METRICS}: give run folders" for f in (empty, absent)]
    assert cli.main(["compare", str(run), "-o", "a.pdf"]) == 2
    assert capsys.readouterr().err == "--output a.pdf: the plot is written as .png\n"
    assert cli.main(["compare", str(run), "-o", str(absent / "a.png")]) == 2
    assert f"there is no folder {absent}" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.png"))
