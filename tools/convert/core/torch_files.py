"""Reading files of torch.save of unknown origin. They are pickles, so only a separate process opens
them (`untrusted.py`).
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megaprec.errors import UserError
from megaprec.parsing import parse_json
from tools.convert.core.tensors import Stored

PROGRAM = Path(__file__).with_name("untrusted.py")
PATIENCE = 900  # seconds that the other process may take
AT_ONCE = 1000  # files that it is asked about, for a command line has a longest length


@dataclass(frozen=True)
class Reference:
    """The number of a tensor that is in another file."""

    number: int


def contents(files: Sequence[Path]) -> list[Any]:
    """Return the contents of torch files: dicts (also for settings objects), lists and plain
    values, a `Stored` per tensor.

    A `Reference` stands for a tensor in another file. Anything else is None. Raises UserError if a
    file is damaged or refers to anything but harmless kinds of objects.
    """
    batches = [files[first : first + AT_ONCE] for first in range(0, len(files), AT_ONCE)]
    answers = [answer for batch in batches for answer in _ask(batch)]
    return [_built(file, answer) for file, answer in zip(files, answers, strict=True)]


def distributed_contents(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the tensors of a distributed checkpoint: name -> shape and chunks, each an offset and
    a `Stored`.

    Also returns the contents of its distributed optimizer besides tensors: name -> content, as in
    `contents`.
    """
    (found,) = _ask([folder])
    for entry in found["tensors"].values():
        entry["chunks"] = [
            (chunk["offset"], _stored(folder / chunk["file"], chunk)) for chunk in entry["chunks"]
        ]
    said = {
        name: _built(folder / e["file"], e["content"], e["start"])
        for name, e in found["said"].items()
    }
    return found["tensors"], said


def tensors_in(file: Path) -> dict[str, Stored]:
    """Return the tensors of a file that holds a plain state dict, such as pytorch_model.bin."""
    (found,) = contents([file])
    return state_in(file, found)


def state_in(file: Path, content: Any, apart: bool = False) -> dict[str, Any]:
    """Return what a file holds if it is a state dict: tensors by name. apart: some may be in other
    files.

    Raises UserError by the name of what is no tensor.
    """
    if not isinstance(content, dict):
        raise UserError(f"{file} does not hold a dict of tensors")
    for name, value in content.items():
        if not isinstance(name, str):
            raise UserError(
                f"{file} does not hold a dict of tensors alone: it has the key {name}, which "
                "is no name"
            )
        if not isinstance(value, (Stored, Reference) if apart else Stored):
            raise UserError(f"{file} does not hold a dict of tensors alone: {name} is no tensor")
    return content


def _ask(paths: Sequence[Path]) -> list[Any]:
    command = [sys.executable, "-P", str(PROGRAM), *(str(path.absolute()) for path in paths)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"{paths[0].parent} was not understood in {PATIENCE} s; it is not opened"
        ) from error
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        ended = (
            f"{paths[0]} is not opened: the process that looked into it ended with code "
            f"{done.returncode}"
        )
        raise UserError(said[-1] if said else ended)
    try:
        return parse_json(done.stdout)
    except ValueError as error:
        raise UserError(f"{paths[0].parent} has a torch file that is not read: {error}") from error


def _built(file: Path, answer: Any, base: int = 0) -> Any:
    """Return the value of an answer. base: byte where the inner file begins in the file."""
    kind, content = answer
    if kind == "tensor":
        dtype, shape, strides, start, crc = content
        return _stored(
            file,
            {"dtype": dtype, "shape": shape, "strides": strides, "start": base + start, "crc": crc},
        )
    if kind == "dict":
        return {key: _built(file, value, base) for key, value in content}
    if kind == "list":
        return [_built(file, value, base) for value in content]
    if kind == "reference":
        return Reference(content)
    return content if kind == "plain" else None


def _stored(file: Path, entry: dict[str, Any]) -> Stored:
    dtype = getattr(torch, entry["dtype"])
    strides = _strides(entry["shape"], entry["strides"])
    return Stored(file, dtype, tuple(entry["shape"]), entry["start"], strides, entry["crc"])


def _strides(shape: list[int], strides: list[int]) -> tuple[int, ...] | None:
    """Return the strides, or None if the values are contiguous, as they nearly always are."""
    expected = []
    row = 1
    for n in reversed(shape):
        expected.insert(0, row)
        row *= n
    plain = all(n == 1 or a == b for n, a, b in zip(shape, strides, expected, strict=True))
    return None if plain else tuple(strides)
