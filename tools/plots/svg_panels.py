"""A panel of `tools.plots.panels` as SVG for a web page: no library, colours from the page,
readable on a phone."""

import math
from collections.abc import Iterator, Sequence
from html import escape

from tools.plots.panels import Line, Panel, Pictures, short

WIDTH = 480
HEIGHT = 220
LEFT = 58
RIGHT = 10
TOP = 8
BOTTOM = 22
# A longer line is thinned to this many stretches: the lowest and the highest value of each are
# drawn. There are about as many pixels.
MAX_STRETCHES = 240
TICKS = 4
OTHERS = 4  # classes of lines beside the main one: other0, other1, ...
LARGE = 1e4  # numbers from here on are written with a unit


class _Frame:
    """The axes of a panel: from values to pixels.

    x_range, y_range: the lowest and the highest value shown; of a logarithmic axis, its logarithm.
    """

    def __init__(self, panel: Panel) -> None:
        self.panel = panel
        xs: list[float] = []
        ys: list[float] = []
        for line in panel.lines:
            xs += [x for x in line.x if not math.isnan(x)]
            ys += [self._scale(y) for y in line.y if not math.isnan(y)]
        self.x_range = (min(xs), max(xs))
        low = 0.0 if panel.from_zero else min(ys)
        high = max(ys)
        margin = 0.06 * (high - low) or 0.5
        self.y_range = (low if panel.from_zero else low - margin, high + margin)

    def _scale(self, y: float) -> float:
        if not self.panel.base:
            return y
        return math.log(max(y, 1e-300), self.panel.base)  # a logarithm of 0 is an error

    def x_pixel(self, x: float) -> float:
        low, high = self.x_range
        share = (x - low) / (high - low) if high > low else 0.5
        return LEFT + (WIDTH - LEFT - RIGHT) * share

    def y_pixel(self, y: float) -> float:
        low, high = self.y_range
        height = HEIGHT - TOP - BOTTOM
        return TOP + height * (high - self._scale(y)) / (high - low)


def to_svg(panel: Panel, shown: Pictures) -> str:
    """Return the SVG of a panel, without its title."""
    frame = _Frame(panel)
    base = HEIGHT - BOTTOM
    label = escape(f"{panel.title} over {shown.x_label}")
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">',
        *_axes(frame),
    ]
    for x in shown.resumed:
        pixel = frame.x_pixel(x)
        parts.append(f'<path class="resumed" d="M{pixel:.1f} {TOP}V{base}"/>')
    for line, css_class in zip(panel.lines, _line_classes(panel), strict=True):
        path = "".join(_path(line, frame))
        parts.append(f'<path class="{css_class}" d="{path}"/>')
    if panel.skipped:
        crosses = [
            f"M{frame.x_pixel(x) - 3:.1f} {base - 3}l6 6m-6 0l6 -6"
            for x in _thin_out(panel.skipped)
        ]
        parts.append(f'<path class="skip" d="{"".join(crosses)}"/>')
    return "".join([*parts, "</svg>"])


def _line_classes(panel: Panel) -> list[str]:
    """Return the CSS class of each line: main, raw, or other0 and so on."""
    classes: list[str] = []
    others = 0
    for line in panel.lines:
        if line.look == "other":
            classes.append(f"other{others % OTHERS}")
            others += 1
        else:
            classes.append(line.look)
    return classes


def legend(panel: Panel, shown: Pictures) -> str:
    """Return the legend of a panel as HTML; empty if it has one line only."""
    labels = [line.label for line in panel.lines]
    entries = list(zip(_line_classes(panel), labels, strict=True))
    if panel.skipped:
        entries.append(("skip", "skipped step"))
    if shown.resumed:
        entries.append(("resumed", "resumed"))
    if len(entries) == 1:
        return ""
    return "".join(
        f'<span class="key"><i class="{css_class}"></i>{escape(label)}</span>'
        for css_class, label in entries
    )


def _axes(frame: _Frame) -> Iterator[str]:
    """Yield a grid line and a label for each y tick, the axes, and a label for each x tick."""
    base = HEIGHT - BOTTOM
    end = WIDTH - RIGHT
    for y, label in _y_ticks(frame):
        pixel = frame.y_pixel(y)
        yield f'<path class="grid" d="M{LEFT} {pixel:.1f}H{end}"/>'
        yield f'<text x="{LEFT - 6}" y="{pixel + 4:.1f}" text-anchor="end">{label}</text>'
    yield f'<path class="axis" d="M{LEFT} {TOP}V{base}H{end}"/>'
    for x in _round_numbers(*frame.x_range):
        pixel = frame.x_pixel(x)
        anchor = "end" if pixel > WIDTH - 30 else "middle"  # a centred label would leave the panel
        label = short(x) if x >= LARGE else f"{x:g}"
        yield f'<text x="{pixel:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{label}</text>'


def _y_ticks(frame: _Frame) -> Iterator[tuple[float, str]]:
    """Yield the values of ticks and their labels: powers of the base on a logarithmic axis."""
    low, high = frame.y_range
    base = frame.panel.base
    if not base:
        for y in _round_numbers(low, high):
            label = short(y) if abs(y) >= LARGE else f"{y:.4g}"
            yield y, label
        return
    spacing = max(1, math.ceil((high - low) / TICKS))
    for power in range(math.ceil(low), math.floor(high) + 1):
        if power % spacing == 0:
            yield float(base) ** power, f"{base}^{power}"


def _round_numbers(low: float, high: float) -> list[float]:
    """Return about `TICKS` round numbers between two."""
    if high <= low:
        return [low]
    rough_step = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough_step))
    # the slack lets a step that is round but for rounding stay itself
    candidates = [power * unit for unit in (1, 2, 5, 10)]
    step = next(candidate for candidate in candidates if candidate >= rough_step * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _path(line: Line, frame: _Frame) -> Iterator[str]:
    """Yield the parts of a path; a gap begins a new part."""
    stepped = frame.panel.stepped
    command = "M"
    drawn = False
    for x, y in _points(line):
        if math.isnan(y) or math.isnan(x):
            command = "M"
            continue
        x_pixel = frame.x_pixel(x)
        y_pixel = frame.y_pixel(y)
        if stepped and command == "L":
            yield f"H{x_pixel:.1f}"
        yield f"{command}{x_pixel:.1f} {y_pixel:.1f}"
        command = "L"
        drawn = True
    if stepped and drawn:
        yield f"H{frame.x_pixel(frame.x_range[1]):.1f}"


def _points(line: Line) -> Iterator[tuple[float, float]]:
    """Yield the points of a line; of a long one the lowest and the highest of each stretch, in
    order."""
    count = len(line.x)
    if count <= 2 * MAX_STRETCHES:
        yield from zip(line.x, line.y, strict=True)
        return
    for stretch in range(MAX_STRETCHES):
        start = stretch * count // MAX_STRETCHES
        stop = (stretch + 1) * count // MAX_STRETCHES
        numbers = [i for i in range(start, stop) if not math.isnan(line.y[i])]
        if not numbers:
            yield line.x[start], math.nan
            continue
        lowest = min(numbers, key=line.y.__getitem__)
        highest = max(numbers, key=line.y.__getitem__)
        for i in sorted({lowest, highest}):
            yield line.x[i], line.y[i]


def _thin_out(xs: Sequence[float]) -> Sequence[float]:
    """Return at most `MAX_STRETCHES` of these numbers, evenly chosen."""
    if len(xs) <= MAX_STRETCHES:
        return xs
    return [xs[i * len(xs) // MAX_STRETCHES] for i in range(MAX_STRETCHES)]
