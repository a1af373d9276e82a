"""Drawings made of rectangles, lines and text, written as SVG or PNG.

Lengths are in pixels, y grows downwards. SVG needs no library, PNG needs matplotlib.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from xml.sax.saxutils import escape

from megaprec.errors import UserError

Anchor = Literal["start", "middle", "end"]
FONT = "DejaVu Sans, Helvetica, Arial, sans-serif"
DPI = 100
ALIGNMENTS = {"start": "left", "middle": "center", "end": "right"}  # of SVG, of matplotlib
POINTS_PER_PIXEL = 72 / DPI  # matplotlib sets type and line widths in points


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
        box = (
            f'x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.width:.2f}" '
            f'height="{shape.height:.2f}"'
        )
        tip = f"<title>{escape(shape.tip)}</title>" if shape.tip else ""
        return f'<rect {box} rx="{shape.round:g}" fill="{shape.fill}">{tip}</rect>'
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
        raise UserError.of("plots.matplotlib_missing", path=path) from error
    figure = Figure(figsize=(drawing.width / DPI, drawing.height / DPI), dpi=DPI)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, drawing.width), ylim=(drawing.height, 0))
    axes.axis("off")

    rects = [shape for shape in drawing.shapes if isinstance(shape, Rect)]
    axes.add_collection(
        PatchCollection(
            [_rounded_box(rect, FancyBboxPatch) for rect in rects],
            facecolors=[rect.fill for rect in rects],
            linewidths=0,
            zorder=2,
        )
    )
    lines = [shape for shape in drawing.shapes if isinstance(shape, Line)]
    axes.add_collection(
        LineCollection(
            [[(line.x1, line.y1), (line.x2, line.y2)] for line in lines],
            colors=[line.color for line in lines],
            linewidths=[line.width * POINTS_PER_PIXEL for line in lines],
            zorder=1,
        )
    )
    for shape in drawing.shapes:
        if isinstance(shape, Text):
            _add_text(axes, shape)
    figure.savefig(path, dpi=2 * DPI)  # two pixels for one, for sharp screens


def _rounded_box(rect: Rect, patch_of: Any) -> Any:
    """Return a rectangle as a patch. patch_of: matplotlib's FancyBboxPatch."""
    if rect.round:
        # a corner of more than half the width would bulge out
        style = f"round,pad=0,rounding_size={min(rect.round, rect.width / 2)}"
    else:
        style = "square,pad=0"
    return patch_of((rect.x, rect.y), rect.width, rect.height, boxstyle=style)


def _add_text(axes: Any, text: Text) -> None:
    axes.text(
        text.x,
        text.y,
        text.text,
        ha=ALIGNMENTS[text.anchor],
        va="baseline",
        parse_math=False,  # a dollar sign is one
        fontsize=text.size * POINTS_PER_PIXEL,
        color=text.color,
        fontweight="bold" if text.bold else "normal",
    )
