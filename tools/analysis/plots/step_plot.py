"""A picture of a step: a bar for each of its times, cut by kind, on one scale of seconds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tools.analysis.plots.charts import round_numbers
from tools.analysis.plots.drawing import Drawing, Line, Rect, Shape, Text, text_width
from tools.console.units import duration

WIDTH = 900.0
MARGIN = 16.0
NAMES = 90.0  # room for the names of bars
BAR_HEIGHT = 30.0
BAR_PITCH = 48.0
TEXT_SIZE = 12.0
LEGEND_SIGN = 12.0
LEGEND_ROW = 18.0
LEGEND_GAP = 18.0
TICKS = 6
# one for each kind, in the order in which a bar has them
COLORS = (
    "#1f5fa8",
    "#6aa5e3",
    "#2a9d55",
    "#b08a5b",
    "#e07b00",
    "#d62728",
    "#8250c4",
    "#9aa3ad",
)


@dataclass(frozen=True)
class StepBar:
    """The time of a step. kinds: seconds by kind, in one order for all bars of a picture."""

    name: str
    kinds: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """The seconds of the step."""
        return sum(self.kinds.values())


def draw_steps(bars: Sequence[StepBar]) -> Drawing:
    """Return a drawing of bars below each other. Kinds that take no time are left out."""
    colors = _colors_by_kind(bars)
    drawing = Drawing(WIDTH, height=0)
    legend_end = MARGIN
    for shape in _legend(colors):
        drawing.shapes.append(shape)
        if isinstance(shape, Text):
            legend_end = shape.y + LEGEND_ROW
    longest = max(bar.seconds for bar in bars)
    room = WIDTH - NAMES - 2 * MARGIN
    pixels_per_second = room / longest if longest > 0 else 0.0
    bottom = legend_end + BAR_PITCH * len(bars)
    drawing.shapes += _axis(longest, legend_end, bottom, pixels_per_second)
    for number, bar in enumerate(bars):
        top = legend_end + BAR_PITCH * number
        drawing.shapes += _draw_bar(bar, colors, top, pixels_per_second)
    drawing.height = bottom + 2 * LEGEND_ROW
    return drawing


def _colors_by_kind(bars: Sequence[StepBar]) -> dict[str, str]:
    """Return the colour of each kind that takes time in any bar."""
    kinds = list[str]()
    for bar in bars:
        kinds += [kind for kind, seconds in bar.kinds.items() if seconds > 0 and kind not in kinds]
    return {kind: COLORS[number % len(COLORS)] for number, kind in enumerate(kinds)}


def _legend(colors: Mapping[str, str]) -> Iterator[Shape]:
    """Yield a square and the name of each kind, in as many rows as they need."""
    left = MARGIN
    baseline = MARGIN + LEGEND_SIGN
    for kind, color in colors.items():
        entry_width = LEGEND_SIGN + 6 + text_width(kind, TEXT_SIZE)
        if left + entry_width > WIDTH - MARGIN:
            left = MARGIN
            baseline += LEGEND_ROW
        yield Rect(left, baseline - LEGEND_SIGN + 2, LEGEND_SIGN, LEGEND_SIGN, color, 2)
        yield Text(left + LEGEND_SIGN + 6, baseline, kind, TEXT_SIZE)
        left += entry_width + LEGEND_GAP


def _draw_bar(
    bar: StepBar, colors: Mapping[str, str], top: float, pixels_per_second: float
) -> Iterator[Shape]:
    """Yield a bar's name and its pieces, each with its share where there is room for it; a bar of
    one piece has its seconds there."""
    baseline = top + BAR_HEIGHT / 2 + 4
    yield Text(MARGIN, baseline, bar.name, TEXT_SIZE)
    left = MARGIN + NAMES
    for kind, seconds in bar.kinds.items():
        if seconds <= 0:
            continue
        width = seconds * pixels_per_second
        share = f"{seconds / bar.seconds:.0%}"
        tip = f"{kind}: {duration(seconds)}, {share}"
        label = share if seconds < bar.seconds else duration(seconds)
        yield Rect(left, top, width, BAR_HEIGHT, colors[kind], tip=tip)
        if width > text_width(label, TEXT_SIZE) + 6:
            center = left + width / 2
            yield Text(center, baseline, label, TEXT_SIZE, "#ffffff", "middle")
        left += width


def _axis(longest: float, top: float, bottom: float, pixels_per_second: float) -> Iterator[Shape]:
    """Yield lines at round numbers of seconds, with labels below the bars."""
    for seconds in round_numbers(0.0, longest, TICKS):
        x = MARGIN + NAMES + seconds * pixels_per_second
        yield Line(x, top - 4, x, bottom, "line")
        yield Text(x, bottom + TEXT_SIZE, f"{seconds:g} s", TEXT_SIZE, "faint", "middle")
