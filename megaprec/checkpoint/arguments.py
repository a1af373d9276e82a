"""Checks of the arguments that a training script gives to `save`, `load` and `load_weights`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from megaprec.checkpoint.keeping import ALL
from megaprec.errors import Problem, UserError
from megaprec.kinds import is_number
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.tokens.places import path_of

RESERVED_KEYS = ("step", "optimizer", "fp8", "format", "files", "tensors", "sha256", "digest")
"""Keys of checkpoint.json that saving writes by itself."""


def required_path(path: object, optimizer: object, name: str) -> Path:
    """Return `path`, which may be text or a URL, as a Path. Raises UserError, naming both, if it is
    no path and if `optimizer` is none.

    name: of the argument that has the path, for the error.
    """
    problems: list[Problem] = []
    # a path of a URL has a file system of fsspec
    at_url = hasattr(path, "fs")
    if not at_url and (not isinstance(path, str | os.PathLike) or not path):
        problems.append(Problem.of("checkpoint.path_kind", name=name, path=path))
    if not isinstance(optimizer, ParallelAMPOptimizer):
        kind = type(optimizer).__name__
        problems.append(Problem.of("checkpoint.optimizer_kind", kind=kind))
    if problems:
        raise UserError(*problems)
    if isinstance(path, str):
        return path_of(path)
    return cast(Path, path) if at_url else Path(cast(Any, path))


def require_saveable(
    step: object,
    extra: object,
    keep: object,
    keep_every: object,
) -> None:
    """Raise UserError, naming all that are wrong, for arguments of `save` that are out of range,
    and for values in `extra` that would not be read back as they were given."""
    problems: list[Problem] = []
    if not is_number(step, whole=True) or step < 0:  # type: ignore[operator]
        problems.append(Problem.of("checkpoint.step_value", step=step))
    if keep != ALL and (not is_number(keep, whole=True) or keep < 1):  # type: ignore[operator]
        problems.append(Problem.of("checkpoint.keep_value", keep=keep, all=ALL))
    if not is_number(keep_every, whole=True) or keep_every < 0:  # type: ignore[operator]
        problems.append(Problem.of("checkpoint.keep_every_value", keep_every=keep_every))
    if isinstance(extra, dict):
        for key in RESERVED_KEYS:
            if key in extra:
                problems.append(Problem.of("checkpoint.extra_key_taken", key=key))
        problems += _unsaveable_values(extra, "extra")
    else:
        problems.append(Problem.of("checkpoint.extra_kind", extra=extra))
    if problems:
        raise UserError(*problems)


def _unsaveable_values(value: Any, name: str) -> Iterator[Problem]:
    """Yield a problem for each value that JSON cannot hold, and each key that it would turn into
    text. name: of `value`, such as "extra['data'][0]"."""
    if isinstance(value, dict):
        for key, inner in value.items():
            # JSON would read another key back: the milestones of a scheduler, for one
            if not isinstance(key, str):
                yield Problem.of("checkpoint.extra_key_kind", name=name, key=key)
            else:
                yield from _unsaveable_values(inner, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _unsaveable_values(inner, f"{name}[{index}]")
    elif not (value is None or isinstance(value, str | bool | int | float)):
        kind = type(value).__name__
        yield Problem.of("checkpoint.extra_value_kind", name=name, kind=kind)
