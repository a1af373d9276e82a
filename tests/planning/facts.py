"""What is known of the software of a published run: its facts, each with a source or a reason why
it is assumed.

A fact of `published.toml` holds for the runs of a software, and of these for one GPU or for the
runs whose ids begin with one of `runs`, if it says so. Of several that hold for a run the last one
counts, so an exception follows its rule.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# What each kind of fact may be; None: a positive number. `Published` makes predictions of them.
KINDS: Mapping[str, tuple[str, ...] | None] = {
    "attention": ("cuDNN", "flash", "flex", "unfused"),
    "compile": ("block", "leaves", "off"),
    "overlap": ("all", "backward", "none"),
    "rows": ("each", "machine"),
    "bandwidth": None,
}
# Without a fact of these kinds a run has what its data sheet says.
OF_THE_SHEET = ("bandwidth",)
# A run without such traffic has no fact about it. Axes that send it, by kind:
OF_TRAFFIC: Mapping[str, tuple[str, ...]] = {
    "overlap": ("tensor", "context", "expert"),
    "rows": ("expert",),
}


class FactError(Exception):
    """A fact that is not one, or a run without a fact."""


@dataclass(frozen=True)
class Fact:
    """A fact of a software.

    value: of `KINDS`.
    source: a repository, its commit and a file, or a paper; empty if the fact is assumed.
    assumed: why it is taken to be so without a source; empty if there is one.
    gpu, runs: that it holds for; empty: for all of the software.
    """

    software: str
    kind: str
    value: str | float
    source: str = ""
    assumed: str = ""
    gpu: str = ""
    runs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        name = f"{self.software}, {self.kind}"
        if self.kind not in KINDS:
            raise FactError(f"{name}: no such kind; there are {', '.join(KINDS)}")
        if bool(self.source) == bool(self.assumed):
            raise FactError(f"{name}: give it a source, or say why it is assumed")
        words = KINDS[self.kind]
        if words is None:
            is_known = isinstance(self.value, float | int) and self.value > 0
        else:
            is_known = self.value in words
        if not is_known:
            raise FactError(f"{name}: {self.value!r} is not a value of this kind")

    def holds_for(self, row: Mapping[str, Any]) -> bool:
        """Return True if the fact is one of a run."""
        is_of_software = row["stack"] == self.software
        is_of_gpu = not self.gpu or row["gpu"] == self.gpu
        is_of_run = not self.runs or row["id"].startswith(self.runs)
        return is_of_software and is_of_gpu and is_of_run


@dataclass(frozen=True)
class Doubt:
    """Why the speed of some runs may not be that of their layout alone.

    runs: what their ids begin with.
    source: as of a fact; empty if the reason is what the table itself says of them.
    """

    runs: tuple[str, ...]
    why: str
    source: str = ""

    def holds_for(self, row: Mapping[str, Any]) -> bool:
        """Return True if a run is in this doubt."""
        return row["id"].startswith(self.runs)


def read_doubts(rows: Sequence[Mapping[str, Any]]) -> tuple[Doubt, ...]:
    """Return the doubts of a table's rows."""
    return tuple(Doubt(**{**row, "runs": tuple(row["runs"])}) for row in rows)


def read_facts(rows: Sequence[Mapping[str, Any]]) -> tuple[Fact, ...]:
    """Return the facts of a table's rows. Raises FactError for one that is none."""
    facts: list[Fact] = []
    for row in rows:
        facts.append(Fact(**{**row, "runs": tuple(row.get("runs", ()))}))
    return tuple(facts)


def facts_of(row: Mapping[str, Any], facts: Sequence[Fact]) -> dict[str, Fact]:
    """Return the facts of a run by kind. Raises FactError if it lacks one."""
    found = {fact.kind: fact for fact in facts if fact.holds_for(row)}
    for kind in KINDS:
        if kind not in found and _is_needed(kind, row):
            raise FactError(f"{row['id']}: {row['stack']} has no fact of {kind}")
    return found


def _is_needed(kind: str, row: Mapping[str, Any]) -> bool:
    """Return True if a run must say it."""
    if kind in OF_THE_SHEET:
        return False
    if kind in OF_TRAFFIC:
        return any(row["layout"][axis] > 1 for axis in OF_TRAFFIC[kind])
    return True


def unused(facts: Sequence[Fact], rows: Sequence[Mapping[str, Any]]) -> Iterator[Fact]:
    """Yield the facts that hold for no run, or always give way to a later one."""
    used = [fact for row in rows for fact in facts_of(row, facts).values()]
    for fact in facts:
        if fact not in used:
            yield fact
