"""Rearrangements between one tensor of another system and tensors of megaprec, without loss, as data.

Shapes: n query heads, g key/value heads (groups), d head_dim, h hidden. Megaprec keeps tensors separate, [features out,
features in]: query [n d, h], key and value [g d, h]. Other systems pack the three into one tensor, in one of two orders
that have the same shape and are therefore easily confused:

    packed    all of query, all of key, all of value                     (GPT-2)
    grouped   for each group its queries, its key head, its value head   (Megatron; GPT-NeoX, where a group is a head)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """The sizes that a rearrangement needs. rotary: number of features of a head with rotary positions."""

    query: int
    kv: int
    dim: int
    rotary: int


@dataclass(frozen=True)
class Transform:
    """A rearrangement. join: megaprec's tensors -> the other system's. split: the inverse. Both work on meta
    tensors, for shapes.
    """

    join: Callable[[Sequence[Tensor], Heads], Tensor]
    split: Callable[[Tensor, Heads], Sequence[Tensor]]


def _packed(parts: Sequence[Tensor], heads: Heads) -> Tensor:
    return torch.cat(list(parts))


def _unpacked(whole: Tensor, heads: Heads) -> Sequence[Tensor]:
    return whole.split([heads.query * heads.dim, heads.kv * heads.dim, heads.kv * heads.dim])


def _grouped(parts: Sequence[Tensor], heads: Heads) -> Tensor:
    return torch.cat([part.unflatten(0, (heads.kv, -1)) for part in parts], 1).flatten(0, 1)


def _ungrouped(whole: Tensor, heads: Heads) -> Sequence[Tensor]:
    own = heads.query // heads.kv * heads.dim
    parts = whole.unflatten(0, (heads.kv, -1)).split([own, heads.dim, heads.dim], 1)
    return [part.flatten(0, 1) for part in parts]


def _interleave(x: Tensor, heads: Heads) -> Tensor:
    """Move the rotary partners (i, i + r/2) of each head next to each other (2i, 2i + 1)."""
    x = x.unflatten(0, (-1, heads.dim))
    turned = x[:, : heads.rotary].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat((turned, x[:, heads.rotary :]), 1).flatten(0, 1)


def _halve(x: Tensor, heads: Heads) -> Tensor:
    """Invert `_interleave`."""
    x = x.unflatten(0, (-1, heads.dim))
    turned = x[:, : heads.rotary].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((turned, x[:, heads.rotary :]), 1).flatten(0, 1)


def _grouped_interleaved(parts: Sequence[Tensor], heads: Heads) -> Tensor:
    query, key, value = parts
    return _grouped([_interleave(query, heads), _interleave(key, heads), value], heads)


def _ungrouped_interleaved(whole: Tensor, heads: Heads) -> Sequence[Tensor]:
    query, key, value = _ungrouped(whole, heads)
    return [_halve(query, heads), _halve(key, heads), value]


SAME = Transform(lambda parts, _: parts[0], lambda whole, _: [whole])
TRANSPOSED = Transform(lambda parts, _: parts[0].t(), lambda whole, _: [whole.t()])
STACKED = Transform(lambda parts, _: torch.cat(list(parts)), lambda whole, _: whole.chunk(2))  # two of one size
PACKED = Transform(_packed, _unpacked)
PACKED_TRANSPOSED = Transform(lambda p, heads: _packed(p, heads).t(), lambda w, heads: _unpacked(w.t(), heads))
GROUPED = Transform(_grouped, _ungrouped)
GROUPED_INTERLEAVED = Transform(_grouped_interleaved, _ungrouped_interleaved)
