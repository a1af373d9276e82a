"""Weights that are kept in FP8 alone: a byte an element and one scale or a few, between steps as in products.

The optimizer's masters are their only wide copy. When a pass begins they are rounded, if they or their scales have
changed; under ZeRO-1 each rank rounds its own slice, and what travels is codes. A scale belongs to a whole logical
tensor or to a block of one, and a slice ends anywhere: so the ranks that share the masters first agree on the largest
magnitudes, and where one scale serves a tensor that is cut over tp, so do the tp ranks. The codes are then those that
one process would make of all masters at once, and the same that a product would make of weights kept in FP32.

A matrix is kept once, so its codes must serve products along its rows and along its columns: row-wise and MX scales,
which differ between the two, are refused (`megaprec.fp8.eligibility.not_computed`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.fp8.eligibility import Eligibility
from megaprec.fp8.formats import cast, format_of, limit
from megaprec.fp8.quantize import Codes, amax_of, block_of, counts_lost, spread
from megaprec.fp8.scaling import scale_of
from megaprec.fp8.state import FP8State


class FP8Param:
    """What belongs to the codes of a weight [n, k], of which a parameter holds nothing else once a buffer has it.

    dtype: of the codes. block: how many rows and columns share a scale. inverse: what undoes the scales,
    [n / block[0], k / block[1]] rounded up, float32; changed in place.
    """

    def __init__(self, state: FP8State, reach: Eligibility) -> None:
        assert state.recipe is not None
        self.state, self.name, self.shape = state, reach.name, torch.Size(reach.shape)
        self.dtype = format_of(state.recipe, "weight")
        self.block = block_of(state.recipe, "weight", self.shape)
        self.inverse = torch.ones([-(-size // of) for size, of in zip(self.shape, self.block, strict=True)])

    @property
    def in_blocks(self) -> bool:
        """Whether scales are of blocks, which no two tp ranks share, and not of a whole tensor."""
        return self.state.recipe is not None and self.state.recipe.kind == "blockwise"

    def codes(self, weight: Tensor) -> Codes:
        """The parameter's values with their scales. Raises RuntimeError if these are not of the present masters."""
        if self.state.outdated:
            raise RuntimeError(
                f"{self.name} is kept in FP8, and rounded anew when a pass begins: call the model inside of `autocast`"
            )
        return Codes(weight, self.inverse, self.block)

    def scales(self, amax: Tensor, records: bool) -> Tensor:
        """What masters with these largest magnitudes, in blocks, are multiplied by; float32 of the shape of `amax`."""
        recipe = self.state.recipe
        assert recipe is not None
        if recipe.kind != "delayed":
            return scale_of(amax, limit(self.dtype), power_2=recipe.power_2_scales)
        if records:
            self.state.record(self.name, "weight", amax)
        return self.state.scale(self.name, "weight").expand_as(amax)


def hold(parameter: nn.Parameter, held: FP8Param) -> None:
    """Has the parameter kept in codes from when a buffer takes it over; until then it is wide."""
    parameter.megaprec_fp8 = held  # type: ignore[attr-defined]


def release(parameter: nn.Parameter) -> None:
    """Has the parameter kept wide after all; to be called before a buffer takes it over."""
    if hasattr(parameter, "megaprec_fp8"):
        delattr(parameter, "megaprec_fp8")


def fp8_param_of(parameter: nn.Parameter) -> FP8Param | None:
    """What `hold` said; None of a parameter without a gradient, which nobody keeps masters of."""
    return getattr(parameter, "megaprec_fp8", None) if parameter.requires_grad else None


@dataclass(frozen=True)
class FP8ParamShard:
    """One weight's codes, flat [n * k], and the part of its masters, elements [start, start + len(masters)), that this
    rank owns, perhaps none."""

    param: FP8Param
    codes: Tensor
    masters: Tensor
    start: int

    def amax(self) -> Tensor:
        """The largest magnitudes of that part in the weight's blocks, 0 where it has none of a block."""
        return amax_of(self._spread_out(), self.param.block)

    def encode(self, amax: Tensor, records: bool) -> None:
        """Makes scales of all ranks' amaxes, and codes of the own masters."""
        scales, end = self.param.scales(amax, records), self.start + len(self.masters)
        self.param.inverse.copy_(scales.reciprocal())
        if len(self.masters):
            codes = cast(self._spread_out(), self.param.dtype, spread(scales, self.param.block, self.param.shape))
            self.codes[self.start : end] = codes.view(-1)[self.start : end]

    def lost(self) -> Tensor:
        """`counts_lost` of the own masters."""
        values = self.codes.view(self.param.shape)
        counts = counts_lost(self._spread_out(), Codes(values, self.param.inverse, self.param.block))
        counts[1] = len(self.masters)
        return counts

    def _spread_out(self) -> Tensor:
        """The own masters at their places in [n, k], zeros elsewhere."""
        if self.masters.numel() == self.param.shape.numel():
            return self.masters.view(self.param.shape)
        whole = self.masters.new_zeros(self.param.shape)
        whole.view(-1)[self.start : self.start + len(self.masters)] = self.masters
        return whole


def agreed_amaxes(owned: Sequence[FP8ParamShard], shards: Axis, tp: Axis) -> list[Tensor]:
    """The largest magnitudes of whole weights, or of their blocks, from those of each rank's part.

    Collective over `shards`, the ranks that share masters, and over tp where a scale serves the whole tensor.
    """
    own = [one.amax() for one in owned]
    packed = torch.cat([amax.view(-1) for amax in own])
    shards.max_(packed)
    if not any(one.param.in_blocks for one in owned):
        tp.max_(packed)
    parts = packed.split([amax.numel() for amax in own])
    return [part.view_as(amax) for part, amax in zip(parts, own, strict=True)]


class FP8Masters:
    """The masters that this rank owns of all weights that are kept in FP8, and what makes codes of them.

    The states of these weights are told to call `renew` when a pass begins.

    by_buffer: the shards that lie in one buffer, and what starts to collect it from the ranks that share masters.
    settle: called when all have started. shards, tp: the ranks that share masters, and the tensor-parallel ranks.
    """

    def __init__(
        self,
        by_buffer: Sequence[tuple[Sequence[FP8ParamShard], Callable[[], object]]],
        settle: Callable[[], object],
        shards: Axis,
        tp: Axis,
    ) -> None:
        self._by_buffer, self._settle, self._axes = by_buffer, settle, (shards, tp)
        self._owned = [one for owned, _ in by_buffer for one in owned]
        self._states = list(dict.fromkeys(one.param.state for one in self._owned))
        for state in self._states:
            state.renew = self.renew

    def outdate(self) -> None:
        """Says that codes of weights are not of the present masters."""
        for state in self._states:
            state.outdated = True

    @torch.no_grad()
    def renew(self, records: bool) -> None:
        """Makes codes of the masters and collects them. records: as `FP8State.renew` says. Collective over shards and
        tp."""
        amaxes = iter(agreed_amaxes(self._owned, *self._axes))
        for owned, start_collecting in self._by_buffer:
            for one in owned:
                one.encode(next(amaxes), records)
            start_collecting()
        self._settle()
