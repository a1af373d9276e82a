"""The global batch of each step: constant, or a function of the samples that were consumed before
(train.batch_schedule).

The rule is Megatron-LM's (megatron/core/num_microbatches_calculator.py): a step has the batch that
holds at its first sample. A change that falls within a step counts from the next step on, so no
batch is cut, and no sample is left out or taken twice. Nothing is remembered between calls: a
resumed run and a run in another layout have the same batches.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import NamedTuple

from tools.config.tables.settings import Train


class Stretch(NamedTuple):
    """Consecutive steps of one batch. first: samples that are consumed before them. steps: their
    number; None for the steps after the last change, which have no end."""

    first: int
    batch: int
    steps: int | None


@dataclass(frozen=True)
class BatchSchedule:
    """The batches of a run. changes: pairs of consumed samples and the batch from there on; the
    first is at 0, and the samples increase strictly."""

    changes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, train: Train) -> "BatchSchedule":
        """Return that of [train], which the checks of a run file have passed."""
        return cls(train.batch_schedule or ((0, train.global_batch),))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The different batches, the smallest first."""
        return tuple(sorted({batch for _, batch in self.changes}))

    @cached_property
    def common_divisor(self) -> int:
        """The largest number that divides all batches."""
        return gcd(*self.sizes)

    @cached_property
    def _thresholds(self) -> list[int]:
        return [threshold for threshold, _ in self.changes]

    def at(self, consumed: int) -> int:
        """Return the batch of the step that begins after `consumed` samples."""
        _, batch = self.changes[bisect_right(self._thresholds, consumed) - 1]
        return batch

    def before(self, consumed: int) -> int:
        """Return the batch of the step that ended after `consumed` samples.

        If no step of this schedule ends there, as in a run that had other batches before, it is
        that of the last sample.
        """
        for batch in self.sizes:
            first = consumed - batch
            if first >= 0 and self.at(first) == batch:
                return batch
        return self.at(max(0, consumed - 1))

    def stretches(self, consumed: int = 0) -> Iterator[Stretch]:
        """Yield the steps that begin after `consumed` samples, by batch."""
        index = bisect_right(self._thresholds, consumed)
        while index < len(self.changes):
            batch = self.at(consumed)
            left = self._thresholds[index] - consumed
            steps = -(-left // batch)  # rounded up: the last step may pass the threshold
            yield Stretch(consumed, batch, steps)
            consumed += steps * batch
            index = bisect_right(self._thresholds, consumed)
        yield Stretch(consumed, self.at(consumed), None)

    def after(self, consumed: int, steps: int) -> int:
        """Return the samples that are consumed when `steps` steps follow on `consumed` samples."""
        left = steps
        for stretch in self.stretches(consumed):
            if stretch.steps is None or left <= stretch.steps:
                return stretch.first + left * stretch.batch
            left -= stretch.steps
        raise AssertionError("the last stretch has no end")

    def steps_until(self, consumed: int, target: int) -> int:
        """Return the number of steps after `consumed` samples that end at or before `target`
        samples."""
        done = 0
        for stretch in self.stretches(consumed):
            whole = max(0, target - stretch.first) // stretch.batch
            if stretch.steps is None or whole < stretch.steps:
                return done + whole
            done += stretch.steps
        raise AssertionError("the last stretch has no end")

    def steps_by_batch(self, steps: int) -> dict[int, int]:
        """Return how many of the first `steps` steps of a run have each batch."""
        counts = dict[int, int]()
        left = steps
        for stretch in self.stretches():
            taken = left
            if stretch.steps is not None:
                taken = min(left, stretch.steps)
            if taken:
                counts.setdefault(stretch.batch, 0)
                counts[stretch.batch] += taken
            left -= taken
        return counts
