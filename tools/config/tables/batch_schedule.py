"""The global batch of each step, and the length of its sequences: constant, or functions of the
samples that were consumed before (train.batch_schedule, train.seq_schedule).

The rule is Megatron-LM's (megatron/core/num_microbatches_calculator.py): a step has the batch that
holds at its first sample. A change that falls within a step counts from the next step on, so no
batch is cut, and no sample is left out or taken twice. Nothing is remembered between calls: a
resumed run and a run in another layout have the same batches.

A sample is train.seq_length tokens of the data, whatever the schedule. A step of shorter sequences
has the same samples, each cut into pieces that follow each other. So a step keeps its tokens, and
the place in the data, its epochs and its blend are those of the run without a schedule. As with
batches, a step has the length that holds at its first sample.
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


@dataclass(frozen=True)
class LengthSchedule:
    """The lengths of a run. changes: pairs of consumed samples and the length from there on; the
    first is at 0, and the samples increase strictly. longest: the length of a sample."""

    changes: tuple[tuple[int, int], ...]
    longest: int

    @classmethod
    def of(cls, train: Train) -> "LengthSchedule":
        """Return that of [train], which the checks of a run file have passed."""
        length = train.seq_length
        return cls(train.seq_schedule or ((0, length),), length)

    @property
    def lengths(self) -> list[int]:
        """Return the different lengths, the shortest first."""
        return sorted({length for _, length in self.changes})

    @cached_property
    def _thresholds(self) -> list[int]:
        return [threshold for threshold, _ in self.changes]

    def at(self, consumed: int) -> int:
        """Return the length of the sequences of the step that begins after `consumed` samples."""
        _, length = self.changes[bisect_right(self._thresholds, consumed) - 1]
        return length

    def are_whole(self, begin: int, end: int) -> bool:
        """Return True if the steps in these samples have sequences of whole samples."""
        lengths = [length for samples, length in self.changes if begin < samples < end]
        return {self.at(begin), *lengths} == {self.longest}

    def pieces_at(self, consumed: int) -> int:
        """Return the number of sequences that each sample of this step is cut into."""
        return self.longest // self.at(consumed)
