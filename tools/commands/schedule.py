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
from megaprec.tokens.files import write_whole
from models.estimate.flops import StageCost
from models.estimate.memory import ActivationBytes
from parallel.pipeline.formulas import FormulaSizes
from parallel.pipeline.instructions import SENDS, Cost, Instruction, Op
from parallel.pipeline.kinds import KINDS
from parallel.pipeline.schedules import Schedule
from parallel.pipeline.simulation import RefusedSchedule, Span, bubble, idle, in_flight, simulate
from parallel.pipeline.verify import check
from tools.analysis.planning.device import target_of
from tools.analysis.planning.memory import MemoryModel, PlannedPasses, RankBytes
from tools.analysis.planning.report import aligned, describe_fit
from tools.analysis.plots.timeline import Panel, as_text, draw
from tools.commands.notes import tell_notes
from tools.commands.options import add_overrides, add_strict
from tools.config.resolved_run import resolve_run
from tools.config.run_file import RunConfig
from tools.config.tables.schedules import plan_equal, read_schedule
from tools.console.json_output import add_json, to_json
from tools.console.units import flops, size
from tools.journal.timeline_file import TIMELINE, read_trace_of, write_trace

KINDS_OF_BYTES = ("weights", "gradients", "optimizer", "activations", "other", "total")
STAGE_HEADINGS: tuple[str, ...] = (
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
MAX_TIME = 1e12  # time of an instruction; sums of many must stay exact enough to compare
OUTPUT_FORMS = (
    ".svg and .png (pictures), .json (a trace for ui.perfetto.dev), .txt (the schedule itself)"
)


@dataclass(frozen=True)
class _ScheduleReport:
    """One schedule to report.

    cost: time of an instruction, in `unit`. bytes: of each pipeline rank; empty if they are not
    known. fits: the verdict on them. measured: recorded spans, in seconds.
    """

    name: str
    kind: str  # "" for a schedule from a file
    schedule: Schedule
    cost: Cost
    sizes: FormulaSizes
    unit: str = "forwards"
    table: Sequence[str] = ()
    bytes: Sequence[RankBytes] = ()
    fits: str = ""
    measured: Sequence[Span] = ()


OF_KINDS: dict[str, Any] = {"kind": "1f1b", "pipeline": 4, "microbatches": 8, "chunks": 0}
DEFAULTS = {**OF_KINDS, "costs": "1,1,1"}
"""What the options mean that are not given, without a run file; with one they are idle."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `schedule`."""
    parser.description = __doc__
    parser.add_argument(
        "file", nargs="?", metavar="RUN.toml", help="run file whose schedule and stages are shown"
    )
    add_overrides(parser)
    parser.add_argument("--kind", choices=KINDS, help="pipeline schedule (default: 1f1b)")
    parser.add_argument(
        "--pipeline", type=int, metavar="P", help="number of pipeline ranks (default: 4)"
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        metavar="M",
        help="number of micro-batches (default: 8)",
    )
    parser.add_argument(
        "--chunks",
        type=int,
        metavar="V",
        help="number of stages per rank (default: 0, the schedule's own)",
    )
    parser.add_argument(
        "--own", metavar="FILE", help="text file with a schedule, used instead of --kind"
    )
    parser.add_argument(
        "--costs",
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
        help=f"file to write; its suffix decides the form: {OUTPUT_FORMS}",
    )
    add_json(parser)
    add_strict(parser)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec schedule`; return the exit code."""
    _check_options(args)
    report = _report_of_file(args) if args.file else _report_of_options(args)
    try:
        check(report.schedule)
    except RefusedSchedule as refusal:
        _draw_refusal(report, refusal, args)
        raise
    predicted = simulate(report.schedule, report.cost)
    if not args.json:
        # before files are written, which takes a while for pictures
        print("\n".join(_report_lines(report, predicted)))
    for path in args.output:
        _write_output(report, predicted, path)
        if not args.json:
            print(f"written    {path}")
    if args.json:
        # after them: of a file that cannot be written, the error is the one document
        print(to_json(_document(report, predicted)))
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Raise UserError for options that would change nothing, files that cannot be written and a
    time that cannot be."""
    idle = {"gpu": "the memory is that of a run, and there is no run file"}
    if args.file:
        idle = dict.fromkeys(("own", *DEFAULTS), "the schedule is that of the run file")
    elif args.own:
        idle |= dict.fromkeys(OF_KINDS, "the schedule is that of --own")
    for name, why in idle.items():
        if getattr(args, name) not in (None, ""):
            raise UserError.of("command.schedule_option_idle", name=name, why=why)
    for path in args.output:
        if path.suffix not in (".svg", ".png", ".json", ".txt"):
            raise UserError.of("command.schedule_suffix", path=path, output_forms=OUTPUT_FORMS)
        if path.suffix == ".txt" and os.path.lexists(path):
            raise UserError.of("command.schedule_exists", path=path)
    if not 0 <= args.transfer < MAX_TIME:
        raise UserError.of("command.transfer", transfer=args.transfer, max_time=MAX_TIME)


def _draw_refusal(
    report: _ScheduleReport, refusal: RefusedSchedule, args: argparse.Namespace
) -> None:
    """Draw a schedule that cannot run up to the instruction where it goes wrong."""
    for path in args.output:
        if path.suffix not in (".svg", ".png"):
            continue
        ranks = len(report.schedule.programs)
        panel = Panel("what would run", refusal.spans, ranks, "forwards", marks=refusal.marks)
        draw(f"{report.name} cannot run", refusal.problems[:1], [panel]).save(path)
        # with --json stdout is one document
        print(f"drawn      {path}", file=sys.stderr if args.json else sys.stdout)


def _document(report: _ScheduleReport, predicted: Sequence[Span]) -> dict[str, Any]:
    """Return the report for programs: the step, and each rank. Times are in `unit`, memory in
    bytes."""
    waits = idle(predicted)
    holds = _held_microbatches(report)
    ranks = list[dict[str, Any]]()
    for rank in range(len(report.schedule.programs)):
        bytes_by_kind = None
        if report.bytes:
            rank_bytes = report.bytes[rank]
            bytes_by_kind = {**asdict(rank_bytes), "total": rank_bytes.total}
        ranks.append(
            {
                "rank": rank,
                "stages": _stages_of(report.schedule, rank),
                "waits": waits[rank],
                "holds": holds[rank],
                "bytes": bytes_by_kind,
            }
        )
    return {
        "schedule": report.kind or report.name,
        "microbatches": report.schedule.microbatches,
        "bubble": bubble(predicted),
        "step": Panel("", predicted, len(ranks)).length,
        "unit": report.unit,
        "ranks": ranks,
        "measured_bubble": bubble(report.measured) if report.measured else None,
    }


def _stages_of(schedule: Schedule, rank: int) -> list[int]:
    """Return the stages of a pipeline rank."""
    return [stage for stage, home in enumerate(schedule.rank_of_stage) if home == rank]


def _report_of_file(args: argparse.Namespace) -> _ScheduleReport:
    """Return the report on the schedule of a run file, after telling its notes."""
    config = resolve_run(args.file, args.overrides)
    tell_notes(config.notes, args.strict)
    return _report_of_run(config, args)


def _report_of_options(args: argparse.Namespace) -> _ScheduleReport:
    """Return the report on a schedule without a run, of stages that all cost the same."""
    given = {name: getattr(args, name) for name in DEFAULTS}
    chosen = {name: DEFAULTS[name] if value is None else value for name, value in given.items()}
    kind = chosen["kind"]
    forward, of_input, of_weight = _pass_costs(chosen["costs"])
    if args.own:
        schedule = read_schedule(args.own)
    else:
        sizes = [chosen[name] for name in ("pipeline", "microbatches", "chunks")]
        schedule = plan_equal(kind, *sizes)
    # other instructions take no time; messages get theirs below
    times = {
        Op.FORWARD: forward,
        Op.BACKWARD: of_input + of_weight,
        Op.BACKWARD_INPUT: of_input,
        Op.BACKWARD_WEIGHT: of_weight,
    }
    ranks = len(schedule.programs)
    stages_per_rank = len(schedule.rank_of_stage) // ranks

    def time_of(instruction: Instruction) -> float:
        return times.get(instruction.op, 0.0)

    return _ScheduleReport(
        name=Path(args.own).name if args.own else kind,
        kind="" if args.own else kind,
        schedule=schedule,
        cost=_with_transfers(time_of, args.transfer),
        sizes=FormulaSizes(
            ranks, schedule.microbatches, stages_per_rank, forward, of_input, of_weight
        ),
        measured=_measured_spans(schedule, args.measured),
    )


def _pass_costs(text: str) -> tuple[float, float, float]:
    """Return the times of forward pass, input gradient and weight gradient. Raises UserError."""
    try:
        forward, of_input, of_weight = (float(number) for number in text.split(","))
    except ValueError as error:
        raise UserError.of("command.costs_form", text=text) from error
    if not all(0 < cost < MAX_TIME for cost in (forward, of_input, of_weight)):  # NaN is not either
        raise UserError.of("command.costs_range", text=text, max_time=MAX_TIME)
    return forward, of_input, of_weight


def _with_transfers(cost: Cost, transfer: float) -> Cost:
    """Return the cost by which a message takes `transfer`."""
    return lambda instruction: transfer if instruction.op in SENDS else cost(instruction)


def _report_of_run(config: RunConfig, args: argparse.Namespace) -> _ScheduleReport:
    """Return the report on the schedule of a run, timed by the FLOPs of its stages."""
    config = config.with_batch_of_timeline
    schedule = config.schedule
    parallel = config.parallel
    model = config.sized_model
    costs = config.stage_costs(model, schedule.rank_of_stage)
    target = target_of(config, args.gpu)
    config = config.on_device(target.device)
    kept_activations = list[ActivationBytes]()
    rank_bytes = list[RankBytes]()
    if not config.model.factory:  # the memory of a custom model is not known before it is built
        memory = MemoryModel(target.device)
        kept_activations = memory.kept(config, costs)
        rank_bytes = memory.of(config, PlannedPasses(schedule, costs))
    # times are in mean forward passes of a stage
    mean_forward = sum(cost.forward for cost in costs) / len(costs)

    def relative_time(instruction: Instruction) -> float:
        """Return the FLOPs of an instruction over those of a mean forward pass."""
        return costs[instruction.stage].flops(instruction) / mean_forward

    ranks = len(schedule.programs)
    # forward, input and weight gradients in FLOPs: the textbook's formulas take their ratios
    sizes = FormulaSizes(
        ranks,
        schedule.microbatches,
        len(costs) // ranks,
        F=sum(cost.forward for cost in costs),
        I=sum(cost.input for cost in costs),
        W=sum(cost.weight for cost in costs),
    )
    recorded = Path(config.train.folder) / TIMELINE
    return _ScheduleReport(
        name=Path(args.file).name,
        kind="" if parallel.schedule_file else parallel.schedule,
        schedule=schedule,
        cost=_with_transfers(relative_time, args.transfer),
        sizes=sizes,
        unit="mean forwards",
        table=_stage_table(schedule, costs, kept_activations, model.mtp_layers),
        bytes=rank_bytes,
        fits=f"{target.name}: {describe_fit(rank_bytes, target)}" if rank_bytes else "",
        measured=_measured_spans(schedule, args.measured, recorded),
    )


def _measured_spans(
    schedule: Schedule, requested: Path | None, recorded: Path | None = None
) -> Sequence[Span]:
    """Return the spans of the file `requested`, or else of `recorded` if it exists. They must be of
    this schedule."""
    path = requested
    if path is None and recorded is not None and recorded.is_file():
        path = recorded
    if path is None:
        return ()
    spans = read_trace_of(path, schedule)
    if spans:
        return spans
    # A run may have been recorded before its layout was changed; a file that is named is meant.
    if requested:
        raise UserError.of("command.measured_other_schedule", path=path)
    print(f"left out   {path}, which was recorded with another schedule", file=sys.stderr)
    return ()


def _stage_table(
    schedule: Schedule,
    costs: Sequence[StageCost],
    kept_activations: Sequence[ActivationBytes],
    mtp_layers: int,
) -> list[str]:
    """Return the table of stages: rank, layers, parameters and FLOPs per micro-batch.

    mtp_layers: number of modules of multi-token prediction, which the last stage has.
    """
    total = sum(cost.forward for cost in costs)
    rows = [STAGE_HEADINGS]
    for stage, cost in enumerate(costs):
        rows.append(
            (
                str(stage),
                str(schedule.rank_of_stage[stage]),
                _stage_content(cost, mtp_layers),
                f"{cost.parameters:,}",
                f"{cost.forward / total:.1%}",
                flops(cost.forward),
                flops(cost.input),
                flops(cost.weight),
                size(kept_activations[stage].activations) if kept_activations else "not known",
            )
        )
    return aligned(rows)


def _stage_content(cost: StageCost, mtp_layers: int) -> str:
    """Return the layers of a stage in words: "0-5 + embedding"."""
    layers = cost.cut.layers
    content = f"{layers[0]}"
    if len(layers) > 1:
        content += f"-{layers[-1]}"
    if cost.cut.first:
        content += " + embedding"
    if cost.cut.last and mtp_layers:
        content += f" + {mtp_layers} mtp"
    if cost.cut.last:
        content += " + head"
    return content


def _report_lines(report: _ScheduleReport, predicted: Sequence[Span]) -> Iterator[str]:
    """Yield the lines of the report."""
    ranks = len(report.schedule.programs)
    # a pipe is as wide as 120 columns
    width = shutil.get_terminal_size((120, 40)).columns
    yield _title(report)
    if report.table:
        yield from ("", *report.table)
    yield from (
        "",
        *_fact_lines(report, predicted),
        "",
        *aligned(_rank_table(report, predicted)),
        "",
    )
    yield as_text(Panel("", predicted, ranks), width)
    if report.measured:
        yield f"\nmeasured: bubble {bubble(report.measured):.1%}"
        yield as_text(Panel("", report.measured, ranks), width)


def _title(report: _ScheduleReport) -> str:
    """Return the name of the schedule with its ranks, stages and micro-batches."""
    ranks = len(report.schedule.programs)
    stages = len(report.schedule.rank_of_stage)
    name = report.name
    if report.kind not in ("", name):
        name = f"{name}, {report.kind}"
    per_rank = f" x {stages // ranks} stages" if stages > ranks else ""
    return f"{name}: {ranks} ranks{per_rank}, {report.schedule.microbatches} micro-batches"


def _fact_lines(report: _ScheduleReport, predicted: Sequence[Span]) -> Iterator[str]:
    """Yield a line each on bubble, step, memory and, if it is known, the device."""
    sizes = report.sizes
    panel = Panel("", predicted, sizes.p)
    # the mean over ranks, which differ where the last stage has a head
    mean_work = _work(predicted, sizes.p) / sizes.p
    most_held = max(_held_microbatches(report))
    textbook_bubble = ""
    textbook_held = ""
    if book := KINDS.get(report.kind):
        textbook_bubble = f" (textbook {book.bubble.value(sizes):.1%} = {book.bubble.text})"
        textbook_held = f" (textbook {book.held.value(sizes):.3g} = {book.held.text})"
    yield (
        f"bubble  {bubble(predicted):.1%}{textbook_bubble}: the longest time that a rank waits "
        "during its work, over that work"
    )
    yield (
        f"step    {panel.length:.4g} {report.unit}, {panel.length / mean_work - 1:.1%} more than "
        "the mean work of a rank"
    )
    yield (
        f"memory  {most_held:.3g}{textbook_held}: the most micro-batches whose activations a rank "
        "holds at once, for all its stages"
    )
    if report.fits:
        yield f"device  {report.fits}"


def _held_microbatches(report: _ScheduleReport) -> list[float]:
    """Return the micro-batches whose activations each rank holds at most; those of one of two
    stages are a half."""
    return [count / report.sizes.v for count in in_flight(report.schedule)]


def _rank_table(report: _ScheduleReport, predicted: Sequence[Span]) -> list[tuple[str, ...]]:
    """Return the rows of the table of ranks, headings first."""
    headings = ("rank", "stages", "waits", "holds")
    rows: list[tuple[str, ...]] = [headings + KINDS_OF_BYTES if report.bytes else headings]
    waits = idle(predicted)
    holds = _held_microbatches(report)
    for rank in range(len(report.schedule.programs)):
        stages = " ".join(map(str, _stages_of(report.schedule, rank)))
        row = (str(rank), stages, f"{waits[rank]:.1%}", f"{holds[rank]:.4g}")
        if report.bytes:
            row += _byte_columns(report.bytes[rank])
        rows.append(row)
    return rows


def _byte_columns(rank_bytes: RankBytes) -> tuple[str, ...]:
    """Return the columns KINDS_OF_BYTES of a rank."""
    optimizer = rank_bytes.masters + rank_bytes.moments
    named = (rank_bytes.weights, rank_bytes.gradients, optimizer, rank_bytes.activations)
    other = rank_bytes.total - sum(named)
    columns = (*named, other, rank_bytes.total)
    return tuple(size(nbytes) for nbytes in columns)


def _write_output(report: _ScheduleReport, predicted: Sequence[Span], path: Path) -> None:
    """Write the schedule, its predicted trace or its picture, by the suffix of the path."""
    if path.suffix == ".txt":
        write_whole(path, f"# {_title(report)}\n{report.schedule}\n".encode())
    elif path.suffix == ".json":
        write_trace(path, predicted, f"{_title(report)} (predicted, 1 s is one of {report.unit})")
    else:
        # a picture, .svg or .png
        facts = list(_fact_lines(report, predicted))
        panels = _timeline_panels(report, predicted)
        draw(_title(report), facts, panels).save(path)


def _timeline_panels(report: _ScheduleReport, predicted: Sequence[Span]) -> list[Panel]:
    """Return the panel of the predicted timeline and, if there is one, of the measured timeline on
    the same scale, in ms.
    """
    ranks = len(report.schedule.programs)
    headings, *rows = _rank_table(report, predicted)
    # the first two columns are the rank and its stages
    columns = list(zip(*rows, strict=True))
    facts = dict(zip(headings[2:], columns[2:], strict=True))
    if not report.measured:
        return [Panel("predicted", predicted, ranks, report.unit, facts)]
    measured = _scale_times(report.measured, 1e3)
    # the same work takes the same time on both: what differs is the waiting
    scale = _work(measured, ranks) / _work(predicted, ranks)
    waits = {"waits": [f"{share:.1%}" for share in idle(measured)]}
    predicted_title = f"predicted: bubble {bubble(predicted):.1%}"
    measured_title = f"measured: bubble {bubble(measured):.1%}"
    return [
        Panel(predicted_title, _scale_times(predicted, scale), ranks, "ms", facts),
        Panel(measured_title, measured, ranks, "ms", waits),
    ]


def _work(spans: Sequence[Span], ranks: int) -> float:
    """Return the time that all ranks compute together."""
    return sum(span.end - span.start for span in Panel("", spans, ranks).computed)


def _scale_times(spans: Sequence[Span], factor: float) -> list[Span]:
    return [span._replace(start=span.start * factor, end=span.end * factor) for span in spans]
