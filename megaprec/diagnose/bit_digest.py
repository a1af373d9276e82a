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
_ROWS = {"cpu": 1}  # rows processed at once: on a CPU the temporaries then stay in a core's cache
_ROWS_ELSEWHERE = 128


def digest(x: Tensor) -> Tensor:
    """Return the digest of the bits of `x`, of any dtype and shape: int64 [2].

    Temporaries are small, unless `x` is not contiguous or does not begin at a multiple of eight
    bytes: it is then copied.
    """
    total = torch.zeros(2, dtype=torch.int64, device=x.device)
    if not x.numel():
        return total
    body, tail = _lanes(x.detach())
    rows = _ROWS.get(x.device.type, _ROWS_ELSEWHERE)
    for first in range(0, len(body), rows * WIDTH):
        total += _of_rows(body[first : first + rows * WIDTH], first // WIDTH)
    return total if tail is None else total + _of_row(tail, len(body) // WIDTH + 1)


def hexadecimal(made: Tensor) -> str:
    """Return a digest, int64 [2], as 32 hexadecimal digits."""
    return "".join(f"{number % 2**64:016x}" for number in made.tolist())


def _lanes(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the lanes of `x`, and one lane of the bytes that are left over, if any."""
    flat = x.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = len(flat) // 8 * 8
    body = flat[:whole].view(torch.int64)
    if whole == len(flat):
        return body, None
    tail = torch.zeros(8, dtype=torch.uint8, device=x.device)
    tail[: len(flat) - whole] = flat[whole:]
    return body, tail.view(torch.int64)


def _of_rows(lanes: Tensor, row: int) -> Tensor:
    """Return the sums over consecutive rows, of which the first has number `row` and the last may
    be short."""
    whole = len(lanes) // WIDTH
    if whole * WIDTH != len(lanes):
        short = _of_row(lanes[whole * WIDTH :], row + whole)
        return short + _of_rows(lanes[: whole * WIDTH], row) if whole else short
    spread = lanes + (lanes >> 32)
    one, other = _constants(lanes.device)
    table = spread.view(whole, WIDTH)
    sums = torch.stack([(table * one).sum(1), (table * other).sum(1)])
    return (sums * _of_row_numbers(row, whole, lanes.device)).sum(1)


def _of_row(lanes: Tensor, row: int) -> Tensor:
    """Return the sums over a row of at most WIDTH lanes."""
    spread = lanes + (lanes >> 32)
    sums = torch.stack([(spread * each[: len(lanes)]).sum() for each in _constants(lanes.device)])
    return sums * _of_row_numbers(row, 1, lanes.device)[:, 0]


@cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the constants of a row's lanes, for both sums: odd int64 [WIDTH] each."""
    index = torch.arange(WIDTH)
    one, other = (bits(key(0, "lanes", n), index) | 1 for n in range(2))
    return one.to(device), other.to(device)


@lru_cache(4096)
def _of_row_numbers(first: int, count: int, device: torch.device) -> Tensor:
    """Return the constants of rows, for both sums: odd int64 [2, count]."""
    index = torch.arange(first, first + count, device=device)
    return torch.stack([bits(key(0, "rows", n), index) | 1 for n in range(2)])
