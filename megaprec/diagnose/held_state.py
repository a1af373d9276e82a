"""Digests of what a rank holds: weights, masters, moments and reduced gradients, by logical slice.

Whatever several ranks hold must be the same, bit for bit: weights on all replicas, replicated
parameters on all tensor-parallel ranks, tied ones on their pipeline ranks, and state and reduced
gradients where ZeRO-1 does not shard them over all replicas. Experts on ranks of their own have
other replicas than other weights. State that one rank alone holds is compared with the weights:
they are the masters, rounded.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Layout, Part, has_layout, layout_of
from megaprec.comm.tensor_digests import digest
from megaprec.optim.flat_buffer import Buffer

WEIGHT = "weight"
GRADIENT = "gradient"


@dataclass(frozen=True)
class HeldDigest:
    """The digest of elements that a rank holds.

    key: equal on all ranks that hold the same elements.
    kind: WEIGHT, GRADIENT or the name of an optimizer state.
    copies: number of neighbouring tensor-parallel ranks that hold the same.
    tied: True if other pipeline ranks do too.
    sharded: True if replicas that share a copy of the state (ZeRO-1) hold different elements.
    expert: True for weights of experts that lie on ranks of their own.
    """

    key: str
    kind: str
    copies: int
    tied: bool
    sharded: bool
    digest: Tensor
    expert: bool = False


def digest_held_state(buffers: Sequence[Buffer], parts: Iterable[nn.Module]) -> list[HeldDigest]:
    """Return the digests of all weights, states and reduced gradients of a rank, in an order that
    dp ranks share."""
    digests: list[HeldDigest] = []
    for flat_buffer in buffers:
        digests += _weights(flat_buffer)
        digests += _shard_of_state(flat_buffer)
    return digests + list(_frozen(parts))


def _weights(flat_buffer: Buffer) -> Iterator[HeldDigest]:
    """Yield the digests of the weights in a buffer; each replica holds all of them."""
    layout = layout_of(flat_buffer.parameters[0])
    for buffer_piece in flat_buffer.pieces:
        held_values = flat_buffer.weights[buffer_piece.start : buffer_piece.stop]
        yield _digest_of(WEIGHT, buffer_piece.part, held_values, layout, sharded=False)


def _shard_of_state(flat_buffer: Buffer) -> Iterator[HeldDigest]:
    """Yield the digests of this rank's slices of the state and of the reduced gradients."""
    layout = layout_of(flat_buffer.parameters[0])
    for state_kind, held_values in _tensors_of_state(flat_buffer).items():
        for buffer_piece in flat_buffer.pieces:
            span_start = max(buffer_piece.start, flat_buffer.start)
            span_stop = min(buffer_piece.stop, flat_buffer.stop)
            if span_start < span_stop:
                span = f" {span_start - buffer_piece.start}:{span_stop - buffer_piece.start}"
                elements = held_values[
                    span_start - flat_buffer.start : span_stop - flat_buffer.start
                ]
                yield _digest_of(
                    state_kind,
                    buffer_piece.part,
                    elements,
                    layout,
                    sharded=True,
                    span=span,
                )


def _tensors_of_state(flat_buffer: Buffer) -> dict[str, Tensor]:
    """Return this rank's shard of masters, moments and reduced gradients, by kind."""
    tensors: dict[str, Tensor] = {}
    if flat_buffer.masters is not None:
        # masters that are the weights themselves are digested as weights
        shared = (
            flat_buffer.masters.data_ptr() == flat_buffer.local_part(flat_buffer.weights).data_ptr()
        )
        if not shared:
            tensors["masters"] = flat_buffer.masters
    # the low bits of masters whose high bits are the weights
    if flat_buffer.remainder is not None:
        tensors["remainder"] = flat_buffer.remainder
    tensors |= flat_buffer.state
    tensors[GRADIENT] = flat_buffer.local_part(flat_buffer.grads)
    return tensors


def _frozen(parts: Iterable[nn.Module]) -> Iterator[HeldDigest]:
    """Yield the digests of the parameters that are not trained; they are in no buffer."""
    for logical_part in parts:
        for parameter in logical_part.parameters():
            if not parameter.requires_grad and has_layout(parameter):
                layout = layout_of(parameter)
                # stacked parts are logical tensors of their own
                for span, span_start, span_stop in layout.spans():
                    held_values = parameter.detach().reshape(-1)[span_start:span_stop]
                    yield _digest_of(WEIGHT, span, held_values, layout, sharded=False)


def _digest_of(
    state_kind: str,
    logical_part: Part,
    held_values: Tensor,
    layout: Layout,
    sharded: bool,
    span: str = "",
) -> HeldDigest:
    shard = f" [{logical_part.shard} of {logical_part.shards}]" if logical_part.shards > 1 else ""
    return HeldDigest(
        key=f"{state_kind} {logical_part.name}{shard}{span}",
        kind=state_kind,
        copies=logical_part.copies,
        tied=bool(layout.tied),
        sharded=sharded,
        digest=digest(held_values),
        expert=layout.expert,
    )


def find_strayed(buffers: Sequence[Buffer], steps: Tensor) -> dict[str, Tensor]:
    """Return bool [] by parameter, True if this rank's slice of its weights is not the masters,
    rounded.

    steps: number of applied steps, as of the update that rounded them. Masters that are the
    weights, or that are stored as the weights and a remainder, cannot stray.
    """
    strayed_weights: dict[str, Tensor] = {}
    for flat_buffer in buffers:
        if flat_buffer.has_fp8_weights or flat_buffer.masters is None:
            continue
        if flat_buffer.masters.dtype == flat_buffer.weights.dtype:
            continue
        for buffer_tile in flat_buffer.tiles(0, flat_buffer.stop - flat_buffer.start):
            weights = buffer_tile.weights
            rounded = replace(buffer_tile, weights=torch.empty_like(weights))
            rounded.keep_weights(buffer_tile.wide_weights(), steps)
            # bytes are compared, since NaN is not equal to itself
            differ = rounded.weights.view(torch.uint8) != weights.view(torch.uint8)
            size = weights.itemsize
            for logical_part, _, span_start, span_stop in buffer_tile.draw.spans:
                name = logical_part.name
                any_differs = differ[span_start * size : span_stop * size].any()
                # a part that lies in several tiles
                if name in strayed_weights:
                    any_differs = any_differs | strayed_weights[name]
                strayed_weights[name] = any_differs
    return strayed_weights


@dataclass(frozen=True)
class Agreement:
    """Result of a comparison: bool [] each, True if something differs from what another rank
    holds."""

    weights: Tensor
    gradients: Tensor


@dataclass(frozen=True)
class Holders:
    """The ranks that hold the same weights: those of experts on ranks of their own, or all others.

    replicas: the ranks that hold the same slices.
    sharing: number of neighbouring ones that share one copy of the state.
    tp: the ranks that hold the other slices.
    """

    replicas: Axis
    sharing: int
    tp: Axis


def compare(
    all_held: Sequence[HeldDigest],
    pp: Axis,
    others: Holders,
    experts: Holders | None,
    device: torch.device,
) -> Agreement:
    """Compare digests with those of the ranks that must hold the same. Collective over all axes.

    others: the holders of all but the experts.
    experts: those of experts on ranks of their own; None if there are none.
    """
    differs = torch.zeros(2, dtype=torch.bool, device=device)  # of weights and of gradients
    groups = [(others, False)]
    if experts is not None:
        groups.append((experts, True))
    for holders, of_experts in groups:
        of_group = [held for held in all_held if held.expert == of_experts]
        # the same on all ranks, so that all enter the same gathers
        copy_counts = sorted({held.copies for held in of_group} - {1})
        for result_index, gradients in enumerate((False, True)):
            held_digests = _select(of_group, gradients)
            differs[result_index] |= _differ(held_digests, holders, copy_counts, device)
    for result_index, gradients in enumerate((False, True)):
        tied = [held for held in _select(all_held, gradients) if held.tied]
        digest_rows = pp.gather(_fold(tied, device))
        # pipeline ranks without tied parameters have zeros
        digest_rows = digest_rows[digest_rows.any(1)]
        differs[result_index] |= (digest_rows != digest_rows[:1]).any()
    return Agreement(*differs.unbind())


def _select(held_digests: Sequence[HeldDigest], gradients: bool) -> list[HeldDigest]:
    """Return the digests of gradients, or all others."""
    return [held for held in held_digests if (held.kind == GRADIENT) == gradients]


def _differ(
    held_digests: Sequence[HeldDigest],
    holders: Holders,
    copy_counts: Sequence[int],
    device: torch.device,
) -> Tensor:
    """Return bool [], True if ranks that must hold the same hold something else. copy_counts:
    numbers of copies over tp.

    Collective over the replicas, then over tp.
    """
    differs = torch.zeros((), dtype=torch.bool, device=device)
    # Of `sharing` neighbouring replicas each holds another shard: compare every `sharing`-th one.
    for sharded, group_size in ((False, 1), (True, holders.sharing)):
        of_layout = [held for held in held_digests if held.sharded == sharded]
        digest_rows = holders.replicas.gather(_fold(of_layout, device)).view(-1, group_size, 2)
        differs |= (digest_rows != digest_rows[:1]).any()
    for copies in copy_counts:
        copied = [held for held in held_digests if held.copies == copies]
        # neighbouring ranks are copies of each other
        runs = holders.tp.gather(_fold(copied, device)).view(-1, copies, 2)
        differs |= (runs != runs[:, :1]).any()
    return differs


def _fold(held_digests: Sequence[HeldDigest], device: torch.device) -> Tensor:
    """Return one digest of many: int64 [1, 2]; zeros if there is none."""
    if held_digests:
        digests = torch.stack([held.digest for held in held_digests])
    else:
        digests = torch.zeros(0, dtype=torch.int64, device=device)
    return digest(digests).unsqueeze(0)
