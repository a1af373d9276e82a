"""The plot of a run: loss, gradient norm and loss scale over steps, with skipped steps marked."""

import math
from pathlib import Path
from typing import Any

from tools.journal.records import NAMED, read_metrics

PLOT = "training.png"
BLUE, ORANGE, RED = "#1f5fa8", "#e07b00", "#d62728"
NAMED_COLORS = ("#2a9d55", "#8250c4", "#17a2b8", "#d957a8", "#7a5230", "#6e7781")  # of the sets of data.validation


def plot_run(folder: Path) -> Path | None:
    """Plot folder/metrics.jsonl to folder/training.png and return its path; None without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # optional, and slow to import
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        return None
    records = read_metrics(folder)
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    loss, norm, scale = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    _draw_loss(loss, records)
    _draw_norm(norm, records)
    _draw_scale(scale, records)
    for axes in (loss, norm, scale):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_title(folder, records))
    figure.savefig(folder / PLOT, dpi=110)
    return folder / PLOT


def _title(folder: Path, records: list[dict[str, Any]]) -> str:
    skipped = sum(record["outcome"] != "applied" for record in records)
    return f"{folder.resolve().name}: {len(records)} steps, {skipped} skipped"


def _draw_loss(axes: Any, records: list[dict[str, Any]]) -> None:
    axes.plot(*finite_points(records, "loss"), label="training", color=BLUE, linewidth=1.3)
    evaluated = [record for record in records if "eval_loss" in record]
    if evaluated:
        axes.plot(*finite_points(evaluated, "eval_loss"), label="held-out", color=ORANGE, marker="o", markersize=5)
    for number, key in enumerate(sorted({key for record in records for key in record if key.startswith(NAMED)})):
        some, color = [record for record in records if key in record], NAMED_COLORS[number % len(NAMED_COLORS)]
        axes.plot(*finite_points(some, key), label=key.removeprefix(NAMED), color=color, marker="o", markersize=4)
    axes.set_ylabel("loss")
    axes.legend(loc="upper right", frameon=False)


def _draw_norm(axes: Any, records: list[dict[str, Any]]) -> None:
    axes.plot(*finite_points(records, "grad_norm"), color=BLUE, linewidth=1.3)
    axes.set_ylabel("gradient norm\nbefore clipping")
    axes.set_ylim(bottom=0)


def _draw_scale(axes: Any, records: list[dict[str, Any]]) -> None:
    axes.step(*finite_points(records, "loss_scale"), where="mid", color=BLUE, linewidth=1.3)
    skipped = [record for record in records if record["outcome"] != "applied"]
    if skipped:
        steps, scales = finite_points(skipped, "loss_scale")
        axes.plot(steps, scales, "x", color=RED, markersize=6, label="skipped step: overflow")
        axes.legend(loc="upper right", frameon=False)
    axes.set_yscale("log", base=2)
    axes.set_ylabel("loss scale")
    axes.set_xlabel("step")


def finite_points(records: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Return steps and values; a value that is not finite leaves a gap in the line."""
    values = [record[key] if math.isfinite(record[key]) else math.nan for record in records]
    return [record["step"] for record in records], values
