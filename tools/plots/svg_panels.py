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
MOST = (
    240  # stretches that a line is thinned to: the lowest and the highest value of each are drawn
)
TICKS = 4
OTHERS = 4  # classes of lines beside the main one: other0, other1, ...


class _Frame:
    """The axes of a panel: from values to pixels."""

    def __init__(self, panel: Panel) -> None:
        xs = [x for line in panel.lines for x in line.x if not math.isnan(x)]
        ys = [self.scaled(panel, y) for line in panel.lines for y in line.y if not math.isnan(y)]
        self.panel = panel
        self.x = (min(xs), max(xs))
        low = 0.0 if panel.from_zero else min(ys)
        high = max(ys)
        room = 0.06 * (high - low) or 0.5
        self.y = (low if panel.from_zero else low - room), high + room

    @staticmethod
    def scaled(panel: Panel, y: float) -> float:
        return math.log(max(y, 1e-300), panel.base) if panel.base else y

    def at_x(self, x: float) -> float:
        low, high = self.x
        return LEFT + (WIDTH - LEFT - RIGHT) * ((x - low) / (high - low) if high > low else 0.5)

    def at_y(self, y: float) -> float:
        low, high = self.y
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - self.scaled(self.panel, y)) / (high - low)


def to_svg(panel: Panel, shown: Pictures) -> str:
    """Return the SVG of a panel, without its title."""
    frame = _Frame(panel)
    numbered = iter(range(len(panel.lines)))
    marks = [
        f'<path class="resumed" d="M{frame.at_x(x):.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
        for x in shown.resumed
    ]
    lines = [
        f'<path class="{line.look if line.look != "other" else f"other{next(numbered) % OTHERS}"}" '
        f'd="{"".join(_path(line, frame))}"/>'
        for line in panel.lines
    ]
    base = HEIGHT - BOTTOM
    skips = [f"M{frame.at_x(x) - 3:.1f} {base - 3}l6 6m-6 0l6 -6" for x in _thinned(panel.skipped)]
    cross = f'<path class="skip" d="{"".join(skips)}"/>' if skips else ""
    label = escape(f"{panel.title} over {shown.x_label}")
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f"{''.join(_axes(frame))}{''.join(marks)}{''.join(lines)}{cross}</svg>"
    )


def legend(panel: Panel, shown: Pictures) -> str:
    """Return the legend of a panel as HTML; empty if it has one line only."""
    numbered = iter(range(len(panel.lines)))
    named = [
        (line.look if line.look != "other" else f"other{next(numbered) % OTHERS}", line.label)
        for line in panel.lines
    ]
    named += [("skip", "skipped step")] if panel.skipped else []
    named += [("resumed", "resumed")] if shown.resumed else []
    if len(named) == 1:
        return ""
    return "".join(
        f'<span class="key"><i class="{kind}"></i>{escape(label)}</span>' for kind, label in named
    )


def _axes(frame: _Frame) -> Iterator[str]:
    base = HEIGHT - BOTTOM
    end = WIDTH - RIGHT
    for y, label in _y_ticks(frame):
        at = frame.at_y(y)
        yield f'<path class="grid" d="M{LEFT} {at:.1f}H{end}"/>'
        yield f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>'
    yield f'<path class="axis" d="M{LEFT} {TOP}V{base}H{end}"/>'
    for x in _round_numbers(*frame.x):
        at = frame.at_x(x)
        anchor = "end" if at > WIDTH - 30 else "middle"
        yield (
            f'<text x="{at:.1f}" y="{HEIGHT - 6}" '
            f'text-anchor="{anchor}">{short(x) if x >= 1e4 else f"{x:g}"}</text>'
        )


def _y_ticks(frame: _Frame) -> Iterator[tuple[float, str]]:
    low, high = frame.y
    if not frame.panel.base:
        yield from (
            (y, short(y) if abs(y) >= 1e4 else f"{y:.4g}") for y in _round_numbers(low, high)
        )
        return
    every = max(1, math.ceil((high - low) / TICKS))
    for power in range(math.ceil(low), math.floor(high) + 1):
        if power % every == 0:
            yield float(frame.panel.base) ** power, f"{frame.panel.base}^{power}"


def _round_numbers(low: float, high: float) -> list[float]:
    """Return about `TICKS` round numbers between two."""
    if high <= low:
        return [low]
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * unit for unit in (1, 2, 5, 10) if power * unit >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _path(line: Line, frame: _Frame) -> Iterator[str]:
    """Yield the parts of a path; a gap begins a new part."""
    pen = "M"
    before = math.nan
    for x, y in _points(line):
        if math.isnan(y) or math.isnan(x):
            pen = "M"
            continue
        if frame.panel.stepped and pen == "L":
            yield f"H{frame.at_x(x):.1f}"
        yield f"{pen}{frame.at_x(x):.1f} {frame.at_y(y):.1f}"
        pen = "L"
        before = y
    if frame.panel.stepped and not math.isnan(before):
        yield f"H{frame.at_x(frame.x[1]):.1f}"


def _points(line: Line) -> Iterator[tuple[float, float]]:
    """Yield the points of a line; of a long one the lowest and the highest of each stretch, in
    order."""
    count = len(line.x)
    if count <= 2 * MOST:
        yield from zip(line.x, line.y, strict=True)
        return
    for part in range(MOST):
        first = part * count // MOST
        end = (part + 1) * count // MOST
        there = [n for n in range(first, end) if not math.isnan(line.y[n])]
        if not there:
            yield line.x[first], math.nan
            continue
        ends = {min(there, key=lambda n: line.y[n]), max(there, key=lambda n: line.y[n])}
        yield from ((line.x[n], line.y[n]) for n in sorted(ends))


def _thinned(places: Sequence[float]) -> Sequence[float]:
    if len(places) <= MOST:
        return places
    return [places[n * len(places) // MOST] for n in range(MOST)]
