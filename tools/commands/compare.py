"""`megaprec compare RUN RUN`: print a table of the final losses of several runs, and plot their
loss curves."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from megaprec.errors import UserError
from tools.analysis.plots.compare_plot import LAST, Curve, by_loss, draw
from tools.analysis.plots.drawing import has_matplotlib
from tools.analysis.report.comparable import branches, differences
from tools.analysis.report.run import Run
from tools.console.tables import add_json, print_result, print_table
from tools.journal.records import METRICS, read_metrics


def add_parser(subparsers: Any) -> None:
    """Add `compare` to the commands."""
    parser = subparsers.add_parser(
        "compare", help="compare the losses of several runs", description=__doc__
    )
    parser.add_argument("runs", metavar="RUN_DIR", type=Path, nargs="+", help="run folders")
    parser.add_argument(
        "-o", "--output", metavar="PNG", type=Path, help="file of the plot (default: no plot)"
    )
    parser.add_argument(
        "--against",
        metavar="RUN_DIR",
        type=Path,
        help="run whose loss is subtracted from that of the others",
    )
    parser.add_argument(
        "--over",
        choices=("steps", "tokens"),
        default="steps",
        help="horizontal axis of the plot (default: steps)",
    )
    add_json(parser)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec compare`."""
    if args.output:
        _require_writable(args.output)
    against = args.against.resolve() if args.against else None
    # the run to compare with may be among them, as runs/* has it
    folders = [folder for folder in args.runs if folder.resolve() != against]
    if not folders:
        raise UserError.of("command.against_alone", against=args.against)
    base = None
    if against:
        # read together, so that all have names of their own
        *curves, base = read_curves([*folders, against])
    else:
        curves = read_curves(folders)
    if args.output:
        draw(curves, args.output, args.over, base)
    shown = [*curves, base] if base else curves
    notes = _notes(args)
    return print_result(
        args,
        lambda: {"runs": [_curve_fields(curve) for curve in by_loss(shown)], "notes": notes},
        lambda: _show(args, shown, notes),
    )


def _notes(args: argparse.Namespace) -> list[str]:
    """Return the lines on damaged records, and on what else differs between the runs."""
    folders: list[Path] = [*args.runs]
    # by their resolved paths: one run may be given in two ways
    if args.against and args.against.resolve() not in [folder.resolve() for folder in folders]:
        folders.append(args.against)
    runs = [Run.read(folder) for folder in folders]
    notes = list[str]()
    for run in runs:
        notes += run.notes
    names = _names(folders)
    return [*notes, *branches(names, runs), *differences(names, runs)]


def _require_writable(path: Path) -> None:
    if path.suffix != ".png":
        raise UserError.of("command.plot_suffix", path=path)
    if not path.absolute().parent.is_dir():
        raise UserError.of("command.plot_folder", path=path, parent=path.parent)
    if not has_matplotlib():
        raise UserError.of("command.matplotlib_missing", path=path)


def _show(args: argparse.Namespace, curves: Sequence[Curve], notes: Sequence[str]) -> None:
    for note in notes:
        print(f"note       {note}")
    print_table(table(curves))
    if args.output:
        print(f"written    {args.output}")


def read_curves(folders: Sequence[Path]) -> list[Curve]:
    """Return the runs, named by their folders, or by their paths if two folders have one name.
    Raises UserError."""
    curves = list[Curve]()
    problems = list[str]()
    for name, folder in zip(_names(folders), folders, strict=True):
        curve = Curve(name, read_metrics(folder))
        curves.append(curve)
        if not curve.records:
            problems.append(f"{folder} has no steps in {METRICS}: give run folders")
    if problems:
        raise UserError(*problems)
    return curves


def _names(folders: Sequence[Path]) -> list[str]:
    """Return a name for each folder that no other has: its own, or its path."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) == len(names):
        return names
    return [str(folder) for folder in folders]


def _curve_fields(curve: Curve) -> dict[str, Any]:
    return {
        "run": curve.name,
        "steps": len(curve.records),
        "skipped": curve.skipped,
        "loss": curve.final,
        "eval_loss": _number_or_none(curve.held_out),
        "eval_loss_ema": _number_or_none(curve.held_out_of_average),
        "eval_step": curve.held_out_step,
    }


def _number_or_none(loss: float) -> float | None:
    return None if math.isnan(loss) else loss


def table(curves: Sequence[Curve]) -> Table:
    """Return a table of the steps and final losses of the runs, lowest loss first; with a column
    for the moving average of the weights if a run has evaluated one."""
    headings = ("run", "steps", "skipped", f"loss, mean of last {LAST} steps", "held-out")
    has_averages = not all(math.isnan(curve.held_out_of_average) for curve in curves)
    if has_averages:
        headings = (*headings, "held-out, average")
    runs = Table(*headings, box=box.SIMPLE_HEAD)
    # a run without held-out text has NaN there
    for curve in by_loss(curves):
        cells = [
            curve.name,
            str(len(curve.records)),
            str(curve.skipped),
            f"{curve.final:.4f}",
            _loss_cell(curve.held_out),
        ]
        if has_averages:
            cells.append(_loss_cell(curve.held_out_of_average))
        runs.add_row(*cells)
    return runs


def _loss_cell(loss: float) -> str:
    if math.isnan(loss):
        return ""
    return f"{loss:.4f}"
