"""Partial gradients: several tp ranks hold the same slice, and each computes only one addend of its
gradient.

Under sequence parallelism every rank applies a norm's weight to a part of the sequence; a key/value
head that several ranks share serves different query heads on each of them. The gradient is always
the SUM of the partial gradients, and every holder of the slice needs this sum before gradient norms
are computed.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Part, layout_of
from megaprec.comm.virtual import VirtualAxis
from megaprec.optim.state.flat_buffer import Buffer


class _PartialGrad(NamedTuple):
    """This rank's addend of the gradient of a slice, flat."""

    part: Part
    gradient: Tensor


def sum_partial(parameters: Sequence[nn.Parameter], tp: Axis) -> None:
    """Sum the partial gradients in the parameters' `main_grad` over tp, in one packed
    all-reduce."""
    if tp.size == 1:
        return
    partial_grads: list[_PartialGrad] = []
    for parameter in parameters:
        partial_grads += _partial_grads_of(parameter)
    if partial_grads:  # the same on all ranks of the group
        packed = _pack(partial_grads)
        tp.sum_(packed)
        _unpack(packed, partial_grads)


def sum_partial_slices(buffers: Sequence[Buffer], virtual: VirtualAxis) -> None:
    """Sum the partial gradients in this rank's slices of `buffers` over the virtual ranks, in one
    exchange.

    To be called when the slices are reduced over dp: the sum over the virtual ranks comes last in
    every layout. The buffers of all virtual ranks of this process have the same sizes, so their
    slices are at the same positions.
    """
    by_rank: dict[int, list[_PartialGrad]] = {}
    for rank in virtual.ranks:  # in this order, in which the sum takes them
        by_rank[rank] = []
    for partial_grad in _partial_grads_in_shards(buffers):
        by_rank[partial_grad.part.rank].append(partial_grad)
    if not all(by_rank.values()):  # no rank has any, because all have slices of the same parameters
        return
    packed = [_pack(partial_grads) for partial_grads in by_rank.values()]
    total = virtual.sum(packed)
    for partial_grads in by_rank.values():
        _unpack(total, partial_grads)


def _partial_grads_in_shards(buffers: Sequence[Buffer]) -> Iterator[_PartialGrad]:
    """Yield the partial gradients in this rank's slices."""
    for buffer in buffers:
        # of a parameter with partial gradients; its pieces know only the part
        partial_parts = set[Part]()
        for layout in map(layout_of, buffer.parameters):
            if layout.partial:
                partial_parts.update(layout.parts)
        for owned in buffer.owned_pieces():
            part = owned.piece.part
            if part in partial_parts and part.copies > 1:
                yield _PartialGrad(part, buffer.local_grads[owned.in_shard])


def _partial_grads_of(parameter: nn.Parameter) -> list[_PartialGrad]:
    """Return the partial gradients in the `main_grad` of a parameter."""
    layout = layout_of(parameter)
    if not layout.partial:
        return []
    flat: Tensor = parameter.main_grad.view(-1)  # type: ignore[attr-defined]
    partial_grads: list[_PartialGrad] = []
    for part, start, stop in layout.spans():
        if part.copies > 1:
            partial_grads.append(_PartialGrad(part, flat[start:stop]))
    return partial_grads


def _pack(partial_grads: Sequence[_PartialGrad]) -> Tensor:
    """Return all partial gradients in one flat tensor: for each, a slot for every different slice
    of its logical tensor, zero but for this rank's. The sum over tp then adds equal slices only."""
    packed: list[Tensor] = []
    for part, gradient in partial_grads:
        slots = gradient.new_zeros(part.shards, gradient.numel())
        slots[part.shard] = gradient
        packed.append(slots.view(-1))
    return torch.cat(packed)


def _unpack(summed: Tensor, partial_grads: Sequence[_PartialGrad]) -> None:
    """Replace the partial gradients by their sums, which stand in this rank's slots of `summed`."""
    lengths = [part.shards * gradient.numel() for part, gradient in partial_grads]
    # `split` and `chunk` are views: nothing is copied but the sums themselves
    all_slots = summed.split(lengths)
    for (part, gradient), slots in zip(partial_grads, all_slots, strict=True):
        own_slot = slots.chunk(part.shards)[part.shard]
        gradient.copy_(own_slot)
