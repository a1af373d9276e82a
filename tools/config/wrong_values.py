"""Lines about values of a run that are wrong: key, value, origin, and what the value must be."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megaprec.errors import UserError, did_you_mean
from tools.console.toml import Given, toml

MOST = 2**63 - 1  # the largest integer
PLAINER = {
    "bool_type": "must be true or false",
    "string_type": "must be text in quotes",
    "tuple_type": "must be a list in brackets",
    "model_type": 'must be a table, like {kind = "linear"}',
    "extra_forbidden": "is not a key of this table",
}


def too_large(given: Mapping[str, Given]) -> Iterator[str]:
    """Yield a problem for each value with an integer that needs more than 64 bits."""
    for key, entry in given.items():
        if any(not -MOST - 1 <= number <= MOST for number in _integers(entry.value)):
            yield f"{key} = {toml(entry.value)} ({entry.origin}): an integer must lie between -2^63 and 2^63 - 1"


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _integers(inner)


def explained(
    table: str, kind: type[BaseModel], error: ValidationError, given: Mapping[str, Given], missing_too: bool
) -> Iterator[str]:
    """Yield pydantic's findings in one table as lines that name key, value, origin and the values that are allowed.

    missing_too: report missing keys as well.
    """
    for found in error.errors(include_url=False):
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
            yield f"{key} = {toml(given[key].value)} ({given[key].origin}): {_must(found)}"


def _must(found: ErrorDetails) -> str:
    """Return the requirement that a value found wrong by pydantic violates, as "must be ..."."""
    inside = found["loc"][1:]
    if found["type"] == "missing":
        return f"value {inside[0] + 1} lacks {inside[1]}" if _is_field(inside) else "too few values"
    said = found["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    message = PLAINER.get(found["type"], said)
    place = inside[0] if inside else None
    if _is_field(inside):
        message = f"{inside[1]} {message}"
    where = "" if place is None else f"value {place + 1} " if isinstance(place, int) else f"{place} "
    if found["type"] == "literal_error":
        expected = str(found.get("ctx", {}).get("expected", "")).replace("'", "").replace(" or ", ", ").split(", ")
        message += did_you_mean(str(found["input"]), expected)
    return where + message


def _is_field(inside: Sequence[int | str]) -> TypeGuard[tuple[int, str]]:
    """Return True if a place inside a value is a field of a table in a list."""
    return len(inside) == 2 and isinstance(inside[0], int) and isinstance(inside[1], str)
