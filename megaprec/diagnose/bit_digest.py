"""A digest of a tensor's bits that depends on their order, computed on the tensor's device.

The bits are read as 64-bit lanes x_i. Each is spread, y_i = x_i + (x_i >> 32), so that its highest
bit also counts further down, and two sums of y_i times odd constants are taken modulo 2^64: the
constants are pseudo-random, differ with i and between the sums. One changed bit always changes both
sums. Two elements or rows that are swapped change them, because their constants differ. Any other
change stays unseen with a probability of about 2^-64.

Integer sums have no rounding: the digest is the same on every device, in every order of addition.
"""

from functools import cache, lru_cache

import torch
from torch import Tensor

from megaprec.comm.random import bits, key

# lanes of a row; rows have constants of their own, by which those of their lanes are multiplied
WIDTH = 1 << 15
# rows processed at once: on a CPU the temporaries then stay in a core's cache
_CPU_ROWS = 1
_DEVICE_ROWS = 128


def digest(x: Tensor) -> Tensor:
    """Return the digest of the bits of `x`, of any dtype and shape: int64 [2].

    Temporaries are small, unless `x` is not contiguous or does not begin at a multiple of eight
    bytes: it is then copied.
    """
    device = x.device
    total = torch.zeros(2, dtype=torch.int64, device=device)
    if not x.numel():
        return total
    lanes, tail = _lanes(x.detach())
    rows = _CPU_ROWS if device.type == "cpu" else _DEVICE_ROWS
    for row, block in enumerate(lanes.split(rows * WIDTH)):
        total += _sum_rows(block, row * rows)
    if tail is not None:
        # the left-over bytes are a row of their own, after all others
        total += _sum_row(tail, len(lanes) // WIDTH + 1)
    return total


def hexadecimal(sums: Tensor) -> str:
    """Return a digest, int64 [2], as 32 hexadecimal digits."""
    unsigned = [number % 2**64 for number in sums.tolist()]
    return "".join(f"{number:016x}" for number in unsigned)


def _lanes(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the lanes of `x`, and one lane of the bytes that are left over, if any."""
    flat = x.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        # only bytes that begin at a multiple of eight can be viewed as int64
        flat = flat.clone()
    length = len(flat) // 8 * 8
    lanes = flat[:length].view(torch.int64)
    rest = flat[length:]
    if not len(rest):
        return lanes, None
    tail = torch.zeros(8, dtype=torch.uint8, device=x.device)
    tail[: len(rest)] = rest
    return lanes, tail.view(torch.int64)


def _sum_rows(lanes: Tensor, row: int) -> Tensor:
    """Return the sums over consecutive rows, of which the first has number `row` and the last may
    be short."""
    count = len(lanes) // WIDTH
    full_rows = lanes[: count * WIDTH]
    short_row = lanes[count * WIDTH :]
    if not len(short_row):
        return _sum_full_rows(full_rows, row)
    total = _sum_row(short_row, row + count)
    if count:
        total = total + _sum_full_rows(full_rows, row)
    return total


def _sum_full_rows(lanes: Tensor, row: int) -> Tensor:
    """Return the sums over consecutive rows of WIDTH lanes, of which the first has number `row`."""
    table = _spread(lanes).view(-1, WIDTH)
    first, second = _lane_constants(lanes.device)
    # one sum at a time, so that no temporary is larger than the table
    sums = torch.stack(
        [
            (table * first).sum(1),
            (table * second).sum(1),
        ]
    )
    row_constants = _row_constants(row, len(table), lanes.device)
    return (sums * row_constants).sum(1)


def _sum_row(lanes: Tensor, row: int) -> Tensor:
    """Return the sums over a row of at most WIDTH lanes."""
    constants = _lane_constants(lanes.device)[:, : len(lanes)]
    sums = (_spread(lanes) * constants).sum(1)
    return sums * _row_constants(row, 1, lanes.device)[:, 0]


def _spread(lanes: Tensor) -> Tensor:
    """Return the lanes with their upper half added to the lower one, so that the highest bit of a
    lane changes more than the highest bit of a sum."""
    return lanes + (lanes >> 32)


@cache
def _lane_constants(device: torch.device) -> Tensor:
    """Return the constants of a row's lanes, for both sums: odd int64 [2, WIDTH]."""
    return _odd_constants("lanes", torch.arange(WIDTH)).to(device)


@lru_cache(4096)
def _row_constants(
    first: int,
    count: int,
    device: torch.device,
) -> Tensor:
    """Return the constants of rows, for both sums: odd int64 [2, count]."""
    return _odd_constants("rows", torch.arange(first, first + count, device=device))


def _odd_constants(kind: str, index: Tensor) -> Tensor:
    """Return pseudo-random constants by index [n], for both sums: int64 [2, n].

    Odd numbers have inverses modulo 2^64, so no change of a lane is multiplied away.
    """
    first = bits(key(0, kind, 0), index)
    second = bits(key(0, kind, 1), index)
    return torch.stack([first, second]) | 1
