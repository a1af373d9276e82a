"""Random numbers that do not depend on the layout.

Every number is a function of a key (the seed and a name) and of the logical index of the element
for which it is drawn. There is no generator state, so the numbers do not depend on which rank draws
them, in which order, or how often: initial weights and dropout masks are equal in every layout, on
every device and in recomputation, and a checkpoint contains no random state.

The numbers are SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
2014) used as a counter-based generator, in torch's wrapping int64 arithmetic.
"""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import blake2b
from itertools import starmap
from math import prod
from statistics import NormalDist

import torch
from torch import Tensor

from megaprec.comm.layout import Part

_GAMMA, _MIX1, _MIX2 = (
    v - 2**64 for v in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
# elements that a thread draws at a time: fewer than those for which torch starts threads of its own
_BLOCK = 24_000
_SEGMENTS = 8  # of each factor of two of a probability, as a power of two


def key(seed: int, *names: object) -> int:
    """Return a signed 64-bit hash of the seed and the names."""
    digest = blake2b(repr((seed, *names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def bits(key: int | Tensor, index: Tensor) -> Tensor:
    """Return 64 random bits (int64) for each int64 element of `index`, in its shape. key: also a
    scalar tensor."""
    z = index * _GAMMA + key
    z = (z ^ _shift(z, 30)) * _MIX1
    z = (z ^ _shift(z, 27)) * _MIX2
    return z ^ _shift(z, 31)


def keep(key: int | Tensor, index: Tensor, probability: float) -> Tensor:
    """Return a bool for each element of `index`, True with `probability`.

    The comparison is in integers, so the result is equal on every device.
    """
    return _shift(bits(key, index), 11) < int(probability * 2**53)


def normal(key: int, index: Tensor) -> Tensor:
    """Return a float32 number, standard normal, for each element of `index`."""
    pairs = _normal_pairs(bits(key, index >> 1))
    return pairs.gather(-1, (index & 1).unsqueeze(-1)).squeeze(-1)


def normal_part(part: Part, seed: int, std: float, dtype: torch.dtype) -> Tensor:
    """Return the slice `part` of a logical tensor of normal numbers: [*part.local], drawn on the
    CPU."""
    run = prod(part.local[part.dim or 0 :])  # consecutive elements of the logical tensor
    whole = prod(part.shape[part.dim or 0 :])
    skipped = part.start * prod(part.shape[(part.dim or 0) + 1 :])
    values = torch.empty(prod(part.local) // max(1, run), run, dtype=dtype)
    number = key(seed, part.name)
    rows = max(1, _BLOCK // max(1, run))

    def fill(row: int, first: int) -> None:
        some = values[row : row + rows, first : first + _BLOCK]
        starts = torch.arange(row, row + len(some)) * whole + (skipped + first)
        some.copy_(_normal_runs(number, starts, some.shape[1]).to(dtype).mul_(std))

    blocks = [
        (row, first) for row in range(0, len(values), rows) for first in range(0, run, _BLOCK)
    ]
    if len(blocks) < 2:
        deque(starmap(fill, blocks), maxlen=0)
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            # raises what a block raised
            deque(pool.map(fill, *zip(*blocks, strict=True)), maxlen=0)
    return values.view(part.local)


def _normal_runs(key: int, starts: Tensor, length: int) -> Tensor:
    """Return the numbers of `length` consecutive indices from each of `starts`: float32 [starts,
    length]."""
    odd = starts & 1
    words = (starts >> 1).unsqueeze(-1) + torch.arange(length // 2 + 1, device=starts.device)
    drawn = _normal_pairs(bits(key, words)).flatten(1)
    if bool((odd == odd[:1]).all()):
        return drawn[:, int(odd[0]) :][:, :length]
    return drawn.gather(1, odd.unsqueeze(-1) + torch.arange(length, device=starts.device))


def _normal_pairs(words: Tensor) -> Tensor:
    """Return two standard normal numbers for each word of 64 bits: float32 [*words, 2].

    32 bits make one number: a sign, and a probability of at most 1/2 whose quantile is interpolated
    in a table. Every operation is one of integers or a single rounding of IEEE 754, so the numbers
    are equal on every device.
    """
    halves = words.unsqueeze(-1).view(torch.int32)
    probability = (halves & 0x7FFFFFFF).float().add_(0.5)  # in units of 2**-32
    segment = (probability.view(torch.int32) >> (23 - _SEGMENTS)).flatten()
    values, slopes = (
        column.to(words.device).index_select(0, segment).view(halves.shape)
        for column in _quantiles()
    )
    return torch.copysign(slopes.mul_(probability).add_(values), halves.view(torch.float32))


@cache
def _quantiles() -> tuple[Tensor, Tensor]:
    """Return the lines that approximate the normal quantile: values at 0 and slopes, float32, by
    segment.

    The segment of a probability p, in units of 2**-32, is the exponent and the first bits of the
    float32 p, so each factor of two has 2**_SEGMENTS segments. A line is exact at both ends of its
    segment, and within 2e-6 between them.
    """
    first, last = ((127 + power) << _SEGMENTS for power in (-1, 31))
    edges = (
        (torch.arange(first, last + 1, dtype=torch.int32) << (23 - _SEGMENTS))
        .view(torch.float32)
        .double()
    )
    quantiles = torch.tensor(
        [-NormalDist().inv_cdf(edge * 2.0**-32) for edge in edges.tolist()], dtype=torch.float64
    )
    slopes = quantiles.diff() / edges.diff()
    # probabilities that round up to 1/2 are the last segment
    unused = torch.zeros(first)
    end = torch.zeros(1)
    values = quantiles[:-1] - slopes * edges[:-1]
    return torch.cat((unused, values.float(), end)), torch.cat((unused, slopes.float(), end))


def places(part: Part, first: int, last: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the indices in the flattened logical tensor of elements [first, last) of the flattened
    slice.

    int64 [last - first].
    """
    index = torch.arange(first, last, device=device)
    if part.dim is None:
        return index
    inner = prod(part.local[part.dim :])
    return (
        index
        + (index // inner) * (prod(part.shape[part.dim :]) - inner)
        + part.start * prod(part.shape[part.dim + 1 :])
    )


def _shift(z: Tensor, n: int) -> Tensor:
    """Return the bits of int64 `z` shifted right with zero fill; torch's own shift extends the
    sign."""
    return (z >> n) & ((1 << (64 - n)) - 1)
