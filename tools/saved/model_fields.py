"""Settings of another program that say what a model is: made to a model, or refused by name."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megaprec.errors import Problem, UserError
from models.config import ModelConfig


def make_model(fields: Mapping[str, Any], origin: str) -> ModelConfig:
    """Return the model with these fields. Raises UserError that names `origin` if they do not make
    one."""
    try:
        return ModelConfig(**fields)
    except ValidationError as error:
        raise UserError(*problems_of_fields(error, origin)) from error


def problems_of_fields(error: ValidationError, origin: str) -> Iterator[Problem]:
    """Yield a line for each of pydantic's findings about the fields of a model."""
    for finding in error.errors(include_url=False):
        cause = finding.get("ctx", {}).get("error")
        # A rule of the model's own, whose problems are lines already.
        if isinstance(cause, UserError):
            yield from (problem.within(f"{origin}: ") for problem in cause.problems)
        # A default that follows from a wrong field is no problem of its own.
        elif finding["type"] != "default_factory_not_called":
            yield Problem.of(
                "convert.model_field",
                origin=origin,
                field=".".join(map(str, finding["loc"])),
                value=finding["input"],
                message=requirement_of(finding),
            )


def requirement_of(finding: ErrorDetails) -> str:
    """Return what a value that pydantic found wrong must be, as "must be ..."."""
    return finding["msg"].removeprefix("Value error, ").replace("Input should be", "must be")


def problems_of_keys(
    settings: Mapping[str, Any],
    origin: str,
    required: Collection[str],
    only: Mapping[str, tuple[Any, ...]],
    known: Collection[str],
) -> Iterator[Problem]:
    """Yield a line for each key that is missing, not known, or has a value that is not supported.

    origin: where the settings are, for messages.
    only: key -> the values that are supported, of which the first is taken for a missing one.
    known: all other keys.
    """
    for key in required:
        if key not in settings:
            yield Problem.of("convert.model_key_missing", origin=origin, key=key)
    for key, allowed in only.items():
        if settings.get(key, allowed[0]) not in allowed:
            alternatives = " or ".join(map(repr, allowed))
            yield Problem.of(
                "convert.model_key_only",
                origin=origin,
                key=key,
                value=settings[key],
                allowed=alternatives,
            )
    for key in settings:
        if key not in required and key not in only and key not in known:
            yield Problem.of("convert.model_key_unknown", origin=origin, key=key)
