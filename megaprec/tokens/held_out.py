"""The samples of a stream that are kept for evaluation, by one of two rules.

`end`: the last ones. Cheap to reason about and Megatron-LM's rule, but the last documents of a text
may be unlike the others: their loss then says more about them than about the model.

`everywhere`: the stream is cut into PIECES stretches, and of each one piece of neighbouring samples
is held out. So the held-out part is like the training text. (A part of fewer samples than PIECES
has as many pieces as samples.) Where a piece begins within its stretch is no random choice: it
follows from the fractional parts of multiples of the golden ratio, which are spread evenly over [0,
1). So the part depends on the numbers of samples and of held-out samples alone, and is the same for
every seed. A document that is longer than a piece lies in both parts.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

HeldOutRule = Literal["everywhere", "end"]
Integers = NDArray[np.int64]
PIECES = 64
GOLDEN = 0x9E3779B97F4A7C15  # the fraction of the golden ratio, times 2^64


@dataclass(frozen=True, eq=False)
class Ranges:
    """A sequence of sample numbers: those of ranges [begin, end) that do not overlap and ascend.

    begins, ends: int64 [ranges].
    in_turn: the order of the sequence. False: range after range. True: the first number of each
        range, then the second of each, and so on, each time through the ranges in `_spread_order`,
        so that any beginning of the sequence is from all over the stream. No range may then be
        longer than one before it, nor shorter by more than one.
    """

    begins: Integers
    ends: Integers
    in_turn: bool = False

    @classmethod
    def single(cls, begin: int, end: int) -> "Ranges":
        """Return one range."""
        begins = _integers([begin])
        ends = _integers([end])
        return cls(begins, ends)

    def __len__(self) -> int:
        """Return how many numbers all ranges have together."""
        total = self._lengths().sum()
        return int(total)

    def _lengths(self) -> Integers:
        """Return how many numbers each range has."""
        return self.ends - self.begins

    def _numbers_before(self) -> Integers:
        """Return how many numbers the ranges before each one have."""
        lengths = self._lengths()
        numbers_so_far = np.cumsum(lengths)
        return numbers_so_far - lengths

    def numbers(self, indices: Integers | np.int64) -> Integers:
        """Return the numbers at these indices, each in [0, len(self)), of the sequence; of the
        shape of `indices`."""
        if self.in_turn:
            # each round takes one number of every range
            position_in_range, turn = np.divmod(indices, len(self.begins))
            range_index = self._range_in_turn(position_in_range, turn)
        else:
            first_indices = self._numbers_before()
            ranges_begun = np.searchsorted(first_indices, indices, side="right")
            range_index = ranges_begun - 1
            position_in_range = indices - first_indices[range_index]
        return self.begins[range_index] + position_in_range

    def _range_in_turn(self, position_in_range: Integers, turn: Integers) -> Integers:
        """Return which range it is the turn of, for the order `in_turn`; of the shape of the
        arguments.

        position_in_range: the number of the round, from 0 on.
        turn: within the round, from 0 on.
        """
        lengths = self._lengths()
        largest_length = lengths.max()
        order = _spread_order(len(lengths))
        # only the longest ranges, which may be all, have a number for the last round
        is_longest = lengths[order] == largest_length
        longest = order[is_longest]
        is_last_round = position_in_range == largest_length - 1
        # of other rounds turns may be beyond the longest: any value does, it is not selected
        possible_turn = np.minimum(turn, len(longest) - 1)
        in_last_round = longest[possible_turn]
        in_other_rounds = order[turn]
        return np.where(is_last_round, in_last_round, in_other_rounds)

    def index_of(self, number: int) -> int:
        """Return how many of the numbers are below `number`. If it is one of them, that is its
        index among all in ascending order."""
        asked = np.array(number)
        below = self.count_below(asked)
        return int(below)

    def count_below(self, numbers: Integers) -> Integers:
        """Return how many of the numbers are below each one of `numbers`, of the same shape."""
        # the last range that begins at the number or before it; -1: none does
        ranges_begun = np.searchsorted(self.begins, numbers, side="right")
        range_index = ranges_begun - 1
        distance = numbers - self.begins[range_index]
        length = self._lengths()[range_index]
        in_this_range = np.minimum(distance, length)  # all of it, if the number is behind its end
        in_ranges_before = self._numbers_before()[range_index]
        below = in_ranges_before + in_this_range
        is_before_all = range_index < 0
        return np.where(is_before_all, 0, below)

    def tokens(self, length: int) -> "Ranges":
        """Return the ranges of tokens that these samples have, if each has `length` tokens."""
        begins = self.begins * length
        ends = self.ends * length
        return Ranges(begins, ends)

    def beginning(self, count: int) -> "Ranges":
        """Return the first `count` numbers in ascending order."""
        # of `count`, what is left for each range after those before it
        left_over = count - self._numbers_before()
        lengths = self._lengths()
        taken = np.clip(left_over, 0, lengths)
        ends = self.begins + taken
        return Ranges(self.begins, ends)

    def shared_tokens(self, length: int, others: "Ranges", others_length: int) -> int:
        """Return the number of targets that these samples and others of the same stream share.

        length, others_length: tokens of a sample.
        """
        own = self.tokens(length)
        other = others.tokens(others_length)
        # [own ranges, other ranges]: where each two overlap
        begins = np.maximum.outer(own.begins, other.begins)
        ends = np.minimum.outer(own.ends, other.ends)
        # below 0 where two are apart
        differences = ends - begins
        overlaps = np.clip(differences, 0, None)
        num_shared = overlaps.sum()
        return int(num_shared)


def divide(total: int, held_out: int, rule: HeldOutRule) -> tuple[Ranges, Ranges]:
    """Return the numbers of the training samples and of the held-out samples of a stream.

    total: number of all samples. held_out: of those that are held out, in [1, total).
    """
    if rule == "end":
        border = total - held_out
        training = Ranges.single(0, border)
        last_ones = Ranges.single(border, total)
        return training, last_ones
    pieces = _pieces_everywhere(total, held_out)
    training = _between(pieces, total)
    return training, pieces


def _pieces_everywhere(total: int, held_out: int) -> Ranges:
    """Return `held_out` of `total` samples by the rule "everywhere": pieces of neighbouring
    samples, one in each of as many stretches of the stream. Their order takes one sample of each
    piece in turn, so that an evaluation of only the first ones is from all over the stream."""
    pieces = min(PIECES, held_out)
    sizes = _equal_parts(held_out, pieces)
    # Each stretch has the share of the stream that its piece has of the held-out part.
    borders = [0]
    sums = np.cumsum(sizes)
    # as integers of Python: the products may be beyond 64 bits
    for held_out_so_far in sums.tolist():
        border = total * held_out_so_far // held_out
        borders.append(border)
    stretch_begins = _integers(borders[:-1])
    stretch_ends = _integers(borders[1:])
    stretch_sizes = stretch_ends - stretch_begins
    begins_within = _begins_within(stretch_sizes, sizes)
    begins = stretch_begins + begins_within
    ends = begins + sizes
    return Ranges(begins, ends, in_turn=True)


def _between(pieces: Ranges, total: int) -> Ranges:
    """Return the samples of a stream that are in none of some pieces."""
    begins = np.concatenate(([0], pieces.ends))
    ends = np.concatenate((pieces.begins, [total]))
    # nothing lies between pieces that are neighbours
    is_there = begins < ends
    return Ranges(begins[is_there], ends[is_there])


def all_evaluated(total: int, rule: HeldOutRule) -> Ranges:
    """Return all `total` samples of a stream that is evaluated, in the order in which evaluations
    take them: by the rule "everywhere" from all over the stream, else in that of the file."""
    if rule == "everywhere":
        return taken_in_turn(total)
    return Ranges.single(0, total)


def taken_in_turn(total: int) -> Ranges:
    """Return all `total` samples of a stream, in an order any beginning of which is from all over
    the stream."""
    parts = min(PIECES, total)
    parts = max(1, parts)  # also of no samples
    sizes = _equal_parts(total, parts)
    ends = np.cumsum(sizes)
    begins = ends - sizes
    return Ranges(begins, ends, in_turn=True)


def _integers(numbers: list[int]) -> Integers:
    return np.array(numbers, np.int64)


def _equal_parts(total: int, parts: int) -> Integers:
    """Return the sizes of equal parts of a whole; the first ones are larger by the rest."""
    size, rest = divmod(total, parts)
    sizes = np.full(parts, size, np.int64)
    sizes[:rest] += 1
    return sizes


def _spread_order(count: int) -> Integers:
    """Return the numbers below `count`, int64 [count], in an order any beginning of which is spread
    evenly over them.

    Entry i is the rank of the fractional part of (i + 1) * golden ratio among all of these.
    """
    # times 2^64
    fractions = [(number + 1) * GOLDEN % 2**64 for number in range(count)]
    by_fraction = sorted(range(count), key=fractions.__getitem__)
    ranks = np.empty(count, np.int64)
    ranks[by_fraction] = np.arange(count)
    return ranks


def _begins_within(stretch_sizes: Integers, sizes: Integers) -> Integers:
    """Return at which sample of its stretch each piece begins, int64 [pieces].

    stretch_sizes, sizes: samples of each stretch, and of the piece that lies in it.
    """
    begins = np.empty_like(sizes)
    last_begins = stretch_sizes - sizes
    for piece, last_begin in enumerate(last_begins.tolist()):
        # the fractional part of a multiple of the golden ratio, times 2^64
        fraction = (piece + 1) * GOLDEN % 2**64
        possible_begins = last_begin + 1
        begins[piece] = fraction * possible_begins // 2**64
    return begins
