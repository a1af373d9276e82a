"""Whole tensors of a distributed checkpoint, put together from chunks; .metadata says where they
lie."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import add, lt
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megaprec.errors import UserError
from tools.convert.core.shards import MergedTensor, require_one_dtype
from tools.convert.core.tensors import Stored


class _Box(NamedTuple):
    """The elements of its tensor that a chunk holds: the first along each dimension, and the one
    after the last."""

    first: list[int]
    end: list[int]


@dataclass(frozen=True)
class Chunked:
    """A tensor of the checkpoint. chunks: where each begins, and where its values lie."""

    name: str
    shape: tuple[int, ...]
    chunks: Sequence[tuple[Sequence[int], Stored]]


def require_inside(checkpoint: Path, tensor: Chunked) -> None:
    """Raise UserError for a part that lies outside of its tensor."""
    # .metadata is a file of others: a part outside would be read over the end of the tensor.
    dims = len(tensor.shape)
    for offset, stored in tensor.chunks:
        is_inside = len(offset) == dims and len(stored.shape) == dims
        for start, size, limit in zip(offset, stored.shape, tensor.shape, strict=False):
            if start < 0 or start + size > limit:
                is_inside = False
        if not is_inside:
            raise UserError.of("convert.part_outside", path=checkpoint, name=tensor.name)


def _check_separate(checkpoint: Path, tensor: Chunked) -> None:
    """Raise UserError if two parts of a tensor overlap: together they may have its size and yet
    leave a hole."""
    boxes = []
    for offset, stored in tensor.chunks:
        end = list(map(add, offset, stored.shape))
        boxes.append(_Box(list(offset), end))
    # Comparing each part with each would take hours for thousands of ranks: sorted along the first
    # dimension, few have to be.
    boxes.sort()
    open_boxes: list[_Box] = []  # those that end after the next one begins
    for box in boxes:
        # A tensor without dimensions has one element, which all its parts share.
        if box.first:
            open_boxes = [earlier for earlier in open_boxes if earlier.end[0] > box.first[0]]
        if any(_overlap(earlier, box) for earlier in open_boxes):
            raise UserError.of("convert.parts_overlap", path=checkpoint, name=tensor.name)
        open_boxes.append(box)


def _overlap(box: _Box, other: _Box) -> bool:
    """Return True if two boxes have an element in common."""
    starts = map(max, box.first, other.first)
    ends = map(min, box.end, other.end)
    return all(map(lt, starts, ends))


def merge_parts(
    checkpoint: Path, name: str, parts: Sequence[Chunked], numbers: Sequence[int] = ()
) -> MergedTensor:
    """Return a tensor whose rows are those of `parts`, one below the other.

    name: of the tensor that they make, for messages.
    numbers: of the parts in tensors that stack them with others, for messages.
    Raises UserError for chunks that are missing, overlap or have several dtypes; where one leaves a
    hole, when it is read.
    """
    # A layer that no chunk covers was lost with the file of its rank.
    if not all(part.chunks for part in parts):
        raise UserError.of(
            "convert.whole_part_missing",
            path=checkpoint,
            name=parts[0].name,
            numbers=list(numbers) or "",
        )
    stored_chunks = []
    for part in parts:
        _check_separate(checkpoint, part)
        stored_chunks += [stored for _, stored in part.chunks]
    # Chunks of several dtypes would be rounded to that of the first.
    require_one_dtype(checkpoint, name, stored_chunks)
    first = parts[0]
    if not first.shape:
        raise UserError.of("convert.tensor_scalar", path=checkpoint, name=first.name)
    rows = sum(part.shape[0] for part in parts)
    shape = (rows, *first.shape[1:])
    dtype = stored_chunks[0].dtype

    def read() -> Tensor:
        return _read(checkpoint, parts, torch.empty(shape, dtype=dtype))

    return MergedTensor(shape, dtype, read)


def _read(checkpoint: Path, parts: Sequence[Chunked], merged: Tensor) -> Tensor:
    """Return `merged`, filled with the parts one below the other."""
    rows = [part.shape[0] for part in parts]
    for part, view in zip(parts, merged.split(rows), strict=True):
        filled = 0
        for offset, stored in part.chunks:
            ranges = zip(offset, stored.shape, strict=True)
            box = tuple(slice(start, start + size) for start, size in ranges)
            view[box] = stored.read()
            filled += prod(stored.shape)
        if filled != view.numel():
            raise UserError.of("convert.part_missing", path=checkpoint, name=part.name)
    return merged
