"""Drawings made of rectangles, lines, paths and text, written as SVG or PNG.

All pictures are such drawings. Lengths are in pixels, y grows downwards. A colour is "#rrggbb" or
a name of PALETTE. SVG needs no library, PNG needs matplotlib.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

from megaprec.errors import UserError
from megaprec.tokens.files import write_whole

Anchor = Literal["start", "middle", "end"]
Point = tuple[float, float]

FONT = "DejaVu Sans, Helvetica, Arial, sans-serif"
# A web page may give these names other colours, by variables of its style: see `to_themed_svg`.
PALETTE = {
    "ink": "#24292f",
    "faint": "#6e7781",
    "line": "#e3e6ea",
    "main": "#1f5fa8",
    "other0": "#e07b00",
    "other1": "#2a9d55",
    "other2": "#8250c4",
    "other3": "#7a5230",
    "red": "#d62728",
}
DPI = 100  # of matplotlib's figure: a pixel of a drawing is a hundredth of its inch
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
    opacity: float = 1.0


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
class Strokes:
    """Straight strokes from point to point. None lifts the pen. dash: lengths of strokes and gaps,
    solid if empty."""

    points: Sequence[Point | None]
    color: str
    width: float = 1.5
    opacity: float = 1.0
    dash: tuple[float, ...] = ()

    def strokes(self) -> list[list[Point]]:
        """Return the points between two lifts of the pen, as often as there are any."""
        strokes: list[list[Point]] = [[]]
        for point in self.points:
            if point is not None:
                strokes[-1].append(point)
            elif strokes[-1]:
                strokes.append([])
        return [stroke for stroke in strokes if stroke]


@dataclass(frozen=True)
class Text:
    """A line of text with its baseline at y."""

    x: float
    y: float
    text: str
    size: float = 12.0
    color: str = "ink"
    anchor: Anchor = "start"
    bold: bool = False


Shape = Rect | Line | Strokes | Text


@dataclass
class Drawing:
    """Shapes on white, drawn in order."""

    width: float
    height: float
    shapes: list[Shape] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write an .svg or .png file atomically, by the suffix of `path`. Raises UserError for PNG
        without matplotlib."""
        content = _to_png(self, path) if path.suffix == ".png" else to_svg(self).encode()
        write_whole(path, content)


def text_width(text: str, size: float) -> float:
    """Return about how wide a text is; letters are 0.6 of their size on average."""
    return 0.6 * size * len(text)


def to_svg(drawing: Drawing) -> str:
    """Return the text of an SVG file."""
    size = f'width="{drawing.width:g}" height="{drawing.height:g}"'
    view_box = f'viewBox="0 0 {drawing.width:g} {drawing.height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view_box} font-family="{FONT}">'
    background = f'<rect {size} fill="#ffffff"/>'
    shapes = [_svg(shape, is_themed=False) for shape in drawing.shapes]
    lines = [head, background, *shapes, "</svg>"]
    return "\n".join(lines) + "\n"


def to_themed_svg(drawing: Drawing, label: str) -> str:
    """Return the SVG as a part of a web page, as wide as the page wants, on its background.

    The colours of PALETTE are the page's variables of these names, where it has them. label: what
    the picture shows, for readers who cannot see it.
    """
    shapes = [_svg(shape, is_themed=True) for shape in drawing.shapes]
    return (
        f'<svg viewBox="0 0 {drawing.width:g} {drawing.height:g}" role="img" '
        f'aria-label="{escape(label)}">{"".join(shapes)}</svg>'
    )


def _svg(shape: Shape, is_themed: bool) -> str:
    """Return the SVG element of a shape. is_themed: colours of PALETTE are variables of the page's
    style."""
    if isinstance(shape, Rect):
        box = (
            f'x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.width:.2f}" '
            f'height="{shape.height:.2f}"'
        )
        tip = f"<title>{escape(shape.tip)}</title>" if shape.tip else ""
        fill = f'fill="{_svg_color(shape.fill, is_themed)}"{_opacity("fill", shape.opacity)}'
        return f'<rect {box} rx="{shape.round:g}" {fill}>{tip}</rect>'
    color = _svg_color(shape.color, is_themed)
    if isinstance(shape, Line):
        ends = f'x1="{shape.x1:.2f}" y1="{shape.y1:.2f}" x2="{shape.x2:.2f}" y2="{shape.y2:.2f}"'
        return f'<line {ends} stroke="{color}" stroke-width="{shape.width:g}"/>'
    if isinstance(shape, Strokes):
        look = f'stroke="{color}" stroke-width="{shape.width:g}" fill="none"'
        if shape.dash:
            lengths = " ".join(f"{length:g}" for length in shape.dash)
            look += f' stroke-dasharray="{lengths}"'
        path = "".join(_svg_stroke(stroke) for stroke in shape.strokes())
        return f'<path d="{path}" {look}{_opacity("stroke", shape.opacity)}/>'
    weight = ' font-weight="bold"' if shape.bold else ""
    look = f'font-size="{shape.size:g}" fill="{color}" text-anchor="{shape.anchor}"{weight}'
    return f'<text x="{shape.x:.2f}" y="{shape.y:.2f}" {look}>{escape(shape.text)}</text>'


def _svg_color(color: str, is_themed: bool) -> str:
    # a colour of its own means the same on every background
    if color not in PALETTE:
        return color
    return f"var(--{color}, {PALETTE[color]})" if is_themed else PALETTE[color]


def _opacity(part: str, opacity: float) -> str:
    return f' {part}-opacity="{opacity:g}"' if opacity < 1 else ""


def _svg_stroke(stroke: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in stroke)


def has_matplotlib() -> bool:
    """Return True if PNG files can be written."""
    try:
        import matplotlib.figure  # noqa: PLC0415  # optional, and slow to import
    except ImportError:
        return False
    return matplotlib.figure is not None


def require_picture_path(path: Path, suffixes: Sequence[str] = (".png",)) -> None:
    """Raise UserError if no picture could be written to `path`, before the work that it shows.

    suffixes: of the formats in which the picture can be written.
    """
    if path.is_dir():
        raise UserError.of("plots.is_folder", path=path)
    if path.suffix not in suffixes:
        raise UserError.of("plots.suffix", path=path, suffixes=" or ".join(suffixes))
    if not path.absolute().parent.is_dir():
        raise UserError.of("command.plot_folder", path=path, parent=path.parent)
    if path.suffix != ".png" or has_matplotlib():
        return
    if ".svg" in suffixes:
        raise UserError.of("plots.matplotlib_missing", path=path)
    raise UserError.of("command.matplotlib_missing", path=path)


def _to_png(drawing: Drawing, path: Path) -> bytes:
    """Return the content of a .png file. path: named if there is no matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # optional, and slow to import
        from matplotlib.collections import LineCollection, PatchCollection  # noqa: PLC0415
        from matplotlib.colors import to_rgba  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
        from matplotlib.patches import FancyBboxPatch  # noqa: PLC0415
    except ImportError as error:
        raise UserError.of("plots.matplotlib_missing", path=path) from error
    figure = Figure(figsize=(drawing.width / DPI, drawing.height / DPI), dpi=DPI)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    # y grows downwards
    axes.set(xlim=(0, drawing.width), ylim=(drawing.height, 0))
    axes.axis("off")

    # Shapes of a kind share a collection, for thousands of single ones would take many seconds.
    # Lines, which are those of axes and grids, lie below rectangles, and these below trails.
    by_kind: dict[type[Shape], list[Any]] = {Rect: [], Line: [], Strokes: [], Text: []}
    for shape in drawing.shapes:
        by_kind[type(shape)].append(shape)
    lines = [_as_trail(line) for line in by_kind[Line]]
    axes.add_collection(LineCollection(**_line_fields(lines, to_rgba), zorder=1))
    rects: list[Rect] = by_kind[Rect]
    boxes = PatchCollection(
        [_rounded_box(rect, FancyBboxPatch) for rect in rects],
        facecolors=[to_rgba(_hex_color(rect.fill), rect.opacity) for rect in rects],
        linewidths=0,
        zorder=2,
    )
    axes.add_collection(boxes)
    axes.add_collection(LineCollection(**_line_fields(by_kind[Strokes], to_rgba), zorder=3))
    for text in by_kind[Text]:
        _add_text(axes, text)
    content = BytesIO()
    figure.savefig(content, format="png", dpi=2 * DPI)  # two pixels for one, for sharp screens
    return content.getvalue()


def _line_fields(trails: Sequence[Strokes], to_rgba: Any) -> dict[str, Any]:
    """Return the arguments of matplotlib's LineCollection for these trails."""
    fields: dict[str, Any] = {
        "segments": [],
        "colors": [],
        "linewidths": [],
        "linestyles": [],
        "joinstyle": "round",
    }
    for trail in trails:
        for stroke in trail.strokes():
            fields["segments"].append(stroke)
            fields["colors"].append(to_rgba(_hex_color(trail.color), trail.opacity))
            fields["linewidths"].append(trail.width * POINTS_PER_PIXEL)
            fields["linestyles"].append(_line_style(trail))
    return fields


def _hex_color(color: str) -> str:
    return PALETTE.get(color, color)


def _rounded_box(rect: Rect, patch_class: Any) -> Any:
    """Return a rectangle as a patch. patch_class: matplotlib's FancyBboxPatch."""
    # a corner of more than half the width would bulge out
    radius = min(rect.round, rect.width / 2)
    style = f"round,pad=0,rounding_size={radius}" if radius else "square,pad=0"
    return patch_class((rect.x, rect.y), rect.width, rect.height, boxstyle=style)


def _as_trail(line: Line) -> Strokes:
    return Strokes([(line.x1, line.y1), (line.x2, line.y2)], line.color, line.width)


def _line_style(trail: Strokes) -> Any:
    """Return matplotlib's style of a line; it counts dashes in widths of the line."""
    if not trail.dash:
        return "solid"
    return (0, [length / trail.width for length in trail.dash])


def _add_text(axes: Any, text: Text) -> None:
    """Draw a text with matplotlib."""
    axes.text(
        text.x,
        text.y,
        text.text,
        ha=ALIGNMENTS[text.anchor],
        va="baseline",
        parse_math=False,  # a dollar sign is one
        fontsize=text.size * POINTS_PER_PIXEL,
        color=_hex_color(text.color),
        fontweight="bold" if text.bold else "normal",
    )
