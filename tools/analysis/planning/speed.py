"""A prediction of the time of a step, by kind and from the schedule. It is not a measurement.

The instructions of a pipeline rank take the times of their matrix products, of attention's own
products, of operators between them, of the communication that ranks of a stage wait for, and of
launches and latency (`tools.analysis.planning.seconds`). Messages between stages are sent while
ranks compute. The schedule is simulated with these times. After the passes a step waits for a part
of the replicas' communication and updates its weights. Data, evaluation and saves are not counted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from models.decoder.stages import Cut
from models.estimate.flops import StageCost, stage_costs
from models.estimate.memory import message_bytes
from parallel.pipeline.formulas import FormulaSizes
from parallel.pipeline.instructions import SENDS, Instruction, Op
from parallel.pipeline.kinds import KINDS
from parallel.pipeline.simulation import Span, simulate
from tools.analysis.planning.memory import PlannedPasses, RankBytes
from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.analysis.planning.seconds.attention import attention_seconds
from tools.analysis.planning.seconds.elementwise import elementwise_seconds
from tools.analysis.planning.seconds.links import Link, axis_links
from tools.analysis.planning.seconds.products import product_seconds
from tools.analysis.planning.seconds.replicas import exposed_seconds, replica_seconds
from tools.analysis.planning.seconds.traffic import (
    context_bytes,
    elements_of_pipeline,
    expert_bytes,
    replica_bytes,
    tensor_bytes,
    whole_gradients,
    whole_weights,
)
from tools.analysis.planning.seconds.update import update_seconds
from tools.config.rules.expert_ranks import expert_slices
from tools.config.run_file import RunConfig
from tools.config.tables.schedules import pipeline_schedule

# Forward passes. Of a longer schedule only the first micro-batches are simulated, for a search
# simulates the schedule of each layout.
MOST_SIMULATED = 1024
BLOCKS = 2  # of a layer: attention and a feed-forward
_COMPUTATIONS = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


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
    """The predicted times of one step, in seconds; those of the passes are of a rank, on average.

    seconds: of the step: the kinds below but `dp`, and waiting for other stages.
    compute: of products with weights.
    attention: of attention's own products.
    elementwise: of the operators between products.
    fixed: of launches that kernels wait for, and of the latency of each layer.
    tp: of communication in the passes that does not run beside products, over cp and to experts
        too.
    dp: of the replicas' communication by itself.
    exposed: the part of it that the step waits for.
    update: of the optimizer.
    idle: the fraction of the passes that a rank waits.
    """

    seconds: float
    compute: float
    attention: float
    elementwise: float
    fixed: float
    tp: float
    dp: float
    exposed: float
    update: float
    idle: float
    traffic: Traffic


@dataclass(frozen=True)
class InstructionSeconds:
    """The times of one instruction by kind, and the bytes that it sends.

    tensor_bytes, context_bytes, expert_bytes: over tp, over cp, and to experts.
    """

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    fixed: float = 0.0
    traffic: float = 0.0
    tensor_bytes: float = 0.0
    context_bytes: float = 0.0
    expert_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """The time of the instruction: its kinds one after the other."""
        return self.products + self.attention + self.elementwise + self.fixed + self.traffic

    def __add__(self, other: "InstructionSeconds") -> "InstructionSeconds":
        sums: dict[str, float] = {}
        for kind in fields(self):
            sums[kind.name] = getattr(self, kind.name) + getattr(other, kind.name)
        return InstructionSeconds(**sums)

    def times(self, factor: float) -> "InstructionSeconds":
        """Return as many of them."""
        scaled = {kind.name: factor * getattr(self, kind.name) for kind in fields(self)}
        return InstructionSeconds(**scaled)

    def launched_in(self, seconds: float) -> "InstructionSeconds":
        """Return the times of kernels that take so long to launch, one by one, while those before
        them run: a GPU waits for launches that take longer than its kernels."""
        running = self.seconds - self.fixed
        return replace(self, fixed=max(self.fixed, seconds - running))


NOTHING = InstructionSeconds()


def passes_of(config: RunConfig, all_passes: bool = False) -> PlannedPasses:
    """Return the passes of a step; of many micro-batches only as many as the schedule needs to
    become regular, unless all are wanted."""
    parallel = config.parallel
    microbatches = config.num_microbatches
    pipeline = parallel.pipeline
    # Once the pipeline is full a schedule repeats itself: `period` further micro-batches tell how
    # long each takes. With these counts a long step is foretold to 2 % in every kind of schedule
    # (tests/planning).
    kind = KINDS[parallel.schedule]
    until_regular = kind.until_regular(pipeline)
    period = kind.period(pipeline)
    has_few_passes = pipeline * microbatches <= MOST_SIMULATED
    is_short = has_few_passes or microbatches <= until_regular + period
    if all_passes or parallel.schedule_file or is_short:
        simulated = microbatches
    else:
        simulated = until_regular
    placement = pipeline_schedule(parallel, simulated, quiet=True).rank_of_stage
    costs = config.stage_costs(config.sized_model, placement)

    def flops(instruction: Instruction) -> float:
        return costs[instruction.stage].flops(instruction)

    schedule = pipeline_schedule(parallel, simulated, flops, quiet=True)
    more = microbatches - simulated
    if not more:
        return PlannedPasses(schedule, costs)
    longer = pipeline_schedule(parallel, simulated + period, flops, quiet=True)
    return PlannedPasses(schedule, costs, more, longer)


class _StepCosts:
    """The times of a run's instructions.

    links: by axis.
    message: seconds of an activation or its gradient on its way to the next stage.
    message_bytes: of it.
    """

    def __init__(self, config: RunConfig, costs: Sequence[StageCost], assumed: Assumptions) -> None:
        self.links = axis_links(config, assumed)
        parallel = config.parallel
        self.message_bytes = message_bytes(
            config.sized_model,
            config.plan,
            config.engine_options,
            parallel.tensor,
            parallel.context,
        )
        self.message = self.message_bytes / self.links["pp"].bandwidth
        # by stage; stages with as many layers of each kind are alike
        alike = dict[tuple[object, ...], dict[Op, InstructionSeconds]]()
        self.by_stage: list[dict[Op, InstructionSeconds]] = []
        for cost in costs:
            key = _kind_of_cost(cost)
            if key not in alike:
                alike[key] = _stage_seconds(config, cost, assumed, self.links)
            self.by_stage.append(alike[key])
        # a simulation asks for each instruction
        self._seconds: list[dict[Op, float]] = []
        for of_stage in self.by_stage:
            self._seconds.append({op: of_op.seconds for op, of_op in of_stage.items()})

    def seconds(self, instruction: Instruction) -> float:
        """Return the time of an instruction."""
        if instruction.op in SENDS:
            return self.message
        return self._seconds[instruction.stage].get(instruction.op, 0.0)


def _kind_of_cost(cost: StageCost) -> tuple[object, ...]:
    """Return a key that is equal for stages whose instructions take equally long."""
    layers = cost.cut.layers
    return (cost.cut.first, cost.cut.last, len(layers), cost.forward, cost.input, min(layers))


def _stage_seconds(
    config: RunConfig, cost: StageCost, assumed: Assumptions, links: dict[str, Link]
) -> dict[Op, InstructionSeconds]:
    """Return the times of a stage's computations of one micro-batch."""
    products = product_seconds(config, cost, assumed)
    attention_forward, attention_backward = attention_seconds(config, cost, assumed)
    elementwise_forward, elementwise_backward = elementwise_seconds(config, cost, assumed)
    # a layer of two blocks takes as long as two layers of one
    branches = config.model.over_layers(lambda kind: kind.branches, cost.cut.layers)
    layers = branches / BLOCKS
    recomputed = config.recompute.count_whole_layers(len(cost.cut.layers)) / len(cost.cut.layers)
    recomputed_layers = recomputed * layers
    # a compiled layer is launched in few calls
    is_compiled = config.compile_mode(assumed.device) == "block"
    launch = 0.0 if is_compiled else assumed.launch

    def instruction(
        op: Op, product: float, attention: float, elementwise: float, passes: float
    ) -> InstructionSeconds:
        """Return the times of one computation, in seconds.

        product, attention, elementwise: seconds of these operations.
        passes: as how many forward passes of a layer its latency counts.
        """
        tensor = tensor_bytes(config, cost, op)
        context = context_bytes(config, cost, op)
        experts = expert_bytes(config, cost, op)
        sending_seconds = tensor / links["tp"].bandwidth
        sending_seconds += context / links["cp"].bandwidth
        row_seconds = experts / links["experts"].bandwidth  # of tokens' rows, to experts and back
        # what does not run beside products
        traffic = (1 - assumed.hidden) * sending_seconds
        traffic += (1 - assumed.hidden_rows) * row_seconds
        return InstructionSeconds(
            product,
            attention,
            elementwise,
            fixed=passes * (assumed.layer + _latency(config, links)),
            traffic=traffic,
            tensor_bytes=tensor,
            context_bytes=context,
            expert_bytes=experts,
        )

    forward = instruction(
        Op.FORWARD, products.forward, attention_forward, elementwise_forward, layers
    )
    input_products = products.input + products.recomputed
    input_half = instruction(
        Op.BACKWARD_INPUT,
        input_products,
        attention_backward,
        elementwise_backward,
        layers + recomputed_layers,
    )
    weight_half = instruction(Op.BACKWARD_WEIGHT, products.weight, 0.0, 0.0, layers)
    # seconds in which the kernels of each computation are launched
    launching_input = (layers + recomputed_layers) * launch
    launching = layers * launch
    return {
        Op.FORWARD: forward.launched_in(launching),
        # kernels of both halves are launched one after the other, and run beside it
        Op.BACKWARD: (input_half + weight_half).launched_in(launching_input + launching),
        Op.BACKWARD_INPUT: input_half.launched_in(launching_input),
        Op.BACKWARD_WEIGHT: weight_half.launched_in(launching),
    }


def _latency(config: RunConfig, links: dict[str, Link]) -> float:
    """Return the latency of the collectives of one layer in one pass: each of its two blocks
    gathers and scatters over tp, attention sends keys and values, and tokens go to experts and
    back."""
    latency = 4 * links["tp"].latency + links["cp"].latency
    if config.model.experts:
        latency += 2 * links["experts"].latency
    return latency


def predict(
    config: RunConfig, passes: PlannedPasses, ranks: Sequence[RankBytes], assumed: Assumptions
) -> Prediction:
    """Return the predicted times of a step. ranks: the bytes of each pipeline rank."""
    sent = 0.0
    for rank in ranks:
        gradients = whole_gradients(config, rank.gradients)
        weights = whole_weights(config, gradients, rank.weights)
        sent = max(sent, replica_bytes(config, gradients, weights))
    return predict_passes(config, passes, sent, _elements_of_fullest(config, passes), assumed)


def _elements_of_fullest(config: RunConfig, passes: PlannedPasses) -> float:
    """Return the parameters of the pipeline rank that has most, on each of its ranks."""
    parallel = config.parallel
    expert_ranks = parallel.expert * expert_slices(parallel)
    elements = [0.0] * len(passes.schedule.programs)
    for cost, rank in zip(passes.costs, passes.schedule.rank_of_stage, strict=True):
        others = cost.parameters - cost.expert_parameters
        elements[rank] += others / parallel.tensor + cost.expert_parameters / expert_ranks
    return max(elements)


def predict_passes(
    config: RunConfig,
    passes: PlannedPasses,
    sent: float,
    elements: float,
    assumed: Assumptions,
) -> Prediction:
    """Return the predicted times of a step.

    sent: bytes that a rank sends to its replicas.
    elements: parameters of the fullest rank.
    """
    schedule = passes.schedule
    costs = _StepCosts(config, passes.costs, assumed)
    spans = simulate(schedule, costs.seconds)
    num_ranks = len(schedule.programs)
    # micro-batches of the step for each that is simulated: work and traffic grow with them
    repeats = 1 + passes.more / schedule.microbatches
    # by rank
    work = [NOTHING] * num_ranks
    counts = _count_computations(spans)
    for (rank, stage, op), count in counts.items():
        of_all = costs.by_stage[stage][op].times(repeats * count)
        work[rank] = work[rank] + of_all

    # The time of the passes does not grow so, for filling the pipeline is a part of it: each
    # further micro-batch takes as long as one of those by which `longer` is longer.
    passes_seconds = max(span.end for span in spans)
    if passes.longer:
        longer_seconds = max(span.end for span in simulate(passes.longer, costs.seconds))
        added_microbatches = passes.longer.microbatches - schedule.microbatches
        added_seconds = longer_seconds - passes_seconds
        passes_seconds += passes.more * added_seconds / added_microbatches
        # the first micro-batches of a schedule may hide how much more work one rank has
        passes_seconds = max(passes_seconds, *(of_rank.seconds for of_rank in work))

    total = sum(work, NOTHING).times(1 / num_ranks)
    # while a rank waits, others that share its core go on: the cores are never idle for a bubble
    passes_seconds = max(passes_seconds, assumed.crowd * total.seconds)
    # an activation and a gradient of each micro-batch for each stage of a rank
    stages_per_rank = len(passes.costs) / num_ranks
    messages = 2 * costs.message_bytes * config.num_microbatches * stages_per_rank
    traffic = Traffic(
        tp=max(of_rank.tensor_bytes for of_rank in work),
        pp=messages if num_ranks > 1 else 0.0,
        dp=sent,
        experts=max(of_rank.expert_bytes for of_rank in work),
        cp=max(of_rank.context_bytes for of_rank in work),
    )
    # after the passes all ranks work at once, each with its part of a core
    replicas = assumed.crowd * replica_seconds(config, sent, elements, costs.links["dp"])
    exposed = exposed_seconds(config, assumed, passes_seconds, replicas)
    update = assumed.crowd * update_seconds(config, elements, assumed)
    factor = assumed.factor
    return Prediction(
        seconds=factor * (passes_seconds + exposed + update),
        compute=factor * total.products,
        attention=factor * total.attention,
        elementwise=factor * total.elementwise,
        fixed=factor * total.fixed,
        tp=factor * total.traffic,
        dp=factor * replicas,
        exposed=factor * exposed,
        update=factor * update,
        idle=max(0.0, 1 - total.seconds / passes_seconds),
        traffic=traffic,
    )


def _count_computations(
    spans: Sequence[Span],
) -> Counter[tuple[int, int, Op]]:
    """Return how often each rank computes each operation of each stage."""
    counts = Counter[tuple[int, int, Op]]()
    for span in spans:
        instruction = span.instruction
        if instruction.op in _COMPUTATIONS:
            counts[span.rank, instruction.stage, instruction.op] += 1
    return counts


def _costs_of_one_stage(config: RunConfig) -> list[StageCost]:
    """Return the costs of the whole model as one stage."""
    train = config.train
    whole = Cut(0, range(config.model.layers), first=True, last=True)
    return stage_costs(
        config.sized_model, [whole], train.seq_length, train.micro_batch, config.recompute
    )


def least_seconds(config: RunConfig, assumed: Assumptions) -> float:
    """Return the time that a step takes at least: with equal stages and ranks, and without messages
    between stages.

    Raises KeyError for a schedule from a file.
    """
    parallel = config.parallel
    pipeline = parallel.pipeline
    stages = pipeline * (parallel.chunks or KINDS[parallel.schedule].chunks)
    if 0 < config.recompute.count_whole_layers(config.model.layers) < config.model.layers:
        # how many layers are recomputed depends on those of each stage
        costs = config.stage_costs(config.sized_model, range(stages))
    else:
        # all layers as one stage: no cut of the layers makes less work
        costs = _costs_of_one_stage(config)
    step_costs = _StepCosts(config, costs, assumed)

    def seconds_of_rank(op: Op) -> float:
        """Return the time that the mean rank needs for an operation of a micro-batch."""
        return sum(of_stage[op].seconds for of_stage in step_costs.by_stage) / pipeline

    sizes = FormulaSizes(
        pipeline,
        config.num_microbatches,
        stages // pipeline,
        F=seconds_of_rank(Op.FORWARD),
        I=seconds_of_rank(Op.BACKWARD_INPUT),
        W=seconds_of_rank(Op.BACKWARD_WEIGHT),
    )
    bubble = KINDS[parallel.schedule].bubble.value(sizes)
    passes_seconds = sizes.work * (1 + bubble)
    elements = sum(elements_of_pipeline(config)) / pipeline
    sent = _least_sent(config, elements)
    replicas = assumed.crowd * replica_seconds(config, sent, elements, step_costs.links["dp"])
    exposed = exposed_seconds(config, assumed, passes_seconds, replicas)
    update = assumed.crowd * update_seconds(config, elements, assumed)
    return assumed.factor * (passes_seconds + exposed + update)


def least_seconds_of_schedule(
    config: RunConfig, passes: PlannedPasses, assumed: Assumptions
) -> float:
    """Return the time that a step takes at least, by its schedule, which is simulated: with the
    state of the mean rank."""
    return predict_of_mean_rank(config, passes, assumed).seconds


def predict_of_mean_rank(
    config: RunConfig, passes: PlannedPasses, assumed: Assumptions
) -> Prediction:
    """Return the predicted times of a step as if each rank had the state of the mean one, for which
    no layer is built. Of what a rank sends to its replicas a lower bound is taken."""
    elements = sum(elements_of_pipeline(config)) / config.parallel.pipeline
    sent = _least_sent(config, elements)
    return predict_passes(config, passes, sent, elements, assumed)


def simulated_spans(
    config: RunConfig, passes: PlannedPasses, assumed: Assumptions
) -> Sequence[Span]:
    """Return the predicted time span of each instruction of the schedule, in seconds."""
    costs = _StepCosts(config, passes.costs, assumed)
    return simulate(passes.schedule, lambda item: assumed.factor * costs.seconds(item))


def _least_sent(config: RunConfig, elements: float) -> float:
    """Return the bytes that a rank sends to its replicas at least. elements: parameters of the mean
    rank."""
    plan = config.plan
    # with FP8 some weights may travel as codes of a byte: this is a lower bound
    weights = elements * (1 if plan.fp8 else plan.parameters.itemsize)
    return replica_bytes(config, elements * plan.gradients.itemsize, weights)
