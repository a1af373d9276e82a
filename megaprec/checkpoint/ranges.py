"""Flat ranges: the elements that a rank saves of a slice, as rectangles of the logical tensor.

A rank owns a run of elements of the flattened slice, which begins and ends in the middle of a row.
It is saved as one flat tensor, with a chunk in checkpoint.json:

    {"file": ..., "offset": [...], "shape": [...], "range": [first, last]}

offset, shape: the slice, a rectangle of the logical tensor. range: elements [first, last) of the
flattened slice. In a chunk without a range the file has the whole rectangle, with its shape.

A flat range of a matrix is at most three rectangles: the end of a row, whole rows, and the
beginning of a row.
"""

from collections.abc import Iterator, Sequence
from math import prod
from operator import add
from typing import Any, NamedTuple


class StoredBlock(NamedTuple):
    """Offset and shape of a rectangle, and the number of elements before it in the stored
    tensor."""

    offset: list[int]
    shape: list[int]
    start: int


def blocks(chunk: dict[str, Any]) -> Iterator[StoredBlock]:
    """Yield the rectangles that a chunk of checkpoint.json consists of, in the order in which they
    are stored."""
    offset = chunk["offset"]
    shape = chunk["shape"]
    if not chunk.get("range"):
        yield StoredBlock(offset, shape, 0)
        return
    first, last = chunk["range"]
    for block in _split_range(shape, first, last):
        offset_in_tensor = list(map(add, offset, block.offset))
        yield StoredBlock(offset_in_tensor, block.shape, block.start - first)


def _split_range(shape: Sequence[int], first: int, last: int) -> Iterator[StoredBlock]:
    """Yield the rectangles of elements [first, last) of a row-major tensor; `start` is their first
    element in it.
    """
    if first >= last:
        return
    if not shape:
        yield StoredBlock([], [], 0)
        return
    row_shape = shape[1:]
    row_size = prod(row_shape)  # elements
    first_full_row = -(-first // row_size)  # rounded up
    end_of_full_rows = last // row_size  # the row after the last full one
    if first_full_row > end_of_full_rows:  # all elements are in the middle of one row
        yield from _split_row(shape, end_of_full_rows, first, last)
        return
    # the end of a row, full rows, and the beginning of a row: each may be empty
    full_rows_start = first_full_row * row_size
    yield from _split_row(shape, first_full_row - 1, first, full_rows_start)
    if first_full_row < end_of_full_rows:
        offset = [first_full_row] + [0] * len(row_shape)
        shape_of_full_rows = [end_of_full_rows - first_full_row, *row_shape]
        yield StoredBlock(offset, shape_of_full_rows, full_rows_start)
    yield from _split_row(shape, end_of_full_rows, end_of_full_rows * row_size, last)


def _split_row(
    shape: Sequence[int],
    row: int,
    first: int,
    last: int,
) -> Iterator[StoredBlock]:
    """Yield the rectangles of elements [first, last) of a row-major tensor, all of which lie in
    index `row` of dim 0; none if the range is empty."""
    row_shape = shape[1:]
    row_start = row * prod(row_shape)
    for block in _split_range(row_shape, first - row_start, last - row_start):
        yield StoredBlock([row, *block.offset], [1, *block.shape], row_start + block.start)


def stored_shape(chunk: dict[str, Any]) -> list[int]:
    """Return the shape of the stored tensor of a chunk."""
    if chunk.get("range"):
        first, last = chunk["range"]
        return [last - first]
    return chunk["shape"]


def share(
    first: int,
    last: int,
    number: int,
    count: int,
) -> tuple[int, int]:
    """Return part `number` of `count` of the elements [first, last), which differ by one element at
    most."""
    length = last - first
    begin = first + length * number // count
    end = first + length * (number + 1) // count
    return begin, end
