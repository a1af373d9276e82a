"""Local ranks: what they are told, how they end, and that none is left behind."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megaprec.resources import cores
from parallel.described_world import WORLD, is_rank_of_world, read_number
from tests.refusals import raises, sentence
from tests.runs import write_run
from tools import cli
from tools.training import launch
from tools.training.launch import PROGRAM, first_failure, require_local_meeting, start_ranks
from tools.training.launched import share_of_cores
from tools.training.machine import has_own_device

ROOT = Path(__file__).parents[2]
REPORT = """
import json, os, pathlib, sys
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps([dict(os.environ), sys.argv[2:]]))
"""
FAIL = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
if os.environ["RANK"] == "0":
    Path(sys.argv[1]).write_text(str(os.getpid()))
    time.sleep(900)
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
from tools.training.stopping import note_failure
from megaprec.errors import UserError
from tools.training.ends import TrainingDiverged
try:
    raise UserError("data.source: empty", "data.vocab_size: too large")
except UserError as error:
    note_failure(error)
    sys.exit(2)
"""
CRASH = (
    "import os, signal, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), "
    "signal.SIGSEGV); time.sleep(900)"
)
WAIT = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_DFL)  # end without a traceback
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
pathlib.Path(sys.argv[1], str(os.getpid())).touch()
time.sleep(900)
"""


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(autouse=True)
def _no_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.slow
def test_ranks_are_told_their_world_and_get_the_arguments_untouched(tmp_path: Path) -> None:
    assert start_ranks(python(REPORT, tmp_path, "cost=$5 $$ ${rank}"), ranks=2) == 0
    told = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert [(env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) for env, _ in told] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]
    assert {env["MASTER_ADDR"] for env, _ in told} == {"127.0.0.1"}
    assert [arguments for _, arguments in told] == [["cost=$5 $$ ${rank}"]] * 2
    assert all(is_rank_of_world(env) for env, _ in told)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("threads", "asked", "given"), [(3, None, "3"), (0, "5", "5"), (3, "5", "3"), (0, None, None)]
)
def test_threads_are_those_asked_for_or_a_share_of_the_cores(
    threads: int,
    asked: str | None,
    given: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tools.training.launched.cores", lambda: 9)
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert start_ranks(python(REPORT, tmp_path), 2, threads) == 0
    assert json.loads((tmp_path / "0").read_text())[0]["OMP_NUM_THREADS"] == (given or "4")


def test_ranks_never_get_more_threads_than_there_are_cores_while_there_are_enough() -> None:
    here = cores()
    assert all(ranks * share_of_cores(ranks) <= here for ranks in range(1, here + 1))
    assert share_of_cores(here + 1) == 1


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("code", "kind", "more"),
    [
        (2, "UserError", ["data.vocab_size: too large"]),
        (3, "TrainingDiverged", []),
        (1, "RuntimeError", []),
    ],
)
def test_the_first_failure_ends_the_run_with_its_code_and_its_reason_last(
    code: int, kind: str, more: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    failing = FAIL.replace("sys.exit(2)", f"sys.exit({code})").replace(
        "except UserError", f"except {kind}"
    )
    if kind != "UserError":
        failing = failing.replace(
            'UserError("data.source: empty", "data.vocab_size: too large")', f'{kind}("no end")'
        )
    assert start_ranks(python(failing, tmp_path / "pid"), ranks=2) == code
    first, *others = capfd.readouterr().err.splitlines()
    assert first.startswith(f"rank 1 failed with exit code {code}: {kind}: ") and others == more
    assert not alive(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_a_rank_that_crashes_is_named_with_its_signal(capfd: pytest.CaptureFixture[str]) -> None:
    assert start_ranks(python(CRASH), ranks=2) == 128 + signal.SIGSEGV
    assert capfd.readouterr().err == "rank 1 was ended by SIGSEGV\n"


def test_launching_leaves_this_process_as_it_was() -> None:
    before = dict(os.environ)
    start_ranks(python("pass"), ranks=1)
    assert os.environ == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_stops_all_ranks(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    start = f"start_ranks({python(WAIT, tmp_path)!r}, 2)"
    program = f"import sys; from tools.training.launch import start_ranks; sys.exit({start})"
    with subprocess.Popen(python(program), cwd=ROOT, stderr=subprocess.PIPE, text=True) as launcher:
        deadline = time.monotonic() + 1200
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        ranks = [int(path.name) for path in tmp_path.iterdir()]
        launcher.send_signal(number)
        assert launcher.communicate(timeout=1200)[1] == f"stopped by {number.name}\n"
    assert launcher.returncode == code
    assert len(ranks) == 2
    assert not any(alive(pid) for pid in ranks)


@pytest.mark.parametrize("command", ["calibrate", "doctor"])
def test_a_command_whose_ranks_a_signal_stops_ends_with_its_code(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And neither with a verdict on what the ranks had no time for nor with one on the machine."""
    monkeypatch.setattr(launch, "launch_local", lambda *words, **tell: 128 + signal.SIGTERM)
    monkeypatch.chdir(tmp_path)
    assert cli.main([command]) == 128 + signal.SIGTERM
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("command", "code"), [("calibrate", 2), ("doctor", 1)])
def test_why_the_ranks_of_a_command_failed_stands_in_its_document(
    command: str,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(words: Sequence[str], ranks: int, tell: Callable[[str], object]) -> int:
        tell("rank 1 failed with exit code 2: UserError: its disk is full")
        return 2

    monkeypatch.setattr(launch, "launch_local", fails)
    monkeypatch.chdir(tmp_path)
    assert cli.main([command, "--json"]) == code
    assert "its disk is full" in json.dumps(json.loads(capsys.readouterr().out))


def test_the_first_failure_is_the_one_noted_first_and_not_a_rank_stopped_before_it_noted_one(
    tmp_path: Path,
) -> None:
    def failure(rank: int, exitcode: int, second: float) -> ProcessFailure:
        note = tmp_path / f"{rank}.json"
        note.write_text(
            json.dumps({"message": {"message": f"{rank}", "extraInfo": {"timestamp": "100"}}})
        )
        os.utime(note, (second, second))
        return ProcessFailure(rank, 1, exitcode, str(note))

    stopped = ProcessFailure(2, 1, -signal.SIGTERM, str(tmp_path / "none"))
    stopped.timestamp = 1
    failures = {0: failure(0, 1, 100.5), 1: failure(1, 3, 100.2), 2: stopped}
    rank, found = first_failure(failures)
    assert (rank, found.exitcode) == (1, 3)
    # it had noted its own reason before it was stopped
    failures[2] = failure(2, -signal.SIGTERM, 100.1)
    assert first_failure(failures)[0] == 2


def test_ranks_run_our_program_even_where_the_user_has_a_folder_called_megaprec(
    tmp_path: Path,
) -> None:
    for place, word in (("ours", "right"), ("users", "wrong")):
        folder = tmp_path / place / "megaprec"
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "__main__.py").write_text(
            f"import sys\ndef main(): print('{word}', sys.argv[1:])\n"
        )
    command = [sys.executable, "-P", "-c", PROGRAM, str(tmp_path / "ours"), "train", "x"]
    users = tmp_path / "users"
    searched = {**os.environ, "PYTHONPATH": str(users)}
    done = subprocess.run(
        command, cwd=users, env=searched, capture_output=True, text=True, check=True
    )
    assert done.stdout == "right ['train', 'x']\n"


@pytest.mark.parametrize(
    ("devices", "said", "own"),
    [
        (1, {"SLURM_PROCID": "0", "SLURM_GPUS_PER_TASK": "1"}, True),
        (1, {"SLURM_PROCID": "0", "LOCAL_WORLD_SIZE": "2", "SLURM_GPUS_ON_NODE": "2"}, True),
        (1, {"SLURM_PROCID": "0", "LOCAL_WORLD_SIZE": "2", "SLURM_GPUS_ON_NODE": "1"}, False),
        (2, {"SLURM_PROCID": "0", "SLURM_GPUS_PER_TASK": "2"}, False),
        (1, {"SLURM_GPUS_PER_TASK": "1"}, False),
    ],
)
def test_a_lone_device_is_a_tasks_own_only_if_slurm_gave_it_to_that_task(
    devices: int, said: dict[str, str], own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices)
    assert has_own_device(said) is own


STUCK = f"""
import argparse, atexit, sys, time
sys.path.insert(0, {str(ROOT)!r})
import torch.distributed as dist
from megaprec.errors import UserError
from parallel import mesh
from tools import cli

mesh.PARTING = 0.1
dist.destroy_process_group = lambda: time.sleep(900)  # as NCCL's does while another rank waits for this one
atexit.register(time.sleep, 60)  # and does again when the process ends

def fail(args):
    with mesh.world():
        raise {{error}}

cli._parser_of = lambda called: argparse.ArgumentParser(argument_default=None, add_help=False)
argparse.Namespace.run = staticmethod(fail)
argparse.Namespace.command = "train"
argparse.Namespace.overrides = ()
argparse.Namespace.json = False
sys.exit(cli.main(["word"]))
"""


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("error", "code", "last"),
    [
        ("UserError('the disk is full')", 2, "the disk is full"),
        ("ValueError('a bug')", 1, "ValueError: a bug"),
    ],
)
def test_a_rank_that_failed_alone_says_why_and_ends_though_its_world_cannot_be_left(
    error: str, code: int, last: str
) -> None:
    ended = subprocess.run(
        python(STUCK.format(error=error)), capture_output=True, text=True, timeout=1200, check=False
    )
    assert ended.returncode == code
    assert ended.stderr.splitlines()[-1] == last


def without(limit: str) -> list[str]:
    """The words before a command that take open files or the loopback interface away."""
    if limit == "files":
        return ["sh", "-c", 'ulimit -n 24 && exec "$@"', "sh"]
    if (
        os.geteuid() != 0
        or subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode
    ):
        pytest.skip("network namespaces need root and Linux")
    return ["unshare", "-n"]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("limit", "ranks", "says"),
    [
        (
            "files",
            2,
            sentence("training.open_files", limit=24, needed=36) + "\n",
        ),
        (
            "loopback",
            2,
            (sentence("training.loopback", loopback="127.0.0.1", reason="Network is unreachable")),
        ),
        (
            "loopback",
            1,
            sentence(
                "parallel.no_interface",
                reason=re.compile("Unable to find (?:interface|address) for: "),
            ),
        ),
    ],
)
def test_a_machine_on_which_ranks_cannot_meet_is_told_at_once(
    limit: str, ranks: int, says: str, tmp_path: Path
) -> None:
    file = write_run(tmp_path)
    command = [
        sys.executable,
        "-m",
        "megaprec",
        *(["doctor"] if ranks > 1 else ["train", str(file)]),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    whole = [*without(limit), *command]
    done = subprocess.run(
        whole, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 2 and re.search(says, done.stderr), done.stderr
    assert "frame #" not in done.stderr and "Traceback" not in done.stderr


def test_a_soft_limit_of_open_files_is_raised_as_far_as_ranks_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = {"soft": (20, 4096), "endless": (20, resource.RLIM_INFINITY), "enough": (64, 64)}
    raised = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: raised.append(both))
    for both in limits.values():
        monkeypatch.setattr(resource, "getrlimit", lambda kind, both=both: both)
        require_local_meeting(2)
    assert raised == [(36, 4096), (36, resource.RLIM_INFINITY)]


def test_a_variable_of_a_launcher_that_is_set_to_nothing_counts_as_not_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a container has it that passes on what its host did not set."""
    names = (
        *WORLD,
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
    )
    for name in names:
        monkeypatch.setenv(name, "")
    file = write_run(tmp_path)
    assert cli.main(["train", str(file), "train.steps=1"]) == 0
    assert "step 1/1" in capsys.readouterr().out
    monkeypatch.setenv("LOCAL_RANK", "first")
    monkeypatch.setenv("WORLD_SIZE", "")
    with raises("parallel.launcher_number", name="LOCAL_RANK", text="first"):
        read_number("LOCAL_RANK", default="0")


def test_no_variable_of_a_launcher_is_read_as_a_number_without_a_refusal() -> None:
    asks = re.compile(r"\bint\((os\.)?environ\b")
    found = [
        str(path.relative_to(ROOT))
        for package in ("megaprec", "parallel", "models", "tools")
        for path in (ROOT / package).rglob("*.py")
        if asks.search(path.read_text())
    ]
    assert not found, "read_number of parallel/described_world.py names the variable"
