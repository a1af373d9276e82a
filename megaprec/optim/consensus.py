"""The agreement of all ranks before a step changes anything: one all-reduce of a few numbers over
the whole mesh.

A sum is sufficient. Sums of squares and counts of zeros are added. Values that must be *equal* on
all ranks (the scaler, the list of parameters that have a gradient) are sent as a digest d and its
square, because the mean of the squares is the square of the mean only if all digests are equal;
digests are so short that this test is exact. A norm other than L2 is sent in a slot per rank, and
every rank computes the same global norm from the slots.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.optim.grad_stats import joined_norm, norm_of, statistics
from megaprec.optim.native import Kernels

DIGEST_BITS = 18  # a sum of squares over 2**17 ranks is then less than 2**53: exact in float64
_ODD = tuple(
    v - 2**64
    for v in (
        0x9E3779B97F4A7C15,
        0xD1B54A32D192ED03,
        0xABC98388FB8FAC03,
        0x8CB92BA72F3D8DD7,
        0xA0761D6478BD642F,
    )
)


@dataclass(frozen=True)
class Consensus:
    """The reduced numbers of a step: tensors on the device, equal on every rank.

    norm: of the gradients, including the loss scale. zeros: zero elements by pipeline rank, [pp].
    finite: True if gradients and loss are finite. same_scaler, same_parameters: True if all ranks
        sent equal ones.
    stops: number of ranks that were asked to stop. gradients: number of parameters that have one,
        over all ranks.
    nothing_counts: True if some rank has said that no token of the batch counts in the loss.
    gave_loss: True if some rank has given a loss. loss: NaN if none has.
    """

    norm: Tensor
    loss: Tensor
    zeros: Tensor
    finite: Tensor
    same_scaler: Tensor
    same_parameters: Tensor
    stops: Tensor
    gradients: Tensor
    nothing_counts: Tensor
    gave_loss: Tensor

    def forbids(self, on_nonfinite: str) -> Tensor:
        """Return float32 [], 1 if the step must change nothing. on_nonfinite: as in the precision
        plan."""
        allowed = (
            self.same_scaler & self.same_parameters & (self.gradients > 0) & ~self.nothing_counts
        )
        if on_nonfinite != "ignore":
            allowed = allowed & self.finite
        return allowed.logical_not().float()


class StepConsensus:
    """Packs the numbers of a rank into one tensor and reads the sum. p: order of the gradient
    norm."""

    def __init__(self, pp: Axis, world: Axis, p: float, device: torch.device) -> None:
        self.pp = pp
        self.world = world
        self.p = p
        self.device = device
        slots = 0 if p == 2 else world.size
        self.lengths = (8, 3 * pp.size, slots)

    def measured(
        self, gradients: Sequence[Tensor], copies: Sequence[Tensor], kernels: Kernels | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return two arguments of `pack`: sum of squares and number of zeros; the norm of this
        rank's gradients.

        gradients, copies, kernels: as in `grad_stats.statistics`.
        """
        counted = statistics(gradients, copies, self.device, kernels)
        return counted, counted[0] if self.p == 2 else norm_of(gradients, self.p, self.device)

    def pack(
        self,
        counted: Tensor,
        loss: Tensor | None,
        scaler: Tensor,
        parameters: float,
        norm: Tensor,
        stop: bool = False,
        gradients: int = 1,
        counted_tokens: Tensor | None = None,
        gave_loss: bool = True,
    ) -> Tensor:
        """Return this rank's numbers, to be summed over the world: float64.

        counted: sum of squares and number of zeros. loss: this rank's share. scaler, parameters:
        digests. norm: of this rank's gradients, read only for a norm other than L2. stop: True if
        this rank was asked to stop.
        gradients: number of this rank's parameters that have one. counted_tokens: of the batch, in
        the loss; None or NaN if this rank does not know it. gave_loss: False if this rank knows no
        loss.
        """
        squares, zeros = counted.unbind()
        lacking = torch.full((), parameters, dtype=torch.float64, device=self.device)
        stage = torch.zeros(3, self.pp.size, dtype=torch.float64, device=self.device)
        stage[:, self.pp.rank] = torch.stack((zeros, lacking, lacking.square()))
        slots = torch.zeros(self.lengths[-1], dtype=torch.float64, device=self.device)
        slots[self.world.rank : self.world.rank + 1] = norm
        if loss is None:
            own = torch.zeros((), dtype=torch.float64, device=self.device)
        else:
            own = loss.double().reshape(())
        counts = (float(stop), gradients, float(gave_loss))
        told, number, losses = (
            torch.full((), n, dtype=torch.float64, device=self.device) for n in counts
        )
        if counted_tokens is None:
            nothing_counts = torch.zeros_like(told)
        else:
            nothing_counts = (counted_tokens <= 0).double()
        numbers = torch.stack(
            (squares, own, scaler, scaler.square(), told, number, nothing_counts, losses)
        )
        return torch.cat((numbers, stage.view(-1), slots))

    def read(self, summed: Tensor) -> Consensus:
        """Return the consensus that the sum over the world contains."""
        numbers, stages, slots = summed.split(self.lengths)
        squares, loss, scaler, scaler_squared, stops, gradients, nothing_counts, losses = (
            numbers.unbind()
        )
        zeros, digests, digests_squared = stages.view(3, -1).unbind()
        ranks_of_stage = self.world.size // self.pp.size
        return Consensus(
            norm=squares.sqrt() if self.p == 2 else joined_norm(slots, self.p),
            loss=loss.where(losses > 0, math.nan),
            zeros=zeros,
            finite=numbers[:2].isfinite().all(),
            same_scaler=_equal(scaler, scaler_squared, self.world.size),
            same_parameters=_equal(digests, digests_squared, ranks_of_stage).all(),
            stops=stops,
            gradients=gradients,
            nothing_counts=nothing_counts > 0,
            gave_loss=losses > 0,
        )


def _equal(total: Tensor, squares: Tensor, ranks: int) -> Tensor:
    """Return True where all `ranks` digests are equal. total, squares: sums of the digests and of
    their squares.

    Equal digests have an integer mean. Every product here is less than 2**53, unlike the square of
    `total`.
    """
    mean = (total / ranks).round()
    return (mean * ranks == total) & (mean.square() * ranks == squares)


def digest(numbers: Iterable[Tensor]) -> Tensor:
    """Return a digest of DIGEST_BITS bits of at most five numbers, read as FP32: float64 of shape
    []."""
    values = torch.stack([number.float() for number in numbers]).view(torch.int32)
    total = torch.stack(
        [
            value * odd
            for value, odd in zip(values.long().unbind(), _ODD[: len(values)], strict=True)
        ]
    ).sum()
    return ((total >> 40) & ((1 << DIGEST_BITS) - 1)).double()
