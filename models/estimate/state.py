"""The bytes of a rank's weights, gradients, master weights, moments and moving average, before any
launch.

The rank's stages are built on tensors without storage and laid out in the flat buffers of the
optimizer, by the code that does so in training. So padding, tied embeddings, ZeRO-1's shards,
weights in FP8 and parameters that stay in FP32 are counted as they are.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
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
        """Return the replicas of experts, or of other weights, and those among them that share
        state."""
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
    """The layers whose gradients are in a buffer, its bytes, and those of the copy that travels."""

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
    # Ranks whose stages are alike are laid out once.
    by_kind: dict[tuple[object, ...], StateBytes] = {}
    bytes_of_ranks = []
    # both may go by the names of parameters, which have the numbers of layers
    names_layers = names_single_layers(plan) or bool(sharding.frozen)
    ranks_differ = names_layers or isinstance(rule, Muon)
    for rank in range(max(rank_of_stage) + 1):
        kinds = [_kind_of_stage(config, cut) for cut in cuts if rank_of_stage[cut.stage] == rank]
        kind = (*kinds, ranks_differ and rank)
        if kind not in by_kind:
            # Tensors of state are alike on all devices, and meta tensors are faster.
            with without_storage("cuda"):
                stages = _build_stages(config, plan, cuts, rank_of_stage, rank, sharding)
                by_stage = _build_buffers(stages, plan, rank, sharding, rule, device)
                by_kind[kind] = _measure(by_stage, plan, sharding, rule, device)
        bytes_of_ranks.append(by_kind[kind])
    return bytes_of_ranks


def _kind_of_stage(config: ModelConfig, cut: Cut) -> tuple[object, ...]:
    """Return what decides the state of a stage."""
    return cut.first, cut.last, tuple(config.kind_keys(cut.layers))


def _build_stages(
    config: ModelConfig,
    plan: PrecisionPlan,
    cuts: Sequence[Cut],
    rank_of_stage: Sequence[int],
    rank: int,
    sharding: Sharding,
) -> Sequence[Stage]:
    """Return the stages of a pipeline rank."""
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
    """Return the flat buffers of the optimizer over these stages."""
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
    layout = layout_of(parameters[0])
    dp, zero = sharding.replicas(layout.expert)
    kept = Kept(ema=sharding.ema, memory=_UnallocatedMemory() if sharding.offload else None)
    # Counts of loads are not sharded, and stay on the device.
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
    """Return the bytes of each part of an update, of which one follows the other."""
    # Elements of a block of the update; 0: a whole buffer.
    block = BLOCK if device == "cpu" else 0
    peaks = [_update_peak(buffer, block) for buffer in buffers]
    peaks += [_ema_peak(buffer, device) for buffer in buffers if buffer.ema is not None]
    if isinstance(rule, Muon):
        peaks.append(_muon_peak(buffers, rule, plan, sharding, block))
    return peaks


def _masters_bytes(buffer: Buffer) -> int:
    """Return the bytes of this rank's slice in the dtype of its masters; of masters in two halves,
    or of weights that are their own masters, in FP32."""
    itemsize = torch.float32.itemsize if buffer.masters is None else buffer.masters.itemsize
    return itemsize * buffer.local_size


def _staging_bytes(buffer: Buffer) -> int:
    """Return the bytes of the tiles through which this buffer's state travels to the device."""
    if buffer.memory is None:
        return 0
    tile = next(buffer.tiles(0, buffer.local_size))
    held = dict(stored(tile))
    # masters that are the weights lie on the device
    if buffer.masters is buffer.own_weights:
        held.pop("masters")
    most = staged_bytes(held.values())
    if buffer.ema is not None:
        # the average follows the masters after the update
        following = [values for name, values in held.items() if name in ("masters", "remainder")]
        ema = buffer.ema[: len(tile.weights)]
        most = max(most, staged_bytes([*following, ema]))
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
    """Return the bytes of the copy of a buffer's gradients that travels."""
    # Gradients that travel as they are need no copy.
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
    layers = _numbers_of_layers(stage)
    last_number = max(layers.values(), default=0)
    read_twice = set(chain.from_iterable(stage.read_late().values()))
    read_twice.intersection_update(stage.read_early())
    spans = list[_Span]()
    for buffer in buffers:
        if buffer.shards_gradients:
            numbers = [layers[parameter] for parameter in buffer.parameters]
            if not read_twice.isdisjoint(buffer.parameters):
                numbers.append(last_number)
            whole = buffer.size * buffer.grads_dtype.itemsize
            copied = _copied_bytes(buffer)
            spans.append(_Span(min(numbers), max(numbers), whole, copied))
    largest = 0
    for layer in range(len(layers)):
        is_open = [span for span in spans if span.first <= layer <= span.last]
        copies = [span.copied for span in is_open if span.first == layer]
        # of what was reduced before, the last may still travel
        before = [span for span in spans if span.first > layer]
        travelling = 0
        if before:
            last_reduced = min(before, key=lambda span: span.first)
            travelling = last_reduced.copied or last_reduced.whole
        held = sum(span.whole for span in is_open) + max(copies, default=0)
        largest = max(largest, held + travelling)
    return largest


def _numbers_of_layers(stage: Stage) -> dict[torch.nn.Parameter, int]:
    """Return the position of each parameter's layer in a forward pass; a parameter of no layer is
    by itself."""
    names = {parameter: name for name, parameter in stage.named_parameters()}
    numbers = dict[torch.nn.Parameter, int]()
    seen = dict[str, int]()
    for parameter in forward_order(stage):
        name = names[parameter]
        container, _, rest = name.partition(".")
        number, _, _ = rest.partition(".")
        layer = f"{container}.{number}" if number.isdigit() else name
        numbers[parameter] = seen.setdefault(layer, len(seen))
    return numbers


def _update_peak(buffer: Buffer, block: int) -> int:
    """Return the peak that the update of a block of this buffer adds."""
    tile = next(buffer.tiles(0, buffer.local_size, block))
    steps = torch.ones(())  # any number: no value is computed
    with LiveMemory() as live:
        weights, _, state = tile.wide()
        tile.store(weights, state, steps)
    return live.peak


def _ema_peak(buffer: Buffer, device: Device) -> int:
    """Return the peak that moving a block of the average of this buffer adds."""
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
    """Return the peak that the orthogonalization of a rank's own matrices adds; 0 if there are
    none.

    First all directions are given away and assembled; then each matrix is iterated, which takes
    several of its size; then the results of one buffer after the other return.

    block: elements that are updated at a time, with four numbers in FP32 for each.
    """
    by_muon = [buffer for buffer in buffers if MUON_MOMENTUM in buffer.state]
    if not by_muon:
        return 0
    ranks = sharding.tp * sharding.dp
    stacks: list[MatrixStack] = []
    num_given = 0  # elements that the rank gives to the owners of matrices
    num_returned = 0  # elements of one buffer's pieces, at most
    for buffer in by_muon:
        by_tensor = {piece.part.name: rule.matrices_of(piece.part) for piece in buffer.pieces}
        # Other ranks of the stage hold as many other experts.
        stacks += [*by_tensor.values()] * (sharding.expert if buffer.holds_experts else 1)
        runs = [held_span_of(buffer, piece, 0, 0) for piece in buffer.pieces]
        num_given += sum(run.num_sent for run in runs)
        num_returned = max(num_returned, sum(run.stop - run.start for run in runs))

    owned = _most_owned(stacks, rule, ranks)
    # The peak is on the way to the owners, in an iteration, or on the way back.
    largest = max(prod(stack) for stack in stacks)
    dtype = rule.iteration_dtype(plan.masters)
    largest_block = max(_block_elements(buffer, block) for buffer in by_muon)
    tile = min(largest, largest_block)
    # One rank alone receives what it gives, without a copy.
    copies = 2 if ranks > 1 else 1
    to_owners = num_given + owned * copies + largest
    back = owned + num_returned * copies
    travelling = max(to_owners, back) * dtype.itemsize
    wide_tile = 4 * torch.float32.itemsize * tile  # four numbers for each element
    updating = (max(num_given, owned) + num_returned) * dtype.itemsize + wide_tile
    iterating = owned * dtype.itemsize + _iteration_peak(stacks, dtype)
    return max(travelling, updating, iterating)


def _iteration_peak(stacks: Iterable[MatrixStack], dtype: torch.dtype) -> int:
    """Return the bytes that one orthogonalization of these adds, at most."""
    # by number: heads of a larger matrix may take less than a smaller one as a whole
    largest: dict[int, MatrixStack] = {}
    for stack in stacks:
        largest[stack.count] = max(stack, largest.get(stack.count, stack), key=prod)
    peaks: list[int] = []
    for stack in largest.values():
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
