"""Timelines of a pipeline: a row per rank and a block per computation, simulated or measured.

Grey is waiting. Below each row stands the number of activations that the rank holds, from their
forward pass to their weight gradient. In text a block is its name, repeated for its duration, in
small letters for later stages of the same rank, and a dot is waiting; where names do not fit,
single letters replace them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import floor

from parallel.pipeline.instructions import COMPUTATIONS, WEIGHT_GRADIENTS, Message, Op
from parallel.pipeline.simulation import Mark, Span
from tools.plots.charts import round_step
from tools.plots.drawing import Drawing, Line, Rect, Shape, Text

LEFT = 76.0
TRACK = 1000.0  # width of the longest panel
MARGIN = 24.0
COLUMN = 74.0  # least width of a column of facts
LETTER = 7.6  # width of a letter of facts
GAP = 18.0  # between columns
ROW = 26.0  # height of a block
STRIP = 9.0  # height of the largest number of activations held
PITCH = 44.0  # from one row to the next
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
    wrong."""

    title: str
    spans: Sequence[Span]
    ranks: int
    unit: str = "forwards"
    facts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    marks: Mapping[int, Mark] = field(default_factory=dict)

    @cached_property
    def start(self) -> float:
        """The start of the first computation."""
        return min((span.start for span in self.computed), default=0.0)

    @cached_property
    def length(self) -> float:
        """The time from the first computation to the end of the last one of any rank."""
        return _last_end(self.computed, default=1.0) - self.start

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
            largest = max(largest, *(count for _, count in _held_activations(spans)))
        return largest

    @cached_property
    def _by_rank(self) -> list[list[Span]]:
        ranks: list[list[Span]] = [[] for _ in range(self.ranks)]
        for span in sorted(self.computed, key=lambda span: span.start):
            ranks[span.rank].append(span)
        return ranks


def _last_end(spans: Sequence[Span], default: float) -> float:
    return max((span.end for span in spans), default=default)


def draw(title: str, lines: Sequence[str], panels: Sequence[Panel]) -> Drawing:
    """Return a drawing of the panels below each other, on one time scale, under a title and lines
    of text."""
    right_ends = [LEFT + TRACK]
    for panel in panels:
        right_ends += _column_ends(panel)
    drawing = Drawing(max(right_ends) + MARGIN, 0)
    drawing.shapes.append(Text(MARGIN, 38, title, 20, INK, bold=True))
    y = 60.0
    for line in lines:
        drawing.shapes.append(Text(MARGIN, y, line, 13, FAINT))
        y += 19
    drawing.shapes += _legend(panels, y + 4)
    y += 34
    scale = TRACK / max(panel.length for panel in panels)
    for panel in panels:
        drawing.shapes += _draw_panel(panel, y, scale)
        rows = panel.ranks * PITCH
        notes = 18 * len(panel.marks)
        y += 62 + rows + notes
    drawing.height = y
    return drawing


def _column_ends(panel: Panel) -> list[float]:
    """Return the right end of each column of facts, which is as wide as its longest text."""
    ends: list[float] = []
    width = 0.0
    for heading, texts in panel.facts.items():
        longest = max(len(text) for text in (heading, *texts))
        width += max(COLUMN, GAP + LETTER * longest)
        ends.append(LEFT + TRACK + width)
    return ends


def _legend(panels: Sequence[Panel], y: float) -> Iterator[Shape]:
    """Yield a square and a name for each kind of block that has a duration."""
    present: set[Op] = set()
    has_chunks = False
    for panel in panels:
        present |= {span.instruction.op for span in panel.computed if span.end > span.start}
        for rank in range(panel.ranks):
            has_chunks |= len(_stages_of(panel.of_rank(rank))) > 1
    entries = [look for op, look in LOOKS.items() if op in present]
    x = MARGIN
    for name, color in [*entries, ("waiting", WAITING), ("held", HELD)]:
        yield Rect(x, y, 14, 14, color, 3)
        yield Text(x + 20, y + 12, name, 12, INK)
        x += 42 + 7.2 * len(name)
    if has_chunks:
        yield Text(x, y + 12, "lighter: a later stage of the same rank", 12, FAINT)


def _stages_of(spans: Sequence[Span]) -> list[int]:
    return sorted({span.instruction.stage for span in spans})


def _draw_panel(panel: Panel, y: float, scale: float) -> Iterator[Shape]:
    """Yield the shapes of a panel from `y` on. scale: pixels per unit of time."""
    title = f"{panel.title}, time in {panel.unit}"
    yield Text(MARGIN, y + 12, title, 14, INK, bold=True)
    for end, heading in zip(_column_ends(panel), panel.facts, strict=True):
        yield Text(end, y + 12, heading, 12, FAINT, "end")
    top = y + 24
    bottom = top + panel.ranks * PITCH
    yield from _axis(panel, top, bottom, scale)
    for rank in range(panel.ranks):
        yield from _row(panel, rank, top + rank * PITCH, scale)
    y = bottom + 36
    for rank, mark in panel.marks.items():
        yield Text(MARGIN, y, f"rank {rank}: {mark.note}", 13, RED)
        y += 18


def _axis(panel: Panel, top: float, bottom: float, scale: float) -> Iterator[Shape]:
    step = round_step(panel.length / 10)
    # the slack keeps a tick at the very end, which rounding may put beyond it
    for number in range(floor(panel.length / step + 1e-9) + 1):
        x = LEFT + number * step * scale
        yield Line(x, top - 4, x, bottom, "#e3e6ea")
        label = f"{number * step:g}"
        yield Text(x, bottom + 14, label, 11, FAINT, "middle")


def _row(panel: Panel, rank: int, y: float, scale: float) -> Iterator[Shape]:
    spans = panel.of_rank(rank)
    stages = _stages_of(spans)
    baseline = y + ROW / 2 + 4
    yield Text(MARGIN, baseline, f"rank {rank}", 13, INK)
    yield Rect(LEFT, y, panel.length * scale, ROW, WAITING, 2)
    for span in spans:
        chunk = stages.index(span.instruction.stage)
        x = LEFT + (span.start - panel.start) * scale
        yield from _block(span, chunk, x, y, scale)
    yield from _held_columns(panel, spans, y + ROW + STRIP + 1.5, scale)
    for end, texts in zip(_column_ends(panel), panel.facts.values(), strict=True):
        yield Text(end, baseline, texts[rank], 13, INK, "end")
    if rank in panel.marks:
        # the rank goes wrong after its last computation
        end = _last_end(spans, default=panel.start)
        x = LEFT + (end - panel.start) * scale
        note = panel.marks[rank].note
        yield Rect(x, y - 4, width=4, height=ROW + 8, fill=RED, round=2, tip=note)


def _block(span: Span, chunk: int, x: float, y: float, scale: float) -> Iterator[Shape]:
    """Yield the block of a computation, with its micro-batch if that can be read.

    chunk: number of its stage among those of the rank; later ones are lighter.
    """
    instruction = span.instruction
    duration = span.end - span.start
    width = duration * scale
    if width <= 0:
        return
    _, base_color = LOOKS[instruction.op]
    color = _lighten(base_color, min(0.55, 0.33 * chunk))
    tip = f"{instruction}  {duration:.4g}"
    # a little narrower, so that blocks of one colour stay apart
    block_width = max(width - 0.8, 0.4)
    yield Rect(x + 0.4, y, block_width, ROW, color, 2, tip)
    label = "" if instruction.op is Op.REDUCE else str(instruction.microbatch)
    digits = max(len(label), 1)
    size = min(11.0, (width - 1.5) / (0.64 * digits))  # a digit is 0.64 of its height wide
    if size >= 7:  # smaller digits cannot be read
        center = x + width / 2
        baseline = y + ROW / 2 + 0.36 * size
        ink = "#ffffff" if chunk == 0 else INK
        yield Text(center, baseline, label, size, ink, "middle")


def _held_columns(
    panel: Panel, spans: Sequence[Span], bottom: float, scale: float
) -> Iterator[Shape]:
    """Yield the shapes of the activations held over time, as columns on a common scale."""
    for (start, count), (end, _) in pairwise(_held_activations(spans)):
        height = STRIP * count / max(panel.max_held, 1)
        if height and end > start:
            x = LEFT + (start - panel.start) * scale
            width = (end - start) * scale + 0.3  # no gap to the next column
            yield Rect(x, bottom - height, width, height, HELD, tip=f"{count} held")


def _held_activations(spans: Sequence[Span]) -> list[tuple[float, int]]:
    """Return (time, activations held from then on) pairs."""
    changes: list[tuple[float, int]] = []
    for span in spans:
        if span.instruction.op is Op.FORWARD:
            changes.append((span.start, +1))
        elif span.instruction.op in WEIGHT_GRADIENTS:
            changes.append((span.end, -1))
    held = 0
    counts = [(0.0, 0)]
    for time, change in sorted(changes):
        held += change
        counts.append((time, held))
    return [*counts, (_last_end(spans, default=0.0), held)]


def _lighten(color: str, share: float) -> str:
    """Return "#rrggbb" mixed with this share of white."""
    channels = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    mixed = [round(channel + (255 - channel) * share) for channel in channels]
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def as_text(panel: Panel, width: int) -> str:
    """Return the panel as lines of at most `width` characters; the length of a block is its
    duration."""
    longest = panel.length or 1.0
    durations = [
        span.end - span.start for span in panel.computed if span.instruction.op in COMPUTATIONS
    ]
    shortest = min(durations, default=longest)
    available = width - 9  # beside the name of the rank
    cell_width = min(3, int(available * shortest / longest))  # of the shortest computation
    # one cell is too narrow for a name: the scale is then free, and the line is filled
    columns = round(longest / shortest * cell_width) if cell_width > 1 else available
    rows: list[str] = []
    for rank in range(panel.ranks):
        cells = ["."] * columns
        spans = panel.of_rank(rank)
        first_stage = min((span.instruction.stage for span in spans), default=0)
        for span in spans:
            # both ends are rounded, not the width: blocks then meet without gap or overlap
            start = round((span.start - panel.start) / longest * columns)
            stop = round((span.end - panel.start) / longest * columns)
            is_first_stage = span.instruction.stage == first_stage
            needs_gap = cell_width < 2
            cells[start:stop] = _block_text(span, stop - start, is_first_stage, needs_gap)
        line = "".join(cells)
        rows.append(f"rank {rank:<3} {line}")
    return "\n".join(rows)


def _block_text(span: Span, width: int, is_first_stage: bool, needs_gap: bool) -> str:
    """Return the name of a computation in `width` characters, or its letter repeated if it is
    longer.

    needs_gap: leave a space after the name, where one name can be as long as another.
    """
    operation = span.instruction.op
    letter = operation if is_first_stage else operation.lower()
    name = f"{letter}{span.instruction.microbatch}"
    if len(name) + needs_gap <= width:
        return name.ljust(width)
    return letter * width
