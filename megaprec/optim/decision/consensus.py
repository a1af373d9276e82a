"""The agreement of all ranks before a step changes anything: one all-reduce of a few numbers over
the whole mesh.

A sum is sufficient. Sums of squares and counts of zeros are added. Values that must be *equal* on
all ranks (the scaler, step count and rate; of a stage the parameters without a gradient, and
settings) are sent as a digest d and its square, because the mean of the squares is the square of
the mean only if all digests are equal; digests are so short that this test is exact. A norm other
than L2 is sent in a slot per rank, and every rank computes the same global norm from the slots.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.leaf_calls import CallLeaf
from megaprec.optim.decision.grad_stats import joined_norm, norm_of, statistics

DIGEST_BITS = 18  # a sum of squares over 2**17 ranks is then less than 2**53: exact in float64
# Odd multipliers of a multiplicative hash, as signed 64-bit integers: one for each number of a
# digest, so that the digest depends on their order.
_MULTIPLIERS = tuple(
    multiplier - 2**64
    for multiplier in (
        0x9E3779B97F4A7C15,
        0xD1B54A32D192ED03,
        0xABC98388FB8FAC03,
        0x8CB92BA72F3D8DD7,
        0xA0761D6478BD642F,
        0xE7037ED1A0B428DB,
        0x8EBC6AF09C88C6E3,
    )
)


@dataclass(frozen=True)
class Consensus:
    """The reduced numbers of a step: tensors on the device, equal on every rank.

    norm: of the gradients, including the loss scale.
    zeros: zero elements by pipeline rank, [pp].
    finite: True if gradients and loss are finite.
    same_common: True if all ranks sent one scaler, step count and learning rate.
    same_in_stages: True if the ranks of each stage lack the same gradients and have the same
        settings.
    stops: number of ranks that were asked to stop.
    num_gradients: number of parameters that have one, over all ranks.
    nothing_counts: True if some rank has said that no token of the batch counts in the loss.
    gave_loss: True if some rank has given a loss. loss: NaN if none has.
    """

    norm: Tensor
    loss: Tensor
    zeros: Tensor
    finite: Tensor
    same_common: Tensor
    same_in_stages: Tensor
    stops: Tensor
    num_gradients: Tensor
    nothing_counts: Tensor
    gave_loss: Tensor

    def forbids(self, on_nonfinite: str) -> Tensor:
        """Return float32 [], 1 if the step must change nothing. on_nonfinite: as in the precision
        plan."""
        ranks_agree = self.same_common & self.same_in_stages
        allowed = ranks_agree & (self.num_gradients > 0) & ~self.nothing_counts
        if on_nonfinite != "ignore":
            allowed = allowed & self.finite
        return allowed.logical_not().float()


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of a step on the host: those of `Consensus`, the norm without the loss scale.

    is_spike: the step is above a limit. further: others, which the optimizer does not read.
    """

    loss: float
    norm: float
    loss_scale: float
    stops: float
    num_gradients: float
    finite: bool
    same_common: bool
    same_in_stages: bool
    nothing_counts: bool
    gave_loss: bool
    is_spike: bool
    zeros: tuple[int, ...]
    further: tuple[float, ...] = ()


def to_host(
    reduced: Consensus,
    norm: Tensor,
    loss_scale: Tensor,
    is_spike: Tensor,
    further: Tensor | None = None,
) -> StepNumbers:
    """Return the numbers of a step in one copy from the device, for which the host waits.

    is_spike: bool []. further: float64 [n]; None for none.
    """
    numbers = {
        "loss": reduced.loss,
        "norm": norm,
        "loss_scale": loss_scale.double(),
        "stops": reduced.stops,
        "num_gradients": reduced.num_gradients,
    }
    flags = {
        "finite": reduced.finite,
        "same_common": reduced.same_common,
        "same_in_stages": reduced.same_in_stages,
        "nothing_counts": reduced.nothing_counts,
        "gave_loss": reduced.gave_loss,
        "is_spike": is_spike,
    }
    stacked_numbers = torch.stack(list(numbers.values()))
    stacked_flags = torch.stack(list(flags.values())).double()
    parts = [stacked_numbers, stacked_flags, reduced.zeros]
    if further is not None:
        parts.append(further)
    on_host = torch.cat(parts).tolist()  # the only wait of a usual step
    flags_start = len(numbers)
    zeros_start = flags_start + len(flags)
    further_start = zeros_start + len(reduced.zeros)
    host_flags = map(bool, on_host[flags_start:zeros_start])
    return StepNumbers(
        **dict(zip(numbers, on_host[:flags_start], strict=True)),
        **dict(zip(flags, host_flags, strict=True)),
        zeros=tuple(int(count) for count in on_host[zeros_start:further_start]),
        further=tuple(on_host[further_start:]),
    )


class Measured(NamedTuple):
    """The measures of a rank's gradients, on the device.

    counted: float64 [2], the sum of squares and the number of zeros.
    norm: what the ranks exchange about the norm.
    """

    counted: Tensor
    norm: Tensor


@dataclass(frozen=True)
class LocalNumbers:
    """The knowledge of a rank about its gradients and its loss in a step.

    measured: of its gradients; the norm is read only for a norm other than L2.
    loss: this rank's share; None for no share.
    common_digest, stage_digest: of what must be equal on all ranks, and on those of a stage.
    num_gradients: how many of this rank's parameters have one.
    stop: True if this rank was asked to stop.
    counted_tokens: of the batch, in the loss; None or NaN if this rank does not know it.
    gave_loss: False if this rank knows no loss.
    """

    measured: Measured
    loss: Tensor | None
    common_digest: Tensor
    stage_digest: float
    num_gradients: int = 1
    stop: bool = False
    counted_tokens: Tensor | None = None
    gave_loss: bool = True


class _RankNumbers(NamedTuple):
    """Numbers that are summed over all ranks, in the order in which they are exchanged."""

    squares: Tensor
    loss: Tensor
    common: Tensor
    common_squared: Tensor
    stops: Tensor
    num_gradients: Tensor
    nothing_counts: Tensor
    num_losses: Tensor


class _StageNumbers(NamedTuple):
    """Numbers that are summed over the ranks of each pipeline stage, in the order in which they are
    exchanged: [pp] each."""

    zeros: Tensor
    digests: Tensor
    digests_squared: Tensor


class StepConsensus:
    """Packs the numbers of a rank into one tensor and reads the sum.

    order: of the gradient norm. call: as in `grad_stats.statistics`.
    """

    def __init__(
        self,
        pp: Axis,
        world: Axis,
        order: float,
        device: torch.device,
        call: CallLeaf | None = None,
    ) -> None:
        self.pp = pp
        self.world = world
        self.order = order
        self.device = device
        self._call = call
        # only the L2 norm comes from sums of squares; any other takes a slot for each rank
        norm_slots = 0 if order == 2 else world.size
        stage_slots = len(_StageNumbers._fields) * pp.size
        self.lengths = (len(_RankNumbers._fields), stage_slots, norm_slots)

    def measure(self, gradients: Sequence[Tensor], counted_elsewhere: Sequence[Tensor]) -> Measured:
        """Return sum of squares and number of zeros, and the norm, of this rank's gradients.

        gradients, counted_elsewhere: as in `grad_stats.statistics`.
        """
        counted = statistics(gradients, counted_elsewhere, self.device, self._call)
        if self.order == 2:
            return Measured(counted, counted[0])
        return Measured(counted, norm_of(gradients, self.order, self.device))

    def pack(self, local: LocalNumbers) -> Tensor:
        """Return this rank's numbers, to be summed over the world: float64."""
        squares, zeros = local.measured.counted.unbind()
        stage_digest = self._scalar(local.stage_digest)
        of_stages = torch.zeros(
            len(_StageNumbers._fields),
            self.pp.size,
            dtype=torch.float64,
            device=self.device,
        )
        of_stages[:, self.pp.rank] = torch.stack(
            _StageNumbers(zeros=zeros, digests=stage_digest, digests_squared=stage_digest.square())
        )
        *_, norm_slots = self.lengths
        norms = torch.zeros(norm_slots, dtype=torch.float64, device=self.device)
        own_slot = slice(self.world.rank, self.world.rank + 1)  # no element for the L2 norm
        norms[own_slot] = local.measured.norm
        loss = local.loss
        numbers = _RankNumbers(
            squares=squares,
            loss=self._scalar(0.0) if loss is None else loss.double().reshape(()),
            common=local.common_digest,
            common_squared=local.common_digest.square(),
            stops=self._scalar(float(local.stop)),
            num_gradients=self._scalar(local.num_gradients),
            nothing_counts=self._nothing_counts(local.counted_tokens),
            num_losses=self._scalar(float(local.gave_loss)),
        )
        return torch.cat((torch.stack(numbers), of_stages.view(-1), norms))

    def read(self, summed: Tensor) -> Consensus:
        """Return the consensus that the sum over the world contains."""
        of_ranks, of_stages, norms = summed.split(self.lengths)
        ranks = _RankNumbers(*of_ranks.unbind())
        rows_of_stages = of_stages.view(len(_StageNumbers._fields), -1)
        stages = _StageNumbers(*rows_of_stages.unbind())
        ranks_of_stage = self.world.size // self.pp.size
        same_in_stages = _are_equal(stages.digests, stages.digests_squared, ranks_of_stage)
        return Consensus(
            norm=ranks.squares.sqrt() if self.order == 2 else joined_norm(norms, self.order),
            loss=ranks.loss.where(ranks.num_losses > 0, math.nan),
            zeros=stages.zeros,
            finite=of_ranks[:2].isfinite().all(),  # squares and loss
            same_common=_are_equal(ranks.common, ranks.common_squared, self.world.size),
            same_in_stages=same_in_stages.all(),
            stops=ranks.stops,
            num_gradients=ranks.num_gradients,
            nothing_counts=ranks.nothing_counts > 0,
            gave_loss=ranks.num_losses > 0,
        )

    def _nothing_counts(self, counted_tokens: Tensor | None) -> Tensor:
        """Return 1 if this rank knows that no token counts, else 0; a NaN compares as unknown."""
        if counted_tokens is None:
            return self._scalar(0.0)
        return (counted_tokens <= 0).double()

    def _scalar(self, value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float64, device=self.device)


def _are_equal(total: Tensor, squares: Tensor, ranks: int) -> Tensor:
    """Return True where all `ranks` digests are equal. total, squares: sums of the digests and of
    their squares.

    Equal digests have an integer mean. Every product here is less than 2**53, unlike the square of
    `total`.
    """
    mean = (total / ranks).round()
    return (mean * ranks == total) & (mean.square() * ranks == squares)


def digest(numbers: Iterable[Tensor]) -> Tensor:
    """Return a digest of DIGEST_BITS bits of at most seven numbers, read as FP32: float64 of shape
    []."""
    floats = torch.stack([number.float() for number in numbers])
    values = floats.view(torch.int32).long().unbind()
    multipliers = _MULTIPLIERS[: len(values)]
    products = [value * multiplier for value, multiplier in zip(values, multipliers, strict=True)]
    total = torch.stack(products).sum()
    # the upper bits of a product depend on all bits of its factors
    mask = (1 << DIGEST_BITS) - 1
    return ((total >> 40) & mask).double()
