"""The weights of a blend that change with the samples of a run.

Each data set has points: a number of samples of the run, and its weight from there on. The phases
of a blend lie between the points of all its data sets. Within a phase the proportions are exact
(`megaprec.tokens.blend`), and where one ends each data set goes on with the sample after its last
one. A plan of phases is a list of `WeightedStretch`, which depends on the points alone.

Linear phases are steps too. From one point to the next the shares of the data sets follow a line.
The line is cut into LINEAR_STEPS parts of equally many samples, and each part takes of each data
set what is missing there to the line's sum, in units of 1/SHARES_OF_STEP of the part. So what a
part lacks by its rounding the next one makes up for.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from megaprec.errors import UserError
from megaprec.tokens.blend import LONGEST_PERIOD, WeightedStretch, shares, taken_before

LINEAR_STEPS = 100
SHARES_OF_STEP = 1000

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
        return cls(tuple(((0, weight),) for weight in weights))

    @property
    def changes(self) -> bool:
        """Return True if any weight changes."""
        return any(len(points) > 1 for points in self.points)

    @property
    def begins(self) -> list[int]:
        """Return the positions of all points, at which phases begin."""
        return sorted({samples for points in self.points for samples, _ in points})

    @property
    def first_weights(self) -> list[float]:
        """Return the first weight of each data set that is not 0: the one that evaluations have."""
        return [next(weight for _, weight in points if weight) for points in self.points]

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
                total += sum(shares(self._plain_weights(phase.begin)))
            if total > LONGEST_PERIOD:
                raise UserError.of(
                    "data.blend_phases_too_fine",
                    position=phase.begin,
                    longest_period=LONGEST_PERIOD,
                )

    def stretches(self, begin: int = 0, taken: Sequence[int] = ()) -> list[WeightedStretch]:
        """Return the plan of a run from a position on.

        taken: the number of samples that each data set has given before; empty: none.
        """
        planned = list[WeightedStretch]()
        given = tuple(taken) or (0,) * len(self.points)
        for phase in self._phases(begin):
            if planned:
                given = tuple(taken_before(planned[-1:], phase.begin))
            if self._is_sloped(phase):
                planned += self._parts(phase, given)
                continue
            weights = self._plain_weights(phase.begin)
            if not planned or planned[-1].weights != weights:
                planned.append(WeightedStretch(phase.begin, weights, given))
        return planned

    def _phases(self, begin: int) -> Iterator[_Phase]:
        """Yield the phases from a position on."""
        borders = [begin, *(later for later in self.begins if later > begin)]
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
        """Return weights in the ratio of those at a position: these, if they are decimals."""
        weights = self._weights(position)
        decimals = tuple(map(float, weights))
        if all(Fraction(repr(d)) == weight for d, weight in zip(decimals, weights, strict=True)):
            return decimals
        denominator = math.lcm(*(weight.denominator for weight in weights))
        return tuple(float(weight * denominator) for weight in weights)

    def _parts(self, phase: _Phase, given: tuple[int, ...]) -> Iterator[WeightedStretch]:
        """Yield the parts of a phase in which the shares follow a line.

        given: the number of samples that each data set has given before the phase.
        """
        assert phase.end is not None
        first_shares = self.shares_at(phase.begin)
        last_shares = self.shares_at(phase.end)
        length = phase.end - phase.begin
        taken = given
        parts = min(LINEAR_STEPS, length)
        for part in range(parts):
            begin = length * part // parts
            end = length * (part + 1) // parts
            missing = list[Fraction]()
            lines = zip(first_shares, last_shares, given, taken, strict=True)
            for first, last, before, now in lines:
                # the area under the line from the beginning of the phase to the end of the part
                wanted = first * end + (last - first) * end * end / (2 * length)
                missing.append(max(Fraction(0), before + wanted - now))
            weights = _in_whole_parts(missing, min(SHARES_OF_STEP, end - begin))
            stretch = WeightedStretch(phase.begin + begin, weights, taken)
            yield stretch
            taken = tuple(taken_before([stretch], phase.begin + end))


def _weight_at(points: Points, position: int, linear: bool) -> Fraction:
    """Return a data set's weight at a position, read as an exact decimal."""
    begun = [point for point in points if point[0] <= position]
    begin, weight = begun[-1]
    weight = Fraction(repr(weight))
    if not linear or len(begun) == len(points):
        return weight
    end, next_weight = points[len(begun)]
    slope = (Fraction(repr(next_weight)) - weight) / (end - begin)
    return weight + slope * (position - begin)


def _in_whole_parts(amounts: Sequence[Fraction], parts: int) -> tuple[float, ...]:
    """Return whole numbers that add up to `parts`, as nearly in the ratio of the amounts as can
    be: rounded down, and those with the largest rests, of equal ones the first, up."""
    total = sum(amounts)
    exact = [amount * parts / total for amount in amounts]
    whole = [int(number) for number in exact]
    by_rest = sorted(range(len(whole)), key=lambda index: whole[index] - exact[index])
    for index in by_rest[: parts - sum(whole)]:
        whole[index] += 1
    return tuple(map(float, whole))
