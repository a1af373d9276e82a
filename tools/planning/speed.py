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
from tools.config.expert_ranks import replicas, sharing, slices
from tools.config.run_file import RunConfig
from tools.config.schedules import pipeline_schedule
from tools.planning.memory import Passes, RankBytes, sharding_of

MANY = 1024  # forward passes; of a longer schedule only the first micro-batches are simulated


@dataclass(frozen=True)
class Assumptions:
    """Speeds that a prediction rests on.

    tflops: a rank's peak. efficiency: the fraction of it that matrix products reach. fast, slow:
    GB/s in each direction within a machine and between machines. machine: ranks of a machine.
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
    """Bytes that the busiest rank sends in a step, by axis. experts: of tokens to experts on other
    ranks, and back."""

    tp: float
    pp: float
    dp: float
    experts: float = 0.0
    cp: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """The predicted times of one step, in seconds.

    seconds: of the step. compute: of the matrix products of a rank, on average. tp, dp: of
    communication in the passes of a rank (over cp too), and at the end of the step. idle: the
    fraction of the passes that a rank waits, on average.
    """

    seconds: float
    compute: float
    tp: float
    dp: float
    idle: float
    traffic: Traffic


def passes_of(config: RunConfig) -> Passes:
    """Return the passes of a step; of many micro-batches only as many as the schedule needs to
    become regular."""
    p = config.parallel
    all_of_them = config.num_microbatches
    # they repeat themselves once the pipeline is full, the others later
    simple = p.schedule in (
        "gpipe",
        "1f1b",
    )
    few, further = (p.pipeline + 4, 8) if simple else (2 * p.pipeline, p.pipeline)
    if p.schedule_file or p.pipeline * all_of_them <= MANY or all_of_them <= few + further:
        made = config.schedule
        return Passes(made, config.stage_costs(config.sized_model, made.rank_of_stage))
    placed = pipeline_schedule(p, few).rank_of_stage
    costs = config.stage_costs(config.sized_model, placed)
    made, longer = (
        pipeline_schedule(p, n, lambda i: costs[i.stage].of(i)) for n in (few, few + further)
    )
    return Passes(made, costs, all_of_them - few, longer)


def predict(
    config: RunConfig, passes: Passes, ranks: Sequence[RankBytes], assumed: Assumptions
) -> Prediction:
    """Return the predicted times of a step. ranks: the bytes of each pipeline rank."""
    made = passes.schedule
    costs = passes.costs
    p = config.parallel
    speed = _speed(config, assumed)
    links = {axis: _link(config, axis, assumed) * 1e9 for axis in (*AXES, "experts")}
    message = message_bytes(
        config.sized_model, config.plan, config.engine_options, p.tensor, p.context
    )

    def computes(i: Instruction) -> float:
        return costs[i.stage].of(i) / speed

    def travels(i: Instruction) -> float:
        return _expert_bytes(config, costs[i.stage], i.op)

    def talks(i: Instruction) -> float:
        own = _tensor_bytes(config, costs[i.stage], i.op)
        around = _context_bytes(config, costs[i.stage], i.op)
        return own / links["tp"] + around / links["cp"] + travels(i) / links["experts"]

    def takes(i: Instruction) -> float:
        return message / links["pp"] if i.op in SENDS else computes(i) + talks(i)

    spans = simulate(made, takes)
    count = len(made.programs)
    work, talk, sent, around, far = ([0.0] * count for _ in range(5))
    for span in spans:
        if (i := span.instruction).op not in SENDS:
            work[span.rank] += computes(i)
            talk[span.rank] += talks(i)
            sent[span.rank] += _tensor_bytes(config, costs[i.stage], i.op)
            around[span.rank] += _context_bytes(config, costs[i.stage], i.op)
            far[span.rank] += travels(i)
    times = 1 + passes.more / made.microbatches
    length = max(span.end for span in spans)
    if passes.longer:
        end = max(span.end for span in simulate(passes.longer, takes))
        length += passes.more * (end - length) / (passes.longer.microbatches - made.microbatches)
    mean_work = times * sum(work) / count
    mean_talk = times * sum(talk) / count
    traffic = Traffic(
        times * max(sent),
        2 * message * config.num_microbatches * len(costs) / count if count > 1 else 0.0,
        max(_replica_bytes(config, one.gradients, one.weights) for one in ranks),
        times * max(far),
        times * max(around),
    )
    end = traffic.dp / links["dp"]
    return Prediction(
        max(length, end) if p.overlaps(assumed.device) else length + end,
        mean_work,
        mean_talk,
        end,
        max(0.0, 1 - (mean_work + mean_talk) / length),
        traffic,
    )


def least_seconds(config: RunConfig, assumed: Assumptions) -> float:
    """Return the time that a step takes at least: with equal stages and ranks, and without messages
    between stages.

    Raises KeyError for a schedule from a file.
    """
    p = config.parallel
    plan = config.plan
    stages = p.pipeline * (p.chunks or default_chunks(p.schedule))
    costs = config.stage_costs(config.sized_model, range(stages))
    rates = {"forward": Op.FORWARD, "input": Op.BACKWARD_INPUT, "weight": Op.BACKWARD_WEIGHT}
    link, around, far = (_link(config, axis, assumed) * 1e9 for axis in ("tp", "cp", "experts"))
    F, I, W = (  # noqa: E741  # as in the formulas
        sum(
            getattr(c, name) / _speed(config, assumed)
            + _tensor_bytes(config, c, op) / link
            + _context_bytes(config, c, op) / around
            + _expert_bytes(config, c, op) / far
            for c in costs
        )
        / p.pipeline
        for name, op in rates.items()
    )
    sizes = Sizes(p.pipeline, config.num_microbatches, stages // p.pipeline, F, I, W)
    passes = sizes.work * (1 + TEXTBOOK[p.schedule].bubble.value(sizes))
    elements = sum(_elements(config)) / p.pipeline
    weights = elements * (1 if plan.fp8 else plan.parameters.itemsize)
    end = _replica_bytes(config, elements * plan.gradients.itemsize, weights) / (
        _link(config, "dp", assumed) * 1e9
    )
    return max(passes, end) if p.overlaps(assumed.device) else passes + end


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
    p = config.parallel
    shared = p.tensor * p.context
    spans = {"tp": p.tensor, "cp": shared, "dp": shared * p.data, "pp": config.world_size}
    spans["experts"] = p.expert * slices(p)
    return assumed.fast if spans[axis] <= assumed.machine else assumed.slow


def _tensor_bytes(config: RunConfig, cost: StageCost, op: Op) -> float:
    """Return the bytes that a rank sends to its tensor-parallel ranks in an instruction.

    A block gathers or copies its input and sums or scatters its output, each in both directions;
    with sequence parallelism inputs are gathered again for the weight gradients, but not those of
    experts. Whole experts alone have nothing to sum under sequence parallelism. An all-reduce is a
    reduce-scatter and an all-gather.
    """
    p = config.parallel
    t = config.train
    model = config.model
    layers = cost.cut.layers
    one = (
        t.seq_length
        // p.context
        * t.micro_batch
        * model.hidden
        * config.plan.compute.itemsize
        * (1 - 1 / p.tensor)
    )
    ends = (1 if p.sequence else 2) * one
    many = _expert_layers(config, cost)
    alone = many if p.sequence and slices(p) == 1 and not model.shared_experts else 0
    forward = (4 * len(layers) - alone) * one
    again = config.recompute.whole(len(layers)) / len(layers)
    of_input = forward * (1 + again) + cost.cut.last * ends + (cost.cut.first and p.sequence) * one
    of_weight = (2 * len(layers) - many + cost.cut.last) * one if p.sequence else 0.0
    forward += cost.cut.first * ends + (cost.cut.last and p.sequence) * one
    sums = {Op.FORWARD: forward, Op.BACKWARD: of_input + of_weight}
    sums |= {Op.BACKWARD_INPUT: of_input, Op.BACKWARD_WEIGHT: of_weight}
    return sums.get(op, 0.0)


def _expert_layers(config: RunConfig, cost: StageCost) -> int:
    """Return how many layers of a stage have experts."""
    if config.model.experts:
        return sum(n not in config.model.dense_layers for n in cost.cut.layers)
    return 0


def _expert_bytes(config: RunConfig, cost: StageCost, op: Op) -> float:
    """Return the bytes that a rank sends to the ranks of other experts in an instruction, if all
    get as many tokens.

    Rows go to their experts and results come back, in the forward pass and for the input gradient.
    """
    p = config.parallel
    t = config.train
    model = config.model
    layers = cost.cut.layers
    if p.expert == 1:
        return 0.0
    tokens = t.seq_length // p.context * t.micro_batch * slices(p) / p.tensor
    row = model.hidden * config.plan.compute.itemsize
    one = (
        2
        * _expert_layers(config, cost)
        * tokens
        * model.experts_per_token
        * row
        * (1 - 1 / p.expert)
    )
    backward = one * (1 + config.recompute.whole(len(layers)) / len(layers))
    return {Op.FORWARD: one, Op.BACKWARD: backward, Op.BACKWARD_INPUT: backward}.get(op, 0.0)


def _context_bytes(config: RunConfig, cost: StageCost, op: Op) -> float:
    """Return the bytes that a rank sends to the ranks that share its sequences in an instruction.

    Each layer sends the own keys and values to all others, forward and backward, and their
    gradients, in FP32, once
    more: by ring they go all the way round, and by gather they are summed where they belong.
    """
    p = config.parallel
    t = config.train
    model = config.model
    if p.context == 1:
        return 0.0
    heads = max(1, model.kv_heads // p.tensor)
    # elements of keys and values
    one = 2 * heads * model.head_dim * t.micro_batch * (t.seq_length // p.context)
    parts = one * config.plan.attention.itemsize * (p.context - 1)
    layers = len(cost.cut.layers)
    gradients = one * 4 * (p.context if config.engine_options.ring else p.context - 1)
    again = config.recompute.whole(layers) + layers * ("attention" in config.recompute.modules)
    backward = (layers + again) * parts + layers * gradients
    return {Op.FORWARD: layers * parts, Op.BACKWARD: backward, Op.BACKWARD_INPUT: backward}.get(
        op, 0.0
    )


def _replica_bytes(config: RunConfig, gradients: float, weights: float) -> float:
    """Return the bytes that a rank sends to its replicas in a step: gradients, and under ZeRO-1
    weights.

    gradients, weights: the bytes that the rank holds.
    """
    p = config.parallel
    sharding = sharding_of(config)
    plan = config.plan
    travels = gradients * plan.reduce.itemsize / plan.gradients.itemsize
    of_experts, others = _elements(config)
    experts = of_experts / (of_experts + others)
    sent = 0.0
    for part, every, shared in (
        (1 - experts, p.copies, sharding.zero),
        (experts, replicas(p), sharing(p)),
    ):
        whole = 1 if shared == every else 2  # a reduce-scatter, or an all-reduce
        sent += part * (whole * (1 - 1 / every) * travels + (1 - 1 / shared) * weights)
    return sent


def _elements(config: RunConfig) -> tuple[float, float]:
    """Return the elements of experts and of other weights that the ranks of a pipeline hold
    together."""
    p = config.parallel
    model = config.sized_model
    return (
        model.expert_parameters / (p.expert * slices(p)),
        (model.num_parameters - model.expert_parameters) / p.tensor,
    )
