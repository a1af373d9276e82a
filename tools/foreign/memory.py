"""Assignments of a foreign file to its names, dicts and objects, which can be undone.

A branch under an unknown condition is followed, taken back, and merged with the other one. If
something unknown is written into a dict, such as a file that is loaded, the keys that it had are
doubtful; those written later are certain.
"""

from collections.abc import Callable, Hashable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

from tools.foreign.values import Condition, Entry, Table, Thing, same

_ABSENT = object()
PLACEHOLDER = "is a placeholder of documentation, read as nothing"


class Memory:
    """Writing that can be undone. replaced: entries that were overwritten. conditions: those of the
    branch."""

    def __init__(self) -> None:
        self.replaced: list[Entry] = []
        self.conditions: list[Condition] = []
        self._logs: list[
            dict[tuple[int, Hashable], tuple[MutableMapping[Hashable, Any], Hashable, Any]]
        ] = []

    def write(self, place: MutableMapping[Hashable, Any], key: Hashable, value: Any) -> None:
        """Assign place[key] such that a branch can be undone."""
        if isinstance(before := place.get(key), Entry) and before.node:
            self.replaced.append(before)
        if self._logs:
            self._logs[-1].setdefault((id(place), key), (place, key, place.get(key, _ABSENT)))
        place[key] = value

    def erase(self, place: MutableMapping[Hashable, Any], key: Hashable) -> None:
        """Remove place[key], if present, such that a branch can be undone."""
        if key in place:
            self.write(place, key, None)
            del place[key]

    def attempt(
        self, follow: Callable[[], str], condition: Condition | None
    ) -> tuple[str, dict[Any, Any]]:
        """Follow a branch and undo it. Returns the word by which it left the block, and the
        assignments of the branch.

        condition: the condition of the branch; None for a loop, which is assumed to run.
        """
        self._logs.append({})
        before = list(self.conditions)
        self.conditions += [condition] if condition else []
        left = follow()
        self.conditions = before
        log = self._logs.pop()
        written = {
            where: (place, key, place.get(key, _ABSENT)) for where, (place, key, _) in log.items()
        }
        for place, key, before in log.values():
            _restore(place, key, before)
        return left, written

    @staticmethod
    def is_new(written: tuple[MutableMapping[Hashable, Any], Hashable, Any]) -> bool:
        """Return True if the undone branch wrote something that did not exist before."""
        place, key, _ = written
        return key not in place

    def merge(self, one: Mapping[Any, Any], other: Mapping[Any, Any], condition: Condition) -> None:
        """Write the values on which two branches agree, and things that depend on the condition
        where they differ."""
        for where, (place, key, _) in {**one, **other}.items():
            now = place.get(key, _ABSENT)
            a = one.get(where, (0, 0, now))[2]
            b = other.get(where, (0, 0, now))[2]
            if a is _ABSENT and b is _ABSENT:
                self.erase(place, key)
            else:
                self.write(place, key, a if same(a, b) else either(a, b, condition, str(key)))

    def open_up(self, table: Table, by: Any) -> None:
        """Note that `by` may add keys to a table and set those that it has."""
        table.open.append(by)
        if getattr(by, "why", "") != PLACEHOLDER:
            self.doubt(table.entries, by)

    def doubt(self, place: MutableMapping[Hashable, Any], by: Any) -> None:
        """Make the entries of `place` doubtful, such that a branch can be undone."""
        for key, entry in list(place.items()):
            if self._logs:
                self._logs[-1].setdefault((id(place), key), (place, key, entry))
            place[key] = replace(entry, doubt=by)

    def merge_into(self, table: Table, other: Any) -> None:
        """Apply table.update(other); what is not known of a dict leaves the table open."""
        for by in list(other.open) if isinstance(other, Table) else [other]:
            self.open_up(table, by)
        for key, entry in other.entries.items() if isinstance(other, Table) else ():
            self.write(table.entries, key, entry)


def _restore(place: MutableMapping[Hashable, Any], key: Hashable, before: Any) -> None:
    if before is _ABSENT:
        place.pop(key, None)
    else:
        place[key] = before


def _either_items(a: tuple[Any, ...], b: tuple[Any, ...], condition: Condition) -> tuple[Any, ...]:
    """Return the common beginning of two versions of a list, and the rest as one thing."""
    shared = next(
        (i for i, pair in enumerate(zip(a, b, strict=False)) if not same(*pair)),
        min(len(a), len(b)),
    )
    return (*a[:shared], either(a[shared:] or _ABSENT, b[shared:] or _ABSENT, condition, "items"))


def either(a: Any, b: Any, condition: Condition, name: str) -> Any:
    """Return a thing that is `a` or `b`, as an entry if they are entries."""
    if isinstance(a, tuple) and isinstance(b, tuple):  # of lists that grew in one branch
        return _either_items(a, b, condition)
    entry = next((v for v in (a, b) if isinstance(v, Entry)), None)
    doubted = next((v for v in (a, b) if isinstance(v, Entry) and v.doubt is not None), None)
    if (
        doubted is not None
        and isinstance(a, Entry)
        and isinstance(b, Entry)
        and same(a.value, b.value)
    ):
        return doubted
    values = tuple(v.value if isinstance(v, Entry) else v for v in (a, b) if v is not _ABSENT)
    why = f"depends on `{condition.text}` (line {condition.line})"
    thing = Thing(name, condition.line, why, alternatives=values)
    return thing if entry is None else Entry(thing, entry.line, entry.node)
