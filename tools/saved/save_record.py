"""Damage of the record of saves beside checkpoints, in words."""

from pathlib import Path

from megaprec.checkpoint.keeping import RECORD, damage_of_record
from tools.journal.records import describe_numbers


def odd_saves(folder: Path) -> str:
    """Return a note about what cannot be read in the record of saves in a folder of checkpoints;
    empty if all can."""
    problem, damaged = damage_of_record(folder)
    if problem:
        return f"{problem}: saves remove no checkpoint there, and none is known as the best"
    if not damaged:
        return ""
    predicate = "is no record of a save" if len(damaged) == 1 else "are no records of saves"
    lines = describe_numbers("line", damaged)
    consequence = "a checkpoint without a record is never removed, and never the best"
    return f"{folder / RECORD}: {lines} {predicate}: kept, not used; {consequence}"
