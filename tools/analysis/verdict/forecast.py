"""Forecast of the loss after twice the steps, by what the last doubling of the steps has brought.

At one learning rate a loss falls by about as much, or somewhat less, with each doubling of the
steps. How much less differs from run to run, and no curve says it of itself: the residuals of any
law that is fitted to it are no independent noise. So the band is that of real runs: after the
slope of the last doubling, in nats a doubling, the next one brought between LEAST and MOST of it in
nine runs of ten. The runs that the three factors were taken from, and others that they were tried
on, are those of `tests/verdict/forecast_runs.py`.

Lines through the evaluations of the last two doublings tell the slopes, so that it makes no
difference how dense the evaluations are. It is not known what comes if
- there are fewer than FEWEST evaluations in one of the two doublings,
- the learning rates of these are not known, or fell to less than half among them: a loss falls
  with its rate, and a longer run has another schedule,
- the loss does not fall, or falls by less than it goes up and down, or
- doublings still bring more and more, as while a model learns its first words.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tools.console.units import counted

FEWEST = 4  # evaluations of a doubling of the steps
LEAST_RATE = 0.5  # of the highest learning rate
STEEPER = 1.1  # of the slope of the doubling before: falls that still grow
# of the slope: what the next doubling brings
LEAST = 0.4
TYPICAL = 0.8
MOST = 1.4

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Forecast:
    """A loss after twice the steps. low, high: its band. reason: why it is not known, otherwise
    empty."""

    loss: float = math.nan
    low: float = math.nan
    high: float = math.nan
    reason: str = ""


@dataclass(frozen=True)
class _Doubling:
    """The line of losses over the binary logarithm of the steps, from half of the last step on.

    end: its loss at the last step. fall: nats that it falls in the doubling. scatter: the standard
    deviation of an evaluation from it.
    """

    end: float
    fall: float
    scatter: float


def forecast(steps: Sequence[int], losses: Numbers, rates: Sequence[float]) -> Forecast:
    """Return the loss after twice the steps of the last evaluation.

    losses: float64 [evaluations]. rates: the learning rates of the steps, NaN where they are not
    known.
    """
    evaluated_steps = np.array(steps, np.float64)
    last = evaluated_steps[-1]
    # the last doubling of the steps, and the one before
    is_now = evaluated_steps > last / 2
    is_before = (evaluated_steps > last / 4) & ~is_now
    # in the doubling that has fewer
    num_evaluations = min(int(is_now.sum()), int(is_before.sum()))
    if num_evaluations < FEWEST:
        few = f"{counted(num_evaluations, 'evaluation')} in a doubling of the steps"
        return Forecast(reason=f"{few}: too few, of {FEWEST} at least")
    used_rates = np.array(rates, np.float64)[is_now | is_before]
    if np.isnan(used_rates).any():
        return Forecast(reason="the learning rates of the evaluations are not known")
    if used_rates.min() < LEAST_RATE * used_rates.max():
        return Forecast(
            reason="the learning rate changed among the evaluations, and a longer run has another "
            'schedule (lr.schedule = "constant" keeps it)'
        )
    before = _line(evaluated_steps[is_before], losses[is_before])
    now = _line(evaluated_steps[is_now], losses[is_now])
    if now.fall <= 0:
        return Forecast(reason="the loss does not fall over the last half of the steps")
    if now.fall <= now.scatter:
        return Forecast(
            reason=f"the loss fell by {now.fall:.3f} over the last half of the steps, and goes up "
            f"and down by {now.scatter:.3f}"
        )
    if now.fall > STEEPER * before.fall:
        return Forecast(
            reason=f"each doubling of the steps still brings more: the last one {now.fall:.3f}, "
            f"the one before {before.fall:.3f}"
        )
    return Forecast(
        loss=now.end - TYPICAL * now.fall,
        low=max(0.0, now.end - MOST * now.fall - now.scatter),
        high=now.end - LEAST * now.fall + now.scatter,
    )


def _line(steps: Numbers, losses: Numbers) -> _Doubling:
    """Return the line through the losses of a doubling of the steps, by least squares."""
    doublings = np.log2(steps / steps[-1])
    slope, end = np.polyfit(doublings, losses, 1)
    residuals = losses - end - slope * doublings
    freedom = len(losses) - 2  # degrees of freedom beside slope and end
    scatter = math.sqrt(float(residuals @ residuals) / freedom)
    return _Doubling(float(end), -float(slope), scatter)
