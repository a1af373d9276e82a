"""The picture of `megaprec compare`: the losses of several runs.

A few runs share one chart. Many would hide each other, so each gets a chart of its own, in which
the run with the lowest loss is grey; or, beside a run that the others are measured against, the
differences from it.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from tools.analysis.plots.charts import (
    FIRST_ROW,
    WIDTH,
    Chart,
    ChartRow,
    Crosses,
    Frame,
    Level,
    Series,
    draw_rows,
    finite_range,
)
from tools.analysis.plots.drawing import Drawing, Line, Shape, Text, text_width
from tools.analysis.plots.training_plot import (
    Over,
    Record,
    axis_label,
    positions,
    skipped_positions,
    values,
)
from tools.journal.records import AVERAGE_LOSS, HELD_OUT_LOSS

LAST = 10  # newest applied steps, over whose loss the mean is taken, after each step of a line too
MAX_TOGETHER = 8  # runs that share a chart at most
COLORS = ("#1f5fa8", "#e07b00", "#2a9d55", "#d62728", "#8250c4", "#7a5230", "#d957a8", "#6e7781")
COLUMNS = 4  # of charts
LABEL_SIZE = 12.0
LABEL_SPACING = 18.0  # between two labels at the ends of lines
FINALS_WIDTH = 100.0  # of the final losses, and of the lines to the labels
MARGIN = 12.0


@dataclass(frozen=True)
class Curve:
    """One run: its name in the plot and the records of its metrics.jsonl."""

    name: str
    records: list[Record]

    @property
    def skipped(self) -> int:
        """The number of steps whose update was not applied."""
        return sum(record["outcome"] != "applied" for record in self.records)

    @property
    def final(self) -> float:
        """The mean loss over the newest applied steps; NaN if there are none."""
        return self.means[-1] if self.means else math.nan

    @cached_property
    def means(self) -> list[float]:
        """After each step, the mean loss over the newest applied steps."""
        losses = values(self.records, "loss")
        is_applied = [record["outcome"] == "applied" for record in self.records]
        return newest_means(losses, is_applied)

    @property
    def held_out(self) -> float:
        """The newest held-out loss; NaN if there is none."""
        record = self._newest_evaluation()
        return record[HELD_OUT_LOSS] if record else math.nan

    @property
    def held_out_of_average(self) -> float:
        """The held-out loss of the average of the weights in the same evaluation; NaN if there is
        none."""
        record = self._newest_evaluation() or {}
        return record.get(AVERAGE_LOSS, math.nan)

    @property
    def held_out_step(self) -> int | None:
        """The step after which the newest held-out loss was computed; None if there is none."""
        record = self._newest_evaluation()
        return record["step"] if record else None

    def _newest_evaluation(self) -> Record | None:
        """Return the newest record with a held-out loss; None if there is none."""
        for record in reversed(self.records):
            if HELD_OUT_LOSS in record:
                return record
        return None


def newest_means(y_values: Sequence[float], is_counted: Sequence[bool]) -> list[float]:
    """Return at each value the mean of the newest LAST counted ones up to it, of fewer at the
    start; NaN while there is none."""
    newest = deque[float](maxlen=LAST)
    means: list[float] = []
    for y_value, counts in zip(y_values, is_counted, strict=True):
        if counts:
            newest.append(y_value)
        mean = sum(newest) / len(newest) if newest else math.nan
        means.append(mean)
    return means


def by_loss(curves: Sequence[Curve]) -> list[Curve]:
    """Return the runs sorted by final loss, the lowest first, runs without a loss last."""

    def order(curve: Curve) -> float:
        """Return the final loss, or infinity without one."""
        # NaN has no place in an order
        return math.inf if math.isnan(curve.final) else curve.final

    return sorted(curves, key=order)


def draw(curves: Sequence[Curve], path: Path, x_axis: Over, against: Curve | None) -> None:
    """Write the picture. Raises UserError for PNG without matplotlib.

    x_axis: what the losses are drawn over. against: the run whose loss is subtracted; None: losses
        are drawn.
    """
    if against is None and len(curves) <= MAX_TOGETHER:
        drawing = drawn_together(curves, x_axis)
    else:
        sorted_curves = by_loss(curves)
        drawing = drawn_separately(sorted_curves, x_axis, against)
    drawing.save(path)


def drawn_together(curves: Sequence[Curve], x_axis: Over) -> Drawing:
    """Return a drawing of all runs in one chart."""
    series: list[Series] = []
    crosses: list[Crosses] = []
    colors = [COLORS[curve_number % len(COLORS)] for curve_number in range(len(curves))]
    colored_curves = zip(curves, colors, strict=True)
    for curve_number, (curve, line_color) in enumerate(colored_curves):
        x_values = positions(curve.records, x_axis)
        losses = values(curve.records, "loss")
        series += _series(x_values, losses, curve.means, line_color)
        # each run's crosses a little above those of the run before
        skipped = skipped_positions(curve.records, x_axis)
        lift = 8.0 * curve_number
        crosses.append(Crosses(skipped, "", line_color, lift=lift))
    chart = Chart(
        f"loss, nats a token: mean of last {LAST} steps; faint: each step; crosses: skipped steps",
        series,
        crosses,
        x_label=axis_label(x_axis),
        right_title=f"mean of last {LAST} steps",
    )
    # room for the names, however long
    names_width = max(text_width(curve.name, LABEL_SIZE) for curve in curves)
    width = WIDTH + names_width
    right = names_width + FINALS_WIDTH
    row = ChartRow([chart], 1, 440)
    drawing = draw_rows("", [row], width, right)
    # the axes that were drawn, to find the ends of the lines
    (area,) = row.areas(FIRST_ROW, width - right)
    frame = Frame(chart, area)
    finals_end = width - MARGIN
    drawing.shapes += _label_ends(frame, curves, colors, finals_end)
    return drawing


class _LineEnd(NamedTuple):
    """The height at which the line of a run ends, in pixels."""

    height: float
    curve: Curve
    color: str


def _label_ends(
    frame: Frame, curves: Sequence[Curve], colors: Sequence[str], finals_end: float
) -> Iterator[Shape]:
    """Yield the name and the final loss of each run beside the end of its line, far enough from the
    other names."""
    area = frame.box
    # from the top down: each label may push those below it
    line_ends = _line_ends(frame, curves, colors)
    ends = sorted(line_ends, key=lambda end: end.height)
    label_heights: list[float] = []
    for end in ends:
        # below the label before
        least = label_heights[-1] + LABEL_SPACING if label_heights else end.height
        label_heights.append(max(end.height, least))
    # so that the lowest label stays beside the axes
    lift = max(0.0, label_heights[-1] - area.bottom)
    for end, label_height in zip(ends, label_heights, strict=True):
        middle = label_height - lift
        baseline = middle + 4  # half of the height of letters
        curve = end.curve
        final = "no loss" if math.isnan(curve.final) else f"{curve.final:.4f}"
        # from the end of the run's line to its label
        yield Line(area.right + 2, end.height, area.right + 22, middle, end.color, 0.9)
        yield Text(area.right + 26, baseline, curve.name, LABEL_SIZE, end.color)
        yield Text(finals_end, baseline, final, LABEL_SIZE, end.color, "end")


def _line_ends(frame: Frame, curves: Sequence[Curve], colors: Sequence[str]) -> Iterator[_LineEnd]:
    """Yield the end of the line of each run: at its last mean that is a number."""
    for curve, color in zip(curves, colors, strict=True):
        known_means = [mean for mean in curve.means if not math.isnan(mean)]
        height = frame.box.bottom  # a run without a loss is named below the others
        if known_means:
            height = frame.y_pixel(known_means[-1])
        yield _LineEnd(height, curve, color)


def drawn_separately(curves: Sequence[Curve], x_axis: Over, against: Curve | None) -> Drawing:
    """Return a drawing with a chart for each run, all on the same axes.

    curves: the lowest loss first. against: the run whose loss is subtracted; None: losses are
        drawn.
    """
    reference = curves[0]  # curves are sorted: that of the lowest loss
    if against:
        charts = [_chart_of_differences(curve, x_axis, against) for curve in curves]
    else:
        charts = [_chart_of_losses(curve, x_axis, reference) for curve in curves]
    charts = _with_common_axes(charts)
    rows: list[ChartRow] = []
    for start in range(0, len(charts), COLUMNS):
        in_row: list[Chart] = []
        charts_of_row = charts[start : start + COLUMNS]
        for number, chart in enumerate(charts_of_row, start):
            # the lowest chart of each column names the axis
            is_lowest = number + COLUMNS >= len(charts)
            x_label = axis_label(x_axis) if is_lowest else ""
            in_row.append(replace(chart, x_label=x_label))
        rows.append(ChartRow(in_row, COLUMNS, 150))
    if against:
        quantity = f"loss minus that of {against.name}"
        steps = f"the last {LAST} common steps"
    else:
        quantity = f"loss; grey: {reference.name}"
        steps = f"the last {LAST} steps"
    title = f"{quantity}; nats a token, mean of {steps}, the newest beside each name"
    return draw_rows(title, rows, 1200)


def _with_common_axes(charts: Sequence[Chart]) -> list[Chart]:
    """Return the charts with axes that fit the means of all of them."""
    # the last series of a chart is its own mean; single steps may leave the axes
    mean_lines = [chart.series[-1] for chart in charts]
    losses = chain.from_iterable(line.y for line in mean_lines)
    loss_range = finite_range(losses)
    if loss_range is None:
        return list(charts)
    lowest, highest = loss_range
    margin = 0.1 * (highest - lowest)
    # equal ones lie on one line, for which each chart finds its own height
    y_range = (lowest - margin, highest + margin) if margin else None
    x_values = chain.from_iterable(line.x for line in mean_lines)
    x_range = finite_range(x_values)
    return [replace(chart, y_range=y_range, x_range=x_range) for chart in charts]


def _chart_of_losses(curve: Curve, x_axis: Over, reference: Curve) -> Chart:
    """Return the chart of one run, beside a reference."""
    x_of_reference = positions(reference.records, x_axis)
    series = [Series("", x_of_reference, reference.means, "faint", 1.0)]
    x_values = positions(curve.records, x_axis)
    losses = values(curve.records, "loss")
    series += _series(x_values, losses, curve.means, "main")
    skipped = skipped_positions(curve.records, x_axis)
    crosses = Crosses(skipped, label="")
    title = f"{curve.name}  {curve.final:.4f}"
    return Chart(title, series, [crosses])


def _chart_of_differences(curve: Curve, x_axis: Over, reference: Curve) -> Chart:
    """Return the chart of one run minus a reference, over the steps that both have."""
    # by step, for runs may have lost records
    reference_by_step = {record["step"]: record for record in reference.records}
    common = [record for record in curve.records if record["step"] in reference_by_step]
    reference_records = [reference_by_step[record["step"]] for record in common]
    losses = values(common, "loss")
    reference_losses = values(reference_records, "loss")
    differences: list[float] = []
    for loss, reference_loss in zip(losses, reference_losses, strict=True):
        differences.append(loss - reference_loss)
    are_applied: list[bool] = []  # in both runs
    for record, reference_record in zip(common, reference_records, strict=True):
        are_applied.append(record["outcome"] == reference_record["outcome"] == "applied")
    means = newest_means(differences, are_applied)
    x_values = positions(common, x_axis)
    series = [*_series(x_values, differences, means, "main")]
    skipped = skipped_positions(common, x_axis)
    crosses = Crosses(skipped, label="")
    final = f"{means[-1]:+.4f}" if any(are_applied) else "no common step"
    title = f"{curve.name}  {final}"
    return Chart(title, series, [crosses], levels=[Level(0.0)])


def _series(
    x_values: Sequence[float], y_values: Sequence[float], means: Sequence[float], line_color: str
) -> Iterator[Series]:
    """Yield the values of each step, faint, and their means."""
    yield Series("", x_values, y_values, line_color, 0.8, opacity=0.22)
    yield Series("", x_values, means, line_color)
