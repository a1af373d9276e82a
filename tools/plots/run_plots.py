"""The picture training.png: loss, gradient norm, learning rate, speed and loss scale
(`tools.plots.panels`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.console.units import counted
from tools.journal.records import read_events, read_metrics
from tools.plots.panels import Over, Panel, Pictures, pictures, short

PLOT = "training.png"
BLUE = "#1f5fa8"
ORANGE = "#e07b00"
RED = "#d62728"
GREY = "#8a8f98"
OTHERS = (ORANGE, "#2a9d55", "#8250c4", "#7a5230")  # lines beside the main one
PAIRED = 2  # panels beside each other, below that of the loss


def plot_run(folder: Path, over: Over = "steps") -> Path | None:
    """Plot folder/metrics.jsonl to folder/training.png and return its path; None without
    matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # optional, and slow to import
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        return None
    records = read_metrics(folder)
    shown = pictures(records, over, [event["step"] for event in read_events(folder, "resume")])
    rows = -(-(len(shown.panels) - 1) // PAIRED)
    figure = Figure(figsize=(11, 4.4 + 2.1 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(1 + rows, PAIRED, height_ratios=(1.9, *[1] * rows))
    for number, panel in enumerate(shown.panels):
        is_top = number == 0
        is_bottom = number >= len(shown.panels) - PAIRED
        if is_top:
            cell = grid[0, :]
        else:
            row, column = divmod(number - 1, PAIRED)
            cell = grid[1 + row, column]
        axes = figure.add_subplot(cell)
        draw_panel(axes, panel, shown.resumed, legend=is_top)
        if is_top or is_bottom:
            axes.set_xlabel(shown.x_label)
        if is_top and shown.tokens:
            _add_tokens(axes, shown)
    skipped = sum(record["outcome"] != "applied" for record in records)
    steps = counted(len(records), "step")
    title = f"{folder.resolve().name}: {steps}, {skipped:,} skipped"
    figure.suptitle("; ".join([title, *shown.remarks]), parse_math=False, fontsize=12)
    figure.savefig(folder / PLOT, dpi=110)
    return folder / PLOT


def draw_panel(axes: Any, panel: Panel, resumed: Sequence[float], legend: bool) -> None:
    """Draw a panel, with its title and, if wanted, its legend above the curves."""
    others = iter(OTHERS * len(panel.lines))
    for line in panel.lines:
        style: dict[str, Any] = {"color": BLUE, "linewidth": 1.5}
        if line.look == "raw":
            style |= {"alpha": 0.3, "linewidth": 0.9}
        elif line.look == "other":
            style |= {"color": next(others), "marker": "o", "markersize": 4.5}
        if panel.stepped:
            style["drawstyle"] = "steps-mid"
        axes.plot(line.x, line.y, label=line.label, **style)
    for x in resumed:
        label = "resumed" if x == resumed[0] else None  # once in the legend
        axes.axvline(x, color=GREY, linewidth=0.9, linestyle=":", label=label)
    if panel.base:
        axes.set_yscale("log", base=panel.base)
    elif panel.from_zero:
        axes.set_ylim(bottom=0)
    mark_skipped(axes, panel.skipped, RED)
    axes.set_title(panel.title, loc="left", fontsize=10)
    if legend and len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(
            loc="lower right",
            bbox_to_anchor=(1, 1),
            frameon=False,
            ncols=5,
            fontsize=8,
            borderaxespad=0.2,
            columnspacing=1.2,
            handlelength=1.4,
        )
    plain(axes)


def mark_skipped(axes: Any, xs: Sequence[float], color: str, height: float = 0.0) -> None:
    """Mark skipped steps by crosses on the horizontal axis, or `height` of the panel's height above
    it."""
    if not xs:
        return  # an empty line without clipping breaks the layout
    axes.plot(
        xs,
        [height] * len(xs),
        "x",
        transform=axes.get_xaxis_transform(),  # y in heights of the panel
        label="skipped step",
        color=color,
        markersize=5,
        clip_on=False,
        zorder=5,
    )


def plain(axes: Any) -> None:
    """Give the axes a faint grid, no frame and numbers without a common factor."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_xscale() == "linear":
        axes.xaxis.set_major_formatter(
            lambda value, _: short(value) if value >= 1e5 else f"{value:,.6g}"
        )
    if axes.get_yscale() == "linear":
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")


def _add_tokens(axes: Any, shown: Pictures) -> None:
    """Name the tokens seen at some of the axis' ticks."""
    low, high = axes.get_xlim()
    tokens_at = {step: tokens for step, tokens in shown.tokens if low <= step <= high}
    axes.set_xlim(low, high)
    ticks = [tick for tick in axes.get_xticks() if tick in tokens_at]
    axes.set_xticks(ticks or axes.get_xticks())
    if ticks:
        axes.set_xticklabels([f"{tick:,.0f}\n{short(tokens_at[tick])}" for tick in ticks])
        axes.set_xlabel("step, and tokens seen")
