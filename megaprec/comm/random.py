"""Random numbers keyed by what they are for, not by who draws them.

Every number is a function of a key (the seed and a name) and of the logical coordinates of the element it
is for. No generator has a state, so nothing depends on which rank draws, in which order, or how often: a
weight starts equal and a dropout mask falls equal in every layout, on every device and in a recomputation, and
a checkpoint holds no random state.

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
    """64 bits, signed, that stand for the seed and the names."""
    digest = blake2b(repr((seed, *names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def bits(key: int, index: Tensor) -> Tensor:
    """int64 random bits, one for each int64 index, whatever its shape."""
    z = index * _GAMMA + key
    z = (z ^ _shift(z, 30)) * _MIX1
    z = (z ^ _shift(z, 27)) * _MIX2
    return z ^ _shift(z, 31)


def uniform(key: int, index: Tensor) -> Tensor:
    """float64 in (0, 1), one for each index."""
    return (_shift(bits(key, index), 11).double() + 0.5) * 2.0**-53


def keep(key: int, index: Tensor, probability: float) -> Tensor:
    """bool, True with `probability`, one for each index. Decided in integers: equal on every device."""
    return _shift(bits(key, index), 11) < int(probability * 2**53)


def normal(key: int, index: Tensor) -> Tensor:
    """float64, standard normal, one for each index."""
    return torch.special.ndtri(uniform(key, index))


def normal_part(part: Part, seed: int, std: float, dtype: torch.dtype) -> Tensor:
    """The slice `part` of a logical tensor of normal numbers: [*part.local], drawn on the CPU."""
    flat, number = torch.empty(prod(part.local), dtype=dtype), key(seed, part.name)
    for first in range(0, len(flat), _BLOCK):  # none if the slice is nothing but padding
        last = min(first + _BLOCK, len(flat))
        flat[first:last] = std * normal(number, places(part, first, last))
    return flat.view(part.local)


def places(part: Part, first: int, last: int, device: torch.device | str = "cpu") -> Tensor:
    """Where elements [first, last) of the flattened slice lie in the flattened logical tensor: int64 [last - first]."""
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
    """Logical shift right of int64 bits; torch's own keeps the sign."""
    return (z >> n) & ((1 << (64 - n)) - 1)
