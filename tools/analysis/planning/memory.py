"""The bytes of each rank of a run by kind: state, and activations at the peak of the passes.

State is laid out by the optimizer's own code, activations are counted by running the stages on
tensors without storage, and their peak is that of the run's schedule. Under canonical numerics a
rank holds what its virtual ranks would hold. Not counted are memory inside kernels, CUDA itself,
and gaps between tensors; `Target.usable` leaves some memory for them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from megaprec.optim.canonical.microbatch_sums import num_waiting_sums
from models.decoder.stages import Cut
from models.estimate.elementwise import LayerShare
from models.estimate.flops import StageCost
from models.estimate.least_activations import least_bytes_of_layer
from models.estimate.memory import ActivationBytes, StageMemory, message_bytes
from models.estimate.state import StateBytes, state_bytes
from models.estimate.storage import Device
from models.estimate.whole_weights import evaluation_passes, passes_of_rank
from parallel.pipeline.instructions import Instruction, Message, Op
from parallel.pipeline.kinds import KINDS
from parallel.pipeline.schedules import Schedule
from parallel.pipeline.simulation import Span, memory_in_use, peak
from tools.analysis.planning.communicators import communicator_bytes
from tools.config.rules.derived import make_rule
from tools.config.rules.expert_ranks import expert_slices
from tools.config.run_file import RunConfig
from tools.config.sharding import sharding_of
from tools.config.tables.schedules import equal_schedule, stage_count

FEW_LAYERS = 2  # of two stages, of which one more layer tells what a layer keeps
PROCESS = 350 * 10**6  # bytes of Python and torch in a process on a CPU
# What glibc's heap holds on a CPU beside the tensors: it keeps freed memory (`keep_freed_memory`),
# also what no later tensor fits into. Bytes, and a part of the activations: of nine runs, by least
# squares.
HEAP_REST = 20 * 10**6
HEAP_GAPS = 0.2


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one pipeline rank; its tensor-parallel ranks and replicas have as many.

    ema: the moving average of the weights.
    host: masters, moments and average in host memory, which are not among the device's bytes.
    staging: tiles through which these travel.
    activations: the peak of a step's passes, with messages between stages.
    logits: the part of it that is one micro-batch's logits, on the rank of the last stage.
    buffers: rotary tables and FP8 casts of weights.
    communication: copies of gradients that travel between replicas: in another dtype, or under
        canonical numerics.
    arriving: under ZeRO-2 and 3, gradients of buckets that are not reduced yet.
    gathered: under ZeRO-3, whole weights of the layers that compute, and of those that are kept.
    sums: under canonical numerics, gradients of micro-batches that wait until others are added to
        them.
    optimizer: temporary tensors of an update, or the own weights while their average is evaluated.
    statistics: the masters before a step of log.statistics.
    communicators: on a GPU, what NCCL keeps for the groups of ranks.
    save: on a CPU, the copy from which a checkpoint is written beside the training.
    process: on a CPU, Python and torch.
    gaps: on a CPU, freed memory between tensors that nothing fits into.
    """

    weights: int
    gradients: int
    masters: int
    moments: int
    ema: int
    host: int
    staging: int
    activations: int
    logits: int
    buffers: int
    communication: int
    arriving: int
    gathered: int
    sums: int
    optimizer: int
    statistics: int
    communicators: int
    save: int
    process: int
    gaps: int

    @property
    def total(self) -> int:
        """Return the sum of all kinds on the device; logits are activations."""
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        """Return the bytes of each kind on the device."""
        kinds = [kind.name for kind in fields(self) if kind.name not in ("logits", "host")]
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
    """Bytes of runs that differ in the layout only; stages that they share are run once.

    process: of Python and torch in a process on a CPU.
    """

    def __init__(self, device: Device, process: int = PROCESS) -> None:
        self.device: Device = device
        self.process = process
        self._states: dict[tuple[object, ...], list[StateBytes]] = {}

    def kept(self, config: RunConfig, costs: Sequence[StageCost]) -> list[ActivationBytes]:
        """Return what each stage keeps of a micro-batch."""
        _, virtual_ranks = in_virtual_ranks(config)
        stage_memory = self._stage_memory(config)
        of_virtual_rank = [stage_memory.activation_bytes(cost.cut) for cost in costs]
        return [_times(virtual_ranks, kept) for kept in of_virtual_rank]

    def kept_by_layer(self, config: RunConfig) -> int:
        """Return the bytes that one more layer such as the last one keeps of a micro-batch; 0 for
        layouts of which `least_layers_in_flight` knows nothing, and for models of at most
        FEW_LAYERS layers."""
        if not least_layers_in_flight(config) or config.model.layers <= FEW_LAYERS:
            return 0
        _, of_layer = _bytes_of_layer(config, self._with_fewest_experts(config), layers=1)
        _, virtual_ranks = in_virtual_ranks(config)
        return virtual_ranks * of_layer

    def _with_fewest_experts(self, config: RunConfig) -> StageMemory:
        """Return the `StageMemory` of the layout with its experts spread over as many ranks as can
        be.

        Spread experts get as many rows however many of them are on a rank, so layers keep as much;
        one expert on a rank takes least time to run. Experts that are not spread keep less.
        """
        stage_memory = self._stage_memory(config)
        if config.parallel.expert == 1:
            return stage_memory
        spread = replace(stage_memory.options, expert=config.model.experts)
        return _first_equal(replace(stage_memory, options=spread, _measured={}))

    def least_activations(self, config: RunConfig) -> int:
        """Return the bytes of activations that the second of the pipeline ranks needs at least, by
        what one layer keeps when it is run; 0 where `kept_by_layer` is 0."""
        layers = least_layers_in_flight(config)
        last = config.model.layers - 1
        if not layers or last < FEW_LAYERS:
            return 0
        of_fewer, of_layer = _bytes_of_layer(config, self._stage_memory(config))
        # All are there when a backward pass begins, which takes some more: at least as much as that
        # of FEW_LAYERS layers, if each stage has so many.
        of_backward = 0
        num_stages = stage_count(config.parallel, config.num_microbatches)
        if config.model.layers >= FEW_LAYERS * num_stages:
            of_backward = of_fewer.backward
        _, virtual_ranks = in_virtual_ranks(config)
        return virtual_ranks * (layers * of_layer + of_backward)

    def _stage_memory(self, config: RunConfig) -> StageMemory:
        """Return what counts the bytes of stages, the same for layouts whose stages are alike."""
        virtual, _ = in_virtual_ranks(config)
        parallel = virtual.parallel
        stage_memory = StageMemory(
            config.sized_model,
            config.plan,
            replace(virtual.engine_options, blank=True),
            tp=parallel.tensor,
            cp=parallel.context,
            device=self.device,
            halves=bool(parallel.schedule_file) or KINDS[parallel.schedule].splits_backward,
            # without FP8 stages keep as much under ZeRO-3, and are run once
            keeps_casts=not (parallel.shards_weights and config.plan.fp8),
        )
        return _first_equal(stage_memory)

    def of(self, config: RunConfig, passes: PlannedPasses) -> list[RankBytes]:
        """Return the bytes of each pipeline rank."""
        kept = self.kept(config, passes.costs)
        rank_of_stage = passes.schedule.rank_of_stage
        states = self._state_bytes(config, [cost.cut for cost in passes.costs], rank_of_stage)
        peaks = peak_bytes(config, passes, kept)
        # by pipeline rank, like `states` and `peaks`
        buffers = [0] * len(states)
        for stage, rank in enumerate(rank_of_stage):
            buffers[rank] += kept[stage].buffers

        last_rank = rank_of_stage[-1]
        return [
            self._of_rank(
                config,
                state,
                activations=peaks[rank],
                buffers=buffers[rank],
                gathered=self._gathered_bytes(config, state, passes.schedule, rank),
                communicators=self.communicator_bytes(config, rank_of_stage, rank),
                has_logits=rank == last_rank,
            )
            for rank, state in enumerate(states)
        ]

    def _gathered_bytes(
        self, config: RunConfig, state: StateBytes, schedule: Schedule, rank: int
    ) -> int:
        """Return the most bytes of weights that a pipeline rank has whole under ZeRO-3."""
        if not config.parallel.shards_weights:
            return 0
        overlap = config.parallel.overlaps(self.device)
        kept = (config.parallel.keep_layers, config.parallel.keep_bytes)
        weights = state.whole_weights
        most = weights.most_bytes(passes_of_rank(schedule, rank), overlap, *kept)
        if config.train.evaluates:
            evaluation = evaluation_passes(schedule, rank)
            most = max(most, weights.most_bytes(evaluation, overlap, *kept))
        return most

    def communicator_bytes(self, config: RunConfig, rank_of_stage: Sequence[int], rank: int) -> int:
        """Return the bytes of a pipeline rank's communicators; those of gloo are in host memory."""
        return communicator_bytes(config, rank_of_stage, rank) if self.device == "cuda" else 0

    def _state_bytes(
        self, config: RunConfig, cuts: Sequence[Cut], rank_of_stage: Sequence[int]
    ) -> list[StateBytes]:
        """Return the state of each pipeline rank: once for layouts that share it, such as those
        that recompute something else or have other micro-batches."""
        model = config.sized_model
        sharding = sharding_of(config)
        optimizer = config.optimizer.model_dump_json()
        key = (model, config.plan, tuple(cuts), tuple(rank_of_stage), sharding, optimizer)
        if key not in self._states:
            rule = make_rule(config.optimizer)
            self._states[key] = state_bytes(
                model, config.plan, cuts, rank_of_stage, sharding, rule, self.device
            )
        return self._states[key]

    def _of_rank(
        self,
        config: RunConfig,
        state: StateBytes,
        activations: int,
        buffers: int,
        gathered: int,
        communicators: int,
        has_logits: bool,
    ) -> RankBytes:
        """Return the bytes of a pipeline rank. activations, gathered: their peaks."""
        _, virtual_ranks = in_virtual_ranks(config)
        canonical = config.canonical_shards > 0
        waiting = num_waiting_sums(config.num_microbatches) if canonical else 0
        # sums of canonical numerics need the gradients of each replica
        gathers = canonical and config.parallel.copies > 1
        on_cpu = self.device == "cpu"
        copies_to_save = on_cpu and config.checkpoint.background
        evaluates = config.train.evaluates
        return RankBytes(
            weights=virtual_ranks * state.weights,
            gradients=virtual_ranks * state.gradients,
            masters=virtual_ranks * state.masters,
            moments=virtual_ranks * state.moments,
            ema=virtual_ranks * state.ema,
            host=virtual_ranks * state.host,
            # of one tile at a time, of whichever virtual rank it is
            staging=state.staging,
            activations=activations,
            logits=logits_bytes(config) if has_logits else 0,
            buffers=buffers,
            communication=virtual_ranks * (state.gradients if gathers else state.reduction),
            arriving=virtual_ranks * state.arriving,
            gathered=gathered,
            sums=virtual_ranks * state.gradients * waiting,
            # of one block at a time, of whichever virtual rank it is
            optimizer=max(state.update, virtual_ranks * state.own if evaluates else 0),
            statistics=virtual_ranks * state.masters_before if config.log.statistics else 0,
            communicators=communicators,
            save=virtual_ranks * state.saved if copies_to_save else 0,
            process=self.process if on_cpu else 0,
            gaps=HEAP_REST + round(HEAP_GAPS * activations) if on_cpu else 0,
        )


def _bytes_of_layer(
    config: RunConfig, stage_memory: StageMemory, layers: int = FEW_LAYERS
) -> tuple[ActivationBytes, int]:
    """Return what `layers` layers such as the last ones keep, and how much one more adds."""
    last = config.model.layers - 1
    fewer = Cut(1, range(last - layers, last), first=False, last=False)
    more = Cut(1, range(last - layers, last + 1), first=False, last=False)
    of_fewer = stage_memory.activation_bytes(fewer)
    of_more = stage_memory.activation_bytes(more)
    return of_fewer, max(0, of_more.activations - of_fewer.activations)


def least_layers_in_flight(config: RunConfig) -> int:
    """Return for how many layers the second pipeline rank keeps activations at once, at least. A
    layer counts once for each of its micro-batches; all are of the kind of the model's last layer.

    The first rank may have layers of another kind. A stage in the middle has no fewer layers than
    the mean one, rounded down. 0 if it is not known: for schedules other than 1F1B and interleaved
    1F1B, given cuts, and layers of several kinds.
    """
    parallel = config.parallel
    model = config.model
    if parallel.schedule_file or not KINDS[parallel.schedule].is_1f1b:
        return 0
    # all layers of a stage are recomputed, or none
    recompute = config.recompute
    recomputes_alike = not recompute.layers and recompute.fraction in (0.0, 1.0)
    last_is_dense = model.layers - 1 in model.dense_layers
    recurs = model.delta_layers or model.hybrid_pattern
    has_several_kinds = model.window_layers or recurs or last_is_dense
    if parallel.cuts or has_several_kinds or not recomputes_alike:
        return 0
    # dense layers keep less than layers with experts: they are not counted
    if parallel.pipeline == 1:
        return model.layers - len(model.dense_layers)
    chunks = parallel.chunks or KINDS[parallel.schedule].chunks
    layers = chunks * (model.layers // (parallel.pipeline * chunks))
    return layers * min(config.num_microbatches, parallel.pipeline - 1)


@lru_cache(maxsize=64)
def stages_in_flight(
    kind: str, pipeline: int, microbatches: int, chunks: int
) -> tuple[Mapping[int, int], ...]:
    """Return, for each pipeline rank, the moment at which it keeps most activations: the number of
    micro-batches by stage. Backward passes are whole."""
    fullest_of_ranks: list[Mapping[int, int]] = []
    for program in equal_schedule(kind, pipeline, microbatches, chunks).programs:
        kept = Counter[int]()
        total = 0
        fullest = kept.copy()
        fullest_total = 0
        for instruction in program:
            change = _CHANGES.get(instruction.op, 0)
            kept[instruction.stage] += change
            total += change
            if total > fullest_total:
                fullest = kept.copy()
                fullest_total = total
        fullest_of_ranks.append(fullest)
    return tuple(fullest_of_ranks)


_CHANGES = {Op.FORWARD: 1, Op.BACKWARD: -1}


def least_activations_by_rank(
    config: RunConfig, passes: PlannedPasses, of_layer: int
) -> Sequence[int]:
    """Return a lower bound of the activations of each pipeline rank. of_layer: the bytes that a
    layer such as the last one keeps; layers of other kinds count nothing."""
    parallel = config.parallel
    schedule = passes.schedule
    if not of_layer:
        return [0] * len(schedule.programs)
    layers = [_count_like_last(config, cost.cut) for cost in passes.costs]
    in_flight = stages_in_flight(
        parallel.schedule, parallel.pipeline, schedule.microbatches, parallel.chunks
    )
    least: list[int] = []
    for by_stage in in_flight:
        kept_layers = sum(count * layers[stage] for stage, count in by_stage.items())
        least.append(kept_layers * of_layer)
    return least


def _count_like_last(config: RunConfig, cut: Cut) -> int:
    """Return how many layers of a stage are of the kind of the model's last layer."""
    kinds = config.model.kind_keys(range(config.model.layers))
    return sum(kinds[layer] == kinds[-1] for layer in cut.layers)


def least_activation_bytes(config: RunConfig) -> int:
    """Return a lower bound of `MemoryModel.least_activations`, without running a layer."""
    parallel = config.parallel
    share = LayerShare(parallel.tensor, parallel.sequence, expert_slices(parallel))
    of_layer = least_bytes_of_layer(config.sized_model, config.plan, share, config.recompute)
    tokens = config.train.micro_batch * config.train.seq_length / parallel.context
    return int(least_layers_in_flight(config) * tokens * of_layer)


@lru_cache(maxsize=1024)
def _first_equal(stage_memory: StageMemory) -> StageMemory:
    """Return the first `StageMemory` that was equal to this one, which knows the stages that were
    run before. The cache finds it: equal arguments give the object that was returned first."""
    return stage_memory


def _times(count: int, kept: ActivationBytes) -> ActivationBytes:
    """Return what `count` virtual ranks keep, each as much as `kept`."""
    sizes = {kind.name: count * getattr(kept, kind.name) for kind in fields(kept)}
    return ActivationBytes(**sizes)


def in_virtual_ranks(config: RunConfig) -> tuple[RunConfig, int]:
    """Return the layout whose ranks hold what the virtual ranks of canonical numerics do, and how
    many virtual ranks a rank holds; without canonical numerics the run itself, and 1.

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


def peak_bytes(
    config: RunConfig, passes: PlannedPasses, kept: Sequence[ActivationBytes]
) -> list[int]:
    """Return the peak of each pipeline rank's activations in a step."""
    parallel = config.parallel
    schedule = passes.schedule
    sizes = _ScheduleBytes(config, kept)
    peaks_of_schedule = peak(schedule, sizes.growth, sizes.within, sizes.message)
    peaks = [round(size) for size in peaks_of_schedule]
    # also of micro-batches that are not simulated
    if KINDS[parallel.schedule].keeps_all and not parallel.schedule_file:
        for stage, rank in enumerate(schedule.rank_of_stage):
            peaks[rank] += passes.more * kept[stage].activations
    return peaks


class _ScheduleBytes:
    """The bytes of activations that instructions keep, and of a message between stages.

    kept: by stage, what it keeps of a micro-batch.
    """

    def __init__(self, config: RunConfig, kept: Sequence[ActivationBytes]) -> None:
        virtual, virtual_ranks = in_virtual_ranks(config)
        parallel = virtual.parallel
        message = message_bytes(
            config.sized_model,
            config.plan,
            virtual.engine_options,
            parallel.tensor,
            parallel.context,
        )
        self.message = virtual_ranks * message
        self._kept = kept

    def growth(self, instruction: Instruction) -> float:
        """Return what is kept more after an instruction than before it."""
        return self._kept[instruction.stage].growth_after(instruction)

    def within(self, instruction: Instruction) -> float:
        """Return what an instruction takes besides, while it runs."""
        return self._kept[instruction.stage].peak_of(instruction)


@dataclass(frozen=True)
class ActivationsOverTime:
    """The activations of a rank during a step, with messages between stages.

    seconds: the start and the end of each computation; they do not decrease.
    nbytes: the bytes from each point to the next one.
    """

    seconds: list[float]
    nbytes: list[float]


def activations_over_time(
    config: RunConfig,
    passes: PlannedPasses,
    kept: Sequence[ActivationBytes],
    spans: Sequence[Span],
    rank: int,
) -> ActivationsOverTime:
    """Return the activations of a pipeline rank while it runs a schedule.

    kept: as `MemoryModel.kept` returns it. spans: of all instructions of the schedule.
    """
    sizes = _ScheduleBytes(config, kept)
    # a message is under way while its rank computes on
    computations = {
        span.instruction: span
        for span in spans
        if span.rank == rank and Message.of(span.instruction) is None
    }
    curve = ActivationsOverTime([], [])
    for in_use in memory_in_use(passes.schedule, rank, sizes.growth, sizes.within, sizes.message):
        span = computations.get(in_use.instruction)
        if span is None:
            continue
        curve.seconds.append(span.start)
        curve.nbytes.append(in_use.during)
        curve.seconds.append(span.end)
        curve.nbytes.append(in_use.after)
    return curve


def logits_bytes(config: RunConfig) -> int:
    """Return the bytes of one micro-batch's logits on a rank of the last stage."""
    parallel = config.parallel
    tokens = config.train.seq_length // parallel.context * config.train.micro_batch
    # rounded up: the vocabulary is padded until the ranks share it evenly
    vocab_rows = -(-config.sized_model.vocab // parallel.tensor)
    return tokens * vocab_rows * config.plan.compute_dtype("head.weight").itemsize
