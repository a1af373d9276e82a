"""A run on random windows reads the same ones in every layout and after every resume, and goes over
to them only where that is asked for."""

from pathlib import Path

import pytest

from megaprec.checkpoint.reader import Store
from tests.refusals import shows
from tests.runs import checkpoint, edit_index, rewind, steps, tensors, train, train_on, write_run

QUICK = (
    "data.windows=random",
    "model.layers=1",
    "train.global_batch=4",
    "train.steps=4",
    "checkpoint.every=1",
    "precision.compute=fp32",
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file with a run of four steps, and a checkpoint after each."""
    file = write_run(tmp_path_factory.mktemp("windows"))
    assert train(file, *QUICK) == 0
    return file


def losses(folder: Path) -> list[float]:
    return [step["loss"] for step in steps(folder)]


def test_a_run_has_the_same_windows_in_other_layouts(file: Path, tmp_path: Path) -> None:
    whole = losses(file.parent / "run")
    layout = {"tensor": 2, "data": 2}
    run = train_on(file, *QUICK, f"train.folder={tmp_path / 'ranks'}", "train.steps=2", **layout)
    assert losses(run) == pytest.approx(whole[:2], rel=1e-5)
    tiled = (*QUICK, "data.windows=tiled", "train.steps=2", f"train.folder={tmp_path / 'tiled'}")
    assert train(file, *tiled) == 0
    assert losses(tmp_path / "tiled") != pytest.approx(whole[:2], rel=1e-3)


@pytest.mark.parametrize("step", [1, 3])
def test_a_run_that_resumes_draws_the_windows_of_the_run_that_went_on(
    step: int, file: Path, tmp_path: Path
) -> None:
    run = rewind(file.parent / "run", tmp_path / "run", step)
    assert train(file, *QUICK, f"train.folder={run}") == 0
    assert steps(run) == steps(file.parent / "run")
    before = tensors(checkpoint(file.parent / "run", 4))
    after = tensors(checkpoint(run, 4))
    assert all((before[name] == after[name]).all() for name in before)


def test_a_resume_with_other_windows_is_refused_unless_that_is_allowed(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = rewind(file.parent / "run", tmp_path / "run", 3)
    changed = (*QUICK, f"train.folder={run}", "data.windows=tiled")
    assert train(file, *changed) == 2
    said = capfd.readouterr().err
    assert 'data.windows: "random" -> "tiled": samples are cut from the text in another way' in said
    assert shows(said, "training.changes_on_resume", flags="--allow windows")
    assert train(file, *changed, "--allow", "windows") == 0
    assert 'changed    data.windows: "random" -> "tiled": ' in capfd.readouterr().out
    assert Store(checkpoint(run, 4)).index["data"]["windows"] == "tiled"


def test_a_checkpoint_that_does_not_name_its_windows_had_none_drawn(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = rewind(file.parent / "run", tmp_path / "run", 3)

    def without_windows(index: dict[str, dict[str, object]]) -> None:
        assert index["data"].pop("windows") == "random"
        del index["run"]  # of keys that a version before did not have

    edit_index(checkpoint(run, 3), without_windows)
    assert train(file, *QUICK, f"train.folder={run}") == 2
    assert 'data.windows: "tiled" -> "random": ' in capfd.readouterr().err


def test_windows_of_another_length_are_drawn_from_a_resume_on(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = rewind(file.parent / "run", tmp_path / "run", 3)
    assert train(file, *QUICK, f"train.folder={run}", "train.seq_length=24") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "train.seq_length: from now on random windows of 24 tokens are drawn" in said
    assert "tokens that may have been trained on belong to the held-out part now" in said


def test_random_windows_in_the_order_of_the_file_are_refused(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(file, *QUICK, "data.shuffle=false") == 2
    assert shows(capsys.readouterr().err, "config.windows_in_order")
