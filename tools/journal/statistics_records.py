"""Records of statistics.jsonl: weights, gradients and updates of a step by logical tensor, and the
size of each layer's output.

A line has a table for each kind, which gives a list of numbers by logical name, in the order of the
line's "measures". Numbers have six significant digits.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megaprec.diagnose.tensor_statistics import Moments, StepStatistics
from tools.journal.records import STATISTICS

DIGITS = 6  # significant ones
OUTPUTS = "outputs"
KINDS = ("weights", "gradients", "updates")
Record = Mapping[str, Any]


def statistics_event(statistics: StepStatistics, step: int, outcome: str) -> dict[str, Any]:
    """Return the event of a step's statistics."""
    tables = {
        "weights": statistics.weights,
        "gradients": statistics.gradients,
        "updates": statistics.updates,
    }
    outputs = {name: _rounded(size) for name, size in statistics.outputs.items()}
    rows_by_kind = {kind: _rows(table) for kind, table in tables.items()}
    return {
        "event": STATISTICS,
        "step": step,
        "outcome": outcome,
        "measures": list(Moments._fields),
        OUTPUTS: outputs,
        **rows_by_kind,
    }


def _rows(table: Mapping[str, Moments]) -> dict[str, list[float]]:
    """Return the numbers of each tensor, rounded, by logical name."""
    rows: dict[str, list[float]] = {}
    for name, moments in table.items():
        rows[name] = [_rounded(number) for number in moments]
    return rows


def _rounded(number: float) -> float:
    """Return a number with DIGITS significant digits: records are short, and read by people."""
    return float(f"{number:.{DIGITS}g}")


def measure_of(record: Record, kind: str, measure: str) -> dict[str, float]:
    """Return one measure of a kind by logical name, such as the "rms" of "weights"; for OUTPUTS
    there is one, "rms". Names without a number are left out."""
    table = record.get(kind)
    if not isinstance(table, dict):
        return {}
    if kind == OUTPUTS:
        return {name: float(size) for name, size in table.items() if _is_number(size)}
    measures = record.get("measures")
    if not isinstance(measures, Sequence) or measure not in measures:
        return {}
    column = measures.index(measure)
    values: dict[str, float] = {}
    for name, row in table.items():
        # an editor may have damaged a line
        if not isinstance(row, list) or len(row) <= column:
            continue
        number = row[column]
        if _is_number(number):
            values[name] = float(number)
    return values


def _is_number(value: object) -> bool:
    """Return True of a finite number of JSON, which True and False are not."""
    return type(value) in (int, float) and math.isfinite(float(str(value)))
