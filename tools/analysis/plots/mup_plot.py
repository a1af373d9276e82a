"""The picture of `megaprec mup-check`: how far each activation has moved, over the hidden size."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.analysis.plots.charts import Chart, ChartRow, Series, draw_rows, finite_range

COLORS = ("#1f5fa8", "#e07b00", "#2a9d55", "#d62728")
"""Colors of the lines, one for each step; the last step has the last one."""
COLUMNS = 3
"""Charts in a row."""
HEIGHT = 120.0
"""Height of a chart's axes, in pixels."""
LEAST_SPAN = 3.0
"""Powers of 2 that the y axis spans at least, so that noise does not look like a slope."""


def draw(certificate: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a certificate. Raises UserError for PNG without matplotlib."""
    activations = certificate["rows"]
    widths = certificate["widths"]
    # all charts have one span, so that their slopes can be compared
    spans = [_span(activation) for activation in activations]
    span = max([LEAST_SPAN, *spans])
    charts = [_chart(activation, widths, span) for activation in activations]
    rows = list[ChartRow]()
    for start in range(0, len(charts), COLUMNS):
        beside_each_other = charts[start : start + COLUMNS]
        rows.append(ChartRow(beside_each_other, COLUMNS, HEIGHT))
    subject = "change of activations over log2(hidden), a line for each step"
    title = f"{certificate['parametrization']}: {subject}: {certificate['verdict']}"
    picture = draw_rows(title, rows)
    picture.save(path)


def _logarithms(row: Mapping[str, Any]) -> list[float]:
    """Return the base-2 logarithms of all changes of a row that have one."""
    logarithms: list[float] = []
    for sizes in row["changes"]:
        drawn = [size for size in sizes if _has_logarithm(size)]
        logarithms += map(math.log2, drawn)
    return logarithms


def _has_logarithm(size: float) -> bool:
    """Return True of a change that can be drawn: of one that is finite and not zero."""
    return math.isfinite(size) and size > 0


def _span(row: Mapping[str, Any]) -> float:
    """Return how many powers of 2 lie between the smallest and the largest change of a row."""
    lowest, highest = _range(row)
    return highest - lowest


def _range(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return the logarithms of the smallest and the largest change of a row; 0 and 0 if none has
    one."""
    logarithms = _logarithms(row)
    return finite_range(logarithms) or (0.0, 0.0)


def _chart(row: Mapping[str, Any], widths: Sequence[int], span: float) -> Chart:
    """Return the chart of one activation. span: of the y axis, in powers of 2."""
    x = [math.log2(width) for width in widths]
    changes = row["changes"]  # by step, the change at each width
    series: list[Series] = []
    for step, sizes in enumerate(changes):
        # so that the last step has the last colour
        color_index = len(COLORS) - len(changes) + step
        color = COLORS[color_index % len(COLORS)]
        y = [_or_gap(size) for size in sizes]
        series.append(Series("", x, y, color, marker="dot"))
    slope = row["slopes"][-1]
    slope_text = "" if slope is None else f"slope {slope:+.2f}: "
    lowest, highest = _range(row)
    middle = (lowest + highest) / 2
    half_axis = 0.55 * span  # with a margin
    width_names = map(str, widths)
    width_of_tick = zip(x, width_names, strict=True)
    x_margin = 0.2  # powers of two
    return Chart(
        row["activation"],
        series,
        right_title=slope_text + row["verdict"],
        base=2,
        x_range=(min(x) - x_margin, max(x) + x_margin),
        y_range=(middle - half_axis, middle + half_axis),
        tick_notes=dict(width_of_tick),
    )


def _or_gap(size: float) -> float:
    """Return a size; NaN, which leaves a gap, where it has no logarithm."""
    return size if _has_logarithm(size) else math.nan
