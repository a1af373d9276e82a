"""Common parts of the tables of a run file: strict reading, paths that expand ~, sizes of memory,
defaults that a library states."""

import inspect
import os
import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic.fields import FieldInfo

from megaprec.parsing import home_problem, path_problem
from megaprec.tokens.places import is_url

MAX_SIZE = 2**31 - 1  # of a size that tensors have
MAX_RANKS = 2**20  # beyond any cluster; more would only take long to plan
MAX_STEPS = 2**53  # up to here a float holds every whole number
UNITS = {  # of sizes of memory
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


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


def parse_size(text: str) -> tuple[int, str] | None:
    """Return the bytes of a size such as 80GB (10^9 bytes) or 79.6GiB (2^30), and its unit as it
    was written, which may be "" for bytes. None if the text is no size."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", text)
    if not match or match[2].upper() not in UNITS or not 0 < float(match[1]) < 10**18:
        return None
    number, unit = match.groups()
    return int(float(number) * UNITS[unit.upper()]), unit


def checked_size(text: str) -> str:
    """Return the text of a size with a unit. Raises ValueError for any other text."""
    size = parse_size(text)
    if size is None or not size[1]:
        raise ValueError('must be a size such as "2GB" (10^9 bytes) or "1.5GiB" (2^30)')
    return text


def bytes_of(text: str) -> int:
    """Return the bytes of a checked size."""
    size = parse_size(text)
    assert size is not None
    return size[0]


class Table(BaseModel):
    """Base of all tables: frozen, no unknown keys, no conversions, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
