"""A run that is told to stop saves its state after the step under way and goes on as if nobody had
spoken."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megaprec.checkpoint.atomic import latest
from megaprec.optim.decision.step_report import StepObserver
from megaprec.optim.state.flat_buffer import Buffer
from tests.ranks import run_ranks
from tests.runs import checkpoint, steps, tensors, train_on, write_run
from tools import cli
from tools.config.run_file import load_run
from tools.training.corpus import open_corpus
from tools.training.ends import Stopped
from tools.training.stopping import ECHO_SECONDS, listening
from tools.training.trainer import Trainer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


class Told(StepObserver):
    """Sends this process a signal before the ranks agree on a step; the first is 1."""

    def __init__(self, step: int, number: int) -> None:
        self.step = step
        self.number = number
        self.taken = 0

    def gradients_ready(self, buffers: Sequence[Buffer], scale: Tensor) -> None:
        self.taken += 1
        if self.taken == self.step:
            os.kill(os.getpid(), self.number)


def train_until_told(
    mesh: DeviceMesh, file: Path, overrides: list[str], rank: int, step: int, number: int
) -> tuple[int, str] | None:
    """Trains on this rank, which, if it is `rank`, gets the signal while it takes `step`; returns
    how it stopped."""
    config = load_run(file, overrides)
    told = Told(step if rank == mesh.get_rank() else 0, number)
    trainer = Trainer(config, open_corpus(config), mesh, observers=[told])
    try:
        trainer.run()
    except Stopped as stopped:
        return stopped.exit_code, str(stopped)
    return None


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("axes", "options", "late"),
    [
        ({"tp": 2}, [], 0),
        ({"pp": 2, "dp": 2}, ["parallel.zero=true"], 0),
    ],
    ids=["tensor", "pipeline-data"],
)
def test_all_ranks_stop_after_the_step_in_which_one_was_told_to_and_the_run_goes_on_bit_for_bit(
    axes: dict[str, int], options: list[str], late: int, run_file: Path, tmp_path: Path
) -> None:
    """late: steps between the signal's and the one in which all know of it."""
    names = {"tp": "tensor", "pp": "pipeline", "dp": "data"}
    layout = {names[axis]: size for axis, size in axes.items()}
    one, whole = (f"train.folder={tmp_path / name}" for name in ("stopped", "whole"))
    given = [*options, *(f"parallel.{name}={size}" for name, size in layout.items())]
    last = 2 ** len(axes) - 1
    ends = run_ranks(
        train_until_told,
        axes,
        file=run_file,
        overrides=[*given, one],
        rank=last,
        step=2,
        number=signal.SIGUSR1,
    )
    assert ends == [(128 + signal.SIGUSR1, "stopped by SIGUSR1")] * (last + 1)
    assert [record["step"] for record in steps(tmp_path / "stopped")] == list(range(1, 3 + late))
    assert latest(tmp_path / "stopped" / "checkpoints") == checkpoint(
        tmp_path / "stopped", 2 + late
    )
    for folder in (one, whole):
        train_on(run_file, *options, folder, **layout)
    assert steps(tmp_path / "stopped") == steps(tmp_path / "whole")
    ours, theirs = (tensors(checkpoint(tmp_path / name, 6)) for name in ("stopped", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_that_is_told_in_its_last_step_is_finished(run_file: Path, tmp_path: Path) -> None:
    folder = [f"train.folder={tmp_path}"]
    told = {"rank": 0, "step": 6, "number": signal.SIGTERM}
    assert run_ranks(train_until_told, {}, file=run_file, overrides=folder, **told) == [None]
    assert latest(tmp_path / "checkpoints") == checkpoint(tmp_path, 6)


def train_until_told_and_read_note(
    mesh: DeviceMesh, file: Path, overrides: list[str], note: Path
) -> str:
    """Returns what the rank has noted by the time it leaves the training loop, where it is deaf to
    signals no more."""
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(note)
    train_until_told(mesh, file, overrides, rank=0, step=2, number=signal.SIGINT)
    return json.loads(note.read_bytes())["message"]["message"]


def test_a_rank_has_noted_why_it_stops_before_a_signal_can_end_it_again(
    run_file: Path, tmp_path: Path
) -> None:
    told = {"overrides": [f"train.folder={tmp_path}"], "note": tmp_path / "error.json"}
    assert run_ranks(train_until_told_and_read_note, {}, file=run_file, **told) == [
        "Stopped: stopped by SIGINT"
    ]


def test_torchrun_is_told_in_a_line_what_a_user_can_correct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(note))
    assert cli.main(["train", str(tmp_path / "missing.toml")]) == 2
    failure = ProcessFailure(local_rank=0, pid=os.getpid(), exitcode=2, error_file=str(note))
    said = str(ChildFailedError("megaprec", {0: failure}))
    assert re.search(r"traceback : UserError: run file .*missing.toml: cannot be read", said)
    assert "Traceback" not in said and "File" not in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_the_first_signal_is_told_its_echo_is_not_and_a_later_one_is(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = []
    times = iter((5.0, 5.0 + ECHO_SECONDS / 2, 5.1 + ECHO_SECONDS))
    monkeypatch.setattr(
        "tools.training.stopping.time", SimpleNamespace(monotonic=lambda: next(times))
    )
    outside = signal.signal(number, signal.SIG_DFL)  # nohup may have started the tests
    try:
        with listening(lambda n: heard.append(("first", n)), lambda n: heard.append(("again", n))):
            for _ in range(3):
                os.kill(os.getpid(), number)
        assert heard == [("first", number), ("again", number)]
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, outside)


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with listening(lambda n: pytest.fail("was told")):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_by_itself_a_second_signal_ends_a_process_at_once() -> None:
    program = """
import signal, time
from tools.training.stopping import listening
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started the tests
with listening(lambda number: print("told", flush=True)):
    print("listening", flush=True)
    for _ in range(6000):
        time.sleep(0.1)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        process.terminate()
        assert process.stdout.readline() == "told\n"
        time.sleep(1.1 * ECHO_SECONDS)
        process.send_signal(signal.SIGHUP)
        assert process.wait(600) == -signal.SIGHUP


def test_the_command_exits_with_the_signal(monkeypatch: pytest.MonkeyPatch, run_file: Path) -> None:
    def stop(*_: object, **__: object) -> None:
        raise Stopped(signal.SIGTERM)

    monkeypatch.setattr("tools.commands.train.train_rank", stop)
    assert cli.main(["train", str(run_file)]) == 143
