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
from megaprec.optim.state.flat_buffer import EMA, Buffer

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


def digest_held_state(
    buffers: Sequence[Buffer], model_parts: Iterable[nn.Module], with_gradients: bool = True
) -> list[HeldDigest]:
    """Return the digests of all weights, states and reduced gradients of a rank, in an order that
    dp ranks share.

    with_gradients: False between two steps, where they mean nothing.
    """
    digests: list[HeldDigest] = []
    for buffer in buffers:
        digests += _weights(buffer)
        digests += _shard_of_state(buffer, with_gradients)
    return digests + list(digest_frozen(model_parts))


def _weights(buffer: Buffer) -> Iterator[HeldDigest]:
    """Yield the digests of the weights in a buffer that each replica holds whole."""
    if buffer.shards_weights:
        return
    layout = layout_of(buffer.parameters[0])
    for piece in buffer.pieces:
        values = buffer.weights[piece.start : piece.stop]
        yield _digest_of(WEIGHT, piece.part, values, layout, sharded=False)


def _shard_of_state(buffer: Buffer, with_gradients: bool) -> Iterator[HeldDigest]:
    """Yield the digests of this rank's slices of the state and of the reduced gradients."""
    layout = layout_of(buffer.parameters[0])
    tensors = _tensors_of_state(buffer)
    if with_gradients:
        tensors[GRADIENT] = buffer.local_grads
    for kind, values in tensors.items():
        for owned in buffer.owned_pieces():
            # in the key: replicas that shard otherwise hold other elements
            span = f" {owned.in_part.start}:{owned.in_part.stop}"
            yield _digest_of(
                kind,
                owned.piece.part,
                buffer.to_device(values[owned.in_shard]),
                layout,
                sharded=True,
                span=span,
            )


def _tensors_of_state(buffer: Buffer) -> dict[str, Tensor]:
    """Return this rank's shard of masters, moments and moving average, by kind."""
    tensors: dict[str, Tensor] = {}
    if buffer.shards_weights:
        tensors[WEIGHT] = buffer.own_weights
    masters = buffer.masters
    # masters that are the weights themselves are digested as weights
    if masters is not None and masters.data_ptr() != buffer.own_weights.data_ptr():
        tensors["masters"] = masters
    # the low bits of masters whose high bits are the weights
    if buffer.remainder is not None:
        tensors["remainder"] = buffer.remainder
    tensors |= buffer.state
    if buffer.ema is not None:
        buffer.begin_ema()
        tensors[EMA] = buffer.ema
    return tensors


def digest_frozen(model_parts: Iterable[nn.Module]) -> Iterator[HeldDigest]:
    """Yield the digests of the parameters that are not trained; they are in no buffer."""
    for model_part in model_parts:
        for parameter in model_part.parameters():
            if not parameter.requires_grad and has_layout(parameter):
                layout = layout_of(parameter)
                flat = parameter.detach().reshape(-1)
                # stacked parts are logical tensors of their own
                for part, start, stop in layout.spans():
                    yield _digest_of(WEIGHT, part, flat[start:stop], layout, sharded=False)


def _digest_of(
    kind: str,
    part: Part,
    values: Tensor,
    layout: Layout,
    sharded: bool,
    span: str = "",
) -> HeldDigest:
    """Return the digest of values of a part. layout: of its parameter. span: the elements, in
    words, if they are not all of the part."""
    shard = f" [{part.shard} of {part.shards}]" if part.shards > 1 else ""
    return HeldDigest(
        key=f"{kind} {part.name}{shard}{span}",
        kind=kind,
        copies=part.copies,
        tied=bool(layout.tied),
        sharded=sharded,
        digest=digest(values),
        expert=layout.expert,
    )


def find_strayed(buffers: Sequence[Buffer], steps: Tensor) -> dict[str, Tensor]:
    """Return bool [] by parameter, True if this rank's slice of its weights is not the masters,
    rounded.

    steps: number of applied steps, as of the update that rounded them. Masters that are the
    weights, or that are stored as the weights and a remainder, cannot stray.
    """
    strayed_weights: dict[str, Tensor] = {}
    for buffer in buffers:
        if buffer.has_fp8_weights or buffer.masters is None:
            continue
        if buffer.masters.dtype == buffer.weights.dtype:
            continue
        tiles = buffer.tiles(0, buffer.local_size)
        for tile in buffer.on_device(tiles, written=()):
            weights = tile.weights
            rounded = replace(tile, weights=torch.empty_like(weights))
            rounded.store_and_round_masters(tile.wide_masters(), steps)
            # bytes are compared, since NaN is not equal to itself
            differ = rounded.weights.view(torch.uint8) != weights.view(torch.uint8)
            size = weights.itemsize
            for span in tile.draw.spans:
                name = span.part.name
                any_differs = differ[span.start * size : span.stop * size].any()
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
    weights = 0  # their places in `differs`
    gradients = 1
    differs = torch.zeros(2, dtype=torch.bool, device=device)
    groups = [(others, False)]
    if experts is not None:
        groups.append((experts, True))
    for holders, of_experts in groups:
        of_group = [held for held in all_held if held.expert == of_experts]
        # the same on all ranks, so that all enter the same gathers
        copy_counts = sorted({held.copies for held in of_group} - {1})
        for place in (weights, gradients):
            held_digests = _select(of_group, place == gradients)
            differs[place] |= _differ(held_digests, holders, copy_counts, device)
    for place in (weights, gradients):
        tied = [held for held in _select(all_held, place == gradients) if held.tied]
        rows = pp.gather(_fold(tied, device))  # a digest of each pipeline rank
        # pipeline ranks without tied parameters have zeros
        rows = rows[rows.any(1)]
        differs[place] |= (rows != rows[:1]).any()
    return Agreement(differs[weights], differs[gradients])


def _select(held_digests: Sequence[HeldDigest], gradients: bool) -> list[HeldDigest]:
    """Return the digests of gradients, or all others."""
    return [held for held in held_digests if (held.kind == GRADIENT) == gradients]


def _differ(
    held_digests: Sequence[HeldDigest],
    holders: Holders,
    copy_counts: Sequence[int],
    device: torch.device,
) -> Tensor:
    """Return bool [], True if ranks that must hold the same hold something else.

    copy_counts: the numbers, above 1, of neighbouring tp ranks that hold one slice.
    Collective over the replicas, then over tp.
    """
    differs = torch.zeros((), dtype=torch.bool, device=device)
    # Each of `sharing` neighbouring replicas holds another shard of the state: a shard is compared
    # with that of every `sharing`-th replica. What is not sharded all replicas hold.
    for sharded, num_shards in ((False, 1), (True, holders.sharing)):
        compared = [held for held in held_digests if held.sharded == sharded]
        digests = holders.replicas.gather(_fold(compared, device))
        groups = digests.view(-1, num_shards, 2)
        differs |= (groups != groups[:1]).any()
    for copies in copy_counts:
        copied = [held for held in held_digests if held.copies == copies]
        digests = holders.tp.gather(_fold(copied, device))
        # neighbouring ranks are copies of each other
        groups = digests.view(-1, copies, 2)
        differs |= (groups != groups[:, :1]).any()
    return differs


def _fold(held_digests: Sequence[HeldDigest], device: torch.device) -> Tensor:
    """Return one digest of many: int64 [1, 2]; zeros if there is none."""
    if held_digests:
        digests = torch.stack([held.digest for held in held_digests])
    else:
        digests = torch.zeros(0, dtype=torch.int64, device=device)
    return digest(digests).unsqueeze(0)
