"""Lines about values of a run that are wrong: key, value, origin, and what the value must be."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from types import UnionType
from typing import Any, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megaprec.errors import Problem, UserError, did_you_mean
from megaprec.kinds import literals_of
from tools.console.toml import Setting, toml

# other trainers' words for values
SYNONYMS = {
    "gpu": "cuda",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "double": "fp64",
}
MAX_INTEGER = 2**63 - 1  # TOML promises no larger ones, and torch has none
PLAIN_MESSAGES = {
    "bool_type": "must be true or false",
    "string_type": "must be text in quotes",
    "model_type": "must be a table",
    "tuple_type": "must be a list in brackets",
    "string_too_short": "must be text that is not empty",
    "too_short": "must be a list that is not empty",
    "extra_forbidden": "is not a key of this table",
}


def too_large(settings: Mapping[str, Setting]) -> Iterator[str]:
    """Yield a problem for each value with an integer that needs more than 64 bits."""
    for key, setting in settings.items():
        numbers = [*_integers(setting.value)]
        fits = [-MAX_INTEGER - 1 <= number <= MAX_INTEGER for number in numbers]
        if not all(fits):
            yield Problem.of(
                "config.integer_too_large",
                key=key,
                value=toml(setting.value),
                origin=setting.origin,
            )


def _integers(value: Any) -> Iterator[int]:
    """Yield the integers of a value, also those inside tables and lists."""
    # True and False are integers, and fit
    if isinstance(value, int):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _integers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _integers(inner)


def explain(
    table: str,
    table_class: type[BaseModel],
    error: ValidationError,
    settings: Mapping[str, Setting],
    report_missing: bool,
) -> Iterator[str]:
    """Yield pydantic's findings in one table as lines that name key, value, origin and the values
    that are allowed.

    report_missing: report missing keys as well.
    """
    for finding in _join_alternatives(table_class, error.errors(include_url=False)):
        cause = finding.get("ctx", {}).get("error")
        # a validator of ours, whose problems are lines already
        if isinstance(cause, UserError):
            yield from (problem.within(f"{table}.") for problem in cause.problems)
        elif finding["type"] == "missing" and len(finding["loc"]) == 1:
            if report_missing:
                name = str(finding["loc"][0])
                hint = " (or choose a model.preset)" if table == "model" else ""
                yield Problem.of(
                    "config.key_missing",
                    table=table,
                    name=name,
                    description=table_class.model_fields[name].description,
                    hint=hint,
                )
        elif finding["type"] != "default_factory_not_called":  # it follows from another problem
            key = f"{table}.{finding['loc'][0]}"
            setting = settings[key]
            requirement = _requirement(finding) + _example(table_class, finding)
            yield Problem.of(
                "config.wrong_value",
                key=key,
                value=toml(setting.value),
                origin=setting.origin,
                requirement=requirement,
            )


def _join_alternatives(
    table_class: type[BaseModel], findings: Sequence[ErrorDetails]
) -> Iterator[ErrorDetails]:
    """Yield the findings, those about a value that may have one of several types as one: pydantic
    has one for each."""
    for place, findings_of_place in groupby(findings, lambda finding: _place(table_class, finding)):
        if not place:
            yield from findings_of_place
            continue
        # without the name of the type, which pydantic puts behind the place
        alternatives = [_requirement({**finding, "loc": place}) for finding in findings_of_place]
        before, demand, _ = alternatives[0].partition("must be ")
        # what all alternatives begin with stands once
        subject = before + demand if demand else ""
        words = [alternative.removeprefix(subject) for alternative in alternatives]
        # a text may be wrong as a value and within a list
        message = subject + " or ".join(dict.fromkeys(words))
        yield {"type": "union", "loc": place[:1], "msg": message, "input": None}


def _place(table_class: type[BaseModel], finding: ErrorDetails) -> tuple[int | str, ...]:
    """Return the place of a value that may have one of several types: a key, or a field of a table
    in a list. Empty for another value, and for a value that is missing."""
    place = finding["loc"]
    # a finding about the table as a whole has no key
    field = table_class.model_fields.get(str(place[0])) if place else None
    if field is None:
        return ()
    if _has_alternatives(field):
        return place[:1]
    of_item = place[1:3]  # the number of an item and the name of its field, in a list of tables
    if not _is_field(of_item) or finding["type"] == "missing":
        return ()
    item_class, *_ = get_args(field.annotation)
    _, name = of_item
    field_of_item = item_class.model_fields.get(name)
    is_known = field_of_item is not None
    return place[:3] if is_known and _has_alternatives(field_of_item) else ()


def _has_alternatives(field: FieldInfo) -> bool:
    return get_origin(field.annotation) in (Union, UnionType)


def _example(table_class: type[BaseModel], finding: ErrorDetails) -> str:
    """Return ", like " and an example of a key that holds a table or a list, if its value is no
    table or no list; else ""."""
    field = table_class.model_fields[str(finding["loc"][0])]
    bracket = "[" if get_origin(field.annotation) is tuple else "{"
    example = example_in_help(field, bracket)
    if example and finding["type"] in ("model_type", "tuple_type"):
        return f", like {example}"
    return ""


def example_in_help(field: FieldInfo, bracket: str) -> str:
    """Return the example of a table ("{") or a list ("[") in the description of a key, or a list's
    default; else ""."""
    # descriptions show a table as "such as {...}", and a list anywhere
    pattern = r"such as (\{.*?\})" if bracket == "{" else r"(\[.*\])"
    if example := re.search(pattern, field.description or ""):
        return example[1]
    return toml(list(field.default)) if isinstance(field.default, tuple) else ""


def _requirement(finding: ErrorDetails) -> str:
    """Return the requirement that a value found wrong by pydantic violates, as "must be ..."."""
    # the way to the part of the value that is wrong: numbers of items, and names of keys
    inside = finding["loc"][1:]
    if finding["type"] == "missing":
        return _missing_part(inside)
    original = finding["msg"].removeprefix("Value error, ")
    message = PLAIN_MESSAGES.get(finding["type"], original.replace("Input should be", "must be"))
    if _is_field(inside):
        _, name = inside
        message = f"{name} {message}"
    if finding["type"] == "literal_error":
        word = str(finding["input"])
        message += did_you_mean(SYNONYMS.get(word.lower(), word), literals_of(finding))
    if not inside:
        return message
    outermost, *_ = inside
    if isinstance(outermost, int):
        return f"value {outermost + 1} {message}"
    return f"{outermost} {message}"


def _missing_part(inside: Sequence[int | str]) -> str:
    """Return the line about a missing value at a place inside a value: a key of a table, or an item
    of a list."""
    if _is_field(inside):
        number, name = inside
        return f"value {number + 1} lacks {name}"
    if isinstance(inside[0], str):
        return f"it lacks {inside[0]}"
    return "too few values"


def _is_field(inside: Sequence[int | str]) -> TypeGuard[tuple[int, str]]:
    """Return True if a place inside a value is a field of a table in a list."""
    return len(inside) == 2 and isinstance(inside[0], int) and isinstance(inside[1], str)
