"""One JSON document in place of the tables of a command."""

import argparse
import json
import math
from collections.abc import Callable
from typing import Any


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json` to a command that prints a table."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document in place of tables and lines"
    )


def print_result(
    args: argparse.Namespace, document: Callable[[], dict[str, Any]], show: Callable[[], object]
) -> int:
    """Print `document` as the only line on stdout if `--json` is given, otherwise call `show`.
    Returns exit code 0.

    Numbers that are not finite become the strings "inf", "-inf" and "nan", as in metrics.jsonl.
    """
    if args.json:
        print(to_json(document()))
    else:
        show()
    return 0


def to_json(record: dict[str, object]) -> str:
    """Return one line of strict JSON; inf and NaN, which JSON lacks, become the strings "inf",
    "-inf" and "nan"."""
    return json.dumps(_spell_nonfinite(record), allow_nan=False)


def _spell_nonfinite(value: object) -> object:
    """Return a value whose numbers that are not finite, also inside tables and lists, are text."""
    if isinstance(value, dict):
        return {key: _spell_nonfinite(nested) for key, nested in value.items()}
    if isinstance(value, list | tuple):
        return [_spell_nonfinite(nested) for nested in value]
    # Python would write NaN and Infinity, which other readers of JSON refuse
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
