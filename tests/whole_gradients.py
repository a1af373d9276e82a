"""Counts the bytes of whole gradients that ZeRO-2 holds at the same time."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import Tensor

from megaprec.optim.state.grad_buffer import GradBuffer


class WholeGradients:
    """Bytes of whole gradients that are allocated on this rank, and the most so far."""

    def __init__(self) -> None:
        self.peak = 0
        self._tensors: list[weakref.ref[Tensor]] = []

    def count(self, gradients: GradBuffer) -> None:
        """Count the whole of `gradients` until its memory is given up, also by who reduces it."""
        assert gradients.whole is not None
        self._tensors.append(weakref.ref(gradients.whole))
        self.peak = max(self.peak, self.now)

    @property
    def now(self) -> int:
        """The bytes that are allocated now."""
        tensors = [reference() for reference in self._tensors]
        return sum(x.untyped_storage().nbytes() for x in tensors if x is not None)


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
