"""`megaprec compare RUN RUN -o PNG`: plot the loss curves of several runs and print a table of their final losses."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from megaprec.errors import UserError
from tools.journal.records import METRICS, odd_lines, read_metrics
from tools.plots.run_plots import finite_points

LAST = 10  # newest applied steps, over whose loss the mean is taken
COLORS = ("#1f5fa8", "#e07b00", "#2a9d55", "#d62728", "#8250c4", "#7a5230", "#d957a8", "#6e7781", "#a8a800", "#17a2b8")
DASHES = ("-", "--", ":", "-.")  # one more each time that the colours are used up


@dataclass(frozen=True)
class Curve:
    """One run: its name in the plot and the records of its metrics.jsonl."""

    name: str
    records: list[dict[str, Any]]

    @property
    def skipped(self) -> int:
        return sum(record["outcome"] != "applied" for record in self.records)

    @property
    def final(self) -> float:
        """The mean loss over the newest applied steps; NaN if there are none."""
        losses = [record["loss"] for record in self.records if record["outcome"] == "applied"][-LAST:]
        return sum(losses) / len(losses) if losses else math.nan

    @property
    def held_out(self) -> float:
        """The newest held-out loss; NaN if there is none."""
        return next((record["eval_loss"] for record in reversed(self.records) if "eval_loss" in record), math.nan)


def add_parser(subparsers: Any) -> None:
    """Add `compare` to the commands."""
    parser = subparsers.add_parser("compare", help="plot the loss curves of several runs", description=__doc__)
    parser.add_argument("runs", metavar="RUN_DIR", type=Path, nargs="+", help="run folders")
    parser.add_argument("-o", "--output", metavar="PNG", type=Path, required=True, help="file of the plot")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec compare`."""
    if args.output.suffix != ".png":
        raise UserError(f"--output {args.output}: the plot is written as .png")
    if not args.output.absolute().parent.is_dir():
        raise UserError(f"--output {args.output}: there is no folder {args.output.parent}")
    curves = read_curves(args.runs)
    for note in filter(None, (odd_lines(folder / METRICS) for folder in args.runs)):
        print(f"note       {note}")
    draw(curves, args.output)
    Console().print(table(curves))
    print(f"written    {args.output}")
    return 0


def read_curves(folders: Sequence[Path]) -> list[Curve]:
    """Return the runs, named by their folders, or by their paths if two folders have one name. Raises UserError."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    curves = [Curve(name, read_metrics(folder)) for name, folder in zip(names, folders, strict=True)]
    empty = [folder for folder, curve in zip(folders, curves, strict=True) if not curve.records]
    if empty:
        raise UserError(*(f"{folder} has no steps in {METRICS}: give run folders" for folder in empty))
    return curves


def table(curves: Sequence[Curve]) -> Table:
    """Return a table of the steps and final losses of the runs, lowest loss first."""
    made = Table("run", "steps", "skipped", f"loss, mean of last {LAST} steps", "held-out", box=box.SIMPLE_HEAD)
    for curve in by_loss(curves):
        numbers = (str(len(curve.records)), str(curve.skipped), f"{curve.final:.4f}", _shown(curve.held_out))
        made.add_row(curve.name, *numbers)
    return made


def by_loss(curves: Sequence[Curve]) -> list[Curve]:
    """Return the runs sorted by final loss, the lowest first, runs without a loss last."""
    return sorted(curves, key=lambda curve: math.inf if math.isnan(curve.final) else curve.final)


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Write the plot: a line per run, with the final losses in the legend. Raises UserError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # optional, and slow to import
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise UserError(f"{path}: plots need matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(11, max(5.0, 1.5 + 0.24 * len(curves))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    lines = {}
    for number, curve in enumerate(curves):
        color, dashes = COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)]
        (lines[curve.name],) = axes.plot(*finite_points(curve.records, "loss"), dashes, color=color, linewidth=1.2)
    ranked, width = by_loss(curves), max(len(curve.name) for curve in curves)
    labels = [f" {curve.name:{width}}  {curve.final:.4f}" for curve in ranked]  # no label may begin with "_"
    title = f"loss, mean of last {LAST} steps"
    beside = axes.legend(
        [lines[curve.name] for curve in ranked], labels, title=title, loc="upper left", bbox_to_anchor=(1.01, 1),
        frameon=False, prop={"family": "monospace", "size": 8},
    )  # fmt: skip
    for line, text in zip(beside.get_lines(), beside.get_texts(), strict=True):
        line.set_linewidth(3)
        text.set_parse_math(False)
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _shown(loss: float) -> str:
    return "" if math.isnan(loss) else f"{loss:.4f}"
