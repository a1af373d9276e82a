"""The agreement of all ranks before a step changes anything: one all-reduce of a few numbers over
the whole mesh.

A sum is sufficient. Sums of squares and counts of zeros are added. Values that must be *equal* on
all ranks (the scaler, step count and rate; of a stage the parameters without a gradient, and
settings) are sent as a digest d and its square, because the mean of the squares is the square of
the mean only if all digests are equal; digests are so short that this test is exact. A norm other
than L2 is sent in a slot per rank, and every rank computes the same global norm from the slots.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

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


class Combine(Enum):
    """Combination of the ranks' values of a number into one.

    SUM: over all ranks.
    BY_PP_RANK: over the ranks of each pipeline stage, [pp].
    EQUAL: a digest that all ranks must share: whether they do.
    EQUAL_IN_PP_RANK: a digest that the ranks of each stage must share: whether all stages do.
    """

    SUM = auto()
    BY_PP_RANK = auto()
    EQUAL = auto()
    EQUAL_IN_PP_RANK = auto()

    def length(self, stages: int) -> int:
        """Return how many numbers are exchanged."""
        lengths = {
            Combine.SUM: 1,
            Combine.BY_PP_RANK: stages,
            Combine.EQUAL: 2,
            Combine.EQUAL_IN_PP_RANK: 2 * stages,
        }
        return lengths[self]


NUMBERS: Mapping[str, Combine] = {
    "squares": Combine.SUM,
    "loss": Combine.SUM,
    "agrees_globally": Combine.EQUAL,
    "stops": Combine.SUM,
    "num_gradients": Combine.SUM,
    "no_token_counts": Combine.SUM,
    "num_losses": Combine.SUM,
    "zeros": Combine.BY_PP_RANK,
    "agrees_in_pp_ranks": Combine.EQUAL_IN_PP_RANK,
}
"""The numbers that ranks exchange about a step, in this order.

squares: of the gradients, including the loss scale.
loss: this rank's share.
agrees_globally: digest of the scaler, step count, learning rate and limits.
stops: 1 if the rank was asked to stop.
num_gradients: how many of the rank's parameters have one.
no_token_counts: 1 if the rank knows that no token of the batch counts in the loss.
num_losses: 1 if the rank knows a loss.
zeros: gradient elements that are zero.
agrees_in_pp_ranks: digest of the parameters without a gradient, and of the settings.
"""

StepNumbers = Mapping[str, Tensor]
"""The numbers of a step that all ranks agree on, on the device: those of `NUMBERS`, and

norm: of the gradients, including the loss scale.
finite: whether gradients and loss are finite.
gave_loss: whether some rank has given a loss. Without one the loss is NaN.
"""


def forbids(numbers: StepNumbers, on_nonfinite: str) -> Tensor:
    """Return float32 [], 1 if the step must change nothing, and 0 if it may change the state: all
    ranks agree, some parameter has a gradient, some token counts in the loss, and gradients and
    loss are finite or `on_nonfinite` is "ignore". Spikes are not looked at here.

    on_nonfinite: as in the precision plan.
    """
    ranks_agree = numbers["agrees_globally"] & numbers["agrees_in_pp_ranks"]
    has_gradients = numbers["num_gradients"] > 0
    allowed = ranks_agree & has_gradients & ~numbers["no_token_counts"]
    if on_nonfinite != "ignore":
        allowed = allowed & numbers["finite"]
    return allowed.logical_not().float()


def to_host(numbers: StepNumbers) -> dict[str, Any]:
    """Return numbers in one copy from the device, for which the host waits: bools, floats, and
    tuples of floats for vectors."""
    flat = [value.double().view(-1) for value in numbers.values()]
    on_host = torch.cat(flat).tolist()  # the only wait of a usual step
    values: dict[str, Any] = {}
    start = 0
    for name, tensor in numbers.items():
        stop = start + tensor.numel()
        elements = on_host[start:stop]
        start = stop
        if tensor.dim():
            values[name] = tuple(elements)
            continue
        (number,) = elements
        values[name] = bool(number) if tensor.dtype == torch.bool else number
    return values


class GradientMeasures(NamedTuple):
    """The measures of a rank's gradients, on the device.

    counted: float64 [2], the sum of squares and the number of zeros.
    norm: what the ranks exchange about the norm.
    """

    counted: Tensor
    norm: Tensor


class StepConsensus:
    """Packs the numbers of a rank (`NUMBERS`) into one tensor, which is summed over the world, and
    reads from the sum what all ranks agree on.

    order: of the gradient norm: 2 for L2, inf or any other p.
    call: as in `grad_stats.statistics`.
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
        self.lengths = (*(how.length(pp.size) for how in NUMBERS.values()), norm_slots)

    def measure(
        self, gradients: Sequence[Tensor], counted_elsewhere: Sequence[Tensor]
    ) -> GradientMeasures:
        """Return sum of squares and number of zeros, and the norm, of this rank's gradients.

        gradients, counted_elsewhere: as in `grad_stats.statistics`.
        """
        counted = statistics(gradients, counted_elsewhere, self.device, self._call)
        if self.order == 2:
            return GradientMeasures(counted, counted[0])
        return GradientMeasures(counted, norm_of(gradients, self.order, self.device))

    def pack(self, measured: GradientMeasures, numbers: Mapping[str, Tensor | float]) -> Tensor:
        """Return this rank's numbers, to be summed over the world: float64.

        measured: of its gradients; its norm is read only for a norm other than L2.
        numbers: those of `NUMBERS` that are not measured of gradients.
        """
        squares, zeros = measured.counted.unbind()
        values = {**numbers, "squares": squares, "zeros": zeros}
        packed = [self._pack(how, self._scalar(values[name])) for name, how in NUMBERS.items()]
        norms = torch.zeros(self.lengths[-1], dtype=torch.float64, device=self.device)
        own_slot = slice(self.world.rank, self.world.rank + 1)  # no element for the L2 norm
        norms[own_slot] = measured.norm
        return torch.cat((*packed, norms))

    def _pack(self, how: Combine, value: Tensor) -> Tensor:
        """Return this rank's value, float64 [], in the form in which it is summed over ranks:
        float64 [how.length]."""
        if how is Combine.SUM:
            return value.view(1)
        is_digest = how in (Combine.EQUAL, Combine.EQUAL_IN_PP_RANK)
        terms = torch.stack((value, value.square())) if is_digest else value.view(1)
        if how is Combine.EQUAL:
            return terms
        # a column for each stage: only ranks of one stage add to a column
        by_stage = torch.zeros(len(terms), self.pp.size, dtype=torch.float64, device=self.device)
        by_stage[:, self.pp.rank] = terms
        return by_stage.view(-1)

    def _read(self, how: Combine, summed: Tensor) -> Tensor:
        """Return what the ranks' values of a number combine to. summed: over all ranks, what
        `_pack` has returned on each."""
        if how is Combine.SUM:
            return summed.view(())
        if how is Combine.BY_PP_RANK:
            return summed
        if how is Combine.EQUAL:
            digests, digests_squared = summed.unbind()
            return _are_equal(digests, digests_squared, self.world.size)
        ranks_of_stage = self.world.size // self.pp.size
        digests, digests_squared = summed.view(2, -1).unbind()
        return _are_equal(digests, digests_squared, ranks_of_stage).all()

    def read(self, summed: Tensor) -> StepNumbers:
        """Return what all ranks agree on. summed: over the world, what `pack` has returned on each
        rank."""
        *packed, norms = summed.split(self.lengths)
        numbers = {
            name: self._read(how, part)
            for (name, how), part in zip(NUMBERS.items(), packed, strict=True)
        }
        squares = numbers["squares"]
        loss = numbers["loss"]
        gave_loss = numbers["num_losses"] > 0
        return {
            **numbers,
            "norm": squares.sqrt() if self.order == 2 else joined_norm(norms, self.order),
            "loss": loss.where(gave_loss, math.nan),
            "finite": torch.stack((squares, loss)).isfinite().all(),
            "no_token_counts": numbers["no_token_counts"] > 0,
            "gave_loss": gave_loss,
        }

    def _scalar(self, value: Tensor | float) -> Tensor:
        """Return a number as float64 []."""
        if isinstance(value, Tensor):
            return value.double().reshape(())
        return torch.full((), float(value), dtype=torch.float64, device=self.device)


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
