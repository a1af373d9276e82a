"""Common parts of the rules on a run file."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from megaprec.errors import Problem, UserError
from megaprec.precision.patterns import match_patterns, unmatched_problems
from models.config import ModelConfig
from models.logical_shapes import logical_shapes

T = TypeVar("T")


def check_all(subject: T, *checks: Callable[[T], object]) -> None:
    """Raise one UserError with the problems of all `checks` of `subject`."""
    problems: list[Problem] = []
    for check in checks:
        problems += problems_of(check, subject)
    if problems:
        # several checks may fail by the same cause, such as a server that does not answer
        raise UserError(*dict.fromkeys(problems))


def problems_of(function: Callable[..., object], *arguments: object) -> tuple[Problem, ...]:
    """Return the problems of the UserError that a call raises, none if it raises none."""
    try:
        function(*arguments)
    except UserError as error:
        return error.problems
    return ()


def unmatched(key: str, patterns: Sequence[str], model: ModelConfig) -> Iterator[str]:
    """Yield a problem for each pattern without a parameter; parameters of a custom model are known
    to the ranks only.
    """
    if model.factory or not patterns:
        return
    # known without building the model, and the same for any vocabulary
    names = [*logical_shapes(model)]
    yield from unmatched_problems(key, patterns, match_patterns(patterns, names), names)


def nearest_multiples(value: int, unit: int) -> str:
    """Return the positive multiples of `unit` around `value`, in words."""
    # zero is a multiple, but no size
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
