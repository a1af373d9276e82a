"""The account of a file: every name that concerns precision is read, refused, or named in a note.

The settings of the systems' classes, dicts and variables are collected as `Saying`s, one per place
in the file. For each table of a system one saying may count: the one that is passed to a call, if
only one is, or the only one that there is. Sayings that differ are refused with their lines, and so
is a value that cannot be known. Names that no saying covers are named in a note.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megaprec.dialects.reading import UNKNOWN
from tools.foreign.mentions import Mention
from tools.foreign.plain import LAYOUT_KEYS, OPEN_KEYS, Unreadable, assuming, is_expression, plain
from tools.foreign.systems import Spot
from tools.foreign.values import Condition, Entry


@dataclass(eq=False)
class Saying:
    """A place in the file that sets keys of a table.

    name: of the object with the settings. conditions: unknown conditions that it depends on.
    handed_on: the object is passed to a call. adds: it sets single keys, which complete those of
    another place. known: key -> (value, entry), filled in by `settle`.
    """

    spot: Spot
    fields: dict[str, Entry]
    line: int
    name: str
    conditions: tuple[Condition, ...] = ()
    handed_on: bool = False
    adds: bool = False
    known: dict[str, tuple[Any, Entry]] = field(default_factory=dict)

    def content(self) -> dict[str, Any]:
        """Return keys and values, for comparison with another saying."""
        return {key: value for key, (value, _) in self.known.items()}


class Account:
    """The settings of a file, and the names that are not yet accounted for.

    where: the file, for messages. echoes: settings that something else overwrites.
    """

    def __init__(self, where: str, mentions: Iterable[Mention]) -> None:
        self.where = where
        self.left = {mention.node: mention for mention in mentions}
        self.behind: Mapping[int, int] = {}  # node -> another, which is read when it is
        self.sayings: list[Saying] = []
        self.echoes: list[Saying] = []
        self.problems: list[str] = []
        self.notes: list[str] = []

    def take(self, *nodes: int) -> None:
        """Strike mentions that were read or named."""
        for node in nodes:
            self.left.pop(node, None)
            if node in self.behind:
                self.left.pop(self.behind[node], None)

    def refuse(self, line: int, text: str) -> None:
        """Add a problem."""
        self.problems.append(f"{self.place(line)}: {text}")

    def note(self, line: int, text: str) -> None:
        """Add a note for the user."""
        self.notes.append(f"{self.place(line)}: {text}")

    def place(self, line: int) -> str:
        """Return the file, with the line if there is one."""
        return f"{self.where}, line {line}" if line else self.where

    def add(self, saying: Saying) -> None:
        """Add a saying and strike the mentions of its keys."""
        self.take(*(entry.node for entry in saying.fields.values()))
        self.sayings.append(saying)

    def settle(self) -> dict[Spot, dict[str, tuple[Any, Entry]]]:
        """Return the fields that count for each table: key -> (value, entry)."""
        fields: dict[Spot, dict[str, tuple[Any, Entry]]] = {}
        for spot in dict.fromkeys(saying.spot for saying in self.sayings):
            sayings = [saying for saying in self.sayings if saying.spot == spot]
            whole = [saying for saying in sayings if not saying.adds]
            fields[spot] = dict(self._chosen(whole)) if whole else {}
            for saying in (saying for saying in sayings if saying.adds):
                self._add_keys(fields[spot], saying)
        return fields

    def _add_keys(self, fields: dict[str, tuple[Any, Entry]], saying: Saying) -> None:
        self._read(saying, refused=True)
        for key, (value, entry) in saying.known.items():
            before = fields.setdefault(key, (value, entry))
            if before[0] != value:
                lines = f"{before[0]} in line {before[1].line}, {value} in line {entry.line}"
                self.refuse(
                    entry.line, f"{key} of {saying.name} is given twice: {lines}; keep one of them"
                )

    def _chosen(self, sayings: list[Saying]) -> dict[str, tuple[Any, Entry]]:
        handed_on = [saying for saying in sayings if saying.handed_on]
        meant = handed_on if handed_on and len(_different(handed_on)) == 1 else sayings
        for saying in sayings:
            self._read(saying, refused=saying in meant)
        different = _different(meant)
        for saying in (s for s in sayings if s not in meant and s.content() != meant[0].content()):
            self.note(saying.line, f"{saying.name} is not handed on to anything: left out")
        if len(different) > 1:
            lines = ", ".join(f"{s.name} in line {s.line}" for s in different)
            self.refuse(
                different[1].line, f"a second one, and they differ: {lines}; name one with --pick"
            )
        return different[0].known

    def _read(self, saying: Saying, refused: bool) -> None:
        """Fill in the known values of a saying."""
        for key, entry in saying.fields.items():
            try:
                saying.known[key] = (plain(entry.value), entry)
            except Unreadable as why:
                if refused:
                    self._unknown(saying, key, entry, str(why))
        if refused and saying.conditions:
            condition = saying.conditions[-1]
            why = f"depends on `{condition.text}` (line {condition.line}), which is not known"
            says = f"{assuming(condition.text, 'True')} or False says it"
            if is_expression(condition.text):
                remedy = says
            else:
                remedy = "give the part about precision alone"
            self.refuse(saying.line, f"{saying.name} {why}: {remedy}")

    def _unknown(self, saying: Saying, key: str, entry: Entry, why: str) -> None:
        if key in OPEN_KEYS | LAYOUT_KEYS:
            if (
                saying.spot[0] == "internevo"
            ):  # what is there but not known is not at its default either
                saying.known[key] = (UNKNOWN, entry)
            self.note(entry.line, f"{key} of {saying.name}: {why}: left to the run file")
        else:
            self.refuse(entry.line, f"{key} of {saying.name}: {why}")

    def close_unreached(self, unreached: Iterable[tuple[int, int, str]]) -> None:
        """Name the mentions in code that never runs."""
        for first, last, why in unreached:
            dead = [mention for mention in self.left.values() if first <= mention.line <= last]
            self.take(*(mention.node for mention in dead))
            if dead:
                self.note(
                    first, f"not reached, because {why}: {', '.join(m.text for m in dead[:3])}"
                )

    def close(self) -> None:
        """Name the mentions that are not accounted for."""
        for mention in sorted(self.left.values(), key=lambda mention: mention.line):
            self.note(
                mention.line,
                f"{mention.text}: not read, for it belongs to no configuration known here",
            )
        self.left.clear()


def _different(sayings: list[Saying]) -> list[Saying]:
    """Return the first of each group of equal sayings."""
    groups: list[Saying] = []
    for saying in sayings:
        if not any(_alike(saying, other) for other in groups):
            groups.append(saying)
    return groups


def _alike(a: Saying, b: Saying) -> bool:
    return dict(_shown(a.fields)) == dict(_shown(b.fields))


def _shown(fields: Mapping[str, Entry]) -> Iterator[tuple[str, Any]]:
    """Return fields in a form that can be compared, unknown ones by their text."""
    for key, entry in fields.items():
        try:
            yield key, plain(entry.value)
        except Unreadable as why:
            yield key, f"unknown: {why}"
