"""Settings of precision in a file, notes and problems, and the names not yet accounted for.

For each table of a system one place in the file may count: the one that is passed to a call, if
only one is, or the only one that there is. Places that differ are refused with their lines, and so
is a value that cannot be known. Names that no setting covers are named in a note.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megaprec.dialects.reading import UNKNOWN
from megaprec.errors import Problem
from tools.interop.foreign.plain import LAYOUT_KEYS, OPEN_KEYS, Entry, Unreadable, plain
from tools.interop.foreign.precision_words import Mention

RUN_FILE = "write the precision as keys of [precision] in a run file"
Known = dict[str, tuple[Any, Entry]]
"""Key -> its value as plain data, and its place."""


@dataclass(eq=False)
class Settings:
    """A place in the file that sets keys of a table.

    name: of the object with the settings. guard: the condition that it depends on; empty for none.
    is_used: the object is passed to a call. completes: it sets single keys, which complete those of
    another place. known: filled in by `settle`.
    """

    table: str
    fields: dict[str, Entry]
    line: int
    name: str
    guard: str = ""
    is_used: bool = False
    completes: bool = False
    known: Known = field(default_factory=dict)

    @property
    def system(self) -> str:
        """The first part of the table's name."""
        return self.table.partition(".")[0]

    def named(self, key: str) -> str:
        """Return a key with the object that it belongs to; a variable is its own key."""
        return key if key == self.name else f"{key} of {self.name}"

    def content(self) -> dict[str, Any]:
        """Return keys and values for comparison, unknown ones by their reason."""
        content = dict[str, Any]()
        for key, entry in self.fields.items():
            try:
                content[key] = plain(entry.value)
            except Unreadable as reason:
                content[key] = f"unknown: {reason}"
        return content


class Findings:
    """The settings of a file. where: the file. given: keys that the command line sets itself.

    left: mentions that are not accounted for, by node. behind: node -> the one that it stands for.
    """

    def __init__(self, where: str, mentions: Iterable[Mention], given: Collection[str]) -> None:
        self.where = where
        self.given = given
        self.left = {mention.node: mention for mention in mentions}
        self.behind: Mapping[int, int] = {}
        self.settings: list[Settings] = []
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def place(self, line: int) -> str:
        """Return the file, with the line if there is one."""
        return f"{self.where}, line {line}" if line else self.where

    def refuse(self, line: int, why: str) -> None:
        """Add a problem."""
        problem = Problem.of("precision_file.refused", place=self.place(line), why=why)
        self.problems.append(problem)

    def note(self, line: int, text: str) -> None:
        """Add a note for the user."""
        self.notes.append(f"{self.place(line)}: {text}")

    def take(self, *entries: Entry) -> None:
        """Account for keys that were read or named."""
        self.take_nodes(entry.node for entry in entries)

    def take_nodes(self, nodes: Iterable[int]) -> None:
        """Account for nodes, and for what they stand for."""
        for node in nodes:
            self.left.pop(node, None)
            self.left.pop(self.behind.get(node, node), None)

    def add(self, settings: Settings) -> None:
        """Add settings and account for their keys."""
        self.take(*settings.fields.values())
        self.settings.append(settings)

    def settle(self) -> dict[str, Known]:
        """Return the keys that count for each table."""
        tables = dict[str, Known]()
        for table in dict.fromkeys(settings.table for settings in self.settings):
            every = [settings for settings in self.settings if settings.table == table]
            whole = [settings for settings in every if not settings.completes]
            tables[table] = dict(self._chosen(whole)) if whole else {}
            for settings in every:
                if settings.completes:
                    self._complete(tables[table], settings)
        return tables

    def _complete(self, known: Known, settings: Settings) -> None:
        self._read(settings)
        for key, (value, entry) in settings.known.items():
            first, place = known.setdefault(key, (value, entry))
            if first != value:
                lines = f"{first} in line {place.line}, {value} in line {entry.line}"
                text = f"{settings.named(key)} is given twice: {lines}; keep one of them"
                self.refuse(entry.line, text)

    def _chosen(self, places: list[Settings]) -> Known:
        used = [settings for settings in places if settings.is_used]
        meant = used if used and len(_different(used)) == 1 else places
        for settings in places:
            if settings in meant:
                self._read(settings)
            elif settings.content() != meant[0].content():
                self.note(settings.line, f"{settings.name} is not handed on to anything: left out")
        different = _different(meant)
        if len(different) > 1:
            lines = ", ".join(f"{one.name} in line {one.line}" for one in different)
            text = f"a second one, and they differ: {lines}; keep one of them in the file"
            self.refuse(different[1].line, text)
        return different[0].known

    def _read(self, settings: Settings) -> None:
        """Fill in the known values of settings."""
        for key, entry in settings.fields.items():
            try:
                settings.known[key] = (plain(entry.value), entry)
            except Unreadable as reason:
                self._leave_open(settings, key, entry, str(reason))
        if settings.guard:
            problem = Problem.of(
                "precision_file.conditional",
                place=self.place(settings.line),
                name=settings.name,
                guard=settings.guard,
            )
            self.problems.append(problem)

    def _leave_open(self, settings: Settings, key: str, entry: Entry, why: str) -> None:
        whole = f"precision.{settings.table}.{key}"
        if key in OPEN_KEYS | LAYOUT_KEYS:
            if settings.system == "internevo":
                # what is there but not known is not at its default either
                settings.known[key] = (UNKNOWN, entry)
            self.note(entry.line, f"{settings.named(key)}: {why}: left to the run file")
        elif whole not in self.given:
            # what is no key, such as the text of a dict, cannot be given either
            is_key = key.isidentifier()
            problem = Problem.of(
                "precision_file.unknown_value",
                place=self.place(entry.line),
                setting=settings.named(key),
                why=why,
                remedy=f"add {whole}=VALUE to the command" if is_key else RUN_FILE,
            )
            self.problems.append(problem)

    def close(self) -> None:
        """Name the mentions that are not accounted for."""
        for mention in sorted(self.left.values(), key=lambda mention: mention.line):
            why = "not read, for it belongs to no configuration known here"
            self.note(mention.line, f"{mention.text}: {why}")
        self.left.clear()


def _different(places: list[Settings]) -> list[Settings]:
    """Return the first of each group of equal settings."""
    contents = [settings.content() for settings in places]
    return [one for index, one in enumerate(places) if contents.index(contents[index]) == index]
