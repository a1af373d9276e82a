"""The lines of JSON that `python -m tools.bench gpu` writes and goes on from.

    {"measurement": NAME, "at": TIME, "on": DEVICE, ...}

CALL begins a call: `machine` has its facts. A measurement has any number of records, and as its
last one `done`, `refused` with the reason, or `cut` if the call was over first. A file of laws has
a record for each test.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.bench.gpu_plan import LAWS, Measurement

Record = dict[str, Any]
CALL = "call"
LABELS = ("measurement", "at", "on")  # what every record has
# of these nothing is a failure of megaprec: they need what is not everywhere
MAY_BE_ABSENT = ("torch", "Megatron-core", "Transformer Engine", "fused gathers")


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record to the file, as one line."""
    written = path.read_bytes() if path.is_file() else b""
    with path.open("a", encoding="utf-8") as file:
        # a machine that went away may have left half a line
        if written and not written.endswith(b"\n"):
            file.write("\n")
        file.write(f"{json.dumps(record)}\n")


def read_records(path: Path, device: str = "") -> list[Record]:
    """Return the newest records of each measurement and of each test on a device. device: "" for
    that of the newest call."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    records: list[Record] = []
    for line in text.splitlines():
        record = record_of(line)
        if record and "on" in record:
            records.append(record)
    if not device and records:
        newest_record = records[-1]
        device = newest_record["on"]
    # another card's numbers are none of this one's
    of_device = [record for record in records if record["on"] == device]
    # lines are in the order of time: of several the last one stays
    newest_time = {_subject(record): record["at"] for record in of_device}
    return [record for record in of_device if record["at"] == newest_time[_subject(record)]]


def record_of(line: str) -> Record | None:
    """Return the record of a line; None of any other line, and of one that was cut off."""
    if not line.startswith("{"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _subject(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return measurement and test of a record, whose newest record takes the place of older
    ones."""
    return record["measurement"], record.get("test", "")


def to_take(
    planned: Sequence[Measurement], records: Iterable[Mapping[str, Any]]
) -> list[Measurement]:
    """Return the measurements that have not come to an end, in the order of `planned`. One that was
    cut is taken again."""
    ended: set[str] = set()
    for record in records:
        if "done" in record or "refused" in record:
            ended.add(record["measurement"])
    return [measurement for measurement in planned if measurement.name not in ended]


def tests_of(file: str, records: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the tests of a file of laws whose outcome is known."""
    of_file = [record for record in records if record["measurement"] == file]
    return {record["test"] for record in of_file if "test" in record}


def machine_of(records: Iterable[Mapping[str, Any]]) -> Mapping[str, str]:
    """Return the facts of the newest call's machine."""
    facts: Mapping[str, str] = {}
    for record in records:
        facts = record.get("machine", facts)
    return facts


def describe_failures(records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each test that has failed, and for each measurement of megaprec that could
    not be taken."""
    for record in records:
        if _has_failed(record):
            yield f"{record['test']} {record['outcome']}"
        elif is_failure(record):
            yield f"{record['measurement']}: {record['refused']}"


def _has_failed(record: Mapping[str, Any]) -> bool:
    """Return True of the record of a test that has failed."""
    outcome = str(record.get("outcome", ""))
    return outcome.startswith("failed")


def is_failure(record: Mapping[str, Any]) -> bool:
    """Return True if a measurement of megaprec was refused."""
    return "refused" in record and not record["measurement"].startswith(MAY_BE_ABSENT)


def to_repeat(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of measurements of which something has failed."""
    names: dict[str, None] = {}  # in order, each once
    for record in records:
        if _has_failed(record) or is_failure(record):
            names[record["measurement"]] = None
    return list(names)


def is_law(name: str) -> bool:
    """Return True of the name of a file of laws."""
    return name.startswith(LAWS)
