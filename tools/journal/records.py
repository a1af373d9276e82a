"""Reading metrics.jsonl, events.jsonl and digests.jsonl: a JSON record per line.

A killed run can leave a truncated last line: its step is taken again, and the line is dropped. Any
other line that is not a record, or that repeats a step, comes from a damaged disk or an editor. It
stays where it is and is named in a note, and the other lines are used.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from megaprec.durable import read_whole
from megaprec.parsing import parse_json

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
DIGESTS = "digests.jsonl"
NO_TOKENS_EVENT = "no_tokens"
DIGEST = "digest"  # the kind of event that is written to DIGESTS
# fields of a step that may be "inf" or "nan"
NUMBERS = (
    "loss",
    "mtp_loss",
    "grad_norm",
    "loss_scale",
    "eval_loss",
)
NAMED = "eval_loss/"  # prefix of fields that may be, too: losses on the sets of data.validation
# prefix of fields that may be, too: results of the tasks of data.lm_eval, TASK/METRIC
TASKS = "lm_eval/"
NEEDED = {  # kind of event, "" for the record of a step -> required keys
    "": {"outcome", "loss", "grad_norm", "loss_scale"},
    "overflow": {"loss_scale", "first_sample", "num_samples", "advice", "offenders"},
    NO_TOKENS_EVENT: {"first_sample", "num_samples", "advice"},
    "fp8_shadow": {"loss_gap", "alarms", "cosines", "saturated", "underflowed"},
    "restart": {"ranks", "why", "left"},
    "straggler": {"rank", "slow", "factor", "said"},
    "resume": {"checkpoint", "changed", "notes", "lr_before", "lr_next"},
    "end": {"complete", "why", "peak_memory"},
    DIGEST: {"state", "numbers", "progress", "tensors"},
    "silent_fault": {"checked_step", "kind", "what", "ranks", "hosts", "certain"},
}
LASTING = ("silent_fault",)  # kinds of events that are kept although their steps are taken again
SHOWN = 5  # ranges of lines or steps that a note names at most


@dataclass(frozen=True)
class Line:
    """One line of a file of records, counted from 1. record: None if the line is not used; "inf"
    and "nan" are numbers.

    late: its step is no later one than that of a line before it, which a run never writes.
    """

    number: int
    content: bytes
    record: dict[str, Any] | None
    late: bool = False


def read_lines(path: Path) -> list[Line]:
    """Return all lines but empty ones and a truncated last one; none if there is no file."""
    if not path.is_file():
        return []
    contents = read_whole(path).split(b"\n")  # the last is empty unless it was truncated
    *lines, last = [
        Line(number, content, _record(content)) for number, content in enumerate(contents, 1)
    ]
    found = [line for line in lines if line.content.strip()] + ([last] if last.record else [])
    return [*_in_order(found)] if path.name == METRICS else found


def _in_order(lines: Sequence[Line]) -> Iterator[Line]:
    """Yield the lines of steps. Those that are late have no record: numbers of a step count
    once."""
    newest = 0
    for line in lines:
        step = newest if line.record is None else line.record["step"]
        late = line.record is not None and step <= newest
        yield replace(line, record=None, late=True) if late else line
        newest = max(newest, step)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run's steps. "inf", "-inf" and "nan" are numbers again."""
    return [line.record for line in read_lines(folder / METRICS) if line.record is not None]


def read_events(folder: Path, kind: str = "overflow") -> list[dict[str, Any]]:
    """Return the events of one kind of a run, oldest first."""
    records = (line.record for line in read_lines(folder / EVENTS))
    return [record for record in records if record is not None and record.get("event") == kind]


def read_digests(folder: Path) -> list[dict[str, Any]]:
    """Return the digests of a run's state, oldest first; none if it has no digests.jsonl."""
    records = (line.record for line in read_lines(folder / DIGESTS))
    return [record for record in records if record is not None and record.get("event") == DIGEST]


def odd_lines(path: Path) -> str:
    """Return a note that names the lines that are not records, or not of a later step; empty if
    there are none."""
    unused = [line for line in read_lines(path) if line.record is None]
    odd, late = (
        [line.number for line in unused if line.late == is_late] for is_late in (False, True)
    )
    if odd:
        said = [
            f"{_stretches('line', odd)} {'is no record' if len(odd) == 1 else 'are no records'}"
        ]
    else:
        said = []
    if late:
        said.append(
            f"{_stretches('line', late)} {'is' if len(late) == 1 else 'are'} of no later step "
            "than those before"
        )
    return f"{path}: {', '.join(said)}: kept, not used" if said else ""


def lost_steps(path: Path, last: int = 0) -> str:
    """Return a note that names the steps without a record up to `last`, 0 for the newest; empty if
    there are none."""
    there = {line.record["step"] for line in read_lines(path) if line.record is not None}
    borders = [
        0,
        *sorted(step for step in there if 0 < step <= last or not last),
        last + 1 if last else 0,
    ]
    lost = [range(one + 1, other) for one, other in pairwise(borders) if other > one + 1]
    return f"{path} has no record of {_in_words('step', lost)}" if lost else ""


def _record(content: bytes) -> dict[str, Any] | None:
    """Return the record of a line; None if the line is not a record."""
    try:
        said = parse_json(content)
    except ValueError:  # not UTF-8 is a ValueError too
        return None
    if not isinstance(said, dict):
        return None
    record = {
        k: float(v) if isinstance(v, str) and v in ("inf", "-inf", "nan") else v
        for k, v in said.items()
    }
    return record if _is_record(record) else None


def _is_record(record: dict[str, Any]) -> bool:
    kind = record.get("event", "")
    if (
        type(record.get("step")) is not int
        or not isinstance(kind, str)
        or type(record.get("outcome", "")) is not str
    ):
        return False
    numbers = all(
        type(record[key]) in (int, float)
        for key in record
        if key in NUMBERS or key.startswith((NAMED, TASKS))
    )
    return numbers and NEEDED.get(kind, set()) <= record.keys()


def _stretches(what: str, numbers: Sequence[int]) -> str:
    """Return ascending numbers in words: lines 3, 7 to 9 and 12."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    return _in_words(what, [range(run[0], run[-1] + 1) for run in runs])


def _in_words(what: str, runs: Sequence[range]) -> str:
    said = [
        str(run.start) if run.stop == run.start + 1 else f"{run.start} to {run.stop - 1}"
        for run in runs
    ]
    if len(said) > SHOWN:
        said = [*said[:SHOWN], f"{sum(run.stop - run.start for run in runs[SHOWN:]):,} more"]
    one = len(said) == 1 and runs[0].stop == runs[0].start + 1
    return (
        f"{what}{'' if one else 's'} {' and '.join(filter(None, (', '.join(said[:-1]), said[-1])))}"
    )
