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

import torch

from megaprec.comm.axis import AXES
from models.estimate.flops import StageCost
from models.estimate.memory import message_bytes
from models.estimate.storage import Device
from parallel.pipeline.builders import default_chunks
from parallel.pipeline.formulas import TEXTBOOK, Sizes
from parallel.pipeline.instructions import SENDS, Instruction, Op
from parallel.pipeline.simulation import simulate
from tools.analysis.planning.memory import PlannedPasses, RankBytes, sharding_of
from tools.config.expert_ranks import expert_replicas, expert_slices, replicas_sharing_state
from tools.config.run_file import RunConfig
from tools.config.schedules import pipeline_schedule

# Forward passes. Of a longer schedule only the first micro-batches are simulated, for a search
# simulates the schedule of each layout.
MOST_SIMULATED = 1024


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
    tp: of communication in the passes of a rank, over cp and to experts too.
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
    # Once the pipeline is full a schedule repeats itself: `period` further micro-batches tell how
    # long each takes. With these counts a long step is foretold to 2 % in every kind of schedule
    # (tests/planning).
    if parallel.schedule in ("gpipe", "1f1b"):
        until_regular = pipeline + 4
        period = 8
    else:
        # interleaved schedules take micro-batches in groups of as many as there are ranks
        until_regular = 2 * pipeline
        period = pipeline
    has_few_passes = pipeline * microbatches <= MOST_SIMULATED
    is_short = has_few_passes or microbatches <= until_regular + period
    if parallel.schedule_file or is_short:
        schedule = config.schedule
        costs = config.stage_costs(config.sized_model, schedule.rank_of_stage)
        return PlannedPasses(schedule, costs)

    placement = pipeline_schedule(parallel, until_regular).rank_of_stage
    costs = config.stage_costs(config.sized_model, placement)

    def flops(instruction: Instruction) -> float:
        return costs[instruction.stage].flops(instruction)

    schedule = pipeline_schedule(parallel, until_regular, flops)
    longer = pipeline_schedule(parallel, until_regular + period, flops)
    return PlannedPasses(schedule, costs, microbatches - until_regular, longer)


class _InstructionCosts:
    """The times and bytes of a run's instructions.

    costs: by stage.
    flops_per_second: of the ranks that share a micro-batch in a stage.
    links: bytes a second, by axis.
    message_bytes: of an activation or its gradient that a stage sends to the next.
    """

    def __init__(self, config: RunConfig, costs: Sequence[StageCost], assumed: Assumptions) -> None:
        self.config = config
        self.costs = costs
        parallel = config.parallel
        ranks = parallel.tensor * parallel.context
        self.flops_per_second = ranks * assumed.tflops * 1e12 * assumed.efficiency
        self.links = {axis: _link(config, axis, assumed) * 1e9 for axis in (*AXES, "experts")}
        self.message_bytes = message_bytes(
            config.sized_model,
            config.plan,
            config.engine_options,
            parallel.tensor,
            parallel.context,
        )

    def sent_bytes(self, instruction: Instruction) -> tuple[float, float, float]:
        """Return the bytes that a rank sends in a computation: over tp, over cp, and to experts."""
        cost = self.costs[instruction.stage]
        return (
            _tensor_bytes(self.config, cost, instruction.op),
            _context_bytes(self.config, cost, instruction.op),
            _expert_bytes(self.config, cost, instruction.op),
        )

    def compute_seconds(self, instruction: Instruction) -> float:
        """Return the time of an instruction's matrix products."""
        return self.costs[instruction.stage].flops(instruction) / self.flops_per_second

    def traffic_seconds(self, instruction: Instruction) -> float:
        """Return the time of an instruction's communication with ranks of the same stage."""
        tensor, context, experts = self.sent_bytes(instruction)
        links = self.links
        return tensor / links["tp"] + context / links["cp"] + experts / links["experts"]

    def seconds(self, instruction: Instruction) -> float:
        """Return the time of an instruction."""
        if instruction.op in SENDS:
            return self.message_bytes / self.links["pp"]
        return self.compute_seconds(instruction) + self.traffic_seconds(instruction)


def predict(
    config: RunConfig, passes: PlannedPasses, ranks: Sequence[RankBytes], assumed: Assumptions
) -> Prediction:
    """Return the predicted times of a step. ranks: the bytes of each pipeline rank."""
    schedule = passes.schedule
    costs = _InstructionCosts(config, passes.costs, assumed)
    spans = simulate(schedule, costs.seconds)
    num_ranks = len(schedule.programs)
    # by rank, over the passes of the schedule
    compute_seconds = [0.0] * num_ranks
    traffic_seconds = [0.0] * num_ranks
    tensor_bytes = [0.0] * num_ranks
    context_bytes = [0.0] * num_ranks
    expert_bytes = [0.0] * num_ranks
    for span in spans:
        instruction = span.instruction
        if instruction.op in SENDS:
            continue
        tensor, context, experts = costs.sent_bytes(instruction)
        compute_seconds[span.rank] += costs.compute_seconds(instruction)
        traffic_seconds[span.rank] += costs.traffic_seconds(instruction)
        tensor_bytes[span.rank] += tensor
        context_bytes[span.rank] += context
        expert_bytes[span.rank] += experts

    # all micro-batches of the step over those simulated: products and traffic grow with them
    repeats = 1 + passes.more / schedule.microbatches
    # the time does not, for filling the pipeline is a part of it: each further micro-batch takes as
    # long as one of those by which `longer` is longer
    passes_seconds = max(span.end for span in spans)
    if passes.longer:
        longer_seconds = max(span.end for span in simulate(passes.longer, costs.seconds))
        added_microbatches = passes.longer.microbatches - schedule.microbatches
        added_seconds = longer_seconds - passes_seconds
        passes_seconds += passes.more * added_seconds / added_microbatches
    mean_compute = repeats * sum(compute_seconds) / num_ranks
    mean_traffic = repeats * sum(traffic_seconds) / num_ranks
    # an activation and a gradient of each micro-batch for each stage of a rank
    stages_per_rank = len(passes.costs) / num_ranks
    messages = 2 * costs.message_bytes * config.num_microbatches * stages_per_rank
    traffic = Traffic(
        tp=repeats * max(tensor_bytes),
        pp=messages if num_ranks > 1 else 0.0,
        dp=max(
            _replica_bytes(config, _whole_gradients(config, rank.gradients), rank.weights)
            for rank in ranks
        ),
        experts=repeats * max(expert_bytes),
        cp=repeats * max(context_bytes),
    )
    reduction = traffic.dp / costs.links["dp"]
    busy_seconds = mean_compute + mean_traffic
    return Prediction(
        seconds=_step_seconds(config, assumed, passes_seconds, reduction),
        compute=mean_compute,
        tp=mean_traffic,
        dp=reduction,
        idle=max(0.0, 1 - busy_seconds / passes_seconds),
        traffic=traffic,
    )


def _step_seconds(
    config: RunConfig, assumed: Assumptions, passes_seconds: float, reduction_seconds: float
) -> float:
    """Return the time of a step, in which replicas communicate during the passes or after them."""
    if config.parallel.overlaps(assumed.device):
        return max(passes_seconds, reduction_seconds)
    return passes_seconds + reduction_seconds


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
    instruction_costs = _InstructionCosts(config, costs, assumed)

    def seconds_of_rank(op: Op) -> float:
        """Return the time that the mean rank needs for an operation of a micro-batch."""
        instructions = [Instruction(op, cost.cut.stage) for cost in costs]
        return sum(map(instruction_costs.seconds, instructions)) / pipeline

    sizes = Sizes(
        pipeline,
        config.num_microbatches,
        stages // pipeline,
        F=seconds_of_rank(Op.FORWARD),
        I=seconds_of_rank(Op.BACKWARD_INPUT),
        W=seconds_of_rank(Op.BACKWARD_WEIGHT),
    )
    bubble = TEXTBOOK[parallel.schedule].bubble.value(sizes)
    passes_seconds = sizes.work * (1 + bubble)
    elements = sum(_elements(config)) / pipeline
    # with FP8 some weights may travel as codes of a byte: this is a lower bound
    weights = elements * (1 if plan.fp8 else plan.parameters.itemsize)
    sent = _replica_bytes(config, elements * plan.gradients.itemsize, weights)
    reduction_seconds = sent / instruction_costs.links["dp"]
    return _step_seconds(config, assumed, passes_seconds, reduction_seconds)


def _link(config: RunConfig, axis: str, assumed: Assumptions) -> float:
    """Return the GB/s between neighbours of an axis. Ranks of a mesh are numbered along tp, cp, dp
    and pp."""
    parallel = config.parallel
    sequence_ranks = parallel.tensor * parallel.context
    # how many neighbouring ranks hold all ranks of an axis
    extents = {
        "tp": parallel.tensor,
        "cp": sequence_ranks,
        "dp": sequence_ranks * parallel.data,
        "pp": config.world_size,
        "experts": parallel.expert * expert_slices(parallel),
    }
    return assumed.fast if extents[axis] <= assumed.machine else assumed.slow


def _bytes_of(op: Op, forward: float, input_gradient: float, weight_gradient: float = 0.0) -> float:
    """Return the bytes of one computation, of those of the three parts of a step; 0 of any other
    instruction."""
    by_op = {
        Op.FORWARD: forward,
        Op.BACKWARD: input_gradient + weight_gradient,
        Op.BACKWARD_INPUT: input_gradient,
        Op.BACKWARD_WEIGHT: weight_gradient,
    }
    return by_op.get(op, 0.0)


def _local_tokens(config: RunConfig) -> int:
    """Return the tokens of a micro-batch that a context-parallel rank has."""
    train = config.train
    return train.seq_length // config.parallel.context * train.micro_batch


def _tensor_bytes(config: RunConfig, cost: StageCost, op: Op) -> float:
    """Return the bytes that a rank sends to its tensor-parallel ranks in an instruction.

    A block gathers or copies its input and sums or scatters its output, each in both directions;
    with sequence parallelism inputs are gathered again for the weight gradients, but not those of
    experts. Whole experts alone have nothing to sum under sequence parallelism. An all-reduce is a
    reduce-scatter and an all-gather.
    """
    parallel = config.parallel
    model = config.model
    cut = cost.cut
    layers = len(cut.layers)
    # a gather or a scatter of one activation
    activation = _local_tokens(config) * model.hidden * config.plan.compute.itemsize
    transfer = activation * (1 - 1 / parallel.tensor)
    # after the embedding, and for the input gradient of the head
    at_ends = (1 if parallel.sequence else 2) * transfer
    expert_layers = _expert_layers(config, cost)
    # layers that sum nothing over tp
    unsummed = 0
    if parallel.sequence and expert_slices(parallel) == 1 and not model.shared_experts:
        unsummed = expert_layers
    # of each of a layer's two blocks a gather and a scatter, or an all-reduce, which is both
    forward = (4 * layers - unsummed) * transfer
    recomputed = config.recompute.count_whole_layers(layers) / layers
    # the input gradient reverses the forward's transfers; a recomputed layer makes them again
    input_gradient = (
        forward * (1 + recomputed)
        + cut.last * at_ends
        + (cut.first and parallel.sequence) * transfer
    )
    weight_gradient = 0.0
    if parallel.sequence:
        weight_gradient = (2 * layers - expert_layers + cut.last) * transfer
    # last, for a recomputed layer repeats neither the embedding's transfer nor the head's
    forward += cut.first * at_ends + (cut.last and parallel.sequence) * transfer
    return _bytes_of(op, forward, input_gradient, weight_gradient)


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
    model = config.model
    if parallel.expert == 1:
        return 0.0
    layers = len(cost.cut.layers)
    tokens = _local_tokens(config) * expert_slices(parallel) / parallel.tensor
    rows = tokens * model.experts_per_token * _expert_layers(config, cost)
    row_bytes = model.hidden * config.plan.compute.itemsize
    # there and back, but for the experts of the rank itself
    forward = 2 * rows * row_bytes * (1 - 1 / parallel.expert)
    recomputed = config.recompute.count_whole_layers(layers) / layers
    return _bytes_of(op, forward, forward * (1 + recomputed))


def _context_bytes(config: RunConfig, cost: StageCost, op: Op) -> float:
    """Return the bytes that a rank sends to the ranks that share its sequences in an instruction.

    Each layer sends the own keys and values to all others, forward and backward, and their
    gradients, in FP32, once more: by ring they go all the way round, and by gather they are summed
    where they belong.
    """
    parallel = config.parallel
    model = config.model
    if parallel.context == 1:
        return 0.0
    layers = len(cost.cut.layers)
    others = parallel.context - 1
    heads = max(1, model.kv_heads // parallel.tensor)
    # elements of keys and values
    elements = 2 * heads * model.head_dim * _local_tokens(config)
    of_layer = elements * config.plan.attention.itemsize * others
    # in a ring a gradient takes one hop more than its keys, back to their rank
    gradient_hops = parallel.context if config.engine_options.ring else others
    gradients_of_layer = elements * torch.float32.itemsize * gradient_hops
    recomputed = config.recompute.count_whole_layers(layers)
    if "attention" in config.recompute.modules:
        recomputed += layers
    input_gradient = (layers + recomputed) * of_layer + layers * gradients_of_layer
    return _bytes_of(op, layers * of_layer, input_gradient)


def _whole_gradients(config: RunConfig, held: float) -> float:
    """Return the bytes of the gradients of a rank's parameters. held: those that it keeps."""
    if not config.parallel.shards_gradients:
        return held
    expert_elements, other_elements = _elements(config)
    of_experts = expert_elements / replicas_sharing_state(config.parallel)
    kept_elements = of_experts + other_elements / sharding_of(config).zero
    return held * (expert_elements + other_elements) / kept_elements


def _replica_bytes(config: RunConfig, gradients: float, weights: float) -> float:
    """Return the bytes that a rank sends to its replicas in a step: gradients, under ZeRO-2 of each
    micro-batch, and under ZeRO-1 weights.

    gradients, weights: the bytes of the rank's parameters.
    """
    parallel = config.parallel
    plan = config.plan
    # gradients are held in one dtype and may travel in another
    travelling = gradients * plan.reduce.itemsize / plan.gradients.itemsize
    if parallel.shards_gradients:
        travelling *= config.num_microbatches
    expert_elements, other_elements = _elements(config)
    expert_share = expert_elements / (expert_elements + other_elements)
    # by part of the weights: their share, its replicas, and those among them that share state
    parts = (
        (1 - expert_share, parallel.copies, sharding_of(config).zero),
        (expert_share, expert_replicas(parallel), replicas_sharing_state(parallel)),
    )
    sent = 0.0
    for share, replicas, sharers in parts:
        transfers = 1 if sharers == replicas else 2  # a reduce-scatter, or an all-reduce
        of_gradients = transfers * (1 - 1 / replicas) * travelling
        sent += share * (of_gradients + (1 - 1 / sharers) * weights)
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
