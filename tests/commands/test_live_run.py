"""A command that reads a run which trains looks again when the checkpoint that it reads is replaced
meanwhile."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megaprec.checkpoint import integrity
from megaprec.checkpoint.digests import file_digest
from tests.runs import checkpoint, edit_index, train, write_run
from tools.cli import main

QUICK = ("model.layers=1", "train.global_batch=4", "train.micro_batch=4", "checkpoint.every=1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = write_run(tmp_path_factory.mktemp("live"))
    assert train(file, *QUICK, "train.steps=2") == 0
    return file.parent / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def goes_on(run: Path) -> None:
    """Saves step 3, and removes step 2, as a save of the run does."""
    shutil.copytree(checkpoint(run, 2), checkpoint(run, 3))
    edit_index(checkpoint(run, 3), lambda index: index.update(step=3))
    shutil.rmtree(checkpoint(run, 2))


def saves_again(run: Path) -> None:
    """Replaces step 2 by another save of it."""
    shutil.copytree(checkpoint(run, 2), run / "again")
    shutil.rmtree(checkpoint(run, 2))
    (run / "again").rename(checkpoint(run, 2))


def damages(run: Path) -> None:
    """Damages a file of step 2 and goes on with nothing."""
    (checkpoint(run, 2) / "model-00000.safetensors").write_bytes(b"")


def act_once(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Acts when the first file of a checkpoint is to be hashed, and lets that fail."""
    acted = list[bool]()

    def digest(file: Path) -> str:
        if acted:
            return file_digest(file)
        acted.append(True)
        act()
        raise FileNotFoundError(2, "gone", str(file))

    monkeypatch.setattr(integrity, "file_digest", digest)


@pytest.mark.cases(1)
@pytest.mark.parametrize("act", [goes_on, saves_again])
@pytest.mark.parametrize(
    "words", [("inspect", "RUN"), ("diff", "RUN", "OTHER"), ("generate", "RUN", "--prompt", "the")]
)
def test_the_newest_checkpoint_is_looked_for_again(
    words: tuple[str, ...],
    act: Callable[[Path], None],
    run: Path,
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    act_once(monkeypatch, lambda: act(run))
    named = [word.replace("RUN", str(run)).replace("OTHER", str(trained)) for word in words]
    assert main(named) in (0, 1), capsys.readouterr().err
    assert "damaged" not in capsys.readouterr().err


def test_one_that_is_not_replaced_is_refused_as_it_is(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damages(run)
    assert main(["inspect", str(run)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
