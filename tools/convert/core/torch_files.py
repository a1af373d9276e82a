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
# Seconds that the other process may take, which limits its own processor time to less.
PATIENCE = 900
# Files that it is asked about at once, for a command line has a longest length.
AT_ONCE = 1000


@dataclass(frozen=True)
class FileReference:
    """The number of a tensor that is in another file."""

    number: int


def contents(files: Sequence[Path]) -> list[Any]:
    """Return the contents of torch files: dicts (also for settings objects), lists and plain
    values, a `Stored` per tensor.

    A `FileReference` stands for a tensor in another file. Anything else is None. Raises UserError
    if a file is damaged or refers to anything but harmless kinds of objects.
    """
    answers: list[Any] = []
    # One process for many files: starting Python with torch takes seconds.
    for first in range(0, len(files), AT_ONCE):
        answers += _ask(files[first : first + AT_ONCE])
    values = []
    for torch_file, answer in zip(files, answers, strict=True):
        values.append(_build_value(torch_file, answer))
    return values


def distributed_contents(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the tensors of a distributed checkpoint: name -> shape and chunks, each an offset and
    a `Stored`.

    Also returns the contents of its distributed optimizer besides tensors: name -> content, as in
    `contents`.
    """
    (answer,) = _ask([folder])
    tensors = answer["tensors"]
    for entry in tensors.values():
        chunks = []
        for chunk in entry["chunks"]:
            file = folder / chunk.pop("file")
            offset = chunk.pop("offset")
            chunks.append((offset, _build_stored(file, **chunk)))
        entry["chunks"] = chunks
    optimizer = {}
    for name, entry in answer["optimizer"].items():
        file = folder / entry["file"]
        optimizer[name] = _build_value(file, entry["content"], base=entry["start"])
    return tensors, optimizer


def tensors_in(torch_file: Path) -> dict[str, Stored]:
    """Return the tensors of a file that holds a plain state dict, such as pytorch_model.bin."""
    (content,) = contents([torch_file])
    return state_in(torch_file, content)


def state_in(torch_file: Path, content: Any, with_references: bool = False) -> dict[str, Any]:
    """Return what a file holds if it is a state dict: tensors by name.

    with_references: some tensors may be in other files.
    Raises UserError by the name of what is no tensor.
    """
    if not isinstance(content, dict):
        raise UserError.of("convert.not_a_state", file=torch_file)
    kinds = (Stored, FileReference) if with_references else Stored
    for name, value in content.items():
        if not isinstance(name, str):
            raise UserError.of("convert.state_key_not_name", file=torch_file, name=name)
        if not isinstance(value, kinds):
            raise UserError.of("convert.state_value_not_tensor", file=torch_file, name=name)
    return content


def _ask(paths: Sequence[Path]) -> list[Any]:
    """Return the answer of the other process about each path."""
    # -P keeps the program's folder off sys.path, whose names would shadow modules of the library.
    names = [str(path.absolute()) for path in paths]
    command = [sys.executable, "-P", str(PROGRAM), *names]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise UserError.of(
            "convert.pickle_timeout", parent=paths[0].parent, patience=PATIENCE
        ) from error
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        # It prints one line on a fault of a file; libraries may have warned before.
        if lines:
            raise UserError(lines[-1])
        raise UserError.of(
            "convert.pickle_process_ended", parent=paths[0].parent, returncode=result.returncode
        )
    try:
        return parse_json(result.stdout)
    except ValueError as error:
        raise UserError.of("convert.pickle_refused", parent=paths[0].parent, error=error) from error


def _build_value(torch_file: Path, answer: Any, base: int = 0) -> Any:
    """Return the value that an answer of the other process describes, as in `contents`.

    base: byte of `torch_file` where the described file of torch.save begins: that of a distributed
        checkpoint is a part of a larger file.
    """
    kind, content = answer
    if kind == "tensor":
        dtype, shape, strides, start, crc = content
        return _build_stored(torch_file, dtype, shape, strides, base + start, crc)
    if kind == "dict":
        return {key: _build_value(torch_file, value, base) for key, value in content}
    if kind == "list":
        return [_build_value(torch_file, value, base) for value in content]
    # A tensor that the file only points to.
    if kind == "reference":
        return FileReference(content)
    return content if kind == "plain" else None


def _build_stored(
    file: Path, dtype: str, shape: list[int], strides: list[int], start: int, crc: int | None
) -> Stored:
    own_strides = _strides_unless_contiguous(shape, strides)
    return Stored(file, getattr(torch, dtype), tuple(shape), start, own_strides, crc)


def _strides_unless_contiguous(shape: list[int], strides: list[int]) -> tuple[int, ...] | None:
    """Return the strides, or None if the values are contiguous, as they nearly always are."""
    contiguous = True
    elements = 1  # of a step along the dimension that is looked at
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != elements:  # the stride of a dimension of size 1 does not matter
            contiguous = False
        elements *= size
    return None if contiguous else tuple(strides)
