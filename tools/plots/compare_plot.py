"""The picture of `megaprec compare`: the losses of several runs.

A few runs share one panel. Many would hide each other, so each gets a panel of its own, in which
the run with the lowest loss is grey; or, beside a run that the others are measured against, the
differences from it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.plots.panels import Over, Record, axis_label, mean_width, positions, smoothed, values
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
        losses = [record["loss"] for record in self.records if record["outcome"] == "applied"][
            -LAST:
        ]
        return sum(losses) / len(losses) if losses else math.nan

    @property
    def held_out(self) -> float:
        """The newest held-out loss; NaN if there is none."""
        return next(
            (record["eval_loss"] for record in reversed(self.records) if "eval_loss" in record),
            math.nan,
        )

    @property
    def held_out_step(self) -> int | None:
        """The step after which the newest held-out loss was computed; None if there is none."""
        return next(
            (record["step"] for record in reversed(self.records) if "eval_loss" in record), None
        )


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
        _draw_apart(grid, by_loss(curves), over, against)
        if against:
            what = f"loss minus that of {against.name}"
        else:
            what = f"loss; grey: {by_loss(curves)[0].name}"
        figure.suptitle(
            f"{what}; nats a token, mean of the last {LAST} steps beside each name",
            parse_math=False,
        )
    figure.savefig(path, dpi=110)


def _draw_together(axes: Any, curves: Sequence[Curve], over: Over) -> None:
    ends = []
    for number, curve in enumerate(curves):
        color = COLORS[number % len(COLORS)]
        x = positions(curve.records, over)
        y = values(curve.records, "loss")
        mean = _draw_smoothed(axes, x, y, color)
        ends.append(
            (next((v for v in reversed(mean) if not math.isnan(v)), math.nan), curve, color)
        )
        mark_skipped(axes, _skipped(curve, over), color, 0.015 * number)
    axes.set_title("loss, nats a token; crosses: skipped steps", loc="left", fontsize=10)
    axes.set_title(f"mean of last {LAST} steps", loc="right", fontsize=9)
    axes.set_xlabel(axis_label(over))
    axes.margins(x=0.01)
    plain(axes)
    _label_ends(axes, ends)


def _label_ends(axes: Any, ends: Sequence[tuple[float, Curve, str]]) -> None:
    """Name each line at its end, far enough from the other names."""
    low, high = axes.get_ylim()
    width = max(len(curve.name) for _, curve, _ in ends)
    heights = [
        (0.0 if math.isnan(end) else (end - low) / (high - low), curve, color)
        for end, curve, color in ends
    ]
    ranked = sorted(heights, key=lambda entry: -entry[0])
    places = [top := ranked[0][0], *(top := min(height, top - GAP) for height, _, _ in ranked[1:])]
    lift = max(0.0, -places[-1])
    for (height, curve, color), place in zip(ranked, places, strict=True):
        final = "no loss" if math.isnan(curve.final) else f"{curve.final:.4f}"
        axes.annotate(
            f"{curve.name:{width}}  {final}", (1.0, height), (1.025, place + lift), xycoords="axes fraction",
            textcoords="axes fraction", color=color, va="center", fontsize=8.5, family="monospace", parse_math=False,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.8, "relpos": (0, 0.5), "shrinkA": 0},
        )  # fmt: skip


def _draw_apart(grid: Any, curves: Sequence[Curve], over: Over, against: Curve | None) -> None:
    """Draw a panel for each run."""
    reference = against or curves[0]
    losses = values(reference.records, "loss")
    base = {record["step"]: loss for record, loss in zip(reference.records, losses, strict=True)}
    panels = grid.flat
    shown = list[float]()
    for axes, curve in zip(panels, curves, strict=False):
        x = positions(curve.records, over)
        y = values(curve.records, "loss")
        if against:
            y = [
                v - base.get(record["step"], math.nan)
                for v, record in zip(y, curve.records, strict=True)
            ]
            axes.axhline(0, color=GREY, linewidth=0.9)
        else:
            axes.plot(
                positions(reference.records, over),
                smoothed(losses, _width(losses)),
                color=GREY,
                linewidth=1,
            )
        shown += [v for v in _draw_smoothed(axes, x, y, BLUE) if not math.isnan(v)]
        mark_skipped(axes, _skipped(curve, over), RED)
        axes.set_title(
            f"{curve.name}  {curve.final:.4f}", loc="left", fontsize=8.5, parse_math=False
        )
        plain(axes)
    for axes in list(grid.flat)[len(curves) :]:
        axes.axis("off")
    for column in range(grid.shape[1]):
        lowest = max((n for n in range(column, len(curves), grid.shape[1])), default=None)
        if lowest is not None:
            axes = grid.flat[lowest]
            axes.set_xlabel(axis_label(over), fontsize=9)
            axes.tick_params(labelbottom=True)
    if shown and max(shown) > min(shown):
        room = 0.35 * (max(shown) - min(shown))
        grid.flat[0].set_ylim(min(shown) - room, max(shown) + room)


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


def _skipped(curve: Curve, over: Over) -> list[float]:
    places = zip(curve.records, positions(curve.records, over), strict=True)
    return [at for record, at in places if record["outcome"] != "applied"]
