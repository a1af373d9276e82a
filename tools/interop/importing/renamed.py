"""Settings of a system that has Megatron-LM's arguments under names of its own."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megaprec.errors import Problem, did_you_mean
from tools.interop.arguments.megatron import READ
from tools.interop.importing.arguments import Arguments
from tools.interop.importing.read_arguments import read_table

WHOLE = ("size", "count", "int")  # kinds of arguments
WITH_EXPONENT = re.compile(r"\d+(?:\.\d*)?[eE]\+?\d{1,2}")
OFF = (None, False, "", [], {})


@dataclass(frozen=True)
class NotKnown:
    """A value that a file leaves open, such as a variable. why: in words. text: as it is
    written."""

    why: str
    text: str

    def __repr__(self) -> str:
        return self.why


def as_whole(value: Any) -> Any:
    """Return a value, and a whole number for one that is written as 5e5 or 500000.0. YAML has 5e5
    as a text."""
    if isinstance(value, str) and WITH_EXPONENT.fullmatch(value):
        value = float(value)
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole else value


Names = Mapping[str, tuple[str, Any]]
"""By the name of a setting: that of the argument, and the system's default."""


class Renamed:
    """The settings of a system, on their way to arguments of Megatron-LM.

    values: as they are given. arguments: of Megatron-LM. keys: of a run file, for what these cannot
    say. ranks: that the settings say. asked: a key of a run file -> why the settings do not give
    it. unused: settings that change no number. deepspeed: what DeepSpeed reads by itself.
    """

    def __init__(self, system: str, values: Mapping[str, Any]) -> None:
        self.system = system
        self.values = dict(values)
        self.arguments: dict[str, Any] = {}
        self.keys: dict[str, Any] = {}
        self.asked: dict[str, str] = {}
        self.unused: dict[str, str] = {}
        self.deepspeed: dict[str, Any] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.ranks: int | None = None

    def get(self, name: str, default: Any) -> Any:
        """Return a setting; null counts as not given, and so does, with a problem, what is not
        known."""
        value = self.values.get(name)
        if isinstance(value, NotKnown):
            self.refuse(name, "give its value: --assume NAME=VALUE is that of ${NAME}")
            self.values[name] = None
            return default
        return default if value is None else value

    def whole(self, name: str, default: int | None) -> int | None:
        """Return a setting that is a whole number, or add a problem."""
        value = as_whole(self.get(name, default))
        if value is None:
            return None
        is_whole = type(value) is int  # which a bool is not
        if is_whole:
            return value
        self.refuse(name, "give a whole number")
        return default

    def number(self, name: str, default: float | None) -> float | None:
        """Return a setting that is a number, or add a problem. YAML has 1e-4 as a text."""
        value = self.get(name, default)
        if value is None:
            return None
        is_number = type(value) in (int, float)  # which a bool is not
        if is_number:
            return value
        try:
            return float(value)
        except (TypeError, ValueError):
            self.refuse(name, "give a number")
            return default

    def table(self, name: str) -> Mapping[str, Any]:
        """Return a setting that is a table, or add a problem."""
        value = self.get(name, {})
        if isinstance(value, dict):
            return value
        self.refuse(name, "give a table")
        return {}

    def choice(self, name: str, default: str, meanings: Mapping[str, Any]) -> Any:
        """Return the meaning of a word; None, with a problem, for one that has none here."""
        word = self.get(name, default)
        if isinstance(word, str) and word in meanings:
            return meanings[word]
        listed = ", ".join(meanings)
        self.refuse(name, f"{listed} are read")
        return None

    def give(self, argument: str, value: Any) -> None:
        """Set an argument of Megatron-LM, unless the value is None."""
        row = READ.get(argument)
        if row is not None and row.kind in WHOLE:
            value = as_whole(value)
        if value is not None:
            self.arguments[argument] = value

    def rename(self, names: Names) -> None:
        """Set the arguments of other names."""
        for name, (argument, default) in names.items():
            value = self.get(name, default)
            self.give(argument, value)

    def refuse(self, name: str, why: str) -> None:
        """Add a problem with a setting."""
        value = self.values.get(name)
        said = Problem(f"--{name} {value!r}")
        problem = Problem(why)
        self.problems.append(problem.within(f"{said} ({self.system}): "))

    def ask(self, key: str, why: str, said: str = "") -> None:
        """Add a problem that counts unless the user gives a key of the run file."""
        where = self.system
        if said:
            where = f"{said} ({where})"
        self.asked[key] = f"{where}: {why}"

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Add a problem for each setting of another name."""
        for name in self.values:
            if name not in known:
                self.refuse_unknown_name(name, known)

    def refuse_unknown_name(self, name: str, known: Collection[str]) -> None:
        """Add a problem with a setting of another name, unless it is off."""
        if self.values[name] in OFF:
            return
        hint = did_you_mean(name, known)
        self.refuse(name, f"no such name is known here{hint}")

    def note_unused(self, names: Collection[str]) -> None:
        """Keep the settings that change no number."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                self.unused[name] = f"{name} = {value!r}"

    def require_only(self, permitted: Mapping[str, tuple[Any, ...]]) -> None:
        """Add a problem for each setting with another value than those."""
        for name, values in permitted.items():
            given = self.values.get(name)
            if given is None or given in values:
                continue
            usual = values[0]
            self.refuse(name, f"{usual!r} is what a run has here")


def add_renamed(made: Renamed, arguments: Arguments, place: str) -> None:
    """Add settings to the arguments of Megatron-LM."""
    draft = arguments.draft
    for key, why in made.asked.items():
        if draft.needs(key):
            draft.problems.append(why)
    draft.problems += made.problems
    draft.notes += made.notes
    arguments.unused |= made.unused
    read_table(made.arguments, arguments, place)
