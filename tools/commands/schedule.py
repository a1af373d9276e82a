"""`megaprec schedule`: predict a pipeline's step time, bubble and memory, and draw its timeline.

With a run file it prints the table of stages, times the schedule by the FLOPs of the run's stages
and counts the bytes of each pipeline rank, as `megaprec plan` does; the timeline that
`log.timeline` has recorded is drawn below the predicted one. Without a run file all stages cost the
same. A schedule that would hang or leave something out is drawn up to the instruction where it goes
wrong.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from models.estimate.flops import StageCost
from models.estimate.memory import Kept
from parallel.pipeline.builders import KINDS
from parallel.pipeline.formulas import TEXTBOOK, Sizes
from parallel.pipeline.instructions import SENDS, Cost, Op
from parallel.pipeline.schedules import Schedule
from parallel.pipeline.simulation import Refused, Span, bubble, idle, in_flight, simulate
from parallel.pipeline.verify import check
from tools.config.run_file import RunConfig, load_run
from tools.config.schedules import plan_equal, read_schedule
from tools.console.tables import add_json, put
from tools.console.units import flops, size
from tools.planning.device import target_of
from tools.planning.memory import MemoryModel, Passes, RankBytes
from tools.planning.report import aligned, fit
from tools.plots.perfetto import TIMELINE, read_trace, write_trace
from tools.plots.timeline import Panel, as_text, draw
from tools.training.notes import add_strict, tell_notes

KINDS_OF_BYTES = ("weights", "gradients", "optimizer", "activations", "other", "total")
LONGEST = 1e12  # time of an instruction; sums of many must stay exact enough to compare
FORMS = ".svg and .png (pictures), .json (a trace for ui.perfetto.dev), .txt (the schedule itself)"


@dataclass(frozen=True)
class _Case:
    """One schedule to report.

    cost: time of an instruction, in `unit`. bytes: of each pipeline rank; empty if they are not
    known. fits: the verdict on them. measured: recorded spans, in seconds.
    """

    name: str
    kind: str  # "" for a schedule from a file
    schedule: Schedule
    cost: Cost
    sizes: Sizes
    unit: str = "forwards"
    table: Sequence[str] = ()
    bytes: Sequence[RankBytes] = ()
    fits: str = ""
    measured: Sequence[Span] = ()


def add_parser(subparsers: Any) -> None:
    """Add `schedule` to the commands."""
    parser = subparsers.add_parser(
        "schedule", help="predict and draw a pipeline schedule", description=__doc__
    )
    parser.add_argument(
        "file", nargs="?", metavar="RUN.toml", help="run file whose schedule and stages are shown"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="table.key=value",
        help="keys that differ from the file",
    )
    parser.add_argument(
        "--kind", choices=KINDS, default="1f1b", help="pipeline schedule (default: 1f1b)"
    )
    parser.add_argument(
        "--pipeline", type=int, default=4, metavar="P", help="number of pipeline ranks (default: 4)"
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        default=8,
        metavar="M",
        help="number of micro-batches (default: 8)",
    )
    parser.add_argument(
        "--chunks",
        type=int,
        default=0,
        metavar="V",
        help="number of stages per rank (default: 0, the schedule's own)",
    )
    parser.add_argument(
        "--own", metavar="FILE", help="text file with a schedule, used instead of --kind"
    )
    parser.add_argument(
        "--costs",
        default="1,1,1",
        metavar="F,I,W",
        help="times of a stage's forward pass, input gradient and weight gradient (default: 1,1,1)",
    )
    parser.add_argument(
        "--transfer",
        type=float,
        default=0.0,
        metavar="T",
        help="time of a message between two ranks (default: 0)",
    )
    parser.add_argument(
        "--gpu", default="", metavar="NAME", help="GPU of each rank, for the memory of a run"
    )
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE.json",
        help="recorded timeline to draw below the predicted one",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help=f"file to write; its suffix decides the form: {FORMS}",
    )
    add_json(parser)
    add_strict(parser)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec schedule`."""
    for path in args.output:
        if path.suffix not in (".svg", ".png", ".json", ".txt"):
            raise UserError(f"--output {path}: unknown suffix; the form follows from it: {FORMS}")
        if path.suffix == ".txt" and os.path.lexists(path):
            raise UserError(
                f"--output {path}: it exists, and may have been edited: give another name, or "
                "remove it"
            )
    if not 0 <= args.transfer < LONGEST:
        raise UserError(f"--transfer {args.transfer:g}: give 0 or more, below {LONGEST:g}")
    case = _of_file(args) if args.file else _of_options(args)
    try:
        check(case.schedule)
    except Refused as refusal:
        for path in (p for p in args.output if p.suffix in (".svg", ".png")):
            panel = Panel(
                "what would run",
                refusal.spans,
                len(case.schedule.programs),
                "forwards",
                marks=refusal.marks,
            )
            draw(f"{case.name} cannot run", refusal.problems[:1], [panel]).save(path)
            print(f"drawn      {path}", file=sys.stderr if args.json else sys.stdout)
        raise
    predicted = simulate(case.schedule, case.cost)
    put(
        args, lambda: _document(case, predicted), lambda: print("\n".join(_report(case, predicted)))
    )
    for path in args.output:
        _write(case, predicted, path)
        if not args.json:
            print(f"written    {path}")
    return 0


def _document(case: _Case, predicted: Sequence[Span]) -> dict[str, Any]:
    """Return the report for programs: the step, and each rank. Times are in `unit`, memory in
    bytes."""
    waits = idle(predicted)
    holds = _held(case)
    ranks = [
        {
            "rank": rank,
            "stages": [
                stage for stage, home in enumerate(case.schedule.rank_of_stage) if home == rank
            ],
            "waits": waits[rank],
            "holds": holds[rank],
            "bytes": {**asdict(case.bytes[rank]), "total": case.bytes[rank].total}
            if case.bytes
            else None,
        }
        for rank in range(len(case.schedule.programs))
    ]
    return {
        "schedule": case.kind or case.name,
        "microbatches": case.schedule.microbatches,
        "bubble": bubble(predicted),
        "step": Panel("", predicted, len(ranks)).length,
        "unit": case.unit,
        "ranks": ranks,
        "measured_bubble": bubble(case.measured) if case.measured else None,
    }


def _of_file(args: argparse.Namespace) -> _Case:
    config = load_run(args.file, args.overrides)
    tell_notes(config.notes, args.strict)
    return _of_run(config, args)


def _of_options(args: argparse.Namespace) -> _Case:
    forward, of_input, of_weight = _three(args.costs)
    if args.own:
        made = read_schedule(args.own)
    else:
        made = plan_equal(args.kind, args.pipeline, args.microbatches, args.chunks)
    times = {
        Op.FORWARD: forward,
        Op.BACKWARD: of_input + of_weight,
        Op.BACKWARD_INPUT: of_input,
        Op.BACKWARD_WEIGHT: of_weight,
    }
    ranks = len(made.programs)
    stages = len(made.rank_of_stage)
    return _Case(
        Path(args.own).name if args.own else args.kind,
        "" if args.own else args.kind,
        made,
        _with_transfers(lambda i: times.get(i.op, 0.0), args.transfer),
        Sizes(ranks, made.microbatches, stages // ranks, forward, of_input, of_weight),
        measured=_measured(made, args.measured),
    )


def _three(text: str) -> tuple[float, float, float]:
    try:
        forward, of_input, of_weight = (float(word) for word in text.split(","))
    except ValueError as error:
        raise UserError(
            f"--costs {text}: give three numbers separated by commas, such as 1,1.2,0.9"
        ) from error
    if not all(0 < cost < LONGEST for cost in (forward, of_input, of_weight)):  # NaN is not either
        raise UserError(f"--costs {text}: each number must be above 0 and below {LONGEST:g}")
    return forward, of_input, of_weight


def _with_transfers(cost: Cost, transfer: float) -> Cost:
    return lambda i: transfer if i.op in SENDS else cost(i)


def _of_run(config: RunConfig, args: argparse.Namespace) -> _Case:
    made = config.schedule
    train = config.train
    parallel = config.parallel
    model = config.sized_model
    costs = config.stage_costs(model, made.rank_of_stage)
    target = target_of(config, args.gpu)
    kept = list[Kept]()
    ranks_bytes = list[RankBytes]()
    if not config.model.factory:  # the memory of a custom model is not known before it is built
        memory = MemoryModel(target.device)
        kept = memory.kept(config, costs)
        ranks_bytes = memory.of(config, Passes(made, costs))
    mean = sum(c.forward for c in costs) / len(costs)
    totals = (sum(getattr(c, part) for c in costs) for part in ("forward", "input", "weight"))
    ranks = len(made.programs)
    return _Case(
        Path(args.file).name,
        "" if parallel.schedule_file else parallel.schedule,
        made,
        _with_transfers(lambda i: costs[i.stage].of(i) / mean, args.transfer),
        Sizes(ranks, made.microbatches, len(costs) // ranks, *totals),
        "mean forwards",
        _stage_table(made, costs, kept, model.mtp_layers),
        ranks_bytes,
        f"{target.name}: {fit(ranks_bytes, target)}" if ranks_bytes else "",
        _measured(made, args.measured, Path(train.folder) / TIMELINE),
    )


def _measured(made: Schedule, asked_for: Path | None, there: Path | None = None) -> Sequence[Span]:
    """Return the spans recorded in `asked_for`, or else in `there` if it exists. They must be of
    this schedule."""
    path = asked_for or (there if there and there.is_file() else None)
    if path is None:
        return ()
    spans = read_trace(path)
    if [(s.rank, s.instruction) for s in spans] == [
        (r, i) for r, program in enumerate(made.programs) for i in program
    ]:
        return spans
    if asked_for:
        raise UserError(f"--measured {path}: it was recorded with another schedule")
    print(f"left out   {path}, which was recorded with another schedule", file=sys.stderr)
    return ()


def _stage_table(
    made: Schedule, costs: Sequence[StageCost], kept: Sequence[Kept], further: int
) -> list[str]:
    """Return the table of stages: rank, layers, parameters and FLOPs per micro-batch.

    further: number of modules of multi-token prediction, which the last stage has.
    """
    modules = f" + {further} mtp" if further else ""
    total = sum(cost.forward for cost in costs)
    rows = [
        (
            "stage",
            "rank",
            "layers",
            "parameters",
            "FLOPs",
            "forward",
            "input",
            "weight",
            "activations",
        )
    ]
    for stage, cost in enumerate(costs):
        layers = cost.cut.layers
        what = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else f"{layers[0]}"
        ends = (" + embedding" if cost.cut.first else "") + (
            modules + " + head" if cost.cut.last else ""
        )
        forward, of_input, of_weight = (
            flops(part) for part in (cost.forward, cost.input, cost.weight)
        )
        share = f"{cost.forward / total:.1%}"
        memory = size(kept[stage].activations) if kept else "not known"
        place = str(stage), str(made.rank_of_stage[stage]), what + ends
        rows.append((*place, f"{cost.parameters:,}", share, forward, of_input, of_weight, memory))
    return aligned(rows)


def _report(case: _Case, predicted: Sequence[Span]) -> Iterator[str]:
    """Yield the lines of the report."""
    ranks = len(case.schedule.programs)
    width = shutil.get_terminal_size((120, 40)).columns
    yield _title(case)
    if case.table:
        yield from ("", *case.table)
    yield from ("", *_facts(case, predicted), "", *aligned(_rank_table(case, predicted)), "")
    yield as_text(Panel("", predicted, ranks), width)
    if case.measured:
        yield f"\nmeasured: bubble {bubble(case.measured):.1%}"
        yield as_text(Panel("", case.measured, ranks), width)


def _title(case: _Case) -> str:
    ranks = len(case.schedule.programs)
    stages = len(case.schedule.rank_of_stage)
    what = f"{case.name}, {case.kind}" if case.kind not in ("", case.name) else case.name
    a_rank = f" x {stages // ranks} stages" if stages > ranks else ""
    return f"{what}: {ranks} ranks{a_rank}, {case.schedule.microbatches} micro-batches"


def _facts(case: _Case, predicted: Sequence[Span]) -> Iterator[str]:
    s = case.sizes
    panel = Panel("", predicted, case.sizes.p)
    book = TEXTBOOK.get(case.kind)
    work = sum(span.end - span.start for span in panel.computed) / s.p
    held = max(_held(case))
    said = f" (textbook {book.bubble.value(s):.1%} = {book.bubble.text})" if book else ""
    yield (
        f"bubble  {bubble(predicted):.1%}{said}: the longest time that a rank waits during its "
        "work, over that work"
    )
    yield (
        f"step    {panel.length:.4g} {case.unit}, {panel.length / work - 1:.1%} more than the "
        "mean work of a rank"
    )
    said = f" (textbook {book.held.value(s):.3g} = {book.held.text})" if book else ""
    yield (
        f"memory  {held:.3g}{said}: the most micro-batches whose activations a rank holds at "
        "once, for all its stages"
    )
    if case.fits:
        yield f"device  {case.fits}"


def _held(case: _Case) -> list[float]:
    """Return the micro-batches whose activations each rank holds at most; those of one of two
    stages are a half."""
    return [count / case.sizes.v for count in in_flight(case.schedule)]


def _rank_table(case: _Case, predicted: Sequence[Span]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("rank", "stages", "waits", "holds", *(KINDS_OF_BYTES if case.bytes else ()))
    ]
    waits = idle(predicted)
    holds = _held(case)
    for rank in range(len(case.schedule.programs)):
        stages = " ".join(
            str(s) for s, home in enumerate(case.schedule.rank_of_stage) if home == rank
        )
        sizes = [words for one in case.bytes[rank : rank + 1] for words in _sizes(one)]
        rows.append((str(rank), stages, f"{waits[rank]:.1%}", f"{holds[rank]:.4g}", *sizes))
    return rows


def _sizes(one: RankBytes) -> tuple[str, ...]:
    """Return the columns KINDS_OF_BYTES of a rank."""
    state = one.weights, one.gradients, one.masters + one.moments
    other = one.total - sum(state) - one.activations
    return tuple(size(count) for count in (*state, one.activations, other, one.total))


def _write(case: _Case, predicted: Sequence[Span], path: Path) -> None:
    if path.suffix == ".txt":
        path.write_text(f"# {_title(case)}\n{case.schedule}\n", encoding="utf-8")
    elif path.suffix == ".json":
        write_trace(path, predicted, f"{_title(case)} (predicted, 1 s is one of {case.unit})")
    else:
        draw(_title(case), [*_facts(case, predicted)], _panels(case, predicted)).save(path)


def _panels(case: _Case, predicted: Sequence[Span]) -> list[Panel]:
    """Return the panel of the predicted timeline and, if there is one, of the measured timeline on
    the same scale, in ms.
    """
    ranks = len(case.schedule.programs)
    headings, *rows = _rank_table(case, predicted)
    facts = dict(zip(headings[2:], [*zip(*rows, strict=True)][2:], strict=True))
    if not case.measured:
        return [Panel("predicted", predicted, ranks, case.unit, facts)]
    measured = _scaled(case.measured, 1e3)
    busy = [
        sum(s.end - s.start for s in Panel("", spans, ranks).computed)
        for spans in (measured, predicted)
    ]
    waits = {"waits": [f"{share:.1%}" for share in idle(measured)]}
    title = f"bubble {bubble(predicted):.1%}", f"bubble {bubble(measured):.1%}"
    return [
        Panel(f"predicted: {title[0]}", _scaled(predicted, busy[0] / busy[1]), ranks, "ms", facts),
        Panel(f"measured: {title[1]}", measured, ranks, "ms", waits),
    ]


def _scaled(spans: Sequence[Span], factor: float) -> list[Span]:
    return [span._replace(start=span.start * factor, end=span.end * factor) for span in spans]
