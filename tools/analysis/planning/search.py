"""All layouts of a number of ranks that a run can have and that fit its device, fastest first.

Varied are tensor (within a machine), pipeline and data parallelism, context parallelism of long
sequences, the ranks over which experts are spread and their slices, sequence parallelism, and what
is recomputed; every other key of [parallel] stays as it is if it can. Layouts whose state alone
does not fit, by the bytes of a parameter, are not looked at more closely, and neither are those
that cannot be faster than the layouts that were found.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from megaprec.optim.muon.rule import min_moments
from tools.analysis.planning.device import Target
from tools.analysis.planning.memory import MemoryModel, RankBytes, sharding_of
from tools.analysis.planning.speed import Assumptions, Prediction, least_seconds, passes_of, predict
from tools.config.checks import make_rule
from tools.config.expert_ranks import expert_slices, possible_expert_keys, replicas_sharing_state
from tools.config.layouts import fit_layout
from tools.config.run_file import RunConfig
from tools.config.settings import Parallel

ORIGIN = "megaprec plan"
MOST_LAYOUTS = 10  # that are found
# Tokens of a sequence that each rank of parallel.context has at least, unless the run has shorter
# parts
LONG = 8192
NO_RECOMPUTE: dict[str, Any] = {
    "recompute_modules": (),
    "recompute_layers": 0,
    "recompute_fraction": 0.0,
}
RECOMPUTE: tuple[dict[str, Any], ...] = (
    {"recompute": "none", **NO_RECOMPUTE},
    {"recompute": "selective", **NO_RECOMPUTE, "recompute_modules": ("attention",)},
    {"recompute": "full", **NO_RECOMPUTE, "recompute_fraction": 1.0},
)


@dataclass(frozen=True)
class Planned:
    """A run in one layout: the bytes of each pipeline rank, and the predicted times; None if no
    peak speed is known."""

    config: RunConfig
    ranks: Sequence[RankBytes]
    prediction: Prediction | None

    @property
    def fullest(self) -> int:
        """Return the pipeline rank that needs most memory."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].total)

    @property
    def total(self) -> int:
        """Return the bytes that the fullest rank needs."""
        return self.ranks[self.fullest].total


@dataclass(frozen=True)
class LayoutSearch:
    """The fastest layouts that fit, fastest first.

    slower: how many others cannot be faster.
    too_large: how many do not fit.
    smallest: the bytes of the one of those that needs least.
    """

    layouts: Sequence[Planned]
    slower: int
    too_large: int
    smallest: int


def plan_run(config: RunConfig, memory: MemoryModel, assumed: Assumptions | None) -> Planned:
    """Return the run in its own layout: the bytes of its largest batch, and the times of a step of
    train.global_batch samples."""
    passes = passes_of(config)
    ranks = memory.of(config, passes)
    largest = config.batches.sizes[-1]
    if largest != config.train.global_batch:
        with_largest = config.with_constant_batch(largest)
        ranks = memory.of(with_largest, passes_of(with_largest))
    prediction = None
    if assumed:
        prediction = predict(config, passes, ranks, assumed)
    return Planned(config, ranks, prediction)


def run_seconds(planned: Planned, predicted: Prediction, assumed: Assumptions) -> float:
    """Return the predicted time of all steps of a run, each with the batch that it has. predicted:
    a step of train.global_batch samples."""
    config = planned.config
    seconds = 0.0
    for batch, steps in config.batches.steps_by_batch(config.train.steps).items():
        step_seconds = predicted.seconds
        if batch != config.train.global_batch:
            other = config.with_constant_batch(batch)
            step_seconds = predict(other, passes_of(other), planned.ranks, assumed).seconds
        seconds += steps * step_seconds
    return seconds


def search(
    config: RunConfig,
    ranks: int,
    target: Target,
    assumed: Assumptions,
    progress: Callable[[int, int], None],
) -> LayoutSearch:
    """Return the `MOST_LAYOUTS` fastest layouts of `ranks` ranks.

    progress: is told how many of how many are looked at.
    """
    memory = MemoryModel(target.device)
    planned_layouts = list[Planned]()  # those that fit, fastest first
    too_large = list[int]()  # bytes of those that do not fit
    slower = 0
    timed: list[tuple[float, RunConfig]] = []
    for layout in candidates(config, ranks, assumed.machine):
        timed.append((least_seconds(layout, assumed), layout))
    # fastest first, so that most others are found to be slower without a closer look
    timed.sort(key=lambda pair: pair[0])
    for number, (least_time, layout) in enumerate(timed):
        progress(number, len(timed))
        least = least_bytes(layout)
        if target.verdict(least) == "does not fit":
            too_large.append(least)
            continue
        if len(planned_layouts) >= MOST_LAYOUTS:
            slowest_time, _ = _speed_then_size(planned_layouts[MOST_LAYOUTS - 1])
            if least_time > slowest_time:
                slower += 1
                continue
        planned = plan_run(layout, memory, assumed)
        if target.verdict(planned.total) == "does not fit":
            too_large.append(planned.total)
        else:
            planned_layouts.append(planned)
            planned_layouts.sort(key=_speed_then_size)
    progress(len(timed), len(timed))
    slower += max(0, len(planned_layouts) - MOST_LAYOUTS)
    fastest = planned_layouts[:MOST_LAYOUTS]
    return LayoutSearch(fastest, slower, len(too_large), min(too_large, default=0))


def candidates(config: RunConfig, ranks: int, machine: int) -> Iterator[RunConfig]:
    """Yield the run in each layout of `ranks` ranks that its rules allow."""
    parallel = config.parallel
    current_recompute = {key: getattr(parallel, key) for key in RECOMPUTE[0]}
    seen = set[str]()
    for axes in _axes(config, ranks, machine):
        tensor = axes["tensor"]
        copies = axes["data"] * axes["context"]
        sequence_choices = [parallel.sequence]
        # without tensor-parallel ranks there is nothing to cut a sequence over
        if tensor > 1:
            sequence_choices.append(True)
        expert_choices = possible_expert_keys(parallel, config.model.experts, tensor, copies)
        recompute_choices = (current_recompute, *RECOMPUTE)
        choices = product(expert_choices, recompute_choices, sequence_choices)
        for experts, recompute, sequence in choices:
            # a schedule from a file is one for a number of ranks and micro-batches
            keys = {**axes, **experts, **recompute, "sequence": sequence, "schedule_file": ""}
            fitting = fit_layout(config, keys)
            if fitting is None:
                continue
            identity = _identity(fitting.parallel)
            if identity not in seen:
                seen.add(identity)
                yield config.with_parallel(fitting.parallel, ORIGIN)


def _axes(config: RunConfig, ranks: int, machine: int) -> Iterator[dict[str, int]]:
    """Yield the sizes of tensor, pipeline, context and data that make `ranks` ranks and share the
    batch evenly."""
    parallel = config.parallel
    train = config.train
    divisors = [number for number in range(1, ranks + 1) if ranks % number == 0]
    long_enough = [number for number in divisors if train.seq_length // number >= LONG]
    contexts = sorted({1, parallel.context, *long_enough})
    most_tensor = max(machine, parallel.tensor)
    for tensor, pipeline, context in product(divisors, divisors, contexts):
        replica_ranks = tensor * pipeline * context
        if ranks % replica_ranks or pipeline > config.model.layers or tensor > most_tensor:
            continue
        data = ranks // replica_ranks
        if config.batches.common_divisor % (train.micro_batch * data) == 0:
            yield {"tensor": tensor, "pipeline": pipeline, "context": context, "data": data}


def _identity(parallel: Parallel) -> str:
    """Return a text that is the same for the same layout, whether the slices of experts are given
    or left to the default."""
    spelled_out = parallel.model_copy(update={"expert_tensor": expert_slices(parallel)})
    return spelled_out.model_dump_json()


def least_bytes(config: RunConfig) -> int:
    """Return the bytes of the mean rank's weights, gradients and optimizer state, by the bytes of a
    parameter."""
    parallel = config.parallel
    plan = config.plan
    moments = min_moments(make_rule(config.optimizer))
    # on each rank, and divided among ranks that share state
    shards_gradients = parallel.shards_gradients
    keeps_ema = config.optimizer.ema > 0
    local, sharded = plan.bytes_per_parameter(moments, False, shards_gradients, keeps_ema)
    if plan.fp8:
        # which weights have FP8 codes is not known here: the smaller of both is a lower bound
        fp8_bytes = plan.bytes_per_parameter(moments, True, shards_gradients, keeps_ema)
        fp8_local, fp8_sharded = fp8_bytes
        local = min(local, fp8_local)
        sharded = min(sharded, fp8_sharded)
    experts = config.sized_model.expert_parameters
    others = config.sized_model.num_parameters - experts
    # by part of the model: its parameters, the ranks of a stage that cut it, and those that share
    # its state
    parts = (
        (others, parallel.tensor, sharding_of(config).zero),
        (experts, parallel.expert * expert_slices(parallel), replicas_sharing_state(parallel)),
    )
    total = 0.0
    for parameters, cut_over, sharers in parts:
        of_rank = parameters / (cut_over * parallel.pipeline)
        total += of_rank * (local + sharded / sharers)
    return int(total)


def _speed_then_size(planned: Planned) -> tuple[float, int]:
    """Return the order of layouts: faster first, then smaller."""
    assert planned.prediction is not None
    return planned.prediction.seconds, planned.total
