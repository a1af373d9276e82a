"""A run whose rank is lost goes on by itself, to the same end, and no run is restarted that should
not be."""

import json
import os
import re
import signal
import sys
import threading
import time
from contextlib import nullcontext
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprec.checkpoint.atomic import checkpoint_path
from megaprec.errors import UserError
from tests.checkpoint.test_checkpoint import names
from tests.checkpoint.test_damage import flip
from tests.other_systems import slow
from tests.refusals import raises, shows
from tests.runs import assert_close, checkpoint, steps, tensors, train, train_on, write_run
from tests.training.deaths import Death, planted
from tools.config.run_file import RunConfig, load_run
from tools.journal.journal import rewind
from tools.journal.records import read_events
from tools.training import elastic
from tools.training.elastic import Restarts, ended_by_choice
from tools.training.launch import start_ranks
from tools.training.launched import OURS, RESTARTED, LostRank, was_restarted
from tools.training.resume import check_resumable

KILLED = LostRank(1, -signal.SIGKILL, "rank 1 was ended by SIGKILL")
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
    record = {
        "outcome": outcome,
        "loss": 1.0,
        "grad_norm": 1.0,
        "loss_scale": 1.0,
        "seconds": time.monotonic(),
    }
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
    assert restarts.ranks_after(KILLED) == 2
    said = (
        "rank 1 was ended by SIGKILL: training goes on from the checkpoint of step 3; 1 restart "
        "left"
    )
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
        started.append(restarts.ranks_after(KILLED))
    assert started == [2, 2, 0, 0]
    assert capsys.readouterr().err.endswith(
        "not restarted: the restarts are used up (train.restarts = 2)\n"
    )


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
    before: dict[str, Any],
    after: dict[str, Any],
    run_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if before:
        train_to(tmp_path, **before)
    restarts = Restarts(config_in(run_file, tmp_path), nullcontext)
    if after:
        train_to(tmp_path, **after)
    assert restarts.ranks_after(KILLED) == 0
    assert capsys.readouterr().err == "not restarted: no step was applied since the last start\n"


@pytest.mark.parametrize(
    ("exitcode", "chosen"),
    [
        (2, True),
        (3, True),
        *[
            (code, True)
            for n in ("TERM", "INT", "HUP", "USR1", "QUIT")
            for code in (-signal.Signals[f"SIG{n}"],)
        ],
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
    assert restarts.ranks_after(LostRank(0, exitcode, "")) == (0 if chosen else 2)


def test_without_restarts_a_failure_is_told_as_it_always_was(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    restarts = Restarts(config_in(run_file, tmp_path, "train.restarts=0"), nullcontext)
    train_to(tmp_path, 5)
    assert restarts.ranks_after(KILLED) == 0
    assert capsys.readouterr().err == ""


def test_a_damaged_checkpoint_or_a_folder_in_use_is_named_and_ends_the_run(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def in_use() -> nullcontext[None]:
        raise UserError("another process trains there now")

    restarts = Restarts(config_in(run_file, tmp_path), in_use)
    train_to(tmp_path, 5)
    assert restarts.ranks_after(KILLED) == 0
    assert capsys.readouterr().err.endswith("not restarted: another process trains there now\n")
    assert len(steps(tmp_path)) == 5
    checkpoint_path(tmp_path / "checkpoints", 3).mkdir(parents=True)
    assert restarts.ranks_after(KILLED) == 0
    assert shows(
        capsys.readouterr().err, "checkpoint.damaged_newest", newest=re.compile("step_00000003$")
    )


def test_an_elastic_run_goes_on_without_a_rank_that_cannot_be_started_again(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["parallel.elastic=true", "parallel.pipeline=2", "train.restarts=9"]
    restarts = Restarts(config_in(run_file, tmp_path, *options), nullcontext)
    train_to(tmp_path, 5)
    assert [restarts.ranks_after(KILLED) for _ in range(4)] == [4, 2, 1, 0]
    said = capsys.readouterr().err.splitlines()
    assert said[1].endswith(
        "from the start, without rank 1, which could not be started again; 7 restarts left"
    )
    assert said[-1] == "not restarted: no step was applied since the last start"


def test_an_elastic_run_that_never_applied_a_step_is_not_shrunk(
    run_file: Path, tmp_path: Path
) -> None:
    assert (
        Restarts(config_in(run_file, tmp_path, "parallel.elastic=true"), nullcontext).ranks_after(
            KILLED
        )
        == 0
    )


def test_a_restarted_run_resumes_from_its_own_checkpoint_though_it_may_not_resume_that_of_an_earlier_run(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = [f"train.folder={tmp_path}", "checkpoint.resume=false", "train.steps=3"]
    assert train(run_file, *folder) == 0
    with raises("training.resume_false"):
        check_resumable(load_run(run_file, folder))
    for variable, run_id in (
        (RESTARTED, f"{OURS}7"),
        ("TORCHELASTIC_RESTART_COUNT", "of torchrun"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "1")
            with raises("training.resume_false"):  # a shell has left it
                check_resumable(load_run(run_file, folder))
            patch.setenv("TORCHELASTIC_RUN_ID", run_id)
            check_resumable(load_run(run_file, folder))
    with raises("config.elastic_without_resume"):
        load_run(run_file, [*folder, "parallel.elastic=true"])


# --- the launcher

DIE_ONCE = """
import os, pathlib, sys, time
mark = pathlib.Path(sys.argv[1], "mark")
if not mark.exists() and os.environ["RANK"] == "1":
    mark.touch()
    os.kill(os.getpid(), 9)
while not mark.exists():
    time.sleep(0.01)
name = os.environ["RANK"] + "of" + os.environ["WORLD_SIZE"]
pathlib.Path(sys.argv[1], name).write_text(str("MEGAPREC_RESTARTED" in os.environ))
"""


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("ranks", [2, 3, 1])
def test_the_launcher_starts_as_many_ranks_as_it_is_told_and_reports_only_the_last_failure(
    ranks: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lost: list[LostRank] = []

    def again(loss: LostRank) -> int:
        lost.append(loss)
        for left in tmp_path.glob("*of*"):
            left.unlink()
        return ranks

    assert start_ranks([sys.executable, "-c", DIE_ONCE, str(tmp_path)], 2, again=again) == 0
    assert lost == [KILLED]
    told = {path.name: path.read_text() for path in tmp_path.glob("*of*")}
    assert told == {f"{rank}of{ranks}": "True" for rank in range(ranks)}
    assert not was_restarted()
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_signal_between_two_starts_ends_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def again(loss: LostRank) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 2

    assert start_ranks([sys.executable, "-c", DIE_ONCE, str(tmp_path)], 2, again=again) == 143
    assert capfd.readouterr().err == "stopped by SIGTERM\n"
    assert not (
        tmp_path / "1of2"
    ).exists()  # rank 1 died in the first start, and there was no other


@pytest.mark.slow
def test_after_a_signal_from_the_user_a_failure_is_not_restarted(tmp_path: Path) -> None:
    code = (
        "import os, sys, time, pathlib; pathlib.Path(sys.argv[1], os.environ['RANK']).touch(); "
        "time.sleep(900)"
    )

    def tell() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=tell).start()
    asked = [sys.executable, "-c", code, str(tmp_path)]
    assert start_ranks(asked, 2, again=lambda loss: pytest.fail("was asked")) == 143


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


@pytest.mark.cases(0, 1)
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
            (Death(1, "gather", 60), {"data": 2, "zero": 3}),
            (Death(0, "save", 1), {"data": 2, "zero": 3}),
        ),
    ],
    ids=lambda value: (
        f"{value.place}-{value.rank}-{value.how}" if isinstance(value, Death) else None
    ),
)
@pytest.mark.usefixtures("forked_python")
def test_a_run_that_lost_a_rank_ends_as_the_undisturbed_run_bit_for_bit(
    death: Death,
    layout: dict[str, int],
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = [f"parallel.{key}={value}" for key, value in layout.items()]
    code, run = die_in([death], run_file, tmp_path, monkeypatch, *asked)
    assert code == 0
    stage = [f"parallel.zero={layout.get('zero', 'true')}"]
    axes = {axis: size for axis, size in layout.items() if axis != "zero"}
    folder = f"train.folder={tmp_path / 'whole'}"
    assert_same_run(run, train_on(run_file, *EVALUATED, folder, *stage, **axes), 8)
    (event,) = read_events(run, "restart")
    assert event["why"].startswith(f"rank {death.rank} ")
    assert event["left"] == 2


# in step 4 or 5 of eight
CALLS = {
    "forward": 18,
    "backward": 17,
    "step": 4,
    "evaluate": 2,
    "save": 2,
}


@pytest.fixture(scope="module")
def whole(run_file: Path) -> Path:
    """The undisturbed run of four ranks."""
    return train_on(
        run_file, *EVALUATED, f"train.folder={run_file.parent / 'whole'}", tensor=2, pipeline=2
    )


@pytest.mark.campaign
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV", "RuntimeError", "7"])
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("place", CALLS)
@pytest.mark.usefixtures("forked_python")
def test_whoever_dies_wherever_and_however_the_run_ends_as_the_undisturbed_one(
    place: str,
    rank: int,
    how: str,
    run_file: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = ["parallel.tensor=2", "parallel.pipeline=2"]
    code, run = die_in(
        [Death(rank, place, CALLS[place], how)], run_file, tmp_path, monkeypatch, *layout
    )
    assert code == 0
    assert_same_run(run, whole, 8)
    (event,) = read_events(run, "restart")
    assert event["why"].startswith(f"rank {rank} ")


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    ("death", "code", "said"),
    [
        (Death(1, "step", 5, "UserError"), 2, "rank 1 failed with exit code 2: UserError: planted"),
        (
            Death(1, "step", 5, "TrainingDiverged"),
            3,
            "rank 1 failed with exit code 3: TrainingDiverged: planted",
        ),
        (
            Death(1, "step", 5, "SIGTERM"),
            143,
            "stopped by SIGTERM after step 5, state saved: the same command goes on",
        ),
        (Death(1, "model", 1), 137, "rank 1 was ended by SIGKILL"),
    ],
    ids=["exit-2", "exit-3", "SIGTERM", "crash-loop"],
)
@pytest.mark.usefixtures("forked_python")
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
@pytest.mark.usefixtures("forked_python")
def test_ranks_that_start_again_from_a_damaged_checkpoint_name_it_and_the_one_before(
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def damage_first(folder: Path, step: int, event: dict[str, Any]) -> None:
        flip(checkpoint(folder, step) / "optimizer-00000.safetensors", -1)
        rewind(folder, step, event)

    monkeypatch.setattr(elastic, "rewind", damage_first)
    keys = ["parallel.tensor=2", "checkpoint.background=false"]
    code, run = die_in([Death(1, "step", 8)], run_file, tmp_path, monkeypatch, *keys)
    assert code == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert shows(
        last,
        "checkpoint.digest_differs_newest",
        path=re.compile("step_00000006$"),
        wrong="optimizer-00000.safetensors",
        verb="is",
        remedy=re.compile("move it away to go on from step_00000003"),
    )
    assert names(run / "checkpoints") == ["step_00000003", "step_00000006"]


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("UserError", 2, "rank 1 failed with exit code 2: UserError: planted"),
        ("TrainingDiverged", 3, "rank 1 failed with exit code 3: TrainingDiverged: planted"),
        ("SIGTERM", 143, "stopped by SIGTERM after step 5, state saved: the same command goes on"),
    ],
)
@pytest.mark.usefixtures("forked_python")
def test_a_rank_that_ends_on_purpose_is_the_cause_however_long_it_takes_to_leave(
    how: str,
    code: int,
    said: str,
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    deaths = [Death(1, "step", 5, how), Death(1, "leave", 1, "slow")]
    ended, run = die_in(deaths, run_file, tmp_path, monkeypatch, "parallel.tensor=2")
    assert (tmp_path / "death1").exists()
    assert not read_events(run, "restart")
    assert ended == code
    ours = [
        line
        for line in capfd.readouterr().err.splitlines()
        if line.startswith(("rank ", "stopped "))
    ]
    assert ours[-1] == said  # gloo may complain later about the connections that were cut


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_a_rank_that_dies_at_the_same_step_again_and_again_ends_the_run_after_all_restarts(
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    code, run = die_in(
        [Death(1, "step", 2, always=True)],
        run_file,
        tmp_path,
        monkeypatch,
        "parallel.tensor=2",
        "train.restarts=2",
    )
    said = [
        line
        for line in capfd.readouterr().err.splitlines()
        if line.startswith(("restart ", "not restarted", "rank 1"))
    ]
    assert code == 137
    assert [line[:11] for line in said] == [
        "restart    ",
        "restart    ",
        "not restart",
        "rank 1 was ",
    ]
    assert said[-2] == "not restarted: the restarts are used up (train.restarts = 2)"
    assert [event["left"] for event in read_events(run, "restart")] == [1, 0]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_a_run_that_shrank_has_the_losses_of_the_undisturbed_one(
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
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


SPREAD = [
    "model.family=mixtral",
    "model.experts=4",
    "model.router_aux_loss=0.01",
    *EXACT,
    "parallel.elastic=true",
]
# which step is resumed from does not depend on the load of the machine
SPREAD += ["checkpoint.background=false"]


@pytest.mark.cases(0, 0)
@pytest.mark.parametrize(
    ("layout", "before", "after"),
    [
        (
            {"data": 2, "context": 2, "expert": 4},
            "tensor 1 x pipeline 1 x context 2 x data 2 = 4 ranks, experts over 4",
            "tensor 1 x pipeline 1 x context 2 x data 1 = 2 ranks, experts over 2",
        ),
        (
            {"data": 2, "expert": 2},
            "tensor 1 x pipeline 1 x data 2 = 2 ranks, experts over 2",
            "tensor 1 x pipeline 1 x data 1 = 1 rank",
        ),
        (
            {"context": 2},
            "tensor 1 x pipeline 1 x context 2 x data 1 = 2 ranks",
            "tensor 1 x pipeline 1 x data 1 = 1 rank",
        ),
    ],
)  # fmt: skip
def test_a_run_with_experts_and_sequences_over_ranks_goes_on_with_all_ranks_and_with_fewer(
    layout: dict[str, int],
    before: str,
    after: str,
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    ranks = prod(size for axis, size in layout.items() if axis != "expert")
    last = ranks - 1
    deaths = [
        Death(last, "step", 5),
        Death(last, "step", 4, after=0),
        Death(last, "boot", 1, always=True, after=1),
    ]
    asked = [*SPREAD, *(f"parallel.{axis}={size}" for axis, size in layout.items())]
    code, run = die_in(deaths, run_file, tmp_path, monkeypatch, *asked)
    out, errors = capfd.readouterr()
    assert code == 0, errors
    assert f"{before} -> {after}" in out
    events = read_events(run, "restart")
    assert [event["ranks"] for event in events] == [ranks, ranks, ranks // 2]
    assert [event["step"] for event in events] == [3, 6, 6]
    whole = train_on(run_file, *EVALUATED, *SPREAD, f"train.folder={tmp_path / 'whole'}")
    assert_close(steps(run), steps(whole), 1e-9)
