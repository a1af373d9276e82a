"""A run keeps the held-out part that it began with, whatever the default is."""

from pathlib import Path

import numpy as np
import pytest

from megaprec.checkpoint.reader import Store
from megaprec.tokens.samples import Samples
from tests.refusals import shows
from tests.runs import checkpoint, edit_index, steps, train, write_run
from tools.config.run_file import load_run
from tools.training.corpus import open_corpus

EVALUATED = ("train.eval_every=2", "train.steps=2", "checkpoint.every=2")


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run file of a run whose checkpoint is that of a version with one rule, which it does not
    record."""
    file = write_run(tmp_path_factory.mktemp("old"))
    assert train(file, *EVALUATED, "data.held_out_from=end") == 0

    def without_rule(index: dict[str, dict[str, object]]) -> None:
        assert index["data"].pop("held_out_from") == "end"
        del index["run"]  # of keys that a version before did not have

    edit_index(checkpoint(file.parent / "run", 2), without_rule)
    return file


def held_out(file: Path, *overrides: str) -> list[int]:
    samples = open_corpus(load_run(file, overrides)).held_out
    assert isinstance(samples, Samples)
    return samples.chosen.numbers(np.arange(len(samples))).tolist()


def test_a_run_from_an_older_version_keeps_the_last_part(old: Path, tmp_path: Path) -> None:
    last = held_out(old)
    assert last == list(range(last[0], last[0] + len(last)))
    begun = held_out(old, f"train.folder={tmp_path}")
    assert begun != last and len(begun) == len(last)
    branched = held_out(old, f"train.folder={tmp_path}", f"train.branch_from={old.parent}/run")
    assert branched == last
    explicit = held_out(old, f"train.folder={tmp_path}", "data.held_out_from=end")
    assert explicit == last


def test_another_rule_on_resume_is_refused_with_a_way_out(
    old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("data.held_out_from=everywhere", "train.steps=3")
    before = steps(old.parent / "run")
    capsys.readouterr()
    assert train(old, *asked) == 2
    told = capsys.readouterr().err.splitlines()
    change = 'data.held_out_from: "end" -> "everywhere": text that was trained on may be evaluated'
    assert told[0] == change
    assert shows(told[1], "training.changes_on_resume", flags="--allow data")
    assert steps(old.parent / "run") == before
    assert train(old, "train.steps=4", "train.eval_every=2") == 0
    (path,) = (old.parent / "run" / "checkpoints").glob("step_00000004")
    assert Store(path).index["data"]["held_out_from"] == "end"
