"""Partial gradients: several tp ranks hold the same slice, and each computes only one addend of its
gradient.

Under sequence parallelism every rank applies a norm's weight to a part of the sequence; a key/value
head that several ranks share serves different query heads on each of them. The gradient is always
the SUM of the partial gradients, and every holder of the slice needs this sum before gradient norms
are computed.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Part, layout_of
from megaprec.comm.virtual import VirtualAxis
from megaprec.optim.flat_buffer import Buffer


def sum_partial(parameters: Sequence[nn.Parameter], tp: Axis) -> None:
    """Sum the partial gradients in the parameters' `main_grad` over tp, in one packed
    all-reduce."""
    shares = [share for p in parameters for share in _shares(p)] if tp.size > 1 else []
    if not shares:
        return
    packed = torch.cat([_slots(part, values) for part, values in shares])
    tp.sum_(packed)
    for (part, values), summed in zip(
        shares, packed.split([part.shards * v.numel() for part, v in shares]), strict=True
    ):
        values.copy_(summed.chunk(part.shards)[part.shard])


def sum_partial_slices(buffers: Sequence[Buffer], virtual: VirtualAxis) -> None:
    """Sum the partial gradients in this rank's slices of `buffers` over the virtual ranks, in one
    exchange.

    To be called when the slices are reduced over dp: the sum over the virtual ranks comes last in
    every layout. The buffers of all virtual ranks of this process have the same sizes, so their
    slices are at the same places.
    """
    shares = [
        [(part, values) for part, values in _slices(buffers) if part.rank == v]
        for v in virtual.ranks
    ]
    if not shares[0]:
        return
    total = virtual.sum(
        [torch.cat([_slots(part, values) for part, values in own]) for own in shares]
    )
    for own in shares:
        parts = total.split([part.shards * len(values) for part, values in own])
        for (part, values), summed in zip(own, parts, strict=True):
            values.copy_(summed.chunk(part.shards)[part.shard])


def _slices(buffers: Sequence[Buffer]) -> Iterator[tuple[Part, Tensor]]:
    """Yield the partial gradients in this rank's slices."""
    for buffer in buffers:
        partial = {
            part for p in buffer.parameters if layout_of(p).partial for part in layout_of(p).parts
        }
        for piece in buffer.pieces:
            first = max(piece.start, buffer.first)
            last = min(piece.stop, buffer.last)
            if piece.part in partial and piece.part.copies > 1 and first < last:
                yield piece.part, buffer.grads[first:last]


def _shares(parameter: nn.Parameter) -> list[tuple[Part, Tensor]]:
    layout, flat = layout_of(parameter), parameter.main_grad.view(-1)  # type: ignore[attr-defined]
    if not layout.partial:
        return []
    return [(part, flat[first:last]) for part, first, last in layout.spans() if part.copies > 1]


def _slots(part: Part, values: Tensor) -> Tensor:
    """Return one slot per different slice, with this rank's filled in: the sum over tp adds equal
    slices only."""
    slots = values.new_zeros(part.shards, values.numel())
    slots[part.shard] = values
    return slots.view(-1)
