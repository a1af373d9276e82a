"""Weights that are stored in FP8 only: one byte per element and one or a few scales, both between
and during steps.

The optimizer's masters are their only high-precision copy. At the start of a pass the masters are
rounded, if they or their scales have changed. Under ZeRO-1 each rank rounds its own slice, and
codes are all-gathered. A scale belongs to a whole logical tensor or to a block of it, and a slice
may end inside either. The ranks that shard the masters therefore first all-reduce the amaxes, and
if one scale serves a tensor that is sharded over tp, the tp ranks do so too. The codes are then
equal to those that one process would compute from all masters, and to those that a product would
compute from weights in FP32.

Each matrix is stored once, so its codes must serve products along its rows and along its columns.
Row-wise and MX scales, which differ between the two, are refused
(`megaprec.fp8.eligibility.unsupported_settings`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.fp8.eligibility import Eligibility
from megaprec.fp8.formats import cast, format_of, limit
from megaprec.fp8.quantize import Codes, amax_of, block_of, counts_lost, expand_blocks
from megaprec.fp8.scaling import scale_of
from megaprec.fp8.state import FP8State


class FP8Param:
    """The format and the scales of a weight [n, k] whose parameter holds only codes once a buffer
    has it.

    dtype: of the codes. block: how many rows and columns share a scale. inverse: the inverse
    scales, [n / block[0], k / block[1]] rounded up, float32; changed in place.
    """

    def __init__(self, state: FP8State, eligibility: Eligibility) -> None:
        assert state.recipe is not None
        self.state = state
        self.name = eligibility.name
        self.shape = torch.Size(eligibility.shape)
        self.dtype = format_of(state.recipe, "weight")
        self.block = block_of(state.recipe, "weight", self.shape)
        rows, columns = self.shape
        block_rows, block_columns = self.block
        # numbers of blocks, rounded up
        scale_rows = -(-rows // block_rows)
        scale_columns = -(-columns // block_columns)
        # on the CPU until a buffer moves it to its device
        self.inverse = torch.ones(scale_rows, scale_columns)

    @property
    def in_blocks(self) -> bool:
        """Return True if scales belong to blocks, which no two tp ranks share, and not to a whole
        tensor."""
        recipe = self.state.recipe
        return recipe is not None and not recipe.scales.per_tensor

    def codes(self, weight: Tensor) -> Codes:
        """Return the parameter's values with their scales. Raise RuntimeError if these are older
        than the masters."""
        if self.state.outdated:
            raise RuntimeError(
                f"{self.name} is stored in FP8, and its codes are out of date: call the model "
                "inside `autocast`"
            )
        return Codes(weight, self.inverse, self.block)

    def scales(self, amax: Tensor, records: bool) -> Tensor:
        """Return the scales for masters with these amaxes of blocks; float32 of the shape of
        `amax`. records: a delayed amax is recorded for later scales."""
        recipe = self.state.recipe
        assert recipe is not None
        if not recipe.scales.keeps_history:
            # of the masters themselves, whatever the present scales are
            return scale_of(amax, limit(self.dtype), power_2=recipe.power_2_scales)
        if records:
            self.state.record(self.name, "weight", amax)
        return self.state.scale(self.name, "weight").expand_as(amax)


def mark_fp8(parameter: nn.Parameter, fp8_param: FP8Param) -> None:
    """Mark the parameter to be stored in codes. Until a buffer takes it over it stays in high
    precision."""
    parameter.megaprec_fp8 = fp8_param  # type: ignore[attr-defined]


def unmark_fp8(parameter: nn.Parameter) -> None:
    """Mark the parameter to be stored in high precision after all. To be called before a buffer
    takes it over."""
    if hasattr(parameter, "megaprec_fp8"):
        delattr(parameter, "megaprec_fp8")


def fp8_param_of(parameter: nn.Parameter) -> FP8Param | None:
    """Return the mark of `mark_fp8`, or None for a parameter without a gradient, which has no
    masters."""
    if parameter.requires_grad:
        return getattr(parameter, "megaprec_fp8", None)
    return None


@dataclass(frozen=True)
class FP8ParamShard:
    """One weight's codes and the shard of its masters that this rank owns, which may be empty.

    codes: elements [start, start + len(masters)) of the flat weight [n * k]. masters: the same
    elements, which may lie in other memory.
    """

    param: FP8Param
    codes: Tensor
    masters: Tensor
    start: int

    def amax(self) -> Tensor:
        """Return the amaxes of the shard in the weight's blocks, 0 for blocks outside the shard."""
        return amax_of(self._padded_masters(), self.param.block)

    def encode(self, amax: Tensor, records: bool) -> None:
        """Compute scales from the amaxes of all ranks, and codes of this rank's masters."""
        param = self.param
        scales = param.scales(amax, records)
        param.inverse.copy_(scales.reciprocal())  # also on ranks without a shard: they multiply too
        if len(self.masters):
            factors = expand_blocks(scales, param.block, param.shape)
            codes = cast(self._padded_masters(), param.dtype, factors)
            shard = slice(self.start, self.start + len(self.masters))
            self.codes.copy_(codes.view(-1)[shard])

    def lost(self) -> Tensor:
        """Return how many of this rank's masters their codes lose: float64 [4], as
        `counts_lost`."""
        codes = Codes(self._padded(self.codes), self.param.inverse, self.param.block)
        counts = counts_lost(self._padded_masters(), codes)
        counts[1] = len(self.masters)  # all elements of this rank; the padding loses nothing
        return counts

    def _padded_masters(self) -> Tensor:
        """Return `_padded` of the masters, on the device of the codes."""
        return self._padded(self.masters.to(self.codes.device, non_blocking=True))

    def _padded(self, values: Tensor) -> Tensor:
        """Return this rank's masters or codes at their places in [n, k], zeros elsewhere."""
        if values.numel() == self.param.shape.numel():
            return values.view(self.param.shape)
        padded = values.new_zeros(self.param.shape)
        stop = self.start + len(values)
        padded.view(-1)[self.start : stop] = values
        return padded


def reduced_amaxes(owned: Sequence[FP8ParamShard], shards: Axis, tp: Axis) -> list[Tensor]:
    """Return the amaxes of whole weights, or of their blocks, from those of each rank's shard.

    Collective over `shards`, the ranks that shard masters, and over tp if a scale serves the whole
    tensor.
    """
    local_amaxes = [shard.amax() for shard in owned]
    packed = torch.cat([amax.view(-1) for amax in local_amaxes])  # all in one collective
    shards.max_(packed)
    flat_amaxes = packed.split([amax.numel() for amax in local_amaxes])
    amaxes: list[Tensor] = []
    for flat, local_amax in zip(flat_amaxes, local_amaxes, strict=True):
        amaxes.append(flat.view_as(local_amax))
    # one recipe has all weights: scales of all of them belong to blocks, or of none
    if any(shard.param.in_blocks for shard in owned):
        return amaxes
    tp.max_(packed)  # `amaxes` are views of it
    # a process may have slices of several (virtual) ranks, between which no collective runs
    by_name: dict[str, list[Tensor]] = {}
    for shard, amax in zip(owned, amaxes, strict=True):
        by_name.setdefault(shard.param.name, []).append(amax)
    largest: dict[str, Tensor] = {}
    for name, amaxes_of_ranks in by_name.items():
        largest[name] = torch.stack(amaxes_of_ranks).amax(0)
    return [largest[shard.param.name] for shard in owned]


class FP8BufferShards(NamedTuple):
    """The shards that lie in one buffer, and a function that starts to all-gather the buffer."""

    shards: Sequence[FP8ParamShard]
    start_gather: Callable[[], object]


@dataclass(frozen=True)
class FP8Group:
    """Weights that are stored in FP8, whose masters are sharded over `shards`, and which are cut
    over `tp`.
    """

    by_buffer: Sequence[FP8BufferShards]
    shards: Axis
    tp: Axis

    @property
    def owned(self) -> list[FP8ParamShard]:
        """Return the shards of all buffers."""
        shards: list[FP8ParamShard] = []
        for of_buffer, _ in self.by_buffer:
            shards += of_buffer
        return shards


@dataclass(frozen=True)
class HeldCodes:
    """The scales that belonged to codes of FP8 weights at some moment, and whether the codes were
    outdated.

    inverse: the inverse scales of each shard's weight. outdated: of each state.
    """

    shards: Sequence[FP8ParamShard]
    inverse: Sequence[Tensor]
    states: Sequence[FP8State]
    outdated: Sequence[bool]

    def put_back(self) -> None:
        """Restore the scales, for codes that their owner restores."""
        for shard, inverse in zip(self.shards, self.inverse, strict=True):
            shard.param.inverse.copy_(inverse)
        for state, outdated in zip(self.states, self.outdated, strict=True):
            state.outdated = outdated


class FP8Masters:
    """The masters that this rank owns of all weights that are stored in FP8, and the computation of
    their codes.

    The states of these weights call `renew` at the start of a pass.

    groups: the weights whose masters are sharded and cut over the same ranks; those of experts may
    have ranks of their own. finish_gathers: called when all-gathers of all buffers have started.
    """

    def __init__(self, groups: Sequence[FP8Group], finish_gathers: Callable[[], object]) -> None:
        self._groups = groups
        self._finish_gathers = finish_gathers
        states: dict[FP8State, None] = {}
        for group in groups:
            states |= dict.fromkeys(shard.param.state for shard in group.owned)
        self._states = list(states)
        for state in self._states:
            state.renew = self.renew

    def outdate(self) -> None:
        """Mark the codes of all weights as not matching the present masters."""
        for state in self._states:
            state.outdated = True

    def hold_codes(self) -> HeldCodes:
        """Return a copy of the scales that belong to the present codes."""
        shards: list[FP8ParamShard] = []
        for group in self._groups:
            shards += group.owned
        inverse = [shard.param.inverse.clone() for shard in shards]
        outdated = [state.outdated for state in self._states]
        return HeldCodes(shards, inverse, self._states, outdated)

    @torch.no_grad()
    def renew(self, records: bool) -> None:
        """Compute codes of the masters and all-gather them. records: as for `FP8State.renew`.

        Collective over shards and tp of all groups.
        """
        for group in self._groups:
            # in the order of `owned`, which is that of the buffers
            amaxes = iter(reduced_amaxes(group.owned, group.shards, group.tp))
            for shards, start_gather in group.by_buffer:
                for shard in shards:
                    shard.encode(next(amaxes), records)
                start_gather()  # the codes of this buffer travel while the next are computed
        self._finish_gathers()
