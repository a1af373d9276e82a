"""Signals, by which a run ends with its state saved, and the note of why a rank failed.

By a signal a run finishes its step, saves its state and exits with 128 + signal. SIGTERM comes from
process managers, SIGINT from Ctrl-C, SIGHUP from a closed terminal, SIGUSR1 from Slurm shortly
before the time limit, if requested. A second signal ends the run at once. One request may arrive
several times: `timeout` and systemd signal the launcher and its ranks, and the launcher passes its
signal on. A signal within a second of the first is therefore ignored.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from megaprec.comm.axis import Axis
from megaprec.durable import put_text
from megaprec.errors import UserError
from tools.training.ends import SIGNALS, Stopped, as_user_error

ECHO_SECONDS = 1.0  # after a signal, within which another one is the same request

OnSignal = Callable[[signal.Signals], None]


def note_failure(error: Exception) -> None:
    """Store the reason of this rank's failure for the launcher, while handling `error`.

    The first reason stands, for what follows is a consequence. It is noted before the world is
    left, which takes long if other ranks wait, and during which the launcher may stop this rank.
    The note of what a user can correct has no traceback: torchrun prints the whole note, and says
    it last.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if error_file and os.path.exists(error_file):
        return
    cause = as_user_error(error)
    if error_file and isinstance(cause, UserError):
        _note_line(error_file, cause)
    else:
        get_error_handler().record_exception(cause)


def _note_line(error_file: str, error: UserError) -> None:
    """Write an error as torchrun reads it."""
    seconds = int(time.time())
    note = {"message": f"UserError: {error}", "extraInfo": {"timestamp": str(seconds)}}
    put_text(Path(error_file), json.dumps({"message": note}))


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
