"""Tensors of a safetensors file at a URL, read by ranges of bytes: the rows that are asked for.

The interface is that of `safetensors.safe_open`, as far as `reader` uses it. The header is checked
before it is believed: each tensor lies in the file and has as many bytes as its shape says.
"""

from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megaprec.checkpoint.object_store import pieces_of, size_of_object
from megaprec.checkpoint.shard_file import NAMES
from megaprec.durable import PlaceError
from megaprec.parsing import parse_json

LENGTH_BYTES = 8  # before the header, which has the length of this number
LONGEST_HEADER = 100_000_000  # bytes, the bound of the safetensors library
DTYPES = {name: dtype for dtype, name in NAMES.items()}


class _Entry(NamedTuple):
    """A tensor of the file by its header. first: its first byte, counted from the first value."""

    dtype: torch.dtype
    shape: list[int]
    first: int


class RemoteShard:
    """The opened file at a URL. Raises PlaceError if it cannot be read, or is no such file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        size = size_of_object(path)
        if size < LENGTH_BYTES:
            raise PlaceError(path, "it is no safetensors file")
        (written_length,) = pieces_of(path, 0, LENGTH_BYTES)
        header_length = int.from_bytes(written_length, "little")
        self._start = LENGTH_BYTES + header_length  # the first byte of the values
        if header_length > LONGEST_HEADER or self._start > size:
            raise PlaceError(path, "it is no safetensors file")
        pieces = pieces_of(path, LENGTH_BYTES, self._start)
        content = b"".join(pieces)
        bytes_of_values = size - self._start
        try:
            header = dict(parse_json(content))
            # what a writer says of the file, which is no tensor
            header.pop("__metadata__", None)
            self._tensors: dict[str, _Entry] = {}
            for name, fields in header.items():
                self._tensors[name] = _entry(fields, bytes_of_values)
        except (ValueError, KeyError, TypeError) as error:
            raise PlaceError(path, f"its header is damaged ({error})") from error

    def get_slice(self, name: str) -> "RemoteTensor":
        """Return a tensor of which nothing is read yet. Raises PlaceError if it is not there."""
        if name not in self._tensors:
            raise PlaceError(self._path, f"it has no tensor {name}")
        dtype, shape, first = self._tensors[name]
        start = self._start + first
        return RemoteTensor(self._path, dtype, shape, start)


def _entry(fields: Any, bytes_of_values: int) -> _Entry:
    """Return a tensor by its fields in the header. Raises ValueError, KeyError and TypeError unless
    it lies in the file, whose values have so many bytes together."""
    dtype = DTYPES[fields["dtype"]]
    shape = fields["shape"]
    first, last = fields["data_offsets"]
    numbers = (*shape, first, last)
    # True is an int too
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a size is none")
    nbytes = prod(shape) * dtype.itemsize
    if last > bytes_of_values or last - first != nbytes:
        raise ValueError("a tensor does not lie in the file")
    return _Entry(dtype, shape, first)


class RemoteTensor:
    """A stored tensor [*shape] at byte `start` of the file at `path`."""

    def __init__(self, path: Path, dtype: torch.dtype, shape: list[int], start: int) -> None:
        self._path = path
        self._dtype = dtype
        self._shape = shape
        self._start = start

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return self._shape

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        """Return a part of the tensor. The rows that have it are read, and no others. Raises
        PlaceError."""
        slices = index if isinstance(index, tuple) else (index,)
        if not slices:  # a scalar
            only_row = self._rows(0, 1, [])
            return only_row.view(())
        row_slice, *slices_of_row = slices
        num_rows, *row_shape = self._shape
        first, last, _ = row_slice.indices(num_rows)
        rows = self._rows(first, last, row_shape)
        return rows[:, *slices_of_row]

    def _rows(self, first: int, last: int, row_shape: list[int]) -> Tensor:
        """Return rows [first, last), of `row_shape` each: [last - first, *row_shape]."""
        row_bytes = prod(row_shape) * self._dtype.itemsize
        num_rows = max(0, last - first)
        values = torch.empty(num_rows * row_bytes, dtype=torch.uint8)
        unfilled = values.numpy().data  # a view of what has not arrived yet
        start = self._start + first * row_bytes
        stop = start + len(unfilled)
        for piece in pieces_of(self._path, start, stop):
            unfilled[: len(piece)] = piece
            unfilled = unfilled[len(piece) :]
        return values.view(self._dtype).view(num_rows, *row_shape)
