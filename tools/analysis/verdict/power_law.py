"""Prediction of the loss after twice the steps, by a power law: loss = floor + factor *
step^-exponent, fitted to evaluations by least squares.

The exponent is tried on a grid; floor and factor follow from it. The band holds the predictions of
all exponents that fit nearly as well as the best one (a profile likelihood), each with the error of
its own fit and the scatter of a single evaluation.

The law is about steps at one learning rate. It is not known what comes if
- there are fewer than FEWEST_EVALUATIONS evaluations in the last nine tenths of the steps,
- the learning rate fell to less than half among these: a loss falls with its rate, and a longer run
  has another schedule,
- the loss does not fall, or
- the band is wider than half of what the loss fell among these.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tools.analysis.verdict.student import quantile

FEWEST_EVALUATIONS = 8
FIRST_SHARE = 0.1  # of the steps; what came before is left out
LEAST_RATE = 0.5  # of the highest learning rate
WIDEST_BAND = 0.5  # of what the loss fell
EXPONENTS = np.geomspace(0.02, 3.0, 400)
LEAST_SCATTER = 0.001  # of the loss: no curve of training is a smoother power law
CERTAINTY = 0.975  # one-sided

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Prediction:
    """A loss after twice the steps. low, high: its band. reason: why it is not known, otherwise
    empty."""

    loss: float = math.nan
    low: float = math.nan
    high: float = math.nan
    reason: str = ""


@dataclass(frozen=True)
class _Fit:
    """The law with one exponent. squares: of the residuals. leverage: of the step that is
    predicted."""

    squares: float
    predicted: float
    leverage: float


def predict(steps: Sequence[int], losses: Sequence[float], rates: Sequence[float]) -> Prediction:
    """Return the loss after twice the steps of the last evaluation.

    rates: the learning rates of the steps, NaN where they are not known.
    """
    is_late = np.array(steps) >= FIRST_SHARE * steps[-1]
    late_steps = np.array(steps, np.float64)[is_late]
    late_losses = np.array(losses, np.float64)[is_late]
    late_rates = np.array(rates, np.float64)[is_late]
    if len(late_steps) < FEWEST_EVALUATIONS:
        return Prediction(
            reason=f"{len(late_steps)} evaluations are too few, of {FEWEST_EVALUATIONS} at least"
        )
    # not <: the rates may be NaN
    if not late_rates.min() >= LEAST_RATE * late_rates.max():
        return Prediction(
            reason="the learning rate changed among the evaluations, and a longer run has another "
            'schedule (lr.schedule = "constant" keeps it)'
        )
    return _extrapolate(late_steps, late_losses)


def _extrapolate(steps: Numbers, losses: Numbers) -> Prediction:
    """Return the prediction of the law that is fitted to losses after these steps."""
    fits = list[_Fit]()
    for exponent in EXPONENTS.tolist():
        if (fit := _fit(steps, losses, exponent)) is not None:
            fits.append(fit)
    if not fits:
        return Prediction(reason="the loss does not fall as a power of the steps")
    freedom = len(steps) - 3
    certain = quantile(CERTAINTY, freedom)
    best = min(fits, key=lambda fit: fit.squares)
    variance = max(best.squares / freedom, (LEAST_SCATTER * float(losses[-1])) ** 2)
    accepted = best.squares + variance * certain**2
    low = math.inf
    high = -math.inf
    for fit in fits:
        if fit.squares <= accepted:
            margin = certain * math.sqrt(variance * (1 + fit.leverage))
            low = min(low, fit.predicted - margin)
            high = max(high, fit.predicted + margin)
    fallen = losses[0] - losses[-1]
    if high - low > WIDEST_BAND * fallen:
        return Prediction(reason=f"its band would be from {low:.3f} to {high:.3f}, too wide to say")
    return Prediction(best.predicted, low, high)


def _fit(steps: Numbers, losses: Numbers, exponent: float) -> _Fit | None:
    """Return the law with an exponent; None if the loss would rise."""
    # steps in units of the last one: the prediction is at 2
    powers = (steps / steps[-1]) ** -exponent
    power_at_twice = 2.0**-exponent
    # least squares of losses = floor * 1 + factor * powers; a row of the design for each step
    design = np.stack([np.ones_like(powers), powers], 1)
    coefficients, *_ = np.linalg.lstsq(design, losses)
    floor, factor = coefficients.tolist()
    row_at_twice = np.array([1.0, power_at_twice])
    if floor < 0:  # no loss is below 0
        design = powers[:, None]
        floor = 0.0
        factor = float(powers @ losses / (powers @ powers))
        row_at_twice = np.array([power_at_twice])
    if factor <= 0:
        return None
    residuals = losses - floor - factor * powers
    inverse = np.linalg.pinv(design.T @ design)
    return _Fit(
        squares=float(residuals @ residuals),
        predicted=floor + factor * power_at_twice,
        leverage=float(row_at_twice @ inverse @ row_at_twice),
    )
