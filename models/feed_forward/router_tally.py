"""Sums over the micro-batches of a step of what a router did: choices, probabilities, losses.

A tally belongs to one layer on one rank. Each backward pass through the router adds the numbers of
its micro-batch: so a forward pass that is recomputed counts once, and an evaluation not at all.
The numbers of all ranks of dp and cp are added at the end of the step (`models.engine.step_sums`).
All ranks of tp route the same tokens, so the first one alone counts them.

Every number is rounded to a multiple of UNIT, once for each micro-batch. Sums of such numbers are
exact in float64 up to 2^23, in any order: so the totals have the same bits however micro-batches
are spread over ranks, if each micro-batch has.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

UNIT = 2.0**-30
NUM_SCALARS = 3  # of the sums of a router


class RouterSums(NamedTuple):
    """The sums of a router over tokens or samples, float64.

    choices: [experts], how many tokens were sent to each expert.
    probabilities: [experts], over the tokens.
    balance, z: [], over the samples, of losses that the model trains, without their weights; 0 for
        others.
    samples: [], the number of the latter.
    """

    choices: Tensor
    probabilities: Tensor
    balance: Tensor
    z: Tensor
    samples: Tensor

    @staticmethod
    def unpacked(packed: Tensor) -> "RouterSums":
        """Return the sums that lie one after the other in a tensor [..., 2 * experts + 3], as views
        of it; leading dimensions stay."""
        experts = (packed.shape[-1] - NUM_SCALARS) // 2
        lengths = (experts, experts, NUM_SCALARS)
        choices, probabilities, scalars = packed.split(lengths, -1)
        return RouterSums(choices, probabilities, *scalars.unbind(-1))

    @staticmethod
    def num_packed(experts: int) -> int:
        """Return the number of sums of so many experts."""
        return 2 * experts + NUM_SCALARS


class RouterTally:
    """The sums of the router of `layer`, such as "layers.3", over the micro-batches of a step.

    sums: in one tensor, as `RouterSums.unpacked` takes them; None before the first micro-batch.
    """

    def __init__(self, layer: str) -> None:
        self.layer = layer
        self.sums: Tensor | None = None

    def clear(self) -> None:
        """Discard the sums: a step begins."""
        self.sums = None

    def add(self, packed: Tensor) -> None:
        """Add the packed sums of a micro-batch."""
        self.sums = packed.clone() if self.sums is None else self.sums.add_(packed)

    def count(self, weights: Tensor, packed: Tensor) -> Tensor:
        """Return `weights`, whose backward pass adds the packed sums of a micro-batch to the
        tally."""
        # Without a gradient there is no backward pass, and no recomputation that would count twice.
        if not weights.requires_grad:
            self.add(packed)
            return weights
        return WithTally.apply(weights, packed, self)


@torch.no_grad()
def sum_router(
    probabilities: Tensor,
    chosen: Tensor,
    losses: tuple[Tensor, Tensor] | None,
    counts_samples: bool,
) -> Tensor:
    """Return the packed sums of a micro-batch, float64 [2 * experts + 3], rounded to multiples of
    UNIT.

    probabilities: [s, b, experts].
    chosen: int64 [s, b, k].
    losses: the balance and the z-loss of each sample, [b] each; None if neither is trained.
    counts_samples: False on all but one of the ranks that share samples and have the same losses.
    """
    # each operator is a launch on a GPU: the sums are written in their places
    packed = torch.zeros(
        RouterSums.num_packed(probabilities.shape[-1]), dtype=torch.float64, device=chosen.device
    )
    sums = RouterSums.unpacked(packed)
    choices = chosen.flatten()
    sums.choices.index_add_(0, choices, packed.new_ones(len(choices)))
    torch.sum(probabilities, (0, 1), dtype=torch.float64, out=sums.probabilities)
    if losses is not None and counts_samples:
        balance, z = losses
        torch.sum(balance, 0, dtype=torch.float64, out=sums.balance)
        torch.sum(z, 0, dtype=torch.float64, out=sums.z)
        sums.samples.fill_(chosen.shape[1])
    return round_to(UNIT, packed)


def round_to(unit: float, numbers: Tensor) -> Tensor:
    """Round numbers to the nearest multiples of `unit`, a power of two. numbers: float64."""
    return numbers.div_(unit).round_().mul_(unit)


class WithTally(torch.autograd.Function):
    """The identity on x, whose backward pass adds the packed sums of a micro-batch to a tally."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        packed: Tensor,
        tally: RouterTally,
    ) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.tally = tally
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        ctx.tally.add(packed)
        return grad, None, None
