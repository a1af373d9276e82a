"""Random numbers that do not depend on the layout.

Every number is a function of a key (the seed and a name) and of the logical index of the element for which it is
drawn. There is no generator state, so the numbers do not depend on which rank draws them, in which order, or how often:
initial weights and dropout masks are equal in every layout, on every device and in recomputation, and a checkpoint
contains no random state.

The numbers are SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014) used
as a counter-based generator, in torch's wrapping int64 arithmetic.
"""

from hashlib import blake2b
from math import prod

import torch
from torch import Tensor

from megaprec.comm.layout import Part

_GAMMA, _MIX1, _MIX2 = (v - 2**64 for v in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_BLOCK = 1 << 20  # elements drawn at a time: bounds the int64 and float64 temporaries


def key(seed: int, *names: object) -> int:
    """Return a signed 64-bit hash of the seed and the names."""
    digest = blake2b(repr((seed, *names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def bits(key: int, index: Tensor) -> Tensor:
    """Return 64 random bits (int64) for each int64 element of `index`, in its shape."""
    z = index * _GAMMA + key
    z = (z ^ _shift(z, 30)) * _MIX1
    z = (z ^ _shift(z, 27)) * _MIX2
    return z ^ _shift(z, 31)


def uniform(key: int, index: Tensor) -> Tensor:
    """Return a float64 number, uniform in (0, 1), for each element of `index`."""
    return (_shift(bits(key, index), 11).double() + 0.5) * 2.0**-53


def keep(key: int, index: Tensor, probability: float) -> Tensor:
    """Return a bool for each element of `index`, True with `probability`.

    The comparison is in integers, so the result is equal on every device.
    """
    return _shift(bits(key, index), 11) < int(probability * 2**53)


def normal(key: int, index: Tensor) -> Tensor:
    """Return a float64 number, standard normal, for each element of `index`."""
    return torch.special.ndtri(uniform(key, index))


def normal_part(part: Part, seed: int, std: float, dtype: torch.dtype) -> Tensor:
    """Return the slice `part` of a logical tensor of normal numbers: [*part.local], drawn on the CPU."""
    flat, number = torch.empty(prod(part.local), dtype=dtype), key(seed, part.name)
    for first in range(0, len(flat), _BLOCK):  # no iteration if the slice is all padding
        last = min(first + _BLOCK, len(flat))
        flat[first:last] = std * normal(number, places(part, first, last))
    return flat.view(part.local)


def places(part: Part, first: int, last: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the indices in the flattened logical tensor of elements [first, last) of the flattened slice.

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
    """Return the bits of int64 `z` shifted right with zero fill; torch's own shift extends the sign."""
    return (z >> n) & ((1 << (64 - n)) - 1)
