"""Ends of one rank: a signal stops the whole run in order, and everything else is told with the
rank's number."""

import json
import os
import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megaprec.checkpoint.atomic import latest
from megaprec.errors import UserError
from models.engine.passes import OutsideVocabulary
from tests.runs import checkpoint, write_run
from tests.training.test_hangs import ROOT, planted
from tools import cli
from tools.training.elastic import ended_by_choice
from tools.training.ends import SIGNALS, FaultyHardware, Stopped, TrainingDiverged
from tools.training.launch import exit_code, first_failure, lost_rank_of, start_ranks
from tools.training.stopping import note_failure

FORWARD = "forward of micro-batch 1"
# no rank hangs here, however busy the machine is
PATIENT = [
    "parallel.tensor=2",
    "parallel.timeout=120",
]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    ("action", "number"),
    [("terminate", signal.SIGTERM), ("interrupt", signal.SIGINT), ("hang up", signal.SIGHUP)],
)
@pytest.mark.usefixtures("forked_python")
def test_a_signal_to_one_rank_stops_the_run_in_order(
    action: str,
    number: signal.Signals,
    run_file: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    code = start_ranks(planted(run_file, tmp_path, (action, 1, "step", 3, FORWARD), *PATIENT), 2, 1)
    last = capfd.readouterr().err.splitlines()[-1]
    assert (code, last) == (
        128 + number,
        f"stopped by {number.name} after step 3, state saved: the same command goes on",
    )
    assert latest(tmp_path / "run" / "checkpoints") == checkpoint(tmp_path / "run", 3)


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    ("action", "code", "said"),
    [
        ("leave", 7, "rank 1 failed with exit code 7: no reason given"),
        ("kill", 137, "rank 1 was ended by SIGKILL"),
        ("raise", 1, "rank 1 failed with exit code 1: ZeroDivisionError"),
    ],
)
@pytest.mark.usefixtures("forked_python")
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
    command = planted(run_file, tmp_path, (action, 1, "step", 3, FORWARD), *PATIENT)
    assert start_ranks(command, 2, 1) == code
    assert capfd.readouterr().err.splitlines()[-1].startswith(said)
    assert cli.main(["diagnose", str(tmp_path / "run")]) == 0
    assert capfd.readouterr().out.startswith("culprit    rank 1")


def test_a_lost_connection_is_a_consequence_whenever_it_was_noted(tmp_path: Path) -> None:
    def failure(rank: int, exitcode: int, said: str, second: float) -> ProcessFailure:
        note = tmp_path / f"{rank}.json"
        if said:
            note.write_text(
                f'{{"message": {{"message": "{said}", "extraInfo": {{"timestamp": "100"}}}}}}'
            )
            os.utime(note, (second, second))
        return ProcessFailure(rank, 1, exitcode, str(note))

    lost = failure(0, 1, "RuntimeError: Connection closed by peer [127.0.0.1]:1", 100.2)
    assert first_failure({0: lost, 1: failure(1, 7, "", 0)})[0] == 1
    assert first_failure({0: lost, 1: failure(1, 1, "ValueError: a bug", 100.9)})[0] == 1
    hangs = failure(2, 1, "RankHangs: rank 1 on a", 101.0)
    assert first_failure({0: lost, 1: failure(1, -signal.SIGKILL, "", 0), 2: hangs})[0] == 2
    for stopped in ("UserError: /data/peer.txt is not there", "ValueError: a bug"):
        assert first_failure({0: lost, 1: failure(1, -signal.SIGTERM, stopped, 100.9)})[0] == 1


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("other", "exitcode", "code", "said"),
    [
        ("Stopped: stopped by {name}", None, None, ""),  # has told that it stopped
        ("RuntimeError: Connection closed by peer", 1, None, "stopped by {name}"),
        ("ValueError: a bug", 1, 1, "rank 1 failed with exit code 1: ValueError: a bug"),
        ("", 7, 7, "rank 1 failed with exit code 7: no reason given"),
        ("", None, None, ""),  # it was told to stop before it could note why
    ],
    ids=["stopped", "lost", "failed", "silent", "not begun"],
)
def test_a_rank_that_hears_a_signal_before_or_after_the_others_ends_as_all_that_are_told_to_stop(
    number: signal.Signals,
    other: str,
    exitcode: int | None,
    code: int | None,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    note = tmp_path / "error.json"
    if other:
        text = other.format(name=number.name)
        note.write_text(
            json.dumps({"message": {"message": text, "extraInfo": {"timestamp": "100"}}})
        )
    heard = ProcessFailure(0, 1, -number, "")
    heard.timestamp = 1
    failures = {0: heard, 1: ProcessFailure(1, 1, exitcode or 128 + number, str(note))}
    assert exit_code(failures, number) == (code or 128 + number)
    assert capsys.readouterr().err.splitlines() == ([said.format(name=number.name)] if said else [])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("the file socket.txt is not there"), 2),
        (OutsideVocabulary(0, 9), 2),  # a UserError
        (FileNotFoundError(2, "No such file", "socket.txt"), 2),
        (TrainingDiverged("hopeless"), 3),
        (FaultyHardware("wrong", ()), 3),
        (ZeroDivisionError("a bug"), 1),
        *[(Stopped(number), 128 + number) for number in SIGNALS],
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_a_rank_that_was_stopped_while_it_left_has_the_exit_code_of_the_reason_it_noted_first(
    error: Exception, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    note_failure(error)
    note_failure(RuntimeError("Connection closed by peer"))
    loss = lost_rank_of({1: ProcessFailure(1, 1, -signal.SIGTERM, str(tmp_path / "error.json"))})
    assert (loss.rank, loss.exitcode) == (1, code)
    assert loss.message.startswith(f"rank 1 failed with exit code {code}: ")
    assert ended_by_choice(loss.exitcode) == (code != 1)
