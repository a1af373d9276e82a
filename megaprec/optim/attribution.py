"""The parameters and the moment at which a step became non-finite, searched for only after a step
was skipped.

Each rank examines the gradients that it holds and names its worst logical tensors. These few lines
are exchanged as JSON, so that every rank knows the findings of all ranks. A finite step costs
nothing.

At that point the gradients are already summed over micro-batches and ranks. A caller that can run
the step again finds the micro-batch at fault: `Onset` checks the named tensors after each
micro-batch.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from math import prod

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.everyones import everyones_texts
from megaprec.optim.flat_buffer import Buffer
from megaprec.optim.grad_stats import sum_of_squares
from megaprec.optim.step_report import LOSS, Offender

_LINE = 4096  # bytes of JSON that each rank may send
_NEVER = 1 << 60  # later than any moment


def attribute_nonfinite(
    buffers: Sequence[Buffer],
    pp: Axis,
    tp_rank: int | None,
    world: Axis,
    device: torch.device,
    most: int = 5,
) -> tuple[Offender, ...]:
    """Return the logical tensors with the most non-finite gradient elements, worst first, the same
    on every rank.

    The gradients still include the loss scale. Each dp rank first reads the part of the gradients
    that it alone counts, with ZeRO-1 or without it. Only if all these parts are finite does each
    rank read all the gradients that it holds, because then a replica's copy is the bad one.
    tp_rank: of this process; None: a slice's virtual rank is named instead. Collective over the
    whole mesh.
    """
    shares = _worst([(b, *b.share) for b in buffers], pp.rank, tp_rank, most)
    if found := _merge(_everyones(shares, world, device), most):
        return found
    copies = _worst([(b, b.first, b.last) for b in buffers], pp.rank, tp_rank, most)
    return _merge(_everyones(copies, world, device), most)


Found = tuple[int, Offender]  # the number identifies the examined slice of the tensor


def _worst(
    ranges: Iterable[tuple[Buffer, int, int]], stage: int, tp_rank: int | None, most: int
) -> list[Found]:
    return sorted(_bad(ranges, stage, tp_rank), key=lambda found: -found[1].bad)[:most]


def _bad(
    ranges: Iterable[tuple[Buffer, int, int]], stage: int, tp_rank: int | None
) -> Iterator[Found]:
    for buffer, low, high in ranges:
        for piece in buffer.pieces:
            first = max(piece.start, low)
            last = min(piece.stop, high)
            values = buffer.own(buffer.grads)[
                first - buffer.first : max(first, last) - buffer.first
            ]
            if len(values) and not sum_of_squares(values).isfinite():
                place = piece.part.shard * prod(piece.part.padded) + first - piece.start
                rank = piece.part.rank if tp_rank is None or buffer.of_experts else tp_rank
                yield place, _describe(piece.part.name, stage, rank, values)


class Onset:
    """The first moment, in a step that is run again, at which each offender was not finite on some
    rank.

    Each rank watches its own data of the offenders before gradients are reduced: `loss`, which is
    accumulated in place, float64 [], or [micro-batches] under canonical numerics, and slices of
    gradient buffers. All holders of a slice are watched (tp ranks with partial gradients, pipeline
    stages with tied copies), because their values are summed.
    """

    def __init__(
        self, offenders: Sequence[Offender], buffers: Sequence[Buffer], loss: Tensor
    ) -> None:
        self._watched = [
            [loss.view(-1)] if o.name == LOSS else [*_held(o, buffers)] for o in offenders
        ]
        self._first = torch.full((len(offenders),), _NEVER, dtype=torch.int64, device=loss.device)

    def look(self, moment: int) -> None:
        """Record `moment`, a number that grows with time, for the offenders that are no longer
        finite."""
        for number, slices in enumerate(self._watched):
            for values in slices:
                first = self._first[number]
                first.copy_(
                    torch.where(sum_of_squares(values).isfinite(), first, first.clamp(max=moment))
                )

    def agreed(self, world: Axis) -> list[int | None]:
        """Return the earliest moment that any rank recorded for each offender, or None if there is
        none. Collective."""
        first = world.max_(self._first.neg()).neg()
        return [None if moment == _NEVER else moment for moment in first.tolist()]


def _held(offender: Offender, buffers: Iterable[Buffer]) -> Iterator[Tensor]:
    for buffer in buffers:
        for piece in buffer.pieces:
            part = piece.part
            if (
                part.name == offender.name
                and part.shard == offender.tp_rank // part.copies
                and piece.start < piece.stop
            ):
                yield buffer.grads[piece.start : piece.stop]


def _describe(name: str, stage: int, tp_rank: int, values: Tensor) -> Offender:
    finite = values[values.isfinite()]
    largest = finite.abs().max().item() if len(finite) else 0.0
    return Offender(
        name,
        stage,
        tp_rank,
        int(values.isinf().sum()),
        int(values.isnan().sum()),
        values.numel(),
        largest,
    )


def _everyones(mine: Sequence[Found], world: Axis, device: torch.device) -> list[Found]:
    """Return the findings of all ranks, equal ones once. Each rank sends as many lines of JSON as
    fit into _LINE."""
    lines = [json.dumps([first, asdict(offender)]).encode() + b"\n" for first, offender in mine]
    while sum(map(len, lines)) > _LINE:
        lines.pop()
    rows = b"".join(everyones_texts(b"".join(lines), world, device)).splitlines()
    return [(first, Offender(**fields)) for first, fields in json.loads(b"[%b]" % b",".join(rows))]


def _merge(found: Iterable[Found], most: int) -> tuple[Offender, ...]:
    """Return one offender for each tensor and tp rank: replicas of a slice count once, disjoint
    slices are added."""
    slices: dict[tuple[str, int, int], dict[int, Offender]] = {}
    for first, o in found:
        known = slices.setdefault((o.name, o.stage, o.tp_rank), {})
        known[first] = max(o, known.get(first, o), key=lambda offender: offender.bad)
    merged = [_sum(list(parts.values())) for parts in slices.values()]
    return tuple(sorted(merged, key=lambda o: (-o.bad, o.name, o.tp_rank))[:most])


def _sum(parts: Sequence[Offender]) -> Offender:
    return replace(
        parts[0],
        infs=sum(o.infs for o in parts),
        nans=sum(o.nans for o in parts),
        elements=sum(o.elements for o in parts),
        largest_finite=max(o.largest_finite for o in parts),
    )
