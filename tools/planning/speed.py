"""A prediction of the time of a step, from FLOPs, traffic and the schedule. It is not a measurement.

Matrix products run at a fraction of the device's peak; nothing else takes time but messages. An axis whose ranks are in
one machine has fast links, any other slow ones. Traffic of tensor-parallel ranks is added to the passes, messages
between stages are sent while ranks compute, and replicas communicate at the end of the step, or during the passes if
parallel.overlap is on. The update, data, evaluation and saves are not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megaprec.comm.axis import AXES
from models.estimate.flops import StageCost
from models.estimate.memory import message_bytes
from parallel.pipeline.builders import default_chunks
from parallel.pipeline.formulas import TEXTBOOK, Sizes
from parallel.pipeline.instructions import SENDS, Instruction, Op
from parallel.pipeline.simulation import simulate
from tools.config.run_file import RunConfig
from tools.config.schedules import pipeline_schedule
from tools.planning.memory import Passes, RankBytes, sharding_of

MANY = 1024  # forward passes; of a longer schedule only the first micro-batches are simulated


@dataclass(frozen=True)
class Assumptions:
    """Speeds that a prediction rests on.

    tflops: a rank's peak. efficiency: the fraction of it that matrix products reach. fast, slow: GB/s in each direction
    within a machine and between machines. machine: ranks of a machine.
    """

    tflops: float
    efficiency: float
    fast: float
    slow: float
    machine: int


@dataclass(frozen=True)
class Traffic:
    """Bytes that the busiest rank sends in a step, by axis."""

    tp: float
    pp: float
    dp: float


@dataclass(frozen=True)
class Prediction:
    """The predicted times of one step, in seconds.

    seconds: of the step. compute: of the matrix products of a rank, on average. tp, dp: of communication in the passes
    of a rank, and at the end of the step. idle: the fraction of the passes that a rank waits, on average.
    """

    seconds: float
    compute: float
    tp: float
    dp: float
    idle: float
    traffic: Traffic


def passes_of(config: RunConfig) -> Passes:
    """Return the passes of a step; of many micro-batches only as many as the schedule needs to become regular."""
    p, all_of_them = config.parallel, config.num_microbatches
    simple = p.schedule in ("gpipe", "1f1b")  # they repeat themselves once the pipeline is full, the others later
    few, further = (p.pipeline + 4, 8) if simple else (2 * p.pipeline, p.pipeline)
    if p.schedule_file or p.pipeline * all_of_them <= MANY or all_of_them <= few + further:
        made = config.schedule
        return Passes(made, config.stage_costs(config.sized_model, made.rank_of_stage))
    placed = pipeline_schedule(p, few).rank_of_stage
    costs = config.stage_costs(config.sized_model, placed)
    made, longer = (pipeline_schedule(p, n, lambda i: costs[i.stage].of(i)) for n in (few, few + further))
    return Passes(made, costs, all_of_them - few, longer)


def predict(config: RunConfig, passes: Passes, ranks: Sequence[RankBytes], assumed: Assumptions) -> Prediction:
    """Return the predicted times of a step. ranks: the bytes of each pipeline rank."""
    made, costs, p = passes.schedule, passes.costs, config.parallel
    speed = _speed(config, assumed)
    links = {axis: _link(config, axis, assumed) * 1e9 for axis in AXES}
    message = message_bytes(
        config.sized_model, config.plan, config.train.seq_length, config.train.micro_batch, p.tensor, p.sequence
    )

    def computes(i: Instruction) -> float:
        return costs[i.stage].of(i) / speed

    def talks(i: Instruction) -> float:
        return _tensor_bytes(config, costs[i.stage], i.op) / links["tp"]

    def takes(i: Instruction) -> float:
        return message / links["pp"] if i.op in SENDS else computes(i) + talks(i)

    spans = simulate(made, takes)
    count = len(made.programs)
    work, talk = [0.0] * count, [0.0] * count
    for span in spans:
        if span.instruction.op not in SENDS:
            work[span.rank] += computes(span.instruction)
            talk[span.rank] += talks(span.instruction)
    times, length = 1 + passes.more / made.microbatches, max(span.end for span in spans)
    if passes.longer:
        end = max(span.end for span in simulate(passes.longer, takes))
        length += passes.more * (end - length) / (passes.longer.microbatches - made.microbatches)
    mean_work, mean_talk = times * sum(work) / count, times * sum(talk) / count
    traffic = Traffic(
        times * max(talk) * links["tp"],
        2 * message * config.num_microbatches * len(costs) / count if count > 1 else 0.0,
        max(_replica_bytes(config, one) for one in ranks),
    )
    end = traffic.dp / links["dp"]
    return Prediction(
        max(length, end) if p.overlap else length + end,
        mean_work,
        mean_talk,
        end,
        max(0.0, 1 - (mean_work + mean_talk) / length),
        traffic,
    )


def least_seconds(config: RunConfig, assumed: Assumptions) -> float:
    """Return the time that a step takes at least: with equal stages, and without messages between stages or replicas.

    Raises KeyError for a schedule from a file.
    """
    p = config.parallel
    stages = p.pipeline * (p.chunks or default_chunks(p.schedule))
    costs = config.stage_costs(config.sized_model, range(stages))
    rates = {"forward": Op.FORWARD, "input": Op.BACKWARD_INPUT, "weight": Op.BACKWARD_WEIGHT}
    link = _link(config, "tp", assumed) * 1e9
    F, I, W = (  # noqa: E741  # as in the formulas
        sum(getattr(c, name) / _speed(config, assumed) + _tensor_bytes(config, c, op) / link for c in costs)
        / p.pipeline
        for name, op in rates.items()
    )
    sizes = Sizes(p.pipeline, config.num_microbatches, stages // p.pipeline, F, I, W)
    return sizes.work * (1 + TEXTBOOK[p.schedule].bubble.value(sizes))


def _speed(config: RunConfig, assumed: Assumptions) -> float:
    """Return the FLOPs that the tensor-parallel ranks of a stage compute in a second."""
    return config.parallel.tensor * assumed.tflops * 1e12 * assumed.efficiency


def _link(config: RunConfig, axis: str, assumed: Assumptions) -> float:
    """Return the GB/s between neighbours of an axis. Ranks of a mesh are numbered along tp, then dp, then pp."""
    p = config.parallel
    spans = {"tp": p.tensor, "dp": p.tensor * p.data, "pp": config.world_size}
    return assumed.fast if spans[axis] <= assumed.machine else assumed.slow


def _tensor_bytes(config: RunConfig, cost: StageCost, op: Op) -> float:
    """Return the bytes that a rank sends to its tensor-parallel ranks in an instruction.

    A block gathers or copies its input and sums or scatters its output twice, in each direction; with sequence
    parallelism inputs are gathered again for the weight gradients. An all-reduce is a reduce-scatter and an all-gather.
    """
    p, t, layers = config.parallel, config.train, len(cost.cut.layers)
    one = t.seq_length * t.micro_batch * config.model.hidden * config.plan.compute.itemsize * (1 - 1 / p.tensor)
    ends = (1 if p.sequence else 2) * one
    forward = 4 * layers * one + cost.cut.first * ends + (cost.cut.last and p.sequence) * one
    of_input = 4 * (layers + config.recompute.whole(layers)) * one + cost.cut.last * ends
    of_weight = (2 * layers + cost.cut.last) * one if p.sequence else 0.0
    sums = {Op.FORWARD: forward, Op.BACKWARD: of_input + of_weight}
    sums |= {Op.BACKWARD_INPUT: of_input, Op.BACKWARD_WEIGHT: of_weight}
    return sums.get(op, 0.0)


def _replica_bytes(config: RunConfig, rank: RankBytes) -> float:
    """Return the bytes that a rank sends to its replicas in a step: gradients, and under ZeRO-1 weights."""
    sharding, plan = sharding_of(config), config.plan
    travels = rank.gradients * plan.reduce.itemsize / plan.gradients.itemsize
    summed = 1 - 1 / sharding.dp
    whole = 1 if sharding.zero == sharding.dp else 2  # a reduce-scatter, or an all-reduce
    return whole * summed * travels + (1 - 1 / sharding.zero) * rank.weights
