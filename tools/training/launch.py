"""Local ranks: their start with torch's elastic agent, the signals for them, and why they ended.

`launch_local` runs this program once per rank and waits. The ranks meet at a store that only this
user reaches (`parallel.local_store`). When a rank fails, the others are stopped, and the caller's
`again` says how many ranks are started again; if none, its exit code is returned, and its reason,
stored by `note_failure`, is printed last. A signal to the launcher is passed on to the ranks, which
may take their time to end; a second signal kills them. After a signal no rank is started.

If something else has started the ranks (torchrun, Kubernetes, srun), nothing is launched: see
`parallel.described_world`.
"""

import logging
import os
import resource
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megaprec.errors import UserError
from megaprec.scratch import scratch_folder
from parallel.local_store import STORE, served_store
from tools.training.ends import (
    EXIT_CODES,
    SIGNALS,
    RankHangs,
    RanksFailed,
    Stopped,
    code_of,
    ended_on_purpose,
    require_not_stopped,
)
from tools.training.launched import (
    OURS,
    RESTARTED,
    LostRank,
    OnLostRank,
    lost_connection,
    share_of_cores,
)
from tools.training.one_machine import LOOPBACK, OneMachine
from tools.training.stopping import end_by_signal, listening

# Not `-m megaprec`, for the caller need not have megaprec installed. Ctrl-C ends a rank without a
# traceback, for the launcher reports it. One that came while Python itself started has waited until
# then (`_Agent`). On Linux a rank ends when its launcher is killed (prctl's option 1 is
# PR_SET_PDEATHSIG); elsewhere it would keep running.
PROGRAM = """
import ctypes, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
sys.path.insert(0, sys.argv.pop(1))
sys.argv[0] = "megaprec"
from megaprec.__main__ import main
sys.exit(main())
"""
CONNECT_SECONDS = 10.0  # that a connection within this machine may take
OPEN_FILES = 32  # of a launcher, or of a rank, without those that each rank adds
# the launcher's pipe and its store's connection; a rank's connections to its peers
OPEN_FILES_PER_RANK = 2


# takes the lines that say why ranks ended
Tell = Callable[[str], object]


def _no_restart(lost_rank: LostRank) -> int:
    return 0


def _tell_on_stderr(lines: str) -> None:
    print(lines, file=sys.stderr, flush=True)


def launch_local(
    argv: Sequence[str],
    ranks: int,
    threads: int = 0,
    again: OnLostRank = _no_restart,
    tell: Tell = _tell_on_stderr,
) -> int:
    """Run `megaprec <argv>` on `ranks` local ranks and return the exit code; see `start_ranks`."""
    return start_ranks(own_program(argv), ranks, threads, again, tell)


def run_local(argv: Sequence[str], ranks: int) -> None:
    """Run `megaprec <argv>` on `ranks` local ranks. Raises RanksFailed, with the lines that have
    been printed, if they do not end well."""
    told = list[str]()

    def tell(lines: str) -> None:
        _tell_on_stderr(lines)
        told.append(lines)

    code = launch_local(argv, ranks, tell=tell)
    # the first rank has told a signal itself
    require_not_stopped(code)
    if code:
        raise RanksFailed("\n".join(told), code)


def own_program(argv: Sequence[str]) -> list[str]:
    """Return the command line of a process that runs `megaprec <argv>`, and that is killed if this
    one ends.
    """
    root = Path(__file__).resolve().parents[2]  # the folder of all packages
    # -P: a file of the working directory must not hide a module.
    return [sys.executable, "-P", "-c", PROGRAM, str(root), *argv]


def start_ranks(
    command: Sequence[str],
    ranks: int,
    threads: int = 0,
    again: OnLostRank = _no_restart,
    tell: Tell = _tell_on_stderr,
) -> int:
    """Run `command` once per rank with torchrun's variables set, and wait for all.

    threads: CPU threads per rank; 0 takes OMP_NUM_THREADS if it is set, otherwise an equal share of
    the cores. again: called after each failure that no signal to the launcher has caused. tell:
    given the lines that say why the ranks ended. Returns 0, or the exit code of the first rank that
    failed (128 + signal if a signal ended it or the launcher). Raises UserError if ranks cannot
    meet here.
    """
    require_local_meeting(ranks)
    with (
        scratch_folder("ranks") as failures_folder,
        _launching(threads or share_of_cores(ranks)),
    ):
        local_ranks = _Ranks(command, failures_folder)
        try:
            with listening(local_ranks.pass_on, local_ranks.kill):
                failures = local_ranks.run(ranks)
                while failures and not local_ranks.received:
                    ranks = again(lost_rank_of(failures))
                    if not ranks:
                        break
                    os.environ[RESTARTED] = "1"
                    failures = local_ranks.run(ranks)
        except SignalException as stop:
            return _tell_stopped(stop.sigval, tell)
        return exit_code(failures, local_ranks.received, tell) if failures else 0


def require_local_meeting(ranks: int) -> None:
    """Raise UserError if local ranks cannot meet on this machine.

    torch's store tries for minutes to reach a port that cannot be reached, prints traces of C++
    meanwhile, and answers no signal. So the loopback interface and the limit of open files are
    tried before it is asked. A soft limit that is too low is raised as far as the hard limit
    allows.
    """
    _require_open_files(OPEN_FILES + OPEN_FILES_PER_RANK * ranks)
    _require_loopback()


def _require_open_files(needed: int) -> None:
    """Raise this process's soft limit of open files to `needed`, if it is lower. Raises UserError
    if the hard limit is lower too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError.of("training.open_files", limit=hard, needed=needed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _require_loopback() -> None:
    """Raise UserError if this process cannot connect to a port of its own."""
    try:
        # As torch's store would: a server, and a connection to it.
        with socket.create_server((LOOPBACK, 0)) as server:
            address = server.getsockname()[:2]
            socket.create_connection(address, CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError.of(
            "training.loopback", loopback=LOOPBACK, reason=error.strerror or error
        ) from error


def lost_rank_of(failures: Mapping[int, ProcessFailure]) -> LostRank:
    """Return the rank that failed first, with the exit code of its reason."""
    rank, failure = first_failure(failures)
    return LostRank(rank, _code_of_failure(failure), _last_lines(rank, failure))


def exit_code(
    failures: Mapping[int, ProcessFailure],
    received: signal.Signals | None,
    tell: Tell = _tell_on_stderr,
) -> int:
    """Tell why the ranks ended, unless they have, and return the exit code.

    received: the signal that was passed on to them.
    """
    rank, failure = first_failure(failures, received)
    code = _code_of_failure(failure)
    stop_codes = [128 + signal_number for signal_number in SIGNALS]
    if code in stop_codes and _noted_reason(failure).startswith(Stopped.__name__):
        return code  # the first rank has told that it stopped, and that the state is saved
    if received and code == 128 + received:
        return code
    # The agent ends ranks that take long by SIGTERM, and then by SIGKILL.
    if received and code in (-received, -signal.SIGTERM, -signal.SIGKILL):
        return _tell_stopped(received, tell)
    tell(_last_lines(rank, failure))
    return 128 - code if code < 0 else code  # as a shell tells an end by a signal


def _tell_stopped(signal_number: signal.Signals, tell: Tell) -> int:
    """Tell that the signal stopped the run; return the exit code."""
    tell(f"stopped by {signal_number.name}")
    return 128 + signal_number


class _Agent(LocalElasticAgent):
    """torch's agent, which starts all ranks, or none if a signal came before. One that comes
    meanwhile is passed on.

    The ranks inherit that Ctrl-C waits, until they can end by it without a traceback of Python's
    own start (`PROGRAM`).
    """

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs, ranks: "_Ranks") -> None:
        super().__init__(spec, logs)
        self._ranks = ranks

    def _start_workers(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, worker_group: WorkerGroup
    ) -> dict[int, Any]:
        """Return the process ID of each rank started. Raises SignalException, with no rank
        started, if a signal came before."""
        if received := self._ranks.received:
            raise SignalException(f"got {received.name}", received)
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            processes = super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        self._ranks.pids = list(processes.values())
        if received := self._ranks.received:  # before the processes were known
            self._ranks.pass_on(received)
        return processes


class _Ranks:
    """Processes of `command` under torch's agent.

    failures_folder: where the agent stores the reasons of failures.
    """

    def __init__(self, command: Sequence[str], failures_folder: str) -> None:
        # the agent would substitute $name
        self.command = [word.replace("$", "$$") for word in command]
        self.failures_folder = failures_folder
        self.pids: list[int] = []  # while ranks run
        # the signal that was passed on, or came before there were ranks
        self.received: signal.Signals | None = None

    def run(self, ranks: int) -> Mapping[int, ProcessFailure]:
        """Start ranks, wait for all and return those that failed. Raises SignalException for a
        signal before they started.
        """
        spec = WorkerSpec(
            role="rank",
            local_world_size=ranks,
            rdzv_handler=OneMachine(OURS + uuid.uuid4().hex),
            entrypoint=self.command[0],
            args=tuple(self.command[1:]),
            # `again` decides on restarts, also on fewer ranks, which the agent cannot
            max_restarts=0,
            local_addr=LOOPBACK,
        )
        agent = _Agent(spec, DefaultLogsSpecs(log_dir=self.failures_folder), self)
        with served_store() as store:
            os.environ[STORE] = str(store)
            try:
                return cast(RunResult, agent.run()).failures
            finally:
                self.pids = []

    def pass_on(self, signal_number: signal.Signals) -> None:
        """Send each rank the signal that this process received. If there is none yet, none will be
        started.
        """
        self.received = signal_number
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal_number)

    def kill(self, signal_number: signal.Signals) -> None:
        """Kill each rank and its child processes; the agent then finds them failed. Without ranks,
        end here.
        """
        if not self.pids:
            end_by_signal(signal_number)
        for pid in self.pids:
            with suppress(ProcessLookupError):
                # The agent has made each rank the leader of a group.
                os.killpg(pid, signal.SIGKILL)


def first_failure(
    failures: Mapping[int, ProcessFailure], received: signal.Signals | None = None
) -> tuple[int, ProcessFailure]:
    """Return the rank that failed first: the earliest to store a reason of its own.

    A rank that left because another hangs comes first: its reason names the cause. A lost
    connection is a consequence, whenever it was noted, and so is the end of a rank that the
    launcher stopped before it had noted a reason. The end of a rank by the signal that was passed
    on is a consequence too, but may be the cause of lost connections: not all ranks hear it at the
    same time.

    received: the signal that was passed on to the ranks, if there was one.
    """

    def order(rank: int) -> tuple[bool, int, float]:
        failure = failures[rank]
        reason = _noted_reason(failure)
        # torch records the times of failures in whole seconds, but a rank that loses its peer fails
        # within milliseconds: the time of the file is finer.
        note = Path(failure.error_file)
        failed_at = note.stat().st_mtime if note.is_file() else failure.timestamp
        return (
            not reason.startswith(RankHangs.__name__),
            _distance_from_cause(reason, failure.exitcode, received),
            failed_at,
        )

    rank = min(failures, key=order)
    return rank, failures[rank]


def _distance_from_cause(reason: str, exitcode: int, received: signal.Signals | None) -> int:
    """Return how far the end of a rank is from the cause of all ends: 0 if it may be the cause."""
    # Ended by the signal itself, or by the launcher after it.
    if not reason and received and exitcode in (-received, -signal.SIGTERM):
        return 1
    # Such a rank has seen that another one ended.
    if lost_connection(reason) and not ended_on_purpose(reason):
        return 2
    return 3 if not reason and exitcode == -signal.SIGTERM else 0


def _noted_reason(failure: ProcessFailure) -> str:
    """Return what `note_failure` stored, as "Type: message"; "" if the rank gave no reason."""
    # torch says str, but it is what record_exception wrote: {"message": ...}
    note: Any = failure.message
    return note["message"] if isinstance(note, dict) else ""


def _code_of_failure(failure: ProcessFailure) -> int:
    return code_of(_noted_reason(failure), failure.exitcode)


def _last_lines(rank: int, failure: ProcessFailure) -> str:
    """Return the lines that say how a rank ended and why: one for a crash, and all for an end on
    purpose, as by wrong input.
    """
    code = _code_of_failure(failure)
    reason = _noted_reason(failure)
    if code < 0:
        ending = f"was ended by {failure.signal_name()}"
    else:
        ending = f"failed with exit code {code}"
    if code < 0 and not reason:
        return f"rank {rank} {ending}"
    if reason.startswith(RankHangs.__name__):
        _, _, message = reason.partition(": ")  # which names the rank that hangs
        return message
    lines = reason.splitlines() or ["no reason given"]
    shown = "\n".join(lines if code in EXIT_CODES.values() else lines[:1])
    return f"rank {rank} {ending}: {shown}"


@contextmanager
def _launching(threads: int) -> Iterator[None]:
    """Within the context, set the thread count that ranks inherit, and silence the agent's log."""
    old_environment = dict(os.environ)
    old_handler = signal.getsignal(signal.SIGQUIT)
    os.environ.pop(RESTARTED, None)  # which a shell may have left
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # this launcher handles the others
    # torch's profiler would tell of each of its starts
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    # The agent logs tracebacks of its own for each failure; `exit_code` prints the reason once.
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        os.environ.clear()
        os.environ.update(old_environment)
        signal.signal(signal.SIGQUIT, old_handler)
