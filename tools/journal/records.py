"""Reading metrics.jsonl, events.jsonl and the files of one kind of event: a JSON record per line.

A killed run, or a machine that lost its power, can leave a last line that is cut off. A note names
it, and the run that goes on removes it. Any other line that is not a record, or that repeats a
step, comes from a damaged disk or an editor. It stays where it is and is named in a note, and the
other lines are used.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from megaprec.durable import read_whole
from megaprec.errors import Problem
from megaprec.parsing import parse_json
from tools.console.units import enumerated

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
DIGESTS = "digests.jsonl"
EVALUATIONS = "evaluations.jsonl"
STATISTICS_FILE = "statistics.jsonl"
NO_TOKENS_EVENT = "no_tokens"
INVARIANT = "invariant"  # the kind of event of one that is broken, and the field of its step
INVARIANTS = "invariants"  # the kind of event with what is known of each
SPIKE_EVENT = "spike"  # the kind of event, and the field of its step
BRANCHED = "branched"  # the kind of event with which a branch of another run begins
INITIAL = "initial"  # the kind of event of a run that begins with weights whose model it changes
DIGEST = "digest"  # the kind of event that is written to DIGESTS
EVALUATION = "evaluation"  # the kind of event that is written to EVALUATIONS
STATISTICS = "statistics"  # the kind of event that is written to STATISTICS_FILE
SAMPLE = "sample"  # the kind of event with a text that the model has written
# by the kind of event, the files that have one kind alone
FILE_OF_EVENT = {EVALUATION: EVALUATIONS, DIGEST: DIGESTS, STATISTICS: STATISTICS_FILE}
FIRST_EVALUATION = "first_evaluation"  # the kind of event with the losses of the first weights
COLLAPSE = "router_collapse"  # the kind of event, and the field of its step
STRAGGLER = "straggler"  # the kind of event of a slow rank, and the field of a step
TOLD_WITH_STEP = (INVARIANT, SPIKE_EVENT, COLLAPSE, STRAGGLER)
"""Kinds of events whose words are in the record of their step too, in a field of this name."""
PREDICTION = "prediction"  # the kind of event with the predicted step, and the measured one
# losses on the held-out part, of the weights and of their moving average
HELD_OUT_LOSS = "eval_loss"
AVERAGE_LOSS = "eval_loss_ema"
# fields of a step that may be "inf" or "nan"
NUMBERS = (
    "loss",
    "mtp_loss",
    "z_loss",
    "grad_norm",
    "loss_scale",
    HELD_OUT_LOSS,
    AVERAGE_LOSS,
)
PADDING = "padding"  # the share of a step's tokens that are padding of packed samples
FINITE_NUMBERS = ("lr", "seconds", "tokens_per_s", PADDING)
WHOLE_NUMBERS = ("step", "first_sample", "num_samples")
TEXTS = ("outcome", "advice", "said", "why", "state", "set")
COUNTS_OF_OFFENDER = ("stage", "tp_rank", "infs", "nans", "elements")
# prefixes of fields that may be, too: losses on the sets of data.validation, of the weights and of
# their moving average, and results of the tasks of data.lm_eval, TASK/METRIC
VALIDATION_PREFIX = "eval_loss/"
AVERAGE_PREFIX = "eval_loss_ema/"
TASK_PREFIX = "lm_eval/"
SOURCE_LOSS_PREFIX = "loss/"  # of the data sets of a blend
NUMBER_PREFIXES = (VALIDATION_PREFIX, AVERAGE_PREFIX, TASK_PREFIX, SOURCE_LOSS_PREFIX)
# prefixes of fields of these data sets that are finite
SOURCE_SHARE_PREFIX = "share/"
SOURCE_TOKENS_PREFIX = "tokens/"
FINITE_PREFIXES = (SOURCE_SHARE_PREFIX, SOURCE_TOKENS_PREFIX)
# kind of event, "" for the record of a step -> required keys
REQUIRED_KEYS = {
    "": {"outcome", "loss", "grad_norm", "loss_scale"},
    "overflow": {"loss_scale", "first_sample", "num_samples", "advice", "offenders"},
    NO_TOKENS_EVENT: {"first_sample", "num_samples", "advice"},
    "fp8_shadow": {"loss_gap", "alarms", "cosines", "saturated", "underflowed"},
    "restart": {"ranks", "why", "left"},
    STRAGGLER: {"rank", "slow", "factor", "said"},
    COLLAPSE: {"layers", "used_experts", "max_load", "bound", "said"},
    "resume": {"checkpoint", "changed", "notes", "lr_before", "lr_next"},
    BRANCHED: {"checkpoint", "run", "changed", "notes", "lr_before", "lr_next"},
    INITIAL: {"weights", "changed", "notes", "lr_before", "lr_next"},
    "end": {"complete", "why", "peak_memory"},
    DIGEST: {"state", "numbers", "progress", "tensors"},
    EVALUATION: {"set", "samples", "losses", "tokens"},
    STATISTICS: {"outcome", "measures", "outputs", "weights", "gradients", "updates"},
    SAMPLE: {"text", "date"},
    FIRST_EVALUATION: {"losses"},
    PREDICTION: {"seconds", "measured", "basis", "kinds"},
    INVARIANT: {"invariant", "said"},
    INVARIANTS: {"verdicts"},
    SPIKE_EVENT: {"outcome", "first_sample", "num_samples", "said"},
    "silent_fault": {"checked_step", "kind", "what", "ranks", "hosts", "certain"},
}
LASTING = ("silent_fault",)  # kinds of events that are kept although their steps are taken again
MOST_LISTED = 5  # ranges of lines or steps that a note names at most


@dataclass(frozen=True)
class RecordLine:
    """One line of a file of records, counted from 1.

    record: None if the line is not used; "inf" and "nan" are numbers. late: its step is no later
    one than that of a line before it, which a run never writes. cut_off: the last one, which was
    not written to its end.
    """

    number: int
    content: bytes
    record: dict[str, Any] | None
    late: bool = False
    cut_off: bool = False


def read_lines(path: Path) -> list[RecordLine]:
    """Return all lines but empty ones; none if there is no file."""
    if not path.is_file():
        return []
    contents = read_whole(path).split(b"\n")  # the last is empty unless it was cut off
    lines = list[RecordLine]()
    for number, content in enumerate(contents, 1):
        record = _parse_record(content)
        is_last = number == len(contents)
        # Of a last line that is a record only the newline is missing.
        if record is not None or content.strip():
            cut_off = is_last and record is None
            lines.append(RecordLine(number, content, record, cut_off=cut_off))
    # A step has one record, but may have several events.
    if path.name == METRICS:
        return [*_without_late_records(lines)]
    return lines


def _without_late_records(lines: Sequence[RecordLine]) -> Iterator[RecordLine]:
    """Yield the lines of steps; late ones without their records, for numbers of a step count
    once.
    """
    newest = 0
    for line in lines:
        if line.record is None:
            yield line
        elif line.record["step"] <= newest:
            yield replace(line, record=None, late=True)
        else:
            newest = line.record["step"]
            yield line


def no_run(folder: Path) -> Problem:
    """Return the problem with a folder in which no run is recorded."""
    problem = f"has no steps in {METRICS}"
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
    return Problem.of("journal.no_run", folder=folder, problem=problem)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run's steps. "inf", "-inf" and "nan" are numbers again."""
    return _read_records(folder / METRICS)


def read_events(folder: Path, event_kind: str = "overflow") -> list[dict[str, Any]]:
    """Return the events of one kind of a run, oldest first."""
    return _records_of_kind(folder / EVENTS, event_kind)


def read_all_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of all kinds of a run, oldest first."""
    return _read_records(folder / EVENTS)


def read_branching(folder: Path) -> dict[str, Any] | None:
    """Return the event with which a run began as a branch of another one; None if it did not."""
    branchings = read_events(folder, BRANCHED)
    return branchings[-1] if branchings else None


def read_digests(folder: Path) -> list[dict[str, Any]]:
    """Return the digests of a run's state, oldest first; none if it has no digests.jsonl."""
    return _records_of_kind(folder / DIGESTS, DIGEST)


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a run's sets, with the losses of their samples, oldest first."""
    return _records_of_kind(folder / EVALUATIONS, EVALUATION)


def read_statistics(folder: Path) -> list[dict[str, Any]]:
    """Return the statistics of a run, oldest first; none if it has no statistics.jsonl."""
    return _records_of_kind(folder / STATISTICS_FILE, STATISTICS)


def _records_of_kind(path: Path, event_kind: str) -> list[dict[str, Any]]:
    return [record for record in _read_records(path) if record.get("event") == event_kind]


def _read_records(path: Path) -> list[dict[str, Any]]:
    return [line.record for line in read_lines(path) if line.record is not None]


def odd_lines(path: Path) -> str:
    """Return a note that names the lines that are not records, or not of a later step, or cut off;
    empty if there are none.
    """
    damaged = list[int]()
    late = list[int]()
    lines = read_lines(path)
    cut_off = describe_cut_off(lines)
    for line in lines:
        if line.late:
            late.append(line.number)
        elif line.record is None and not line.cut_off:
            damaged.append(line.number)
    problems = list[str]()
    if damaged:
        predicate = "is no record" if len(damaged) == 1 else "are no records"
        problems.append(f"{describe_numbers('line', damaged)} {predicate}")
    if late:
        verb = "is" if len(late) == 1 else "are"
        problems.append(
            f"{describe_numbers('line', late)} {verb} of no later step than those before"
        )
    if cut_off:
        problems.append(cut_off)
    if not problems:
        return ""
    # the run that goes on removes a line that is cut off
    outcome = "not used" if cut_off else "kept, not used"
    return f"{path}: {', '.join(problems)}: {outcome}"


def describe_cut_off(lines: Sequence[RecordLine]) -> str:
    """Return what is to be said of a last line that is cut off; empty if it is whole."""
    if not lines or not lines[-1].cut_off:
        return ""
    return f"line {lines[-1].number}, the last, is cut off"


def odd_records(folder: Path) -> list[str]:
    """Return a note for each file of a run, of those that verdicts are made of, that has lines that
    are not used, or that lacks steps that another one has."""
    notes = [odd_lines(folder / name) for name in (METRICS, EVENTS, EVALUATIONS)]
    notes += [_lost_end(folder), lost_evaluations(folder)]
    return [note for note in notes if note]


def _lost_end(folder: Path) -> str:
    """Return a note if the records of steps end before those of evaluations, as in a file that has
    lost its last lines; empty if they do not."""
    # read first, for a run that trains writes them last
    evaluated = [record["step"] for record in read_evaluations(folder)]
    steps = [record["step"] for record in read_metrics(folder)]
    if not evaluated or not steps or max(evaluated) <= max(steps):
        return ""
    path = folder / METRICS
    return f"{path} ends at step {max(steps):,}, and {EVALUATIONS} at step {max(evaluated):,}"


def lost_evaluations(folder: Path, last_step: int | None = None) -> str:
    """Return a note that names the steps whose evaluation is not recorded, though their records
    have its loss; empty if there are none. A run of a version without such records has no file.

    last_step: the step up to which they are looked for; None: the newest.
    """
    path = folder / EVALUATIONS
    if not path.exists():
        return ""
    recorded = {record["step"] for record in read_evaluations(folder)}
    lost = list[range]()
    for record in read_metrics(folder):
        step = record["step"]
        is_of_run = last_step is None or step <= last_step
        if HELD_OUT_LOSS in record and step not in recorded and is_of_run:
            lost.append(range(step, step + 1))
    return f"{path} has no record of {_describe_ranges('step', lost)}" if lost else ""


def lost_steps(path: Path, last_step: int = 0) -> str:
    """Return a note that names the steps without a record; empty if there are none.

    last_step: the step up to which they are looked for; 0: the newest. Those of a branch begin
        where it does.
    """
    recorded = {record["step"] for record in _read_records(path)}
    branching = read_branching(path.parent)
    start = branching["step"] if branching else 0
    if last_step:
        up_to_last = sorted(step for step in recorded if start < step <= last_step)
        borders = [start, *up_to_last, last_step + 1]
    else:
        borders = [start, *sorted(recorded)]
    gaps = list[range]()
    for step, following in pairwise(borders):
        if following > step + 1:
            gaps.append(range(step + 1, following))
    if not gaps:
        return ""
    return f"{path} has no record of {_describe_ranges('step', gaps)}"


def _parse_record(content: bytes) -> dict[str, Any] | None:
    """Return the record of a line; None if the line is not a record."""
    try:
        parsed = parse_json(content)
    except ValueError:  # not UTF-8 is a ValueError too
        return None
    if not isinstance(parsed, dict):
        return None
    record = {name: _restore_number(value) for name, value in parsed.items()}
    return record if _is_record(record) else None


def _restore_number(value: Any) -> Any:
    """Return a float for the numbers that JSON has only as text; other values as they are."""
    if isinstance(value, str) and value in ("inf", "-inf", "nan"):
        return float(value)
    return value


def _is_record(record: dict[str, Any]) -> bool:
    """Return True if a JSON object has the fields of a step's record or of its kind of event, and
    each is of the kind that a run writes there. Events of unknown kinds need a step alone."""
    event_kind = record.get("event", "")
    if "step" not in record or not isinstance(event_kind, str):
        return False
    if not REQUIRED_KEYS.get(event_kind, set()) <= record.keys():
        return False
    if not all(_is_of_kind(name, value) for name, value in record.items()):
        return False
    holds_lists = _HOLDS_LISTS.get(event_kind)
    return holds_lists is None or holds_lists(record)


def _is_of_kind(name: str, value: Any) -> bool:
    """Return True if the value of a field is of the kind that a run writes there. An editor may
    have left any other."""
    # not isinstance: true is no number
    if name in WHOLE_NUMBERS:
        return type(value) is int
    if name in FINITE_NUMBERS or name.startswith(FINITE_PREFIXES):
        return type(value) in (int, float) and isfinite(value)
    if name in NUMBERS or name.startswith(NUMBER_PREFIXES):
        return type(value) in (int, float)
    return isinstance(value, str) if name in TEXTS else True


def _has_offenders(record: Mapping[str, Any]) -> bool:
    """Return True if an overflow has a list of tables, with the fields of each."""
    offenders = record["offenders"]
    return isinstance(offenders, list) and all(map(_is_offender, offenders))


def _is_offender(offender: Any) -> bool:
    if not isinstance(offender, dict) or not isinstance(offender.get("name"), str):
        return False
    return all(type(offender.get(count)) is int for count in COUNTS_OF_OFFENDER)


def _has_digests(record: Mapping[str, Any]) -> bool:
    """Return True if a digest has texts by kind of state and name of tensor."""
    kinds = record["tensors"]
    return isinstance(kinds, dict) and all(map(_has_texts, kinds.values()))


def _has_texts(table: Any) -> bool:
    return isinstance(table, dict) and all(isinstance(text, str) for text in table.values())


def _has_losses(record: Mapping[str, Any]) -> bool:
    """Return True if an evaluation has as many losses as numbers of tokens."""
    losses = record["losses"]
    tokens = record["tokens"]
    if not isinstance(losses, list) or not isinstance(tokens, list):
        return False
    restored = map(_restore_number, (*losses, *tokens))
    are_numbers = all(type(number) in (int, float) for number in restored)
    return are_numbers and len(losses) == len(tokens)


_HOLDS_LISTS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "overflow": _has_offenders,
    DIGEST: _has_digests,
    EVALUATION: _has_losses,
}


def describe_numbers(noun: str, numbers: Sequence[int]) -> str:
    """Return ascending numbers in words: lines 3, 7 to 9 and 12."""
    ranges = list[range]()
    for number in numbers:
        if ranges and ranges[-1].stop == number:
            ranges[-1] = range(ranges[-1].start, number + 1)
        else:
            ranges.append(range(number, number + 1))
    return _describe_ranges(noun, ranges)


def _describe_ranges(noun: str, ranges: Sequence[range]) -> str:
    """Return ranges of numbers in words, the first MOST_LISTED of them and how many numbers more
    there are."""
    words = [_describe_range(numbers) for numbers in ranges[:MOST_LISTED]]
    unlisted = sum(_size(numbers) for numbers in ranges[MOST_LISTED:])
    if unlisted:
        words.append(f"{unlisted:,} more")
    if len(words) > 1 or _size(ranges[0]) > 1:
        noun += "s"
    return f"{noun} {enumerated(words)}"


def _describe_range(numbers: range) -> str:
    if _size(numbers) == 1:
        return str(numbers.start)
    return f"{numbers.start} to {numbers.stop - 1}"


def _size(numbers: range) -> int:
    # len() ends at 2^63 - 1, and a line that somebody has edited may name any step.
    return numbers.stop - numbers.start
