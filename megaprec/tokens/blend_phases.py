"""The weights of a blend that change with the samples of a run.

Each data set has points: a number of samples of the run, and its weight from there on. The phases
of a blend lie between the points of all its data sets. Within a phase the proportions are exact
(`megaprec.tokens.blend`), and where one ends each data set goes on with the sample after its last
one. A plan of phases is a list of `WeightedStretch`, which depends on the points alone.

With `linear`, the share of each data set follows a line from one point to the next. Such a phase is
cut into LINEAR_STEPS parts of equally many samples, each with constant weights. A part takes of
each data set as many samples as bring its number to the area under its line, rounded to units of
1/SHARES_OF_STEP of the part. What a part lacks by its rounding the next one makes up for.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from megaprec.errors import UserError
from megaprec.tokens.blend import LONGEST_PERIOD, WeightedStretch, shares, taken_before

LINEAR_STEPS = 100  # parts of a phase with linear weights
SHARES_OF_STEP = 1000  # the finest share of a data set in such a part is 1 of these

Points = tuple[tuple[int, float], ...]
"""Pairs of a number of samples and the weight from there on. The first is at 0, and the numbers
increase."""


class _Phase(NamedTuple):
    """Samples from `begin` to `end`, None if it is the last one."""

    begin: int
    end: int | None


@dataclass(frozen=True)
class BlendPhases:
    """The weights of all data sets of a blend, by position.

    points: of each data set. linear: weights go from point to point along a line; False: in steps.
    """

    points: tuple[Points, ...]
    linear: bool = False

    @classmethod
    def constant(cls, weights: Sequence[float]) -> "BlendPhases":
        """Return those of a blend whose weights never change."""
        points = tuple(((0, weight),) for weight in weights)
        return cls(points)

    @property
    def changes(self) -> bool:
        """Return True if any weight changes."""
        return any(len(points) > 1 for points in self.points)

    @property
    def begins(self) -> list[int]:
        """Return the positions of all points, at which phases begin."""
        begins = set[int]()
        for points in self.points:
            begins.update(samples for samples, _ in points)
        return sorted(begins)

    @property
    def first_weights(self) -> list[float]:
        """Return the first weight of each data set that is not 0: the one that evaluations have."""
        first_weights: list[float] = []
        for points in self.points:
            nonzero = [weight for _, weight in points if weight]
            first_weights.append(nonzero[0])
        return first_weights

    def empty_phase(self) -> int | None:
        """Return where a phase begins in which all weights are 0; None if there is none."""
        for phase in self._phases(0):
            if not any(self._weights(phase.begin)):
                return phase.begin
        return None

    def require_short_patterns(self) -> None:
        """Raise UserError if the patterns of all phases together are longer than
        LONGEST_PERIOD."""
        total = 0
        for phase in self._phases(0):
            if self._is_sloped(phase):
                total += LINEAR_STEPS * SHARES_OF_STEP
            else:
                weights = self._plain_weights(phase.begin)
                total += sum(shares(weights))
            if total > LONGEST_PERIOD:
                raise UserError.of(
                    "data.blend_phases_too_fine",
                    position=phase.begin,
                    longest_period=LONGEST_PERIOD,
                )

    def stretches(self, begin: int = 0, taken: Sequence[int] = ()) -> list[WeightedStretch]:
        """Return the plan of a run from position `begin` on: stretches of constant weights.

        taken: the number of samples that each data set has given before `begin`; empty: none.
        """
        planned = list[WeightedStretch]()
        none_taken = (0,) * len(self.points)
        taken_now = tuple(taken) or none_taken  # before the phase
        for phase in self._phases(begin):
            if planned:
                taken_now = tuple(taken_before(planned[-1:], phase.begin))
            if self._is_sloped(phase):
                planned += self._parts(phase, taken_now)
                continue
            weights = self._plain_weights(phase.begin)
            # a point that changes no weight begins no stretch
            if not planned or planned[-1].weights != weights:
                planned.append(WeightedStretch(phase.begin, weights, taken_now))
        return planned

    def _phases(self, begin: int) -> Iterator[_Phase]:
        """Yield the phases from a position on."""
        later_begins = [later for later in self.begins if later > begin]
        borders = [begin, *later_begins]
        for first, end in pairwise(borders):
            yield _Phase(first, end)
        yield _Phase(borders[-1], None)

    def _is_sloped(self, phase: _Phase) -> bool:
        """Return True if the shares change within a phase."""
        if not self.linear or phase.end is None:
            return False
        return self.shares_at(phase.begin) != self.shares_at(phase.end)

    def _weights(self, position: int) -> list[Fraction]:
        """Return the weight of each data set at a position."""
        return [_weight_at(points, position, self.linear) for points in self.points]

    def shares_at(self, position: int) -> list[Fraction]:
        """Return the share of each data set at a position; they add up to 1."""
        weights = self._weights(position)
        total = sum(weights)
        return [weight / total for weight in weights]

    def _plain_weights(self, position: int) -> tuple[float, ...]:
        """Return the weights at a position. If the decimals of a float are not exactly its weight,
        as of 1/3, return whole numbers in their ratio."""
        weights = self._weights(position)
        floats = tuple(map(float, weights))
        as_read = [Fraction(repr(number)) for number in floats]
        if as_read == weights:
            return floats
        denominators = [weight.denominator for weight in weights]
        denominator = math.lcm(*denominators)
        return tuple(float(weight * denominator) for weight in weights)

    def _parts(
        self, phase: _Phase, taken_before_phase: tuple[int, ...]
    ) -> Iterator[WeightedStretch]:
        """Yield the parts, with constant weights each, of a phase in which the shares follow a
        line.

        taken_before_phase: the number of samples that each data set has given before the phase.
        """
        assert phase.end is not None
        first_shares = self.shares_at(phase.begin)
        last_shares = self.shares_at(phase.end)
        length = phase.end - phase.begin
        taken = taken_before_phase
        parts = min(LINEAR_STEPS, length)
        for part in range(parts):
            # samples of the part, counted from the beginning of the phase
            begin = length * part // parts
            end = length * (part + 1) // parts
            missing = list[Fraction]()  # of each data set, samples that the part should have
            lines = zip(first_shares, last_shares, taken_before_phase, taken, strict=True)
            for first_share, last_share, num_before, num_taken in lines:
                # the area under the line from the beginning of the phase to the end of the part:
                # a rectangle and a triangle
                rise = last_share - first_share
                wanted = first_share * end + rise * end * end / (2 * length)
                lacking = num_before + wanted - num_taken
                # a data set may be ahead of its line, by rounding of an earlier part
                missing.append(max(Fraction(0), lacking))
            # a part has no more shares than samples
            num_shares = min(SHARES_OF_STEP, end - begin)
            weights = _in_whole_parts(missing, num_shares)
            stretch = WeightedStretch(phase.begin + begin, weights, taken)
            yield stretch
            taken = tuple(taken_before([stretch], phase.begin + end))


def _weight_at(points: Points, position: int, linear: bool) -> Fraction:
    """Return a data set's weight at a position. The weights of points are read as exact
    decimals."""
    begun = [(samples, weight) for samples, weight in points if samples <= position]
    begin, last_weight = begun[-1]
    weight = Fraction(repr(last_weight))
    is_behind_all = len(begun) == len(points)
    if not linear or is_behind_all:
        return weight
    end, later_weight = points[len(begun)]
    next_weight = Fraction(repr(later_weight))
    slope = (next_weight - weight) / (end - begin)
    return weight + slope * (position - begin)


def _in_whole_parts(amounts: Sequence[Fraction], parts: int) -> tuple[float, ...]:
    """Return whole numbers that add up to `parts`, as nearly in the ratio of the amounts as can be.

    The exact numbers are rounded down, and as many as are needed, those with the largest rests, up;
    of equal rests the first.
    """
    total = sum(amounts)
    exact = [amount * parts / total for amount in amounts]
    rounded = [int(number) for number in exact]
    rests = [number - whole for number, whole in zip(exact, rounded, strict=True)]
    largest_rest_first = sorted(range(len(rests)), key=lambda index: -rests[index])
    num_missing = parts - sum(rounded)
    for index in largest_rest_first[:num_missing]:
        rounded[index] += 1
    return tuple(map(float, rounded))
