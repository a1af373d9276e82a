"""`megaprec explain-overflow RUN_DIR`: which parameters broke the last skipped steps, and whether to care.

Every skipped step leaves an event in RUN_DIR/events.jsonl: where it was, the loss scale, the worst offenders by logical
name, and advice. The command shows the newest ones as a table.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megaprec.errors import UserError
from megaprec.events import StepReport
from megaprec.watch import OverflowWatch
from tools.journal import METRICS, read_events


class Hopeless(Exception):
    """The steps of a run overflow and will go on doing so. The command exits with code 3."""


def add_parser(subparsers: Any) -> None:
    """Adds `explain-overflow`."""
    parser = subparsers.add_parser(
        "explain-overflow", help="show what broke the last skipped steps of a run", description=__doc__
    )
    parser.add_argument("folder", metavar="RUN_DIR", type=Path, help="a run directory")
    parser.add_argument("--last", type=int, default=5, metavar="N", help="how many events to show (default: 5)")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Runs `megaprec explain-overflow`. UserError if RUN_DIR is no run directory or --last is below 1."""
    if not (args.folder / METRICS).is_file():
        raise UserError(f"{args.folder} is not a run directory: it has no {METRICS}")
    if args.last < 1:
        raise UserError(f"--last {args.last}: give at least 1")
    events = read_events(args.folder)[-args.last :]
    if not events:
        print(f"{args.folder}: no step was skipped")
        return 0
    console = Console()
    for event in events:
        console.print(table(event))
        console.print(event["advice"])
    return 0


def overflow_event(report: StepReport, step: int, samples: range, watch: OverflowWatch) -> dict[str, Any]:
    """What events.jsonl keeps of a skipped step. samples: the positions that the global batch took up."""
    return {
        "event": "overflow",
        "step": step,
        "loss": report.loss,
        "loss_scale": report.loss_scale,
        "first_sample": samples.start,
        "num_samples": len(samples),
        "skipped_in_a_row": watch.in_a_row,
        "advice": watch.advice(),
        "offenders": [asdict(offender) for offender in report.offenders],
    }


def table(event: dict[str, Any]) -> Table:
    """One skipped step: a row per offender."""
    samples = f"samples {event['first_sample']} to {event['first_sample'] + event['num_samples'] - 1}"
    title = f"step {event['step']} skipped at loss scale {float(event['loss_scale']):g}, {samples}"
    made = Table(title=title, title_justify="left")
    made.add_column("gradient of", overflow="fold")  # a name is never cut short
    for column in ("stage", "tp", "inf", "NaN", "elements", "largest other"):
        made.add_column(column, justify="right")
    for o in event["offenders"]:
        counts = (o["stage"], o["tp_rank"], o["infs"], o["nans"], o["elements"])
        made.add_row(o["name"], *map(str, counts), f"{float(o['largest_finite']):.3g}")
    return made
