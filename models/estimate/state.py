"""The bytes of a rank's weights, gradients, master weights, moments and moving average, before any
launch.

The rank's stages are built on tensors without storage and laid out in the flat buffers of the
optimizer, by the code that does so in training. So padding, tied embeddings, ZeRO-1's shards,
weights in FP8 and parameters that stay in FP32 are counted as they are.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from typing import NamedTuple

import torch

from megaprec.comm.axis import Axis
from megaprec.comm.layout import layout_of, parameters_of
from megaprec.fp8.state import FP8State
from megaprec.optim.model_buffers import Moments, bucket_elements, buckets
from megaprec.optim.ranks import sharing_replicas
from megaprec.optim.rules.muon.matrix_exchange import owners_of
from megaprec.optim.rules.muon.matrix_updates import held_span_of
from megaprec.optim.rules.muon.newton_schulz import MatrixStack, orthogonalized
from megaprec.optim.rules.muon.rule import MUON_MOMENTUM, Muon, moments_of
from megaprec.optim.rules.update_rules import UpdateRule
from megaprec.optim.state.flat_buffer import BLOCK, EMA, Buffer, GradReduction, Kept, param_dtype
from megaprec.optim.state.host_memory import NUM_STAGED, staged_bytes, stored
from megaprec.optim.state.update_tile import TILE_ELEMENTS, Tile
from megaprec.optim.state.weight_average import AveragedTile, own_bytes, run_length
from megaprec.optim.weight_units import first_units, forward_order
from megaprec.precision.plan import PrecisionPlan
from models.config import ModelConfig
from models.decoder.cutting import build
from models.decoder.frozen import freeze
from models.decoder.stages import Cut, Stage
from models.estimate.memory import names_single_layers
from models.estimate.storage import (
    Device,
    LiveMemory,
    SimulatedAxis,
    simulated_experts,
    without_storage,
)
from models.estimate.whole_weights import WholeWeights
from parallel.context import Context


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one rank that do not depend on the batch.

    reduction: copies of gradients in the dtype in which they travel between replicas, while they
        are reduced.
    ema: the moving average of the weights.
    host: masters, moments and average that lie in host memory, and are not counted as such.
    staging: the tiles through which these travel.
    update: the peak that the update of one block adds, or that of its moving average, or the
        orthogonalization of matrices by Muon.
    own: this rank's slice of the weights, which is kept while their average is evaluated.
    arriving: under ZeRO-2, the most that gradients take until they are reduced: the buckets that
        one layer's gradients are in, and one more that is under way.
    saved: what this rank writes to a checkpoint, of which a save in the background makes a copy in
        host memory.
    masters_before: a copy of the masters of this rank's slices, which a step of log.statistics
        keeps.
    whole_weights: under ZeRO-3, the weights that passes gather.
    """

    weights: int
    gradients: int
    masters: int
    moments: int
    ema: int
    host: int
    staging: int
    reduction: int
    update: int
    own: int
    arriving: int
    saved: int
    masters_before: int
    whole_weights: WholeWeights

    @property
    def total(self) -> int:
        """Return the bytes of the device that are held between steps."""
        state = self.masters + self.moments + self.ema + self.staging
        return self.weights + self.gradients + state


@dataclass(frozen=True)
class Sharding:
    """The part of a layout by which state is laid out.

    zero: neighbouring replicas that share masters and moments.
    bucket: elements of a reduction, as for the optimizer.
    expert, expert_tensor: the ranks over which experts are spread, and their slices, as for
        `EngineOptions`.
    separate_head: a tied head is a copy on the same rank too.
    gradients: these replicas share gradients too (ZeRO-2).
    weights: they share weights too (ZeRO-3).
    ema: a moving average of the weights is kept.
    offload: masters, moments and average lie in host memory.
    frozen: patterns of parameters that are not trained, as for `EngineOptions`.
    """

    tp: int = 1
    dp: int = 1
    zero: int = 1
    bucket: int = 0
    expert: int = 1
    expert_tensor: int = 0
    separate_head: bool = False
    gradients: bool = False
    weights: bool = False
    ema: bool = False
    offload: bool = False
    frozen: tuple[str, ...] = ()

    def replicas(self, of_experts: bool) -> tuple[Axis, Axis]:
        """Return two axes without groups, of experts or of other weights: the replicas, and those
        among them that share masters and moments."""
        if not of_experts:
            return Axis("dp", 0, self.dp), Axis("zero", 0, self.zero)
        slices = self.expert_tensor or self.tp
        replicas = self.dp * self.tp // (self.expert * slices)
        sharing = sharing_replicas(self.tp, self.zero, self.expert, slices)
        return Axis("dp", 0, replicas), Axis("zero", 0, sharing)


class _UnallocatedMemory:
    """Host memory without storage, for buffers on tensors without any."""

    def __init__(self) -> None:
        self.tile_elements = TILE_ELEMENTS

    def open(self, device: torch.device) -> None:
        """Do nothing."""

    def zeros(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor without storage."""
        return torch.empty(num_elements, dtype=dtype, device="meta")

    def visit(
        self, owner: object, tiles: Iterable[Tile], written: Collection[str] | None = None
    ) -> Iterator[Tile]:
        """Yield the tiles as they are."""
        yield from tiles

    def wait(self) -> None:
        """Do nothing."""


class _StageBuffers(NamedTuple):
    stage: Stage
    buffers: list[Buffer]


class _Span(NamedTuple):
    """The layers whose gradients are in a buffer of a stage under ZeRO-2.

    first, last: the positions of the first and the last of these layers in a forward pass.
    whole: bytes of all gradients of the buffer.
    copied: bytes of the copy that travels between ranks; 0 if the buffer itself does.
    """

    first: int
    last: int
    whole: int
    copied: int


def state_bytes(
    config: ModelConfig,
    plan: PrecisionPlan,
    cuts: Sequence[Cut],
    rank_of_stage: Sequence[int],
    sharding: Sharding,
    rule: UpdateRule,
    device: Device = "cpu",
) -> list[StateBytes]:
    """Return what each pipeline rank holds on each of its tensor-parallel ranks. The vocabulary
    must be known.

    rule: the update rule, which decides the moments.
    """
    # ranks whose stages are alike are laid out once
    by_kind: dict[tuple[object, ...], StateBytes] = {}
    bytes_of_ranks = []
    # These go by the names of parameters, in which are the numbers of layers: ranks whose stages
    # look alike may differ.
    names_layers = names_single_layers(plan) or bool(sharding.frozen)
    ranks_differ = names_layers or isinstance(rule, Muon)
    for rank in range(max(rank_of_stage) + 1):
        kinds = [_kind_of_stage(config, cut) for cut in cuts if rank_of_stage[cut.stage] == rank]
        own_number = rank if ranks_differ else None
        kind = (*kinds, own_number)
        if kind not in by_kind:
            # tensors of state have the same bytes on all devices, and meta tensors are faster
            with without_storage("cuda"):
                stages = _build_stages(config, plan, cuts, rank_of_stage, rank, sharding)
                by_stage = _build_buffers(stages, plan, rank, sharding, rule, device)
                by_kind[kind] = _measure(by_stage, plan, sharding, rule, device)
        bytes_of_ranks.append(by_kind[kind])
    return bytes_of_ranks


def _kind_of_stage(config: ModelConfig, cut: Cut) -> tuple[object, ...]:
    """Return what decides the bytes of state of a stage: whether it is the first and the last one,
    and the kinds of its layers."""
    return cut.first, cut.last, tuple(config.kind_keys(cut.layers))


def _build_stages(
    config: ModelConfig,
    plan: PrecisionPlan,
    cuts: Sequence[Cut],
    rank_of_stage: Sequence[int],
    rank: int,
    sharding: Sharding,
) -> Sequence[Stage]:
    """Return the stages of a pipeline rank, built on tensors without storage for the first of its
    tensor-parallel ranks, in the order of their numbers."""
    tp = SimulatedAxis("tp", 0, sharding.tp)
    experts = simulated_experts(sharding.tp, sharding.expert, sharding.expert_tensor)
    fp8 = FP8State(plan.fp8, config.layers, tp, device="meta")
    context = Context(plan, tp, fp8=fp8, experts=experts, blank=True)
    stages = build(
        config.with_zero_weights,
        context,
        cuts,
        rank_of_stage,
        rank,
        separate_head=sharding.separate_head,
    )
    freeze(stages.values(), sharding.frozen)
    return [*stages.values()]


def _build_buffers(
    stages: Sequence[Stage],
    plan: PrecisionPlan,
    rank: int,
    sharding: Sharding,
    rule: UpdateRule,
    device: Device,
) -> list[_StageBuffers]:
    """Return each stage with the flat buffers that the optimizer would make of its parameters."""
    elements = bucket_elements(sharding.bucket, sharding.dp)
    moments = partial(moments_of, rule)
    by_stage = list[_StageBuffers]()
    # A parameter of two stages is in the first one's buffers.
    in_buffers = set[torch.nn.Parameter]()
    for stage in stages:
        parameters = [
            parameter for parameter in parameters_of([stage]) if parameter not in in_buffers
        ]
        in_buffers.update(parameters)
        units = first_units(stage) if sharding.weights else {}
        buffers = [
            _build_buffer(bucket, plan, rank, sharding, moments)
            for bucket in buckets(parameters, plan, elements, moments, device == "cuda", units)
        ]
        by_stage.append(_StageBuffers(stage, buffers))
    return by_stage


def _build_buffer(
    parameters: Sequence[torch.nn.Parameter],
    plan: PrecisionPlan,
    rank: int,
    sharding: Sharding,
    moments: Moments,
) -> Buffer:
    """Return the flat buffer of these parameters, which lie in one bucket, without storage.

    moments: returns the moments of a parameter.
    """
    layout = layout_of(parameters[0])
    dp, zero = sharding.replicas(layout.expert)
    kept = Kept(ema=sharding.ema, memory=_UnallocatedMemory() if sharding.offload else None)
    # corrections of routers are not sharded, and stay on the device
    if layout.balancing is not None:
        zero = Axis("zero")
        kept = Kept()
    meta = torch.device("meta")
    return Buffer(
        parameters=parameters,
        plan=plan,
        dp=dp,
        shards=zero,
        pp_rank=rank,
        device=meta,
        state=moments(parameters[0]),
        reduction=GradReduction(sharded=sharding.gradients, shards_weights=sharding.weights),
        kept=kept,
    )


def _measure(
    by_stage: Sequence[_StageBuffers],
    plan: PrecisionPlan,
    sharding: Sharding,
    rule: UpdateRule,
    device: Device,
) -> StateBytes:
    """Return the bytes of a rank with these buffers."""
    buffers = list(chain.from_iterable(buffers for _, buffers in by_stage))
    totals = dict.fromkeys(("weights", "gradients", "masters", "moments", EMA), 0)
    host = sum(buffer.host_bytes() for buffer in buffers)
    reduction = 0
    saved = 0
    for buffer in buffers:
        by_kind = buffer.bytes_by_kind()
        for kind in totals:
            is_on_device = kind in ("weights", "gradients") or buffer.memory is None
            totals[kind] += by_kind[kind] if is_on_device else 0
        if not buffer.shards_gradients:
            reduction += _copied_bytes(buffer)
        saved += sum(tensor.nbytes for tensor in buffer.saved().values())
    stages = [stage for stage, _ in by_stage]
    frozen = _frozen_bytes(stages, plan)
    totals["weights"] += frozen
    saved += frozen
    peaks = _update_peaks(buffers, plan, sharding, rule, device)
    return StateBytes(
        **totals,
        host=host,
        staging=max(map(_staging_bytes, buffers), default=0),
        reduction=reduction,
        update=max(peaks, default=0),
        own=sum(own_bytes(buffer) for buffer in buffers if buffer.ema is not None),
        arriving=max(_arriving_bytes(stage, buffers) for stage, buffers in by_stage),
        saved=saved,
        masters_before=sum(map(_masters_bytes, buffers)),
        whole_weights=WholeWeights.of(stages, buffers),
    )


def _update_peaks(
    buffers: Sequence[Buffer],
    plan: PrecisionPlan,
    sharding: Sharding,
    rule: UpdateRule,
    device: Device,
) -> list[int]:
    """Return the peak in bytes that each part of an update adds: of each buffer, of its moving
    average, and of Muon. One part follows the other."""
    # elements that are updated at a time; 0: a whole buffer
    block = BLOCK if device == "cpu" else 0
    peaks = [_update_peak(buffer, block) for buffer in buffers]
    peaks += [_ema_peak(buffer, device) for buffer in buffers if buffer.ema is not None]
    if isinstance(rule, Muon):
        peaks.append(_muon_peak(buffers, rule, plan, sharding, block))
    return peaks


def _masters_bytes(buffer: Buffer) -> int:
    """Return the bytes of this rank's slice of a buffer in the dtype of its masters; in FP32 if
    there is no tensor of masters, as with remainders."""
    itemsize = torch.float32.itemsize if buffer.masters is None else buffer.masters.itemsize
    return itemsize * buffer.local_size


def _staging_bytes(buffer: Buffer) -> int:
    """Return the bytes of the tiles through which this buffer's state travels to the device."""
    if buffer.memory is None:
        return 0
    tile = next(buffer.tiles(0, buffer.local_size))
    in_host_memory = dict(stored(tile))
    # masters that are the weights lie on the device
    if buffer.masters is buffer.own_weights:
        in_host_memory.pop("masters")
    most = staged_bytes(in_host_memory.values())
    if buffer.ema is not None:
        # after the update the average is moved towards the masters: both travel again
        masters = [
            values for name, values in in_host_memory.items() if name in ("masters", "remainder")
        ]
        ema = buffer.ema[: len(tile.weights)]
        most = max(most, staged_bytes([*masters, ema]))
    return NUM_STAGED * most


def _frozen_bytes(stages: Sequence[Stage], plan: PrecisionPlan) -> int:
    """Return the bytes of the weights that are not trained, each once."""
    frozen = dict.fromkeys(
        parameter
        for stage in stages
        for parameter in stage.parameters()
        if not parameter.requires_grad
    )
    return sum(parameter.numel() * param_dtype(parameter, plan).itemsize for parameter in frozen)


def _copied_bytes(buffer: Buffer) -> int:
    """Return the bytes of the copy of a buffer's gradients that travels between replicas, in the
    dtype of the reduction; 0 if the gradients travel as they are."""
    if buffer.dp.size == 1 or buffer.reduce_dtype == buffer.grads_dtype:
        return 0
    return buffer.size * buffer.reduce_dtype.itemsize


def _arriving_bytes(stage: Stage, buffers: Sequence[Buffer]) -> int:
    """Return the most bytes of gradients that ZeRO-2 holds whole during a backward pass through a
    stage.

    The pass computes the gradients of one layer after the other, those of a layer in any order. A
    buffer is whole from its last layer to its first; that of a tied embedding, to which the head
    adds first, from the beginning. Another may be under way meanwhile.
    """
    layer_of_parameter = _numbers_of_layers(stage)
    spans = _spans_of_buffers(stage, buffers, layer_of_parameter)
    largest = 0
    for layer in range(len(layer_of_parameter)):
        being_filled = [span for span in spans if span.first <= layer <= span.last]
        # a buffer is complete after its first layer, and its copy is made
        copies = [span.copied for span in being_filled if span.first == layer]
        # of the buffers that were reduced before, the last one may still travel
        reduced = [span for span in spans if span.first > layer]
        travelling = 0
        if reduced:
            last_reduced = min(reduced, key=lambda span: span.first)
            travelling = last_reduced.copied or last_reduced.whole
        held = sum(span.whole for span in being_filled) + max(copies, default=0)
        largest = max(largest, held + travelling)
    return largest


def _spans_of_buffers(
    stage: Stage,
    buffers: Sequence[Buffer],
    layer_of_parameter: Mapping[torch.nn.Parameter, int],
) -> list[_Span]:
    """Return the layers of each buffer of a stage whose gradients are sharded.

    layer_of_parameter: the position of each parameter's layer in a forward pass.
    """
    last_layer = max(layer_of_parameter.values(), default=0)
    # a tied embedding, to whose gradient the backward pass through the head adds first
    read_twice = set(chain.from_iterable(stage.read_late().values()))
    read_twice.intersection_update(stage.read_early())
    spans = list[_Span]()
    for buffer in buffers:
        if not buffer.shards_gradients:
            continue
        layers = [layer_of_parameter[parameter] for parameter in buffer.parameters]
        if not read_twice.isdisjoint(buffer.parameters):
            layers.append(last_layer)
        span = _Span(
            first=min(layers),
            last=max(layers),
            whole=buffer.size * buffer.grads_dtype.itemsize,
            copied=_copied_bytes(buffer),
        )
        spans.append(span)
    return spans


def _numbers_of_layers(stage: Stage) -> dict[torch.nn.Parameter, int]:
    """Return the position of each parameter's layer in a forward pass; a parameter of no layer
    counts as a layer of its own."""
    names = {parameter: name for name, parameter in stage.named_parameters()}
    number_of_parameter = dict[torch.nn.Parameter, int]()
    number_of_layer = dict[str, int]()
    for parameter in forward_order(stage):
        name = names[parameter]
        # "layers.3" of "layers.3.mlp.down.weight"
        container, _, rest = name.partition(".")
        index, _, _ = rest.partition(".")
        layer = f"{container}.{index}" if index.isdigit() else name
        next_number = len(number_of_layer)
        number_of_parameter[parameter] = number_of_layer.setdefault(layer, next_number)
    return number_of_parameter


def _update_peak(buffer: Buffer, block: int) -> int:
    """Return the peak in bytes that the update of a block of this buffer adds. block: its elements;
    0: the whole buffer."""
    tile = next(buffer.tiles(0, buffer.local_size, block))
    steps = torch.ones(())  # any number: no value is computed
    with LiveMemory() as live:
        weights, _, state = tile.wide()
        tile.store(weights, state, steps)
    return live.peak


def _ema_peak(buffer: Buffer, device: Device) -> int:
    """Return the peak in bytes that an update of this buffer's moving average adds. It is updated
    a run of elements at a time, of which the first is tried."""
    assert buffer.ema is not None
    tile = next(buffer.tiles(0, buffer.local_size, run_length(device)))
    averaged = AveragedTile(tile, buffer.ema[: len(tile.weights)])
    skip = torch.zeros(())  # any number: no value is computed
    with LiveMemory() as live:
        averaged.move(0.5, skip)
    return live.peak


def _muon_peak(
    buffers: Sequence[Buffer],
    rule: Muon,
    plan: PrecisionPlan,
    sharding: Sharding,
    block: int,
) -> int:
    """Return the peak in bytes that the orthogonalization of a rank's own matrices by Muon adds; 0
    if it has none.

    First each rank gives its slices of matrices to their owners, which assemble them; then each
    owner iterates one matrix after the other, which takes several times the matrix; then the
    results of one buffer after the other return.

    block: elements that are updated at a time, with four numbers in FP32 for each.
    """
    by_muon = [buffer for buffer in buffers if MUON_MOMENTUM in buffer.state]
    if not by_muon:
        return 0
    ranks = sharding.tp * sharding.dp
    stacks: list[MatrixStack] = []
    # all of these are numbers of elements
    num_given = 0  # that the rank gives to the owners of matrices
    num_returned = 0  # that return for one buffer, at most
    for buffer in by_muon:
        stack_of_tensor = {piece.part.name: rule.matrices_of(piece.part) for piece in buffer.pieces}
        # other ranks of the stage hold as many other experts
        times = sharding.expert if buffer.holds_experts else 1
        stacks += [*stack_of_tensor.values()] * times
        runs = [held_span_of(buffer, piece, 0, 0) for piece in buffer.pieces]
        num_given += sum(run.num_sent for run in runs)
        num_of_buffer = sum(run.stop - run.start for run in runs)
        num_returned = max(num_returned, num_of_buffer)
    num_owned = _most_owned(stacks, rule, ranks)
    largest_matrix = max(prod(stack) for stack in stacks)
    largest_block = max(_block_elements(buffer, block) for buffer in by_muon)

    # the peak is on the way to the owners, in an iteration, on the way back, or in an update
    itemsize = rule.iteration_dtype(plan.masters).itemsize
    # one rank alone receives what it gives, without a copy
    copies = 2 if ranks > 1 else 1
    to_owners = num_given + num_owned * copies + largest_matrix
    back = num_owned + num_returned * copies
    travelling = max(to_owners, back) * itemsize
    tile = min(largest_matrix, largest_block)
    wide_tile = 4 * torch.float32.itemsize * tile  # four numbers for each element
    updating = (max(num_given, num_owned) + num_returned) * itemsize + wide_tile
    iteration = _iteration_peak(stacks, rule.iteration_dtype(plan.masters))
    iterating = num_owned * itemsize + iteration
    return max(travelling, updating, iterating)


def _iteration_peak(stacks: Iterable[MatrixStack], dtype: torch.dtype) -> int:
    """Return the most bytes that the orthogonalization of one of these stacks of matrices adds."""
    # The largest stack of each number of matrices: a matrix that is taken head by head may take
    # less than a smaller one that is taken as a whole.
    largest_by_count: dict[int, MatrixStack] = {}
    for stack in stacks:
        largest_so_far = largest_by_count.get(stack.count, stack)
        largest_by_count[stack.count] = max(stack, largest_so_far, key=prod)
    peaks: list[int] = []
    for stack in largest_by_count.values():
        with torch.device("meta"), LiveMemory() as live:
            # the second step needs as much memory as each later one
            orthogonalized(stack.apart(torch.empty(stack.whole, dtype=dtype)), steps=2)
        peaks.append(live.peak)
    return max(peaks)


def _most_owned(
    stacks: Sequence[MatrixStack],
    rule: Muon,
    ranks: int,
) -> int:
    """Return the elements of the matrices that one of `ranks` ranks iterates, at most."""
    owners = owners_of([stack.flops(rule.ns_steps) for stack in stacks], ranks)
    elements = [0] * ranks
    for stack, owner in zip(stacks, owners, strict=True):
        elements[owner] += prod(stack)
    return max(elements)


def _block_elements(buffer: Buffer, block: int) -> int:
    return len(next(buffer.tiles(0, buffer.local_size, block)).grads)
