"""Ends of one rank: a signal stops the whole run in order, and everything else is told with the rank's number."""

import os
import signal
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megaprec.checkpoint.atomic import latest
from tests.runs import checkpoint, write_run
from tests.training.test_hangs import ROOT, planted
from tools import cli
from tools.training.launch import first_failure, start_ranks
from tools.training.leftovers import OWNER, PREFIX, YOUNG, own_folder, remove_leftovers

FORWARD = "forward of micro-batch 1"


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "number"),
    [("terminate", signal.SIGTERM), ("interrupt", signal.SIGINT), ("hang up", signal.SIGHUP)],
)
def test_a_signal_to_one_rank_stops_the_run_in_order(
    action: str,
    number: signal.Signals,
    run_file: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    code = start_ranks(planted(run_file, tmp_path, (action, 1, "step", 3, FORWARD), "parallel.tensor=2"), 2, 1)
    last = capfd.readouterr().err.splitlines()[-1]
    assert (code, last) == (
        128 + number,
        f"stopped by {number.name} after step 3, state saved: the same command goes on",
    )
    assert latest(tmp_path / "run" / "checkpoints") == checkpoint(tmp_path / "run", 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "code", "said"),
    [
        ("leave", 7, "rank 1 failed with exit code 7: no reason given"),
        ("kill", 137, "rank 1 was ended by SIGKILL"),
        ("raise", 1, "rank 1 failed with exit code 1: ZeroDivisionError"),
    ],
)
def test_a_rank_that_ends_is_named_with_its_reason_or_that_it_gave_none(
    action: str,
    code: int,
    said: str,
    run_file: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    command = planted(run_file, tmp_path, (action, 1, "step", 3, FORWARD), "parallel.tensor=2")
    assert start_ranks(command, 2, 1) == code
    assert capfd.readouterr().err.splitlines()[-1].startswith(said)
    assert cli.main(["diagnose", str(tmp_path / "run")]) == 0
    assert capfd.readouterr().out.startswith("culprit    rank 1")


def test_a_lost_connection_is_a_consequence_whenever_it_was_noted(tmp_path: Path) -> None:
    def failure(rank: int, exitcode: int, said: str, second: float) -> ProcessFailure:
        note = tmp_path / f"{rank}.json"
        if said:
            note.write_text(f'{{"message": {{"message": "{said}", "extraInfo": {{"timestamp": "100"}}}}}}')
            os.utime(note, (second, second))
        return ProcessFailure(rank, 1, exitcode, str(note))

    lost = failure(0, 1, "RuntimeError: Connection closed by peer [127.0.0.1]:1", 100.2)
    assert first_failure({0: lost, 1: failure(1, 7, "", 0)})[0] == 1
    assert first_failure({0: lost, 1: failure(1, 1, "ValueError: a bug", 100.9)})[0] == 1
    hangs = failure(2, 1, "RankHangs: rank 1 on a", 101.0)
    assert first_failure({0: lost, 1: failure(1, -signal.SIGKILL, "", 0), 2: hangs})[0] == 2


def test_folders_of_killed_launchers_are_removed_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old = time.time() - 2 * YOUNG
    for name, owned in (("killed", True), ("foreign", False), ("young", True)):
        (tmp_path / f"{PREFIX}{name}").mkdir()
        if owned:
            (tmp_path / f"{PREFIX}{name}" / OWNER).write_text("1\n")
        if name != "young":
            os.utime(tmp_path / f"{PREFIX}{name}", (old, old))
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / OWNER).touch()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "kept")
    with own_folder() as first:
        os.utime(first, (old, old))
        with own_folder() as second:
            left = {path.name for path in tmp_path.iterdir()}
    assert left == {f"{PREFIX}foreign", f"{PREFIX}young", f"{PREFIX}link", "kept", Path(first).name, Path(second).name}
    assert not Path(first).exists() and not Path(second).exists()
    remove_leftovers(tmp_path / "gone")
