"""The picture of `megaprec compare`: the losses of several runs.

A few runs share one panel. Many would hide each other, so each gets a panel of its own, in which
the run with the lowest loss is grey; or, beside a run that the others are measured against, the
differences from it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tools.plots.panels import (
    Over,
    Record,
    axis_label,
    mean_width,
    positions,
    skipped_positions,
    smoothed,
    values,
)
from tools.plots.run_plots import BLUE, GREY, RED, mark_skipped, plain

LAST = 10  # newest applied steps, over whose loss the mean is taken
TOGETHER = 8  # runs that share a panel at most
COLORS = ("#1f5fa8", "#e07b00", "#2a9d55", "#d62728", "#8250c4", "#7a5230", "#d957a8", "#6e7781")
COLUMNS = 4  # of panels
GAP = 0.055  # between two labels, in heights of a panel


@dataclass(frozen=True)
class Curve:
    """One run: its name in the plot and the records of its metrics.jsonl."""

    name: str
    records: list[Record]

    @property
    def skipped(self) -> int:
        return sum(record["outcome"] != "applied" for record in self.records)

    @property
    def final(self) -> float:
        """The mean loss over the newest applied steps; NaN if there are none."""
        applied = [record for record in self.records if record["outcome"] == "applied"]
        losses = [record["loss"] for record in applied[-LAST:]]
        return sum(losses) / len(losses) if losses else math.nan

    @property
    def held_out(self) -> float:
        """The newest held-out loss; NaN if there is none."""
        record = self._newest_evaluation()
        return record["eval_loss"] if record else math.nan

    @property
    def held_out_step(self) -> int | None:
        """The step after which the newest held-out loss was computed; None if there is none."""
        record = self._newest_evaluation()
        return record["step"] if record else None

    def _newest_evaluation(self) -> Record | None:
        for record in reversed(self.records):
            if "eval_loss" in record:
                return record
        return None


def by_loss(curves: Sequence[Curve]) -> list[Curve]:
    """Return the runs sorted by final loss, the lowest first, runs without a loss last."""
    return sorted(curves, key=lambda curve: math.inf if math.isnan(curve.final) else curve.final)


def draw(
    curves: Sequence[Curve], path: Path, over: Over, against: Curve | None, figure_of: Any
) -> None:
    """Write the picture. figure_of: matplotlib's Figure."""
    if against is None and len(curves) <= TOGETHER:
        figure = figure_of(figsize=(11, 5.5), layout="constrained")
        _draw_together(figure.subplots(), curves, over)
    else:
        rows = -(-len(curves) // COLUMNS)
        figure = figure_of(figsize=(12, 0.8 + 2.1 * rows), layout="constrained")
        grid = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False)
        _draw_separately(grid, by_loss(curves), over, against)
        if against:
            quantity = f"loss minus that of {against.name}"
        else:
            quantity = f"loss; grey: {by_loss(curves)[0].name}"
        title = f"{quantity}; nats a token, mean of the last {LAST} steps beside each name"
        figure.suptitle(title, parse_math=False)
    figure.savefig(path, dpi=110)


def _draw_together(axes: Any, curves: Sequence[Curve], over: Over) -> None:
    ends: list[_LineEnd] = []
    for number, curve in enumerate(curves):
        color = COLORS[number % len(COLORS)]
        x = positions(curve.records, over)
        y = values(curve.records, "loss")
        mean = _draw_smoothed(axes, x, y, color)
        finite = [value for value in mean if not math.isnan(value)]
        ends.append(_LineEnd(finite[-1] if finite else math.nan, curve, color))
        # each run's crosses a little above those of the run before
        mark_skipped(axes, skipped_positions(curve.records, over), color, 0.015 * number)
    axes.set_title("loss, nats a token; crosses: skipped steps", loc="left", fontsize=10)
    axes.set_title(f"mean of last {LAST} steps", loc="right", fontsize=9)
    axes.set_xlabel(axis_label(over))
    axes.margins(x=0.01)
    plain(axes)
    _label_ends(axes, ends)


class _LineEnd(NamedTuple):
    """The last value of a run's line, NaN if it has none."""

    value: float
    curve: Curve
    color: str


def _label_ends(axes: Any, ends: Sequence[_LineEnd]) -> None:
    """Name each line at its end, far enough from the other names."""
    low, high = axes.get_ylim()
    width = max(len(end.curve.name) for end in ends)
    # in heights of the panel, the highest first
    heights: list[tuple[float, _LineEnd]] = []
    for end in ends:
        height = 0.0 if math.isnan(end.value) else (end.value - low) / (high - low)
        heights.append((height, end))
    heights.sort(key=lambda entry: -entry[0])
    label_heights: list[float] = []
    for height, _ in heights:
        limit = label_heights[-1] - GAP if label_heights else height
        label_heights.append(min(height, limit))
    lift = max(0.0, -label_heights[-1])  # so that the lowest label stays in the panel
    for (height, end), label_height in zip(heights, label_heights, strict=True):
        curve = end.curve
        final = "no loss" if math.isnan(curve.final) else f"{curve.final:.4f}"
        arrow = {
            "arrowstyle": "-",
            "color": end.color,
            "linewidth": 0.8,
            "relpos": (0, 0.5),
            "shrinkA": 0,
        }
        axes.annotate(
            f"{curve.name:{width}}  {final}",
            (1.0, height),
            (1.025, label_height + lift),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=end.color,
            va="center",
            fontsize=8.5,
            family="monospace",
            parse_math=False,
            arrowprops=arrow,
        )


def _draw_separately(grid: Any, curves: Sequence[Curve], over: Over, against: Curve | None) -> None:
    """Draw a panel for each run."""
    reference = against or curves[0]
    reference_losses = values(reference.records, "loss")
    loss_of_step = {
        record["step"]: loss
        for record, loss in zip(reference.records, reference_losses, strict=True)
    }
    drawn: list[float] = []
    for axes, curve in zip(grid.flat, curves, strict=False):
        x = positions(curve.records, over)
        y = values(curve.records, "loss")
        if against:
            subtracted = [loss_of_step.get(record["step"], math.nan) for record in curve.records]
            y = [loss - base for loss, base in zip(y, subtracted, strict=True)]
            axes.axhline(0, color=GREY, linewidth=0.9)
        else:
            mean = smoothed(reference_losses, _width(reference_losses))
            axes.plot(positions(reference.records, over), mean, color=GREY, linewidth=1)
        drawn += [value for value in _draw_smoothed(axes, x, y, BLUE) if not math.isnan(value)]
        mark_skipped(axes, skipped_positions(curve.records, over), RED)
        title = f"{curve.name}  {curve.final:.4f}"
        axes.set_title(title, loc="left", fontsize=8.5, parse_math=False)
        plain(axes)
    _label_columns(grid, len(curves), axis_label(over))
    if drawn and max(drawn) > min(drawn):
        margin = 0.35 * (max(drawn) - min(drawn))
        # the panels share their axes
        grid.flat[0].set_ylim(min(drawn) - margin, max(drawn) + margin)


def _label_columns(grid: Any, used: int, label: str) -> None:
    """Hide the panels from number `used` on, and label the lowest one of each column."""
    columns = grid.shape[1]
    for axes in grid.flat[used:]:
        axes.axis("off")
    for column in range(min(columns, used)):
        lowest = grid.flat[range(column, used, columns)[-1]]
        lowest.set_xlabel(label, fontsize=9)
        lowest.tick_params(labelbottom=True)


def _draw_smoothed(axes: Any, x: Sequence[float], y: Sequence[float], color: str) -> list[float]:
    """Draw the mean over neighbouring steps, above the values of each step, and return it."""
    width = _width(y)
    if width > 1:
        axes.plot(x, y, color=color, alpha=0.22, linewidth=0.8)
    mean = smoothed(y, width)
    axes.plot(x, mean, color=color, linewidth=1.5)
    return mean


def _width(y: Sequence[float]) -> int:
    return mean_width(len(y))
