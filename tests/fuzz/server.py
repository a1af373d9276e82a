"""Runs command lines of megaprec in forked processes, each with a limit of processor time, of
memory and of time.

The server is an interpreter, or a fork of one, that has imported the command and what it imports
late, and nothing else has happened in: a fork of it starts in milliseconds. Local ranks are not
started, their number is: `RANKS` and more are a fault. A run that has begun to train is stopped
after some steps, one that builds a model too large for this machine soon. `faults` says what is
wrong with how a command ended.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from tests.project.forked_command import import_all
from tools import cli
from tools.journal.records import METRICS
from tools.training import launch
from tools.training.launched import OnLostRank

RANKS = 4096  # more than this on one machine is a slip
STEPS = 3  # of training, after which a run has shown that it trains
WORK = 5  # once a command has said that it is at work, it is given this part of its processor time
LONGEST_LINE = 2500  # characters on stderr
# Exit codes of commands, besides 0 and 2: a run that stops itself, layouts that differ, data with
# notes, a run that has no room.
FINE = {"train": 3, "parity": 1, "data verify": 1, "plan": 4}
WALL = 900.0  # seconds; processor time is what counts, for the machine may be busy
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Command:
    """A command line, the folder where it is run, and its limits: seconds of processor time, bytes
    of memory."""

    argv: Sequence[str]
    folder: str
    seconds: int = 20
    memory: int = 1 << 30


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit code (negative: a signal), output, seconds of processor time, bytes
    of memory that it took more than the server."""

    code: int
    out: str
    err: str
    seconds: float
    memory: int


class Server:
    """The server's process, started by `with`. python: its interpreter."""

    def __init__(self, python: Path) -> None:
        self._python = python

    def __enter__(self) -> Self:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [self._python, "-m", "tests.fuzz.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, command: Command) -> Ended:
        """Runs one command and waits for its end."""
        sent = self._process.stdin
        answers = self._process.stdout
        assert sent and answers
        sent.write(json.dumps(asdict(command)) + "\n")
        sent.flush()
        return Ended(**json.loads(answers.readline()))


def faults(command: Command, ended: Ended) -> list[str]:
    """What is wrong with how a command ended; empty if it did its work or refused in plain
    lines."""
    found = []
    last = (ended.err.strip().splitlines() or [""])[-1][:300]
    if "Traceback" in ended.err + ended.out:
        found.append(f"traceback: {last}")
    elif ended.code in (-signal.SIGXCPU, -signal.SIGKILL):
        if not _is_at_work(command, ended.out, ended.err):
            found.append(
                f"no end after {ended.seconds:.0f} s of processor time: "
                f"{(ended.out + ended.err)[-100:]!r}"
            )
    elif ended.code < 0:
        found.append(f"ended by {signal.Signals(-ended.code).name}: {last}")
    elif ended.code not in (
        0,
        2,
        FINE.get(" ".join(command.argv[:2]), 0),
        FINE.get(command.argv[0], 0),
    ):
        found.append(f"exit code {ended.code}: {last}")
    if ended.code == 2 and not (ended.err + ended.out).strip():
        found.append("exit code 2 without a word")
    longest = max(ended.err.splitlines(), key=len, default="")
    if len(longest) > LONGEST_LINE:
        found.append(f"a line of {len(longest)} characters: {longest[:60]}...{longest[-60:]}")
    if ended.memory > command.memory and not _is_at_work(command, ended.out, ended.err):
        found.append(f"took {ended.memory >> 20} MiB: {last}")
    return found


def _is_at_work(command: Command, out: str, err: str) -> bool:
    """A run has begun to build its model or to train; text is generated until there is enough."""
    return (
        "\nmemory " in out
        or "building a model" in err
        or (command.argv[0] == "generate" and bool(out))
    )


def _serve() -> None:
    """Answers the commands on stdin, one a line, until it ends."""
    import_all()
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for line in sys.stdin:
        print(json.dumps(asdict(_answer(Command(**json.loads(line)), own))), flush=True)


def _answer(command: Command, own: int) -> Ended:
    folder = Path(command.folder).parent
    out = folder / "out"
    err = folder / "err"
    if (pid := os.fork()) == 0:
        _child(command, out, err)
    waiter = threading.Timer(WALL, lambda: os.killpg(pid, signal.SIGKILL))
    waiter.start()
    _, status, usage = os.wait4(pid, 0)
    waiter.cancel()
    waiter.join()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # whatever it has left behind
    code = os.waitstatus_to_exitcode(status)
    out_said = _said(out)
    err_said = _said(err)
    return Ended(
        code,
        out_said,
        err_said,
        usage.ru_utime + usage.ru_stime,
        max(0, usage.ru_maxrss - own) << 10,
    )


def _said(path: Path) -> str:
    if path.exists():
        return path.read_text("utf-8", "backslashreplace")[:200_000]
    return ""


def _child(command: Command, out: Path, err: Path) -> None:
    """The forked process: its limits, its output in files, and the command; never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        os.chdir(command.folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        resource.setrlimit(resource.RLIMIT_CPU, (command.seconds, command.seconds + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = taken + 4 * command.memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        launch.launch_local = _no_ranks
        threading.Thread(target=_stop_training, args=(Path.cwd(),), daemon=True).start()
        threading.Thread(target=_limit_work, args=(command, out, err), daemon=True).start()
        code = cli.main(command.argv)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _no_ranks(
    command: Sequence[str], ranks: int, threads: int = 0, again: OnLostRank | None = None
) -> int:
    if ranks > RANKS:
        raise AssertionError(f"{ranks} ranks would be started")
    print(f"{ranks} ranks would be started")
    return 0


def _stop_training(folder: Path) -> None:
    """Ends this process once a run has written some steps."""
    began = {path: path.stat().st_size for path in folder.rglob(METRICS) if path.is_file()}
    while True:
        time.sleep(0.05)
        for path in folder.glob(f"*/{METRICS}"):
            with contextlib.suppress(OSError):
                if path.stat().st_size - began.get(path, 0) > 1000 * STEPS:
                    os._exit(0)


def _limit_work(command: Command, out: Path, err: Path) -> None:
    """Gives this process a part of its processor time once it is at work, if it had more left."""
    while not _is_at_work(command, _said(out), _said(err)):
        time.sleep(0.2)
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(
        resource.RLIMIT_CPU, (min(soft, int(time.process_time()) + command.seconds // WORK), hard)
    )


if __name__ == "__main__":
    _serve()
