"""Digests of tensors: of the bits as they lie in memory, and of logical tensors in any layout.

The bits are read as 64-bit integers, here called lanes. Each lane is spread, lane + (lane >> 32),
so that its highest bit also counts further down. A digest is two sums of lanes times constants,
modulo 2^64. The constants are odd and pseudo-random. They differ between the two sums and between
the lanes: each is the product of one number for each coordinate of the lane. Integer sums have no
rounding and no order: a digest is the same on every device, and the digests of parts add up to that
of the whole.

One changed bit always changes both sums. Any other change, such as two elements or rows that are
swapped, stays unseen with a probability of about 2^-64.
"""

from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from megaprec.comm.layout import Part
from megaprec.comm.random import bits, key

# Lanes of a row in digests of bits; each row and each lane of a row has constants of its own.
WIDTH = 1 << 15
# Lanes summed at once on a CPU: the temporaries then stay in a core's cache.
BLOCK = 1 << 15
# On other devices, where the start of a kernel costs more.
_DEVICE_BLOCK = 1 << 22
# the integers with the bits of a number of as many bytes
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LANE_BYTES = 8


def digest(tensor: Tensor) -> Tensor:
    """Return the digest of the bits of a tensor of any dtype and shape: int64 [2], on its device.

    Temporaries are small, unless the tensor is not contiguous or does not begin at a multiple of
    eight bytes: it is then copied.
    """
    flat_bytes = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat_bytes.storage_offset() % _LANE_BYTES:
        # only bytes that begin at a multiple of eight can be viewed as int64
        flat_bytes = flat_bytes.clone()
    num_lanes = len(flat_bytes) // _LANE_BYTES
    num_lane_bytes = num_lanes * _LANE_BYTES
    lanes = flat_bytes[:num_lane_bytes].view(torch.int64)
    left_over = flat_bytes[num_lane_bytes:]

    num_rows = -(-num_lanes // WIDTH)  # rounded up
    row_constants = _row_constants(num_rows + 1, tensor.device)
    column_constants = _column_constants(tensor.device)
    total = _sum_flat(lanes, 0, row_constants, column_constants, _spread)
    if len(left_over):
        # the bytes that fill no lane are a row of their own, after all others
        last_lane = torch.zeros(_LANE_BYTES, dtype=torch.uint8, device=tensor.device)
        last_lane[: len(left_over)] = left_over
        total += _sum_table(
            last_lane.view(torch.int64).view(1, 1),
            row_constants[:, -1:],
            column_constants[:, :1],
            _spread,
        )
    return total


def digest_terms(values: Tensor, part: Part, start: int) -> Tensor:
    """Return the terms of some elements in the digest of their logical tensor: int64 [2].

    The digest of a logical tensor is the sum of the terms of all its elements, on whatever ranks
    they are: the same in every layout. Negative zero counts as zero: a sum in another order may
    have either.

    values: [n], elements [start, start + n) of the flattened slice, of any floating-point dtype.
    part: the slice of the logical tensor.
    """
    first_indices = [0] * len(part.shape)
    if part.dim is not None:
        first_indices[part.dim] = part.start
    if part.local:
        row_constants, column_constants = _slice_constants(
            tuple(first_indices),
            part.local,
            values.device,
        )
    else:  # a scalar counts as a tensor of one element
        row_constants, column_constants = _slice_constants((0,), (1,), values.device)
    return _sum_flat(values, start, row_constants, column_constants, _lanes_of_elements)


def hexadecimal(sums: Tensor) -> str:
    """Return a digest, int64 [2], as 32 hexadecimal digits. Waits for its device."""
    unsigned = [number % 2**64 for number in sums.tolist()]
    return "".join(f"{number:016x}" for number in unsigned)


ToLanes = Callable[[Tensor], Tensor]


def _sum_flat(
    values: Tensor,
    start: int,
    row_constants: Tensor,
    column_constants: Tensor,
    to_lanes: ToLanes,
) -> Tensor:
    """Return the two sums of a digest over elements [start, start + len(values)) of a flattened
    matrix: int64 [2].

    values: those elements, flat.
    row_constants, column_constants: of the whole matrix, int64 [2, rows] and [2, columns].
    to_lanes: returns the lanes, int64, of some of the values.
    """
    total = torch.zeros(2, dtype=torch.int64, device=values.device)
    if not len(values):
        return total  # the matrix may have no columns
    width = column_constants.shape[1]
    stop = start + len(values)
    for run_start, run_stop in _split_at_rows(start, stop, width):
        row, column = divmod(run_start, width)
        # a part of one row, or full rows
        num_columns = min(width, run_stop - run_start)
        run = values[run_start - start : run_stop - start]
        table = run.view(-1, num_columns)
        total += _sum_table(
            table,
            row_constants[:, row : row + len(table)],
            column_constants[:, column : column + num_columns],
            to_lanes,
        )
    return total


def _split_at_rows(start: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield elements [start, stop) of a matrix of `width` columns as runs [start, stop).

    The runs are the end of a row, full rows, and the beginning of a row; none is empty.
    """
    # all of these are elements, at which a row begins or the whole ends
    next_row = min(stop, -(-start // width) * width)
    last_row = max(next_row, stop // width * width)
    for run_start, run_stop in pairwise((start, next_row, last_row, stop)):
        if run_start < run_stop:
            yield run_start, run_stop


def _sum_table(
    table: Tensor,
    row_constants: Tensor,
    column_constants: Tensor,
    to_lanes: ToLanes,
) -> Tensor:
    """Return int64 [2]: both sums, over a table [r, c], of lane * constant of its row * constant of
    its column.

    row_constants, column_constants: int64 [2, r] and [2, c], for the two sums.
    to_lanes: as in `_sum_flat`.
    """
    block = BLOCK if table.device.type == "cpu" else _DEVICE_BLOCK
    block_rows = max(1, block // table.shape[1])
    total = torch.zeros(2, dtype=torch.int64, device=table.device)
    first_columns, second_columns = column_constants.unbind()
    blocks = table.split(block_rows)
    blocks_of_constants = row_constants.split(block_rows, dim=1)
    for elements, constants in zip(blocks, blocks_of_constants, strict=True):
        lanes = to_lanes(elements)
        # one sum at a time, so that no temporary is larger than the block
        first_sums = (lanes * first_columns).sum(1)
        second_sums = (lanes * second_columns).sum(1)
        sums_of_rows = torch.stack([first_sums, second_sums])
        total += (sums_of_rows * constants).sum(1)
    return total


def _spread(lanes: Tensor) -> Tensor:
    """Return the lanes with their upper half added to the lower one."""
    return lanes + (lanes >> 32)


def _lanes_of_elements(values: Tensor) -> Tensor:
    """Return a lane for each element: its bits as int64; negative zero as zero."""
    # torch adds no numbers of eight bits
    wide = values if values.itemsize > 1 else values.float()
    positive_zero = wide + 0.0  # -0.0 + 0.0 is 0.0
    lanes = positive_zero.view(INTEGERS[wide.itemsize]).long()
    if wide.itemsize < _LANE_BYTES:
        return lanes
    return _spread(lanes)


@cache
def _column_constants(device: torch.device) -> Tensor:
    """Return the constants of the lanes of a row: int64 [2, WIDTH]."""
    return _coordinate_constants(-1, 0, WIDTH).to(device)


@lru_cache(1024)
def _row_constants(num_rows: int, device: torch.device) -> Tensor:
    """Return the constants of the first rows of lanes: int64 [2, num_rows]."""
    return _coordinate_constants(-2, 0, num_rows).to(device)


@lru_cache(1024)
def _slice_constants(
    first_indices: tuple[int, ...],
    sizes: tuple[int, ...],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return the constants of the rows and columns of a slice: int64 [2, rows], [2, columns].

    A row is one index of all dims but the last.

    first_indices: of the slice along each dim. sizes: of the slice along each dim.
    """
    constants_of_dims: list[Tensor] = []
    for dim in range(-len(sizes), 0):
        constants_of_dim = _coordinate_constants(dim, first_indices[dim], sizes[dim])
        constants_of_dims.append(constants_of_dim)
    *outer_dims, column_constants = constants_of_dims
    row_constants = torch.ones(2, 1, dtype=torch.int64)
    for constants in outer_dims:
        # all products of a row so far and a coordinate of this dim, in row-major order
        products = row_constants[:, :, None] * constants[:, None, :]
        row_constants = products.reshape(2, -1)
    return row_constants.to(device), column_constants.to(device)


def _coordinate_constants(dim: int, first_index: int, count: int) -> Tensor:
    """Return the constants of `count` coordinates of a dim, for both sums: int64 [2, count].

    dim: counted from the last, which is -1.
    """
    coordinates = torch.arange(first_index, first_index + count)
    constants: list[Tensor] = []
    for number in range(2):
        stream = key(0, "coordinate", dim, number)
        # odd numbers have inverses modulo 2^64, so no change of an element is multiplied away
        odd_numbers = bits(stream, coordinates) | 1
        constants.append(odd_numbers)
    return torch.stack(constants)
