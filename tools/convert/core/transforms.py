"""Rearrangements between one tensor of another system and tensors of megaprec, without loss, as
data.

Shapes: n query heads, g key/value heads (groups), d head_dim, h hidden. Megaprec keeps tensors
separate, [features out, features in]: query [n d, h], key and value [g d, h]. Other systems pack
the three into one tensor, in one of two orders that have the same shape and are therefore easily
confused:

    packed    all of query, all of key, all of value                     (GPT-2)
    grouped   for each group its queries, its key head, its value head   (Megatron; GPT-NeoX, where a group is a head)

In latent attention a head of ours has its features with rotary positions first, and the partners of
a rotation half of them apart. Other systems have them last, and mostly the partners side by side.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """The sizes that a rearrangement needs. rotary: number of features of a head with rotary
    positions. value: of a head's value in latent attention.
    """

    query: int
    kv: int
    dim: int
    rotary: int
    value: int = 0


@dataclass(frozen=True)
class Transform:
    """A rearrangement. join: megaprec's tensors -> the other system's. split: the inverse. Both
    work on meta tensors, for shapes.
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


def _latent_query(interleaved: bool) -> Transform:
    """Return the transform of the queries of latent attention. interleaved: rotary partners are
    neighbours there."""

    def join(parts: Sequence[Tensor], heads: Heads) -> Tensor:
        x = (_interleave(parts[0], heads) if interleaved else parts[0]).unflatten(
            0, (-1, heads.dim)
        )
        return torch.cat((x[:, heads.rotary :], x[:, : heads.rotary]), 1).flatten(0, 1)

    def split(whole: Tensor, heads: Heads) -> Sequence[Tensor]:
        x = whole.unflatten(0, (-1, heads.dim))
        still = heads.dim - heads.rotary
        x = torch.cat((x[:, still:], x[:, :still]), 1).flatten(0, 1)
        return [_halve(x, heads) if interleaved else x]

    return Transform(join, split)


def _latent_down(interleaved: bool) -> Transform:
    """Return the transform of the latent of keys and values, and of the rotary part of keys after
    it."""

    def join(parts: Sequence[Tensor], heads: Heads) -> Tensor:
        latent, turning = parts
        alone = replace(heads, dim=heads.rotary)
        return torch.cat((latent, _interleave(turning, alone) if interleaved else turning))

    def split(whole: Tensor, heads: Heads) -> Sequence[Tensor]:
        latent, turning = whole.split([len(whole) - heads.rotary, heads.rotary])
        return [
            latent,
            _halve(turning, replace(heads, dim=heads.rotary)) if interleaved else turning,
        ]

    return Transform(join, split)


def _latent_up(parts: Sequence[Tensor], heads: Heads) -> Tensor:
    return torch.cat([part.unflatten(0, (heads.query, -1)) for part in parts], 1).flatten(0, 1)


def _latent_up_split(whole: Tensor, heads: Heads) -> Sequence[Tensor]:
    parts = whole.unflatten(0, (heads.query, -1)).split([heads.dim - heads.rotary, heads.value], 1)
    return [part.flatten(0, 1) for part in parts]


def _experts_interleaved(parts: Sequence[Tensor], heads: Heads) -> Tensor:
    """Stack experts' gates and ups [ffn, h], rows of both in turn, as [experts, h, 2 ffn]; biases
    without h."""
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return torch.stack([torch.stack(pair, 1).flatten(0, 1).t() for pair in pairs])


def _experts_halved(whole: Tensor, heads: Heads) -> Sequence[Tensor]:
    """Invert `_experts_interleaved`."""
    return [part for expert in whole for part in (expert.t()[::2], expert.t()[1::2])]


SAME = Transform(lambda parts, _: parts[0], lambda whole, _: [whole])
TRANSPOSED = Transform(lambda parts, _: parts[0].t(), lambda whole, _: [whole.t()])
# two of one size
STACKED = Transform(lambda parts, _: torch.cat(list(parts)), lambda whole, _: whole.chunk(2))
PACKED = Transform(_packed, _unpacked)
PACKED_TRANSPOSED = Transform(
    lambda p, heads: _packed(p, heads).t(), lambda w, heads: _unpacked(w.t(), heads)
)
GROUPED = Transform(_grouped, _ungrouped)
GROUPED_INTERLEAVED = Transform(_grouped_interleaved, _ungrouped_interleaved)
LATENT_QUERY = _latent_query(True)
LATENT_QUERY_HALVES = _latent_query(False)
LATENT_DOWN = _latent_down(True)
LATENT_DOWN_HALVES = _latent_down(False)
LATENT_UP = Transform(_latent_up, _latent_up_split)
# Of all experts of a layer: features in before features out; a bias as it is.
EXPERTS_TRANSPOSED = Transform(
    lambda parts, _: torch.stack([part.t() for part in parts]),
    lambda whole, _: [expert.t() for expert in whole],
)
EXPERTS_INTERLEAVED = Transform(_experts_interleaved, _experts_halved)
