"""Maps of a run's statistics (`statistics.jsonl`): layers by steps, a colour for each number.

What lies outside of layers is a row of its own: embedding, positions, final norm, head, modules of
multi-token prediction. Of the tensors of a row the one with the largest number counts, except for
the median of their updates. Colours are of a logarithm, from the smallest to the largest number of
a map; what is 0 or not finite is left white.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from tools.analysis.plots.drawing import Drawing, Rect, Shape, Text
from tools.journal.statistics_records import OUTPUTS, measure_of

MOST_COLUMNS = 120  # of more steps, as many are drawn, evenly spaced
ROW_HEIGHTS = (6.0, 16.0)  # pixels, for many rows and for few
MAP_HEIGHT = 320.0  # that rows share if there are many
MAP_WIDTH = 420.0
NAMES_WIDTH = 110.0
LABEL_SIZE = 11.0
TITLE_SIZE = 13.0
TITLE_HEIGHT = 24.0
AXIS_HEIGHT = 22.0
SCALE_WIDTH = 96.0
SCALE_STEPS = 24
GAP = 24.0
# from the smallest number to the largest one
COLORS = (
    (68, 1, 84),
    (59, 82, 139),
    (33, 145, 140),
    (94, 201, 98),
    (253, 231, 37),
)
Record = Mapping[str, Any]
Cells = dict[tuple[str, int], float]  # by row and step


@dataclass(frozen=True)
class StatisticsMap:
    """One map. rows: names, from the top. steps: ascending. cells: the numbers that are known."""

    title: str
    rows: Sequence[str]
    steps: Sequence[int]
    cells: Cells


@dataclass(frozen=True)
class _Scale:
    """Colours of numbers between two positive ones, by their logarithm."""

    low: float
    high: float

    def color(self, number: float) -> str:
        """Return the colour of a number, "#rrggbb": mixed of the two of COLORS it lies between."""
        extent = math.log(self.high / self.low) or 1.0  # one number alone has the first colour
        last = len(COLORS) - 1
        position = math.log(number / self.low) / extent * last
        # numbers beyond the scale have the colour of its end
        lower = max(0, min(int(position), last - 1))
        share_of_upper = min(1.0, max(0.0, position - lower))
        lower_color = COLORS[lower]
        upper_color = COLORS[lower + 1]
        digits: list[str] = []
        for lower_channel, upper_channel in zip(lower_color, upper_color, strict=True):
            mixed = round(lower_channel + share_of_upper * (upper_channel - lower_channel))
            digits.append(f"{mixed:02x}")
        return "#" + "".join(digits)


def maps_of(records: Sequence[Record]) -> list[StatisticsMap]:
    """Return the maps of the statistics of a run; those without a number are left out."""
    shown_records = _spaced(records)
    # each returns the number of each row in a record
    makers = {
        "output of a layer, root mean square": _outputs,
        "gradient, root mean square of the largest tensor": _gradients,
        "update over weight, median of the tensors": _relative_updates,
        "weights, largest kurtosis (3: normal)": _kurtosis,
    }
    maps: list[StatisticsMap] = []
    for title, make_rows in makers.items():
        cells: Cells = {}
        for record in shown_records:
            step = record["step"]
            number_of_row = make_rows(record)
            for row, number in number_of_row.items():
                # others have no logarithm
                if math.isfinite(number) and number > 0:
                    cells[row, step] = number
        if cells:
            known_rows = {row for row, _ in cells}
            rows = sorted(known_rows, key=_place)
            steps = [record["step"] for record in shown_records]
            maps.append(StatisticsMap(title, rows, steps, cells))
    return maps


def _spaced(records: Sequence[Record]) -> list[Record]:
    """Return at most MOST_COLUMNS of the records, evenly spaced, the last one among them."""
    if len(records) <= MOST_COLUMNS:
        return list(records)
    last = len(records) - 1
    intervals = MOST_COLUMNS - 1
    return [records[column * last // intervals] for column in range(MOST_COLUMNS)]


def row_of(name: str) -> str:
    """Return the row of a tensor or layer by its logical name: "layer 3", or its first word."""
    kind, _, within = name.partition(".")
    number, _, _ = within.partition(".")
    if kind == "layers":
        return f"layer {number}"
    if kind == "mtp":
        return f"mtp {number}"
    return kind.replace("_", " ")


def _place(row: str) -> tuple[int, int, str]:
    """Return a key that sorts rows from the top: in the order of computation, and layers by
    number."""
    kind, _, number = row.partition(" ")
    order = ("embedding", "positions", "layer", "final", "head", "mtp")
    place_of_kind = order.index(kind) if kind in order else len(order)
    place_within_kind = int(number) if number.isdigit() else 0
    return place_of_kind, place_within_kind, row


def _by_row(values: Mapping[str, float]) -> dict[str, list[float]]:
    """Return the numbers of tensors by the row that they are in."""
    values_of_row: dict[str, list[float]] = {}
    for name, value in values.items():
        row_values = values_of_row.setdefault(row_of(name), [])
        row_values.append(value)
    return values_of_row


def _outputs(record: Record) -> dict[str, float]:
    """Return the root mean square of the output of each row."""
    sizes = measure_of(record, OUTPUTS, "rms")
    return {row_of(name): size for name, size in sizes.items()}


def _gradients(record: Record) -> dict[str, float]:
    """Return the largest root mean square of a tensor's gradient in each row."""
    sizes = measure_of(record, "gradients", "rms")
    return {row: max(values) for row, values in _by_row(sizes).items()}


def _kurtosis(record: Record) -> dict[str, float]:
    """Return the largest kurtosis of a weight in each row."""
    kurtosis_of_weight = measure_of(record, "weights", "kurtosis")
    return {row: max(values) for row, values in _by_row(kurtosis_of_weight).items()}


def _relative_updates(record: Record) -> dict[str, float]:
    """Return the median, over the tensors of each row, of an update's size over its weight's."""
    weights = measure_of(record, "weights", "rms")
    updates = measure_of(record, "updates", "rms")
    # a weight of zeros has no ratio
    ratios = {name: updates[name] / weights[name] for name in updates if weights.get(name)}
    return {row: median(values) for row, values in _by_row(ratios).items()}


def draw_map(statistics_map: StatisticsMap, scale: tuple[float, float] | None = None) -> Drawing:
    """Return the drawing of a map. scale: the numbers of the first and the last colour, in place of
    the map's own smallest and largest ones."""
    width = NAMES_WIDTH + MAP_WIDTH + SCALE_WIDTH
    drawing = Drawing(width, TITLE_HEIGHT)
    drawing.height += _add_map(drawing.shapes, statistics_map, scale, left=0.0, top=0.0)
    return drawing


def draw_maps(maps_by_run: Mapping[str, Sequence[StatisticsMap]], path: Path) -> None:
    """Write a picture of the maps of several runs: a run in each column, with the same colours for
    the same numbers along a row. Raises UserError for PNG without matplotlib."""
    titles: dict[str, None] = {}  # in order, each once
    for maps in maps_by_run.values():
        titles_of_run = [shown.title for shown in maps]
        titles |= dict.fromkeys(titles_of_run)
    column_width = NAMES_WIDTH + MAP_WIDTH + SCALE_WIDTH + GAP
    drawing = Drawing(column_width * len(maps_by_run), TITLE_HEIGHT)
    for number, name in enumerate(maps_by_run):
        left = number * column_width + NAMES_WIDTH
        drawing.shapes.append(Text(left, 16.0, name, TITLE_SIZE, bold=True))
    top = TITLE_HEIGHT
    for title in titles:
        # by column; a run without this map leaves its place empty
        map_of_column: dict[int, StatisticsMap] = {}
        for column, maps in enumerate(maps_by_run.values()):
            for shown in maps:
                if shown.title == title:
                    map_of_column.setdefault(column, shown)
        scale = _common_scale([*map_of_column.values()])
        heights: list[float] = []
        for column, shown in map_of_column.items():
            left = column * column_width
            height = _add_map(drawing.shapes, shown, scale, left, top)
            heights.append(height)
        top += TITLE_HEIGHT + max(heights) + GAP
    drawing.height = top
    drawing.save(path)


def _common_scale(maps: Sequence[StatisticsMap]) -> tuple[float, float]:
    """Return the smallest and the largest number of several maps."""
    numbers_by_map = [shown.cells.values() for shown in maps]
    numbers = [*chain.from_iterable(numbers_by_map)]
    return min(numbers), max(numbers)


def _add_map(
    shapes: list[Shape],
    shown: StatisticsMap,
    scale: tuple[float, float] | None,
    left: float,
    top: float,
) -> float:
    """Add a map with its title, names, steps and colours; return its height below the title."""
    lowest, highest = scale or _common_scale([shown])
    colors = _Scale(lowest, highest)
    lowest_row, highest_row = ROW_HEIGHTS
    shared_height = MAP_HEIGHT / len(shown.rows)
    row_height = min(highest_row, max(lowest_row, shared_height))
    column_width = MAP_WIDTH / len(shown.steps)
    map_left = left + NAMES_WIDTH
    map_top = top + TITLE_HEIGHT
    shapes.append(Text(map_left, top + 16.0, shown.title, TITLE_SIZE))
    # rows may be lower than their names
    named_every = max(1, math.ceil(LABEL_SIZE / row_height))
    for row_number, row in enumerate(shown.rows):
        y = map_top + row_number * row_height
        if row_number % named_every == 0:
            baseline = y + row_height / 2 + LABEL_SIZE / 3
            shapes.append(Text(map_left - 6, baseline, row, LABEL_SIZE, "faint", "end"))
        for column, step in enumerate(shown.steps):
            number = shown.cells.get((row, step))
            if number is None:
                continue
            x = map_left + column * column_width
            color = colors.color(number)
            tip = f"{row}, step {step:,}: {number:.4g}"
            shapes.append(Rect(x, y, column_width, row_height, color, tip=tip))
    height = len(shown.rows) * row_height
    _add_steps(shapes, shown.steps, map_left, map_top + height)
    # a map of few rows is lower than the two labels of its scale
    scale_height = max(height, 60.0)
    scale_left = map_left + MAP_WIDTH + 10
    _add_scale(shapes, colors, scale_left, map_top, scale_height)
    return scale_height + AXIS_HEIGHT


def _add_steps(shapes: list[Shape], steps: Sequence[int], left: float, top: float) -> None:
    """Add the first and the last step below a map."""
    baseline = top + 14.0
    first_label = f"step {steps[0]:,}"
    shapes.append(Text(left, baseline, first_label, LABEL_SIZE, "faint"))
    if len(steps) > 1:
        last_label = f"{steps[-1]:,}"
        right = left + MAP_WIDTH
        shapes.append(Text(right, baseline, last_label, LABEL_SIZE, "faint", "end"))


def _add_scale(shapes: list[Shape], colors: _Scale, left: float, top: float, height: float) -> None:
    """Add the colours beside a map, the largest number on top."""
    step_height = height / SCALE_STEPS
    ratio = colors.high / colors.low
    for number in range(SCALE_STEPS):
        # the number in the middle of this step of the scale
        share_from_top = (number + 0.5) / SCALE_STEPS
        value = colors.low * ratio ** (1 - share_from_top)
        y = top + number * step_height
        color = colors.color(value)
        # half a pixel higher: no white line shows between two steps
        shapes.append(Rect(left, y, 10.0, step_height + 0.5, color))
    label_left = left + 14
    highest = f"{colors.high:.3g}"
    shapes.append(Text(label_left, top + LABEL_SIZE, highest, LABEL_SIZE, "faint"))
    if ratio > 1:
        lowest = f"{colors.low:.3g}"
        shapes.append(Text(label_left, top + height, lowest, LABEL_SIZE, "faint"))
