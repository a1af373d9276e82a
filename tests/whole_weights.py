"""Counts the bytes of weights that ZeRO-3 gathers, and holds whole at the same time."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megaprec.comm.axis import Axis
from megaprec.optim.state.weight_buffer import WeightBuffer


class GatheredWeights:
    """Bytes of weights that were gathered and not given up on this rank, the most so far, and the
    sum of all that were gathered."""

    def __init__(self) -> None:
        self.peak = 0
        self.total = 0
        self._gathered: dict[WeightBuffer, int] = {}

    def add(self, weights: WeightBuffer) -> None:
        size = weights.whole.untyped_storage().nbytes()
        if weights not in self._gathered:
            self.total += size
        self._gathered[weights] = size
        self.peak = max(self.peak, self.now)

    def remove(self, weights: WeightBuffer) -> None:
        self._gathered.pop(weights, None)

    @property
    def now(self) -> int:
        """The bytes that are whole now."""
        return sum(self._gathered.values())


@contextmanager
def counted_whole_weights() -> Iterator[GatheredWeights]:
    """Count those of optimizers whose passes run inside."""
    counted = GatheredWeights()
    start_gather = WeightBuffer.start_gather
    free = WeightBuffer.free

    def counting(self: WeightBuffer, shards: Axis, tag: int) -> None:
        start_gather(self, shards, tag)
        if self.sharded:
            counted.add(self)

    def forgetting(self: WeightBuffer) -> None:
        free(self)
        if self.sharded:
            counted.remove(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(WeightBuffer, "start_gather", counting)
        patched.setattr(WeightBuffer, "free", forgetting)
        yield counted
