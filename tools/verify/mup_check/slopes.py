"""Verdicts on measured widths: the slope of each activation in the width, on logarithmic axes.

A slope of 0 says that an activation moves equally far at all widths, 0.5 that it moves as the root
of the width. Under muP all changes have slope 0 in the limit of large widths; at those that are
measured some are a little below. Logits and scores fall short of it longer, because the part that
initial weights pass on vanishes as 1 / sqrt(width). They are held to the upper bound alone, and
what the updates of weights do to both. Before training an activation may shrink with width, but not
grow.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tools.verify.mup_check.measure import ActivationMeasures
from tools.verify.parity.certificate import NOT_TRIED, PROVEN, WRONG

LARGEST_SLOPE = 0.25
"""Of a change, up or down. Faults of a parametrization have slopes of 0.5 or 1, of which the widths
that are measured show most."""
LARGEST_INITIAL_SLOPE = 0.15
"""Of an activation before the first step, up."""
MAY_SHRINK = ("logits", "attention scores")
"""Ends of the names of activations whose changes may shrink with width."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Fit:
    """A straight line through the sizes of an activation by width, both as base-2 logarithms, by
    least squares: only its slope is kept."""

    slope: float

    @classmethod
    def of(cls, widths: Sequence[int], sizes: Sequence[float]) -> "Fit | None":
        """Return the fit; None if a size is zero or not finite, and so has no logarithm."""
        if not all(math.isfinite(size) and size > 0 for size in sizes):
            return None
        log_widths = [math.log2(width) for width in widths]
        log_sizes = [math.log2(size) for size in sizes]
        mean_width = sum(log_widths) / len(log_widths)
        mean_size = sum(log_sizes) / len(log_sizes)
        products: list[float] = []
        squares: list[float] = []
        for log_width, log_size in zip(log_widths, log_sizes, strict=True):
            distance = log_width - mean_width
            products.append(distance * (log_size - mean_size))
            squares.append(distance**2)
        slope = sum(products) / sum(squares)
        return cls(slope)


def rows(widths: Sequence[int], measured: Sequence[ActivationMeasures]) -> list[Row]:
    """Return a row for each activation: its sizes, slopes and verdict. measured: of each width."""
    return [_row(name, widths, measured) for name in measured[0].initial]


def _row(name: str, widths: Sequence[int], measured: Sequence[ActivationMeasures]) -> Row:
    """Return the sizes of the activation `name` at each width, their slopes, and the verdict."""
    initial_sizes = [of_width.initial[name] for of_width in measured]
    num_steps = len(measured[0].changes)
    changes: list[list[float]] = []  # by step, the change at each width
    for step in range(num_steps):
        changes_of_step = [of_width.changes[step][name] for of_width in measured]
        changes.append(changes_of_step)
    initial_fit = Fit.of(widths, initial_sizes)
    fits = [Fit.of(widths, sizes) for sizes in changes]
    row: Row = {
        "activation": name,
        "initial": initial_sizes,
        "changes": changes,
        "initial_slope": _slope(initial_fit),
        "slopes": [_slope(fit) for fit in fits],
    }
    return row | _verdict(name, row)


def _slope(fit: Fit | None) -> float | None:
    """Return a slope as it is shown, in six digits behind the point; None without a fit."""
    return None if fit is None else round(fit.slope, 6)


def _verdict(name: str, row: Row) -> Row:
    """Return the verdict on a row, with the reason unless it is proven."""
    slope = row["slopes"][-1]  # after the last step
    initial_slope = row["initial_slope"]
    if slope is None:
        return {"verdict": NOT_TRIED, "why": "no change, or one that is not finite, at some width"}
    if initial_slope is not None and initial_slope > LARGEST_INITIAL_SLOPE:
        why = f"grows with width before training: slope {initial_slope:+.2f}"
        return {"verdict": WRONG, "why": why}
    if slope > LARGEST_SLOPE:
        why = f"moves farther the wider the model is: slope {slope:+.2f}"
        return {"verdict": WRONG, "why": why}
    if slope < -LARGEST_SLOPE and not name.endswith(MAY_SHRINK):
        why = f"moves less far the wider the model is: slope {slope:+.2f}"
        return {"verdict": WRONG, "why": why}
    return {"verdict": PROVEN}


def overall(all_rows: Sequence[Row]) -> str:
    """Return the verdict on the whole parametrization: the worst of its activations."""
    verdicts = {row["verdict"] for row in all_rows}
    if WRONG in verdicts:
        return WRONG
    return NOT_TRIED if NOT_TRIED in verdicts else PROVEN
