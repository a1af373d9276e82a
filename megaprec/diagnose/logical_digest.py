"""Digests of logical tensors that do not depend on the layout: each rank digests its slices, and
the sum is the digest.

The bits of an element are an integer x, spread over 64 bits if it has as many. The digest is two
sums of x times a constant, modulo 2^64. The constant is the product of one odd pseudo-random number
for each coordinate of the element in its logical tensor, so a slice along any dim, and any run of a
slice, has terms of its own. Integer sums have no rounding and no order: added over the ranks that
hold them, the terms of all elements give the same 128 bits in every layout.

One changed bit always changes both sums. Any other change, such as two elements or rows that are
swapped, stays unseen with a probability of about 2^-64. Negative zero counts as zero: a sum in
another order may have either.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from megaprec.comm.layout import Part
from megaprec.comm.random import bits, key

# elements processed at once on a CPU: the temporaries then stay in a core's cache
BLOCK = 1 << 15
_DEVICE_BLOCK = 1 << 22  # on other devices, where the start of a kernel costs more
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_terms(
    values: Tensor,
    part: Part,
    first: int,
) -> Tensor:
    """Return the sums over elements [first, first + len(values)) of the flattened slice `part`:
    int64 [2].

    values: [n], of any floating-point dtype.
    """
    total = torch.zeros(2, dtype=torch.int64, device=values.device)
    if not len(values):
        return total
    shape = part.local or (1,)
    rows, columns = _constants(_offset(part), shape, values.device)
    width = columns.shape[1]
    for start, stop in _split_at_rows(first, first + len(values), width):
        row, column = divmod(start, width)
        count = min(width, stop - start)
        table = values[start - first : stop - first].view(-1, count)
        rows_of_table = rows[:, row : row + len(table)]
        columns_of_table = columns[:, column : column + count]
        total += _sum_table(table, rows_of_table, columns_of_table)
    return total


def _split_at_rows(
    first: int,
    last: int,
    width: int,
) -> Iterator[tuple[int, int]]:
    """Yield elements [first, last) of a matrix of `width` columns as runs [start, stop): the end of
    a row, full rows, and the beginning of a row; none is empty."""
    next_row = min(last, -(-first // width) * width)
    last_row = max(next_row, last // width * width)
    runs = [
        (first, next_row),
        (next_row, last_row),
        (last_row, last),
    ]
    for start, stop in runs:
        if start < stop:
            yield start, stop


def _sum_table(
    table: Tensor,
    rows: Tensor,
    columns: Tensor,
) -> Tensor:
    """Return the sums over a table [r, c] with the constants of its rows, int64 [2, r], and
    columns, int64 [2, c]."""
    block = BLOCK if table.device.type == "cpu" else _DEVICE_BLOCK
    step = max(1, block // table.shape[1])
    total = torch.zeros(2, dtype=torch.int64, device=table.device)
    blocks = zip(table.split(step), rows.split(step, dim=1), strict=True)
    for elements, constants in blocks:
        lanes = _lanes(elements)
        for number in range(2):
            sum_of_row = (lanes * columns[number]).sum(1)
            total[number] += (sum_of_row * constants[number]).sum()
    return total


def _lanes(values: Tensor) -> Tensor:
    """Return the bits of each element as int64, spread over 64 bits; negative zero as zero."""
    wide = values if values.itemsize > 1 else values.float()  # torch adds no numbers of eight bits
    positive_zero = wide + 0.0  # -0.0 + 0.0 is 0.0
    lanes = positive_zero.view(_INTEGERS[wide.itemsize]).long()
    if wide.itemsize == 8:
        return lanes + (lanes >> 32)
    return lanes


def _offset(part: Part) -> tuple[int, ...]:
    """Return the first index of the slice along each dim; that of a scalar is (0,)."""
    dims = range(len(part.shape))
    return tuple(part.start if dim == part.dim else 0 for dim in dims) or (0,)


@lru_cache(1024)
def _constants(
    start: tuple[int, ...],
    size: tuple[int, ...],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return the constants of the rows and columns of a slice, for both sums: odd int64 [2, rows],
    [2, columns].

    start, size: of the slice along each dim. A row is one index of all dims but the last.
    """
    dims = range(-len(size), 0)
    spans = zip(dims, start, size, strict=True)
    *of_outer_dims, columns = [
        _coordinate_constants(dim, first, count) for dim, first, count in spans
    ]
    rows = torch.ones(2, 1, dtype=torch.int64)
    for constants in of_outer_dims:
        # all products of a row so far and a coordinate of this dim, in row-major order
        products = rows[:, :, None] * constants[:, None, :]
        rows = products.reshape(2, -1)
    assert rows.shape[1] == prod(size[:-1])
    return rows.to(device), columns.to(device)


def _coordinate_constants(
    dim: int,
    first: int,
    count: int,
) -> Tensor:
    """Return the constants of `count` coordinates of a dim, for both sums: int64 [2, count].

    dim: counted from the last, which is -1. Odd numbers have inverses modulo 2^64, so no change of
    an element is multiplied away.
    """
    coordinates = torch.arange(first, first + count)
    constants = []
    for number in range(2):
        stream = key(0, "coordinate", dim, number)
        constants.append(bits(stream, coordinates) | 1)
    return torch.stack(constants)
