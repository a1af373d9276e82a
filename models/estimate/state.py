"""The bytes of a rank's weights, gradients, master weights and moments, before anything is launched.

The rank's stages are built on tensors without storage and laid out in the flat buffers of the optimizer, by the code
that does so in training. So padding, tied embeddings, ZeRO-1's shards, weights in FP8 and parameters that stay in FP32
are counted as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megaprec.comm.axis import Axis
from megaprec.comm.layout import parameters_of
from megaprec.fp8.state import FP8State
from megaprec.optim.flat_buffer import BLOCK, Buffer, buckets
from megaprec.precision.plan import PrecisionPlan
from models.config import ModelConfig
from models.estimate.memory import by_name
from models.estimate.storage import Alive, Alone, Device, without_storage
from models.stages import Cut, build
from parallel.context import Context


@dataclass(frozen=True)
class Held:
    """Bytes of one rank that do not depend on the batch.

    reduction: copies of gradients in the dtype in which they travel between replicas, while they are reduced.
    update: the peak that the update of one block adds.
    copies: of everything that an update changes, kept if steps are validated after they are applied.
    saved: what this rank writes to a checkpoint, of which a save in the background makes a copy in host memory.
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
    """The part of a layout by which state is laid out. zero: neighbouring replicas that share masters and moments."""

    tp: int = 1
    dp: int = 1
    zero: int = 1
    bucket: int = 40_000_000


def held_bytes(
    config: ModelConfig,
    plan: PrecisionPlan,
    cuts: Sequence[Cut],
    rank_of_stage: Sequence[int],
    sharding: Sharding,
    moments: Sequence[str],
    device: Device = "cpu",
) -> list[Held]:
    """Return what each pipeline rank holds on each of its tensor-parallel ranks. The vocabulary must be known.

    moments: names of the update rule's moments.
    """
    known: dict[tuple[object, ...], Held] = {}
    found = []
    for rank in range(max(rank_of_stage) + 1):
        own = [cut for cut in cuts if rank_of_stage[cut.stage] == rank]
        alike = *((c.first, c.last, len(c.layers)) for c in own), by_name(plan) and rank
        if alike not in known:
            with without_storage("cuda"):
                known[alike] = _held(config.undrawn, plan, cuts, rank_of_stage, rank, sharding, moments, device)
        found.append(known[alike])
    return found


def _held(
    config: ModelConfig,
    plan: PrecisionPlan,
    cuts: Sequence[Cut],
    rank_of_stage: Sequence[int],
    rank: int,
    sharding: Sharding,
    moments: Sequence[str],
    device: Device,
) -> Held:
    axis = Alone("tp", 0, sharding.tp)
    context = Context(plan, axis, fp8=FP8State(plan.fp8, config.layers, axis, device="meta"))
    stages = build(config, context, cuts, rank_of_stage, rank)
    buffers, taken = list[Buffer](), set[torch.nn.Parameter]()
    for stage in stages.values():
        own = [p for p in parameters_of([stage]) if p not in taken]
        taken.update(own)
        buffers += [_buffer(alike, plan, rank, sharding, moments) for alike in buckets(own, plan, sharding.bucket)]
    kinds = [buffer.bytes_by_kind() for buffer in buffers]
    sums = {kind: sum(one[kind] for one in kinds) for kind in ("weights", "gradients", "masters", "moments")}
    travelling = (b.size * b.travels.itemsize for b in buffers if sharding.dp > 1 and b.travels != b.grads.dtype)
    return Held(
        **sums,
        reduction=sum(travelling),
        update=max(_update(buffer, device) for buffer in buffers),
        copies=sums["masters"] + sums["moments"] + sum(b.own(b.weights).nbytes for b in buffers if not b.in_codes),
        saved=sum(tensor.nbytes for buffer in buffers for tensor in buffer.saved().values()),
    )


def _buffer(
    alike: Sequence[torch.nn.Parameter], plan: PrecisionPlan, rank: int, sharding: Sharding, moments: Sequence[str]
) -> Buffer:
    dp, zero = Axis("dp", 0, sharding.dp), Axis("zero", 0, sharding.zero)
    return Buffer(alike, plan, dp, zero, rank, torch.device("meta"), moments)


def _update(buffer: Buffer, device: Device) -> int:
    """Return the peak that the update of a block of this buffer adds."""
    block, steps = next(buffer.blocks(0, buffer.last - buffer.first, BLOCK if device == "cpu" else 0)), torch.ones(())
    with Alive() as alive:
        weights, _, state = block.wide()
        block.keep(weights, state, steps)
    return alive.most
