"""Stopping a run by a signal: it finishes its step, saves its state and exits with 128 + signal.

SIGTERM comes from process managers, SIGINT from Ctrl-C, SIGHUP from a closed terminal, SIGUSR1 from
Slurm shortly before the time limit, if requested. A second signal ends the run at once. One request
may arrive several times: `timeout` and systemd signal the launcher and its ranks, and the launcher
passes its signal on. A signal within a second of the first is therefore ignored.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
ECHO = 1.0  # seconds after a signal within which another one is the same request

OnSignal = Callable[[signal.Signals], None]


class Stopped(Exception):
    """The run ended because of a signal, with its state saved.

    code: exit code of the command, 128 + signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.code = 128 + number

    @classmethod
    def named_by(cls, reason: str) -> "Stopped":
        """Return the exception whose text, which ends with the signal's name, a rank has noted."""
        _, _, signal_name = reason.rpartition(" ")
        return cls(signal.Signals[signal_name])


def end_by_signal(number: signal.Signals) -> None:
    """End this process by the signal, with the default handler."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@contextmanager
def listening(first: OnSignal, again: OnSignal = end_by_signal) -> Iterator[None]:
    """Within the context the first of SIGNALS calls `first` and later ones call `again`.

    Repetitions of the first within ECHO seconds call nothing.

    The old handlers are restored afterwards. An ignored SIGHUP (nohup) stays ignored. Must be used
    in the main thread.
    """
    first_time: float | None = None

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal first_time
        if first_time is None:
            first_time = time.monotonic()
            first(signal.Signals(number))
        elif time.monotonic() - first_time > ECHO:
            again(signal.Signals(number))

    old_handlers = {number: signal.getsignal(number) for number in SIGNALS}
    handled = list(SIGNALS)
    if old_handlers[signal.SIGHUP] == signal.SIG_IGN:
        handled.remove(signal.SIGHUP)
    for number in handled:
        signal.signal(number, on_signal)
    # a launcher may have made Ctrl-C wait while this process began
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, old_handlers[number])
