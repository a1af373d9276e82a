"""Timelines as Chrome traces: JSON files for Perfetto (ui.perfetto.dev) and chrome://tracing,
written and read."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from megaprec.parsing import parse_json, read_text
from megaprec.tokens.files import write_whole
from parallel.pipeline.instructions import Instruction, Message, Op
from parallel.pipeline.schedules import Schedule
from parallel.pipeline.simulation import Span

TIMELINE = "timeline.json"  # file in the run folder that `log.timeline` writes
CATEGORIES = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "input gradient",
    Op.BACKWARD_WEIGHT: "weight gradient",
    Op.REDUCE: "reduce",
}
MICROSECONDS = 1e6


def write_timeline(folder: Path, spans: Sequence[Span], title: str) -> None:
    """Write the spans of a step to the run folder: see `write_trace`."""
    write_trace(folder / TIMELINE, spans, title)


def write_trace(path: Path, spans: Sequence[Span], title: str) -> None:
    """Write `spans`, in seconds, as one process named `title` with a thread per pipeline rank."""
    # a viewer shows threads in this order
    ranks = sorted({span.rank for span in spans})
    trace_events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": title}}
    ]
    for rank in ranks:
        name = {"name": f"pipeline rank {rank}"}
        trace_events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": name})
    trace_events += map(_event, spans)
    trace = {"traceEvents": trace_events, "displayTimeUnit": "ms"}
    write_whole(path, json.dumps(trace).encode())


def read_trace(path: Path) -> list[Span]:
    """Return the spans, in seconds, of a file that `write_trace` wrote. Raises UserError for any
    other file."""
    try:
        trace_events = parse_json(read_text(path))["traceEvents"]
        return [_span(trace_event) for trace_event in trace_events if trace_event["ph"] == "X"]
    except OSError as error:
        raise UserError.of("plots.trace_unreadable", path=path, reason=error.strerror) from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UserError.of("plots.trace_foreign", path=path) from error


def read_trace_of(path: Path, schedule: Schedule) -> list[Span]:
    """Return the spans of a file; none if it was recorded with another schedule. Raises
    UserError.
    """
    expected = list[tuple[int, Instruction]]()
    # Spans are recorded rank by rank, in the order of the programs.
    for rank, program in enumerate(schedule.programs):
        expected += [(rank, instruction) for instruction in program]
    spans = read_trace(path)
    recorded = [(span.rank, span.instruction) for span in spans]
    if recorded != expected:
        return []
    return spans


def _event(span: Span) -> dict[str, Any]:
    """Return a span as a complete event ("X") of a Chrome trace."""
    instruction = span.instruction
    args: dict[str, Any] = {"stage": instruction.stage}
    if instruction.op is not Op.REDUCE:  # one of all micro-batches
        args["micro-batch"] = instruction.microbatch
    message = Message.of(instruction)
    if message:
        args["stages"] = f"{message.stage} and {message.stage + 1}"
    return {
        "name": str(instruction),
        "cat": CATEGORIES.get(instruction.op, "transfer"),
        "ph": "X",
        "pid": 0,
        "tid": span.rank,
        "ts": span.start * MICROSECONDS,
        "dur": (span.end - span.start) * MICROSECONDS,
        "args": args,
    }


def _span(trace_event: dict[str, Any]) -> Span:
    start = float(trace_event["ts"]) / MICROSECONDS
    seconds = float(trace_event["dur"]) / MICROSECONDS
    rank = int(trace_event["tid"])
    instruction = Instruction.parse(trace_event["name"])
    return Span(rank, instruction, start, start + seconds)
