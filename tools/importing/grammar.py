"""The arguments of a command line, by the grammar of Megatron-LM's parser.

`--name value`, `--name=value`, flags, and several values up to the next argument. The last one
counts if an argument is repeated. Abbreviations are refused, as Megatron-LM refuses them. Every
word is accounted for: it is part of an argument that is read, of one that has no meaning here, or
of a problem.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megaprec.errors import did_you_mean
from tools.arguments import megatron_idle, megatron_refused
from tools.arguments.forms import Form, option
from tools.arguments.megatron import DEFAULTS, READ
from tools.importing.draft import MEGATRON
from tools.importing.shell import Word

NEGATIVE = re.compile(r"-\d+$|-\d*\.\d+$")
FLAGS = {"true": True, "false": False}


@dataclass
class Arguments:
    """The arguments that were given. values: of those that are read, by the name that Megatron-LM
    keeps them under.

    shown: how each of these was given, and place where. idle: arguments without a meaning here, as
        they were given.
    dropped: names that are left out because the user says so. left_out: those that were found, as
        they were given.
    tried: the names of all arguments that were given, right or wrong. open: a word of the command
    line may hold arguments that are not known, so none can be called missing.
    """

    dropped: frozenset[str] = frozenset()

    values: dict[str, Any] = field(default_factory=dict)
    shown: dict[str, str] = field(default_factory=dict)
    place: dict[str, str] = field(default_factory=dict)
    idle: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)
    open: bool = False
    problems: list[str] = field(default_factory=list)

    def get(self, name: str) -> Any:
        """Return the value of an argument, or Megatron-LM's default."""
        return self.values.get(name, DEFAULTS[name])

    def has(self, name: str) -> bool:
        """Return True if an argument was given."""
        return name in self.values

    def origin(self, *names: str) -> str:
        """Return how arguments were given, those of them that were; otherwise that it is
        Megatron-LM's default."""
        given = [self.shown[name] for name in names if name in self.shown]
        return " ".join(given) if given else MEGATRON

    def refuse(self, why: str, *names: str) -> None:
        """Add a problem with what these arguments say."""
        place = next((self.place[name] for name in names if self.place.get(name)), "")
        said = " ".join(self.shown.get(name, option(name)) for name in names)
        self.problems.append(f"{said}{f' ({place})' if place else ''}: {why}")

    def take(self, name: str, words: Sequence[Word], place: str, joined: bool = False) -> None:
        """Add one argument with its values. joined: its value was given as --name=value."""
        said = " ".join(
            [f"{option(name)}{'=' if joined else ' '}{words[0].text}" if words else option(name)]
        )
        said = " ".join([said, *(word.text for word in words[1:])])
        where = f" ({place})" if place else ""
        self.tried |= {name, READ[name].sets} if name in READ else {name}
        if name in self.dropped:
            self.left_out[name] = said
            return
        if name in megatron_idle.SHAPES:
            self.idle[name] = said
            return
        if unknown := next((word for word in words if word.unknown), None):
            self.problems.append(f"{said}{where}: {unknown.unknown}")
        elif name in READ:
            self._read(name, [word.text for word in words], said, place)
        elif not _permitted(megatron_refused.SHAPES[name].permitted, words):
            self.problems.append(f"{said}{where}: {megatron_refused.WHY[name]}")

    def _read(self, name: str, texts: list[str], said: str, place: str) -> None:
        row = READ[name]
        values = [_typed(text, row.kind) for text in texts]
        where = f" ({place})" if place else ""
        if row.form == "flag":
            values = [row.value]
        elif None in values:
            self.problems.append(f"{said}{where}: the value must be {_words_for(row.kind)}")
            return
        elif row.choices and not set(texts) <= set(row.choices):
            hint = did_you_mean(texts[0], row.choices)
            self.problems.append(f"{said}{where}: the values are {', '.join(row.choices)}{hint}")
            return
        self.values[row.sets] = tuple(values) if row.many else values[0]
        self.shown[row.sets] = said
        self.place[row.sets] = place


def read_words(words: Sequence[Word], arguments: Arguments) -> None:
    """Add the arguments of a command line. What is wrong is added to their problems."""
    at = 0
    while at < len(words):
        word = words[at]
        text, equals, value = word.text.partition("=")
        name = text[2:].replace("-", "_")
        form = _form(name) if text.startswith("--") else None
        where = f" ({word.place})" if word.place else ""
        at += 1
        if name in arguments.dropped and text.startswith("--"):
            end = next((i for i in range(at, len(words)) if _is_option(words[i])), len(words))
            arguments.left_out[name] = " ".join([word.text, *(w.text for w in words[at:end])])
            arguments.tried.add(name)
            at = end
            continue
        if form is None:
            arguments.problems.append(f"{word.text}{where}: {_unknown(word)}")
            arguments.open |= bool(word.unknown) or _is_several(word)
            while at < len(words) and not _is_option(words[at]):
                at += 1
            continue
        given = [Word(value, word.place, word.unknown)] if equals else []
        while form != "flag" and not equals and at < len(words) and not _is_option(words[at]):
            given.append(words[at])
            at += 1
            if form == "value":
                break
        if form == "value" and not given:
            arguments.problems.append(f"{word.text}{where}: a value must follow")
        elif form == "flag" and equals:
            arguments.problems.append(f"{word.text}{where}: is a flag, which takes no value")
        else:
            arguments.take(name, given, word.place, bool(equals))


def read_table(table: Mapping[str, Any], arguments: Arguments, place: str) -> None:
    """Add the arguments of a YAML file. Names are those typed or those that Megatron-LM keeps;
    flags are true or false.

    A value of null counts as not given.
    """
    kept = {row.sets: row.name for row in reversed([*READ.values()]) if row.name != row.sets}
    for key, value in table.items():
        name = key.removeprefix("--").replace("-", "_")
        typed = name if _form(name) else kept.get(name, name)
        form = _form(typed)
        if typed in arguments.dropped:
            arguments.left_out[typed] = f"{key} = {value}"
            arguments.tried.add(typed)
        elif form is None:
            arguments.problems.append(f"{key} ({place}): {_unknown(Word(f'--{name}'))}")
        elif form == "flag":
            _take_flag(name, typed, key, value, arguments, place)
        elif value is not None:
            if isinstance(value, list | tuple):
                items = value
            elif form == "values":
                items = str(value).split()
            else:
                items = [value]
            if form == "value" and isinstance(value, list | dict):
                items = [",".join(map(str, value))]
            arguments.take(typed, [Word(str(item), place) for item in items], place)


def is_known(name: str) -> bool:
    """Return True if Megatron-LM has the argument, typed with dashes or not, or keeps a value under
    the name."""
    word = name.replace("-", "_")
    return _form(word) is not None or any(row.sets == word for row in READ.values())


def _take_flag(
    name: str, typed: str, key: str, value: Any, arguments: Arguments, place: str
) -> None:
    on = FLAGS.get(str(value).lower())
    if value is None:
        return
    if on is None:
        arguments.problems.append(f"{key} = {value!r} ({place}): is a flag: true or false")
        return
    row = READ.get(typed)
    if row is not None and name == row.sets and name != row.name:
        on = on == row.value  # the name that is kept: its own value counts
    if on:
        arguments.take(typed, [], place)


def _form(name: str) -> Form | None:
    if name in READ:
        return READ[name].form
    shape = megatron_idle.SHAPES.get(name) or megatron_refused.SHAPES.get(name)
    return shape.form if shape else None


def _is_option(word: Word) -> bool:
    text = word.text
    return text.startswith("-") and len(text) > 1 and not NEGATIVE.match(text) and " " not in text


def _is_several(word: Word) -> bool:
    """Return True for one word that begins like an option and has a space: arguments that quotes
    hold together."""
    return word.text.lstrip().startswith("--") and " " in word.text.strip()


def _unknown(word: Word) -> str:
    if word.unknown:
        return word.unknown
    if _is_several(word):
        return (
            'quotes make one word of several arguments: write "${NAME[@]}" for an array, and '
            "$NAME without quotes"
        )
    if not word.text.startswith("-"):
        return "no argument takes this value"
    known = [option(name) for name in (*READ, *megatron_idle.SHAPES, *megatron_refused.SHAPES)]
    return (
        "no such argument of Megatron-LM is known "
        f"here{did_you_mean(word.text.partition('=')[0], known)}"
    )


def _typed(text: str, kind: type) -> Any:
    """Return a value of a kind; None if the text is none."""
    if kind is str:
        return text
    try:
        number = kind(text) if len(text) < 100 else None
    except ValueError:
        return None
    if number is None or number != number or abs(number) >= 2**63:
        return None
    return number


def _words_for(kind: type) -> str:
    return "a whole number" if kind is int else "a number"


def _permitted(permitted: str | None, words: Sequence[Word]) -> bool:
    """Return True if the values are the permitted one."""
    if permitted is None or len(words) != 1:
        return False
    numbers = _typed(permitted, float), _typed(words[0].text, float)
    return words[0].text == permitted or (None not in numbers and numbers[0] == numbers[1])
