"""Settings of precision in a file, notes and problems, and the names not yet accounted for.

For each table of a system one place in the file counts. Places that differ are refused with their
lines, and so is a value that cannot be known. Names that no setting covers are named in a note.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megaprec.dialects.reading import UNKNOWN
from megaprec.errors import Problem
from tools.interop.foreign.plain import (
    LAYOUT_KEYS,
    OPEN_KEYS,
    DictEntry,
    Fields,
    Unreadable,
    items_of,
    plain,
)
from tools.interop.foreign.precision_words import Mention

RUN_FILE = "write the precision as keys of [precision] in a run file"
# Key -> its value as plain data, and its place
Known = dict[str, tuple[Any, DictEntry]]


@dataclass(frozen=True)
class FoundSettings:
    """A place in the file that sets keys of a table.

    name: of the object with the settings. completes: it sets single keys, which complete those of
    another place.
    """

    table: str
    fields: Mapping[str, DictEntry]
    line: int
    name: str
    completes: bool = False

    @property
    def system(self) -> str:
        """The first part of the table's name."""
        return self.table.partition(".")[0]


class Findings:
    """The settings of a file. where: the file. given: keys that the command line sets itself.

    mentions: names that concern precision. taken: what is accounted for.
    """

    def __init__(self, where: str, mentions: Iterable[Mention], given: Collection[str]) -> None:
        self.where = where
        self.given = given
        self.mentions = [*mentions]
        self.taken: list[DictEntry] = []
        self.settings: list[FoundSettings] = []
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def place(self, line: int) -> str:
        """Return the file, with the line if there is one."""
        return f"{self.where}, line {line}" if line else self.where

    def refuse(self, line: int, why: str) -> None:
        """Refuse what is known."""
        problem = Problem.of("precision_file.refused", place=self.place(line), why=why)
        self.problems.append(problem)

    def refuse_unknown(self, line: int, setting: str, why: str, remedy: str = RUN_FILE) -> None:
        """Refuse what cannot be known without running the file."""
        place = self.place(line)
        problem = Problem.of(
            "precision_file.unknown_value", place=place, setting=setting, why=why, remedy=remedy
        )
        self.problems.append(problem)

    def note(self, line: int, text: str) -> None:
        """Add a note for the user."""
        self.notes.append(f"{self.place(line)}: {text}")

    def take(self, *entries: DictEntry) -> None:
        """Account for keys that were read or named, with all that they hold."""
        self.taken += entries

    def add(self, settings: FoundSettings) -> None:
        """Add settings and account for their keys."""
        self.take(*settings.fields.values())
        self.settings.append(settings)

    def settle(self) -> dict[str, Known]:
        """Return the keys that count for each table. Two places that set a table, or a key,
        differently are refused."""
        tables = dict[str, Known]()
        first = dict[str, FoundSettings]()  # that set each table
        # what completes others comes after them
        in_order = sorted(self.settings, key=lambda settings: settings.completes)
        for settings in in_order:
            table = settings.table
            known = self._known(settings)
            if settings.completes:
                completed = tables.setdefault(table, {})
                self._complete(completed, known, settings)
            elif table not in tables:
                tables[table] = known
                first[table] = settings
            elif _values(known) != _values(tables[table]):
                earlier = first[table]
                place = f"{earlier.name} in line {earlier.line}"
                second_place = f"{settings.name} in line {settings.line}"
                places = f"{place}, {second_place}"
                text = f"a second one, and they differ: {places}; keep one of them in the file"
                self.refuse(settings.line, text)
        return tables

    def _complete(self, known: Known, more: Known, settings: FoundSettings) -> None:
        """Add the keys of `more`, which are those of `settings`; one that `known` has with another
        value is refused."""
        for key, (value, entry) in more.items():
            first_value, first_entry = known.setdefault(key, (value, entry))
            if first_value != value:
                name = _named(settings, key)
                lines = f"{first_value} in line {first_entry.line}, {value} in line {entry.line}"
                why = f"{name} is given twice: {lines}; keep one of them"
                self.refuse(entry.line, why)

    def _known(self, settings: FoundSettings) -> Known:
        """Return the values of settings; one that is not known is refused or left open."""
        known = Known()
        for key, entry in settings.fields.items():
            try:
                value = plain(entry.value)
            except Unreadable as reason:
                known |= self._left_open(settings, key, entry, str(reason))
            else:
                known[key] = (value, entry)
        return known

    def _left_open(self, settings: FoundSettings, key: str, entry: DictEntry, why: str) -> Known:
        """Note or refuse a key whose value is not known; return what stands for it, if anything."""
        name = _named(settings, key)
        whole = f"precision.{settings.table}.{key}"
        if key in OPEN_KEYS | LAYOUT_KEYS:
            self.note(entry.line, f"{name}: {why}: left to the run file")
            # what is there but not known is not at its default either
            return {key: (UNKNOWN, entry)} if settings.system == "internevo" else {}
        if whole not in self.given:
            # what is no key, such as the text of a dict, cannot be given either
            remedy = f"add {whole}=VALUE to the command" if key.isidentifier() else RUN_FILE
            self.refuse_unknown(entry.line, name, why, remedy)
        return {}

    def close(self) -> None:
        """Name the mentions that are not accounted for."""
        # ids of the syntax nodes, and of the dicts and calls, that are accounted for
        nodes = set[int]()
        objects = set[int]()
        for entry in self.taken:
            # what it holds is added to what is gone through
            nodes.add(entry.node)
            for value in items_of(entry.value):
                if isinstance(value, Fields) and id(value) not in objects:
                    objects.add(id(value))
                    nodes.add(getattr(value, "node", 0))
                    self.taken += value.entries.values()
        by_line = sorted(self.mentions, key=lambda mention: mention.line)
        for mention in by_line:
            # or it is a name for what is read
            values = items_of(mention.value)
            is_read = any(id(value) in objects for value in values)
            if mention.node not in nodes and not is_read:
                why = "not read, for it belongs to no configuration known here"
                self.note(mention.line, f"{mention.text}: {why}")


def _named(settings: FoundSettings, key: str) -> str:
    """Return a key with the object that it belongs to; a variable is its own key."""
    return key if key == settings.name else f"{key} of {settings.name}"


def _values(known: Known) -> dict[str, Any]:
    """Return the values alone, without their places."""
    return {key: value for key, (value, _) in known.items()}
