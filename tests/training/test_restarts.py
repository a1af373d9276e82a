"""A run whose rank is lost goes on by itself, to the same end, and no run is restarted that should not be."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprec.checkpoint.atomic import checkpoint_path
from megaprec.errors import UserError
from tests.other_systems import slow
from tests.runs import assert_close, checkpoint, steps, tensors, train, train_on, write_run
from tests.training.deaths import Death, planted
from tools.config.run_file import RunConfig, load_run
from tools.journal.records import read_events
from tools.training.launch import Loss, start_ranks
from tools.training.restarts import Restarts, ended_by_choice, ended_on_purpose

ROOT = Path(__file__).parents[2]
KILLED = Loss(1, -signal.SIGKILL, "rank 1 was ended by SIGKILL")
EXACT = ["precision.compute=fp64"]
EVALUATED = ["train.eval_every=2", "train.steps=8"]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


# --- the decision


def config_in(run_file: Path, folder: Path, *overrides: str) -> RunConfig:
    return load_run(run_file, [f"train.folder={folder}", "parallel.tensor=2", *overrides])


def train_to(folder: Path, step: int, saved: int = 0, outcome: str = "applied") -> None:
    """Write what a run that reached `step` has written, with a checkpoint of the step `saved`."""
    record = {"outcome": outcome, "loss": 1.0, "grad_norm": 1.0, "loss_scale": 1.0, "seconds": time.monotonic()}
    lines = [json.dumps({"step": n, **record}) + "\n" for n in range(1, step + 1)]
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(lines))
    if saved:
        checkpoint_path(folder / "checkpoints", saved).mkdir(parents=True)
        (checkpoint_path(folder / "checkpoints", saved) / "checkpoint.json").touch()


def test_a_lost_rank_is_started_again_in_one_line_and_the_steps_since_the_checkpoint_are_forgotten(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    restarts = Restarts(config_in(run_file, tmp_path, "train.restarts=2"), nullcontext)
    train_to(tmp_path, 5, saved=3)
    assert restarts.again(KILLED) == 2
    said = "rank 1 was ended by SIGKILL: training goes on from the checkpoint of step 3; 1 restart left"
    assert capsys.readouterr().err == f"restart    {said}\n"
    assert [record["step"] for record in steps(tmp_path)] == [1, 2, 3]
    assert read_events(tmp_path, "restart") == [
        {"event": "restart", "step": 3, "ranks": 2, "why": "rank 1 was ended by SIGKILL", "left": 1}
    ]


def test_no_rank_is_started_again_once_the_restarts_are_used_up(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    restarts = Restarts(config_in(run_file, tmp_path, "train.restarts=2"), nullcontext)
    started = []
    for _ in range(4):
        train_to(tmp_path, 5)
        started.append(restarts.again(KILLED))
    assert started == [2, 2, 0, 0]
    assert capsys.readouterr().err.endswith("not restarted: the restarts are used up (train.restarts = 2)\n")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {}),  # nothing was ever written
        ({}, {"step": 2, "outcome": "skipped"}),
        ({"step": 5, "saved": 3}, {}),  # lines of a run that somebody resumes, not cut yet
        ({"step": 5, "saved": 3}, {"step": 3}),  # and cut
        ({"step": 5, "saved": 3}, {"step": 4, "outcome": "skipped"}),
    ],
)
def test_a_crash_loop_is_not_restarted(
    before: dict[str, Any], after: dict[str, Any], run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if before:
        train_to(tmp_path, **before)
    restarts = Restarts(config_in(run_file, tmp_path), nullcontext)
    if after:
        train_to(tmp_path, **after)
    assert restarts.again(KILLED) == 0
    assert capsys.readouterr().err == "not restarted: no step was applied since the last start\n"


@pytest.mark.parametrize(
    ("exitcode", "chosen"),
    [
        (2, True),
        (3, True),
        *[(code, True) for n in ("TERM", "INT", "HUP", "USR1", "QUIT") for code in (-signal.Signals[f"SIG{n}"],)],
        (128 + signal.SIGTERM, True),
        (128 + signal.SIGUSR1, True),
        (1, False),
        (7, False),
        (-signal.SIGKILL, False),
        (-signal.SIGSEGV, False),
        (-signal.SIGABRT, False),
        (128 + signal.SIGKILL, False),
    ],
)
def test_who_ended_by_choice_is_not_started_again_and_who_crashed_is(
    exitcode: int, chosen: bool, run_file: Path, tmp_path: Path
) -> None:
    assert ended_by_choice(exitcode) is chosen
    restarts = Restarts(config_in(run_file, tmp_path), nullcontext)
    train_to(tmp_path, 5)
    assert restarts.again(Loss(0, exitcode, "")) == (0 if chosen else 2)


def test_without_restarts_a_failure_is_told_as_it_always_was(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    restarts = Restarts(config_in(run_file, tmp_path, "train.restarts=0"), nullcontext)
    train_to(tmp_path, 5)
    assert restarts.again(KILLED) == 0
    assert capsys.readouterr().err == ""


def test_a_damaged_checkpoint_or_a_folder_in_use_is_named_and_ends_the_run(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def in_use() -> nullcontext[None]:
        raise UserError("another process trains there now")

    restarts = Restarts(config_in(run_file, tmp_path), in_use)
    train_to(tmp_path, 5)
    assert restarts.again(KILLED) == 0
    assert capsys.readouterr().err.endswith("not restarted: another process trains there now\n")
    assert len(steps(tmp_path)) == 5
    checkpoint_path(tmp_path / "checkpoints", 3).mkdir(parents=True)
    assert restarts.again(KILLED) == 0
    assert "step_00000003 is damaged" in capsys.readouterr().err


def test_an_elastic_run_goes_on_without_a_rank_that_cannot_be_started_again(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["parallel.elastic=true", "parallel.pipeline=2", "train.restarts=9"]
    restarts = Restarts(config_in(run_file, tmp_path, *options), nullcontext)
    train_to(tmp_path, 5)
    assert [restarts.again(KILLED) for _ in range(4)] == [4, 2, 1, 0]
    said = capsys.readouterr().err.splitlines()
    assert said[1].endswith("from the start, without rank 1, which could not be started again; 7 restarts left")
    assert said[-1] == "not restarted: no step was applied since the last start"


def test_an_elastic_run_that_never_applied_a_step_is_not_shrunk(run_file: Path, tmp_path: Path) -> None:
    assert Restarts(config_in(run_file, tmp_path, "parallel.elastic=true"), nullcontext).again(KILLED) == 0


# --- the launcher

DIE_ONCE = """
import os, pathlib, sys, time
mark = pathlib.Path(sys.argv[1], "mark")
if not mark.exists() and os.environ["RANK"] == "1":
    mark.touch()
    os.kill(os.getpid(), 9)
while not mark.exists():
    time.sleep(0.01)
pathlib.Path(sys.argv[1], os.environ["RANK"] + "of" + os.environ["WORLD_SIZE"]).touch()
"""


@pytest.mark.parametrize("ranks", [2, 3, 1])
def test_the_launcher_starts_as_many_ranks_as_it_is_told_and_reports_only_the_last_failure(
    ranks: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lost: list[Loss] = []

    def again(loss: Loss) -> int:
        lost.append(loss)
        for left in tmp_path.glob("*of*"):
            left.unlink()
        return ranks

    assert start_ranks([sys.executable, "-c", DIE_ONCE, str(tmp_path)], 2, again=again) == 0
    assert lost == [KILLED]
    assert sorted(path.name for path in tmp_path.glob("*of*")) == [f"{rank}of{ranks}" for rank in range(ranks)]
    assert capfd.readouterr().err == ""


def test_a_signal_between_two_starts_ends_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def again(loss: Loss) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 2

    assert start_ranks([sys.executable, "-c", DIE_ONCE, str(tmp_path)], 2, again=again) == 143
    assert capfd.readouterr().err == "stopped by SIGTERM\n"
    assert not (tmp_path / "1of2").exists()  # rank 1 died in the first start, and there was no other


def test_after_a_signal_from_the_user_a_failure_is_not_restarted(tmp_path: Path) -> None:
    code = "import os, sys, time, pathlib; pathlib.Path(sys.argv[1], os.environ['RANK']).touch(); time.sleep(60)"

    def tell() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=tell).start()
    asked = [sys.executable, "-c", code, str(tmp_path)]
    assert start_ranks(asked, 2, again=lambda loss: pytest.fail("was asked")) == 143


# --- torchrun, which restarts ranks after any failure


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("UserError: data.source: empty", True),
        ("TrainingDiverged: stopped after step 9", True),
        ("Stopped: stopped by SIGTERM", True),
        ("RuntimeError: connection reset", False),
        ("MemoryError: ", False),
    ],
)
def test_a_restarted_rank_knows_whether_ranks_of_its_host_ended_on_purpose(
    reason: str, told: bool, tmp_path: Path
) -> None:
    for attempt, rank in ((0, 1), (1, 0)):
        (tmp_path / f"attempt_{attempt}" / str(rank)).mkdir(parents=True)
    (tmp_path / "attempt_0" / "1" / "error.json").write_text(json.dumps({"message": {"message": reason}}))
    own = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "attempt_1" / "0" / "error.json")}
    assert ended_on_purpose({**own, "TORCHELASTIC_RESTART_COUNT": "1"}) == (reason if told else "")
    assert ended_on_purpose({**own, "TORCHELASTIC_RESTART_COUNT": "0"}) == ""
    assert ended_on_purpose({}) == ""


@pytest.mark.parametrize("written", ["", "{", "[]", '{"message": "text"}'])
def test_a_reason_that_was_not_written_whole_is_none(written: str, tmp_path: Path) -> None:
    (tmp_path / "attempt_0" / "0").mkdir(parents=True)
    (tmp_path / "attempt_0" / "0" / "error.json").write_text(written)
    file = str(tmp_path / "attempt_1" / "0" / "error.json")
    assert ended_on_purpose({"TORCHELASTIC_ERROR_FILE": file, "TORCHELASTIC_RESTART_COUNT": "1"}) == ""


def torchrun(run_file: Path, *overrides: str, ranks: int, restarts: int, **environment: str) -> tuple[int, str]:
    """Exit code and output of a run under torchrun on this machine."""
    options = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *options,
        "-m",
        "megaprec",
        "train",
        str(run_file),
        *overrides,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_torchrun_is_refused_if_its_restarts_would_meet_the_addresses_of_ranks_that_are_gone(
    run_file: Path, tmp_path: Path
) -> None:
    overrides = [f"train.folder={tmp_path}", "parallel.tensor=2"]
    code, said = torchrun(run_file, *overrides, ranks=2, restarts=1, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0")
    assert code
    assert "start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment" in said
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.slow
def test_ranks_beyond_the_layout_are_spares_that_end_with_the_run(run_file: Path, tmp_path: Path) -> None:
    overrides = ["parallel.data=4", "parallel.elastic=true", "train.global_batch=8"]
    fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    code, said = torchrun(run_file, *overrides, f"train.folder={tmp_path / 'one'}", ranks=3, restarts=0, **fresh)
    assert code == 0, said
    now = "tensor 1 x pipeline 1 x data 2 = 2 ranks"
    assert f"elastic    3 ranks are there: tensor 1 x pipeline 1 x data 4 = 4 ranks -> {now}\n" in said
    assert steps(tmp_path / "one") == steps(train_on(run_file, f"train.folder={tmp_path / 'two'}", data=2))


class Machine:
    """A torchrun of the template, which plays a machine of two ranks; the one with host=True must live."""

    def __init__(self, run_file: Path, folder: Path, port: int, host: bool) -> None:
        said = {"HEAD": "127.0.0.1", "PORT": port, "NODES": "1:2", "RANKS": 2, "ADDRESS": "127.0.0.1", "IS_HOST": host}
        environment = {name: str(int(value) if isinstance(value, bool) else value) for name, value in said.items()}
        paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
        environment |= {"PATH": os.pathsep.join(paths), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        elastic = ["parallel.elastic=true", "parallel.tensor=2", "parallel.pipeline=2", "checkpoint.every=5"]
        endless = ["train.steps=1000000", "lr.peak=1e-6", f"train.folder={folder}", "log.every=10"]
        words = ["bash", str(ROOT / "examples" / "torchrun.sh"), str(run_file), *EXACT, *elastic, *endless]
        with (folder.parent / "machines.log").open("a") as log:
            self.process = subprocess.Popen(
                words, cwd=folder.parent, env={**os.environ, **environment}, stdout=log, stderr=log
            )

    def ranks(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if b"RANK=" in Path(f"/proc/{pid}/environ").read_bytes()]

    def lose(self) -> None:
        """End the machine without a word."""
        for pid in (self.process.pid, *self.ranks()):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def until_applied(folder: Path, ranks: int, more: int = 10) -> None:
    """Wait until a world of so many ranks has taken some steps."""
    deadline = time.monotonic() + 240
    began: int | None = None
    while began is None or (steps(folder) or [{"step": 0}])[-1]["step"] < began + more:
        assert time.monotonic() < deadline, (folder.parent / "machines.log").read_text()[-5000:]
        time.sleep(0.2)
        last = read_events(folder, "restart")[-1:] or [{"ranks": 4, "step": 0}]
        if last[0]["ranks"] == ranks and (folder / "metrics.jsonl").is_file():
            began = last[0]["step"]


@pytest.mark.slow
def test_a_run_on_two_machines_goes_on_on_one_and_takes_the_other_in_again(run_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    machines = [Machine(run_file, folder, port, host) for host in (True, False)]
    try:
        until_applied(folder, 4)
        machines[1].lose()
        until_applied(folder, 2)
        machines[1] = Machine(run_file, folder, port, host=False)
        until_applied(folder, 4)
        machines[0].process.terminate()
        machines[1].process.terminate()
        for machine in machines:
            machine.process.wait(60)
    finally:
        for machine in machines:
            if machine.process.poll() is None:
                machine.lose()
    assert [event["ranks"] for event in read_events(folder, "restart")] == [2, 4]
    taken = len(steps(folder))
    undisturbed = [*EXACT, f"train.steps={taken}", "lr.peak=1e-6", f"train.folder={tmp_path / 'whole'}"]
    assert_close(steps(folder), steps(train_on(run_file, *undisturbed, tensor=2, pipeline=2)), 1e-9)


# --- the command


def assert_same_run(ours: Path, theirs: Path, step: int) -> None:
    """Equal records, each step once, and equal weights and moments, bit for bit."""
    assert steps(ours) == steps(theirs)
    assert [record["step"] for record in steps(ours)] == list(range(1, step + 1))
    one, other = (tensors(checkpoint(folder, step)) for folder in (ours, theirs))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def die_in(
    deaths: list[Death], run_file: Path, folder: Path, patch: pytest.MonkeyPatch, *overrides: str
) -> tuple[int, Path]:
    """Exit code of the real command with these deaths, and the folder of the run."""
    planted(patch, folder, *deaths)
    run = folder / "run"
    return train(run_file, *EVALUATED, f"train.folder={run}", *overrides), run


@pytest.mark.parametrize(
    ("death", "layout"),
    [
        (Death(1, "forward", 18), {"tensor": 2}),  # in step 5
        *slow(
            (Death(0, "step", 2), {"tensor": 2}),  # before the first checkpoint
            (Death(0, "save", 1), {"pipeline": 2}),
            (Death(1, "evaluate", 2), {"data": 2}),
            (Death(3, "backward", 9), {"tensor": 2, "pipeline": 2}),
            (Death(1, "forward", 18, "SIGSEGV"), {"tensor": 2}),
            (Death(1, "step", 5, "MemoryError"), {"data": 2}),
            (Death(0, "step", 7, "7"), {"tensor": 2}),
        ),
    ],
    ids=lambda value: f"{value.place}-{value.rank}-{value.how}" if isinstance(value, Death) else None,
)
def test_a_run_that_lost_a_rank_ends_as_the_undisturbed_run_bit_for_bit(
    death: Death, layout: dict[str, int], run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [f"parallel.{axis}={size}" for axis, size in layout.items()]
    code, run = die_in([death], run_file, tmp_path, monkeypatch, *asked)
    assert code == 0
    assert_same_run(run, train_on(run_file, *EVALUATED, f"train.folder={tmp_path / 'whole'}", **layout), 8)
    (event,) = read_events(run, "restart")
    assert event["why"].startswith(f"rank {death.rank} ")
    assert event["left"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("death", "code", "said"),
    [
        (Death(1, "step", 5, "UserError"), 2, "rank 1 failed with exit code 2: UserError: planted"),
        (Death(1, "step", 5, "TrainingDiverged"), 3, "rank 1 failed with exit code 3: TrainingDiverged: planted"),
        (Death(1, "step", 5, "SIGTERM"), 143, "stopped by SIGTERM after step 5, state saved: the same command goes on"),
        (Death(1, "model", 1), 137, "rank 1 was ended by SIGKILL"),
    ],
    ids=["exit-2", "exit-3", "SIGTERM", "crash-loop"],
)
def test_a_run_that_should_not_go_on_is_not_restarted(
    death: Death,
    code: int,
    said: str,
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    ended, run = die_in([death], run_file, tmp_path, monkeypatch, "parallel.tensor=2")
    assert ended == code
    errors = capfd.readouterr().err.splitlines()
    assert errors[-1] == said
    assert not any(line.startswith("restart ") for line in errors)
    assert not read_events(run, "restart")


@pytest.mark.slow
def test_a_rank_that_dies_at_the_same_step_again_and_again_ends_the_run_after_all_restarts(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, run = die_in(
        [Death(1, "step", 2, always=True)], run_file, tmp_path, monkeypatch, "parallel.tensor=2", "train.restarts=2"
    )
    said = [
        line for line in capfd.readouterr().err.splitlines() if line.startswith(("restart ", "not restarted", "rank 1"))
    ]
    assert code == 137
    assert [line[:11] for line in said] == ["restart    ", "restart    ", "not restart", "rank 1 was "]
    assert said[-2] == "not restarted: the restarts are used up (train.restarts = 2)"
    assert [event["left"] for event in read_events(run, "restart")] == [1, 0]


@pytest.mark.slow
def test_a_run_that_shrank_has_the_losses_of_the_undisturbed_one(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    exact = [*EXACT, "parallel.elastic=true"]
    deaths = [Death(3, "step", 5), Death(3, "boot", 1, always=True, after=0)]
    layout = {"tensor": 2, "pipeline": 2}
    asked = [*exact, *(f"parallel.{axis}={size}" for axis, size in layout.items())]
    code, run = die_in(deaths, run_file, tmp_path, monkeypatch, *asked)
    assert code == 0
    now = "tensor 2 x pipeline 2 x data 1 = 4 ranks -> tensor 2 x pipeline 1 x data 1 = 2 ranks"
    out, errors = capfd.readouterr()
    assert f"elastic    2 ranks are there: {now}\n" in out
    assert "without rank 3, which could not be started again" in errors
    whole = train_on(run_file, *EVALUATED, *exact, f"train.folder={tmp_path / 'whole'}", **layout)
    assert_close(steps(run), steps(whole), 1e-9)
    assert [event["ranks"] for event in read_events(run, "restart")] == [4, 2]
