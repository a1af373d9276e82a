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

    def packed(self) -> Tensor:
        """Return all numbers as one tensor, [2 * experts + 3]."""
        scalars = [number.reshape(1) for number in self[2:]]
        return torch.cat((self.choices, self.probabilities, *scalars))

    @staticmethod
    def unpacked(packed: Tensor) -> "RouterSums":
        """Return the sums that `packed` made one tensor of; a leading dimension of layers stays."""
        experts = (packed.shape[-1] - NUM_SCALARS) // 2
        lengths = (experts, experts, NUM_SCALARS)
        choices, probabilities, scalars = packed.split(lengths, -1)
        return RouterSums(choices, probabilities, *scalars.unbind(-1))

    @staticmethod
    def num_packed(experts: int) -> int:
        """Return the length of `packed` for so many experts."""
        return 2 * experts + NUM_SCALARS


class RouterTally:
    """The sums of the router of `layer`, such as "layers.3", over the micro-batches of a step.

    sums: as `RouterSums.packed` has them; None before the first micro-batch.
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
        """Return `weights`, whose backward pass adds the packed sums of a micro-batch."""
        # Nothing before a frozen router is trained: there is no backward pass, and no recomputation
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
    """Return the packed sums of a micro-batch, rounded to multiples of UNIT.

    probabilities: [s, b, experts].
    chosen: int64 [s, b, k].
    losses: the balance and the z-loss of each sample, [b] each; None if neither is trained.
    counts_samples: False on all but one of the ranks that share samples and have the same losses.
    """
    choices = chosen.flatten()
    ones = torch.ones(len(choices), dtype=torch.float64, device=choices.device)
    load = torch.zeros(probabilities.shape[-1], dtype=torch.float64, device=choices.device)
    load.index_add_(0, choices, ones)
    none = torch.zeros((), dtype=torch.float64, device=choices.device)
    balance = none
    z = none
    samples = none
    if losses is not None and counts_samples:
        balance, z = (loss.sum(dtype=torch.float64) for loss in losses)
        samples = none + chosen.shape[1]
    of_tokens = probabilities.sum((0, 1), dtype=torch.float64)
    packed = RouterSums(load, of_tokens, balance, z, samples).packed()
    return rounded_to(UNIT, packed)


def rounded_to(unit: float, numbers: Tensor) -> Tensor:
    """Return the nearest multiples of `unit`, a power of two. numbers: float64."""
    return (numbers / unit).round_() * unit


class WithTally(torch.autograd.Function):
    """The identity on x, whose backward pass adds `packed` to a tally."""

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
