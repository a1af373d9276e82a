"""Checkpoints of older versions resume: each step has the loss that its own version computed.

A folder of `older` is a run of three of six steps by the commit of its date, whose metrics.jsonl
has all six.
"""

import os
import shutil
from pathlib import Path

import pytest

from tests.refusals import shows
from tests.runs import losses, train, train_on
from tools.journal.records import read_metrics

OLDER = Path(__file__).parent / "older"
VERSIONS = sorted(folder.name for folder in OLDER.iterdir())
WITHOUT_DIGEST = ("2026-11-22", "2026-11-24")  # versions that note none of a text
# The norm is summed in another order since.
NORM_TOLERANCE = 1e-6
# on a processor with other instructions, whose products of FP16 add in another order
OTHER_PROCESSOR = 1e-5


@pytest.fixture
def copied(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an older run, in which this process works; the text has another time."""
    folder = tmp_path / "older"
    shutil.copytree(OLDER / request.param, folder)
    os.utime(folder / "text.txt", (1, 1))
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("copied", VERSIONS, indirect=True)
def test_a_run_of_an_older_version_goes_on_with_the_same_losses(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = read_metrics(copied / "run")
    (copied / "run/data/text.idx").unlink()
    assert train(copied / "run.toml") == 0
    found = read_metrics(copied / "run")
    said = capsys.readouterr().out
    is_same_processor = "changed    processor: " not in said
    tolerance = 0 if is_same_processor else OTHER_PROCESSOR
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=tolerance, abs=0)
        assert ours["grad_norm"] == pytest.approx(
            theirs["grad_norm"], rel=max(tolerance, NORM_TOLERANCE)
        )
    assert "steps 4 to 6 are left" in said
    assert "changed    fp8." not in said, "the run has no FP8"


@pytest.mark.cases(1)
@pytest.mark.parametrize("copied", VERSIONS[::-1], indirect=True)
def test_a_run_of_an_older_version_goes_on_in_another_layout(copied: Path) -> None:
    expected = losses(copied / "run")
    (copied / "run/data/text.idx").unlink()
    folder = train_on(copied / "run.toml", tensor=2, data=2)
    assert losses(folder) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("copied", WITHOUT_DIGEST, indirect=True)
def test_a_text_without_a_digest_is_refused_with_the_way_out(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(copied / "run.toml") == 2
    said = capsys.readouterr().err
    assert shows(said, "training.other_text", key="data.source")
    assert f"remove {Path('run/data/text.idx')}" in said
