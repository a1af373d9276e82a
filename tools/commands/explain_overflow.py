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
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megaprec.diagnose.nonfinite_trace import NonfiniteFinding
from megaprec.errors import UserError
from megaprec.optim.decision.step_report import LOSS
from megaprec.precision.plan import dtype_name
from tools.console.json_output import add_json, print_result
from tools.console.tables import table_console
from tools.inference.generation import escape_control_characters
from tools.journal.records import EVENTS, METRICS, no_run, odd_lines, read_events
from tools.verify.replay.overflow import OverflowReplay, replay

MAX_IDS = 4  # sample ids of a micro-batch that are shown
MAX_CHARS = 60  # characters of a sample's text that are shown
MAX_TENSORS_BEFORE = 6  # tensors shown before the first that was not finite


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `explain-overflow`."""
    parser.description = __doc__
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
        raise UserError(no_run(args.folder))
    if args.last < 1:
        raise UserError.of("command.last", last=args.last)
    # the newest are last
    events = _select_events(read_events(args.folder), args.step)[-args.last :]
    odd_lines_note = odd_lines(args.folder / EVENTS)
    # before the replay, which takes a while
    if not args.json:
        _show(args.folder, events, odd_lines_note)
    replayed = None
    if args.replay and events:
        replayed = replay(args.folder, events[-1])
    document = {
        "notes": [odd_lines_note] if odd_lines_note else [],
        "events": events,
        "replay": _document(replayed) if replayed else None,
    }

    def show() -> None:
        if replayed:
            table_console().print(picture(replayed, events[-1]))

    return print_result(args, lambda: document, show)


def _show(folder: Path, events: list[dict[str, Any]], note: str) -> None:
    """Print a table and the advice for each event. note: on lines that could not be read, or ""."""
    if note:
        print(f"note       {note}")
    if not events:
        print(f"{folder}: no step was skipped")
    console = table_console()
    for event in events:
        console.print(table(event))
        console.print(event["advice"])


def _document(replayed: OverflowReplay) -> dict[str, Any]:
    """Return a replay for programs. found: null if every micro-batch was finite."""
    finding = replayed.trace.found
    fields = None
    if finding is not None:
        fields = asdict(finding) | {"dtype": dtype_name(finding.dtype)}
    return {
        "step": replayed.step,
        "start": replayed.start,
        "microbatch": replayed.microbatch,
        "samples": [{"id": number, "text": text} for number, text in replayed.samples],
        "found": fields,
    }


def _select_events(events: list[dict[str, Any]], step: int | None) -> list[dict[str, Any]]:
    """Return the events of a step; None: all. Raises UserError if there is none."""
    if step is None:
        return events
    of_step = [event for event in events if event["step"] == step]
    if not of_step:
        skipped = ", ".join(str(event["step"]) for event in events) or "none"
        raise UserError.of("command.step_not_skipped", step=step, skipped=skipped)
    return of_step


def table(event: dict[str, Any]) -> Table:
    """Return the table of one skipped step: a row per offender."""
    first = event["first_sample"]
    samples = f"samples {first} to {first + event['num_samples'] - 1}"
    outcome = "skipped"
    if event.get("outcome") == "applied_nonfinite":
        outcome = "applied though not finite"
    title = (
        f"step {event['step']} {outcome} at loss scale {float(event['loss_scale']):g}, {samples}"
    )
    offenders = event["offenders"]
    # each note once, for several offenders may need it
    notes = dict.fromkeys(_microbatch_note(offender) for offender in offenders)
    rows = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    rows.caption = "\n".join(note for note in notes if note)
    rows.title_justify = "left"
    rows.caption_justify = "left"
    rows.add_column("gradient of", overflow="fold")  # a name is never cut short
    for column in ("stage", "tp", "inf", "NaN", "elements", "largest\nother", "micro-\nbatch"):
        rows.add_column(column, justify="right", no_wrap=True)
    rows.add_column("sample ids", justify="right", overflow="fold")
    for offender in offenders:
        rows.add_row(
            "(the loss itself)" if offender["name"] == LOSS else offender["name"],
            str(offender["stage"]),
            str(offender["tp_rank"]),
            str(offender["infs"]),
            str(offender["nans"]),
            str(offender["elements"]),
            f"{float(offender['largest_finite']):.3g}",
            _microbatch(offender),
            _ids(offender.get("sample_ids", [])),
        )
    return rows


def _microbatch(offender: dict[str, Any]) -> str:
    """Return the micro-batch in which an offender began, for a cell."""
    if not offender.get("traced"):
        return "?"
    microbatch = offender["microbatch"]
    return "none" if microbatch is None else f"{microbatch} of dp {offender['dp_rank']}"


def _microbatch_note(offender: dict[str, Any]) -> str:
    """Return what "?" or "none" in the cell of `_microbatch` means; "" if it has a number."""
    if not offender.get("traced"):
        return (
            "?: not traced: the loss scale was still falling, the step was applied, or "
            "precision.trace_overflows = false or parallel.zero = 2 or 3"
        )
    # the trace has found no micro-batch to blame
    if offender["microbatch"] is None:
        return (
            "none: every micro-batch was finite when repeated; only the sum over ranks was not, "
            "or the hardware erred"
        )
    return ""


def _ids(ids: list[int] | list[str]) -> str:
    shown = ", ".join(map(str, ids[:MAX_IDS]))
    if len(ids) > MAX_IDS:
        shown += f" and {len(ids) - MAX_IDS} more"
    return shown


def picture(replayed: OverflowReplay, event: dict[str, Any]) -> RenderableType:
    """Return the panel of a replay."""
    finding = replayed.trace.found
    content: RenderableType
    if finding is None:
        title = f"step {replayed.step} again: all finite"
        content = _all_finite_reasons(replayed, event)
    else:
        title = (
            f"step {replayed.step} again: first not finite in micro-batch {replayed.microbatch} of "
            "the global batch"
        )
        content = Group(_fact_grid(finding), _tensors_before(replayed), _sample_table(replayed))
    return Panel(content, title=title, title_align="left", expand=False)


def _fact_grid(finding: NonfiniteFinding) -> Table:
    """Return what is known of the first tensor that was not finite."""
    if finding.module is None:
        location = "outside of the model, in its input or its loss"
    else:
        location = f"{finding.module or 'the model'} ({finding.kind})"
    largest_number = torch.finfo(finding.dtype).max
    facts = {
        "arose in": location,
        "tensor": f"{finding.what}, {list(finding.shape)}",
        "holds": (
            f"{finding.infs} inf, {finding.nans} NaN of {finding.elements}; largest other "
            f"{finding.largest:.4g}"
        ),
        "made in": f"{dtype_name(finding.dtype)}, whose largest number is {largest_number:.5g}",
    }
    if finding.module is not None:
        facts["what went in"] = f"finite, largest magnitude {finding.given:.4g}"
        facts["parameters"] = ", ".join(finding.parameters) or "none of its own"
    return _grid(facts)


def _grid(facts: dict[str, str]) -> Table:
    """Return the facts in two columns, their names in bold."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, fact in facts.items():
        grid.add_row(name, Text(fact))
    return grid


def _tensors_before(replayed: OverflowReplay) -> Table:
    """Return the table of the last finite tensors, which often shows how magnitudes grow."""
    rows = Table(title="\nbefore it", title_justify="left", box=None, padding=(0, 2, 0, 0))
    rows.add_column("tensor", overflow="fold")
    rows.add_column("largest magnitude", justify="right")
    for tensor in replayed.trace.seen[-MAX_TENSORS_BEFORE:]:
        rows.add_row(tensor.what, f"{tensor.largest:.4g}")
    return rows


def _sample_table(replayed: OverflowReplay) -> Table:
    """Return the samples of the micro-batch, with the beginnings of their texts."""
    rows = Table(title="\nits samples", title_justify="left", box=None, padding=(0, 2, 0, 0))
    rows.add_column("id", justify="right")
    rows.add_column("begins with", overflow="fold")
    for number, text in replayed.samples:
        one_line = " ".join(text[:MAX_CHARS].split())
        rows.add_row(str(number), Text(escape_control_characters(one_line)))
    return rows


def _all_finite_reasons(replayed: OverflowReplay, event: dict[str, Any]) -> Text:
    """Return the possible reasons why the overflow does not happen again."""
    lines = [
        "Every micro-batch of the step was run alone, and every output, gradient and loss was "
        "finite. Likely:"
    ]
    offenders = event["offenders"]
    if any(offender.get("traced") and offender["microbatch"] is None for offender in offenders):
        lines += [
            "- in the run, too, no micro-batch did it alone: gradients overflowed when ranks were "
            "summed, or",
            "  it was chance, such as a fault of the hardware;",
        ]
    if replayed.layout:
        lines += [
            f"- the run was on {replayed.layout}, this is one process:",
            "  sums are rounded in another order, and what was just too large there may just fit "
            "here;",
        ]
    lines += [
        "- it is the sum over micro-batches that overflowed, not one of them;",
        "- the weights differ: another version of torch, another device, or a run file changed "
        "since.",
    ]
    if replayed.trace.seen:
        top = max(replayed.trace.seen, key=lambda tensor: tensor.largest)
        lines.append(
            f"The largest number of the last micro-batch was {top.largest:.4g}: {top.what}."
        )
    return Text("\n".join(lines))
