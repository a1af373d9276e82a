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
from typing import Any

Block = tuple[list[int], list[int], int]
"""Offset and shape of a rectangle, and the number of elements before it in the stored tensor."""


def blocks(chunk: dict[str, Any]) -> Iterator[Block]:
    """Yield the rectangles that a chunk of checkpoint.json consists of, in the order in which they
    are stored."""
    offset = chunk["offset"]
    shape = chunk["shape"]
    if not chunk.get("range"):
        yield offset, shape, 0
        return
    first, last = chunk["range"]
    for inner, size, start in _cut(shape, first, last):
        yield [a + b for a, b in zip(offset, inner, strict=True)], size, start - first


def _cut(shape: Sequence[int], first: int, last: int) -> Iterator[Block]:
    """Yield offset and shape of the rectangles of elements [first, last) of a row-major tensor, and
    their first element.
    """
    if first >= last:
        return
    if not shape:
        yield [], [], 0
        return
    row = prod(shape[1:])
    top = -(-first // row)
    bottom = last // row
    if top > bottom:  # within one row
        yield from _row(shape, bottom, first, last)
        return
    yield from _row(shape, top - 1, first, top * row)
    if top < bottom:
        yield [top, *(0 for _ in shape[1:])], [bottom - top, *shape[1:]], top * row
    yield from _row(shape, bottom, bottom * row, last)


def _row(shape: Sequence[int], row: int, first: int, last: int) -> Iterator[Block]:
    """Yield the rectangles of elements [first, last), which lie in one row."""
    start = row * prod(shape[1:])
    for offset, size, element in _cut(shape[1:], first - start, last - start):
        yield [row, *offset], [1, *size], start + element


def stored_shape(chunk: dict[str, Any]) -> list[int]:
    """Return the shape of the stored tensor of a chunk."""
    if chunk.get("range"):
        return [chunk["range"][1] - chunk["range"][0]]
    return chunk["shape"]


def share(first: int, last: int, number: int, count: int) -> tuple[int, int]:
    """Return part `number` of `count` of the elements [first, last), which differ by one element at
    most."""
    length = last - first
    return first + length * number // count, first + length * (number + 1) // count
