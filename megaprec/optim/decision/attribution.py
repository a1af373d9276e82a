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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.gathered_texts import gather_texts
from megaprec.optim.decision.grad_stats import sum_of_squares
from megaprec.optim.decision.step_report import LOSS, Offender
from megaprec.optim.state.flat_buffer import Buffer, Piece, Range

_MAX_BYTES = 4096  # of JSON that each rank may send: this is a report, not a dump
_NEVER = 1 << 60  # later than any moment
TensorOnRank = tuple[str, int, int]  # name, pipeline rank and tensor-parallel rank


class _Finding(NamedTuple):
    """Non-finite elements that one rank has found. start: the first examined element of the logical
    tensor's padded slices, which identifies what was examined."""

    start: int
    offender: Offender


def attribute_nonfinite(
    buffers: Sequence[Buffer],
    pp: Axis,
    tp_rank: int | None,
    world: Axis,
    device: torch.device,
    max_offenders: int = 5,
) -> tuple[Offender, ...]:
    """Return the logical tensors with the most non-finite gradient elements, worst first, the same
    on every rank.

    The gradients still include the loss scale. Each dp rank first reads the part of the gradients
    that it alone counts, with ZeRO-1 or without it. Only if all these parts are finite does each
    rank read all the gradients that it holds, because then a replica's copy is the bad one.
    tp_rank: of this process; None: a slice's virtual rank is named instead.
    max_offenders: the number of tensors that are named.
    Collective over the whole mesh.
    """

    def offenders_in(span_of: Callable[[Buffer], Range]) -> tuple[Offender, ...]:
        """Return what all ranks find in these elements of each buffer."""
        findings: list[_Finding] = []
        for buffer in buffers:
            start, stop = span_of(buffer)
            findings += _findings(buffer, start, stop, pp.rank, tp_rank)
        worst = _worst(findings, max_offenders)
        gathered = _gather_findings(worst, world, device)
        return _merge(gathered, max_offenders)

    # first the parts that no other replica counts: a copy is read only if these are finite
    in_shares = offenders_in(lambda buffer: buffer.share)
    return in_shares or offenders_in(lambda buffer: (buffer.start, buffer.stop))


def _worst(findings: Iterable[_Finding], max_offenders: int) -> list[_Finding]:
    return sorted(findings, key=lambda finding: -finding.offender.bad)[:max_offenders]


def _findings(
    buffer: Buffer,
    start: int,
    stop: int,
    stage: int,
    tp_rank: int | None,
) -> Iterator[_Finding]:
    """Yield a finding for each piece with non-finite gradients among elements [start, stop)."""
    for owned in buffer.owned_pieces(start, stop):
        gradients = buffer.local_grads[owned.in_shard]
        if sum_of_squares(gradients).isfinite():  # exactly if every element is
            continue
        part = owned.piece.part
        start_in_tensor = part.shard * prod(part.padded) + owned.in_part.start
        # experts lie on ranks of their own, so the tensor-parallel rank does not name their slice
        if tp_rank is None or buffer.holds_experts:
            slice_rank = part.rank
        else:
            slice_rank = tp_rank
        yield _Finding(start_in_tensor, _describe(part.name, stage, slice_rank, gradients))


class Onset:
    """The first moment, in a step that is run again, at which each offender was not finite on some
    rank.

    Each rank watches its own data of the offenders before gradients are reduced: `loss`, which is
    accumulated in place, float64 [], or [micro-batches] under canonical numerics, and slices of
    gradient buffers. All holders of a slice are watched (tp ranks with partial gradients, pipeline
    stages with tied copies), because their values are summed.
    """

    def __init__(
        self,
        offenders: Sequence[Offender],
        buffers: Sequence[Buffer],
        loss: Tensor,
    ) -> None:
        self._watched: list[list[Tensor]] = []
        for offender in offenders:
            if offender.name == LOSS:
                self._watched.append([loss.view(-1)])
            else:
                self._watched.append(list(_slices_of(offender, buffers)))
        size = (len(offenders),)
        self._first = torch.full(size, _NEVER, dtype=torch.int64, device=loss.device)

    def look(self, moment: int) -> None:
        """Record `moment`, a number that grows with time, for the offenders that are no longer
        finite."""
        for number, gradient_slices in enumerate(self._watched):
            first_moment = self._first[number]
            for gradients in gradient_slices:
                is_finite = sum_of_squares(gradients).isfinite()
                # selected on the device, so that the host does not wait
                earlier = first_moment.clamp(max=moment)
                first_moment.copy_(torch.where(is_finite, first_moment, earlier))

    def agreed(self, world: Axis) -> list[int | None]:
        """Return the earliest moment that any rank recorded for each offender, or None if there is
        none. Collective."""
        # the minimum is the negative of the largest negative
        first_moments = world.max_(self._first.neg()).neg()
        return [None if moment == _NEVER else moment for moment in first_moments.tolist()]


def _slices_of(offender: Offender, buffers: Iterable[Buffer]) -> Iterator[Tensor]:
    """Yield this rank's gradients of the offender, before they are reduced."""
    for buffer in buffers:
        for piece in buffer.pieces:
            if piece.start < piece.stop and _is_of(piece, offender):
                yield buffer.grads[piece.start : piece.stop]


def _is_of(piece: Piece, offender: Offender) -> bool:
    """Return True if the piece is of the slice that the offender names, or a copy of it."""
    part = piece.part
    # neighbouring ranks hold copies of one slice
    shard = offender.tp_rank // part.copies
    return part.name == offender.name and part.shard == shard


def _describe(name: str, stage: int, slice_rank: int, gradients: Tensor) -> Offender:
    """Return what is not finite among the gradients of a slice of the logical tensor `name`.

    stage: the pipeline rank.
    slice_rank: the rank that has the slice: of tp, of the experts' tp, or a virtual one.
    """
    finite = gradients[gradients.isfinite()]
    return Offender(
        name=name,
        stage=stage,
        tp_rank=slice_rank,
        infs=int(gradients.isinf().sum()),
        nans=int(gradients.isnan().sum()),
        elements=gradients.numel(),
        largest_finite=finite.abs().max().item() if len(finite) else 0.0,
    )


def _gather_findings(
    findings: Sequence[_Finding],
    world: Axis,
    device: torch.device,
) -> list[_Finding]:
    """Return the findings of all ranks, equal ones once. Each rank sends as many lines of JSON as
    fit into _MAX_BYTES."""
    lines: list[bytes] = []
    for finding in findings:
        line = json.dumps([finding.start, asdict(finding.offender)])
        lines.append(line.encode() + b"\n")
    # the least bad ones, which come last, are left out
    while sum(map(len, lines)) > _MAX_BYTES:
        lines.pop()
    texts = gather_texts(b"".join(lines), world, device)
    findings_of_all: list[_Finding] = []
    for line in b"".join(texts).splitlines():
        start, fields = json.loads(line)
        findings_of_all.append(_Finding(start, Offender(**fields)))
    return findings_of_all


def _merge(findings: Iterable[_Finding], max_offenders: int) -> tuple[Offender, ...]:
    """Return one offender for each tensor and tp rank: replicas of a slice count once, disjoint
    slices are added."""
    # by tensor, then by the start of the slice
    slices: dict[TensorOnRank, dict[int, Offender]] = defaultdict(dict)
    for start, offender in findings:
        key = (offender.name, offender.stage, offender.tp_rank)
        by_start = slices[key]
        other_replica = by_start.get(start, offender)
        # of two replicas that differ, the one with more bad elements
        if offender.bad >= other_replica.bad:
            by_start[start] = offender
    merged = [_merged(list(by_start.values())) for by_start in slices.values()]
    merged.sort(key=lambda offender: (-offender.bad, offender.name, offender.tp_rank))
    return tuple(merged[:max_offenders])


def _merged(slices: Sequence[Offender]) -> Offender:
    """Return one offender for the disjoint slices of a tensor that one tp rank of a pipeline rank
    saw: one at least."""
    return replace(
        slices[0],
        infs=sum(offender.infs for offender in slices),
        nans=sum(offender.nans for offender in slices),
        elements=sum(offender.elements for offender in slices),
        largest_finite=max(offender.largest_finite for offender in slices),
    )
