"""A picture of a run: loss, gradient norm and loss scale over steps, skipped steps marked."""

import math
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from tools.journal import read_metrics

PLOT = "training.png"


def plot_run(folder: Path) -> Path:
    """Draws folder/training.png from folder/metrics.jsonl. Raises UserError if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError('the plot needs matplotlib: pip install "megaprec[plots]", or set log.plot = false') from error
    records = read_metrics(folder)
    figure = Figure(figsize=(9, 8), layout="constrained")
    FigureCanvasAgg(figure)
    loss, norm, scale = figure.subplots(3, 1, sharex=True)
    _line(loss, records, "loss", "training loss")
    _line(loss, [r for r in records if "eval_loss" in r], "eval_loss", "held-out loss", marker="o")
    _line(norm, records, "grad_norm", "gradient norm before clipping")
    _line(scale, records, "loss_scale", "loss scale")
    norm.set_yscale("log")
    scale.set_yscale("log", base=2)
    scale.set_xlabel("step")
    for axes in (loss, norm, scale):
        axes.grid(alpha=0.3)
        for record in records:
            if record["outcome"] != "applied":
                axes.axvline(record["step"], color="tab:red", alpha=0.3, linewidth=1)
        axes.legend(loc="upper right")
    figure.suptitle(f"{folder}: {len(records)} steps, {sum(r['outcome'] != 'applied' for r in records)} skipped (red)")
    figure.savefig(folder / PLOT, dpi=110)
    return folder / PLOT


def _line(axes: Any, records: list[dict[str, Any]], key: str, label: str, marker: str = "") -> None:
    points = [(r["step"], r[key]) for r in records if math.isfinite(r[key])]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, marker=marker, linewidth=1.2)
