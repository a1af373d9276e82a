"""The agreement of all ranks before a step changes anything: one all-reduce of a few numbers over the whole mesh.

A sum is sufficient. Sums of squares and counts of zeros are added. Values that must be *equal* on all ranks (the
scaler, the list of parameters that have a gradient) are sent as a digest d and its square, because the mean of the
squares is the square of the mean only if all digests are equal. A norm other than L2 is sent in a slot per rank, and
every rank computes the same global norm from the slots.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.optim.grad_stats import joined_norm

_DIGEST = 0xFFF  # 12 bits: sums of squares over thousands of ranks are exact in float64
_ODD = tuple(v - 2**64 for v in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xABC98388FB8FAC03, 0x8CB92BA72F3D8DD7))


@dataclass(frozen=True)
class Consensus:
    """The reduced numbers of a step: tensors on the device, equal on every rank.

    norm: of the gradients, including the loss scale. zeros: zero elements by pipeline rank, [pp].
    finite: True if gradients and loss are finite. same_scaler, same_parameters: True if all ranks sent equal ones.
    stops: number of ranks that were asked to stop.
    """

    norm: Tensor
    loss: Tensor
    zeros: Tensor
    finite: Tensor
    same_scaler: Tensor
    same_parameters: Tensor
    stops: Tensor


class StepConsensus:
    """Packs the numbers of a rank into one tensor and reads the sum. p: order of the gradient norm."""

    def __init__(self, pp: Axis, world: Axis, p: float, device: torch.device) -> None:
        self.pp, self.world, self.p, self.device = pp, world, p, device
        slots = 0 if p == 2 else world.size
        self.lengths = (5, 3 * pp.size, slots)

    def pack(
        self, counted: Tensor, loss: Tensor | None, scaler: Tensor, parameters: float, norm: Tensor, stop: bool = False
    ) -> Tensor:
        """Return this rank's numbers, to be summed over the world: float64.

        counted: sum of squares and number of zeros. loss: this rank's share. scaler, parameters: digests. norm: of this
        rank's gradients, read only for a norm other than L2. stop: True if this rank was asked to stop.
        """
        squares, zeros = counted.unbind()
        lacking = torch.full((), parameters, dtype=torch.float64, device=self.device)
        stage = torch.zeros(3, self.pp.size, dtype=torch.float64, device=self.device)
        stage[:, self.pp.rank] = torch.stack((zeros, lacking, lacking.square()))
        slots = torch.zeros(self.lengths[-1], dtype=torch.float64, device=self.device)
        slots[self.world.rank : self.world.rank + 1] = norm
        own = torch.zeros((), dtype=torch.float64, device=self.device) if loss is None else loss.double().reshape(())
        told = torch.full((), float(stop), dtype=torch.float64, device=self.device)
        numbers = torch.stack((squares, own, scaler, scaler.square(), told))
        return torch.cat((numbers, stage.view(-1), slots))

    def read(self, summed: Tensor) -> Consensus:
        """Return the consensus that the sum over the world contains."""
        numbers, stages, slots = summed.split(self.lengths)
        squares, loss, scaler, scaler_squared, stops = numbers.unbind()
        zeros, digests, digests_squared = stages.view(3, -1).unbind()
        ranks_of_stage = self.world.size // self.pp.size
        return Consensus(
            norm=squares.sqrt() if self.p == 2 else joined_norm(slots, self.p),
            loss=loss,
            zeros=zeros,
            finite=numbers[:2].isfinite().all(),
            same_scaler=scaler.square() == self.world.size * scaler_squared,
            same_parameters=(digests.square() == ranks_of_stage * digests_squared).all(),
            stops=stops,
        )


def digest(numbers: Iterable[Tensor]) -> Tensor:
    """Return a digest of 12 bits of at most four numbers, read as FP32: float64 of shape []."""
    values = torch.stack([number.float() for number in numbers]).view(torch.int32)
    total = torch.stack(
        [value * odd for value, odd in zip(values.long().unbind(), _ODD[: len(values)], strict=True)]
    ).sum()
    return ((total >> 40) & _DIGEST).double()
