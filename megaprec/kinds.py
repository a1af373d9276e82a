"""Values of the kinds that the annotations of a frozen value name: no text "false" for False, no
text for a dtype.

Python does not look at annotations, so that a text would count as true, and a mistyped word as the
other choice.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Literal,
    Self,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from pydantic_core import ErrorDetails

from megaprec.errors import UserError, did_you_mean

# dtypes that a plan may name
PLAN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def wrong_kinds(value: Any) -> list[str]:
    """Return a line for each field of a dataclass whose value is not of the annotated kind: name,
    value, kind.

    Floats must be finite. Whole numbers are floats too; True and False are no numbers.
    """
    hints = _hints(type(value))
    problems: list[str] = []
    for field in fields(value):
        field_value = getattr(value, field.name)
        hint = hints[field.name]
        if not _matches(field_value, hint):
            problems.append(f"{field.name} = {field_value!r}: must be {_describe(hint)}")
    return problems


class UnknownArgument(UserError, TypeError):
    """An argument that a class or function has not."""


class NamedArguments:
    """A base of classes: an argument that such a class has not is refused in a line that names it.

    ELSEWHERE: what to do in place of an argument that other systems' classes have, by its name.
    """

    ELSEWHERE: ClassVar[Mapping[str, str]] = {}

    def __new__(cls, *args: Any, **options: Any) -> Self:
        _require_known(cls.__name__, options, cls.__init__, cls.ELSEWHERE)
        return super().__new__(cls)


def _require_known(
    name: str,
    options: Iterable[str],
    function: Callable[..., object],
    elsewhere: Mapping[str, str],
) -> None:
    """Raise UnknownArgument for options that are no parameters of a function. name: of what is
    called."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return  # it takes any
    names = [parameter.name for parameter in parameters if parameter.name != "self"]
    problems: list[str] = []
    for option in options:
        if option not in names:
            instead = elsewhere.get(option)
            hint = f": {instead}" if instead else did_you_mean(option, names)
            problems.append(f"{name} has no argument {option!r}{hint}")
    if problems:
        raise UnknownArgument(*problems)


def by_name(meanings: Mapping[str, str]) -> dict[str, str]:
    """Return the meaning of each name. meanings: by meaning, names with spaces between."""
    table: dict[str, str] = {}
    for meaning, names in meanings.items():
        table |= dict.fromkeys(names.split(), meaning)
    return table


def is_number(value: object, whole: bool = False) -> bool:
    """Return True for a finite float, or an int that a float can hold, never for True and False.
    whole: only for an int."""
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):  # True and False are integers
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float holds
        return False


def quoted(value: object) -> str:
    """Return an argument as an error line quotes it: a plain value as it is written, anything else
    by its kind."""
    if isinstance(value, str | int | float | list | tuple | dict | None):
        return f"{value!r:.60}"
    if not isinstance(value, type):
        return f"a {type(value).__name__}"
    return value.__name__


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _matches(value: object, hint: Any) -> bool:
    """Return True if a value is of an annotated kind."""
    origin = get_origin(hint) or hint
    if origin in (Union, UnionType):
        return any(_matches(value, choice) for choice in get_args(hint))
    if origin is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if origin in (int, float):
        return is_number(value, whole=origin is int)
    if origin is tuple:
        kind, *_ = get_args(hint)  # tuple[kind, ...]
        if not isinstance(value, tuple | list):
            return False
        return all(_matches(item, kind) for item in value)
    if origin is torch.dtype:
        return value in PLAN_DTYPES
    return isinstance(value, origin)


def _describe(hint: Any) -> str:
    """Return an annotated kind in words."""
    origin = get_origin(hint) or hint
    if origin in (Union, UnionType):
        return " or ".join(map(_describe, get_args(hint)))
    if origin is Literal:
        return ", ".join(map(repr, get_args(hint)))
    if origin is tuple:
        kind, *_ = get_args(hint)
        return f"a tuple or a list, each element {_describe(kind)}"
    words: dict[Any, str] = {
        bool: "True or False",
        int: "a whole number",
        float: "a finite number",
        str: "text",
        NoneType: "None",
        torch.dtype: f"one of {', '.join(map(str, PLAN_DTYPES))}",
        Mapping: "a mapping",
        Callable: "a function",
    }
    return words.get(origin) or f"a {origin.__name__}"


def literals_of(details: ErrorDetails) -> list[str]:
    """Return the words that a key may have. details: pydantic's error about another word."""
    # pydantic lists them as "'a', 'b' or 'c'"
    expected = str(details.get("ctx", {}).get("expected", ""))
    return expected.replace("'", "").replace(" or ", ", ").split(", ")
