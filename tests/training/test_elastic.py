"""Ranks of torchrun, which restarts them after any failure, and on the machines that are left."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaprec.errors import UserError
from parallel.described_world import INTERACTIVE_STEP
from tests.hosts import ADDRESSES, Hosts, two_hosts
from tests.refusals import raises, shows
from tests.runs import assert_close, steps, train, train_on, write_run
from tools.config.run_file import load_run
from tools.journal.records import read_events
from tools.training.elastic import in_this_world, reason_to_end, require_fresh_store
from tools.training.launched import OURS

ROOT = Path(__file__).parents[2]
EXACT = ["precision.compute=fp64"]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


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
    (tmp_path / "attempt_0" / "1" / "error.json").write_text(
        json.dumps({"message": {"message": reason}})
    )
    own = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "attempt_1" / "0" / "error.json")}
    assert reason_to_end({**own, "TORCHELASTIC_RESTART_COUNT": "1"}) == (reason if told else "")
    assert reason_to_end({**own, "TORCHELASTIC_RESTART_COUNT": "0"}) == ""
    assert reason_to_end({}) == ""


@pytest.mark.parametrize("written", ["", "{", "[]", '{"message": "text"}'])
def test_a_reason_that_was_not_written_whole_is_none(written: str, tmp_path: Path) -> None:
    (tmp_path / "attempt_0" / "0").mkdir(parents=True)
    (tmp_path / "attempt_0" / "0" / "error.json").write_text(written)
    file = str(tmp_path / "attempt_1" / "0" / "error.json")
    assert reason_to_end({"TORCHELASTIC_ERROR_FILE": file, "TORCHELASTIC_RESTART_COUNT": "1"}) == ""


def test_a_run_file_without_a_layout_has_a_replica_on_each_rank_of_the_world(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    config = in_this_world(load_run(run_file, ["parallel.zero=false"]))
    assert (config.world_size, config.parallel.data, config.origin("parallel.data")) == (
        4,
        4,
        "4 ranks in the world",
    )
    assert (
        capsys.readouterr().out
        == "parallel   no layout is given: parallel.data = 4, a replica on each of 4 ranks\n"
    )
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert in_this_world(load_run(run_file)).world_size == 1
    assert not capsys.readouterr().out


def test_a_world_that_the_batch_cannot_be_divided_among_is_refused_or_has_spares(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match="no layout is given, so each of the 3 ranks is a replica"):
        in_this_world(load_run(run_file))
    assert in_this_world(load_run(run_file, ["parallel.elastic=true"])).parallel.data == 2
    assert os.environ["WORLD_SIZE"] == "2"


def test_in_a_shell_of_slurm_the_tasks_that_are_not_there_are_told_and_not_the_batches(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "3",
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_ID": INTERACTIVE_STEP,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(UserError, match="no other task is there: start the command with srun"):
        in_this_world(load_run(run_file))


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "data"])
def test_a_layout_that_names_an_axis_is_not_made_larger(
    axis: str, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with raises("config.world_size", world_size=4):
        in_this_world(load_run(run_file, [f"parallel.{axis}=1"]))


def torchrun(
    run_file: Path, *overrides: str, ranks: int, restarts: int, **environment: str
) -> tuple[int, str]:
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
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("restarts", ["0", "1"])
@pytest.mark.parametrize("launcher", ["torchrun", OURS])
@pytest.mark.parametrize("shared", ["True", "False"])
def test_a_store_is_refused_only_where_torchrun_would_restart_ranks_over_it(
    elastic: bool,
    restarts: str,
    launcher: str,
    shared: str,
    run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", launcher)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    config = load_run(run_file, [f"parallel.elastic={str(elastic).lower()}"])
    if (elastic or restarts == "1") and launcher == "torchrun" and shared == "True":
        with raises("training.shared_store"):
            require_fresh_store(config)
    else:
        require_fresh_store(config)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_torchrun_is_refused_if_its_restarts_would_meet_the_addresses_of_ranks_that_are_gone(
    run_file: Path, tmp_path: Path
) -> None:
    overrides = [f"train.folder={tmp_path}", "parallel.tensor=2"]
    code, said = torchrun(
        run_file, *overrides, ranks=2, restarts=1, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0"
    )
    assert code
    assert shows(said, "training.shared_store")
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_a_run_that_stopped_itself_does_not_train_again_when_torchrun_restarts_it(
    run_file: Path, tmp_path: Path
) -> None:
    overflows = [
        "precision.compute=fp16",
        "precision.initial_scale=1e30",
        'precision.on_nonfinite="raise"',
    ]
    overrides = [*overflows, f"train.folder={tmp_path}", "parallel.tensor=2"]
    code, said = torchrun(
        run_file, *overrides, ranks=2, restarts=1, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"
    )
    assert code
    assert shows(
        said,
        "training.restarted_on_purpose",
        reason=re.compile("^TrainingDiverged: stopped after step 1"),
    )
    assert len(steps(tmp_path)) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_ranks_beyond_the_layout_are_spares_that_end_with_the_run(
    run_file: Path, tmp_path: Path
) -> None:
    overrides = ["parallel.data=4", "parallel.elastic=true", "train.global_batch=8"]
    fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    code, said = torchrun(
        run_file, *overrides, f"train.folder={tmp_path / 'one'}", ranks=3, restarts=0, **fresh
    )
    assert code == 0, said
    now = "tensor 1 x pipeline 1 x data 2 = 2 ranks"
    assert (
        f"elastic    3 ranks are there: tensor 1 x pipeline 1 x data 4 = 4 ranks -> {now}, 1 "
        "spare\n"
    ) in said
    assert steps(tmp_path / "one") == steps(
        train_on(run_file, f"train.folder={tmp_path / 'two'}", data=2)
    )


def machine(hosts: Hosts, host: int, run_file: Path, folder: Path) -> subprocess.Popen:
    """The template's torchrun on a host, with one rank; the first host is the one that must
    live."""
    meet = {
        "HEAD": ADDRESSES[0],
        "PORT": "29500",
        "NODES": "1:2",
        "RANKS": "1",
        "IS_HOST": str(1 - host),
    }
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    own = {
        "ADDRESS": ADDRESSES[host],
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    elastic = [
        "parallel.elastic=true",
        "parallel.data=2",
        "checkpoint.every=5",
        "parallel.timeout=10",
    ]
    endless = ["train.steps=1000000", "lr.peak=1e-6", f"train.folder={folder}", "log.every=10"]
    words = [
        "bash",
        str(ROOT / "examples" / "torchrun.sh"),
        str(run_file),
        *EXACT,
        *elastic,
        *endless,
    ]
    with (folder.parent / "machines.log").open("ab") as log:
        return hosts.start(host, words, meet | own, log)


def until_applied(folder: Path, ranks: int, more: int = 10) -> None:
    """Wait until a world of so many ranks has taken some steps."""
    deadline = time.monotonic() + 1200
    began: int | None = None
    while began is None or (steps(folder) or [{"step": 0}])[-1]["step"] < began + more:
        assert time.monotonic() < deadline, (folder.parent / "machines.log").read_text()[-5000:]
        time.sleep(0.2)
        last = read_events(folder, "restart")[-1:] or [{"ranks": 2, "step": 0}]
        if last[0]["ranks"] == ranks and (folder / "metrics.jsonl").is_file():
            began = last[0]["step"]


@pytest.mark.cases(0, 0)
@pytest.mark.parametrize(
    "lost",
    [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.campaign)],
    ids=["host is lost", "link is cut"],
)
def test_a_run_on_two_hosts_goes_on_on_one_and_takes_the_other_in_again(
    lost: bool, run_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with two_hosts() as hosts:
        first, second = (machine(hosts, host, run_file, folder) for host in range(2))
        until_applied(folder, 2)
        if lost:
            hosts.lose(1)
        else:
            hosts.cut()
        until_applied(folder, 1)
        assert second.wait(600) != 0
        hosts.mend()
        second = machine(hosts, 1, run_file, folder)
        until_applied(folder, 2)
        for one in (first, second):
            one.terminate()
        for one in (first, second):
            one.wait(600)
    assert [event["ranks"] for event in read_events(folder, "restart")] == [1, 2]
    taken = len(steps(folder))
    undisturbed = [
        *EXACT,
        f"train.steps={taken}",
        "lr.peak=1e-6",
        f"train.folder={tmp_path / 'whole'}",
    ]
    assert train(run_file, *undisturbed) == 0
    assert_close(steps(folder), steps(tmp_path / "whole"), 1e-9)
