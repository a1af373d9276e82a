"""The model chunks of a rank, laid out in flat buffers.

Parameters of one kind (same dtype, same tied ranks, sharded over as many ranks) share buffers. Two
kinds of weights are not simply views of a buffer: a DTensor is represented by a `DTensorSlice`, and
a weight that is stored in FP8 has codes, which `FP8Masters` computes at the start of a pass.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Layout, has_layout, layout_of, parameters_of
from megaprec.comm.main_grad import reset_accumulation
from megaprec.comm.tied import tied_axes
from megaprec.comm.virtual import VirtualAxis
from megaprec.errors import UserError
from megaprec.fp8.params import FP8BufferShards, FP8Group, FP8Masters
from megaprec.optim.guards.model_checks import TrainedModel
from megaprec.optim.ranks import Ranks, Replicas, expert_replicas
from megaprec.optim.rules.param_groups import Group, in_order_of_factors
from megaprec.optim.rules.update_rules import UpdateRule
from megaprec.optim.state.flat_buffer import (
    Buffer,
    GradReduction,
    Kept,
    param_dtype,
    require_in_place,
)
from megaprec.optim.state.frozen_state import FrozenState
from megaprec.optim.state.partial_grads import sum_partial_slices
from megaprec.optim.torch_wrappers import DTensorSlice, is_dtensor
from megaprec.optim.weight_units import first_units
from megaprec.precision.marks import parameters_of_marked
from megaprec.precision.plan import PrecisionPlan, dtype_name

_MIN_ELEMENTS = 40_000_000  # a message over few ranks; Megatron-LM's default
_ELEMENTS_PER_RANK = 1_000_000  # keeps the part of each of many ranks large
# the names of the moments that are kept of a parameter
Moments = Callable[[nn.Parameter], Sequence[str]]
SliceNames = tuple[tuple[str, int], ...]  # logical name and tensor-parallel rank of each slice


class _TiedBuffer(NamedTuple):
    """A buffer whose gradients are summed over the pipeline ranks of `axis`."""

    buffer: Buffer
    axis: Axis


class _Twins(NamedTuple):
    """Two buffers of this rank that hold two copies of the same parameters."""

    first: Buffer
    second: Buffer


class ModelBuffers:
    """The buffers of all parameters of `model_parts`. Tensors that are not trained are moved to the
    ranks' device.

    shards, seed, reduction, kept: as in `Buffer`.
    moments: names of the moments of a parameter; those of a buffer have the same.
    bucket: elements of a buffer, as `bucket_elements` takes them; its last parameter may exceed
        this number.
    virtual: the virtual tensor-parallel ranks, under canonical numerics.

    chunks: the buffers of each part.
    all: all buffers in one list, in an order that all dp ranks share.
    tied: the buffers whose gradients are summed over pipeline ranks, each with its axis.
    twins: pairs of buffers of this rank whose gradients are summed: two copies of a tied weight,
        which only canonical numerics keep; otherwise both stages share one parameter.
    frozen: what is in no buffer.
    dtensor_slices: for DTensors.
    """

    def __init__(
        self,
        model_parts: Sequence[nn.Module],
        plan: PrecisionPlan,
        *,
        mesh: DeviceMesh | None,
        ranks: Ranks,
        shards: Axis,
        groups: Sequence[Group],
        rule: UpdateRule,
        bucket: int,
        moments: Moments,
        seed: int,
        reduction: GradReduction,
        kept: Kept,
        virtual: VirtualAxis | None = None,
    ) -> None:
        self._kept = kept
        self._virtual = virtual
        self._experts = expert_replicas(
            ranks.experts,
            ranks.dp.size,
            ranks.tp.size,
            shards.size,
            separate_group=reduction.shards_weights,
        )
        self._bucket = bucket_elements(bucket, ranks.dp.size)
        self._plan = plan
        self._ranks = ranks
        self._shards = shards
        self._groups = groups
        self._rule = rule
        self._moments = moments
        self._seed = seed
        self._reduction = reduction
        self._model = TrainedModel(model_parts)
        dtensor_slices = {
            parameter: DTensorSlice(parameter, plan, ranks.device)
            for parameter in parameters_of(model_parts)
            if is_dtensor(parameter)
        }
        self.dtensor_slices = tuple(dtensor_slices.values())
        self._dtensor_parameters = {
            dtensor_slice.parameter for dtensor_slice in self.dtensor_slices
        }
        # collective: every rank makes the groups of all tied parameters
        tied_ranks = [layout_of(parameter).tied for parameter in parameters_of(model_parts)]
        axes = tied_axes(mesh, tied_ranks)
        self.chunks = self._lay_out(model_parts, dtensor_slices)
        self.all = list(chain.from_iterable(self.chunks))
        self.frozen = FrozenState(model_parts, ranks.pp.rank, self._is_first_replica)
        self.twins = self._find_twins()
        with_twin = set(chain.from_iterable(self.twins))
        self.tied: list[_TiedBuffer] = []
        for buffer in self._tied_buffers():
            if buffer not in with_twin:
                axis = axes[layout_of(buffer.parameters[0]).tied]
                self.tied.append(_TiedBuffer(buffer, axis))

    def _lay_out(
        self,
        model_parts: Sequence[nn.Module],
        dtensor_slices: dict[nn.Parameter, DTensorSlice],
    ) -> list[list[Buffer]]:
        """Return the buffers of each part. A parameter of several parts is in the first one's."""
        chunks: list[list[Buffer]] = []
        taken = set[nn.Parameter]()  # parameters that have a buffer
        marked = parameters_of_marked(model_parts)
        for model_part in model_parts:
            trained = list(parameters_of([model_part]))
            in_buffers: list[nn.Parameter] = []
            for parameter in trained:
                if parameter in taken:
                    continue
                if parameter in dtensor_slices:
                    # torch manages the memory of DTensors: a copy of the slice is in the buffer
                    parameter = dtensor_slices[parameter].parameter
                in_buffers.append(parameter)
            taken.update(trained)
            units = first_units(model_part) if self._reduction.shards_weights else {}
            chunks.append([self._buffer(bucket) for bucket in self._buckets(in_buffers, units)])
            move_rest(model_part, self._plan, self._ranks.device, marked)
        return chunks

    def _buckets(
        self, parameters: Sequence[nn.Parameter], units: Mapping[nn.Parameter, int]
    ) -> list[list[nn.Parameter]]:
        """Return the parameters of each buffer. Virtual ranks have buffers of their own, all of the
        same sizes.

        units: as for `buckets`.
        """
        whole_groups = self._ranks.device.type == "cuda"
        if self._virtual is None:
            return buckets(parameters, self._plan, self._bucket, self._moments, whole_groups, units)
        parameters_of_rank: dict[int, list[nn.Parameter]] = {
            rank: [] for rank in self._virtual.ranks
        }
        for parameter in parameters:
            parameters_of_rank[layout_of(parameter).parts[0].rank].append(parameter)
        buckets_of_ranks = [
            buckets(of_rank, self._plan, self._bucket, self._moments, whole_groups)
            for of_rank in parameters_of_rank.values()
        ]
        # the same bucket of all virtual ranks side by side, in the order of a real rank's buckets
        return list(chain.from_iterable(zip(*buckets_of_ranks, strict=True)))

    def _buffer(self, bucket: Sequence[nn.Parameter]) -> Buffer:
        """Return a buffer for these parameters.

        The slices of DTensors are neither reduced nor sharded again. Counts of loads are complete
        on every rank, because their update needs all counts of a layer.
        """
        is_dtensor_slice = bucket[0] in self._dtensor_parameters
        reduction = self._reduction
        # counts of loads are few, and their update is not cut into tiles
        holds_loads = layout_of(bucket[0]).balancing is not None
        if is_dtensor_slice:
            reduction = GradReduction()  # torch has reduced their gradients
            replicas = Replicas(Axis("dp"), Axis("zero"))
        else:
            replicas = self._replicas(layout_of(bucket[0]))
        return Buffer(
            in_order_of_factors(bucket, self._groups, self._rule),
            self._plan,
            dp=replicas.every,
            shards=replicas.sharing,
            pp_rank=self._ranks.pp.rank,
            device=self._ranks.device,
            state=self._moments(bucket[0]),
            seed=self._seed,
            reduction=reduction,
            kept=Kept() if holds_loads else self._kept,
        )

    def _replicas(self, layout: Layout) -> Replicas:
        """Return the ranks that hold a parameter with this layout, and those that share its
        state."""
        if layout.expert and self._experts is not None:
            return self._experts
        # counts of loads are not sharded: their update needs all of a layer
        shards = self._shards if layout.balancing is None else Axis("zero")
        return Replicas(self._ranks.dp, shards)

    def _is_first_replica(self, layout: Layout) -> bool:
        return self._replicas(layout).every.rank == 0

    def _tied_buffers(self) -> list[Buffer]:
        return [buffer for buffer in self.all if layout_of(buffer.parameters[0]).tied]

    def _find_twins(self) -> list[_Twins]:
        """Return the pairs of buffers whose parameters this rank has twice."""
        firsts: dict[SliceNames, Buffer] = {}
        seconds: list[Buffer] = []
        for buffer in self._tied_buffers():
            if layout_of(buffer.parameters[0]).again:
                seconds.append(buffer)
            else:
                firsts[_slice_names(buffer)] = buffer
        return [_Twins(firsts[_slice_names(second)], second) for second in seconds]

    def sum_tied_and_virtual(self) -> None:
        """Sum gradients that are reduced over dp over the copies of a parameter: virtual ranks' and
        tied ones."""
        if self._virtual is not None:
            sum_partial_slices(self.all, self._virtual)
        # after the sum over dp, of slices only: all holders of tied parameters cut them alike
        for buffer, axis in self.tied:
            axis.sum_(buffer.local_grads)
        for first, second in self.twins:
            # both copies are updated by the same sum, so they stay equal
            first.local_grads.add_(second.local_grads)
            second.local_grads.copy_(first.local_grads)

    def fp8_masters(
        self,
        begin: Callable[[Buffer], None],
        finish_update: Callable[[], None],
    ) -> FP8Masters | None:
        """Return the masters of weights that are stored in FP8, or None. Codes are all-gathered
        like other weights.

        begin, finish_update: of the `ParamGatherer`.
        """
        in_codes = [buffer for buffer in self.all if buffer.has_fp8_weights]
        # experts on ranks of their own have other replicas and other tensor-parallel ranks
        experts = [buffer for buffer in in_codes if self._is_on_own_ranks(buffer)]
        others = [buffer for buffer in in_codes if not self._is_on_own_ranks(buffer)]
        groups: list[FP8Group] = []
        if others:
            groups.append(_fp8_group(others, begin, self._shards, self._ranks.tp))
        if experts:
            assert self._experts is not None and self._ranks.experts is not None
            shards = self._experts.sharing
            groups.append(_fp8_group(experts, begin, shards, self._ranks.experts.tp))
        return FP8Masters(groups, finish_update) if groups else None

    def _is_on_own_ranks(self, buffer: Buffer) -> bool:
        """Return True for weights of experts that are on ranks of their own."""
        return self._experts is not None and buffer.holds_experts

    def num_elements(self, world: Axis) -> tuple[int, int]:
        """Return the numbers of elements of the whole model that are trained, and frozen.
        Collective over `world`."""
        local_trained = 0
        for buffer in self.all:
            local_trained += sum(stop - start for start, stop in buffer.counted())
        local_frozen = self.frozen.num_saved()
        # in float64 a sum over ranks is exact up to 2**53 elements
        local = torch.tensor(
            [local_trained, local_frozen],
            dtype=torch.float64,
            device=self._ranks.device,
        )
        trained, frozen = map(int, world.sum_(local).tolist())
        if not trained:
            raise UserError.of("optimizer.nothing_to_train")
        return trained, frozen

    def counted(self) -> Iterator[Tensor]:
        """Yield flat views of the gradients in this rank's slices that no other rank counts."""
        for buffer in self._loss_buffers():
            for start, stop in buffer.counted():
                yield buffer.local_grads[start:stop]

    def counted_elsewhere(self) -> Iterator[Tensor]:
        """Yield flat views of the gradients in this rank's slices that another rank counts."""
        for buffer in self._loss_buffers():
            for start, stop in buffer.counted_elsewhere():
                yield buffer.local_grads[start:stop]

    def _loss_buffers(self) -> Iterator[Buffer]:
        """Yield the buffers whose gradients are those of a loss."""
        return (buffer for buffer in self.all if not buffer.holds_loads)

    def adopt_written_weights(self, everything: bool, applied: Tensor) -> None:
        """Take weights that someone has written to as they are now.

        everything, applied: as in `Buffer.adopt_weights`. Raises an error that names parameters if
        the model is not the one that the buffers were made for.
        """
        self._model.require_same()
        require_in_place(self.all)
        for dtensor_slice in self.dtensor_slices:
            dtensor_slice.read_weights()
        for buffer in self.all:
            buffer.adopt_weights(everything, applied)

    def read_dtensor_gradients(self) -> None:
        """Copy the gradients of DTensors to the buffers."""
        for dtensor_slice in self.dtensor_slices:
            dtensor_slice.read_gradient()

    def write_dtensor_weights(self) -> None:
        """Write the updated weights of DTensors to the model."""
        for dtensor_slice in self.dtensor_slices:
            dtensor_slice.write_weights()

    def forget_gradients(self) -> None:
        """Discard all gradients, to begin a new step."""
        for buffer in self.all:
            reset_accumulation(buffer.parameters)
            buffer.forget_gradients()
        for dtensor_slice in self.dtensor_slices:
            dtensor_slice.forget_gradient()


def _fp8_group(
    buffers: Sequence[Buffer],
    begin: Callable[[Buffer], None],
    shards: Axis,
    tp: Axis,
) -> FP8Group:
    """Return the FP8 weights in these buffers. begin: starts to all-gather a buffer."""
    by_buffer: list[FP8BufferShards] = []
    for buffer in buffers:
        by_buffer.append(FP8BufferShards(buffer.fp8_shards, partial(begin, buffer)))
    return FP8Group(by_buffer, shards, tp)


def _slice_names(buffer: Buffer) -> SliceNames:
    """Return the logical slices in the buffer."""
    parts = [piece.part for piece in buffer.pieces]
    return tuple((part.name, part.rank) for part in parts)


def buckets(
    parameters: Sequence[nn.Parameter],
    plan: PrecisionPlan,
    size: int,
    moments: Moments = lambda _: (),
    whole_groups: bool = False,
    units: Mapping[nn.Parameter, int] = MappingProxyType({}),
) -> list[list[nn.Parameter]]:
    """Return lists of parameters that share a buffer.

    Parameters of a buffer are of one kind and have the same `moments`. Buffers have at least `size`
    elements, except the last of a kind, and are ordered by their first parameter. Tied parameters
    get buffers of their own, so that every holder cuts them into the same slices. So do experts on
    ranks of their own, parameters that torch has sharded over more ranks than the tensor-parallel
    ones, and parameters that balance loads.
    whole_groups: True if a group of parameters that are to lie together (`Layout.together`) is not
        cut.
    units: the unit of each parameter (`weight_units`) under ZeRO-3, which gathers and gives up a
        buffer as a whole: each unit has buffers of its own, one of a kind.
    """
    # the bucket of each kind that is being filled, and its number of elements
    open_buckets: dict[tuple[object, ...], list[nn.Parameter]] = {}
    num_elements = Counter[tuple[object, ...]]()
    in_order: list[list[nn.Parameter]] = []
    for parameter in parameters:
        num = parameter.numel()
        layout = layout_of(parameter)
        part = layout.parts[0]
        num_ranks = part.shards * part.copies
        # what a reduction, an all-gather or an update treats in its own way
        facts = (layout.tied, layout.again, layout.expert, layout.balancing)
        unit = units.get(parameter)
        kind = (*facts, param_dtype(parameter, plan), num_ranks, moments(parameter), unit)
        is_full = unit is None and kind in open_buckets and num_elements[kind] >= size
        if is_full and whole_groups and layout.together:
            last = open_buckets[kind][-1]
            is_full = layout_of(last).together != layout.together
        if kind not in open_buckets or is_full:
            open_buckets[kind] = []
            num_elements[kind] = 0
            in_order.append(open_buckets[kind])
        open_buckets[kind].append(parameter)
        num_elements[kind] += num
    return in_order


def bucket_elements(requested: int, dp: int) -> int:
    """Return the elements of a bucket: `requested`, or for 0 as many as keep its messages large
    over `dp` ranks.

    Each of them sends and receives a part of a bucket, so buckets grow with dp, as in Megatron-LM
    (megatron/core/distributed/distributed_data_parallel.py).
    """
    return requested or max(_MIN_ELEMENTS, _ELEMENTS_PER_RANK * dp)


def move_rest(
    model_part: nn.Module,
    plan: PrecisionPlan,
    device: torch.device,
    marked: AbstractSet[nn.Parameter],
) -> None:
    """Move everything that is not trained to the device: frozen parameters, in their planned dtype,
    and buffers.

    marked: parameters that stay in FP32. Raises UserError for a frozen parameter that torch has
    sharded in another dtype.
    """
    for path, parameter in model_part.named_parameters():
        if parameter.requires_grad:
            continue
        if parameter in marked:
            planned = plan.sensitive
        else:
            planned = param_dtype(parameter, plan) if has_layout(parameter) else plan.parameters
        if not is_dtensor(parameter):
            # whole and complex numbers stay as they are
            dtype = planned if parameter.is_floating_point() else parameter.dtype
            parameter.data = parameter.data.to(device, dtype).contiguous()
        elif parameter.dtype != planned:
            raise UserError.of(
                "optimizer.fsdp_cast_before",
                path=path,
                dtype=dtype_name(parameter.dtype),
                planned_dtype=dtype_name(planned),
            )
    # only users' models have buffers; those of this project have none
    for buffer in model_part.buffers():
        buffer.data = buffer.data.to(device)
