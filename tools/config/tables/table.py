"""Common parts of the tables of a run file: strict reading, paths that expand ~, defaults that a
library states."""

import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic.fields import FieldInfo

from megaprec.parsing import home_problem, path_problem
from megaprec.tokens.places import is_url

MAX_SIZE = 2**31 - 1  # of a size that tensors have
MAX_RANKS = 2**20  # beyond any cluster; more would only take long to plan
MAX_STEPS = 2**53  # up to here a float holds every whole number


def _expanded(path: str) -> str:
    """Return the path with ~ expanded. Raises ValueError if no file can have it, or no home folder
    is known."""
    if problem := path_problem(path) or home_problem(path):
        raise ValueError(problem)
    return os.path.expanduser(path)


def _expanded_unless_url(place: str) -> str:
    return place if is_url(place) else _expanded(place)


EXPANDED = AfterValidator(_expanded)
FilePath = Annotated[str, EXPANDED]
# of checkpoints: a path of this machine, or a URL
Place = Annotated[str, AfterValidator(_expanded_unless_url)]


def is_path(field: FieldInfo) -> bool:
    """Return True if a key holds one path, which is of this machine."""
    return field.annotation is str and EXPANDED in field.metadata


def default_of(function: Callable[..., Any], argument: str) -> Any:
    """Return the default of an argument of `function`, so that its signature alone states it."""
    return inspect.signature(function).parameters[argument].default


class Table(BaseModel):
    """Base of all tables: frozen, no unknown keys, no conversions, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
