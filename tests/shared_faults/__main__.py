"""Tries planted faults in all gates, and writes the table of which gate finds which.

Goes on where an earlier call has ended. Each trial is a forked process, in which the fault is
planted before tests are imported.
"""

import argparse
import json
import multiprocessing.forkserver as forkserver
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import torch

import tests.ranks
from tests.project.forked_command import import_all
from tests.shared_faults import planted
from tests.shared_faults.faults import FAULTS
from tests.shared_faults.gates import GATES, Verdict
from tests.shared_faults.table import KILLS, read_kills, write_kills, write_page

UNKNOWN = "unknown"
ROOT = Path(__file__).parents[2]


def main() -> int:
    """Returns 1 if a trial has ended without a verdict."""
    parser = argparse.ArgumentParser(prog="python -m tests.shared_faults", description=__doc__)
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--gates", nargs="*", default=list(GATES), choices=list(GATES))
    parser.add_argument("--kept", type=Path, default=KILLS, help="file of the verdicts")
    parser.add_argument("--again", action="store_true", help="also what has a verdict")
    parser.add_argument("--seconds", type=int, default=1200, help="after which a trial is given up")
    parser.add_argument("--output", type=Path, help="folder for the output of each trial")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    torch.set_num_threads(1)
    import_all()
    _start_server_of_ranks()
    unknown = 0
    for gate in arguments.gates:
        for fault in arguments.faults:
            kills = read_kills(arguments.kept)
            if gate in kills.get(fault, {}) and not arguments.again:
                continue
            began = time.monotonic()
            verdict = tried(fault, gate, arguments.seconds, arguments.output)
            seconds = time.monotonic() - began
            print(f"{gate}: {fault}: {verdict.verdict}: {verdict.by} ({seconds:.0f} s)", flush=True)
            if verdict.verdict == UNKNOWN:
                unknown += 1
                continue
            kills = read_kills(arguments.kept)
            kills.setdefault(fault, {})[gate] = asdict(verdict)
            write_kills(kills, arguments.kept)
    if arguments.kept == KILLS:
        write_page(read_kills(KILLS))
    return int(unknown > 0)


def _start_server_of_ranks() -> None:
    """Start the server that ranks are forked from, for all trials: each would start its own."""
    tests.ranks._server.set_forkserver_preload([*tests.ranks._imported, tests.ranks.LAST])
    forkserver.ensure_running()


def tried(fault: str, gate: str, seconds: int, output: Path | None) -> Verdict:
    """The verdict of a gate on a fault, by a process of its own."""
    with tempfile.TemporaryDirectory(prefix="megaprec_fault_") as temporary:
        folder = Path(temporary)
        process = os.fork()
        if process == 0:
            os.setpgid(0, 0)
            _try_here(fault, gate, folder, output or folder)
        try:
            _wait(process, seconds)
        finally:
            _end_group(process)
        answer = folder / "verdict.json"
        if not answer.exists():
            return Verdict(UNKNOWN, "no answer")
        return Verdict(**json.loads(answer.read_text()))


def _wait(process: int, seconds: int) -> None:
    end = time.monotonic() + seconds
    while os.waitpid(process, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return
        time.sleep(0.05)


def _end_group(process: int) -> None:
    """End what a trial has left."""
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:
        return


def _try_here(fault: str, gate: str, folder: Path, output: Path) -> None:
    """Try the gate, write its verdict, and end this process."""
    name = f"{gate} {fault}".replace(" ", "_").replace("'", "")
    stream = os.open(output / f"{name}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(stream, number)
    try:
        # the server is that of the process that has forked this one
        setattr(forkserver._forkserver, "ensure_running", lambda: None)  # noqa: B010
        setattr(tests.ranks, "_preload", lambda modules: None)  # noqa: B010
        planted.plant(fault)
        run = folder / "run"
        run.mkdir()
        verdict = GATES[gate](FAULTS[fault], run)
        (folder / "verdict.json").write_text(json.dumps(asdict(verdict)))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
