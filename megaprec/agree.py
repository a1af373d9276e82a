"""What all ranks must agree on before a step changes anything: one all-reduce of a few numbers over the whole mesh.

A sum is all it takes. Sizes and zeros add up; what must be *equal* on all ranks (the scaler, the list of parameters
that have a gradient) travels as a digest d and its square, for the mean of squares is the square of the mean only if
all are equal; and a norm that is no sum travels in a slot of its rank's own, from which all take the same norm.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megaprec.comm import Axis
from megaprec.random import bits
from megaprec.stats import joined_norm

_DIGEST = 0xFFF  # so few bits that sums of squares over thousands of ranks are exact in float64


@dataclass(frozen=True)
class Agreed:
    """The same on every rank, on the device. norm: of the still scaled gradients. zeros: by pipeline rank, int64 [pp].

    finite: whether gradients and loss are; same_scaler, same_parameters: whether the ranks came with equal ones.
    stops: how many ranks were told to stop.
    """

    norm: Tensor
    loss: Tensor
    zeros: Tensor
    finite: Tensor
    same_scaler: Tensor
    same_parameters: Tensor
    stops: Tensor


class Agreement:
    """Packs and reads the numbers. p: which norm of the gradients is asked for."""

    def __init__(self, pp: Axis, world: Axis, p: float, device: torch.device) -> None:
        self.pp, self.world, self.p, self.device = pp, world, p, device
        slots = 0 if p == 2 else world.size
        self.lengths = (1, 1, 2, 1, pp.size, pp.size, pp.size, slots)

    def pack(
        self, counted: Tensor, loss: Tensor | None, scaler: Tensor, parameters: float, norm: Tensor, stop: bool = False
    ) -> Tensor:
        """This rank's numbers, to be summed over the world: float64.

        counted: sum of squares and zeros. loss: this rank's share. scaler, parameters: digests. norm: of its own
        gradients, read only if another than the L2 norm is asked for. stop: whether it was told to.
        """
        stage = torch.zeros(3, self.pp.size, dtype=torch.float64, device=self.device)
        stage[0, self.pp.rank], stage[1, self.pp.rank], stage[2, self.pp.rank] = counted[1], parameters, parameters**2
        slots = torch.zeros(self.lengths[-1], dtype=torch.float64, device=self.device)
        slots[self.world.rank : self.world.rank + 1] = norm
        own = torch.zeros((), dtype=torch.float64, device=self.device) if loss is None else loss.double().reshape(())
        told = torch.full((), float(stop), dtype=torch.float64, device=self.device)
        numbers = torch.stack((counted[0], own, scaler, scaler.square(), told))
        return torch.cat((numbers, stage.view(-1), slots))

    def read(self, summed: Tensor) -> Agreed:
        """What the sum over the world says."""
        squares, loss, scaler, stops, zeros, digests, digest_squares, slots = summed.split(self.lengths)
        ranks_of_stage = self.world.size // self.pp.size
        return Agreed(
            norm=squares[0].sqrt() if self.p == 2 else joined_norm(slots, self.p),
            loss=loss[0],
            zeros=zeros.long(),
            finite=squares[0].isfinite() & loss[0].isfinite(),
            same_scaler=scaler[0].square() == self.world.size * scaler[1],
            same_parameters=(digests.square() == ranks_of_stage * digest_squares).all(),
            stops=stops[0],
        )


def digest(numbers: Iterable[Tensor], device: torch.device) -> Tensor:
    """12 bits of these numbers, taken as FP32: float64 of shape []."""
    values = torch.stack([number.float() for number in numbers]).view(torch.int32).long()
    placed = values + (torch.arange(len(values), device=device) << 32)
    return (bits(0, placed).sum() & _DIGEST).double()
