"""A prediction of the time of a step, from FLOPs, traffic and the schedule. It is not a
measurement.

Matrix products run at a fraction of the device's peak; nothing else takes time but messages. An
axis whose ranks are in one machine has fast links, any other slow ones. Traffic of tensor-parallel
ranks is added to the passes, messages between stages are sent while ranks compute, and replicas
communicate at the end of the step, or during the passes if parallel.overlap is on. The update,
data, evaluation and saves are not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megaprec.comm.axis import AXES
from models.estimate.flops import StageCost
from models.estimate.memory import message_bytes
from models.estimate.storage import Device
from parallel.pipeline.builders import default_chunks
from parallel.pipeline.formulas import TEXTBOOK, Sizes
from parallel.pipeline.instructions import SENDS, Instruction, Op
from parallel.pipeline.simulation import simulate
from tools.config.expert_ranks import expert_replicas, expert_slices, replicas_sharing_state
from tools.config.run_file import RunConfig
from tools.config.schedules import pipeline_schedule
from tools.planning.memory import PlannedPasses, RankBytes, sharding_of

MANY = 1024  # forward passes; of a longer schedule only the first micro-batches are simulated


@dataclass(frozen=True)
class Assumptions:
    """Speeds that a prediction rests on.

    tflops: a rank's peak.
    efficiency: the fraction of it that matrix products reach.
    fast, slow: GB/s in each direction within a machine and between machines.
    machine: ranks of a machine.
    device: cpu or cuda; on a CPU, ranks compute and communicate on the same cores.
    """

    tflops: float
    efficiency: float
    fast: float
    slow: float
    machine: int
    device: Device = "cuda"


@dataclass(frozen=True)
class Traffic:
    """Bytes that the busiest rank sends in a step, by axis.

    experts: of tokens to experts on other ranks, and back.
    """

    tp: float
    pp: float
    dp: float
    experts: float = 0.0
    cp: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """The predicted times of one step, in seconds.

    seconds: of the step.
    compute: of the matrix products of a rank, on average.
    tp: of communication in the passes of a rank, over cp too.
    dp: of communication at the end of the step.
    idle: the fraction of the passes that a rank waits, on average.
    """

    seconds: float
    compute: float
    tp: float
    dp: float
    idle: float
    traffic: Traffic


def passes_of(config: RunConfig) -> PlannedPasses:
    """Return the passes of a step; of many micro-batches only as many as the schedule needs to
    become regular."""
    parallel = config.parallel
    microbatches = config.num_microbatches
    pipeline = parallel.pipeline
    if parallel.schedule in ("gpipe", "1f1b"):
        # they repeat themselves once the pipeline is full
        few = pipeline + 4
        further = 8
    else:
        few = 2 * pipeline
        further = pipeline
    is_short = pipeline * microbatches <= MANY or microbatches <= few + further
    if parallel.schedule_file or is_short:
        schedule = config.schedule
        return PlannedPasses(
            schedule, config.stage_costs(config.sized_model, schedule.rank_of_stage)
        )
    placement = pipeline_schedule(parallel, few).rank_of_stage
    costs = config.stage_costs(config.sized_model, placement)
    schedule, longer = (
        pipeline_schedule(parallel, count, lambda i: costs[i.stage].of(i))
        for count in (few, few + further)
    )
    return PlannedPasses(schedule, costs, microbatches - few, longer)


class _InstructionCosts:
    """The times and bytes of a run's instructions.

    speed: FLOPs a second. links: bytes a second, by axis.
    """

    def __init__(self, config: RunConfig, costs: Sequence[StageCost], assumed: Assumptions) -> None:
        self.config = config
        self.costs = costs
        self.speed = _speed(config, assumed)
        self.links = {axis: _link(config, axis, assumed) * 1e9 for axis in (*AXES, "experts")}
        parallel = config.parallel
        self.message = message_bytes(
            config.sized_model,
            config.plan,
            config.engine_options,
            parallel.tensor,
            parallel.context,
        )

    def sent(self, i: Instruction) -> tuple[float, float, float]:
        """Return the bytes that a rank sends in a computation: over tp, over cp, and to experts."""
        cost = self.costs[i.stage]
        return (
            _tensor_bytes(self.config, cost, i.op),
            _context_bytes(self.config, cost, i.op),
            _expert_bytes(self.config, cost, i.op),
        )

    def compute_seconds(self, i: Instruction) -> float:
        """Return the time of an instruction's matrix products."""
        return self.costs[i.stage].of(i) / self.speed

    def traffic_seconds(self, i: Instruction) -> float:
        """Return the time of an instruction's communication with ranks of the same stage."""
        tensor, context, experts = self.sent(i)
        links = self.links
        return tensor / links["tp"] + context / links["cp"] + experts / links["experts"]

    def seconds(self, i: Instruction) -> float:
        """Return the time of an instruction."""
        if i.op in SENDS:
            return self.message / self.links["pp"]
        return self.compute_seconds(i) + self.traffic_seconds(i)


def predict(
    config: RunConfig, passes: PlannedPasses, ranks: Sequence[RankBytes], assumed: Assumptions
) -> Prediction:
    """Return the predicted times of a step. ranks: the bytes of each pipeline rank."""
    schedule = passes.schedule
    stages = len(passes.costs)
    costs = _InstructionCosts(config, passes.costs, assumed)
    spans = simulate(schedule, costs.seconds)
    count = len(schedule.programs)
    # by rank, over the passes of the schedule
    work = [0.0] * count
    talk = [0.0] * count
    tensor_bytes = [0.0] * count
    context_bytes = [0.0] * count
    expert_bytes = [0.0] * count
    for span in spans:
        i = span.instruction
        if i.op in SENDS:
            continue
        tensor, context, experts = costs.sent(i)
        work[span.rank] += costs.compute_seconds(i)
        talk[span.rank] += costs.traffic_seconds(i)
        tensor_bytes[span.rank] += tensor
        context_bytes[span.rank] += context
        expert_bytes[span.rank] += experts

    # a long step is longer by what some more micro-batches of the simulated one take each
    repeats = 1 + passes.more / schedule.microbatches  # passes of the step, in those simulated
    length = max(span.end for span in spans)
    if passes.longer:
        end = max(span.end for span in simulate(passes.longer, costs.seconds))
        further = passes.longer.microbatches - schedule.microbatches
        length += passes.more * (end - length) / further
    mean_work = repeats * sum(work) / count
    mean_talk = repeats * sum(talk) / count
    # an activation and a gradient of each micro-batch at each border of stages
    messages = 2 * costs.message * config.num_microbatches * stages / count
    traffic = Traffic(
        tp=repeats * max(tensor_bytes),
        pp=messages if count > 1 else 0.0,
        dp=max(_replica_bytes(config, rank.gradients, rank.weights) for rank in ranks),
        experts=repeats * max(expert_bytes),
        cp=repeats * max(context_bytes),
    )
    reduction = traffic.dp / costs.links["dp"]
    overlaps = config.parallel.overlaps(assumed.device)
    return Prediction(
        seconds=max(length, reduction) if overlaps else length + reduction,
        compute=mean_work,
        tp=mean_talk,
        dp=reduction,
        idle=max(0.0, 1 - (mean_work + mean_talk) / length),
        traffic=traffic,
    )


def least_seconds(config: RunConfig, assumed: Assumptions) -> float:
    """Return the time that a step takes at least: with equal stages and ranks, and without messages
    between stages.

    Raises KeyError for a schedule from a file.
    """
    parallel = config.parallel
    plan = config.plan
    pipeline = parallel.pipeline
    stages = pipeline * (parallel.chunks or default_chunks(parallel.schedule))
    costs = config.stage_costs(config.sized_model, range(stages))
    instructions = _InstructionCosts(config, costs, assumed)
    speed = instructions.speed
    links = instructions.links

    def seconds_of_rank(op: Op) -> float:
        total = 0.0
        for cost in costs:
            flops = cost.of(Instruction(op, cost.cut.stage))
            total += (
                flops / speed
                + _tensor_bytes(config, cost, op) / links["tp"]
                + _context_bytes(config, cost, op) / links["cp"]
                + _expert_bytes(config, cost, op) / links["experts"]
            )
        return total / pipeline

    sizes = Sizes(
        pipeline,
        config.num_microbatches,
        stages // pipeline,
        F=seconds_of_rank(Op.FORWARD),
        I=seconds_of_rank(Op.BACKWARD_INPUT),
        W=seconds_of_rank(Op.BACKWARD_WEIGHT),
    )
    passes = sizes.work * (1 + TEXTBOOK[parallel.schedule].bubble.value(sizes))
    elements = sum(_elements(config)) / pipeline
    weights = elements * (1 if plan.fp8 else plan.parameters.itemsize)
    sent = _replica_bytes(config, elements * plan.gradients.itemsize, weights)
    reduction = sent / links["dp"]
    if parallel.overlaps(assumed.device):
        return max(passes, reduction)
    return passes + reduction


def _speed(config: RunConfig, assumed: Assumptions) -> float:
    """Return the FLOPs that the ranks that share a micro-batch in a stage compute in a second."""
    return (
        config.parallel.tensor
        * config.parallel.context
        * assumed.tflops
        * 1e12
        * assumed.efficiency
    )


def _link(config: RunConfig, axis: str, assumed: Assumptions) -> float:
    """Return the GB/s between neighbours of an axis. Ranks of a mesh are numbered along tp, cp, dp
    and pp."""
    parallel = config.parallel
    shared = parallel.tensor * parallel.context
    # neighbouring ranks among which an axis lies
    spans = {
        "tp": parallel.tensor,
        "cp": shared,
        "dp": shared * parallel.data,
        "pp": config.world_size,
        "experts": parallel.expert * expert_slices(parallel),
    }
    return assumed.fast if spans[axis] <= assumed.machine else assumed.slow


def _tensor_bytes(config: RunConfig, cost: StageCost, op: Op) -> float:
    """Return the bytes that a rank sends to its tensor-parallel ranks in an instruction.

    A block gathers or copies its input and sums or scatters its output, each in both directions;
    with sequence parallelism inputs are gathered again for the weight gradients, but not those of
    experts. Whole experts alone have nothing to sum under sequence parallelism. An all-reduce is a
    reduce-scatter and an all-gather.
    """
    parallel = config.parallel
    train = config.train
    model = config.model
    layers = cost.cut.layers
    local_length = train.seq_length // parallel.context
    # a gather or a scatter of one activation
    transfer = (
        local_length
        * train.micro_batch
        * model.hidden
        * config.plan.compute.itemsize
        * (1 - 1 / parallel.tensor)
    )
    at_ends = (1 if parallel.sequence else 2) * transfer
    expert_layers = _expert_layers(config, cost)
    # layers that sum nothing over tp
    unsummed = 0
    if parallel.sequence and expert_slices(parallel) == 1 and not model.shared_experts:
        unsummed = expert_layers
    forward = (4 * len(layers) - unsummed) * transfer
    recomputed = config.recompute.whole(len(layers)) / len(layers)
    # the input gradient reverses the forward's transfers; a recomputed layer makes them again
    of_input = (
        forward * (1 + recomputed)
        + cost.cut.last * at_ends
        + (cost.cut.first and parallel.sequence) * transfer
    )
    of_weight = 0.0
    if parallel.sequence:
        of_weight = (2 * len(layers) - expert_layers + cost.cut.last) * transfer
    forward += cost.cut.first * at_ends + (cost.cut.last and parallel.sequence) * transfer
    by_op = {
        Op.FORWARD: forward,
        Op.BACKWARD: of_input + of_weight,
        Op.BACKWARD_INPUT: of_input,
        Op.BACKWARD_WEIGHT: of_weight,
    }
    return by_op.get(op, 0.0)


def _expert_layers(config: RunConfig, cost: StageCost) -> int:
    """Return how many layers of a stage have experts."""
    if config.model.experts:
        return sum(layer not in config.model.dense_layers for layer in cost.cut.layers)
    return 0


def _expert_bytes(config: RunConfig, cost: StageCost, op: Op) -> float:
    """Return the bytes that a rank sends to the ranks of other experts in an instruction, if all
    get as many tokens.

    Rows go to their experts and results come back, in the forward pass and for the input gradient.
    """
    parallel = config.parallel
    train = config.train
    model = config.model
    layers = cost.cut.layers
    if parallel.expert == 1:
        return 0.0
    local_length = train.seq_length // parallel.context
    tokens = local_length * train.micro_batch * expert_slices(parallel) / parallel.tensor
    row = model.hidden * config.plan.compute.itemsize
    forward = (
        2
        * _expert_layers(config, cost)
        * tokens
        * model.experts_per_token
        * row
        * (1 - 1 / parallel.expert)
    )
    backward = forward * (1 + config.recompute.whole(len(layers)) / len(layers))
    by_op = {Op.FORWARD: forward, Op.BACKWARD: backward, Op.BACKWARD_INPUT: backward}
    return by_op.get(op, 0.0)


def _context_bytes(config: RunConfig, cost: StageCost, op: Op) -> float:
    """Return the bytes that a rank sends to the ranks that share its sequences in an instruction.

    Each layer sends the own keys and values to all others, forward and backward, and their
    gradients, in FP32, once more: by ring they go all the way round, and by gather they are summed
    where they belong.
    """
    parallel = config.parallel
    train = config.train
    model = config.model
    if parallel.context == 1:
        return 0.0
    heads = max(1, model.kv_heads // parallel.tensor)
    local_length = train.seq_length // parallel.context
    # elements of keys and values
    elements = 2 * heads * model.head_dim * train.micro_batch * local_length
    others = parallel.context - 1
    of_layer = elements * config.plan.attention.itemsize * others
    layers = len(cost.cut.layers)
    gradients = elements * 4 * (parallel.context if config.engine_options.ring else others)
    recomputed = config.recompute.whole(layers)
    if "attention" in config.recompute.modules:
        recomputed += layers
    forward = layers * of_layer
    backward = (layers + recomputed) * of_layer + layers * gradients
    by_op = {Op.FORWARD: forward, Op.BACKWARD: backward, Op.BACKWARD_INPUT: backward}
    return by_op.get(op, 0.0)


def _replica_bytes(config: RunConfig, gradients: float, weights: float) -> float:
    """Return the bytes that a rank sends to its replicas in a step: gradients, and under ZeRO-1
    weights.

    gradients, weights: the bytes that the rank holds.
    """
    parallel = config.parallel
    plan = config.plan
    travelling = gradients * plan.reduce.itemsize / plan.gradients.itemsize
    of_experts, others = _elements(config)
    experts = of_experts / (of_experts + others)
    # by part of the weights: their share, its replicas, and those among them that share state
    parts = (
        (1 - experts, parallel.copies, sharding_of(config).zero),
        (experts, expert_replicas(parallel), replicas_sharing_state(parallel)),
    )
    sent = 0.0
    for part, copies, sharers in parts:
        transfers = 1 if sharers == copies else 2  # a reduce-scatter, or an all-reduce
        of_gradients = transfers * (1 - 1 / copies) * travelling
        sent += part * (of_gradients + (1 - 1 / sharers) * weights)
    return sent


def _elements(config: RunConfig) -> tuple[float, float]:
    """Return the elements of experts and of other weights that the ranks of a pipeline hold
    together."""
    parallel = config.parallel
    model = config.sized_model
    return (
        model.expert_parameters / (parallel.expert * expert_slices(parallel)),
        (model.num_parameters - model.expert_parameters) / parallel.tensor,
    )
