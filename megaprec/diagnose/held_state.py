"""Digests of what a rank holds: weights, masters, moments and reduced gradients, by logical slice.

Whatever several ranks hold must be the same, bit for bit: weights on all replicas, replicated
parameters on all tensor-parallel ranks, tied ones on their pipeline ranks, and state and reduced
gradients where ZeRO-1 does not shard them over all replicas. Experts on ranks of their own have
other replicas than other weights. State that one rank alone holds is compared with the weights:
they are the masters, rounded.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Layout, Part, has_layout, layout_of
from megaprec.diagnose.bit_digest import digest
from megaprec.optim.flat_buffer import Buffer

WEIGHT = "weight"
GRADIENT = "gradient"


@dataclass(frozen=True)
class Held:
    """The digest of elements that a rank holds.

    key: equal on all ranks that hold the same elements. kind: WEIGHT, GRADIENT or the name of an
        optimizer state.
    copies: number of neighbouring tensor-parallel ranks that hold the same. tied: True if other
        pipeline ranks do too.
    own: True if replicas that share a copy of the state (ZeRO-1) hold different elements.
    expert: True for weights of experts that lie on ranks of their own.
    """

    key: str
    kind: str
    copies: int
    tied: bool
    own: bool
    digest: Tensor
    expert: bool = False


def held(buffers: Sequence[Buffer], parts: Iterable[nn.Module]) -> list[Held]:
    """Return the digests of all weights, states and reduced gradients of a rank, in an order that
    dp ranks share."""
    found = [of for buffer in buffers for of in (*_weights(buffer), *_own(buffer))]
    return found + list(_frozen(parts))


def _weights(buffer: Buffer) -> Iterator[Held]:
    layout = layout_of(buffer.parameters[0])
    for piece in buffer.pieces:
        yield _held(WEIGHT, piece.part, buffer.weights[piece.start : piece.stop], layout, own=False)


def _own(buffer: Buffer) -> Iterator[Held]:
    """Yield the digests of this rank's slices of the state and of the reduced gradients."""
    alone = (
        buffer.masters is not None
        and buffer.masters.data_ptr() != buffer.own(buffer.weights).data_ptr()
    )
    kept = {
        "masters": buffer.masters if alone else None,
        "remainder": buffer.remainder,
        **buffer.state,
    }
    kept[GRADIENT] = buffer.own(buffer.grads)
    layout = layout_of(buffer.parameters[0])
    for kind, values in kept.items():
        for piece in buffer.pieces if values is not None else ():
            first = max(piece.start, buffer.first)
            last = min(piece.stop, buffer.last)
            if values is not None and first < last:
                place = f" {first - piece.start}:{last - piece.start}"
                some = values[first - buffer.first : last - buffer.first]
                yield _held(kind, piece.part, some, layout, own=True, place=place)


def _frozen(parts: Iterable[nn.Module]) -> Iterator[Held]:
    """Yield the digests of the parameters that are not trained; they are in no buffer."""
    for part in parts:
        for parameter in part.parameters():
            if not parameter.requires_grad and has_layout(parameter):
                layout = layout_of(parameter)
                for span, first, last in layout.spans():
                    values = parameter.detach().reshape(-1)[first:last]
                    yield _held(WEIGHT, span, values, layout, own=False)


def _held(
    kind: str, part: Part, values: Tensor, layout: Layout, own: bool, place: str = ""
) -> Held:
    shard = f" [{part.shard} of {part.shards}]" if part.shards > 1 else ""
    key = f"{kind} {part.name}{shard}{place}"
    return Held(key, kind, part.copies, bool(layout.tied), own, digest(values), layout.expert)


def strayed(buffers: Sequence[Buffer], steps: Tensor) -> dict[str, Tensor]:
    """Return bool [] by parameter, True if this rank's slice of its weights is not the masters,
    rounded.

    steps: number of applied steps, as of the update that rounded them. Masters that are the
    weights, or that are stored as the weights and a remainder, cannot stray.
    """
    found: dict[str, Tensor] = {}
    for buffer in buffers:
        if (
            buffer.in_codes
            or buffer.masters is None
            or buffer.masters.dtype == buffer.weights.dtype
        ):
            continue
        for tile in buffer.blocks(0, buffer.last - buffer.first):
            rounded = replace(tile, weights=torch.empty_like(tile.weights))
            rounded.keep_weights(tile.wide_weights(), steps)
            differ = rounded.weights.view(torch.uint8) != tile.weights.view(torch.uint8)
            size = tile.weights.itemsize
            for part, _, first, last in tile.draw.spans:
                any_differs = differ[first * size : last * size].any()
                found[part.name] = any_differs | found.get(part.name, torch.zeros_like(any_differs))
    return found


@dataclass(frozen=True)
class Agreement:
    """Result of a comparison: bool [] each, True if something differs from what another rank
    holds."""

    weights: Tensor
    gradients: Tensor


@dataclass(frozen=True)
class Holders:
    """The ranks that hold the same weights: those of experts on ranks of their own, or all others.

    replicas: the ranks that hold the same slices. sharing: number of neighbouring ones that share
    one copy of the state. tp: the ranks that hold the other slices.
    """

    replicas: Axis
    sharing: int
    tp: Axis


def compare(
    all_held: Sequence[Held],
    pp: Axis,
    others: Holders,
    experts: Holders | None,
    device: torch.device,
) -> Agreement:
    """Compare digests with those of the ranks that must hold the same. Collective over all axes."""
    differs = torch.zeros(2, dtype=torch.bool, device=device)
    apart = [] if experts is None else [(experts, True)]
    for (holders, of_experts), (n, gradients) in product(
        [(others, False), *apart], enumerate((False, True))
    ):
        among = [one for one in all_held if one.expert == of_experts]
        some = [one for one in among if (one.kind == GRADIENT) == gradients]
        differs[n] |= _differ(some, holders, sorted({one.copies for one in among} - {1}), device)
    for n, gradients in enumerate((False, True)):
        some = [one for one in all_held if one.tied and (one.kind == GRADIENT) == gradients]
        tied = pp.gather(_folded(some, device))
        having = tied[tied.any(1)]
        differs[n] |= (having != having[:1]).any()
    return Agreement(*differs.unbind())


def _differ(
    some: Sequence[Held], holders: Holders, copied: Sequence[int], device: torch.device
) -> Tensor:
    """Return bool [], True if ranks that must hold the same hold something else. copied: numbers of
    copies over tp."""
    found = torch.zeros((), dtype=torch.bool, device=device)
    for sharded, apart in ((False, 1), (True, holders.sharing)):
        own = [one for one in some if one.own == sharded]
        rows = holders.replicas.gather(_folded(own, device)).view(-1, apart, 2)
        found |= (rows != rows[:1]).any()
    for copies in copied:
        alike = _folded([one for one in some if one.copies == copies], device)
        runs = holders.tp.gather(alike).view(-1, copies, 2)
        found |= (runs != runs[:, :1]).any()
    return found


def _folded(some: Sequence[Held], device: torch.device) -> Tensor:
    """Return one digest of many: int64 [1, 2]; zeros if there is none."""
    if some:
        digests = torch.stack([one.digest for one in some])
    else:
        digests = torch.zeros(0, dtype=torch.int64, device=device)
    return digest(digests).unsqueeze(0)
