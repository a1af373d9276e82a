"""The arguments that were given to Megatron-LM: their values, how and where each was given, and
what is wrong with them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megaprec.errors import Problem, did_you_mean
from tools.convert.megatron.kinds import COUNT, NUMBER, SIZE
from tools.interop.arguments.megatron import (
    DEFAULTS,
    NUMBERS,
    READ,
    READ_OF_OTHERS,
    REFUSED,
    Argument,
    is_unused,
    option,
)
from tools.interop.importing.draft import MEGATRON, Draft
from tools.interop.importing.shell_words import Word

KINDS = {
    "size": SIZE,
    "count": COUNT,
    "int": "a whole number",
    "number": NUMBER,
}
LEAST = {"size": 1, "count": 0}
MOST = 2**63  # whole numbers of a TOML file have 64 bits
LONGEST_NUMBER = 100  # letters
# arguments whose value may be left open: it names a place, or only whether there is one counts
PLACES = ("save", "load")
SWITCHES = ("tensorboard_dir", "wandb_project")
# arguments of data, and keys that count instead of them
DATA_ARGUMENTS = (
    "data_path",
    "train_data_path",
    "mock_data",
    "data_args_path",
    "per_split_data_args_path",
)
KEYS_OF_DATA = ("data.source", "data.blend")
# arguments whose files only the machine of the training has: kept as they are written
FILES_OF_DATA = (*DATA_ARGUMENTS, "tokenizer_model")


@dataclass
class Arguments:
    """The arguments that were given. values: of those that are read, by the name that Megatron-LM
    keeps them under.

    said: how each of these was given, and place where. unused: arguments that are not used here, as
        they were given.
    dropped: names that are left out because the user says so. left_out: those that were found, as
        they were given. open_places: folders whose names are not known. open_files: why files of
        data are not known, by the argument. draft: of the run file that they become.
    """

    dropped: frozenset[str] = frozenset()
    draft: Draft = field(default_factory=Draft)
    values: dict[str, Any] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    place: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    open_places: dict[str, Word] = field(default_factory=dict)
    open_files: dict[str, Problem] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """Return the value of an argument, or Megatron-LM's default."""
        return self.values.get(name, DEFAULTS[name])

    def has(self, name: str) -> bool:
        """Return True if an argument was given."""
        return name in self.values

    def origin(self, *names: str) -> str:
        """Return how arguments were given, those of them that were; otherwise that it is
        Megatron-LM's default."""
        given = [self.said[name] for name in names if name in self.said]
        return " ".join(given) or MEGATRON

    def put(self, key: str, value: Any, *names: str) -> None:
        """Set a key of the run file to what arguments say."""
        self.draft.put(key, value, self.origin(*names))

    def copy(self, key: str, name: str) -> None:
        """Set a key of the run file to the value of an argument, as it is."""
        self.put(key, self.get(name), name)

    def refuse(self, why: str, *names: str) -> None:
        """Add a problem with what these arguments say."""
        places = [self.place[name] for name in names if name in self.place]
        said = [self.said.get(name, option(name)) for name in names]
        first_place = next(iter(places), "")
        self.add_problem(" ".join(said), first_place, why)

    def add_problem(self, said: str, place: str, why: str) -> None:
        """Add a problem with something that stands at a place."""
        where = f" ({place})" if place else ""
        problem = why if isinstance(why, Problem) else Problem(why)
        self.draft.problems.append(problem.within(f"{said}{where}: "))

    def take(self, name: str, words: Sequence[Word], said: str, place: str) -> None:
        """Add one argument with its values. said: how it was given."""
        if name in self.dropped:
            self.left_out[name] = said
        elif is_unused(name):
            self.unused[name] = said
        elif self._is_answered(name):
            self.unused[name] = f"{said} (a key beside it counts)"
        elif not self._leave_open(name, words, said, place):
            self._read(name, words, said, place)

    def _leave_open(self, name: str, words: Sequence[Word], said: str, place: str) -> bool:
        """Keep an argument whose value is not known as an open one, note it, or add a problem.

        Returns False for one that is read: its value is known, or it counts as it is written.
        """
        unknown = _reasons(words)
        if not unknown or name in (*SWITCHES, *FILES_OF_DATA):
            return False
        if name in PLACES:
            self.open_places[name] = words[0]
            self.said[name] = said
            self.place[name] = place
        elif name == "seed" and all(map(_is_drawn, unknown)):
            self.draft.notes.append(f"{said}: drawn anew in each run; {MEGATRON} counts")
        else:
            self.add_problem(said, place, unknown[0])
        return True

    def _read(self, name: str, words: Sequence[Word], said: str, place: str) -> None:
        """Keep the value of an argument, or add a problem with it."""
        texts = [word.text for word in words]
        row = READ.get(name) or READ_OF_OTHERS.get(name)
        if row is None:
            refused = REFUSED[name]
            if not _is_permitted(refused.permitted, texts):
                self.add_problem(said, place, refused.why)
            return
        wrong = _wrong_values(row, texts)
        if wrong:
            self.add_problem(said, place, wrong)
            return
        self.values[row.kept] = _value_of(row, texts)
        self.said[row.kept] = said
        self.place[row.kept] = place
        unknown = _reasons(words)
        if unknown and name in FILES_OF_DATA:
            self.open_files[row.kept] = unknown[0]

    def _is_answered(self, name: str) -> bool:
        """Return True if the user gives a key that counts instead of an argument."""
        return name in DATA_ARGUMENTS and any(key in self.draft.settled for key in KEYS_OF_DATA)


def _reasons(words: Sequence[Word]) -> list[Problem]:
    """Return why words are not known, those of them that are not."""
    return [word.unknown for word in words if word.unknown]


def _is_drawn(why: Problem) -> bool:
    """Return True for a value that the shell draws."""
    return why.fields.get("name") == "RANDOM"


def _value_of(row: Argument, texts: Sequence[str]) -> Any:
    """Return the value that Megatron-LM keeps of an argument."""
    if row.form == "flag":
        return row.sets
    values = tuple(_typed(text, row.kind) for text in texts)
    return values if row.form == "values" else values[0]


def _wrong_values(row: Argument, texts: Sequence[str]) -> str:
    """Return what is wrong with the values of an argument; "" if nothing is."""
    if any(_typed(text, row.kind) is None for text in texts):
        return f"the value must be {KINDS[row.kind]}"
    if set(texts).issubset(row.choices) or not row.choices:
        return ""
    choices = ", ".join(row.choices)
    hint = did_you_mean(texts[0], row.choices)
    return f"the values are {choices}{hint}"


def _typed(text: str, kind: str) -> Any:
    """Return a value of a kind; None if the text is none."""
    if kind not in NUMBERS:
        return text
    if len(text) > LONGEST_NUMBER:
        return None
    try:
        number = NUMBERS[kind](text)
    except ValueError:
        return None
    least = LEAST.get(kind, -MOST)
    # not so for NaN
    return number if least <= number < MOST else None


def _is_permitted(permitted: str | None, texts: Sequence[str]) -> bool:
    """Return True if the values are the permitted one."""
    if permitted is None or len(texts) != 1:
        return False
    (text,) = texts
    number = _typed(permitted, "number")
    is_same_number = number is not None and _typed(text, "number") == number
    return text == permitted or is_same_number
