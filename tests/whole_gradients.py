"""Counts the bytes of whole gradients that ZeRO-2 holds at the same time."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megaprec.optim.grad_buffer import GradBuffer


class WholeGradients:
    """Bytes of whole gradients that are allocated on this rank, and the most so far."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0

    def count(self, gradients: GradBuffer) -> None:
        """Count the whole of `gradients` until its memory is given up, also by who reduces it."""
        whole = gradients.whole
        assert whole is not None
        self.now += whole.nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(whole, self._release, whole.nbytes)

    def _release(self, size: int) -> None:
        self.now -= size


@contextmanager
def counted_whole_gradients() -> Iterator[WholeGradients]:
    """Count those of optimizers that are built inside."""
    counted = WholeGradients()
    make_room = GradBuffer.make_room

    def counting(self: GradBuffer) -> None:
        is_new = self.whole is None
        make_room(self)
        if is_new:
            counted.count(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(GradBuffer, "make_room", counting)
        yield counted
