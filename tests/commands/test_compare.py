"""`megaprec compare`: several runs in one picture, and where they ended."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megaprec.errors import Problem
from tests.refusals import shows
from tests.runs import losses, train, write_run
from tools import cli
from tools.analysis.plots.compare_plot import (
    COLORS,
    LAST,
    Curve,
    by_loss,
    drawn_separately,
    drawn_together,
)
from tools.analysis.plots.drawing import Line, Text
from tools.commands import compare
from tools.commands.compare import read_curves
from tools.config.run_file import END, SAVED
from tools.journal.records import METRICS, no_run

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
    return {
        "step": step,
        "loss": loss,
        "outcome": outcome,
        "grad_norm": 1.0,
        "loss_scale": 1.0,
        **more,
    }


@pytest.mark.slow
def test_runs_in_several_modes_make_one_picture_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image  # noqa: PLC0415  # comes with matplotlib, which is optional

    file = write_run(tmp_path)
    picture = tmp_path / "modes.png"
    folders = [tmp_path / name for name in MODES]
    for folder, keys in zip(folders, MODES.values(), strict=True):
        assert train(file, *keys, f"train.folder={folder}", "checkpoint.every=0") == 0
    capsys.readouterr()
    assert cli.main(["compare", *map(str, folders), "-o", str(picture)]) == 0
    said = capsys.readouterr().out
    for folder in folders:
        mean = sum(losses(folder)) / len(losses(folder))
        assert f"{mean:.4f}" in next(
            line for line in said.splitlines() if line.startswith(f"  {folder.name} ")
        )
    colors = {color for _, color in Image.open(picture).convert("RGB").getcolors(1 << 24) or ()}
    drawn = [tuple(bytes.fromhex(color[1:])) in colors for color in COLORS[: len(MODES) + 1]]
    assert drawn == [True] * len(MODES) + [False]


def test_the_final_loss_is_the_mean_of_the_last_applied_steps() -> None:
    steps = [record(n, float(n)) for n in range(1, 31)] + [record(31, math.inf, "skipped_overflow")]
    curve = Curve(
        "a", [*steps, record(32, 100.0, eval_loss=3.5), record(33, math.nan, "skipped_overflow")]
    )
    assert curve.final == (sum(range(30 - LAST + 2, 31)) + 100.0) / LAST
    assert (curve.skipped, curve.held_out) == (2, 3.5)
    none = Curve("b", [record(1, math.nan, "skipped_overflow")])
    assert math.isnan(none.final) and math.isnan(none.held_out)
    assert by_loss([none, curve]) == [curve, none]


def texts_of(curves: Sequence[Curve], against: Curve) -> list[str]:
    drawing = drawn_separately(curves, "steps", against)
    return [shape.text for shape in drawing.shapes if isinstance(shape, Text)]


def test_beside_a_name_stands_the_difference_that_is_drawn() -> None:
    """Over the newest steps that both runs have applied."""
    base = Curve("base", [record(n, 3.0) for n in range(1, 61)])
    lower = Curve("lower", [record(n, 2.75) for n in range(1, 61)])
    longer = [record(n, 3.5 if n <= 60 else 1.0) for n in range(1, 2001)]
    longer[58] = record(59, 50.0, "skipped_overflow")
    none = Curve("none", [record(n, 1.0) for n in range(100, 200)])
    texts = texts_of([lower, Curve("longer", longer), none], base)
    assert "lower  -0.2500" in texts
    assert "longer  +0.5000" in texts
    assert "none  no common step" in texts
    assert not any("2.7500" in text for text in texts)


def test_differences_are_drawn_over_the_steps_that_both_runs_have() -> None:
    base = Curve("base", [record(n, 3.0 + 0.01 * n) for n in range(1, 61)])
    longer = Curve("longer", [record(n, 3.5) for n in range(1, 2001)])
    same = Curve("same", [record(n, 3.0 + 0.01 * n) for n in range(1, 2001)])
    for curves in ([longer], [same], [longer, same]):
        numbers = [text.replace(",", "") for text in texts_of(curves, base)]
        steps = [int(number) for number in numbers if number.isdecimal()]
        assert max(steps) <= 80, numbers


def test_losses_that_the_table_leaves_out_are_not_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [written(tmp_path / name, [record(n, 2.0) for n in range(1, 9)]) for name in "ab"]
    monkeypatch.setattr(compare, "has_other_tokens", lambda names, runs: True)
    picture = tmp_path / "picture.png"
    for more in ([], ["--against", str(folders[1])]):
        asked = ["compare", *map(str, folders), "-o", str(picture), *more]
        assert cli.main(asked) == 2
        assert shows(capsys.readouterr().err, "command.picture_of_other_text", path=picture)
        assert not picture.exists()
    assert cli.main(["compare", *map(str, folders)]) == 0


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    folders = [written(tmp_path / where / "run", [record(1, 2.0)]) for where in "ab"]
    assert [curve.name for curve in read_curves(folders)] == list(map(str, folders))


def test_a_run_that_is_named_twice_is_compared_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was said to differ from itself in each key."""
    run = written(tmp_path / "run", [record(1, 2.0)])
    (run / "run.toml").write_text("[train]\nsteps = 1\n")
    assert cli.main(["compare", str(run), f"{run}/../run", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [row["run"] for row in said["runs"]] == ["run"] and not said["keys"]


def test_a_run_file_that_is_cut_is_named_and_tells_no_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut = (written(tmp_path / name, [record(1, 2.0)]) for name in ("whole", "cut"))
    text = "\n".join([SAVED, "[train]", "steps = 7  # file", "seed = 3  # file", END, ""])
    (whole / "run.toml").write_text(text)
    for length in (len(SAVED) - 5, text.index("seed")):
        (cut / "run.toml").write_text(text[:length])
        for folders in ([cut], [whole, cut]):
            assert cli.main(["compare", *map(str, folders), "--json"]) == 0
            told = json.loads(capsys.readouterr().out)
            refusal = Problem.of("config.run_file_cut", path=cut / "run.toml", end=END)
            assert refusal in told["notes"]
            assert told["keys"] == {}


def test_what_cannot_be_compared_is_said_in_one_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written(tmp_path / "run", [record(1, 2.0)])
    empty = written(tmp_path / "empty", [])
    absent = tmp_path / "no"
    assert (
        cli.main(["compare", str(run), str(empty), str(absent), "-o", str(tmp_path / "a.png")]) == 2
    )
    lines = capsys.readouterr().err.splitlines()
    assert lines == [no_run(empty), no_run(absent)]
    assert cli.main(["compare", str(run), "-o", "a.pdf"]) == 2
    assert shows(capsys.readouterr().err, "plots.suffix", path="a.pdf", suffixes=".png")
    folder = tmp_path / "folder.png"
    folder.mkdir()
    assert cli.main(["compare", str(run), "-o", str(folder)]) == 2
    assert shows(capsys.readouterr().err, "plots.is_folder", path=folder)
    folder.rmdir()
    assert cli.main(["compare", str(run), "-o", str(absent / "a.png")]) == 2
    assert shows(capsys.readouterr().err, "command.plot_folder", parent=absent)
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.cases(5)
@pytest.mark.parametrize("count", [2, 8, 9])
@pytest.mark.parametrize("options", [[], ["--over", "tokens"], ["--against", "run0"]])
def test_any_number_of_runs_is_drawn_without_a_warning(
    count: int,
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for number in range(count):
        steps = [record(n, 5.0 - n / 9 + number, tokens=8 * n) for n in range(1, 5 + number)]
        written(
            Path(f"run{number}"), [*steps, record(99, math.nan, "skipped_overflow", tokens=800)]
        )
    assert cli.main(["compare", *(f"run{n}" for n in range(count)), *options, "-o", "a.png"]) == 0
    assert (tmp_path / "a.png").stat().st_size > 5_000
    assert not [warning for warning in recwarn if "layout" in str(warning.message)]


def test_a_table_needs_no_picture_and_the_reference_is_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, loss in (("a", 2.0), ("b", 3.0)):
        written(Path(name), [record(1, loss)])
    assert cli.main(["compare", "a", "b", "--against", "b"]) == 0
    said = capsys.readouterr().out
    assert said.index("2.0000") < said.index("3.0000") and "written" not in said
    with (tmp_path / "b" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write("damaged\n")
    for other in ("b", str(tmp_path / "b")):
        assert cli.main(["compare", "a", "b", "--against", other]) == 0
        assert capsys.readouterr().out.count("line 2 is no record") == 1
    assert cli.main(["compare", "a", "b", "--over", "steps"]) == 2
    assert capsys.readouterr().err == f"{Problem.of('command.over_without_plot', over='steps')}\n"
    assert cli.main(["compare", "b", "--against", "b"]) == 2
    assert capsys.readouterr().err == f"{Problem.of('command.against_alone', against='b')}\n"


def test_lines_end_at_the_loss_that_stands_beside_their_names() -> None:
    """A flat run of the loss that a noisy run ends with ends at the same height."""
    noisy = [record(n, 5.0 - 0.01 * n + 0.3 * (n % 7)) for n in range(1, 401)]
    noisy.append(record(401, 9.0, "skipped_spike"))
    falling = Curve("falling", noisy)
    flat = Curve("flat", [record(n, falling.final) for n in range(1, 401)])
    shapes = drawn_together([falling, flat], "steps").shapes
    of_labels = [shape for shape in shapes if isinstance(shape, Line) and shape.color in COLORS]
    assert len(of_labels) == 2
    first, second = (line.y1 for line in of_labels)
    assert first == pytest.approx(second, abs=0.01)
