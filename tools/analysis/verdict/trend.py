"""Whether a held-out loss still falls, has stopped falling, or rises.

Two evaluations are of the same samples, so their difference is known better than either: its
standard error is that of the differences of pieces of the text (the pairs of a paired test). What
that does not say is how much the loss goes up and down from one evaluation to the next because
weights change. So a fall or a rise must also be steady: in an order of chance it would be as steady
in one of twenty cases at most.

A run is still learning if the evaluations of the second half of its steps fall. It has stopped if
the means of both halves of these differ by less than SMALL of the loss, with their error. The loss
rises if it does after the lowest evaluation. All else is not known.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tools.analysis.verdict.student import quantile

Kind = Literal["still learning", "has stopped", "rises", "not known"]
FEWEST = 4  # evaluations, of which one order in 24 is steady
FEWEST_PIECES = 4
CERTAINTY = 0.975  # one-sided, of a fall or a rise
CHANCE = 0.05  # of an order as steady as that of a trend
SMALL = 0.005  # of the loss: a change that is surely smaller is none


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The losses of a text after a step. losses, tokens: float64 [pieces], sums of each piece of
    the text, the same pieces in all evaluations."""

    step: int
    losses: NDArray[np.float64]
    tokens: NDArray[np.float64]

    @property
    def loss(self) -> float:
        """The mean loss, in nats a token."""
        return float(self.losses.sum() / self.tokens.sum())

    @property
    def error(self) -> float:
        """The standard error of the mean as one of texts like this; NaN for a single piece."""
        return _standard_error(self.losses, self.tokens)


@dataclass(frozen=True)
class Difference:
    """A later loss minus an earlier one, in nats, and its standard error."""

    nats: float
    error: float
    pieces: int

    @property
    def margin(self) -> float:
        """Half of the interval that the difference is in with 95 in 100 certainty."""
        return quantile(CERTAINTY, self.pieces - 1) * self.error


@dataclass(frozen=True)
class Trend:
    """A verdict. reason: in words. since: step from which on the loss rises, 0 if it does not."""

    kind: Kind
    reason: str
    since: int = 0


def difference(earlier: Evaluation, later: Evaluation) -> Difference:
    """Return the paired difference of two evaluations of one text."""
    changes = later.losses - earlier.losses
    error = _standard_error(changes, later.tokens)
    return Difference(later.loss - earlier.loss, error, len(changes))


def judge(evaluations: Sequence[Evaluation]) -> Trend:
    """Return the verdict on evaluations of one text, oldest first."""
    if len(evaluations) < FEWEST:
        found = len(evaluations)
        return Trend("not known", f"too few evaluations: {found}, of {FEWEST} at least")
    pieces = len(evaluations[-1].tokens)
    if pieces < FEWEST_PIECES:
        return Trend("not known", f"too few samples: {pieces}, of {FEWEST_PIECES} at least")
    lowest = min(range(len(evaluations)), key=lambda index: evaluations[index].loss)
    # The lowest is chosen for its luck, too, and is no evidence of a rise.
    after = evaluations[lowest + 1 :]
    if len(after) >= FEWEST and chance_of_order([-each.loss for each in after]) <= CHANCE:
        rise = difference(evaluations[lowest], after[-1])
        if rise.nats > rise.margin:
            since = evaluations[lowest].step
            amount = f"{rise.nats:.4f} ± {rise.margin:.4f}"
            return Trend("rises", f"by {amount} since step {since:,}, where it was lowest", since)
    return _judge_fall(_window(evaluations))


def _window(evaluations: Sequence[Evaluation]) -> Sequence[Evaluation]:
    """Return the evaluations of the second half of the steps, but FEWEST at least."""
    half = evaluations[-1].step / 2
    recent = sum(evaluation.step >= half for evaluation in evaluations)
    return evaluations[-max(FEWEST, recent) :]


def _judge_fall(window: Sequence[Evaluation]) -> Trend:
    change = difference(window[0], window[-1])
    between = f"from step {window[0].step:,} to {window[-1].step:,}"
    is_falling = chance_of_order([each.loss for each in window]) <= CHANCE
    if is_falling and -change.nats > change.margin:
        amount = f"{-change.nats:.4f} ± {change.margin:.4f}"
        return Trend("still learning", f"the loss fell by {amount} {between}")
    halves = _change_of_halves(window)
    small = SMALL * window[-1].loss
    amount = f"{halves.nats:+.4f} ± {halves.margin:.4f}"
    if abs(halves.nats) + halves.margin <= small:
        return Trend(
            "has stopped", f"the loss changed by {amount} {between}: less than {small:.4f}"
        )
    return Trend(
        "not known",
        f"the loss changed by {amount} {between}, which may be noise or not: evaluate more often, "
        "or more samples",
    )


def chance_of_order(values: Sequence[float]) -> float:
    """Return the probability that values in an order of chance fall as steadily as these do.

    The statistic is the number of pairs that rise, Mann's test of a trend (1945); its distribution
    is that of inversions of a permutation.
    """
    count = len(values)
    rising = 0
    for index, value in enumerate(values):
        rising += sum(later >= value for later in values[index + 1 :])
    # Numbers of permutations by inversions: one element more multiplies by 1 + x + ... + x^n.
    ways = [1]
    for size in range(2, count + 1):
        longer = [0] * (len(ways) + size - 1)
        for inversions, number in enumerate(ways):
            for more in range(size):
                longer[inversions + more] += number
        ways = longer
    return sum(ways[: rising + 1]) / sum(ways)


def _change_of_halves(window: Sequence[Evaluation]) -> Difference:
    """Return the mean of the later half of the evaluations minus that of the earlier half.

    Its error has two parts: that of the text, and the scatter of evaluations within the halves.
    """
    middle = len(window) // 2
    earlier = window[:middle]
    later = window[-middle:]
    tokens = window[-1].tokens
    before = Evaluation(0, np.mean([each.losses for each in earlier], 0), tokens)
    after = Evaluation(0, np.mean([each.losses for each in later], 0), tokens)
    change = difference(before, after)
    squares = 0.0
    for half in (earlier, later):
        losses = np.array([each.loss for each in half])
        squares += float(((losses - losses.mean()) ** 2).sum())
    scatter = squares / (2 * (middle - 1)) * 2 / middle  # the variance of a difference of means
    return Difference(change.nats, math.sqrt(change.error**2 + scatter), change.pieces)


def _standard_error(sums: NDArray[np.float64], tokens: NDArray[np.float64]) -> float:
    """Return the standard error of a ratio of sums over pieces."""
    pieces = len(sums)
    if pieces < 2:
        return math.nan
    mean = sums.sum() / tokens.sum()
    squares = float(((sums - mean * tokens) ** 2).sum())
    return math.sqrt(squares * pieces / (pieces - 1)) / float(tokens.sum())
