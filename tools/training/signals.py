"""How a run is told to end: by a signal, after which it finishes its step, saves its state and exits with 128 + signal.

SIGTERM comes from whoever stops programs, SIGINT from Ctrl-C, SIGHUP from a closed terminal, SIGUSR1 from Slurm shortly
before time is up, if asked to. A second signal ends the run at once. But many say one request twice: `timeout` and
systemd signal a launcher and its ranks, and the launcher hands on what it got; so what follows within a second is an
echo of the first.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
ECHO = 1.0  # seconds after a signal in which another one is the same request

OnSignal = Callable[[signal.Signals], None]


class Stopped(Exception):
    """A run has ended because a signal said so, its state saved. code: what the command exits with, 128 + signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.code = 128 + number


def end(number: signal.Signals) -> None:
    """Ends this process by the signal, as if nobody had listened to it."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@contextmanager
def listening(first: OnSignal, again: OnSignal = end) -> Iterator[None]:
    """Within it the first of SIGNALS calls `first`, and later ones but its echo `again`; after it all is as before.

    A SIGHUP that is ignored, as nohup has it, stays so. For the main thread, which makes both calls.
    """
    told: float | None = None

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if told is None:
            told = time.monotonic()
            first(signal.Signals(number))
        elif time.monotonic() - told > ECHO:
            again(signal.Signals(number))

    before = {number: signal.getsignal(number) for number in SIGNALS}
    heard = [n for n in SIGNALS if n != signal.SIGHUP or before[n] != signal.SIG_IGN]
    for number in heard:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])
