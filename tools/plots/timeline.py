"""Timelines of a pipeline: a row per rank and a block per computation, simulated or measured.

Grey is waiting. Below each row stands the number of activations that the rank holds, from their
forward pass to their weight gradient. In text a block is its name, repeated for its duration, in
small letters for later stages of the same rank, and a dot is waiting; where names do not fit,
single letters replace them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from math import floor, log10

from parallel.pipeline.instructions import COMPUTATIONS, WEIGHT_GRADIENTS, Message, Op
from parallel.pipeline.simulation import Mark, Span
from tools.plots.drawing import Drawing, Line, Rect, Shape, Text

LEFT = 76.0
TRACK = 1000.0
MARGIN = 24.0
# least width of a column of facts, of a letter, and between columns
COLUMN = 74.0
LETTER = 7.6
GAP = 18.0
# heights of blocks and of held activations, and distance of rows
ROW = 26.0
STRIP = 9.0
PITCH = 44.0
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
        return min((s.start for s in self.computed), default=0.0)

    @cached_property
    def length(self) -> float:
        """The time from the first computation to the end of the last one of any rank."""
        return max((s.end for s in self.computed), default=1.0) - self.start

    @cached_property
    def computed(self) -> list[Span]:
        """All spans but transfers."""
        return [span for span in self.spans if Message.of(span.instruction) is None]

    def of(self, rank: int) -> list[Span]:
        """Return the computations of one rank, in order."""
        return self._by_rank[rank]

    @cached_property
    def most_held(self) -> int:
        """The largest number of activations that any rank holds."""
        return max(
            (n for rank in range(self.ranks) for _, n in _activations(self.of(rank))), default=0
        )

    @cached_property
    def _by_rank(self) -> list[list[Span]]:
        ranks: list[list[Span]] = [[] for _ in range(self.ranks)]
        for span in sorted(self.computed, key=lambda s: s.start):
            ranks[span.rank].append(span)
        return ranks


def draw(title: str, lines: Sequence[str], panels: Sequence[Panel]) -> Drawing:
    """Return a drawing of the panels below each other, on one time scale, under a title and lines
    of text."""
    facts = max(ends[-1] for panel in panels if (ends := [LEFT + TRACK, *_columns(panel)]))
    drawing = Drawing(facts + MARGIN, 0)
    drawing.shapes.append(Text(MARGIN, 38, title, 20, INK, bold=True))
    y = 60.0
    for line in lines:
        drawing.shapes.append(Text(MARGIN, y, line, 13, FAINT))
        y += 19
    drawing.shapes += _legend(panels, y + 4)
    y += 34
    longest = max(panel.length for panel in panels)
    for panel in panels:
        drawing.shapes += _panel(panel, y, TRACK / longest)
        y += 62 + panel.ranks * PITCH + 18 * len(panel.marks)
    drawing.height = y
    return drawing


def _columns(panel: Panel) -> list[float]:
    """Return the right end of each column of facts, which is as wide as its longest text."""
    widths = (
        max(COLUMN, GAP + LETTER * max(map(len, (head, *texts))))
        for head, texts in panel.facts.items()
    )
    return [LEFT + TRACK + end for end in accumulate(widths)]


def _legend(panels: Sequence[Panel], y: float) -> Iterator[Shape]:
    present = {
        span.instruction.op for panel in panels for span in panel.computed if span.end > span.start
    }
    entries = [look for op, look in LOOKS.items() if op in present] + [
        ("waiting", WAITING),
        ("held", HELD),
    ]
    x = MARGIN
    for name, color in entries:
        yield Rect(x, y, 14, 14, color, 3)
        yield Text(x + 20, y + 12, name, 12, INK)
        x += 42 + 7.2 * len(name)
    if any(
        len({s.instruction.stage for s in panel.of(rank)}) > 1
        for panel in panels
        for rank in range(panel.ranks)
    ):
        yield Text(x, y + 12, "lighter: a later stage of the same rank", 12, FAINT)


def _panel(panel: Panel, y: float, scale: float) -> Iterator[Shape]:
    yield Text(MARGIN, y + 12, f"{panel.title}, time in {panel.unit}", 14, INK, bold=True)
    for end, heading in zip(_columns(panel), panel.facts, strict=True):
        yield Text(end, y + 12, heading, 12, FAINT, "end")
    top = y + 24
    bottom = top + panel.ranks * PITCH
    yield from _axis(panel, top, bottom, scale)
    for rank in range(panel.ranks):
        yield from _row(panel, rank, top + rank * PITCH, scale)
    for number, (rank, mark) in enumerate(panel.marks.items()):
        yield Text(MARGIN, bottom + 36 + 18 * number, f"rank {rank}: {mark.note}", 13, RED)


def _axis(panel: Panel, top: float, bottom: float, scale: float) -> Iterator[Shape]:
    step = _round_step(panel.length / 10)
    for number in range(floor(panel.length / step + 1e-9) + 1):
        x = LEFT + number * step * scale
        yield Line(x, top - 4, x, bottom, "#e3e6ea")
        yield Text(x, bottom + 14, f"{number * step:g}", 11, FAINT, "middle")


def _round_step(length: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is not below `length`."""
    power = 10.0 ** floor(log10(length))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= length * (1 - 1e-9))


def _row(panel: Panel, rank: int, y: float, scale: float) -> Iterator[Shape]:
    own = panel.of(rank)
    stages = sorted({span.instruction.stage for span in own})
    yield Text(MARGIN, y + ROW / 2 + 4, f"rank {rank}", 13, INK)
    yield Rect(LEFT, y, panel.length * scale, ROW, WAITING, 2)
    for span in own:
        yield from _block(
            span,
            stages.index(span.instruction.stage),
            LEFT + (span.start - panel.start) * scale,
            y,
            scale,
        )
    yield from _held(panel, own, y + ROW + STRIP + 1.5, scale)
    for end, values in zip(_columns(panel), panel.facts.values(), strict=True):
        yield Text(end, y + ROW / 2 + 4, values[rank], 13, INK, "end")
    if rank in panel.marks:
        x = LEFT + (max((s.end for s in own), default=panel.start) - panel.start) * scale
        yield Rect(x, y - 4, 4, ROW + 8, RED, 2, panel.marks[rank].note)


def _block(span: Span, chunk: int, x: float, y: float, scale: float) -> Iterator[Shape]:
    i = span.instruction
    width = (span.end - span.start) * scale
    if width <= 0:
        return
    color = _lighter(LOOKS[i.op][1], min(0.55, 0.33 * chunk))
    yield Rect(
        x + 0.4, y, max(width - 0.8, 0.4), ROW, color, 2, f"{i}  {span.end - span.start:.4g}"
    )
    label = "" if i.op is Op.REDUCE else str(i.microbatch)
    size = min(11.0, (width - 1.5) / (0.64 * max(len(label), 1)))
    if size >= 7:
        yield Text(
            x + width / 2,
            y + ROW / 2 + 0.36 * size,
            label,
            size,
            "#ffffff" if chunk == 0 else INK,
            "middle",
        )


def _held(panel: Panel, own: Sequence[Span], bottom: float, scale: float) -> Iterator[Shape]:
    """Yield the shapes of the activations held over time, as columns on a common scale."""
    for (start, count), (end, _) in pairwise(_activations(own)):
        height = STRIP * count / max(panel.most_held, 1)
        if height and end > start:
            x = LEFT + (start - panel.start) * scale
            yield Rect(
                x, bottom - height, (end - start) * scale + 0.3, height, HELD, 0, f"{count} held"
            )


def _activations(own: Sequence[Span]) -> list[tuple[float, int]]:
    """Return (time, activations held from then on) pairs."""
    changes = [(s.start, +1) for s in own if s.instruction.op is Op.FORWARD]
    changes += [(s.end, -1) for s in own if s.instruction.op in WEIGHT_GRADIENTS]
    held = 0
    steps = [(0.0, 0)]
    for time, change in sorted(changes):
        held += change
        steps.append((time, held))
    return [*steps, (max((s.end for s in own), default=0.0), held)]


def _lighter(color: str, share: float) -> str:
    parts = (int(color[k : k + 2], 16) for k in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def as_text(panel: Panel, width: int) -> str:
    """Return the panel as lines of at most `width` characters; the length of a block is its
    duration."""
    longest = panel.length or 1.0
    shortest = min(
        (s.end - s.start for s in panel.computed if s.instruction.op in COMPUTATIONS),
        default=longest,
    )
    room = width - 9
    each = min(3, int(room * shortest / longest))  # characters of the shortest computation
    columns = round(longest / shortest * each) if each > 1 else room
    rows = []
    for rank in range(panel.ranks):
        cells = ["."] * columns
        own = panel.of(rank)
        lowest = min((span.instruction.stage for span in own), default=0)
        for span in own:
            first, last = (
                round((t - panel.start) / longest * columns) for t in (span.start, span.end)
            )
            i = span.instruction
            letter = i.op if i.stage == lowest else i.op.lower()
            name = f"{letter}{i.microbatch}"
            # a gap, where one name can be as long as another
            fits = len(name) + (each < 2) <= last - first
            cells[first:last] = name.ljust(last - first) if fits else letter * (last - first)
        rows.append(f"rank {rank:<3} {''.join(cells)}")
    return "\n".join(rows)
