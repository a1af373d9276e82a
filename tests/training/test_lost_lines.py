"""A record file that was cut at the end of a line, where no line shows it, is told from the other
files of its run."""

import json
import shutil
from pathlib import Path

import pytest

from tests.runs import train, write_run
from tools import cli
from tools.journal.records import EVALUATIONS, METRICS, odd_records

EVALUATED = ("train.eval_every=1", "train.eval_samples=4")


def drop_last(path: Path, count: int) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-count]))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_run(tmp_path_factory.mktemp("lost"))
    assert train(path, *EVALUATED, "data.cache=") == 0
    return path


@pytest.fixture
def run(file: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(file.parent / "run", tmp_path / "run"))


def told(run: Path, capfd: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The notes of the commands that read these records."""
    capfd.readouterr()
    notes = list[list[str]]()
    for command in ("evaluate", "compare"):
        assert cli.main([command, str(run), "--json"]) == 0
        notes.append(json.loads(capfd.readouterr().out)["notes"])
    return notes


def test_a_whole_run_has_lost_nothing(run: Path) -> None:
    assert odd_records(run) == []


def test_lost_evaluations_are_named_also_on_a_resume(
    file: Path, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    drop_last(run / EVALUATIONS, 2)
    note = f"{run / EVALUATIONS} has no record of steps 5 and 6"
    for notes in told(run, capfd):
        assert note in notes
    keys = [*EVALUATED, "data.cache=", f"train.folder={run}", "train.steps=7"]
    assert train(file, *keys) == 0
    assert f"note       {note}\n" in capfd.readouterr().out


def test_steps_that_end_before_their_evaluations_are_named(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    drop_last(run / METRICS, 2)
    note = f"{run / METRICS} ends at step 4, and {EVALUATIONS} at step 6"
    for notes in told(run, capfd):
        assert note in notes
