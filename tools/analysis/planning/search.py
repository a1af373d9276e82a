"""All layouts of a number of ranks that a run can have and that fit its device, fastest first.

Varied are tensor (within a machine), pipeline and data parallelism, context parallelism of long
sequences, the ranks over which experts are spread and their slices, sequence parallelism, what is
recomputed, and the stages of each pipeline rank; every other key of [parallel] stays as it is if it
can. Layouts whose state alone does not fit, by the bytes of a parameter, are not looked at more
closely, and neither are those that cannot be faster than the layouts that were found. Those that do
not fit are looked at with higher stages of ZeRO.

Of the fastest layouts other micro-batches, ZeRO stages, kept layers and numbers of stages are tried
too (`neighbors`), and those of the better ones, as long as there are better ones.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import ceil
from typing import Any

from megaprec.optim.rules.muon.rule import min_moments
from models.parameter_counts import expert_parameters, num_parameters
from parallel.pipeline.kinds import KINDS
from parallel.sequence_cut import length_multiple
from tools.analysis.planning.device import DeviceTarget
from tools.analysis.planning.memory import (
    MemoryModel,
    PlannedPasses,
    RankBytes,
    least_activation_bytes,
    least_activations_by_rank,
)
from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.analysis.planning.seconds.traffic import kept_layers
from tools.analysis.planning.speed import (
    Prediction,
    least_seconds,
    least_seconds_of_schedule,
    passes_of,
    predict,
)
from tools.config.layouts import fit_layout
from tools.config.rules.derived import make_rule
from tools.config.rules.expert_ranks import (
    expert_slices,
    possible_expert_keys,
    replicas_sharing_state,
)
from tools.config.run_file import RunConfig
from tools.config.sharding import sharding_of

ORIGIN = "megaprec plan"
MOST_LAYOUTS = 10  # that are found
MOST_EXPANDED = 3  # of the fastest, whose neighbors are tried
CHUNKS = (2, 4, 8)  # stages of a pipeline rank that are tried first
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
    unseen: how many were not looked at when the search was interrupted.
    """

    layouts: Sequence[Planned]
    slower: int
    too_large: int
    smallest: int
    unseen: int = 0


Progress = Callable[[int, int, Planned | None], None]
"""Is told how many layouts of how many are looked at, and the fastest so far."""


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
        seconds += steps * _step_seconds(planned, predicted, assumed, batch)
    return seconds


def _step_seconds(
    planned: Planned, predicted: Prediction, assumed: Assumptions, batch: int
) -> float:
    """Return the predicted time of a step of `batch` samples. predicted: one of
    train.global_batch."""
    config = planned.config
    if batch == config.train.global_batch:
        return predicted.seconds
    other = config.with_constant_batch(batch)
    return predict(other, passes_of(other), planned.ranks, assumed).seconds


@dataclass(frozen=True)
class Afforded:
    """The steps from a run's start that end within some time, their samples, and their seconds."""

    steps: int
    samples: int
    seconds: float


def steps_within(
    planned: Planned, predicted: Prediction, assumed: Assumptions, seconds: float
) -> Afforded:
    """Return the steps that end within `seconds`, each with the batch that it has, however many
    train.steps are. predicted: a step of train.global_batch samples."""
    done_steps = 0
    samples = 0
    taken = 0.0
    for stretch in planned.config.batches.stretches():
        step_seconds = _step_seconds(planned, predicted, assumed, stretch.batch)
        steps = int((seconds - taken) / step_seconds)
        if stretch.steps is not None:
            steps = min(steps, stretch.steps)
        done_steps += steps
        samples += steps * stretch.batch
        taken += steps * step_seconds
        if steps != stretch.steps:
            break
    return Afforded(done_steps, samples, taken)


class _Found:
    """The layouts that a search has found.

    fitting: fastest first.
    slower: how many cannot be faster.
    too_large: bytes of those that do not fit.
    """

    def __init__(self, target: DeviceTarget, assumed: Assumptions) -> None:
        self.fitting = list[Planned]()
        self.slower = 0
        self.too_large = list[int]()
        self._target = target
        self._assumed = assumed
        self._memory = MemoryModel(target.device, target.process)

    def look_at(self, config: RunConfig, least_time: float) -> bool:
        """Add a layout, unless it does not fit or cannot be one of the fastest. Return False if it
        does not fit."""
        if self._is_too_large(least_of_mean_rank(config)):
            return False
        if self.cannot_be_better(least_time):
            self.slower += 1
            return True
        # Bounds come before what they are bounds of, which takes longer.
        passes = passes_of(config)
        if self._is_too_large(least_bytes_of_fullest(config, passes, self._memory)):
            return False
        if len(self.fitting) >= MOST_LAYOUTS:
            least_time = least_seconds_of_schedule(config, passes, self._assumed)
            if self.cannot_be_better(least_time):
                self.slower += 1
                return True
        return self._plan(config)

    def cannot_be_better(self, least_time: float) -> bool:
        """Return True if there are enough layouts that are faster."""
        if len(self.fitting) < MOST_LAYOUTS:
            return False
        slowest_time, _ = _speed_then_size(self.fitting[MOST_LAYOUTS - 1])
        return least_time > slowest_time

    def _is_too_large(self, least: int) -> bool:
        """Return True, and note it, if a layout that needs at least so many bytes does not fit."""
        if self._target.verdict(least) != "does not fit":
            return False
        self.too_large.append(least)
        return True

    def _plan(self, config: RunConfig) -> bool:
        planned = plan_run(config, self._memory, self._assumed)
        if self._is_too_large(planned.total):
            return False
        self.fitting.append(planned)
        self.fitting.sort(key=_speed_then_size)
        return True

    @property
    def best(self) -> Planned | None:
        """The fastest layout so far."""
        return self.fitting[0] if self.fitting else None

    def result(self, unseen: int) -> LayoutSearch:
        """Return the fastest layouts. unseen: others that were not looked at."""
        slower = self.slower + max(0, len(self.fitting) - MOST_LAYOUTS)
        smallest = min(self.too_large, default=0)
        fastest = self.fitting[:MOST_LAYOUTS]
        return LayoutSearch(fastest, slower, len(self.too_large), smallest, unseen)


def search(
    config: RunConfig,
    ranks: int,
    target: DeviceTarget,
    assumed: Assumptions,
    progress: Progress,
) -> LayoutSearch:
    """Return the `MOST_LAYOUTS` fastest layouts of `ranks` ranks.

    Ctrl-C ends the search with what was found so far; KeyboardInterrupt is raised if nothing was.
    """
    found = _Found(target, assumed)
    timed: list[tuple[float, RunConfig]] = []
    for layout in candidates(config, ranks, assumed.machine):
        timed.append((least_seconds(layout, assumed), layout))
    # fastest first, so that most others are found to be slower without a closer look
    timed.sort(key=lambda pair: pair[0])
    number = 0
    too_large: list[tuple[float, RunConfig]] = []
    try:
        with _stop_between_layouts() as require_no_stop:
            for number, (least_time, layout) in enumerate(timed):
                progress(number, len(timed), found.best)
                require_no_stop()
                if not found.look_at(layout, least_time):
                    too_large.append((least_time, layout))
            number = len(timed)
            for least_time, layout in too_large:
                require_no_stop()
                # higher stages send no less
                if not found.cannot_be_better(least_time):
                    _shard_until_it_fits(found, layout, assumed)
            _improve(found, assumed, require_no_stop)
    except KeyboardInterrupt:
        if not found.fitting:
            raise
    progress(len(timed), len(timed), found.best)
    return found.result(unseen=len(timed) - number)


@contextmanager
def _stop_between_layouts() -> Iterator[Callable[[], None]]:
    """Remember Ctrl-C, and yield what raises KeyboardInterrupt if it was pressed.

    Raised at any point, the exception would be lost where Python calls back, as it does for each
    tensor that is freed while a layer is run. Pressed twice, it is raised at once.
    """
    presses = 0

    def remember(signum: int, frame: object) -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            raise KeyboardInterrupt

    def require_no_stop() -> None:
        if presses:
            raise KeyboardInterrupt

    # only the main thread of a process gets signals
    if threading.current_thread() is not threading.main_thread():
        yield require_no_stop
        return
    before = signal.signal(signal.SIGINT, remember)
    try:
        yield require_no_stop
    finally:
        signal.signal(signal.SIGINT, before)


def _improve(found: _Found, assumed: Assumptions, require_no_stop: Callable[[], None]) -> None:
    """Look at the neighbors of the fastest layouts, until these have no better ones."""
    seen = {_identity(planned.config) for planned in found.fitting}
    expanded = set[str]()
    while True:
        fastest = found.fitting[:MOST_EXPANDED]
        not_expanded = [planned for planned in fastest if _identity(planned.config) not in expanded]
        if not not_expanded:
            return
        for planned in not_expanded:
            expanded.add(_identity(planned.config))
            for neighbor in neighbors(planned.config):
                require_no_stop()
                identity = _identity(neighbor)
                if identity not in seen:
                    seen.add(identity)
                    found.look_at(neighbor, least_seconds(neighbor, assumed))


def neighbors(config: RunConfig) -> Iterator[RunConfig]:
    """Yield the run with another micro-batch, ZeRO stage, number of layers that ZeRO-3 keeps or
    number of stages, as far as its rules allow."""
    train = config.train
    parallel = config.parallel
    changes: list[dict[str, object]] = [{"train.micro_batch": 2 * train.micro_batch}]
    if train.micro_batch % 2 == 0:
        changes.append({"train.micro_batch": train.micro_batch // 2})
    changes += _other_zero(config)
    kind = KINDS[parallel.schedule]
    if kind.any_chunks:
        chunks = parallel.chunks or kind.chunks
        changes.append({"parallel.chunks": 2 * chunks})
    for change in changes:
        try:
            yield config.with_values(change, ORIGIN)
        except ValueError:
            continue  # a rule forbids it


def _shard_until_it_fits(found: _Found, config: RunConfig, assumed: Assumptions) -> None:
    """Look at a run that does not fit with each higher stage of ZeRO, until one fits; a run without
    ZeRO stays so."""
    stage = config.parallel.zero_stage
    if not stage:
        return
    for higher in range(stage + 1, 4):
        try:
            sharded = config.with_value("parallel.zero", higher, ORIGIN)
        except ValueError:
            return  # a rule forbids it
        if found.look_at(sharded, least_seconds(sharded, assumed)):
            return


def _other_zero(config: RunConfig) -> Iterator[dict[str, object]]:
    """Yield the other stages of ZeRO, and under ZeRO-3 a quarter of a rank's layers more and less
    that are kept."""
    parallel = config.parallel
    if not parallel.zero_stage:
        return
    for stage in (True, 2, 3):  # as parallel.zero writes them: true is stage 1
        if stage != parallel.zero_stage:
            yield {"parallel.zero": stage, "parallel.zero_keep": 0}
    if not parallel.shards_weights:
        return
    layers = ceil(config.model.layers / parallel.pipeline)
    kept = min(ceil(kept_layers(config)), layers)
    step = ceil(layers / 4)
    for other in (max(0, kept - step), min(layers, kept + step)):
        if other != kept:
            yield {"parallel.zero_keep": other}


def candidates(config: RunConfig, ranks: int, machine: int) -> Iterator[RunConfig]:
    """Yield the run in each layout of `ranks` ranks that its rules allow."""
    parallel = config.parallel
    current_recompute = {key: getattr(parallel, key) for key in RECOMPUTE[0]}
    seen = set[str]()
    for axes in _axes(config, ranks, machine):
        tensor = axes["tensor"]
        copies = axes["data"] * axes["context"]
        sequence_choices = [*_sequences(config, tensor, axes["context"])]
        expert_choices = possible_expert_keys(parallel, config.model.experts, tensor, copies)
        recompute_choices = (current_recompute, *RECOMPUTE)
        schedule_choices = _schedules(config, axes["pipeline"])
        choices = product(expert_choices, recompute_choices, sequence_choices, schedule_choices)
        for experts, recompute, sequence, schedule in choices:
            keys = {**axes, **experts, **recompute, **schedule, "sequence": sequence}
            identity = _identity_of_keys(keys, tensor)
            if identity in seen:
                continue
            seen.add(identity)
            if fitting := fit_layout(config, keys):
                yield config.with_parallel(fitting.parallel, ORIGIN)


def _sequences(config: RunConfig, tensor: int, context: int) -> Iterator[bool]:
    """Yield whether the sequence is cut over tensor-parallel ranks: where it can be, unless the run
    says otherwise, and then both ways."""
    parallel = config.parallel
    # without tensor-parallel ranks there is nothing to cut a sequence over
    can_be_cut = tensor > 1 and config.train.seq_length % length_multiple(context, tensor) == 0
    if can_be_cut:
        yield True
    if not can_be_cut or config.given("parallel.sequence"):
        yield parallel.sequence


def _schedules(config: RunConfig, pipeline: int) -> Iterator[dict[str, Any]]:
    """Yield the keys of the schedules that are tried: the run's own, and if that is 1F1B, several
    stages on each rank."""
    parallel = config.parallel
    # a schedule from a file is one for a number of ranks and micro-batches
    yield {"schedule": parallel.schedule, "chunks": parallel.chunks, "schedule_file": ""}
    if not KINDS[parallel.schedule].is_1f1b or pipeline == 1:
        return
    yield {"schedule": "1f1b", "chunks": 0, "schedule_file": ""}
    for chunks in CHUNKS:
        if pipeline * chunks <= config.model.layers:
            yield {"schedule": "interleaved", "chunks": chunks, "schedule_file": ""}


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


def _identity_of_keys(keys: Mapping[str, Any], tensor: int) -> str:
    """Return a text that is the same for the same layout, whether the slices of experts are given
    or left to the default."""
    slices = keys.get("expert_tensor", 0) or tensor
    return str(sorted({**keys, "expert_tensor": slices}.items()))


def _identity(config: RunConfig) -> str:
    """Return a text that is the same for the same layout and micro-batch."""
    parallel = config.parallel
    spelled_out = parallel.model_copy(update={"expert_tensor": expert_slices(parallel)})
    return f"{config.train.micro_batch} {spelled_out.model_dump_json()}"


def least_of_mean_rank(config: RunConfig) -> int:
    """Return the bytes that a rank needs at least, without building or running a layer: the mean
    rank's state and what is known of its activations."""
    return least_bytes(config) + least_activation_bytes(config)


def least_bytes(config: RunConfig) -> int:
    """Return the bytes of the mean rank's weights, gradients and optimizer state, by the bytes of a
    parameter."""
    of_others, of_experts = _bytes_of_elements(config)
    experts = expert_parameters(config.sized_model)
    others = num_parameters(config.sized_model) - experts
    return int((others * of_others + experts * of_experts) / config.parallel.pipeline)


def least_bytes_of_fullest(config: RunConfig, passes: PlannedPasses, memory: MemoryModel) -> int:
    """Return the bytes that the fullest rank needs at least: its state, by the bytes of a
    parameter, its layers' activations, by those of a layer, and its communicators.

    memory: runs a layer at most.
    """
    of_others, of_experts = _bytes_of_elements(config)
    of_layer = memory.kept_by_layer(config)
    rank_of_stage = passes.schedule.rank_of_stage
    least: list[int] = []
    for rank, activations in enumerate(least_activations_by_rank(config, passes, of_layer)):
        least.append(activations + memory.communicator_bytes(config, rank_of_stage, rank))
    costs = passes.costs
    for cost, rank in zip(costs, rank_of_stage, strict=True):
        others = cost.parameters - cost.expert_parameters
        least[rank] += int(others * of_others + cost.expert_parameters * of_experts)
    return max(least)


def _bytes_of_elements(config: RunConfig) -> tuple[float, float]:
    """Return the bytes of weights, gradients and optimizer state that one rank holds for each
    parameter of its pipeline stage: for one that is not of an expert, and for one that is.

    Parameters are those of the whole stage, before they are cut over tensor or expert ranks.
    """
    parallel = config.parallel
    plan = config.plan
    moments = min_moments(make_rule(config.optimizer))
    bytes_per_parameter = partial(
        plan.bytes_per_parameter,
        moments,
        shards_gradients=parallel.shards_gradients,
        shards_weights=parallel.shards_weights,
        ema=config.optimizer.ema > 0,
        offload=config.optimizer.offload == "host",
    )
    # on each rank, and divided among ranks that share state
    local, sharded = bytes_per_parameter()
    if plan.fp8:
        # which weights have FP8 codes is not known here: the smaller of both is a lower bound
        fp8_local, fp8_sharded = bytes_per_parameter(in_fp8=True)
        local = min(local, fp8_local)
        sharded = min(sharded, fp8_sharded)
    bytes_of_other = local + sharded / sharding_of(config).zero
    bytes_of_experts = local + sharded / replicas_sharing_state(parallel)
    expert_ranks = parallel.expert * expert_slices(parallel)
    return bytes_of_other / parallel.tensor, bytes_of_experts / expert_ranks


def _speed_then_size(planned: Planned) -> tuple[float, int]:
    """Return the order of layouts: faster first, then smaller."""
    assert planned.prediction is not None
    return planned.prediction.seconds, planned.total
