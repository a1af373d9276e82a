"""The samples of a stream that are kept for evaluation, by one of two rules.

`end`: the last ones. Cheap to reason about and Megatron-LM's rule, but the last documents of a text
may be unlike the others: their loss then says more about them than about the model.

`everywhere`: BLOCKS runs of neighbouring samples, or fewer of a small part, one in each of as many
stretches of the stream. So the part is drawn like the training text. Where a run begins
within its stretch follows from multiples of the golden ratio, which are spread evenly: the part is
a function of two numbers of samples alone, the same for every seed. A document that is longer than
a run lies on both sides.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

HeldOutRule = Literal["everywhere", "end"]
BLOCKS = 64
GOLDEN = 0x9E3779B97F4A7C15  # the fraction of the golden ratio, times 2^64


@dataclass(frozen=True, eq=False)
class Ranges:
    """Numbers of samples: ranges that do not overlap, in ascending order.

    begins, ends: int64 [ranges], of which ends are not included.
    in_turn: the first of each range comes first, then the second of each, so that any beginning
        is from everywhere; no range may be longer than one before it, nor shorter by more than
        one. False: range after range.
    """

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    in_turn: bool = False

    @classmethod
    def single(cls, begin: int, end: int) -> "Ranges":
        """Return one range."""
        return cls(np.array([begin], np.int64), np.array([end], np.int64))

    def __len__(self) -> int:
        return int(self._lengths().sum())

    def _lengths(self) -> NDArray[np.int64]:
        """Return how many numbers each range has."""
        return self.ends - self.begins

    def _numbers_before(self) -> NDArray[np.int64]:
        """Return how many numbers the ranges before each one have."""
        lengths = self._lengths()
        return np.cumsum(lengths) - lengths

    def numbers(self, indices: NDArray[np.int64] | np.int64) -> NDArray[np.int64]:
        """Return the numbers at indices in [0, len(self)), of the same shape."""
        if self.in_turn:
            row, block = np.divmod(indices, len(self.begins))
            return self.begins[block] + row
        first_index = self._numbers_before()
        block = np.searchsorted(first_index, indices, side="right") - 1
        within_block = indices - first_index[block]
        return self.begins[block] + within_block

    def index_of(self, number: int) -> int:
        """Return how many of the numbers are below `number`: its index in ascending order if it is
        one of them."""
        return int(self.count_below(np.array(number)))

    def count_below(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many of the numbers are below each one of `numbers`, of the same shape."""
        # of the range that begins last before each number; -1: none does
        block = np.searchsorted(self.begins, numbers, side="right") - 1
        lengths = self._lengths()
        within_block = np.minimum(numbers - self.begins[block], lengths[block])
        below = self._numbers_before()[block] + within_block
        return np.where(block < 0, 0, below)

    def tokens(self, length: int) -> "Ranges":
        """Return the tokens of samples of so many tokens."""
        return Ranges(self.begins * length, self.ends * length)

    def beginning(self, count: int) -> "Ranges":
        """Return the first `count` numbers in ascending order."""
        left_over = count - self._numbers_before()
        taken = np.clip(left_over, 0, self._lengths())
        return Ranges(self.begins, self.begins + taken)

    def shared_tokens(self, length: int, others: "Ranges", others_length: int) -> int:
        """Return the number of targets that these samples and others of the same stream share.

        length, others_length: tokens of a sample.
        """
        own = self.tokens(length)
        other = others.tokens(others_length)
        # [own ranges, other ranges]: where each two overlap
        begins = np.maximum.outer(own.begins, other.begins)
        ends = np.minimum.outer(own.ends, other.ends)
        overlaps = np.clip(ends - begins, 0, None)
        return int(overlaps.sum())


def divide(total: int, held_out: int, rule: HeldOutRule) -> tuple[Ranges, Ranges]:
    """Return the numbers of the training samples and of the held-out samples of a stream.

    total: number of all samples. held_out: of those that are held out, in [1, total).
    """
    if rule == "end":
        border = total - held_out
        return Ranges.single(0, border), Ranges.single(border, total)
    blocks = min(BLOCKS, held_out)
    sizes = _equal_parts(held_out, blocks)
    # Each stretch is as large a share of the stream as its run is of the part. The products may be
    # beyond 64 bits: Python's integers.
    stretch_ends = []
    for held_out_so_far in np.cumsum(sizes).tolist():
        stretch_ends.append(total * held_out_so_far // held_out)
    borders = np.array([0, *stretch_ends], np.int64)
    slack = np.diff(borders) - sizes
    begins = borders[:-1] + _offsets(slack)
    ends = begins + sizes
    # what lies between the runs, of which some may be neighbours
    train_begins = np.concatenate(([0], ends))
    train_ends = np.concatenate((begins, [total]))
    is_there = train_begins < train_ends
    training = Ranges(train_begins[is_there], train_ends[is_there])
    return training, Ranges(begins, ends, in_turn=True)


def taken_in_turn(total: int) -> Ranges:
    """Return all samples of a stream, in an order in which any beginning is from everywhere."""
    blocks = max(1, min(BLOCKS, total))
    widths = _equal_parts(total, blocks)
    ends = np.cumsum(widths)
    return Ranges(ends - widths, ends, in_turn=True)


def _equal_parts(total: int, parts: int) -> NDArray[np.int64]:
    """Return the sizes of equal parts of a whole; the first ones are larger by the rest."""
    size, rest = divmod(total, parts)
    sizes = np.full(parts, size, np.int64)
    sizes[:rest] += 1
    return sizes


def _offsets(slack: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a number in [0, slack] for each block, from multiples of the golden ratio."""
    offsets = np.empty_like(slack)
    for block, room in enumerate(slack.tolist()):
        fraction = (block + 1) * GOLDEN % 2**64
        offsets[block] = fraction * (room + 1) >> 64
    return offsets
