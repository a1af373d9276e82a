"""The number of tokens in the loss of a global batch, by which each micro-batch's loss is divided.

Without a mask it is known: all replicas have equal shares. With a mask it is a sum over dp. That
sum is started before the passes (an exact one when it is first read) and awaited where the first
loss is divided. NCCL runs the operations of one communicator in order, and the all-gathers of
weights that the step before has started are in the same one: if the host or the first layer waited
for the sum at once, it would wait for all of them, and they would overlap with nothing.
"""

import math
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.optim.canonical.exact_sum import exact_total


class TokenCount:
    """A count that is known, or one whose sum is under way.

    wait: a function that returns it; called once, as late as possible.
    """

    def __init__(self, wait: Callable[[], Tensor]) -> None:
        self._wait = wait

    @cached_property
    def total(self) -> Tensor:
        """Return the number of tokens, or the sum of their weights: float64 []; NaN on ranks that
        divide nothing.

        The first call waits for the sum, if there is one.
        """
        return self._wait()

    @cached_property
    def divisor(self) -> Tensor:
        """Return what losses are divided by: `total`, or 1 if nothing counts, so that the loss of
        nothing is 0."""
        return self.total.masked_fill(self.total <= 0, 1)

    def await_sum(self) -> None:
        """Wait for the sum, if there is one, of passes that will not divide by it."""
        assert self.divisor is not None


def count_tokens(
    tokens: int,
    mask: Tensor | None,
    dp: Axis,
    divides: bool,
    device: torch.device,
    exact: bool = False,
) -> TokenCount:
    """Return the number of tokens in the loss over all replicas, or the sum of their weights, which
    may be under way. Collective over dp if there is a mask.

    tokens: the number of this rank's tokens, the same on every rank of dp.
    mask: the weights of their targets on `device`; None on every replica: all count.
    divides: True on ranks that have the model's last stage; the others divide nothing and get NaN.
    dp: the ranks that hold the same weights, those of cp among them.
    exact: weights need not be integers, but their sum must have the same bits for every number of
        replicas.
    """
    # NaN, so that a rank which divided by it after all would be noticed.
    if not divides:
        return _known_count(math.nan, device)
    if mask is None:
        return _known_count(float(tokens * dp.size), device)
    if exact:
        return TokenCount(lambda: exact_total(mask, dp))
    total = mask.sum(dtype=torch.float64)  # FP32 counts to 2^24
    wait_for_sum = dp.start_sum_(total)

    def wait() -> Tensor:
        wait_for_sum()
        return total  # which the sum has changed in place

    return TokenCount(wait)


def _known_count(tokens: float, device: torch.device) -> TokenCount:
    return TokenCount(lambda: torch.full((), tokens, dtype=torch.float64, device=device))
