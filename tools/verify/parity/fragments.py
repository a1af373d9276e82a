"""Fragments of logical tensors: what a rank's slices hold, and full tensors put together of them.

Nothing here communicates: each rank takes fragments of its own buffers, and another process puts
those of all ranks together.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megaprec.optim.state.flat_buffer import Buffer


@dataclass(frozen=True)
class Fragment:
    """Some elements of a logical tensor.

    name, shape: of the logical tensor.
    offset: first index of the rank's slice of it, along each dim.
    local: shape of the slice.
    first: index of the first of the `values` within the flattened slice.
    cut: True if tensor-parallel ranks hold different slices.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: tuple[int, ...]
    first: int
    values: Tensor = field(repr=False)
    cut: bool = False


class AssembledTensors(NamedTuple):
    """Full logical tensors by name; an element that no fragment holds is NaN.

    conflicts: names of tensors of which two fragments hold the same element with different bits.
    """

    tensors: dict[str, Tensor]
    conflicts: list[str]


def take_fragments(
    buffers: Sequence[Buffer], values_of: Callable[[Buffer], Tensor]
) -> Iterator[Fragment]:
    """Yield copies of the parts of logical tensors that this rank's shards hold, copies of other
    ranks included.

    values_of: returns the values of a buffer's shard, such as its masters.
    """
    for buffer in buffers:
        values = values_of(buffer)
        for owned in buffer.owned_pieces():
            part = owned.piece.part
            # a slice is cut along one dim
            offset = [0] * len(part.shape)
            if part.dim is not None:
                offset[part.dim] = part.start
            yield Fragment(
                name=part.name,
                shape=part.shape,
                offset=tuple(offset),
                local=part.local,
                first=owned.in_part.start,
                cut=part.shards > 1,
                # cloned: the buffer goes on changing
                values=values[owned.in_shard].clone(),
            )


def assemble(fragments: Iterable[Fragment]) -> AssembledTensors:
    """Return fragments put together, first to slices, then to full tensors.

    Where fragments hold the same element, the first one counts.
    """
    slices: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    tensors: dict[str, Tensor] = {}
    conflicts: dict[str, None] = {}  # in order, each once
    for fragment in fragments:
        name = fragment.name
        if name not in tensors:
            tensors[name] = fragment.values.new_full(fragment.shape, torch.nan)
        slice_key = (name, fragment.offset)
        if slice_key not in slices:
            slices[slice_key] = fragment.values.new_full(fragment.local, torch.nan)
        stop = fragment.first + len(fragment.values)
        span = slices[slice_key].view(-1)[fragment.first : stop]
        # what no fragment has filled yet is NaN
        is_filled = ~span.isnan()
        if not torch.equal(span[is_filled], fragment.values[is_filled]):
            conflicts[name] = None
        span[~is_filled] = fragment.values[~is_filled]

    # a slice is contiguous only in itself, so it is copied into its region as a whole
    for (name, offset), local in slices.items():
        region = tensors[name]
        for dim, (start, length) in enumerate(zip(offset, local.shape, strict=True)):
            region = region.narrow(dim, start, length)
        region.copy_(local)
    return AssembledTensors(tensors, list(conflicts))
