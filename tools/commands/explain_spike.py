"""`megaprec explain-spike RUN_DIR`: name the steps whose loss or gradient norm jumped, and the
likely cause.

A spike is a step whose loss or gradient norm is far above the band of the steps before
(docs/spikes.md has the rule). Each of the newest spikes, or the step of --step, is repeated on one
process from the last checkpoint before it. The samples that stand out are named with their
documents, and the tensors that are larger than in ordinary steps. The causes are judged: the data,
the learning rate, the batch, or a fault of the hardware. Each is proven, wrong or not tried.
Nothing is written.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megaprec.errors import UserError
from tools.config.run_file import saved_run
from tools.console.json_output import add_json, print_result
from tools.console.tables import table_console
from tools.console.units import counted, enumerated
from tools.inference.generation import escape_control_characters
from tools.journal.records import METRICS, no_run, odd_lines, read_metrics
from tools.verify.replay.repeated_run import SavedRun
from tools.verify.replay.spike_causes import Cause, causes_not_tried, judge, likely
from tools.verify.replay.spike_measures import NamedSample
from tools.verify.replay.spike_replay import Examination, MovedTensor, examine, steps_to_repeat
from tools.verify.replay.spikes import FoundSpikes, RecordedSpike, find_spikes, recorded_step

MOST_STEPS = 500  # that are repeated unless --repeat asks for more
MOST_LISTED = 20  # rows of the table of spikes
MOST_DOCUMENTS = 3  # of a sample that are shown


@dataclass(frozen=True)
class Explained:
    """A spike with the verdicts on its causes. seen: None if it was not repeated."""

    spike: RecordedSpike
    causes: Sequence[Cause]
    seen: Examination | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `explain-spike`."""
    parser.description = __doc__
    parser.add_argument("folder", metavar="RUN_DIR", type=Path, help="run folder")
    parser.add_argument(
        "--step", type=int, metavar="N", help="explain this step, whether it is a spike or not"
    )
    parser.add_argument(
        "--last",
        type=int,
        default=3,
        metavar="N",
        help="number of newest spikes to explain (default: 3)",
    )
    parser.add_argument(
        "--repeat",
        type=int,
        default=MOST_STEPS,
        metavar="N",
        help=f"most steps to repeat before a spike (default: {MOST_STEPS})",
    )
    parser.add_argument(
        "--list", action="store_true", help="name the spikes alone, and repeat no step"
    )
    add_json(parser)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec explain-spike`. Raises UserError if RUN_DIR is not a run folder, if it has no
    record of --step, or if --last or --repeat is below 1."""
    folder: Path = args.folder
    if args.last < 1:
        raise UserError.of("command.last", last=args.last)
    if args.repeat < 1:
        raise UserError.of("command.repeat", repeat=args.repeat)
    if not (folder / METRICS).is_file():
        raise UserError(no_run(folder))
    records = read_metrics(folder)
    found = find_spikes(records)
    chosen = _chosen(found, records, args)
    notes = [*_notes(folder, found)]
    # before the repetitions, which take a while
    if not args.json:
        _show_found(folder, found, notes)
    explained = list[Explained]()
    if not args.list:
        explained = [*_explain(folder, chosen, records, args.repeat)]
    document = {
        "notes": notes,
        "judged": found.judged,
        "spikes": [_spike_fields(spike) for spike in found.spikes],
        "explained": [_document(explained_spike) for explained_spike in explained],
    }

    def show() -> None:
        console = table_console()
        for explained_spike in explained:
            _show(console, explained_spike)

    return print_result(args, lambda: document, show)


def _chosen(
    found: FoundSpikes, records: Sequence[Mapping[str, Any]], args: argparse.Namespace
) -> Sequence[RecordedSpike]:
    """Return the spikes to explain: the last ones, or the step of --step, spike or not. Raises
    UserError if that step has no finite record."""
    if args.step is None:
        return found.spikes[-args.last :]
    for spike in found.spikes:
        if spike.step == args.step:
            return [spike]
    if args.step in found.not_finite:
        raise UserError.of("command.spike_not_finite", step=args.step, folder=args.folder)
    recorded = recorded_step(records, args.step)
    if recorded is None:
        raise UserError.of("command.spike_no_record", step=args.step, folder=args.folder)
    return [recorded]


def _notes(folder: Path, found: FoundSpikes) -> Iterator[str]:
    """Yield notes on lines that could not be read, and on steps that were not finite."""
    if note := odd_lines(folder / METRICS):
        yield note
    if found.not_finite:
        steps = counted(len(found.not_finite), "step")
        yield f"{steps} were not finite: megaprec explain-overflow {folder} is about these"


def _explain(
    folder: Path,
    spikes: Sequence[RecordedSpike],
    records: Sequence[Mapping[str, Any]],
    most_steps: int,
) -> Iterator[Explained]:
    """Yield the spikes with the verdicts on their causes."""
    if not spikes:
        return
    by_step = {record["step"]: record for record in records}
    try:
        run = SavedRun.open(folder, saved_run(folder), by_step)
    except UserError as error:
        for spike in spikes:
            yield Explained(spike, causes_not_tried(str(error)), None)
        return
    for spike in spikes:
        yield _explain_one(run, spike, most_steps)


def _explain_one(run: SavedRun, spike: RecordedSpike, most_steps: int) -> Explained:
    """Repeat the step of a spike and judge its causes; without a repetition each cause is "not
    tried", with the reason. most_steps: that may be repeated before it."""
    if not spike.numbers.in_loss and not spike.numbers.in_norm:
        reason = "loss and gradient norm are inside of their bands, or have none yet"
        return Explained(spike, causes_not_tried(reason), None)
    try:
        needed = steps_to_repeat(run, spike.step)
        if needed > most_steps:
            reason = (
                f"{needed:,} steps lie between the newest state before it and the spike: give "
                f"--repeat {needed}, or keep more checkpoints (checkpoint.every, checkpoint.keep)"
            )
            return Explained(spike, causes_not_tried(reason), None)
        seen = examine(run, spike, most_steps)
    except UserError as error:
        return Explained(spike, causes_not_tried(str(error)), None)
    return Explained(spike, judge(spike, seen), seen)


def _spike_fields(spike: RecordedSpike) -> dict[str, Any]:
    """Return a spike for programs, with the limits of its band and what is usual."""
    numbers = spike.numbers
    return {
        "step": spike.step,
        "steps": spike.steps,
        "outcome": spike.outcome,
        "loss": numbers.loss,
        "loss_limit": numbers.limits.loss,
        "grad_norm": numbers.norm,
        "norm_limit": numbers.limits.norm,
        "lr": spike.lr,
        "usual_lr": spike.usual_lr,
        "tokens": spike.tokens,
        "usual_tokens": spike.usual_tokens,
    }


def _document(explained: Explained) -> dict[str, Any]:
    """Return an explained spike for programs. replay: null if no step was repeated."""
    seen = explained.seen
    return {
        **_spike_fields(explained.spike),
        "cause": likely(explained.causes),
        "causes": [asdict(cause) for cause in explained.causes],
        "replay": None if seen is None else _replay_fields(seen),
    }


def _replay_fields(seen: Examination) -> dict[str, Any]:
    """Return what the repetition of a spike has shown, for programs."""
    return {
        "start": seen.start,
        "repeated": seen.repeated,
        "layout": seen.layout,
        **seen.again._asdict(),
        "departed": seen.departed,
        "other_batches": [numbers._asdict() for numbers in seen.others],
        "outliers": [asdict(sample) for sample in seen.outliers],
        "highest": [asdict(sample) for sample in seen.highest],
        "without_outliers": None if seen.left_out is None else seen.left_out._asdict(),
        "first_moved": [_tensor_fields(tensor) for tensor in seen.first_moved],
        "gradients": [_tensor_fields(tensor) for tensor in seen.gradients],
        "compared_with": seen.compared_with,
    }


def _tensor_fields(tensor: MovedTensor) -> dict[str, Any]:
    return {**tensor._asdict(), "factor": tensor.factor}


def _show_found(folder: Path, found: FoundSpikes, notes: Sequence[str]) -> None:
    """Print the notes and the table of all spikes."""
    for note in notes:
        print(f"note       {note}")
    judged = f"{counted(found.judged, 'step')} judged"
    if not found.judged:
        print(f"{folder}: no step is judged: a band takes 32 applied steps before it")
        return
    if not found.spikes:
        print(f"{folder}: no spike in {judged}")
        return
    console = table_console()
    print(f"{folder}: {counted(len(found.spikes), 'spike')} in {judged}")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    columns = ("step", "outcome", "loss", "its limit", "gradient norm", "its limit", "lr", "tokens")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    shown = found.spikes[-MOST_LISTED:]
    if len(shown) < len(found.spikes):
        table.caption = f"and {len(found.spikes) - len(shown)} before them: --json has all"
    for spike in shown:
        table.add_row(*_cells(spike))
    console.print(table)


def _cells(spike: RecordedSpike) -> Iterator[Text]:
    """Yield the cells of a spike; what has left its band is bold."""
    numbers = spike.numbers
    last = spike.step + spike.steps - 1
    yield Text(f"{spike.step}" if spike.steps == 1 else f"{spike.step} to {last}")
    yield Text(spike.outcome)
    yield Text(f"{numbers.loss:.4f}", "bold" if numbers.in_loss else "")
    yield Text(f"{numbers.limits.loss:.4f}")
    yield Text(f"{numbers.norm:.3g}", "bold" if numbers.in_norm else "")
    yield Text(f"{numbers.limits.norm:.3g}")
    yield Text(f"{spike.lr:.3g}")
    yield Text(f"{spike.tokens:,}")


def _show(console: Console, explained: Explained) -> None:
    """Print what is known of a spike."""
    spike = explained.spike
    console.print()
    console.print(Text(f"step {spike.step}: {_cause_in_words(explained)}", style="bold"))
    _show_causes(console, explained.causes)
    if explained.seen is None:
        return
    seen = explained.seen
    console.print(_origin(seen), highlight=False)
    if seen.highest:
        title = "samples that stand out" if seen.outliers else "samples of the highest loss"
        console.print(f"\n{title}, of {seen.highest[0].dataset}", highlight=False)
        console.print(_sample_table(seen.highest))
    compared = f"against {seen.compared_with}"
    if seen.first_moved:
        title = f"tensors of a micro-batch that moved, in the order of computation, {compared}"
        console.print(f"\n{title}", highlight=False)
        console.print(_tensor_table("largest magnitude", seen.first_moved))
    if seen.gradients:
        title = f"gradients that moved most, {compared}"
        console.print(f"\n{title}", highlight=False)
        console.print(_tensor_table("norm", seen.gradients))


def _show_causes(console: Console, causes: Sequence[Cause]) -> None:
    """Print the verdict on each cause; a single line, if none was tried, all for one reason."""
    evidences = {cause.evidence for cause in causes}
    if len(evidences) == 1 and causes[0].verdict == "not tried":
        names = ", ".join(cause.name for cause in causes)
        console.print(Text(f"not tried ({names}): {causes[0].evidence}"))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for cause in causes:
        table.add_row(cause.name, cause.verdict, Text(cause.evidence))
    console.print(table)


def _cause_in_words(explained: Explained) -> str:
    """Return the likely cause of a spike, with the samples that stand out if it is the data."""
    cause = likely(explained.causes)
    if cause == "data" and explained.seen is not None:
        ids = [str(sample.id) for sample in explained.seen.outliers]
        return f"the data, {counted(len(ids), 'sample')} {enumerated(ids)}"
    words = {
        "data": "the data",
        "learning rate": "the learning rate",
        "batch": "the batch as a whole",
        "hardware": "a fault of the hardware, for the same step repeated is ordinary",
    }
    return words.get(cause, "the cause is not known")


def _origin(seen: Examination) -> str:
    """Return from which state the step was repeated, and that of one process, in words."""
    start = seen.start or "the initial weights"
    line = f"repeated from {start}, {counted(seen.repeated, 'step')} before it"
    if seen.layout:
        line += f"; the run was on {seen.layout}, this is one process: the same but for rounding"
    return line


def _sample_table(samples: Sequence[NamedSample]) -> Table:
    """Return the table of samples, a row for each of their documents."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("sample", justify="right")
    table.add_column("loss", justify="right")
    table.add_column("document", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("loss", justify="right")
    table.add_column("begins with", overflow="fold")
    for sample in samples:
        name = str(sample.id)
        loss = f"{sample.loss:.4g}"
        for document in sample.documents[:MOST_DOCUMENTS]:
            table.add_row(
                name,
                loss,
                str(document.number),
                str(document.tokens),
                f"{document.loss:.4g}",
                Text(escape_control_characters(document.text)),
            )
            # further documents stand below the first, without repetition
            name = ""
            loss = ""
    return table


def _tensor_table(measure: str, tensors: Sequence[MovedTensor]) -> Table:
    """Return the table of tensors: their size in the spike and in ordinary steps, and the ratio.

    measure: what the size is, such as "norm".
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("tensor", overflow="fold")
    table.add_column(measure, justify="right")
    table.add_column("ordinary", justify="right")
    table.add_column("times", justify="right")
    for tensor in tensors:
        table.add_row(
            tensor.what,
            f"{tensor.spiking:.3g}",
            f"{tensor.ordinary:.3g}",
            f"{tensor.factor:.3g}",
        )
    return table
