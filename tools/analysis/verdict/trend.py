"""The trend of a held-out loss: it still falls, has stopped falling, or rises.

Two evaluations are of the same samples, so their difference is known better than either: its
standard error is that of the differences of pieces of the text (the pairs of a paired test). What
that does not say is how much the loss goes up and down from one evaluation to the next because
weights change. So a fall or a rise must also be steady: in an order of chance it would be as steady
in one of twenty cases at most. Evaluations that follow each other closely go up and down together,
and an order of these is none of chance: more than MOST are put together to means of neighbours.

A run is still learning if the evaluations of the second half of its steps fall. It has stopped if
the means of both halves of these differ by less than SMALL of the loss, with their error. The loss
rises if it does after the lowest evaluation. A loss that falls while the learning rate comes to its
end falls with the rate, and does not say whether more steps would bring more. All else is not
known.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tools.analysis.verdict.student import quantile

Kind = Literal["still learning", "fell with its rate", "has stopped", "rises", "not known"]
FEWEST = 4  # evaluations, of which one order in 24 is steady
MOST = 30  # evaluations, or means of neighbours, whose order is looked at
FEWEST_PIECES = 4
CERTAINTY = 0.975  # one-sided, of a fall or a rise
CHANCE = 0.05  # of an order as steady as that of a trend
SMALL = 0.005  # of the loss: a change that is surely smaller is none
ENDED_RATE = 0.01  # of the highest learning rate: little is learned at a lower one


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
        total_loss = self.losses.sum()
        total_tokens = self.tokens.sum()
        return float(total_loss / total_tokens)

    @property
    def error(self) -> float:
        """The standard error of the mean as one of texts like this; NaN for a single piece."""
        return _standard_error(self.losses, self.tokens)


@dataclass(frozen=True)
class LossDifference:
    """A later loss minus an earlier one, in nats, and its standard error."""

    nats: float
    error: float
    pieces: int

    def __neg__(self) -> "LossDifference":
        """Return the earlier loss minus the later one, so that a fall is above 0."""
        return replace(self, nats=-self.nats)

    @property
    def margin(self) -> float:
        """Half of the interval that the difference is in with 95 in 100 certainty."""
        freedom = self.pieces - 1
        return quantile(CERTAINTY, freedom) * self.error

    def __str__(self) -> str:
        return f"{self.nats:.4f} ± {self.margin:.4f}"


@dataclass(frozen=True)
class Trend:
    """A verdict. reason: in words. since: step from which on the loss rises, 0 if it does not."""

    kind: Kind
    reason: str
    since: int = 0


def difference(earlier: Evaluation, later: Evaluation) -> LossDifference:
    """Return the paired difference of two evaluations of one text."""
    changes = later.losses - earlier.losses
    return LossDifference(
        nats=later.loss - earlier.loss,
        error=_standard_error(changes, later.tokens),
        pieces=len(changes),
    )


def losses_of(evaluations: Sequence[Evaluation]) -> NDArray[np.float64]:
    """Return the mean losses of evaluations of one text, in nats a token: float64 [evaluations]."""
    losses_of_pieces = [evaluation.losses for evaluation in evaluations]
    sums = np.stack(losses_of_pieces).sum(1)
    # all evaluations are of the same tokens
    total_tokens = evaluations[0].tokens.sum()
    return sums / total_tokens


def judge(evaluations: Sequence[Evaluation], rates: Sequence[float]) -> Trend:
    """Return the verdict on evaluations of one text, oldest first.

    rates: the learning rates of their steps, NaN where they are not known.
    """
    count = len(evaluations)
    if count < FEWEST:
        return Trend("not known", f"too few evaluations: {count}, of {FEWEST} at least")
    newest = evaluations[-1]
    pieces = len(newest.tokens)
    if pieces < FEWEST_PIECES:
        return Trend("not known", f"too few samples: {pieces}, of {FEWEST_PIECES} at least")
    losses = losses_of(evaluations)
    lowest = int(losses.argmin())
    # The lowest is chosen for its luck, too, and is no evidence of a rise.
    losses_after = losses[lowest + 1 :]
    if len(losses_after) >= FEWEST and _falls_steadily(-losses_after):
        lowest_evaluation = evaluations[lowest]
        rise = difference(lowest_evaluation, newest)
        if rise.nats > rise.margin:
            since = lowest_evaluation.step
            return Trend("rises", f"by {rise} since step {since:,}, where it was lowest", since)
    trend = _judge_fall(_second_half(evaluations))
    highest_rate = float(np.max(rates))  # NaN if one of them is
    rate_has_ended = rates[-1] <= ENDED_RATE * highest_rate  # False for NaN
    if trend.kind != "still learning" or not rate_has_ended:
        return trend
    reason = f"{trend.reason}, where the learning rate came to its end: try a longer schedule"
    return Trend("fell with its rate", reason)


def _falls_steadily(losses: NDArray[np.float64]) -> bool:
    """Return True if losses fall more steadily than they would in a random order."""
    values = _neighbours(losses, MOST).tolist()
    return chance_of_order(values) <= CHANCE


def _neighbours(losses: NDArray[np.float64], most: int) -> NDArray[np.float64]:
    """Return losses, or the means of so many groups of neighbours if there are more losses."""
    num_groups = min(most, len(losses))
    groups = np.array_split(losses, num_groups)
    return np.array([group.mean() for group in groups])


def _second_half(evaluations: Sequence[Evaluation]) -> Sequence[Evaluation]:
    """Return the evaluations of the second half of the steps, but FEWEST at least."""
    middle = evaluations[-1].step / 2
    in_second_half = sum(evaluation.step >= middle for evaluation in evaluations)
    count = max(FEWEST, in_second_half)
    return evaluations[-count:]


def _judge_fall(window: Sequence[Evaluation]) -> Trend:
    """Return the verdict on evaluations that do not surely rise: they fall, have stopped, or may do
    either."""
    first = window[0]
    last = window[-1]
    steps = f"from step {first.step:,} to {last.step:,}"
    fall = -difference(first, last)
    if _falls_steadily(losses_of(window)) and fall.nats > fall.margin:
        return Trend("still learning", f"the loss fell by {fall} {steps}")
    change = _change_of_halves(window)
    changed = f"the loss changed by {change.nats:+.4f} ± {change.margin:.4f} {steps}"
    largest_change = abs(change.nats) + change.margin
    small = SMALL * last.loss
    if largest_change <= small:
        return Trend("has stopped", f"{changed}: less than {small:.4f}")
    why = "which may be noise or not: evaluate more often, or more samples"
    return Trend("not known", f"{changed}, {why}")


def chance_of_order(values: Sequence[float]) -> float:
    """Return the probability that values in a random order fall as steadily as these do.

    The statistic is the number of pairs that rise, Mann's test of a trend (1945); its distribution
    is that of inversions of a permutation. Time grows as the fourth power of the number of values.
    """
    rising_pairs = 0
    for index, value in enumerate(values):
        later_values = values[index + 1 :]
        rising_pairs += sum(later >= value for later in later_values)
    permutations = _permutations_by_inversions(len(values))
    as_steady = sum(permutations[: rising_pairs + 1])
    return as_steady / sum(permutations)


def _permutations_by_inversions(count: int) -> list[int]:
    """Return how many permutations of so many elements have 0, 1, 2, ... inversions."""
    # As coefficients of a polynomial: the nth element multiplies it by 1 + x + ... + x^(n-1).
    by_inversions = [1]
    for size in range(2, count + 1):
        num_coefficients = len(by_inversions) + size - 1
        product = [0] * num_coefficients
        for inversions, permutations in enumerate(by_inversions):
            for added_inversions in range(size):
                product[inversions + added_inversions] += permutations
        by_inversions = product
    return by_inversions


def _change_of_halves(window: Sequence[Evaluation]) -> LossDifference:
    """Return the mean of the later half of the evaluations minus that of the earlier half.

    Its error has two parts: that of the text, and the scatter of evaluations within the halves.
    """
    count = len(window) // 2
    earlier = window[:count]
    later = window[-count:]
    # the text's error: both means are of the same pieces of text
    change = difference(_mean_of(earlier), _mean_of(later))
    variance = _variance_of_mean(earlier) + _variance_of_mean(later)
    error = math.sqrt(change.error**2 + variance)
    return replace(change, error=error)


def _mean_of(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Return the mean losses of each piece of the text as one evaluation, of no step."""
    losses = [evaluation.losses for evaluation in evaluations]
    mean_losses = np.mean(losses, 0)
    return Evaluation(0, mean_losses, evaluations[0].tokens)


def _variance_of_mean(evaluations: Sequence[Evaluation]) -> float:
    """Return the variance of the mean loss that follows from the scatter of the losses."""
    # each half has half of the groups of neighbours that a whole order has
    losses = _neighbours(losses_of(evaluations), MOST // 2)
    return float(losses.var(ddof=1)) / len(losses)


def _standard_error(sums: NDArray[np.float64], tokens: NDArray[np.float64]) -> float:
    """Return the standard error of the mean over all tokens, by how its pieces vary. sums, tokens:
    of each piece; the mean is the total of the sums divided by that of the tokens."""
    pieces = len(sums)
    if pieces < 2:
        return math.nan
    total_tokens = tokens.sum()
    mean = sums.sum() / total_tokens
    residuals = sums - mean * tokens
    squares = float((residuals**2).sum())
    error_of_sum = math.sqrt(squares * pieces / (pieces - 1))
    return error_of_sum / float(total_tokens)
