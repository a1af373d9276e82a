"""Checks of what a user's loop gives to `save`, `load` and `load_weights`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaprec.checkpoint.keeping import ALL
from megaprec.errors import UserError
from megaprec.kinds import is_number
from megaprec.optim.optimizer import ParallelAMPOptimizer

OWN = ("step", "optimizer", "fp8", "format", "files", "tensors", "sha256", "digest")
"""Keys of checkpoint.json that saving writes by itself."""


def required_path(path: object, optimizer: object, name: str) -> Path:
    """Return a path that may have been given as text. Raises UserError for what is none, or no
    optimizer."""
    wrong = []
    if not isinstance(path, str | os.PathLike) or not path:
        wrong.append(f"{name} = {path!r:.60}: must be a path")
    if not isinstance(optimizer, ParallelAMPOptimizer):
        wrong.append(
            f"optimizer: must be a megaprec.ParallelAMPOptimizer, not a {type(optimizer).__name__}"
        )
    if wrong:
        raise UserError(*wrong)
    return Path(path)  # type: ignore[arg-type]


def require_saveable(
    step: object,
    extra: object,
    keep: object,
    keep_every: object,
) -> None:
    """Raise UserError, naming all that are wrong, for values that would not be read back as they
    were given."""
    wrong = []
    # all are looked at before any is told
    if not is_number(step, whole=True) or step < 0:  # type: ignore[operator]
        wrong.append(f"step = {step!r:.60}: must be a whole number from 0 on")
    if keep != ALL and (not is_number(keep, whole=True) or keep < 1):  # type: ignore[operator]
        wrong.append(
            f"keep = {keep!r:.60}: must be a whole number from 1 on, of the newest "
            f'checkpoints that stay, or "{ALL}", by which none is removed'
        )
    if not is_number(keep_every, whole=True) or keep_every < 0:  # type: ignore[operator]
        wrong.append(
            f"keep_every = {keep_every!r:.60}: must be a whole number of steps, 0 for none"
        )
    if not isinstance(extra, dict):
        wrong.append(f"extra = {extra!r:.60}: must be a dict of JSON values; {{}} for none")
    else:
        wrong += [
            f"extra has the key {key!r}, which a checkpoint has itself: give it another"
            for key in OWN
            if key in extra
        ]
        wrong += _find_no_json(extra, "extra")
    if wrong:
        raise UserError(*wrong)


def _find_no_json(value: Any, name: str) -> Iterator[str]:
    """Yield a line for each value that JSON cannot hold, and each key that it would turn into
    text. name: of `value`, such as "extra['data'][0]"."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):  # JSON would read another key back
                yield (
                    f"{name} has the key {key!r}, which JSON would turn into text: use text for "
                    "keys"
                )
            else:
                yield from _find_no_json(inner, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _find_no_json(inner, f"{name}[{index}]")
    elif not (value is None or isinstance(value, str | bool | int | float)):
        yield (
            f"{name} is a {type(value).__name__}: a checkpoint holds JSON values; use "
            "numbers, text and lists of them (.item(), .tolist())"
        )
