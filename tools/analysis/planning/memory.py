"""The bytes of each rank of a run by kind: state, and activations at the peak of the passes.

State is laid out by the optimizer's own code, activations are counted by running the stages on
tensors without storage, and their peak is that of the run's schedule. Under canonical numerics a
rank holds what its virtual ranks would hold. Not counted are memory inside kernels and collectives,
CUDA and NCCL themselves, and gaps between tensors; `Target.usable` leaves some memory for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from megaprec.optim.canonical.microbatch_sums import num_waiting_sums
from models.estimate.flops import StageCost
from models.estimate.memory import ActivationBytes, StageMemory, message_bytes
from models.estimate.state import Sharding, state_bytes
from models.estimate.storage import Device
from parallel.pipeline.builders import SPLIT
from parallel.pipeline.instructions import Instruction
from parallel.pipeline.schedules import Schedule
from parallel.pipeline.simulation import peak
from tools.config.checks import make_rule
from tools.config.run_file import RunConfig

PROCESS = 300 * 10**6  # bytes of Python and torch in a process on a CPU


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one pipeline rank; its tensor-parallel ranks and replicas have as many.

    ema: the moving average of the weights.
    activations: the peak of a step's passes, with messages between stages.
    logits: the part of it that is one micro-batch's logits, on the rank of the last stage.
    buffers: rotary tables and FP8 casts of weights.
    communication: copies of gradients that travel between replicas: in another dtype, or under
        canonical numerics.
    arriving: under ZeRO-2, gradients of buckets that are not reduced yet.
    sums: under canonical numerics, gradients of micro-batches that wait until others are added to
        them.
    optimizer: temporary tensors of an update, or the own weights while their average is evaluated.
    save: on a CPU, the copy from which a checkpoint is written beside the training.
    process: on a CPU, Python and torch.
    """

    weights: int
    gradients: int
    masters: int
    moments: int
    ema: int
    activations: int
    logits: int
    buffers: int
    communication: int
    arriving: int
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
        kinds = [kind.name for kind in fields(self) if kind.name != "logits"]
        return {kind: getattr(self, kind) for kind in kinds}


@dataclass(frozen=True)
class PlannedPasses:
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

    def kept(self, config: RunConfig, costs: Sequence[StageCost]) -> list[ActivationBytes]:
        """Return what each stage keeps of a micro-batch."""
        virtual, virtual_ranks = in_virtual_ranks(config)
        parallel = virtual.parallel
        stage_memory = StageMemory(
            config.sized_model,
            config.plan,
            virtual.engine_options,
            tp=parallel.tensor,
            cp=parallel.context,
            device=self.device,
            halves=bool(parallel.schedule_file) or parallel.schedule in SPLIT,
        )
        stage_memory = _first_equal(stage_memory)
        of_virtual_rank = [stage_memory.activation_bytes(cost.cut) for cost in costs]
        return [_times(virtual_ranks, kept) for kept in of_virtual_rank]

    def of(self, config: RunConfig, passes: PlannedPasses) -> list[RankBytes]:
        """Return the bytes of each pipeline rank."""
        kept = self.kept(config, passes.costs)
        rank_of_stage = passes.schedule.rank_of_stage
        states = state_bytes(
            config.sized_model,
            config.plan,
            [cost.cut for cost in passes.costs],
            rank_of_stage,
            sharding_of(config),
            make_rule(config.optimizer),
            self.device,
        )
        peaks = peak_bytes(config, passes, kept)
        # by pipeline rank, like `states` and `peaks`
        buffers = [0] * len(states)
        for stage, rank in enumerate(rank_of_stage):
            buffers[rank] += kept[stage].buffers

        _, virtual_ranks = in_virtual_ranks(config)
        canonical = config.canonical_shards > 0
        waiting = num_waiting_sums(config.num_microbatches) if canonical else 0
        # sums of canonical numerics need the gradients of each replica
        gathers = canonical and config.parallel.copies > 1
        on_cpu = self.device == "cpu"
        copies_to_save = on_cpu and config.checkpoint.background
        evaluates = config.train.eval_every > 0
        return [
            RankBytes(
                weights=virtual_ranks * state.weights,
                gradients=virtual_ranks * state.gradients,
                masters=virtual_ranks * state.masters,
                moments=virtual_ranks * state.moments,
                ema=virtual_ranks * state.ema,
                activations=peaks[rank],
                logits=logits_bytes(config) if rank == rank_of_stage[-1] else 0,
                buffers=buffers[rank],
                communication=virtual_ranks * (state.gradients if gathers else state.reduction),
                arriving=virtual_ranks * state.arriving,
                sums=virtual_ranks * state.gradients * waiting,
                # of one block at a time, of whichever virtual rank it is
                optimizer=max(state.update, virtual_ranks * state.own if evaluates else 0),
                save=virtual_ranks * state.saved if copies_to_save else 0,
                process=PROCESS if on_cpu else 0,
            )
            for rank, state in enumerate(states)
        ]


@lru_cache(maxsize=1024)
def _first_equal(stage_memory: StageMemory) -> StageMemory:
    """Return the first `StageMemory` that was equal to this one, which knows the stages that were
    run before."""
    return stage_memory


def _times(count: int, kept: ActivationBytes) -> ActivationBytes:
    """Return what `count` virtual ranks keep, each as much as `kept`."""
    sizes = {kind.name: count * getattr(kept, kind.name) for kind in fields(kept)}
    return ActivationBytes(**sizes)


def in_virtual_ranks(config: RunConfig) -> tuple[RunConfig, int]:
    """Return the layout whose ranks hold what the virtual ranks of canonical numerics do, and how
    many a rank holds.

    They run one at a time, but each is stopped where it needs the others, so their activations are
    there together.
    """
    shards = config.canonical_shards
    parallel = config.parallel
    if not shards:
        return config, 1
    # virtual ranks always cut the sequence
    virtual = parallel.model_copy(update={"tensor": shards, "sequence": True})
    return config.with_parallel(virtual, "canonical numerics"), shards // parallel.tensor


def sharding_of(config: RunConfig) -> Sharding:
    """Return how the run shards its state, or a virtual rank its own."""
    parallel = config.parallel
    sharers = 1
    if parallel.zero:
        sharers = parallel.zero_size or parallel.copies
    return Sharding(
        config.canonical_shards or parallel.tensor,
        parallel.copies,
        sharers,
        parallel.bucket,
        parallel.expert,
        parallel.expert_tensor,
        separate_head=config.canonical_shards > 0,
        gradients=parallel.shards_gradients,
        ema=config.optimizer.ema > 0,
    )


def peak_bytes(
    config: RunConfig, passes: PlannedPasses, kept: Sequence[ActivationBytes]
) -> list[int]:
    """Return the peak of each pipeline rank's activations in a step."""
    virtual, virtual_ranks = in_virtual_ranks(config)
    parallel = virtual.parallel
    message = virtual_ranks * message_bytes(
        config.sized_model, config.plan, virtual.engine_options, parallel.tensor, parallel.context
    )
    schedule = passes.schedule

    def growth(instruction: Instruction) -> float:
        return kept[instruction.stage].growth_after(instruction)

    def within(instruction: Instruction) -> float:
        return kept[instruction.stage].peak_of(instruction)

    peaks = [round(size) for size in peak(schedule, growth, within, message)]
    # of the kinds of schedule only this one keeps all micro-batches, also those not simulated
    if parallel.schedule == "gpipe" and not parallel.schedule_file:
        for stage, rank in enumerate(schedule.rank_of_stage):
            peaks[rank] += passes.more * kept[stage].activations
    return peaks


def logits_bytes(config: RunConfig) -> int:
    """Return the bytes of one micro-batch's logits on a rank of the last stage."""
    parallel = config.parallel
    tokens = config.train.seq_length // parallel.context * config.train.micro_batch
    # rounded up: the vocabulary is padded until the ranks share it evenly
    vocab_rows = -(-config.sized_model.vocab // parallel.tensor)
    return tokens * vocab_rows * config.plan.compute_dtype("head.weight").itemsize
