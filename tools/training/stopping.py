"""Ends of a run that are no crash: signals, the errors that stop it, and their exit codes.

By a signal a run finishes its step, saves its state and exits with 128 + signal. SIGTERM comes from
process managers, SIGINT from Ctrl-C, SIGHUP from a closed terminal, SIGUSR1 from Slurm shortly
before the time limit, if requested. A second signal ends the run at once. One request may arrive
several times: `timeout` and systemd signal the launcher and its ranks, and the launcher passes its
signal on. A signal within a second of the first is therefore ignored.

A run that ends because of wrong input, because it stopped itself or because of a signal would end
in the same way if it were started again. Launchers know such an end by the reason that the rank has
noted, "Type: message", also of a rank that they have stopped before it could exit with its code.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from megaprec.comm.axis import Axis
from megaprec.durable import file_error
from megaprec.errors import UserError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
ECHO_SECONDS = 1.0  # after a signal, within which another one is the same request

OnSignal = Callable[[signal.Signals], None]


class Stopped(Exception):
    """The run ended because of a signal, with its state saved if it trains.

    exit_code: of the command, 128 + signal.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.exit_code = 128 + signal_number

    @classmethod
    def named_by(cls, reason: str) -> "Stopped":
        """Return the exception whose text, which ends with the signal's name, a rank has noted."""
        _, _, signal_name = reason.rpartition(" ")
        return cls(signal.Signals[signal_name])


def require_not_stopped(exit_code: int) -> None:
    """Raise Stopped if the exit code of local ranks says that a signal has stopped them; their
    launcher has printed it."""
    signal_number = exit_code - 128
    if signal_number in SIGNALS:
        raise Stopped(signal_number)


class TrainingDiverged(Exception):
    """Training stopped itself because steps keep overflowing or must not overflow.

    The command exits with code 3.
    """


class FaultyHardware(Exception):
    """Training stopped itself because a rank holds or computes wrong numbers.

    The command exits with code 3.

    hosts: names of the machines to leave out of the next start, each once.
    """

    def __init__(self, message: str, hosts: tuple[str, ...]) -> None:
        super().__init__(message)
        self.hosts = hosts


EXIT_CODES: dict[type[Exception], int] = {UserError: 2, TrainingDiverged: 3, FaultyHardware: 3}
ON_PURPOSE = (*EXIT_CODES, Stopped)


def as_user_error(error: Exception) -> Exception:
    """Return the exception that the user is told: UserError for a file that cannot be read or
    written. Its type is one of ON_PURPOSE, or another that is a crash.
    """
    if isinstance(error, OSError) and error.filename is not None:
        return UserError(file_error(error))
    # A subclass of UserError is noted and printed under the name that EXIT_CODES has.
    if isinstance(error, UserError):
        return UserError(*error.problems)
    return error


def ended_on_purpose(reason: str) -> bool:
    """Return True if a rank that has noted this reason ended on purpose."""
    beginnings = tuple(f"{error_type.__name__}: " for error_type in ON_PURPOSE)
    return reason.startswith(beginnings)


def code_of(reason: str, exitcode: int) -> int:
    """Return the exit code that belongs to a rank's reason, "" for none.

    exitcode: of its process, which the launcher may have stopped, by SIGTERM, before it exited by
        itself.
    """
    if reason.startswith(f"{Stopped.__name__}: "):
        return Stopped.named_by(reason).exit_code
    for error_type, code in EXIT_CODES.items():
        if reason.startswith(f"{error_type.__name__}: "):
            return code
    # A crash whose traceback was noted, and that the launcher was quicker to end.
    return 1 if reason and exitcode == -signal.SIGTERM else exitcode


def note_failure(error: Exception) -> None:
    """Store the reason of this rank's failure for the launcher, while handling `error`.

    The first reason stands, for what follows is a consequence. It is noted before the world is
    left, which takes long if other ranks wait, and during which the launcher may stop this rank.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not error_file or not os.path.exists(error_file):
        get_error_handler().record_exception(as_user_error(error))


def end_by_signal(signal_number: signal.Signals) -> None:
    """End this process by the signal, with the default handler."""
    signal.signal(signal_number, signal.SIG_DFL)
    os.kill(os.getpid(), signal_number)


@contextmanager
def listening(on_first: OnSignal, on_later: OnSignal = end_by_signal) -> Iterator[None]:
    """Within the context the first of SIGNALS calls `on_first`, and later ones call `on_later`.

    Repetitions of the first within ECHO_SECONDS call nothing. The old handlers are restored
    afterwards. An ignored SIGHUP (nohup) stays ignored. Must be used in the main thread.
    """
    first_time: float | None = None

    def on_signal(signal_number: int, frame: FrameType | None) -> None:
        nonlocal first_time
        if first_time is None:
            first_time = time.monotonic()
            on_first(signal.Signals(signal_number))
        elif time.monotonic() - first_time > ECHO_SECONDS:
            on_later(signal.Signals(signal_number))

    old_handlers = {signal_number: signal.getsignal(signal_number) for signal_number in SIGNALS}
    handled = list(SIGNALS)
    # nohup, which the user has asked for.
    if old_handlers[signal.SIGHUP] == signal.SIG_IGN:
        handled.remove(signal.SIGHUP)
    for signal_number in handled:
        signal.signal(signal_number, on_signal)
    # A launcher may have made Ctrl-C wait while this process began.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
    try:
        yield
    finally:
        for signal_number in handled:
            signal.signal(signal_number, old_handlers[signal_number])


def stop_together(received: int, world: Axis, device: torch.device, step: int) -> NoReturn:
    """Raise Stopped on all ranks after `step`, when their state is saved. Collective over the
    world.

    All ranks leave together, because a rank that exits early would abort the others.

    received: the signal that this rank received, 0 for none.
    """
    # Ranks may have received different signals: all stop by the highest.
    signal_number = world.max_(torch.tensor(float(received), device=device))
    stopped = Stopped(int(signal_number.item()))
    if world.rank == 0:
        print(
            f"{stopped} after step {step}, state saved: the same command goes on", file=sys.stderr
        )
    # Noted before the ranks meet: from then on this one may die of another signal, such as one that
    # reaches it later than the others, and has still stopped as it was told.
    note_failure(stopped)
    world.barrier()
    raise stopped
