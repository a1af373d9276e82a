"""Rearrangements between one tensor of another system and tensors of megaprec, without loss, as
data.

Shapes: n query heads, g key/value heads (groups), d head_dim, h hidden. Megaprec keeps tensors
separate, [features out, features in]: query [n d, h], key and value [g d, h]. Other systems pack
the three into one tensor, in one of two orders that have the same shape and are therefore easily
confused:

    packed    all of query, all of key, all of value (GPT-2)
    grouped   for each group its queries, its key head, its value head (Megatron; GPT-NeoX, where
              a group is a head)

In latent attention a head of ours has its features with rotary positions first, and the partners of
a rotation half of them apart. Other systems have them last, and mostly the partners side by side.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.delta_net import NO_DELTA_NET, DeltaNet
from models.mamba import NO_MAMBA, Mamba

Parts = Sequence[Tensor]  # megaprec's tensors, of which another system's consists


@dataclass(frozen=True)
class HeadSizes:
    """The sizes that a rearrangement needs.

    query: number of query heads.
    kv: number of key/value heads.
    dim: features of a query or key head.
    rotary: features of a head with rotary positions.
    value: features of a head's value in latent attention.
    delta: of gated delta nets.
    mamba: of Mamba-2 mixers.
    """

    query: int
    kv: int
    dim: int
    rotary: int
    value: int = 0
    delta: DeltaNet = NO_DELTA_NET
    mamba: Mamba = NO_MAMBA

    @property
    def unrotated(self) -> int:
        """Return the features of a query or key head without rotary positions."""
        return self.dim - self.rotary


@dataclass(frozen=True)
class Transform:
    """A rearrangement. Both directions work on meta tensors, for shapes.

    join: megaprec's tensors -> the other system's.
    split: the inverse.
    """

    join: Callable[[Parts, HeadSizes], Tensor]
    split: Callable[[Tensor, HeadSizes], Parts]


def _join_stacked(parts: Parts, head_sizes: HeadSizes) -> Tensor:
    """Return the rows of all parts, one part after the other."""
    return torch.cat(list(parts))


def _split_packed(joined: Tensor, head_sizes: HeadSizes) -> Parts:
    """Return query, key and value, which lie one after the other."""
    query_rows = head_sizes.query * head_sizes.dim
    kv_rows = head_sizes.kv * head_sizes.dim
    return joined.split([query_rows, kv_rows, kv_rows])


def _join_per_head(parts: Parts, head_count: int) -> Tensor:
    """Return rows of all parts for the first head, then for the second, and so on."""
    per_head = [part.unflatten(0, (head_count, -1)) for part in parts]
    joined = torch.cat(per_head, 1)
    return joined.flatten(0, 1)


def _split_per_head(joined: Tensor, head_count: int, rows: Sequence[int]) -> Parts:
    """Invert `_join_per_head`. rows: of each part, for one head."""
    heads = joined.unflatten(0, (head_count, -1))
    parts = heads.split(list(rows), 1)
    return [part.flatten(0, 1) for part in parts]


def _join_grouped(parts: Parts, head_sizes: HeadSizes) -> Tensor:
    return _join_per_head(parts, head_sizes.kv)


def _split_grouped(joined: Tensor, head_sizes: HeadSizes) -> Parts:
    # Of a group: all its queries, and one head of keys and values each.
    queries_of_group = head_sizes.query // head_sizes.kv
    head_rows = head_sizes.dim
    rows = [queries_of_group * head_rows, head_rows, head_rows]
    return _split_per_head(joined, head_sizes.kv, rows)


def _split_grouped_gated(joined: Tensor, head_sizes: HeadSizes) -> Parts:
    # Of a group: all its queries, the gates of their outputs, and one head of keys and values each.
    queries_of_group = head_sizes.query // head_sizes.kv
    head_rows = head_sizes.dim
    query_rows = queries_of_group * head_rows
    rows = [query_rows, query_rows, head_rows, head_rows]
    return _split_per_head(joined, head_sizes.kv, rows)


def _interleave(weight: Tensor, head_sizes: HeadSizes) -> Tensor:
    """Move the rotary partners (i, i + r/2) of each head next to each other (2i, 2i + 1)."""
    # The first halves of all pairs, then the second halves: [heads, 2, r/2, ...].
    return _transpose_pairs(weight, head_sizes, (2, -1))


def _deinterleave(weight: Tensor, head_sizes: HeadSizes) -> Tensor:
    """Invert `_interleave`."""
    # Pair after pair: [heads, r/2, 2, ...].
    return _transpose_pairs(weight, head_sizes, (-1, 2))


def _transpose_pairs(weight: Tensor, head_sizes: HeadSizes, pairs: tuple[int, int]) -> Tensor:
    """Return [heads dim, ...] with the rotary features of each head, which lie as `pairs`,
    transposed."""
    heads = weight.unflatten(0, (-1, head_sizes.dim))
    # Features beyond the rotary ones have no partner, and stay.
    rotary, unrotated = heads.split([head_sizes.rotary, head_sizes.unrotated], 1)
    in_pairs = rotary.unflatten(1, pairs)
    transposed = in_pairs.transpose(1, 2)
    rotary = transposed.flatten(1, 2)
    heads = torch.cat((rotary, unrotated), 1)
    return heads.flatten(0, 1)


def _swap_halves(weight: Tensor, head_sizes: HeadSizes) -> Tensor:
    """Return a weight with the rotary partners (i, i + r/2) of each head exchanged: a rotation of
    what is exchanged turns the other way."""
    heads = weight.unflatten(0, (-1, head_sizes.dim))
    rotary, unrotated = heads.split([head_sizes.rotary, head_sizes.unrotated], 1)
    first, second = rotary.chunk(2, 1)
    heads = torch.cat((second, first, unrotated), 1)
    return heads.flatten(0, 1)


def _join_grouped_interleaved(parts: Parts, head_sizes: HeadSizes) -> Tensor:
    query, key, value = parts  # values have no positions
    query = _interleave(query, head_sizes)
    key = _interleave(key, head_sizes)
    return _join_grouped([query, key, value], head_sizes)


def _split_grouped_interleaved(joined: Tensor, head_sizes: HeadSizes) -> Parts:
    query, key, value = _split_grouped(joined, head_sizes)
    query = _deinterleave(query, head_sizes)
    key = _deinterleave(key, head_sizes)
    return [query, key, value]


def _latent_query(interleaved: bool) -> Transform:
    """Return the transform of the queries of latent attention, whose rotary features are last in a
    head of the other system.

    interleaved: rotary partners are neighbours there.
    """

    def join(parts: Parts, head_sizes: HeadSizes) -> Tensor:
        """Return the queries of the other system: rotary features last in each head."""
        (query,) = parts
        if interleaved:
            query = _interleave(query, head_sizes)
        heads = query.unflatten(0, (-1, head_sizes.dim))
        rotary, unrotated = heads.split([head_sizes.rotary, head_sizes.unrotated], 1)
        heads = torch.cat((unrotated, rotary), 1)
        return heads.flatten(0, 1)

    def split(joined: Tensor, head_sizes: HeadSizes) -> Parts:
        """Return our queries: rotary features first in each head."""
        heads = joined.unflatten(0, (-1, head_sizes.dim))
        unrotated, rotary = heads.split([head_sizes.unrotated, head_sizes.rotary], 1)
        heads = torch.cat((rotary, unrotated), 1)
        query = heads.flatten(0, 1)
        if interleaved:
            query = _deinterleave(query, head_sizes)
        return [query]

    return Transform(join, split)


def _latent_down(interleaved: bool) -> Transform:
    """Return the transform of the latent of keys and values, with the rotary part of keys after it.

    interleaved: rotary partners are neighbours in the other system.
    """

    def join(parts: Parts, head_sizes: HeadSizes) -> Tensor:
        latent, key_rope = parts
        if interleaved:  # as a head that has nothing but rotary features
            rope_heads = replace(head_sizes, dim=head_sizes.rotary)
            key_rope = _interleave(key_rope, rope_heads)
        return torch.cat((latent, key_rope))

    def split(joined: Tensor, head_sizes: HeadSizes) -> Parts:
        latent_rows = len(joined) - head_sizes.rotary
        latent, key_rope = joined.split([latent_rows, head_sizes.rotary])
        if interleaved:
            rope_heads = replace(head_sizes, dim=head_sizes.rotary)
            key_rope = _deinterleave(key_rope, rope_heads)
        return [latent, key_rope]

    return Transform(join, split)


def _join_by_query_head(parts: Parts, head_sizes: HeadSizes) -> Tensor:
    return _join_per_head(parts, head_sizes.query)


def _split_latent_up(joined: Tensor, head_sizes: HeadSizes) -> Parts:
    # A head's key without positions, then its value; the rotary part of keys is all heads' own.
    rows = [head_sizes.unrotated, head_sizes.value]
    return _split_per_head(joined, head_sizes.query, rows)


def _split_gated_query(joined: Tensor, head_sizes: HeadSizes) -> Parts:
    # A head's query, then the gate of its output.
    return _split_per_head(joined, head_sizes.query, [head_sizes.dim, head_sizes.dim])


def _join_by_key_head(parts: Parts, head_sizes: HeadSizes) -> Tensor:
    return _join_per_head(parts, head_sizes.delta.key_heads)


def _split_delta_net(joined: Tensor, head_sizes: HeadSizes) -> Parts:
    sizes = head_sizes.delta
    # Of a head of keys: its query and key, the values that it serves, and their gate.
    values = sizes.value_width // sizes.key_heads
    rows = [sizes.key_dim, sizes.key_dim, values, values]
    return _split_per_head(joined, sizes.key_heads, rows)


def _split_delta_gates(joined: Tensor, head_sizes: HeadSizes) -> Parts:
    sizes = head_sizes.delta
    # Of a head of keys: one strength, and one decay, of each head of values that it serves.
    values = sizes.value_heads // sizes.key_heads
    return _split_per_head(joined, sizes.key_heads, [values, values])


def _split_stacked_delta_net(joined: Tensor, head_sizes: HeadSizes) -> Parts:
    sizes = head_sizes.delta
    # Queries, keys, values and their gate, then two numbers of each head of values.
    rows = [
        sizes.key_width,
        sizes.key_width,
        sizes.value_width,
        sizes.value_width,
        sizes.value_heads,
        sizes.value_heads,
    ]
    return joined.split(rows)


def _join_convolutions(parts: Parts, head_sizes: HeadSizes) -> Tensor:
    """Return the [features, kernel] of all parts as [all features, 1, kernel]."""
    joined = torch.cat(list(parts))
    return joined.unsqueeze(1)


def _split_delta_rows(joined: Tensor, head_sizes: HeadSizes) -> Parts:
    sizes = head_sizes.delta
    # All queries, all keys, and all values.
    rows = [sizes.key_width, sizes.key_width, sizes.value_width]
    return joined.split(rows)


def _split_convolutions(joined: Tensor, head_sizes: HeadSizes) -> Parts:
    without_channel = joined.squeeze(1)
    return _split_delta_rows(without_channel, head_sizes)


def _split_mamba(joined: Tensor, head_sizes: HeadSizes) -> Parts:
    sizes = head_sizes.mamba
    # Gate, values, keys, queries and time steps, in Mamba's letters z, x, B, C and dt.
    rows = [sizes.width, sizes.width, sizes.key_width, sizes.key_width, sizes.heads]
    return joined.split(rows)


def _split_mamba_biases(joined: Tensor, head_sizes: HeadSizes) -> Parts:
    sizes = head_sizes.mamba
    # Of values, keys and queries: the gate and the time steps are not convolved.
    rows = [sizes.width, sizes.key_width, sizes.key_width]
    return joined.split(rows)


def _split_mamba_convolutions(joined: Tensor, head_sizes: HeadSizes) -> Parts:
    without_channel = joined.squeeze(1)
    return _split_mamba_biases(without_channel, head_sizes)


def _join_experts_transposed(parts: Parts, head_sizes: HeadSizes) -> Tensor:
    """Return one matrix of all experts, each transposed, as [experts, features in, features
    out]."""
    transposed = [part.t() for part in parts]
    return torch.stack(transposed)


def _split_experts_transposed(joined: Tensor, head_sizes: HeadSizes) -> Parts:
    return [expert.t() for expert in joined]


def _join_experts_interleaved(parts: Parts, head_sizes: HeadSizes) -> Tensor:
    """Return experts' gates and ups [ffn, h], rows of both in turn, as [experts, h, 2 ffn]; biases
    without h."""
    gates = parts[::2]
    ups = parts[1::2]
    experts = []
    for gate, up in zip(gates, ups, strict=True):
        pairs = torch.stack((gate, up), 1)
        gate_up = pairs.flatten(0, 1)
        experts.append(gate_up.t())
    return torch.stack(experts)


def _split_experts_interleaved(joined: Tensor, head_sizes: HeadSizes) -> Parts:
    """Invert `_join_experts_interleaved`."""
    parts: list[Tensor] = []
    for expert in joined:
        gate_up = expert.t()
        gate = gate_up[::2]
        up = gate_up[1::2]
        parts += [gate, up]
    return parts


def _join_experts_gate_up(parts: Parts, head_sizes: HeadSizes) -> Tensor:
    """Return experts' gates and ups [ffn, h], a gate above its up, as [experts, 2 ffn, h]."""
    gates = parts[::2]
    ups = parts[1::2]
    experts = []
    for gate, up in zip(gates, ups, strict=True):
        gate_up = torch.cat((gate, up))
        experts.append(gate_up)
    return torch.stack(experts)


def _split_experts_gate_up(joined: Tensor, head_sizes: HeadSizes) -> Parts:
    """Invert `_join_experts_gate_up`."""
    parts: list[Tensor] = []
    for expert in joined:
        parts += expert.chunk(2)
    return parts


def _transposed(transform: Transform) -> Transform:
    """Return the transform whose joined tensor is the transpose of another's."""

    def join(parts: Parts, head_sizes: HeadSizes) -> Tensor:
        joined = transform.join(parts, head_sizes)
        return joined.t()

    def split(joined: Tensor, head_sizes: HeadSizes) -> Parts:
        return transform.split(joined.t(), head_sizes)

    return Transform(join, split)


SAME = Transform(
    join=lambda parts, head_sizes: parts[0],
    split=lambda joined, head_sizes: [joined],
)
TRANSPOSED = _transposed(SAME)
# Two tensors of one size, such as gate and up.
STACKED = Transform(
    join=_join_stacked,
    split=lambda joined, head_sizes: joined.chunk(2),
)
PACKED = Transform(_join_stacked, _split_packed)
PACKED_TRANSPOSED = _transposed(PACKED)
GROUPED = Transform(_join_grouped, _split_grouped)
GROUPED_GATED = Transform(_join_grouped, _split_grouped_gated)
GROUPED_INTERLEAVED = Transform(_join_grouped_interleaved, _split_grouped_interleaved)
# Queries or keys alone, whose rotary partners are neighbours in the other system.
INTERLEAVED = Transform(
    join=lambda parts, head_sizes: _interleave(parts[0], head_sizes),
    split=lambda joined, head_sizes: [_deinterleave(joined, head_sizes)],
)
# Queries or keys alone, which turn the other way in the other system.
TURNED_BACK = Transform(
    join=lambda parts, head_sizes: _swap_halves(parts[0], head_sizes),
    split=lambda joined, head_sizes: [_swap_halves(joined, head_sizes)],
)
LATENT_QUERY = _latent_query(True)
LATENT_QUERY_HALVES = _latent_query(False)
LATENT_DOWN = _latent_down(True)
LATENT_DOWN_HALVES = _latent_down(False)
LATENT_UP = Transform(_join_by_query_head, _split_latent_up)
# Of all experts of a layer, one after the other.
EXPERTS_STACKED = Transform(
    join=lambda parts, head_sizes: torch.stack(list(parts)),
    split=lambda joined, head_sizes: joined.unbind(),
)
EXPERTS_GATE_UP = Transform(_join_experts_gate_up, _split_experts_gate_up)
GATED_QUERY = Transform(_join_by_query_head, _split_gated_query)
# Of a gated delta net: queries, keys, values and gates by heads of keys, or the first three each as
# it is; the numbers of each head; and the convolution.
DELTA_NET = Transform(_join_by_key_head, _split_delta_net)
DELTA_ROWS = Transform(_join_stacked, _split_delta_rows)
DELTA_GATES = Transform(_join_by_key_head, _split_delta_gates)
STACKED_DELTA_NET = Transform(_join_stacked, _split_stacked_delta_net)
CONVOLUTIONS = Transform(_join_convolutions, _split_convolutions)
# Of Kimi Delta Attention: one of the three convolutions, and the rates, [1, 1, heads, 1].
ONE_CONVOLUTION = Transform(
    join=_join_convolutions,
    split=lambda joined, head_sizes: [joined.squeeze(1)],
)
RATES_OF_HEADS = Transform(
    join=lambda parts, head_sizes: parts[0].view(1, 1, -1, 1),
    split=lambda joined, head_sizes: [joined.flatten()],
)
# Of a Mamba-2 mixer: what is projected, and the convolution with its bias.
MAMBA = Transform(_join_stacked, _split_mamba)
MAMBA_CONVOLUTIONS = Transform(_join_convolutions, _split_mamba_convolutions)
MAMBA_CONVOLUTION_BIASES = Transform(_join_stacked, _split_mamba_biases)
# Of all experts of a layer: features in before features out; a bias as it is.
EXPERTS_TRANSPOSED = Transform(_join_experts_transposed, _split_experts_transposed)
EXPERTS_INTERLEAVED = Transform(_join_experts_interleaved, _split_experts_interleaved)
