"""The agreement of all ranks under canonical numerics: norm and loss have the same bits in every
layout.

Sums of squares are exact (`exact_sum.py`), whatever slices a rank holds. So are sums of p-th
powers: the gradients are first divided by a power of two that is above the largest of all ranks,
because powers overflow. A power is computed on blocks of one fixed length, the last one padded with
zeros: a vectorized function computes the end of a tensor of any other length with other
instructions, so that its last bits would depend on the slice.

Losses are exchanged in one slot for each micro-batch of the global batch, and their sum is exact
too.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.errors import UserError
from megaprec.optim.canonical.exact_sum import LENGTH, ExactSum, total
from megaprec.optim.decision.consensus import GradientMeasures, StepConsensus, StepNumbers
from megaprec.optim.decision.grad_stats import statistics

_LARGEST_EXPONENT = 1000  # powers of two up to here, and their inverses, are numbers of float64


class CanonicalConsensus(StepConsensus):
    """A StepConsensus whose norm and loss do not depend on the layout. Losses are given in slots,
    see `in_slots`."""

    def __init__(
        self,
        pp: Axis,
        world: Axis,
        order: float,
        device: torch.device,
    ) -> None:
        # A largest magnitude is exact as it is. Every other norm is computed here, from exact sums
        # of powers, and the base class exchanges no norm.
        is_largest = order == math.inf
        super().__init__(pp, world, math.inf if is_largest else 2.0, device)
        self.exact_order = order
        # exchanged numbers of the norm: an exact sum, and the exponent of its unit
        self._num_exact = 0 if is_largest else LENGTH + 1

    def measure(
        self, gradients: Sequence[Tensor], counted_elsewhere: Sequence[Tensor]
    ) -> GradientMeasures:
        """Return the measures of this rank's gradients.

        Of `counted`, the sum of squares only says whether all elements and copies are finite: it is
        0 if they are, else NaN. `norm` is the largest magnitude for order inf. For any other order
        it is float64 [LENGTH + 1]: the exact sum of the p-th powers of the gradients divided by
        2**exponent, and that exponent. Collective over the world for orders other than 2 and inf.
        """
        counted = statistics(gradients, counted_elsewhere, self.device)
        # 0 * x is 0 for a finite x, else NaN: only whether the sum of squares is finite is used
        if self.exact_order == math.inf:
            counted[0] *= 0
            return GradientMeasures(counted, _largest(gradients, self.device))
        # squares of FP32 numbers fit into float64, other powers may not
        exponent = 0
        if self.exact_order != 2:
            exponent = self._exponent(gradients)
        powers = ExactSum(self.device)
        # blocks of one length: a power has other last bits at the end of a shorter tensor
        for block in _blocks(gradients, powers.length):
            powers.add_(_powers(block, exponent, self.exact_order, powers.length))
        sum_of_powers = powers.numbers()
        unit_exponent = self._scalar(exponent).view(1)
        # the last number of an exact sum is 0 if every term is finite
        infinite = sum_of_powers[LENGTH - 1]
        counted[0] = 0 * counted[0] + 0 * infinite
        norm = torch.cat((sum_of_powers, unit_exponent))
        return GradientMeasures(counted, norm)

    def pack(self, measured: GradientMeasures, numbers: Mapping[str, Tensor | float]) -> Tensor:
        """Return this rank's numbers, to be summed over the world: those of the base class, the
        numbers of the exact norm, and the slots of losses.

        numbers: "loss" is in slots, float64 [micro-batches of the global batch]. Each is of one
            micro-batch, whose loss only one rank has: sums over the world round nothing.
        """
        losses = numbers["loss"]
        assert isinstance(losses, Tensor)
        no_norm = measured.norm.view(-1)[:0]
        exact_norm = no_norm
        if self._num_exact:
            exact_norm = measured.norm
            # the base class exchanges no norm then
            measured = GradientMeasures(measured.counted, no_norm)
        # its sum of losses tells whether all are finite; `read` replaces it by the exact one
        of_base = super().pack(measured, {**numbers, "loss": losses.sum()})
        return torch.cat((of_base, exact_norm, losses))

    def read(self, summed: Tensor) -> StepNumbers:
        """Return what all ranks agree on. summed: over the world, what `pack` has returned on each
        rank. The host waits for it, because exact sums are finished there."""
        exact_norm_start = sum(self.lengths)
        losses_start = exact_norm_start + self._num_exact
        of_base, exact_norm, losses = summed.tensor_split((exact_norm_start, losses_start))
        numbers = super().read(of_base)
        exact_loss = self._scalar(total_loss(losses))
        loss = exact_loss.where(numbers["gave_loss"], math.nan)
        norm = numbers["norm"]
        if self._num_exact:  # else the base class has the largest magnitude
            norm = self._scalar(self._norm_of(exact_norm))
        return {**numbers, "loss": loss, "norm": norm}

    def _norm_of(self, exact_norm: Tensor) -> float:
        """Return the norm of the gradients of all ranks. exact_norm: the sum over the world of the
        `norm` that `measure` has returned on each."""
        sum_of_powers = total(exact_norm[:-1])
        if self.exact_order == 2:
            root = math.sqrt(sum_of_powers)  # correctly rounded, unlike a power
        else:
            root = sum_of_powers ** (1 / self.exact_order)
        # the last number is the sum of the exponents, which are the same on all ranks
        exponent = exact_norm[-1].item() / self.world.size
        return root * 2.0**exponent

    def _exponent(self, gradients: Sequence[Tensor]) -> int:
        """Return e such that all gradients of all ranks are less than 2^e. Collective over the
        world."""
        largest_magnitude = self.world.max_(_largest(gradients, self.device))
        largest = largest_magnitude.item()
        if not math.isfinite(largest):
            return 0  # the norm is not finite, whatever the unit
        _, exponent = math.frexp(largest)
        return max(-_LARGEST_EXPONENT, min(_LARGEST_EXPONENT, exponent))


def in_slots(
    loss: Tensor | None,
    count: int,
    dp: Axis,
    device: torch.device,
) -> Tensor:
    """Return float64 [dp ranks * count]: a slot for each micro-batch of the global batch, with the
    losses [count] of this rank's micro-batches in theirs, and zeros in all others.

    loss: None on a rank that computes none. Raises UserError for another number of losses.
    """
    # a row for each rank: the sum over ranks then adds zeros only, in any order
    slots = torch.zeros(dp.size, count, dtype=torch.float64, device=device)
    # None: this rank is of a stage that computes no loss
    if loss is not None:
        if loss.numel() != count:
            raise UserError.of("optimizer.canonical_losses", num_losses=loss.numel(), count=count)
        slots[dp.rank] = loss.detach().reshape(-1)
    return slots.view(-1)


def total_loss(slots: Tensor) -> float:
    """Return the exact sum of losses, rounded once; inf or NaN if one of them is."""
    exact = ExactSum(slots.device)
    exact.add(slots)
    return total(exact.numbers())


def summed_loss(loss: Tensor, dp: Axis, world: Axis) -> float:
    """Return the sum of the losses of all ranks: of scalars, or the exact one of losses
    [micro-batches]. Collective."""
    if loss.dim() == 0:
        return world.sum_(loss).item()
    slots = in_slots(loss, len(loss), dp, loss.device)
    return total_loss(world.sum_(slots))


def _blocks(gradients: Iterable[Tensor], length: int) -> Iterator[Tensor]:
    """Yield views of at most `length` elements of each tensor."""
    for values in gradients:
        if len(values):
            yield from values.split(length)


def _powers(
    block: Tensor,
    exponent: int,
    order: float,
    length: int,
) -> Tensor:
    """Return |gradient / 2^exponent| ** order, float64, followed by zeros up to `length`
    elements."""
    # a product needs no padding: its bits are the same in every slice
    if order == 2:
        squares = block.to(torch.float64, copy=True)
        return squares.square_()
    powers = torch.zeros(length, dtype=torch.float64, device=block.device)
    powers[: len(block)] = block
    powers.abs_().mul_(2.0**-exponent)
    return powers.pow_(order)


def _largest(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the largest magnitude, float64 []; NaN if an element is NaN, 0 if there is no
    element."""
    magnitudes: list[Tensor] = []
    for values in gradients:
        if len(values):
            # without the copy that `abs` makes
            magnitudes += [values.amax().double(), -values.amin().double()]
    if magnitudes:
        return torch.stack(magnitudes).amax()
    return torch.zeros((), dtype=torch.float64, device=device)
