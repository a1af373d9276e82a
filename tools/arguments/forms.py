"""The form of an argument: a flag, one with a value or with several, and its default where it
matters.

Names are written as they are typed, with `_` for `-` and without the dashes. Tables of names have
one word for each: `name` is a flag, `name=` takes a value and `name*` several; what stands after
the sign is the value that is permitted although the argument is refused, its default.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Form = Literal["flag", "value", "values"]
SIGNS: dict[str, Form] = {"=": "value", "*": "values"}


@dataclass(frozen=True)
class Shape:
    """The form of an argument and its permitted value, as text; None if there is none."""

    form: Form
    permitted: str | None = None


@dataclass(frozen=True)
class Read:
    """An argument that is read.

    kind: the type of its values, or bool for a flag. sets: the name under which the value is kept,
    the `dest` of Megatron's parser. value: what a flag sets. keys: the keys of a run file that it
    becomes.
    """

    name: str
    kind: type
    default: Any
    keys: tuple[str, ...]
    sets: str
    value: bool = True
    many: bool = False
    choices: tuple[str, ...] = ()

    @property
    def form(self) -> Form:
        """Return the form of the argument."""
        if self.kind is bool:
            return "flag"
        if self.many:
            return "values"
        return "value"


def shapes(names: str) -> Iterator[tuple[str, Shape]]:
    """Yield the name and the shape of each word of `names`."""
    for word in names.split():
        at = next((i for i, sign in enumerate(word) if sign in SIGNS), None)
        if at is None:
            yield word, Shape("flag")
        else:
            yield word[:at], Shape(SIGNS[word[at]], word[at + 1 :] or None)


def option(name: str) -> str:
    """Return an argument as it is typed."""
    return f"--{name.replace('_', '-')}"
