"""Reading metrics.jsonl, events.jsonl and digests.jsonl: a JSON record per line.

A killed run can leave a truncated last line: its step is taken again, and the line is dropped. Any other line that is
not a record comes from a damaged disk or an editor. It stays where it is and is named in a note, and the other lines
are used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from megaprec.durable import read_whole
from megaprec.parsing import parse_json

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
DIGESTS = "digests.jsonl"
DIGEST = "digest"  # the kind of event that is written to DIGESTS
NUMBERS = ("loss", "mtp_loss", "grad_norm", "loss_scale", "eval_loss")  # fields of a step that may be "inf" or "nan"
NAMED = "eval_loss/"  # prefix of fields that may be, too: losses on the sets of data.validation
TASKS = "lm_eval/"  # prefix of fields that may be, too: results of the tasks of data.lm_eval, TASK/METRIC
NEEDED = {  # kind of event, "" for the record of a step -> required keys
    "": {"outcome", "loss", "grad_norm", "loss_scale"},
    "overflow": {"loss_scale", "first_sample", "num_samples", "advice", "offenders"},
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
    """One line of a file of records, counted from 1. record: None if the line is not a record; "inf" and "nan" are
    numbers.
    """

    number: int
    content: bytes
    record: dict[str, Any] | None


def read_lines(path: Path) -> list[Line]:
    """Return all lines but empty ones and a truncated last one; none if there is no file."""
    if not path.is_file():
        return []
    contents = read_whole(path).split(b"\n")  # the last is empty unless it was truncated
    *lines, last = [Line(number, content, _record(content)) for number, content in enumerate(contents, 1)]
    return [line for line in lines if line.content.strip()] + ([last] if last.record else [])


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
    """Return a note that names the lines that are not records; empty if there are none."""
    odd = [line.number for line in read_lines(path) if line.record is None]
    if not odd:
        return ""
    return f"{path}: {_stretches('line', odd)} {'is no record' if len(odd) == 1 else 'are no records'}: kept, not used"


def lost_steps(path: Path, last: int) -> str:
    """Return a note that names the steps from 1 to `last` without a record; empty if there are none."""
    there = {line.record["step"] for line in read_lines(path) if line.record is not None}
    lost = [step for step in range(1, last + 1) if step not in there]
    return f"{path} has no record of {_stretches('step', lost)}" if lost else ""


def _record(content: bytes) -> dict[str, Any] | None:
    """Return the record of a line; None if the line is not a record."""
    try:
        said = parse_json(content)
    except ValueError:  # not UTF-8 is a ValueError too
        return None
    if not isinstance(said, dict):
        return None
    record = {k: float(v) if isinstance(v, str) and v in ("inf", "-inf", "nan") else v for k, v in said.items()}
    return record if _is_record(record) else None


def _is_record(record: dict[str, Any]) -> bool:
    kind = record.get("event", "")
    if type(record.get("step")) is not int or not isinstance(kind, str):
        return False
    numbers = all(
        isinstance(record[key], int | float) for key in record if key in NUMBERS or key.startswith((NAMED, TASKS))
    )
    return numbers and NEEDED.get(kind, set()) <= record.keys()


def _stretches(what: str, numbers: Sequence[int]) -> str:
    """Return ascending numbers in words: lines 3, 7 to 9 and 12."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    said = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    if len(said) > SHOWN:
        said = [*said[:SHOWN], f"{sum(map(len, runs[SHOWN:])):,} more"]
    return f"{what}{'' if len(numbers) == 1 else 's'} {' and '.join(filter(None, (', '.join(said[:-1]), said[-1])))}"
