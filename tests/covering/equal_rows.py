"""The rows of the array that were equal to the oracle, with the day: what later campaigns need not
try again."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from tests.covering.array import Row
from tests.covering.options import DEFAULT

EQUAL_ROWS = Path(__file__).with_name("equal_rows.jsonl")
DAY = "day"


def equal_rows(path: Path = EQUAL_ROWS) -> Iterator[Row]:
    """Yield each row with all its options, those that have come since at their defaults."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        entries = json.loads(line)
        del entries[DAY]
        yield {**DEFAULT, **entries}


def keep_equal_row(row: Row, path: Path = EQUAL_ROWS) -> None:
    """Add a row that was equal today, without what is at its default."""
    others = {option: value for option, value in row.items() if value != DEFAULT[option]}
    day = datetime.now(UTC).date().isoformat()
    with path.open("a") as kept:
        kept.write(json.dumps({DAY: day, **others}) + "\n")
