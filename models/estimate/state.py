"""The bytes of a rank's weights, gradients, master weights and moments, before anything is
launched.

The rank's stages are built on tensors without storage and laid out in the flat buffers of the
optimizer, by the code that does so in training. So padding, tied embeddings, ZeRO-1's shards,
weights in FP8 and parameters that stay in FP32 are counted as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from megaprec.comm.axis import Axis
from megaprec.comm.layout import layout_of, parameters_of
from megaprec.fp8.state import FP8State
from megaprec.optim.buckets import Moments, bucket_elements, buckets
from megaprec.optim.flat_buffer import BLOCK, Buffer
from megaprec.optim.matrix_exchange import owners_of
from megaprec.optim.matrix_updates import run_of
from megaprec.optim.muon import MUON_MOMENTUM, Muon, moments_of
from megaprec.optim.newton_schulz import iteration_flops, orthogonalized
from megaprec.optim.replicas import sharing_replicas
from megaprec.optim.update_rules import UpdateRule
from megaprec.precision.plan import PrecisionPlan
from models.config import ModelConfig
from models.cutting import build
from models.estimate.memory import by_name
from models.estimate.storage import Alive, Alone, Device, lone_experts, without_storage
from models.stages import Cut
from parallel.context import Context


@dataclass(frozen=True)
class Held:
    """Bytes of one rank that do not depend on the batch.

    reduction: copies of gradients in the dtype in which they travel between replicas, while they
        are reduced.
    update: the peak that the update of one block adds, or the orthogonalization of matrices by
        Muon.
    copies: of everything that an update changes, kept if steps are validated after they are
        applied.
    saved: what this rank writes to a checkpoint, of which a save in the background makes a copy in
        host memory.
    """

    weights: int
    gradients: int
    masters: int
    moments: int
    reduction: int
    update: int
    copies: int
    saved: int

    @property
    def total(self) -> int:
        """Return the bytes that are held between steps."""
        return self.weights + self.gradients + self.masters + self.moments


@dataclass(frozen=True)
class Sharding:
    """The part of a layout by which state is laid out. zero: neighbouring replicas that share
    masters and moments.

    expert, expert_tensor: the ranks over which experts are spread, and their slices, as for
    `Engine`. apart: a tied head is a copy on the same rank too.
    """

    tp: int = 1
    dp: int = 1
    zero: int = 1
    bucket: int = 0
    expert: int = 1
    expert_tensor: int = 0
    apart: bool = False

    def replicas(self, of_experts: bool) -> tuple[Axis, Axis]:
        """Return the replicas of experts, or of other weights, and those among them that share
        state."""
        if not of_experts:
            return Axis("dp", 0, self.dp), Axis("zero", 0, self.zero)
        in_slices = self.expert_tensor or self.tp
        every = self.dp * self.tp // (self.expert * in_slices)
        return Axis("dp", 0, every), Axis(
            "zero", 0, sharing_replicas(self.tp, self.zero, self.expert, in_slices)
        )


def held_bytes(
    config: ModelConfig,
    plan: PrecisionPlan,
    cuts: Sequence[Cut],
    rank_of_stage: Sequence[int],
    sharding: Sharding,
    rule: UpdateRule,
    device: Device = "cpu",
) -> list[Held]:
    """Return what each pipeline rank holds on each of its tensor-parallel ranks. The vocabulary
    must be known.

    rule: the update rule, which decides the moments.
    """
    known: dict[tuple[object, ...], Held] = {}
    found = []
    for rank in range(max(rank_of_stage) + 1):
        own = [cut for cut in cuts if rank_of_stage[cut.stage] == rank]
        named = by_name(plan) or isinstance(rule, Muon)
        dense = {*config.dense_layers}
        alike = (
            *((c.first, c.last, tuple(n in dense for n in c.layers)) for c in own),
            named and rank,
        )
        if alike not in known:
            with without_storage("cuda"):
                known[alike] = _held(
                    config.undrawn, plan, cuts, rank_of_stage, rank, sharding, rule, device
                )
        found.append(known[alike])
    return found


def _held(
    config: ModelConfig,
    plan: PrecisionPlan,
    cuts: Sequence[Cut],
    rank_of_stage: Sequence[int],
    rank: int,
    sharding: Sharding,
    rule: UpdateRule,
    device: Device,
) -> Held:
    axis = Alone("tp", 0, sharding.tp)
    block = BLOCK if device == "cpu" else 0
    experts = lone_experts(sharding.tp, sharding.expert, sharding.expert_tensor)
    fp8 = FP8State(plan.fp8, config.layers, axis, device="meta")
    context = Context(plan, axis, fp8=fp8, experts=experts)
    stages = build(config, context, cuts, rank_of_stage, rank, apart=sharding.apart)
    elements = bucket_elements(sharding.bucket, sharding.dp)
    buffers = list[Buffer]()
    taken = set[torch.nn.Parameter]()
    moments = partial(moments_of, rule)
    for stage in stages.values():
        own = [p for p in parameters_of([stage]) if p not in taken]
        taken.update(own)
        among = buckets(own, plan, elements, moments)
        buffers += [_buffer(alike, plan, rank, sharding, moments) for alike in among]
    kinds = [buffer.bytes_by_kind() for buffer in buffers]
    sums = {
        kind: sum(one[kind] for one in kinds)
        for kind in ("weights", "gradients", "masters", "moments")
    }
    travelling = (
        b.size * b.travels.itemsize for b in buffers if b.dp.size > 1 and b.travels != b.grads.dtype
    )
    orthogonalizing = _muon(buffers, rule, plan, sharding, block)
    return Held(
        **sums,
        reduction=sum(travelling),
        update=max(orthogonalizing, *(_update(buffer, block) for buffer in buffers)),
        copies=sums["masters"]
        + sums["moments"]
        + sum(b.own(b.weights).nbytes for b in buffers if not b.in_codes),
        saved=sum(tensor.nbytes for buffer in buffers for tensor in buffer.saved().values()),
    )


def _buffer(
    alike: Sequence[torch.nn.Parameter],
    plan: PrecisionPlan,
    rank: int,
    sharding: Sharding,
    moments: Moments,
) -> Buffer:
    layout = layout_of(alike[0])
    dp, zero = sharding.replicas(layout.expert)
    if layout.balancing is not None:  # counts of loads are whole on every rank
        zero = Axis("zero")
    return Buffer(alike, plan, dp, zero, rank, torch.device("meta"), moments(alike[0]))


def _update(buffer: Buffer, block: int) -> int:
    """Return the peak that the update of a block of this buffer adds."""
    tile = next(buffer.blocks(0, buffer.last - buffer.first, block))
    steps = torch.ones(())
    with Alive() as alive:
        weights, _, state = tile.wide()
        tile.keep(weights, state, steps)
    return alive.most


def _muon(
    buffers: Sequence[Buffer], rule: UpdateRule, plan: PrecisionPlan, sharding: Sharding, block: int
) -> int:
    """Return the peak that the orthogonalization of a rank's own matrices adds; 0 unless the rule
    is Muon.

    block: elements that are updated at a time, with four numbers in FP32 for each. First all
    directions are given away and assembled; then each matrix is iterated, which takes several of
    its size; then the results of one buffer after the other return.
    """
    by_muon = [buffer for buffer in buffers if MUON_MOMENTUM in buffer.state]
    if not isinstance(rule, Muon) or not by_muon:
        return 0
    ranks = sharding.tp * sharding.dp
    shapes = list[tuple[int, ...]]()
    for buffer in by_muon:  # other ranks of the stage hold as many other experts
        named = {piece.part.name: piece.part.shape for piece in buffer.pieces}
        shapes += [*named.values()] * (sharding.expert if buffer.of_experts else 1)
    runs = [[run_of(buffer, piece, 0, 0) for piece in buffer.pieces] for buffer in by_muon]
    owners = owners_of([iteration_flops(shape, rule.ns_steps) for shape in shapes], ranks)
    owned = max(
        sum(prod(s) for s, o in zip(shapes, owners, strict=True) if o == rank)
        for rank in range(ranks)
    )
    given = sum(run.given for some in runs for run in some)
    held = max(sum(r.last - r.first for r in some) for some in runs)
    largest = max(shapes, key=prod)
    dtype = rule.iteration_dtype(plan.masters)
    tile = min(
        prod(largest), max(len(next(b.blocks(0, b.last - b.first, block)).grads) for b in by_muon)
    )
    received = 2 if ranks > 1 else 1  # one rank alone receives what it gives, without a copy
    travelling = (
        max(given + owned * received + prod(largest), owned + held * received) * dtype.itemsize
    )
    beside_a_tile = (max(given, owned) + held) * dtype.itemsize + 4 * 4 * tile
    with torch.device("meta"), Alive() as alive:
        orthogonalized(torch.empty(largest, dtype=dtype), steps=2)
    return max(travelling, beside_a_tile, owned * dtype.itemsize + alive.most)
