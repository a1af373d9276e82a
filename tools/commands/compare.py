"""`megaprec compare RUN RUN`: print a table of the final losses of several runs, and plot their
loss curves."""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from megaprec.errors import UserError
from tools.analysis.plots.compare_plot import LAST, Curve, by_loss, draw
from tools.analysis.plots.drawing import require_picture_path
from tools.analysis.plots.statistics_map import StatisticsMap, draw_maps, maps_of
from tools.analysis.report.comparable import (
    branches,
    differences,
    differing_keys,
    has_other_tokens,
)
from tools.analysis.report.run import Run
from tools.analysis.verdict.verdict import read_verdict
from tools.console.json_output import add_json, print_result
from tools.console.tables import print_table
from tools.journal.records import (
    STATISTICS_FILE,
    no_run,
    odd_lines,
    read_metrics,
    read_statistics,
)

MOST_KEYS = 12  # that differ and have a line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `compare`."""
    parser.description = __doc__
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
        help="horizontal axis of the plot (default: steps)",
    )
    parser.add_argument(
        "--statistics",
        metavar="PNG",
        type=Path,
        help="file of the maps of the runs' statistics (log.statistics) beside each other",
    )
    add_json(parser)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec compare`; return the exit code."""
    # a run may be named twice, as runs/* beside it does
    by_place = dict[Path, Path]()
    for folder in args.runs:
        by_place.setdefault(folder.resolve(), folder)
    args.runs = [*by_place.values()]
    if args.output:
        require_picture_path(args.output)
    elif args.over:
        raise UserError.of("command.over_without_plot", over=args.over)
    curves, base = _read_curves(args)
    shown = [*curves, base] if base else curves
    compared = _compare(args)
    if args.statistics:
        _draw_statistics(args)
    if args.output and compared.hides_losses:
        unknown = ", ".join(compared.without_bits)
        raise UserError.of("command.picture_of_other_text", path=args.output, unknown=unknown)
    if args.output:
        draw(curves, args.output, args.over or "steps", base)
    return print_result(
        args,
        lambda: {
            "runs": [_curve_fields(curve, compared) for curve in by_loss(shown)],
            "notes": compared.notes,
            "keys": compared.keys,
        },
        lambda: _show(args, shown, compared),
    )


def _read_curves(args: argparse.Namespace) -> tuple[Sequence[Curve], Curve | None]:
    """Return the curves of the runs, and that of the run to compare with."""
    if not args.against:
        return read_curves(args.runs), None
    # the run to compare with may be among them, as runs/* has it
    against = args.against.resolve()
    folders = [folder for folder in args.runs if folder.resolve() != against]
    if not folders:
        raise UserError.of("command.against_alone", against=args.against)
    # read together, so that all have names of their own
    *curves, base = read_curves([*folders, against])
    return curves, base


def _draw_statistics(args: argparse.Namespace) -> None:
    """Draw the maps of the runs beside each other. Raises UserError if a run has none."""
    require_picture_path(args.statistics)
    folders: list[Path] = args.runs
    maps_by_run: dict[str, Sequence[StatisticsMap]] = {}
    for name, folder in zip(_names(folders), folders, strict=True):
        maps_by_run[name] = maps_of(read_statistics(folder))
        if not maps_by_run[name]:
            raise UserError.of("command.no_statistics", folder=folder)
        if damaged := odd_lines(folder / STATISTICS_FILE):
            print(f"note: {damaged}", file=sys.stderr)
    draw_maps(maps_by_run, args.statistics)


@dataclass(frozen=True)
class _Compared:
    """The facts that are known of runs beside their losses.

    notes: lines on damaged records, and on what else differs. keys: that differ, with the value in
    each run. bits: per byte of the held-out text, by the name of the run; None if not known.
    has_other_tokens: the losses are of different text or tokenizers.
    """

    notes: Sequence[str]
    keys: Mapping[str, Mapping[str, str]]
    bits: Mapping[str, float | None]
    has_other_tokens: bool

    @property
    def hides_losses(self) -> bool:
        """True if losses say nothing beside each other, and bits per byte are not known of all."""
        return self.has_other_tokens and bool(self.without_bits)

    @property
    def without_bits(self) -> list[str]:
        """The runs whose bits per byte are not known."""
        return [name for name, value in self.bits.items() if value is None]


def _compare(args: argparse.Namespace) -> _Compared:
    """Return what differs between the runs."""
    folders: list[Path] = [*args.runs]
    # by their resolved paths: one run may be given in two ways
    if args.against and args.against.resolve() not in [folder.resolve() for folder in folders]:
        folders.append(args.against)
    runs = [Run.read(folder) for folder in folders]
    notes = list[str]()
    for run in runs:
        notes += run.notes
    names = _names(folders)
    bits = dict[str, float | None]()
    for name, run in zip(names, runs, strict=True):
        verdict = read_verdict(run.folder)
        bits[name] = verdict.bits_per_byte if verdict else None
    compared = _Compared(
        [*notes, *branches(names, runs), *differences(names, runs)],
        differing_keys(names, runs) if len(runs) > 1 else {},
        bits,
        has_other_tokens(names, runs),
    )
    if not compared.hides_losses:
        return compared
    unknown = ", ".join(compared.without_bits)
    hidden = f"losses are left out of the table, for bits per byte are not known of {unknown}"
    return replace(compared, notes=[*compared.notes, hidden])


def _show(args: argparse.Namespace, curves: Sequence[Curve], compared: _Compared) -> None:
    """Print notes, the first keys that differ, the table of losses and the files written."""
    for note in compared.notes:
        print(f"note       {note}")
    for key in [*compared.keys][:MOST_KEYS]:
        values = "; ".join(f"{value} in {run}" for run, value in compared.keys[key].items())
        print(f"differs    {key} is {values}")
    if len(compared.keys) > MOST_KEYS:
        print(f"differs    {len(compared.keys) - MOST_KEYS:,} keys more: --json has all")
    print_table(table(curves, compared.bits, compared.hides_losses))
    for written in filter(None, (args.output, args.statistics)):
        print(f"written    {written}")


def read_curves(folders: Sequence[Path]) -> list[Curve]:
    """Return the runs, named by their folders, or by their paths if two folders have one name.
    Raises UserError."""
    curves = list[Curve]()
    problems = list[str]()
    for name, folder in zip(_names(folders), folders, strict=True):
        curve = Curve(name, read_metrics(folder))
        curves.append(curve)
        if not curve.records:
            problems.append(no_run(folder))
    if problems:
        raise UserError(*problems)
    return curves


def _names(folders: Sequence[Path]) -> list[str]:
    """Return a name for each folder that no other has: its own, or its path."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) == len(names):
        return names
    return [str(folder) for folder in folders]


def _curve_fields(curve: Curve, compared: _Compared) -> dict[str, Any]:
    """Return a run for programs; null for a loss that it does not have."""
    return {
        "run": curve.name,
        "steps": len(curve.records),
        "skipped": curve.skipped,
        "loss": curve.final,
        "eval_loss": _number_or_none(curve.held_out),
        "eval_loss_ema": _number_or_none(curve.held_out_of_average),
        "eval_step": curve.held_out_step,
        "bits_per_byte": compared.bits.get(curve.name),
    }


def _number_or_none(loss: float) -> float | None:
    return None if math.isnan(loss) else loss


def table(
    curves: Sequence[Curve], bits: Mapping[str, float | None], hides_losses: bool = False
) -> Table:
    """Return a table of the steps and final losses of the runs, lowest loss first; with a column
    for the moving average of the weights if a run has evaluated one.

    bits: per byte of the held-out text, by the name of the run. hides_losses: leave losses out.
    """
    loss_heading = f"loss, mean of last {LAST} steps"
    headings = ["run", "steps", "skipped", loss_heading, "held-out"]
    has_averages = not all(math.isnan(curve.held_out_of_average) for curve in curves)
    if has_averages:
        headings.append("held-out, average")
    runs = Table(*headings, "bits/byte", box=box.SIMPLE_HEAD)
    for curve in by_loss(curves):
        # NaN, and so an empty cell, for a run without held-out text
        losses = [f"{curve.final:.4f}", _loss_cell(curve.held_out)]
        if has_averages:
            losses.append(_loss_cell(curve.held_out_of_average))
        if hides_losses:
            losses = ["-"] * len(losses)
        bits_of_run = bits.get(curve.name)
        runs.add_row(
            curve.name,
            str(len(curve.records)),
            str(curve.skipped),
            *losses,
            _loss_cell(bits_of_run if bits_of_run is not None else math.nan),
        )
    return runs


def _loss_cell(loss: float) -> str:
    if math.isnan(loss):
        return ""
    return f"{loss:.4f}"
