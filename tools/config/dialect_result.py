"""Other systems' tables of precision in a run file: their names, and what such a table says."""

from collections.abc import Iterable
from dataclasses import dataclass

from megaprec.precision.plan import PrecisionPlan

DIALECT_NAMES = ("nxd", "smp", "colossalai", "internevo", "nemo")


@dataclass(frozen=True)
class DialectResult:
    """The meaning of a dialect's table.

    plan: None if there is no such table, or none that can be read.
    notes: on how it was understood.
    """

    plan: PrecisionPlan | None = None
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def has_dialect(keys: Iterable[str]) -> bool:
    """Return True if one of the keys is a dialect's table, or is in one."""
    tables = {f"precision.{name}" for name in DIALECT_NAMES}
    return any(".".join(key.split(".")[:2]) in tables for key in keys)
