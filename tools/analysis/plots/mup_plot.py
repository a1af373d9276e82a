"""The picture of `megaprec mup-check`: how far each activation has moved, over the hidden size."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.analysis.plots.charts import Chart, Row, Series, draw_rows, finite_range

COLORS = ("#1f5fa8", "#e07b00", "#2a9d55", "#d62728")
"""Of the steps, the last step's last."""
COLUMNS = 3
"""Charts beside each other."""
HEIGHT = 120.0
"""Of the axes of a chart, in pixels."""
LEAST_SPAN = 3.0
"""Powers of 2 that the axis of y shows at least, so that noise does not look like a slope."""


def draw(certificate: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a certificate. Raises UserError without matplotlib."""
    span = max([LEAST_SPAN, *(_span(row) for row in certificate["rows"])])
    charts = [_chart(row, certificate["widths"], span) for row in certificate["rows"]]
    rows = [
        Row(charts[start : start + COLUMNS], COLUMNS, HEIGHT)
        for start in range(0, len(charts), COLUMNS)
    ]
    title = (
        f"{certificate['parametrization']}: change of activations over log2(hidden), a line for "
        f"each step: {certificate['verdict']}"
    )
    draw_rows(title, rows).save(path)


def _logarithms(row: Mapping[str, Any]) -> list[float]:
    """Return the base-2 logarithms of all changes of a row that have one."""
    logarithms: list[float] = []
    for sizes in row["changes"]:
        logarithms += [math.log2(size) for size in sizes if math.isfinite(size) and size > 0]
    return logarithms


def _span(row: Mapping[str, Any]) -> float:
    """Return how many powers of 2 lie between the smallest and the largest change of a row."""
    lowest, highest = finite_range(_logarithms(row)) or (0.0, 0.0)
    return highest - lowest


def _chart(row: Mapping[str, Any], widths: Sequence[int], span: float) -> Chart:
    """Return the chart of one activation. span: of the axis of y, in powers of 2."""
    x = [math.log2(width) for width in widths]
    steps = len(row["changes"])
    series: list[Series] = []
    for step, sizes in enumerate(row["changes"]):
        color = COLORS[(len(COLORS) - steps + step) % len(COLORS)]
        series.append(Series("", x, [_or_gap(size) for size in sizes], color, marker="dot"))
    slope = row["slopes"][-1]
    slope_text = "" if slope is None else f"slope {slope:+.2f}: "
    lowest, highest = finite_range(_logarithms(row)) or (0.0, 0.0)
    middle = (lowest + highest) / 2
    return Chart(
        row["activation"],
        series,
        right_title=slope_text + row["verdict"],
        base=2,
        x_range=(min(x) - 0.2, max(x) + 0.2),
        y_range=(middle - 0.55 * span, middle + 0.55 * span),
        tick_notes=dict(zip(x, map(str, widths), strict=True)),
    )


def _or_gap(size: float) -> float:
    """Return a size; NaN, which leaves a gap, where it has no logarithm."""
    return size if math.isfinite(size) and size > 0 else math.nan
