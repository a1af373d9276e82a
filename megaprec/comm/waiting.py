"""Waits for other ranks, noted by the thread that waits.

Whoever watches a rank must know whether it computes or waits for others. It must not look at the
call stack of a thread that runs (`megaprec/diagnose/call_stack.py` has the reason). So the thread
itself notes when a wait begins and ends, which takes a microsecond; others read it. Outside of
`noted` a thread notes nothing.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

Result = TypeVar("Result")


class _Ledger(NamedTuple):
    """The time that one thread has waited.

    finished_seconds: the length of all waits that are over.
    begun: the time at which the present wait began; None between waits.
    """

    finished_seconds: float = 0.0
    begun: float | None = None


class Waits:
    """The waits of one thread for other ranks. Any thread may read them.

    awaited: what the thread waits for, in words, where it says so; "" elsewhere.
    """

    def __init__(self) -> None:
        self.awaited = ""
        self._ledger = _Ledger()  # replaced as a whole: a reader never sees a half of it

    def begin(self) -> None:
        """Note that a wait begins now."""
        self._ledger = _Ledger(self._ledger.finished_seconds, time.monotonic())

    def end(self) -> None:
        """Note that the wait is over."""
        self._ledger = _Ledger(self.seconds(time.monotonic()))

    @property
    def under_way(self) -> bool:
        """Return True if the thread waits now."""
        return self._ledger.begun is not None

    def seconds(self, now: float) -> float:
        """Return the seconds that the thread has waited until `now`, a `time.monotonic()`."""
        ledger = self._ledger  # read once: another thread may replace it at any time
        if ledger.begun is None:
            return ledger.finished_seconds
        return ledger.finished_seconds + max(0.0, now - ledger.begun)


class Transfer(Protocol):
    """A transfer that torch.distributed has started."""

    def wait(self) -> object:
        """Wait until the transfer is done."""
        ...


# Set per thread: the waits of a thread that reads data do not count as the main thread's.
_waits: ContextVar[Waits | None] = ContextVar("waits", default=None)


@contextmanager
def noted(waits: Waits) -> Iterator[None]:
    """Within the context, note the waits of this thread in `waits`."""
    token = _waits.set(waits)
    try:
        yield
    finally:
        _waits.reset(token)


@contextmanager
def waiting_for(awaited: str) -> Iterator[None]:
    """Note in words what the waits of this thread within the context are for."""
    waits = _waits.get()
    if waits is None:
        yield
        return
    waits.awaited = awaited
    yield
    # not after an error, of which the record of this rank then says what was awaited
    waits.awaited = ""


def wait_for(work: Transfer) -> None:
    """Wait for a transfer, and note the wait."""
    with waiting():
        work.wait()


@contextmanager
def waiting() -> Iterator[None]:
    """Note that this thread waits for other ranks within the context; not to be nested."""
    waits = _waits.get()
    if waits is None:
        yield
        return
    waits.begin()
    try:
        yield
    finally:
        waits.end()


@dataclass
class Pending(Generic[Result]):
    """A collective under way. A call waits for its end and returns its result.

    works: the transfers to wait for, in this order.
    result: what the transfers fill; not to be read before the call has returned.
    keep: tensors that only the transfers still read; a reference keeps their memory until the end.
    """

    works: Sequence[Transfer]
    result: Result
    keep: tuple[Tensor, ...] = ()

    def __call__(self) -> Result:
        for work in self.works:
            wait_for(work)
        return self.result
