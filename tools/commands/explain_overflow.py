"""`megaprec explain-overflow RUN_DIR [--replay]`: show the tensors that overflowed in the last
skipped steps, with advice.

Every skipped step leaves an event in RUN_DIR/events.jsonl: step, loss scale, the worst offenders by
logical name with the micro-batch and the samples in which they began, and advice. The command shows
the newest events as tables. With --replay it repeats the newest step, or the one of --step, on one
process from the last checkpoint before it, and names the first module whose output or gradient is
not finite. Nothing is written.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megaprec.diagnose.nonfinite_trace import Finding
from megaprec.errors import UserError
from megaprec.optim.step_report import LOSS
from megaprec.precision.plan import dtype_name
from tools.commands.replay import Replay, replay
from tools.console.tables import add_json, put
from tools.journal.records import EVENTS, METRICS, odd_lines, read_events
from tools.text.generation import harmless

PIPE_COLUMNS = 120
SHOWN_IDS = 4  # sample ids of a micro-batch that are shown
SHOWN_CHARS = 60  # characters of a sample's text that are shown
SHOWN_BEFORE = 6  # tensors shown before the first that was not finite


def add_parser(subparsers: Any) -> None:
    """Add `explain-overflow` to the commands."""
    parser = subparsers.add_parser(
        "explain-overflow",
        help="show what broke the last skipped steps of a run",
        description=__doc__,
    )
    parser.add_argument("folder", metavar="RUN_DIR", type=Path, help="run folder")
    parser.add_argument(
        "--last",
        type=int,
        default=5,
        metavar="N",
        help="number of newest events to show (default: 5)",
    )
    parser.add_argument("--step", type=int, metavar="N", help="show only this step")
    parser.add_argument(
        "--replay",
        action="store_true",
        help="repeat the newest of these steps and name the first module that is not finite",
    )
    add_json(parser)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec explain-overflow`. Raises UserError if RUN_DIR is not a run folder or --last is
    below 1."""
    if not (args.folder / METRICS).is_file():
        raise UserError(f"{args.folder} is not a run folder: it has no {METRICS}")
    if args.last < 1:
        raise UserError(f"--last {args.last}: give at least 1")
    events = _chosen(read_events(args.folder), args.step)[-args.last :]
    note = odd_lines(args.folder / EVENTS)
    if not args.json:
        _show(args.folder, events, note)
    seen = replay(args.folder, events[-1]) if args.replay and events else None
    return put(
        args,
        lambda: {
            "notes": [note] if note else [],
            "events": events,
            "replay": _document(seen) if seen else None,
        },
        lambda: _console().print(picture(seen, events[-1])) if seen else None,
    )


def _show(folder: Path, events: list[dict[str, Any]], note: str) -> None:
    if note:
        print(f"note       {note}")
    if not events:
        print(f"{folder}: no step was skipped")
    console = _console()
    for event in events:
        console.print(table(event))
        console.print(event["advice"])


def _document(seen: Replay) -> dict[str, Any]:
    """Return a replay for programs. found: null if every micro-batch was finite."""
    found = seen.trace.found
    return {
        "step": seen.step,
        "start": seen.start,
        "microbatch": seen.microbatch,
        "samples": [{"id": number, "text": text} for number, text in seen.samples],
        "found": None if found is None else asdict(found) | {"dtype": dtype_name(found.dtype)},
    }


def _console() -> Console:
    """Return a console as wide as the terminal, or wide enough for long names if there is no
    terminal."""
    console = Console()
    if console.is_terminal:
        return console
    return Console(width=max(console.width, PIPE_COLUMNS))


def _chosen(events: list[dict[str, Any]], step: int | None) -> list[dict[str, Any]]:
    if step is None:
        return events
    found = [event for event in events if event["step"] == step]
    if not found:
        skipped = ", ".join(str(event["step"]) for event in events) or "none"
        raise UserError(f"--step {step}: that step was not skipped; skipped were {skipped}")
    return found


def table(event: dict[str, Any]) -> Table:
    """Return the table of one skipped step: a row per offender."""
    samples = (
        f"samples {event['first_sample']} to {event['first_sample'] + event['num_samples'] - 1}"
    )
    how = "applied though not finite" if event.get("outcome") == "applied_nonfinite" else "skipped"
    title = f"step {event['step']} {how} at loss scale {float(event['loss_scale']):g}, {samples}"
    offenders = event["offenders"]
    notes = dict.fromkeys(_note(o) for o in offenders)
    made = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    made.caption = "\n".join(filter(None, notes))
    made.title_justify = "left"
    made.caption_justify = "left"
    made.add_column("gradient of", overflow="fold")  # a name is never cut short
    for column in ("stage", "tp", "inf", "NaN", "elements", "largest\nother", "micro-\nbatch"):
        made.add_column(column, justify="right", no_wrap=True)
    made.add_column("sample ids", justify="right", overflow="fold")
    for o in offenders:
        counts = (o["stage"], o["tp_rank"], o["infs"], o["nans"], o["elements"])
        largest = f"{float(o['largest_finite']):.3g}"
        made.add_row(
            "(the loss itself)" if o["name"] == LOSS else o["name"],
            *map(str, counts),
            largest,
            _microbatch(o),
            _ids(o.get("sample_ids", [])),
        )
    return made


def _microbatch(offender: dict[str, Any]) -> str:
    if not offender.get("traced"):
        return "?"
    found = offender["microbatch"]
    return "none" if found is None else f"{found} of dp {offender['dp_rank']}"


def _note(offender: dict[str, Any]) -> str:
    if not offender.get("traced"):
        return (
            "?: not traced: the loss scale was still falling, the step was applied, or "
            "precision.trace_overflows = false"
        )
    if offender["microbatch"] is None:
        return (
            "none: every micro-batch was finite when repeated; only the sum over ranks was not, "
            "or the hardware erred"
        )
    return ""


def _ids(ids: list[int] | list[str]) -> str:
    more = f" and {len(ids) - SHOWN_IDS} more" if len(ids) > SHOWN_IDS else ""
    return ", ".join(map(str, ids[:SHOWN_IDS])) + more


def picture(seen: Replay, event: dict[str, Any]) -> RenderableType:
    """Return the panel of a replay."""
    found = seen.trace.found
    if found is None:
        return Panel(
            _all_finite(seen, event),
            title=f"step {seen.step} again: all finite",
            title_align="left",
            expand=False,
        )
    title = (
        f"step {seen.step} again: first not finite in micro-batch {seen.microbatch} of the global "
        "batch"
    )
    return Panel(
        Group(_facts(found), _before(seen), _samples(seen)),
        title=title,
        title_align="left",
        expand=False,
    )


def _facts(found: Finding) -> Table:
    if found.module is None:
        where = "outside of the model, in its input or its loss"
    else:
        where = f"{found.module or 'the model'} ({found.kind})"
    facts = {
        "arose in": where,
        "tensor": f"{found.what}, {list(found.shape)}",
        "holds": (
            f"{found.infs} inf, {found.nans} NaN of {found.elements}; largest other "
            f"{found.largest:.4g}"
        ),
        "made in": (
            f"{dtype_name(found.dtype)}, whose largest number is {torch.finfo(found.dtype).max:.5g}"
        ),
    }
    if found.module is not None:
        facts["what went in"] = f"finite, largest magnitude {found.given:.4g}"
        facts["parameters"] = ", ".join(found.parameters) or "none of its own"
    return _grid(facts)


def _grid(facts: dict[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, fact in facts.items():
        grid.add_row(name, Text(fact))
    return grid


def _before(seen: Replay) -> Table:
    """Return the table of the last finite tensors, which often shows how magnitudes grow."""
    made = Table(title="\nbefore it", title_justify="left", box=None, padding=(0, 2, 0, 0))
    made.add_column("tensor", overflow="fold")
    made.add_column("largest magnitude", justify="right")
    for glance in seen.trace.seen[-SHOWN_BEFORE:]:
        made.add_row(glance.what, f"{glance.largest:.4g}")
    return made


def _samples(seen: Replay) -> Table:
    made = Table(title="\nits samples", title_justify="left", box=None, padding=(0, 2, 0, 0))
    made.add_column("id", justify="right")
    made.add_column("begins with", overflow="fold")
    for number, text in seen.samples:
        made.add_row(str(number), Text(harmless(" ".join(text[:SHOWN_CHARS].split()))))
    return made


def _all_finite(seen: Replay, event: dict[str, Any]) -> Text:
    """Return the possible reasons why the overflow does not happen again."""
    lines = [
        (
            "Every micro-batch of the step was run alone, and every output, gradient and loss "
            "was finite. Likely:"
        )
    ]
    offenders = event["offenders"]
    if any(o.get("traced") and o["microbatch"] is None for o in offenders):
        lines.append(
            "- in the run, too, no micro-batch did it alone: gradients overflowed when ranks "
            "were summed, or"
        )
        lines.append("  it was chance, such as a fault of the hardware;")
    if seen.layout:
        lines.append(f"- the run was on {seen.layout}, this is one process:")
        lines.append(
            "  sums are rounded in another order, and what was just too large there may just "
            "fit here;"
        )
    lines.append("- it is the sum over micro-batches that overflowed, not one of them;")
    lines.append(
        "- the weights differ: another version of torch, another device, or a run file "
        "changed since."
    )
    if seen.trace.seen:
        top = max(seen.trace.seen, key=lambda glance: glance.largest)
        lines.append(
            f"The largest number of the last micro-batch was {top.largest:.4g}: {top.what}."
        )
    return Text("\n".join(lines))
