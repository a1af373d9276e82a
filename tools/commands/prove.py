"""`megaprec prove RUN_DIR | RUN.toml`: check that the run repeats and resumes bit for bit.

The run takes some steps straight, then in a new process some of them again, then it resumes from
the checkpoint of that process; digests of its whole state are compared after each step. The
checkpoint is also loaded in another layout. As a control one sign in a copy of the checkpoint is
turned: the difference must be seen. A run directory begins with its newest checkpoint, and gets the
certificate; for a run file that is written to train.folder. Exit code 0: proven; 1: a bit differs,
or the control was not seen; 2: it could not be tried, or wrong input.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from megaprec.checkpoint.atomic import latest
from megaprec.errors import UserError
from megaprec.scratch import scratch_folder
from parallel.described_world import is_rank_of_world
from tools.commands.notes import tell_notes
from tools.commands.options import add_overrides, add_strict
from tools.config.layouts import layout_problems
from tools.config.resolved_run import resolve_run
from tools.config.run_file import RunConfig, checkpoint_folder, run_file_in
from tools.console.json_output import add_json, print_result, to_json
from tools.console.tables import print_table
from tools.console.wrapped import say
from tools.training.branch import branch_point
from tools.verify.parity.certificate import NOT_TRIED, PROVEN, WRONG, run_digest, versions, write
from tools.verify.parity.layouts import ComparedLayout, fitted, requested_layouts
from tools.verify.parity.ranks import RunFailed
from tools.verify.prove.proof import (
    STRAIGHT,
    ProofSpan,
    Row,
    is_canonical,
    needed_rows,
    other_layout,
    overall,
    proof,
)
from tools.verify.prove.runs import ProofRuns

FORMAT = "megaprec prove 1"
FILE = "prove.json"  # in the folder of the run
CODES = {PROVEN: 0, WRONG: 1, NOT_TRIED: 2}
COLORS = {PROVEN: "green", WRONG: "red", NOT_TRIED: "yellow"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `prove`."""
    parser.description = __doc__
    # `run` is the function that carries out a command
    parser.add_argument("run_", metavar="RUN", help="run directory or run file")
    add_overrides(parser)
    parser.add_argument(
        "--steps", type=int, default=4, metavar="K", help="number of steps (default: 4)"
    )
    parser.add_argument(
        "--layout",
        default="",
        metavar="tp=2,pp=2",
        help="the other layout; default: a small one that fits",
    )
    add_json(parser)
    add_strict(parser)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec prove`; return the exit code."""
    if is_rank_of_world():
        raise UserError.of("command.prove_launched")
    if args.steps < 2:
        raise UserError.of("command.prove_steps", steps=args.steps)
    config, start = open_run(args.run_, args.overrides)
    tell_notes(config.notes, args.strict)
    layout = _other_layout(config, args.layout)
    # checkpoints of the proof are not those of the run
    with scratch_folder("prove") as folder:
        certificate = certify(args, config, ProofRuns(config, Path(folder), start), layout)
    # a run directory may have been moved or copied since train.folder was recorded
    run_path = Path(args.run_)
    run_folder = run_path if run_path.is_dir() else Path(config.train.folder)
    (written,) = write(run_folder, {FILE: to_json(certificate) + "\n"})
    print_result(args, lambda: certificate, lambda: show(certificate))
    if not args.json:
        print(f"written    {written}")
    return CODES[certificate["verdict"]]


def open_run(path: str, overrides: list[str]) -> tuple[RunConfig, Path | None]:
    """Return the run of a run file or a run directory, and the checkpoint that it begins with: the
    newest of a run directory, or that from which it branches; None for the initial weights.

    Raises UserError if there is no run.
    """
    folder = Path(path)
    if not folder.is_dir():
        config = resolve_run(path, overrides)
        return config, branch_point(config)
    run_file = run_file_in(folder)
    if run_file is None:
        raise UserError.of("command.prove_not_a_run", path=path)
    config = resolve_run(run_file, overrides)
    newest = latest(checkpoint_folder(config.checkpoint.folder, folder))
    return config, newest or branch_point(config)


def _other_layout(config: RunConfig, text: str) -> ComparedLayout | None:
    """Return the layout that was asked for, or a small one that fits. Raises UserError if the
    former does not fit."""
    if not text:
        return other_layout(config)
    (keys,) = requested_layouts([text], config.parallel, option="--layout")
    layout = fitted(config, keys)
    if reasons := layout_problems(config, layout.parallel):
        raise UserError(*(f"--layout {text}: {reason}" for reason in reasons))
    return layout


def certify(
    args: argparse.Namespace, config: RunConfig, runs: ProofRuns, layout: ComparedLayout | None
) -> dict[str, Any]:
    """Run the proof and return its certificate."""
    span = ProofSpan.of(runs.step, args.steps)
    rows: list[Row]
    try:
        rows = list(proof(runs, span, layout))
    except RunFailed as failure:
        # without the straight run there is nothing to compare with
        untried = {
            "row": STRAIGHT,
            "steps": [span.first + 1, span.last],
            "verdict": NOT_TRIED,
            "why": str(failure),
        }
        rows = [untried]
    return {
        "format": FORMAT,
        "verdict": overall(rows, needed_rows(config, bool(args.layout))),
        "versions": versions() | {"cpu": torch.backends.cpu.get_cpu_capability()},
        "configuration": {
            "file": args.run_,
            "sha256": run_digest(config),
            "ranks": config.world_size,
        },
        "numerics": "canonical" if is_canonical(config) else "fast",
        "first_step": span.first + 1,
        "stopped_after": span.stop,
        "last_step": span.last,
        "rows": rows,
    }


def show(certificate: dict[str, Any]) -> None:
    """Print the rows as a table, then the reasons and the conclusion."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("compared with the straight run", "steps", "verdict"):
        table.add_column(column)
    for row in certificate["rows"]:
        name = row["row"]
        if "layout" in row:
            name += f", {row['layout']}"
        first, last = row["steps"]
        steps = f"{first} to {last}" if first < last else str(first)
        color = COLORS[row["verdict"]]
        table.add_row(name, steps, f"[{color}]{row['verdict']}[/]")
    print_table(table)
    for row in certificate["rows"]:
        if "why" in row:
            say(f"{row['row']}: {row['why']}")
        # the control: a difference that was planted and must be seen
        if "damaged" in row and row["verdict"] == PROVEN:
            say(
                f"{row['row']}: the sign that was turned in {row['damaged']} was seen "
                f"{len(row['seen'])} times"
            )
    say(conclusion(certificate))


def conclusion(certificate: dict[str, Any]) -> str:
    """Return the result in a sentence."""
    steps = (
        f"steps {certificate['first_step']} to {certificate['last_step']}, stopped after "
        f"{certificate['stopped_after']}"
    )
    if certificate["verdict"] == PROVEN:
        return f"proven: this run repeats and resumes bit for bit ({steps})"
    if certificate["verdict"] == WRONG:
        return f"NOT proven: a bit differs, or the control was not seen ({steps})"
    return f"not tried: see above ({steps})"
