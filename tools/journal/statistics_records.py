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
    return {
        "event": STATISTICS,
        "step": step,
        "outcome": outcome,
        "measures": list(Moments._fields),
        OUTPUTS: {name: _rounded(size) for name, size in statistics.outputs.items()},
        **{kind: _rows(table) for kind, table in tables.items()},
    }


def _rows(table: Mapping[str, Moments]) -> dict[str, list[float]]:
    return {name: [_rounded(number) for number in moments] for name, moments in table.items()}


def _rounded(number: float) -> float:
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
        if isinstance(row, list) and len(row) > column and _is_number(row[column]):
            values[name] = float(row[column])
    return values


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(float(str(value)))
