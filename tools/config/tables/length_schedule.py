"""The length of the sequences of each step: constant, or a function of the samples that were
consumed before (train.seq_schedule).

A sample is train.seq_length tokens of the data, whatever the schedule. A step of shorter sequences
has the same samples, each cut into pieces that follow each other. So a step keeps its tokens, and
the place in the data, its epochs and its blend are those of the run without a schedule. As with
batches, a step has the length that holds at its first sample.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

from tools.config.tables.settings import Train


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
