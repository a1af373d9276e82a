"""Lines about values of a run that are wrong: key, value, origin, and what the value must be."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from types import UnionType
from typing import Any, TypeGuard, Union, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megaprec.errors import UserError, did_you_mean
from tools.console.toml import Given, toml

MOST = 2**63 - 1  # the largest integer
PLAINER = {
    "bool_type": "must be true or false",
    "string_type": "must be text in quotes",
    "model_type": "must be a table",
    "tuple_type": "must be a list in brackets",
    "extra_forbidden": "is not a key of this table",
}


def too_large(given: Mapping[str, Given]) -> Iterator[str]:
    """Yield a problem for each value with an integer that needs more than 64 bits."""
    for key, entry in given.items():
        if any(not -MOST - 1 <= number <= MOST for number in _integers(entry.value)):
            yield (
                f"{key} = {toml(entry.value)} ({entry.origin}): an integer must lie between -2^63 "
                "and 2^63 - 1"
            )


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _integers(inner)


def explained(
    table: str,
    kind: type[BaseModel],
    error: ValidationError,
    given: Mapping[str, Given],
    missing_too: bool,
) -> Iterator[str]:
    """Yield pydantic's findings in one table as lines that name key, value, origin and the values
    that are allowed.

    missing_too: report missing keys as well.
    """
    for found in _alternatives_joined(kind, error.errors(include_url=False)):
        cause = found.get("ctx", {}).get("error")
        if isinstance(cause, UserError):
            yield from (f"{table}.{problem}" for problem in cause.problems)
        elif found["type"] == "missing" and len(found["loc"]) == 1:
            if missing_too:
                name = str(found["loc"][0])
                instead = " (or choose a model.preset)" if table == "model" else ""
                yield f"{table}.{name} is missing: {kind.model_fields[name].description}{instead}"
        elif found["type"] != "default_factory_not_called":  # it follows from another problem
            key = f"{table}.{found['loc'][0]}"
            must = _must(found) + _like(kind, found)
            yield f"{key} = {toml(given[key].value)} ({given[key].origin}): {must}"


def _alternatives_joined(
    kind: type[BaseModel], found: Sequence[ErrorDetails]
) -> Iterator[ErrorDetails]:
    """Yield the findings, those about a value that may have one of several types as one: pydantic
    has one for each."""
    for key, of_key in groupby(found, lambda one: one["loc"][:1]):
        field = kind.model_fields.get(str(key[0])) if key else None
        if field is None or get_origin(field.annotation) not in (Union, UnionType):
            yield from of_key
            continue
        each = [_must({**one, "loc": key}) for one in of_key]
        joined = " or ".join([each[0], *(must.removeprefix("must be ") for must in each[1:])])
        yield {"type": "union", "loc": key, "msg": joined, "input": None}


def _like(kind: type[BaseModel], found: ErrorDetails) -> str:
    """Return an example of a key that holds a table or a list, if its value is none or has items of
    another kind."""
    field = kind.model_fields[str(found["loc"][0])]
    example = inside_of(field, "[" if get_origin(field.annotation) is tuple else "{")
    if example and found["type"] in ("model_type", "tuple_type"):
        return f", like {example}"
    return ""


def inside_of(field: FieldInfo, bracket: str) -> str:
    """Return the example of a table ("{") or a list ("[") in the description of a key, or a list's
    default; else ""."""
    pattern = r"such as (\{.*?\})" if bracket == "{" else r"(\[.*\])"
    if example := re.search(pattern, field.description or ""):
        return example[1]
    return toml(list(field.default)) if isinstance(field.default, tuple) else ""


def _must(found: ErrorDetails) -> str:
    """Return the requirement that a value found wrong by pydantic violates, as "must be ..."."""
    inside = found["loc"][1:]
    if found["type"] == "missing":
        return _lacks(inside)
    said = found["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    message = PLAINER.get(found["type"], said)
    place = inside[0] if inside else None
    if _is_field(inside):
        message = f"{inside[1]} {message}"
    if place is None:
        where = ""
    elif isinstance(place, int):
        where = f"value {place + 1} "
    else:
        where = f"{place} "
    if found["type"] == "literal_error":
        expected = (
            str(found.get("ctx", {}).get("expected", ""))
            .replace("'", "")
            .replace(" or ", ", ")
            .split(", ")
        )
        message += did_you_mean(str(found["input"]), expected)
    return where + message


def _lacks(inside: Sequence[int | str]) -> str:
    """Return the line about a missing value at a place inside a value: a key of a table, or an item
    of a list."""
    if _is_field(inside):
        return f"value {inside[0] + 1} lacks {inside[1]}"
    if isinstance(inside[0], str):
        return f"it lacks {inside[0]}"
    return "too few values"


def _is_field(inside: Sequence[int | str]) -> TypeGuard[tuple[int, str]]:
    """Return True if a place inside a value is a field of a table in a list."""
    return len(inside) == 2 and isinstance(inside[0], int) and isinstance(inside[1], str)
