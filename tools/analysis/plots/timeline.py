"""Timelines of a pipeline: a row per rank and a block per computation, simulated or measured.

Grey is waiting. Below each row stands the number of activations that the rank holds, from their
forward pass to their weight gradient. In text a block is its name, repeated for its duration, in
small letters for later stages of the same rank, and a dot is waiting; where names do not fit,
single letters replace them.

Of a timeline whose blocks would be too narrow to be seen, the beginning and the end are shown, and
the middle, which repeats, is cut out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import ceil, floor
from statistics import median

from parallel.pipeline.instructions import COMPUTATIONS, WEIGHT_GRADIENTS, Message, Op
from parallel.pipeline.simulation import Mark, Span
from tools.analysis.plots.charts import round_step
from tools.analysis.plots.drawing import Drawing, Line, Rect, Shape, Text

LEFT = 76.0
TRACK = 1000.0  # width of the longest panel
MARGIN = 24.0
COLUMN = 74.0  # least width of a column of facts
LETTER = 7.6  # width of a letter of facts
GAP = 18.0  # between columns
ROW = 26.0  # height of a block
STRIP = 9.0  # height of the largest number of activations held
PITCH = 44.0  # from one row to the next
LEAST_BLOCK = 5.0  # width of a block of a timeline that is cut
CUT = " ... "  # in text, for what is left out
INK = "#24292f"
FAINT = "#6e7781"
WAITING = "#eef0f3"
HELD = "#b6c2d1"
RED = "#d1242f"
LOOKS = {
    Op.FORWARD: ("forward", "#3f7fca"),
    Op.BACKWARD: ("backward", "#2f9e77"),
    Op.BACKWARD_INPUT: ("input gradient", "#2f9e77"),
    Op.BACKWARD_WEIGHT: ("weight gradient", "#e2a33b"),
    Op.REDUCE: ("reduce", "#8a6bb8"),
}


@dataclass(frozen=True)
class Panel:
    """One timeline. facts: a column of text per rank, by heading. marks: places where a rank goes
    wrong. shown: begin and end of the part that is drawn, since the first computation; None: all.
    """

    title: str
    spans: Sequence[Span]
    ranks: int
    unit: str = "forwards"
    facts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    marks: Mapping[int, Mark] = field(default_factory=dict)
    shown: tuple[float, float] | None = None

    @cached_property
    def start(self) -> float:
        """The start of the first computation."""
        return min((span.start for span in self.computed), default=0.0)

    @cached_property
    def length(self) -> float:
        """The time from the first computation to the end of the last one of any rank."""
        return _last_end(self.computed, default=1.0) - self.start

    @property
    def window(self) -> tuple[float, float]:
        """The begin and end of the part that is drawn, since the first computation."""
        return self.shown or (0.0, self.length)

    @cached_property
    def typical(self) -> float:
        """The time of a typical short computation: the medians of forward and backward passes are
        taken by kind, and the smallest counts."""
        durations: dict[Op, list[float]] = {}
        for span in self.computed:
            op = span.instruction.op
            if op in COMPUTATIONS and span.end > span.start:
                durations_of_op = durations.setdefault(op, [])
                durations_of_op.append(span.end - span.start)
        medians = map(median, durations.values())
        return min(medians, default=self.length)

    @cached_property
    def computed(self) -> list[Span]:
        """All spans but transfers."""
        return [span for span in self.spans if Message.of(span.instruction) is None]

    def of_rank(self, rank: int) -> list[Span]:
        """Return the computations of one rank, in order."""
        return self._by_rank[rank]

    @cached_property
    def max_held(self) -> int:
        """The largest number of activations that any rank holds."""
        largest = 0
        for spans in self._by_rank:
            for _, num_held in _held_activations(spans):
                largest = max(largest, num_held)
        return largest

    @cached_property
    def _by_rank(self) -> list[list[Span]]:
        by_rank: list[list[Span]] = [[] for _ in range(self.ranks)]
        in_order = sorted(self.computed, key=lambda span: span.start)
        for span in in_order:
            by_rank[span.rank].append(span)
        return by_rank


def _last_end(spans: Sequence[Span], default: float) -> float:
    """Return the time at which the last span ends; `default` without spans."""
    return max((span.end for span in spans), default=default)


def draw(title: str, lines: Sequence[str], panels: Sequence[Panel]) -> Drawing:
    """Return a drawing of the panels below each other, on one time scale, under a title and lines
    of text."""
    panels = _cut_where_narrow(panels)
    # a panel's facts may need more room than its blocks
    right_ends = [LEFT + TRACK]
    for panel in panels:
        right_ends += _column_ends(panel)
    width = max(right_ends) + MARGIN
    drawing = Drawing(width, height=0)
    heading = Text(MARGIN, 38, title, 20, INK, bold=True)
    drawing.shapes.append(heading)
    top_edge = 60.0
    for line in lines:
        text = Text(MARGIN, top_edge, line, 13, FAINT)
        drawing.shapes.append(text)
        top_edge += 19
    drawing.shapes += _legend(panels, top_edge + 4)
    top_edge += 34
    pixels_per_unit = TRACK / max(_shown_time(panel) for panel in panels)
    for panel in panels:
        drawing.shapes += _draw_panel(panel, top_edge, pixels_per_unit)
        rows = panel.ranks * PITCH
        notes = 18 * len(panel.marks)
        top_edge += 62 + rows + notes
    drawing.height = top_edge
    return drawing


def _shown_time(panel: Panel) -> float:
    """Return how long the part of a panel is that is drawn, in its unit of time."""
    begin, end = panel.window
    return end - begin


def _cut_where_narrow(panels: Sequence[Panel]) -> list[Panel]:
    """Return the panels, with the beginning and the end of each in place of it if that makes the
    blocks of one of them wide enough to be seen."""
    cut: list[Panel] = []
    # so long a part of the time that a typical block in it is wide enough
    part = min(TRACK / LEAST_BLOCK * panel.typical for panel in panels)
    if max(panel.length for panel in panels) <= 2 * part:
        return list(panels)
    for panel in panels:
        length = panel.length
        of_length = f"{part:.4g} of {length:.4g} {panel.unit}"
        first_part = (0.0, min(part, length))
        title = f"{panel.title}, the first {of_length}"
        # marks stand at the end of a row, facts beside its beginning
        beginning = replace(panel, title=title, shown=first_part, marks={})
        last_part = (max(0.0, length - part), length)
        title = f"{panel.title}, the last {of_length}"
        end = replace(panel, title=title, shown=last_part, facts={})
        cut += [beginning, end]
    return cut


def _column_ends(panel: Panel) -> list[float]:
    """Return the right end of each column of facts, which is as wide as its longest text."""
    ends: list[float] = []
    text_width = 0.0
    for heading, texts in panel.facts.items():
        lengths = map(len, (heading, *texts))
        needed_width = GAP + LETTER * max(lengths)
        text_width += max(COLUMN, needed_width)
        ends.append(LEFT + TRACK + text_width)
    return ends


def _legend(panels: Sequence[Panel], top_edge: float) -> Iterator[Shape]:
    """Yield a square and a name for each kind of block that has a duration."""
    present: set[Op] = set()
    has_chunks = False
    for panel in panels:
        for span in panel.computed:
            if span.end > span.start:
                present.add(span.instruction.op)
        for rank in range(panel.ranks):
            spans = panel.of_rank(rank)
            stages = _stages_of(spans)
            if len(stages) > 1:
                has_chunks = True
    entries = [look for op, look in LOOKS.items() if op in present]
    entries += [("waiting", WAITING), ("held", HELD)]
    left_edge = MARGIN
    baseline = top_edge + 12
    for name, fill_color in entries:
        yield Rect(left_edge, top_edge, 14, 14, fill_color, 3)
        yield Text(left_edge + 20, baseline, name, 12, INK)
        left_edge += 42 + 7.2 * len(name)
    if has_chunks:
        hint = "lighter: a later stage of the same rank"
        yield Text(left_edge, baseline, hint, 12, FAINT)


def _stages_of(spans: Sequence[Span]) -> list[int]:
    """Return the stages that a rank computes, the first one first."""
    stages = {span.instruction.stage for span in spans}
    return sorted(stages)


def _x_of(panel: Panel, time: float, pixels_per_unit: float) -> float:
    """Return the x of a time, or of the nearest one that is shown; all panels begin at `LEFT`."""
    begin, end = panel.window
    since_start = time - panel.start
    nearest_shown = min(max(since_start, begin), end)
    since_begin = nearest_shown - begin
    return LEFT + since_begin * pixels_per_unit


def _draw_panel(panel: Panel, panel_top: float, pixels_per_unit: float) -> Iterator[Shape]:
    """Yield the shapes of a panel from `panel_top` on. pixels_per_unit: pixels per unit of time."""
    heading_baseline = panel_top + 12
    title = f"{panel.title}, time in {panel.unit}" if panel.shown is None else panel.title
    yield Text(MARGIN, heading_baseline, title, 14, INK, bold=True)
    column_ends = _column_ends(panel)
    for column_end, heading in zip(column_ends, panel.facts, strict=True):
        yield Text(column_end, heading_baseline, heading, 12, FAINT, "end")
    rows_top = panel_top + 24
    rows_bottom = rows_top + panel.ranks * PITCH
    yield from _axis(panel, rows_top, rows_bottom, pixels_per_unit)
    for rank in range(panel.ranks):
        row_top = rows_top + rank * PITCH
        yield from _row(panel, rank, row_top, pixels_per_unit)
    baseline = rows_bottom + 36
    for rank, mark in panel.marks.items():
        note = f"rank {rank}: {mark.note}"
        yield Text(MARGIN, baseline, note, 13, RED)
        baseline += 18


def _axis(panel: Panel, top: float, bottom: float, pixels_per_unit: float) -> Iterator[Shape]:
    """Yield a vertical line and a label for each tick of the time."""
    begin, end = panel.window
    tick_step = round_step((end - begin) / 10)
    # the slack keeps a tick at the very ends, which rounding may put beyond them
    first_tick = ceil(begin / tick_step - 1e-9)
    last_tick = floor(end / tick_step + 1e-9)
    for number in range(first_tick, last_tick + 1):
        time = number * tick_step
        x = _x_of(panel, panel.start + time, pixels_per_unit)
        yield Line(x, top - 4, x, bottom, "line")
        label = f"{time:g}"
        yield Text(x, bottom + 14, label, 11, FAINT, "middle")


def _row(panel: Panel, rank: int, row_top: float, pixels_per_unit: float) -> Iterator[Shape]:
    """Yield the name of a rank, its blocks, what it holds, its facts and its mark."""
    spans = panel.of_rank(rank)
    stages = _stages_of(spans)
    baseline = row_top + ROW / 2 + 4
    name = f"rank {rank}"
    yield Text(MARGIN, baseline, name, 13, INK)
    # what no block covers is waiting
    full_width = _shown_time(panel) * pixels_per_unit
    yield Rect(LEFT, row_top, full_width, ROW, WAITING, 2)
    for span in spans:
        chunk = stages.index(span.instruction.stage)
        block_left = _x_of(panel, span.start, pixels_per_unit)
        block_right = _x_of(panel, span.end, pixels_per_unit)
        width = block_right - block_left
        yield from _block(span, chunk, block_left, row_top, width)
    strip_bottom = row_top + ROW + STRIP + 1.5
    yield from _held_columns(panel, spans, strip_bottom, pixels_per_unit)
    column_ends = _column_ends(panel)
    for column_end, texts in zip(column_ends, panel.facts.values(), strict=True):
        text = texts[rank]
        yield Text(column_end, baseline, text, 13, INK, "end")
    if rank in panel.marks:
        # the rank goes wrong after its last computation
        end_time = _last_end(spans, default=panel.start)
        x = _x_of(panel, end_time, pixels_per_unit)
        mark = panel.marks[rank]
        yield Rect(
            x,
            row_top - 4,
            width=4,
            height=ROW + 8,  # beyond the blocks above and below
            fill=RED,
            round=2,
            tip=mark.note,
        )


def _block(
    span: Span, chunk: int, block_left: float, row_top: float, width: float
) -> Iterator[Shape]:
    """Yield the block of a computation, with its micro-batch if that can be read.

    chunk: number of its stage among those of the rank; later ones are lighter. width: 0 for one
        that is not shown.
    """
    instruction = span.instruction
    duration = span.end - span.start
    if width <= 0:
        return
    _, base_color = LOOKS[instruction.op]
    # no lighter than this: further stages would be white
    whiteness = min(0.55, 0.33 * chunk)
    fill_color = _lighten(base_color, whiteness)
    # a little narrower, so that blocks of one colour stay apart
    drawn_width = max(width - 0.8, 0.4)
    yield Rect(
        block_left + 0.4,
        row_top,
        width=drawn_width,
        height=ROW,
        fill=fill_color,
        round=2,
        tip=f"{instruction}  {duration:.4g}",
    )

    if instruction.op is Op.REDUCE:
        return  # it is of all micro-batches
    label = str(instruction.microbatch)
    digit_width = (width - 1.5) / len(label)
    # a digit is 0.64 of its height wide
    size = min(11.0, digit_width / 0.64)
    if size >= 7:  # smaller digits cannot be read
        center = block_left + width / 2
        baseline = row_top + ROW / 2 + 0.36 * size  # digits are 0.72 of their size high
        yield Text(
            center,
            baseline,
            label,
            size,
            color="#ffffff" if chunk == 0 else INK,
            anchor="middle",
        )


def _held_columns(
    panel: Panel, spans: Sequence[Span], bottom: float, pixels_per_unit: float
) -> Iterator[Shape]:
    """Yield the activations held over time, as columns on a common scale."""
    height_of_one = STRIP / max(panel.max_held, 1)
    changes = _held_activations(spans)
    for (start, num_held), (end, _) in pairwise(changes):
        if num_held == 0 or end <= start:
            continue
        height = num_held * height_of_one
        left = _x_of(panel, start, pixels_per_unit)
        right = _x_of(panel, end, pixels_per_unit)
        width = right - left
        if width <= 0:  # outside of the part that is shown
            continue
        yield Rect(
            left,
            bottom - height,
            width=width + 0.3,  # no gap to the next column
            height=height,
            fill=HELD,
            tip=f"{num_held} held",
        )


def _held_activations(spans: Sequence[Span]) -> list[tuple[float, int]]:
    """Return (time, activations held from then on) pairs."""
    changes: list[tuple[float, int]] = []
    for span in spans:
        if span.instruction.op is Op.FORWARD:
            changes.append((span.start, +1))
        elif span.instruction.op in WEIGHT_GRADIENTS:
            changes.append((span.end, -1))
    num_held_now = 0
    counts = [(0.0, 0)]
    for time, change in sorted(changes):
        num_held_now += change
        counts.append((time, num_held_now))
    # a last point, so that each count has an end
    end = _last_end(spans, default=0.0)
    return [*counts, (end, num_held_now)]


def _lighten(fill_color: str, share: float) -> str:
    """Return "#rrggbb" mixed with this share of white."""
    red = fill_color[1:3]
    green = fill_color[3:5]
    blue = fill_color[5:7]
    lightened = "#"
    for digits in (red, green, blue):
        channel = int(digits, 16)
        mixed = channel + (255 - channel) * share
        lightened += f"{round(mixed):02x}"
    return lightened


def as_text(panel: Panel, width: int) -> str:
    """Return the panel as lines of at most `width` characters; the length of a block is its
    duration."""
    total = panel.length or 1.0
    shortest = total
    for span in panel.computed:
        if span.instruction.op in COMPUTATIONS:
            duration = span.end - span.start
            shortest = min(shortest, duration)
    available = width - 9  # beside the name of the rank
    if available * panel.typical < total:
        return _as_cut_text(panel, available)
    # of the shortest computation
    fitting_width = int(available * shortest / total)
    block_width = min(3, fitting_width)
    # one cell is too narrow for a name: the scale is then free, and the line is filled
    fits = block_width > 1
    columns = round(total / shortest * block_width) if fits else available
    lines: list[str] = []
    for rank in range(panel.ranks):
        cells = _row_text(panel, rank, columns, needs_gap=not fits)
        lines.append(f"rank {rank:<3} {cells}")
    return "\n".join(lines)


def _as_cut_text(panel: Panel, available: int) -> str:
    """Return the beginning and the end of the panel as lines, with a character for the time of a
    typical computation."""
    half = (available - len(CUT)) // 2
    columns = max(1, half)
    part = columns * panel.typical
    last_part = (panel.length - part, panel.length)
    beginning = replace(panel, shown=(0.0, part))
    end = replace(panel, shown=last_part)
    lines: list[str] = []
    for rank in range(panel.ranks):
        first = _row_text(beginning, rank, columns, needs_gap=True)
        last = _row_text(end, rank, columns, needs_gap=True)
        lines.append(f"rank {rank:<3} {first}{CUT}{last}")
    return "\n".join(lines)


def _row_text(panel: Panel, rank: int, columns: int, needs_gap: bool) -> str:
    """Return the blocks of a rank in so many characters, with dots where it waits."""
    cells = ["."] * columns
    spans = panel.of_rank(rank)
    stages = _stages_of(spans)
    begin, _ = panel.window
    shown_time = _shown_time(panel) or 1.0
    cells_per_unit = columns / shown_time

    def cell_of(time: float) -> int:
        """Return the cell of a time, or of the nearest one that is shown."""
        since_begin = time - panel.start - begin
        cell = round(since_begin * cells_per_unit)
        return min(max(0, cell), columns)

    for span in spans:
        # both ends are rounded, not the width: blocks then meet without gap or overlap
        start = cell_of(span.start)
        stop = cell_of(span.end)
        if start == stop:
            continue
        is_first_stage = span.instruction.stage == stages[0]
        block_text = _block_text(span, stop - start, is_first_stage, needs_gap)
        cells[start:stop] = block_text
    return "".join(cells)


def _block_text(span: Span, width: int, is_first_stage: bool, needs_gap: bool) -> str:
    """Return the name of a computation in `width` characters, or its letter repeated if it is
    longer.

    needs_gap: leave a space after the name, where one name can be as long as another.
    """
    operation = span.instruction.op
    letter = operation if is_first_stage else operation.lower()
    name = f"{letter}{span.instruction.microbatch}"
    needed_width = len(name)
    if needs_gap:
        needed_width += 1
    if needed_width <= width:
        return name.ljust(width)
    return letter * width
