"""Drawings made of rectangles, lines and text, written as SVG or PNG.

Lengths are in pixels, y grows downwards. SVG needs no library, PNG needs matplotlib.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from xml.sax.saxutils import escape

from megaprec.errors import UserError

Anchor = Literal["start", "middle", "end"]
FONT = "DejaVu Sans, Helvetica, Arial, sans-serif"
DPI = 100


@dataclass(frozen=True)
class Rect:
    """A filled rectangle; `round` is the radius of its corners. tip: tooltip in an SVG viewer."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    round: float = 0.0
    tip: str = ""


@dataclass(frozen=True)
class Line:
    """A line from (x1, y1) to (x2, y2)."""

    x1: float
    y1: float
    x2: float
    y2: float
    color: str
    width: float = 1.0


@dataclass(frozen=True)
class Text:
    """A line of text with its baseline at y."""

    x: float
    y: float
    text: str
    size: float = 12.0
    color: str = "#24292f"
    anchor: Anchor = "start"
    bold: bool = False


Shape = Rect | Line | Text


@dataclass
class Drawing:
    """Shapes on white, drawn in order."""

    width: float
    height: float
    shapes: list[Shape] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write an .svg or .png file, by the suffix of `path`. Raises UserError for PNG without
        matplotlib."""
        if path.suffix == ".png":
            _save_png(self, path)
        else:
            path.write_text(to_svg(self), encoding="utf-8")


def to_svg(drawing: Drawing) -> str:
    """Return the text of an SVG file."""
    size = f'width="{drawing.width:g}" height="{drawing.height:g}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {drawing.width:g} '
        f'{drawing.height:g}"'
    )
    lines = [
        f'{head} font-family="{FONT}">',
        f'<rect {size} fill="#ffffff"/>',
        *map(_svg, drawing.shapes),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _svg(shape: Shape) -> str:
    if isinstance(shape, Rect):
        place = (
            f'x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.width:.2f}" '
            f'height="{shape.height:.2f}"'
        )
        tip = f"<title>{escape(shape.tip)}</title>" if shape.tip else ""
        return f'<rect {place} rx="{shape.round:g}" fill="{shape.fill}">{tip}</rect>'
    if isinstance(shape, Line):
        ends = f'x1="{shape.x1:.2f}" y1="{shape.y1:.2f}" x2="{shape.x2:.2f}" y2="{shape.y2:.2f}"'
        return f'<line {ends} stroke="{shape.color}" stroke-width="{shape.width:g}"/>'
    weight = ' font-weight="bold"' if shape.bold else ""
    look = f'font-size="{shape.size:g}" fill="{shape.color}" text-anchor="{shape.anchor}"{weight}'
    return f'<text x="{shape.x:.2f}" y="{shape.y:.2f}" {look}>{escape(shape.text)}</text>'


def _save_png(drawing: Drawing, path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # optional, and slow to import
        from matplotlib.collections import LineCollection, PatchCollection  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
        from matplotlib.patches import FancyBboxPatch  # noqa: PLC0415
    except ImportError as error:
        raise UserError(
            f"{path}: PNG needs matplotlib: pip install matplotlib, or write .svg"
        ) from error
    figure = Figure(figsize=(drawing.width / DPI, drawing.height / DPI), dpi=DPI)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, drawing.width), ylim=(drawing.height, 0))
    axes.axis("off")

    def box(rect: Rect) -> FancyBboxPatch:
        if rect.round:
            style = f"round,pad=0,rounding_size={min(rect.round, rect.width / 2)}"
        else:
            style = "square,pad=0"
        return FancyBboxPatch((rect.x, rect.y), rect.width, rect.height, boxstyle=style)

    rects, lines, texts = (_of(drawing.shapes, kind) for kind in (Rect, Line, Text))
    colors = [r.fill for r in rects]
    axes.add_collection(
        PatchCollection([box(r) for r in rects], facecolors=colors, linewidths=0, zorder=2)
    )
    axes.add_collection(
        LineCollection(
            [[(s.x1, s.y1), (s.x2, s.y2)] for s in lines],
            colors=[s.color for s in lines],
            linewidths=[s.width * 72 / DPI for s in lines],
            zorder=1,
        )
    )
    places = {"start": "left", "middle": "center", "end": "right"}
    for t in texts:
        look = {
            "fontsize": t.size * 72 / DPI,
            "color": t.color,
            "fontweight": "bold" if t.bold else "normal",
        }
        axes.text(t.x, t.y, t.text, ha=places[t.anchor], va="baseline", parse_math=False, **look)
    figure.savefig(path, dpi=2 * DPI)


def _of(shapes: Sequence[Shape], kind: type) -> list:
    return [shape for shape in shapes if isinstance(shape, kind)]
