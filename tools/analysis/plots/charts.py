"""Charts: curves over steps or tokens with axes, ticks and a legend, as parts of a drawing.

The pictures of a run, of several runs and of FP8 comparisons are rows of such charts, and so are
the curves of a report.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from tools.analysis.plots.drawing import (
    Drawing,
    Line,
    Point,
    Rect,
    Shape,
    Strokes,
    Text,
    text_width,
)

WIDTH = 1100.0  # of a drawing
FIRST_ROW = 8.0  # top of the first row of charts
BELOW_TITLE = 34.0  # top of the first row below a title
# around the axes of a chart, for labels
LEFT = 66.0
RIGHT = 26.0
TOP = 12.0
BOTTOM = 24.0
LABEL_HEIGHT = 16.0  # of the label below the ticks
# A longer series is thinned: of each stretch of so many pixels the lowest and the highest value are
# drawn, so that no spike is lost.
STRETCH_WIDTH = 2.0
# the least distance of two ticks: labels of six characters fit in, and two rows of digits
X_TICK_SPACING = 45.0
Y_TICK_SPACING = 24.0
# numbers from here on are written with a unit: of the axes of y and x
LARGE = 1e4
LARGE_STEP = 1e5
UNITS = (
    (1e12, "T"),
    (1e9, "G"),
    (1e6, "M"),
    (1e3, "k"),
)
LEGEND_SIZE = 10.5  # of its text
LEGEND_ROW = 15.0  # height
LEGEND_SIGN = 21.0  # width of the piece of a line before a name
LEGEND_GAP = 12.0  # between two entries
TITLE_SIZE = 13.0
TITLE_LIFT = 8.0  # of the title's baseline above the axes
CROSS = 3.2  # half of the width of a cross
DOT = 3.0  # radius
DASHED = (4.0, 2.5)
DOTTED = (1.5, 2.0)
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Series:
    """Values of one quantity. y: a value that is NaN leaves a gap.

    label: in the legend; "" for none. joined: by a line.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: str = "main"
    width: float = 1.6
    opacity: float = 1.0
    dash: tuple[float, ...] = ()
    marker: Literal["", "dot", "cross"] = ""
    joined: bool = True


@dataclass(frozen=True)
class Crosses:
    """Crosses on the horizontal axis, or `lift` pixels above it, where those of other runs are."""

    x: Sequence[float]
    label: str = "skipped step"
    color: str = "red"
    lift: float = 0.0


@dataclass(frozen=True)
class Level:
    """A horizontal line through the chart."""

    y: float
    color: str = "faint"
    label: str = ""
    dash: tuple[float, ...] = ()


@dataclass(frozen=True)
class Chart:
    """One chart.

    base: of a logarithmic axis of y, 0 for a linear one.
    linear_below: a logarithmic axis is linear from 0 to this number.
    from_zero: the axis of y begins at 0.
    stepped: a value holds until the next one.
    resumed: x at which the run was resumed.
    band: the lowest and the highest y of a shaded band.
    hints: further entries of the legend, without a line.
    notes: texts beside points.
    tick_notes: a second line for labels of the horizontal axis.
    x_range, y_range: the lowest and the highest value shown; None for those of the values.
    """

    title: str
    series: Sequence[Series]
    crosses: Sequence[Crosses] = ()
    x_label: str = ""
    right_title: str = ""
    base: int = 0
    linear_below: float = 0.0
    from_zero: bool = False
    stepped: bool = False
    resumed: Sequence[float] = ()
    levels: Sequence[Level] = ()
    band: tuple[float, float] | None = None
    hints: Sequence[str] = ()
    notes: Sequence[tuple[float, float, str]] = ()
    tick_notes: Mapping[float, str] = field(default_factory=dict)
    has_legend: bool = True
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None

    def scaled(self, y_value: float) -> float:
        """Return the place of a value on the axis of y, in units of the axis."""
        if not self.base:
            return y_value
        if self.linear_below:
            share = y_value / self.linear_below
            return share if share < 1 else 1 + math.log(share, self.base)
        return math.log(max(y_value, 1e-300), self.base)  # a logarithm of 0 is an error


@dataclass(frozen=True)
class Box:
    """The area of a chart's axes in the drawing, in pixels."""

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height


class Frame:
    """The axes of a chart: from values to pixels.

    x_range, y_range: the lowest and the highest value shown; of y in units of the axis.
    """

    def __init__(self, chart: Chart, plot_area: Box) -> None:
        self.chart = chart
        self.box = plot_area
        self.x_range = chart.x_range or _x_range(chart)
        self.y_range = chart.y_range or _y_range(chart)

    def x_pixel(self, x_value: float) -> float:
        return self.box.left + self.box.width * _share(x_value, self.x_range)

    def y_pixel(self, y_value: float) -> float:
        share = _share(self.chart.scaled(y_value), self.y_range)
        # what is beyond the axes stays at their edge: it would lie over the charts beside them
        visible_share = min(max(share, 0.0), 1.0)
        return self.box.bottom - self.box.height * visible_share

    def level(self, y: float) -> list[Point]:
        """Return the ends of a horizontal line through the chart."""
        height = self.y_pixel(y)
        return [(self.box.left, height), (self.box.right, height)]

    def upright(self, x: float) -> list[Point]:
        """Return the ends of a vertical line through the chart."""
        pixel = self.x_pixel(x)
        return [(pixel, self.box.top), (pixel, self.box.bottom)]


def _share(value: float, shown_range: tuple[float, float]) -> float:
    """Return how far along a range a value lies: 0 at its begin, 1 at its end."""
    lowest, highest = shown_range
    if highest <= lowest:
        return 0.5
    return (value - lowest) / (highest - lowest)


def _x_range(chart: Chart) -> tuple[float, float]:
    values = chain.from_iterable(series.x for series in chart.series)
    return finite_range(values) or (0.0, 1.0)  # any range will do for axes without a value


def _y_range(chart: Chart) -> tuple[float, float]:
    """Return the lowest and the highest value of y, with a margin, in units of the axis."""
    values = chain.from_iterable(series.y for series in chart.series)
    scaled_values = [chart.scaled(y_value) for y_value in values if not math.isnan(y_value)]
    lowest, highest = finite_range(scaled_values) or (0.0, 1.0)
    if chart.from_zero:
        lowest = 0.0
    # of a constant, which has no extent: half a unit
    margin = 0.06 * (highest - lowest) or 0.5
    if chart.from_zero:
        return lowest, highest + margin
    return lowest - margin, highest + margin


def finite_or_nan(value: object) -> float:
    """Return a number of a record; NaN for one that is not finite, which a record has as a text."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return math.nan


def finite_range(values: Iterable[float]) -> tuple[float, float] | None:
    """Return the lowest and the highest number; None if there is none but NaN."""
    numbers = [value for value in values if not math.isnan(value)]
    return (min(numbers), max(numbers)) if numbers else None


@dataclass(frozen=True)
class ChartRow:
    """Charts beside each other. columns: how many would fit. height: of the axes, in pixels."""

    charts: Sequence[Chart]
    columns: int
    height: float

    def areas(self, top: float, width: float) -> list[Box]:
        """Return where the axes of each chart are, in a row of this width that begins at `top`."""
        cell_width = width / self.columns
        axes_width = cell_width - LEFT - RIGHT
        # the axes of a row begin at one height, below the highest legend
        headers = [_header_height(chart, axes_width) for chart in self.charts]
        axes_top = top + max(headers)
        lefts = [column * cell_width + LEFT for column in range(len(self.charts))]
        return [Box(left, axes_top, axes_width, self.height) for left in lefts]


def draw_rows(
    title: str, rows: Sequence[ChartRow], width: float = WIDTH, right: float = 0.0
) -> Drawing:
    """Return a drawing of rows of charts below each other. right: room at the right edge."""
    drawing = Drawing(width, height=0)
    row_top = FIRST_ROW
    if title:
        heading = Text(width / 2, 24, title, 15, anchor="middle")
        drawing.shapes.append(heading)
        row_top = BELOW_TITLE
    for row in rows:
        areas = row.areas(row_top, width - right)
        for chart, area in zip(row.charts, areas, strict=True):
            drawing.shapes += draw_chart(chart, area)
        footers = [_footer_height(chart) for chart in row.charts]
        row_top = areas[0].bottom + max(footers)
    drawing.height = row_top  # the bottom of the last row
    return drawing


def _header_height(chart: Chart, width: float) -> float:
    """Return the height of what stands above the axes: title and legend."""
    rows = len(_legend_rows(chart, width))
    # a title without a legend takes a row too
    if chart.title:
        rows = max(rows, 1)
    return TOP + LEGEND_ROW * rows


def _footer_height(chart: Chart) -> float:
    """Return the height of what stands below the axes: labels of ticks, and of the axis."""
    height = BOTTOM
    if chart.x_label:
        height += LABEL_HEIGHT
    if chart.tick_notes:
        height += LABEL_HEIGHT
    return height


def draw_chart(chart: Chart, plot_area: Box) -> Iterator[Shape]:
    """Yield the shapes of a chart."""
    frame = Frame(chart, plot_area)
    title_baseline = plot_area.top - TITLE_LIFT
    if chart.title:
        yield Text(plot_area.left, title_baseline, chart.title, TITLE_SIZE)
    if chart.right_title:
        yield Text(plot_area.right, title_baseline, chart.right_title, 11, anchor="end")
    yield from _legend(chart, plot_area)
    if chart.band:
        yield _band(frame, chart.band)
    yield from _axes(frame)
    for x_value in chart.resumed:
        yield Strokes(frame.upright(x_value), "faint", 1.0, dash=DOTTED)
    for level in chart.levels:
        ends = frame.level(level.y)
        yield Strokes(ends, level.color, 1.0, dash=level.dash)
    for series in chart.series:
        yield from _curve(frame, series)
    for crosses in chart.crosses:
        yield _crosses_on_axis(frame, crosses)
    for x_value, y_value, text in chart.notes:
        # below and to the right of the point, where the curve seldom is, or to its left where the
        # picture ends
        point = frame.x_pixel(x_value)
        fits_right = point + 8 + text_width(text, 11) <= frame.box.right
        baseline = frame.y_pixel(y_value) + 12
        if fits_right:
            yield Text(point + 8, baseline, text, 11, anchor="start")
        else:
            yield Text(point - 8, baseline, text, 11, anchor="end")


def _crosses_on_axis(frame: Frame, crosses: Crosses) -> Strokes:
    """Return the strokes of crosses that stand on the axis, or just above it."""
    max_crosses = int(frame.box.width / STRETCH_WIDTH)
    # of very many, evenly chosen ones: more would not be seen
    spacing = 1 + len(crosses.x) // max_crosses
    height = frame.box.bottom - crosses.lift
    shown = crosses.x[::spacing]
    centers = [(frame.x_pixel(x_value), height) for x_value in shown]
    return _draw_crosses(centers, crosses.color)


def _band(frame: Frame, band: tuple[float, float]) -> Rect:
    """Return the shaded part of the axes between two values of y, as far as it is shown."""
    lowest, highest = band
    bottom = frame.y_pixel(lowest)
    top = frame.y_pixel(highest)
    return Rect(
        frame.box.left,
        top,
        width=frame.box.width,
        height=bottom - top,
        fill="other1",
        opacity=0.08,
    )


def _axes(frame: Frame) -> Iterator[Shape]:
    """Yield a grid line and a label for each tick, and the axes."""
    area = frame.box
    for y_value, label in _y_ticks(frame):
        baseline = frame.y_pixel(y_value) + 4
        yield _grid_line(*frame.level(y_value))
        yield Text(area.left - 7, baseline, label, anchor="end")
    yield from _x_ticks(frame)

    top_left = (area.left, area.top)
    corner = (area.left, area.bottom)
    bottom_right = (area.right, area.bottom)
    yield Strokes([top_left, corner, bottom_right], "ink", 0.9)
    if frame.chart.x_label:
        center = area.left + area.width / 2
        label_baseline = area.bottom + _footer_height(frame.chart) - 8
        yield Text(center, label_baseline, frame.chart.x_label, anchor="middle")


def _x_ticks(frame: Frame) -> Iterator[Shape]:
    """Yield a grid line for each tick of the horizontal axis, its label, and a note below that."""
    baseline = frame.box.bottom + 16
    tick_count = max(2, int(frame.box.width / X_TICK_SPACING))
    for x_value in round_numbers(*frame.x_range, tick_count):
        pixel = frame.x_pixel(x_value)
        label = short(x_value) if x_value >= LARGE_STEP else f"{x_value:,g}"
        yield _grid_line(*frame.upright(x_value))
        yield Text(pixel, baseline, label, anchor="middle")
        note = frame.chart.tick_notes.get(x_value)
        if note:
            yield Text(pixel, baseline + LABEL_HEIGHT, note, color="faint", anchor="middle")


def _grid_line(start: Point, end: Point) -> Line:
    return Line(*start, *end, "line", 0.8)


def _y_ticks(frame: Frame) -> Iterator[tuple[float, str]]:
    """Yield the values of ticks and their labels: powers of the base on a logarithmic axis."""
    chart = frame.chart
    lowest, highest = frame.y_range
    tick_count = max(2, int(frame.box.height / Y_TICK_SPACING))
    if not chart.base:
        for y_value in round_numbers(lowest, highest, tick_count):
            label = short(y_value) if abs(y_value) >= LARGE else f"{y_value:.4g}"
            yield y_value, label
        return

    # `highest` is in units of the axis: 1 at `linear_below`, and 1 more for each power of the base
    if chart.linear_below:
        yield 0.0, "0"
        for exponent in range(math.floor(highest)):
            y_value = chart.linear_below * chart.base**exponent
            yield y_value, f"{y_value:g}"
        return

    spacing = max(1, math.ceil((highest - lowest) / tick_count))
    for exponent in range(math.ceil(lowest), math.floor(highest) + 1):
        # multiples of the spacing: the same powers in charts of other ranges
        if exponent % spacing:
            continue
        superscript = str(exponent).translate(SUPERSCRIPTS)
        label = f"{chart.base}{superscript}"
        yield float(chart.base) ** exponent, label


def round_numbers(lowest: float, highest: float, count: int) -> list[float]:
    """Return at most about `count` round numbers between two."""
    if highest <= lowest:
        return [lowest]
    tick_step = round_step((highest - lowest) / count)
    # the slack keeps ticks at both ends, which rounding may put beyond them
    first = math.ceil(lowest / tick_step - 1e-9)
    last = math.floor(highest / tick_step + 1e-9)
    return [multiple * tick_step for multiple in range(first, last + 1)]


def round_step(length: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is not below `length`."""
    power = 10.0 ** math.floor(math.log10(length))
    least = length * (1 - 1e-9)  # a length that is round but for rounding
    round_steps = [power * factor for factor in (1, 2, 5, 10)]
    return next(step for step in round_steps if step >= least)


def short(number: float) -> str:
    """Return a number with three digits and a unit: 1.23 M."""
    for unit, name in UNITS:
        if number >= unit:
            multiple = number / unit
            return f"{multiple:.3g} {name}"
    return f"{number:.3g}"


def _curve(frame: Frame, series: Series) -> Iterator[Shape]:
    """Yield the line of a series, and its markers."""
    points: list[Point | None] = []
    max_stretches = int(frame.box.width / STRETCH_WIDTH)
    for x_value, y_value in _thinned_points(series, max_stretches):
        if math.isnan(x_value) or math.isnan(y_value):
            points.append(None)
        else:
            points.append((frame.x_pixel(x_value), frame.y_pixel(y_value)))
    if series.joined:
        corners = points
        if frame.chart.stepped:
            corners = list(_as_steps(points, frame.box.right))
        yield Strokes(
            corners,
            color=series.color,
            width=series.width,
            opacity=series.opacity,
            dash=series.dash,
        )
    marked = [point for point in points if point]
    if series.marker == "cross":
        yield _draw_crosses(marked, series.color)
    elif series.marker == "dot" or len(marked) == 1:
        # a single point has no line
        yield from (_draw_dot(point, series.color) for point in marked)


def _as_steps(points: Sequence[Point | None], end: float) -> Iterator[Point | None]:
    """Yield the corners of a line that stays at the height of a point until the next one, the last
    time until x = `end`."""
    height: float | None = None  # of the line; None in a gap
    for point in points:
        if point is None:
            yield None
            height = None
            continue
        x, y = point
        if height is not None:
            yield x, height
        yield point
        height = y
    if height is not None:
        yield end, height


def _draw_dot(center: Point, color: str) -> Rect:
    """Return a dot around a point."""
    x, y = center
    return Rect(
        x - DOT,
        y - DOT,
        width=2 * DOT,
        height=2 * DOT,
        fill=color,
        round=DOT,
    )


def _draw_crosses(centers: Sequence[Point], color: str) -> Strokes:
    """Return the strokes of crosses: two for each point."""
    points: list[Point | None] = []
    for x, y in centers:
        left = x - CROSS
        right = x + CROSS
        top = y - CROSS
        bottom = y + CROSS
        points += [(left, top), (right, bottom), None]
        points += [(left, bottom), (right, top), None]
    return Strokes(points, color, 1.5)


def _thinned_points(series: Series, max_stretches: int) -> Iterator[tuple[float, float]]:
    """Yield the points of a series; of a long one the lowest and the highest of each stretch, in
    order."""
    count = len(series.x)
    if count <= 2 * max_stretches:
        yield from zip(series.x, series.y, strict=True)
        return
    for stretch in range(max_stretches):
        start = stretch * count // max_stretches
        stop = (stretch + 1) * count // max_stretches
        y_of_index: dict[int, float] = {}
        for index in range(start, stop):
            if not math.isnan(series.y[index]):
                y_of_index[index] = series.y[index]
        if not y_of_index:
            yield series.x[start], math.nan  # the gap stays
            continue
        lowest = min(y_of_index, key=y_of_index.__getitem__)
        highest = max(y_of_index, key=y_of_index.__getitem__)
        for index in sorted({lowest, highest}):
            yield series.x[index], y_of_index[index]


def _legend_entries(chart: Chart) -> list[Series]:
    """Return what the legend names, each as a series without values that looks like it."""
    no_values: tuple[float, ...] = ()
    entries = list(chart.series)
    for level in chart.levels:
        line = Series(
            level.label,
            no_values,
            no_values,
            color=level.color,
            width=1.2,
            dash=level.dash,
        )
        entries.append(line)
    if chart.resumed:
        line = Series("resumed", no_values, no_values, "faint", 1.2, dash=DOTTED)
        entries.append(line)
    for crosses in chart.crosses:
        if crosses.x:
            cross = Series(
                crosses.label,
                no_values,
                no_values,
                color=crosses.color,
                marker="cross",
                joined=False,
            )
            entries.append(cross)
    for hint in chart.hints:
        entries.append(Series(hint, no_values, no_values, joined=False))
    return [entry for entry in entries if entry.label]


def _legend_rows(chart: Chart, width: float) -> list[list[Series]]:
    """Return the entries of the legend, in rows that fit beside the title; none for one curve
    alone."""
    entries = _legend_entries(chart) if chart.has_legend else []
    # the title names a curve that is alone
    if len(entries) < 2 and not chart.levels and not chart.hints:
        return []
    # the title stands on the left of the lowest row
    available = width - text_width(chart.title, TITLE_SIZE) - LEGEND_GAP
    rows: list[list[Series]] = [[]]
    row_width = 0.0
    for entry in entries:
        row_width += _entry_width(entry)
        if rows[-1] and row_width > available:
            rows.append([])
            row_width = _entry_width(entry)
        rows[-1].append(entry)
    return rows


def _entry_width(entry: Series) -> float:
    """Return the width of an entry of the legend, with the gap before it."""
    return LEGEND_GAP + LEGEND_SIGN + text_width(entry.label, LEGEND_SIZE)


def _legend(chart: Chart, plot_area: Box) -> Iterator[Shape]:
    """Yield the legend above the axes on the right, where it never lies over a curve."""
    rows = _legend_rows(chart, plot_area.width)
    for row_number, row in enumerate(rows):
        rows_below = len(rows) - 1 - row_number
        baseline = plot_area.top - TITLE_LIFT - LEGEND_ROW * rows_below
        entry_left = plot_area.right
        for entry in reversed(row):
            entry_left -= _entry_width(entry)
            yield from _legend_entry(entry, entry_left + LEGEND_GAP, baseline)


def _legend_entry(entry: Series, sign_left: float, baseline: float) -> Iterator[Shape]:
    """Yield a piece of the line or a cross, and the name."""
    text_left = sign_left + LEGEND_SIGN
    sign_right = text_left - 5
    middle = baseline - 4  # of the height of letters
    if entry.joined:
        ends = [(sign_left, middle), (sign_right, middle)]
        yield Strokes(
            ends,
            color=entry.color,
            width=entry.width,
            opacity=entry.opacity,
            dash=entry.dash,
        )
    elif entry.marker:
        center = (sign_left + sign_right) / 2
        yield _draw_crosses([(center, middle)], entry.color)
    yield Text(text_left, baseline, entry.label, LEGEND_SIZE)
