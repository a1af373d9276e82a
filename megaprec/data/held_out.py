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
        return int((self.ends - self.begins).sum())

    def numbers(self, indices: NDArray[np.int64] | np.int64) -> NDArray[np.int64]:
        """Return the numbers at indices in [0, len(self)), of the same shape."""
        if self.in_turn:
            row, block = np.divmod(indices, len(self.begins))
            return self.begins[block] + row
        lengths = self.ends - self.begins
        before = np.cumsum(lengths) - lengths  # indices of the ranges before each one
        block = np.searchsorted(before, indices, side="right") - 1
        return self.begins[block] + indices - before[block]

    def index_of(self, number: int) -> int:
        """Return how many of the numbers are below `number`: its index in ascending order if it is
        one of them."""
        return int(self.count_below(np.array(number)))

    def count_below(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many of the numbers are below each one of `numbers`, of the same shape."""
        lengths = self.ends - self.begins
        before = np.cumsum(lengths) - lengths
        block = np.searchsorted(self.begins, numbers, side="right") - 1
        of_block = np.minimum(numbers - self.begins[block], lengths[block])
        return np.where(block < 0, 0, before[block] + of_block)

    def tokens(self, length: int) -> "Ranges":
        """Return the tokens of samples of so many tokens."""
        return Ranges(self.begins * length, self.ends * length)

    def beginning(self, count: int) -> "Ranges":
        """Return the first `count` numbers in ascending order."""
        lengths = self.ends - self.begins
        before = np.cumsum(lengths) - lengths
        ends = self.begins + np.clip(count - before, 0, lengths)
        return Ranges(self.begins, ends)

    def shared_tokens(self, length: int, others: "Ranges", others_length: int) -> int:
        """Return the number of targets that these samples and others of the same stream share.

        length, others_length: tokens of a sample.
        """
        begins = np.maximum.outer(self.begins * length, others.begins * others_length)
        ends = np.minimum.outer(self.ends * length, others.ends * others_length)
        return int(np.clip(ends - begins, 0, None).sum())


def divide(total: int, held_out: int, rule: HeldOutRule) -> tuple[Ranges, Ranges]:
    """Return the numbers of the training samples and of the held-out samples of a stream.

    total: number of all samples. held_out: of those that are held out, in [1, total).
    """
    if rule == "end":
        border = total - held_out
        return Ranges.single(0, border), Ranges.single(border, total)
    blocks = min(BLOCKS, held_out)
    sizes = _equal_parts(held_out, blocks)
    # Each stretch is as large a share of the stream as its run is of the part.
    shares = np.cumsum(sizes).tolist()
    borders = np.array([0, *(total * share // held_out for share in shares)], np.int64)
    begins = borders[:-1] + _offsets(np.diff(borders) - sizes)
    ends = begins + sizes
    train_begins = np.concatenate(([0], ends))
    train_ends = np.concatenate((begins, [total]))
    is_there = train_begins < train_ends
    training = Ranges(train_begins[is_there], train_ends[is_there])
    return training, Ranges(begins, ends, in_turn=True)


def taken_in_turn(total: int) -> Ranges:
    """Return all samples of a stream, in an order in which any beginning is from everywhere."""
    widths = _equal_parts(total, max(1, min(BLOCKS, total)))
    ends = np.cumsum(widths)
    return Ranges(ends - widths, ends, in_turn=True)


def _equal_parts(total: int, parts: int) -> NDArray[np.int64]:
    """Return the sizes of equal parts of a whole; the first ones are larger by the rest."""
    size, rest = divmod(total, parts)
    return size + (np.arange(parts) < rest).astype(np.int64)


def _offsets(slack: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a number in [0, slack] for each block, from multiples of the golden ratio."""
    offsets = np.empty_like(slack)
    for block, room in enumerate(slack.tolist()):
        fraction = (block + 1) * GOLDEN % 2**64
        offsets[block] = fraction * (room + 1) >> 64
    return offsets
