"""The bytes of each rank of a run by kind: state, and activations at the peak of the passes.

State is laid out by the optimizer's own code, activations are counted by running the stages on
tensors without storage, and their peak is that of the run's schedule. Under canonical numerics a
rank holds what its virtual ranks would hold. Not counted are memory inside kernels and collectives,
CUDA and NCCL themselves, and gaps between tensors; `Target.usable` leaves some memory for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from megaprec.optim.microbatch_sums import sums_set_aside
from models.estimate.flops import StageCost
from models.estimate.memory import Kept, StageMemory, message_bytes
from models.estimate.state import Sharding, held_bytes
from models.estimate.storage import Device
from parallel.pipeline.builders import SPLIT
from parallel.pipeline.schedules import Schedule
from parallel.pipeline.simulation import peak
from tools.config.checks import make_rule
from tools.config.run_file import RunConfig

PROCESS = 300 * 10**6  # bytes of Python and torch in a process on a CPU


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one pipeline rank; its tensor-parallel ranks and replicas have as many.

    activations: the peak of a step's passes, with messages between stages. logits: the part of it
        that is one micro-batch's logits, on the rank of the last stage.
    buffers: rotary tables and FP8 casts of weights.
    communication: copies of gradients that travel between replicas: in another dtype, or under
        canonical numerics.
    sums: under canonical numerics, gradients of micro-batches that wait until others are added to
        them.
    optimizer: temporary tensors of an update, and copies by which a step can be taken back.
    save: on a CPU, the copy from which a checkpoint is written beside the training.
    process: on a CPU, Python and torch.
    """

    weights: int
    gradients: int
    masters: int
    moments: int
    activations: int
    logits: int
    buffers: int
    communication: int
    sums: int
    optimizer: int
    save: int
    process: int

    @property
    def total(self) -> int:
        """Return the sum of all kinds; logits are activations."""
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        """Return the bytes of each kind."""
        return {
            part.name: getattr(self, part.name) for part in fields(self) if part.name != "logits"
        }


@dataclass(frozen=True)
class Passes:
    """The passes of a step: a schedule of its first micro-batches, and `more` further ones.

    longer: the schedule of some micro-batches more, which says how much time each further one
    takes; None if there are no further ones.
    """

    schedule: Schedule
    costs: Sequence[StageCost]
    more: int = 0
    longer: Schedule | None = None


class MemoryModel:
    """Bytes of runs that differ in the layout only; stages that they share are run once."""

    def __init__(self, device: Device) -> None:
        self.device: Device = device

    def kept(self, config: RunConfig, costs: Sequence[StageCost]) -> list[Kept]:
        """Return what each stage keeps of a micro-batch."""
        whole, lanes = in_virtual_ranks(config)
        p = whole.parallel
        t = config.train
        halves = bool(p.schedule_file) or p.schedule in SPLIT
        layout = p.tensor, p.sequence, config.recompute
        run: tuple[Any, ...] = (config.sized_model, config.plan, t.seq_length, t.micro_batch)
        stages = _stage_memory(
            *run,
            *layout,
            self.device,
            halves,
            p.expert,
            p.expert_tensor,
            p.context,
            p.context_by == "ring",
        )
        each = (stages.kept(cost.cut) for cost in costs)
        return [Kept(*(lanes * getattr(one, part.name) for part in fields(Kept))) for one in each]

    def of(self, config: RunConfig, passes: Passes) -> list[RankBytes]:
        """Return the bytes of each pipeline rank."""
        kept = self.kept(config, passes.costs)
        placed = passes.schedule.rank_of_stage
        held = held_bytes(
            config.sized_model,
            config.plan,
            [cost.cut for cost in passes.costs],
            placed,
            sharding_of(config),
            make_rule(config.optimizer),
            self.device,
        )
        peaks = peak_bytes(config, passes, kept)
        lanes = in_virtual_ranks(config)[1]
        waiting = sums_set_aside(config.num_microbatches) if config.canonical_shards else 0
        arriving = config.canonical_shards > 0 and config.parallel.copies > 1
        cpu = self.device == "cpu"
        return [
            RankBytes(
                lanes * one.weights,
                lanes * one.gradients,
                lanes * one.masters,
                lanes * one.moments,
                peaks[rank],
                logits_bytes(config) if rank == placed[-1] else 0,
                sum(kept[stage].buffers for stage, home in enumerate(placed) if home == rank),
                lanes * (one.gradients if arriving else one.reduction),
                lanes * one.gradients * waiting,
                one.update + (lanes * one.copies if config.optimizer.validation == "after" else 0),
                lanes * one.saved if cpu and config.checkpoint.background else 0,
                PROCESS if cpu else 0,
            )
            for rank, one in enumerate(held)
        ]


@lru_cache(maxsize=1024)
def _stage_memory(*fields: Any) -> StageMemory:
    """Return the one `StageMemory` of these fields, which knows the stages that were run before."""
    return StageMemory(*fields)


def in_virtual_ranks(config: RunConfig) -> tuple[RunConfig, int]:
    """Return the layout whose ranks hold what the virtual ranks of canonical numerics do, and how
    many a rank holds.

    They run one at a time, but each is stopped where it needs the others, so their activations are
    there together.
    """
    shards = config.canonical_shards
    p = config.parallel
    if not shards:
        return config, 1
    cut = p.model_copy(update={"tensor": shards, "sequence": True})
    return config.with_parallel(cut, "canonical numerics"), shards // p.tensor


def sharding_of(config: RunConfig) -> Sharding:
    """Return how the run shards its state, or a virtual rank its own."""
    p = config.parallel
    tensor = config.canonical_shards or config.parallel.tensor
    zero = (p.zero_size or p.copies) if p.zero else 1
    apart = config.canonical_shards > 0
    return Sharding(tensor, p.copies, zero, p.bucket, p.expert, p.expert_tensor, apart)


def peak_bytes(config: RunConfig, passes: Passes, kept: Sequence[Kept]) -> list[int]:
    """Return the peak of each pipeline rank's activations in a step."""
    whole, lanes = in_virtual_ranks(config)
    p = whole.parallel
    t = config.train
    made = passes.schedule
    layout = p.tensor, p.sequence, p.context
    message = lanes * message_bytes(
        config.sized_model, config.plan, t.seq_length, t.micro_batch, *layout
    )
    peaks = peak(
        made, lambda i: kept[i.stage].growth(i), lambda i: kept[i.stage].within(i), message
    )
    more = [0] * len(peaks)
    if p.schedule == "gpipe" and not p.schedule_file:  # the one kind that keeps all micro-batches
        for stage, rank in enumerate(made.rank_of_stage):
            more[rank] += passes.more * kept[stage].activations
    return [round(one) + further for one, further in zip(peaks, more, strict=True)]


def logits_bytes(config: RunConfig) -> int:
    """Return the bytes of one micro-batch's logits on a rank of the last stage."""
    p = config.parallel
    t = config.train
    rows = -(-config.sized_model.vocab // p.tensor)
    return (
        t.seq_length
        // p.context
        * t.micro_batch
        * rows
        * config.plan.compute_dtype("head.weight").itemsize
    )
