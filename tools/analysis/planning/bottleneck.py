"""The largest part of a predicted step, and what makes it less, in a sentence.

No advice names what a run already has, or what its rules refuse.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallel.pipeline.kinds import KINDS
from tools.analysis.planning.search import ORIGIN, RECOMPUTE
from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.analysis.planning.seconds.links import axis_links
from tools.analysis.planning.seconds.traffic import kept_layers
from tools.analysis.planning.speed import Prediction, passes_of
from tools.config.run_file import RunConfig

# kinds of time
NAMES = {
    "compute": "matrix products",
    "attention": "attention",
    "elementwise": "memory between products",
    "fixed": "launches and latency",
    "tp": "traffic within stages",
    "waits": "waiting for other stages",
    "exposed": "replicas",
    "update": "the update",
}

MOSTLY_PRODUCTS = 0.8


def seconds_by_kind(predicted: Prediction) -> dict[str, float]:
    """Return the seconds of a step that each kind of time takes, by the keys of NAMES; together
    they are the step."""
    in_passes = ("compute", "attention", "elementwise", "fixed", "tp")
    seconds = {kind: getattr(predicted, kind) for kind in (*in_passes, "exposed", "update")}
    seconds["waits"] = max(0.0, predicted.seconds - sum(seconds.values()))
    return seconds


def named_seconds(predicted: Prediction) -> dict[str, float]:
    """Return `seconds_by_kind` by the names of kinds."""
    return {NAMES[kind]: seconds for kind, seconds in seconds_by_kind(predicted).items()}


def shares(predicted: Prediction) -> dict[str, float]:
    """Return the fraction of a step that each kind of time takes; together they are 1."""
    seconds = seconds_by_kind(predicted)
    return {kind: of_kind / predicted.seconds for kind, of_kind in seconds.items()}


def describe_bottleneck(
    config: RunConfig, predicted: Prediction, assumed: Assumptions
) -> tuple[str, str]:
    """Return the largest part of a step beside products, or products if they are four fifths of it,
    and what makes it less."""
    by_kind = shares(predicted)
    products = by_kind["compute"]
    others = {kind: share for kind, share in by_kind.items() if kind != "compute"}
    kind = "compute"
    if products < MOSTLY_PRODUCTS:
        kind = max(others, key=lambda kind: others[kind])
    text = f"{NAMES[kind]} {by_kind[kind]:.0%} of the step"
    if kind != "compute":
        text += f", products {products:.0%}"
    ways = _ways_to_less(kind, config, predicted, assumed)
    if not ways:
        return text, "which no key makes less"
    return text, f"less by {_joined([way.text for way in ways])}"


def _joined(alternatives: Sequence[str]) -> str:
    """Return alternatives with commas, and "or" before the last."""
    *others, last = alternatives
    return f"{', '.join(others)} or {last}" if others else last


@dataclass(frozen=True)
class _Way:
    """A change of a run that makes a kind of time less.

    kind: of time, a key of NAMES.
    text: the change in words, as a part of a sentence.
    change: the new values of dotted keys.
    is_new: False if the run has the change already, or it would not make this time less.
    """

    kind: str
    text: str
    change: Mapping[str, object]
    is_new: bool = True

    def is_allowed(self, config: RunConfig) -> bool:
        """Return True if the run can have the change."""
        try:
            config.with_values(self.change, ORIGIN)
        except ValueError:
            return False
        return True


def _ways_to_less(
    kind: str, config: RunConfig, predicted: Prediction, assumed: Assumptions
) -> list[_Way]:
    """Return the changes that make a kind of time less and that the run can have."""
    ways = (
        *_ways_within_passes(config, predicted, assumed),
        *_ways_of_pipelines(config),
        *_ways_of_gradients(config, assumed),
    )
    return [way for way in ways if way.kind == kind and way.is_new and way.is_allowed(config)]


def _ways_within_passes(
    config: RunConfig, predicted: Prediction, assumed: Assumptions
) -> list[_Way]:
    """Return the changes that make the passes of a stage shorter."""
    train = config.train
    tensor = config.parallel.tensor
    repeats_layers = any(map(config.recompute.count_whole_layers, _layers_of_stages(config)))
    repeats_attention = repeats_layers or "attention" in config.recompute.modules
    no_recompute, *_ = RECOMPUTE
    keeps_all = {f"parallel.{key}": value for key, value in no_recompute.items()}
    less_recompute = "less recomputation (parallel.recompute)"

    can_take_fp8 = assumed.fp8_tflops > 0 and not config.plan.fp8
    half_length = train.seq_length // 2
    shorter = "shorter sequences (train.seq_length)"
    window = "a window (model.window)"

    is_compiled = config.compile_mode(assumed.device) == "block"
    block = 'train.compile = "block"'
    compiled = {"train.compile": "block"}
    sequence = "sequence parallelism (parallel.sequence)"
    can_cut_sequences = tensor > 1 and not config.parallel.sequence

    larger = "larger micro-batches (train.micro_batch)"
    fewer_tensor = "fewer tensor ranks (parallel.tensor)"
    halved_tensor = {"parallel.tensor": tensor // 2}
    busiest = _busiest_axis(config, predicted, assumed)
    return [
        _Way("compute", less_recompute, keeps_all, repeats_layers),
        _Way("compute", "FP8 (fp8.kind)", {"fp8.kind": "current"}, can_take_fp8),
        _Way("attention", less_recompute, keeps_all, repeats_attention),
        _Way("attention", shorter, {"train.seq_length": half_length}),
        _Way("attention", window, {"model.window": half_length}, not config.model.window),
        _Way("elementwise", less_recompute, keeps_all, repeats_layers),
        _Way("elementwise", block, compiled, not is_compiled),
        _Way("elementwise", sequence, {"parallel.sequence": True}, can_cut_sequences),
        _Way("fixed", block, compiled, not is_compiled),
        _Way("fixed", larger, {"train.micro_batch": 2 * train.micro_batch}),
        _Way("fixed", fewer_tensor, halved_tensor, tensor > 1),
        _Way("tp", f"fewer ranks of {busiest}", {busiest: config.get(busiest) // 2}),
    ]


def _ways_of_pipelines(config: RunConfig) -> list[_Way]:
    """Return the changes that make the waiting of pipeline ranks less."""
    parallel = config.parallel
    pipeline = parallel.pipeline
    # Of still more stages each has few layers, and the head is a large part of its own.
    has_layers = 4 * pipeline <= config.model.layers
    # A micro-batch passes stages one after another, however many a rank has.
    has_others = config.num_microbatches > 1
    schedule = KINDS[parallel.schedule]
    stages_of_rank = parallel.chunks or schedule.chunks
    has_one_stage = pipeline > 1 and schedule.is_1f1b and stages_of_rank == 1
    can_have_stages = has_one_stage and has_layers and has_others

    more = "more micro-batches (train.global_batch)"
    larger_batch = {"train.global_batch": 2 * config.train.global_batch}
    chunks = "several stages on each rank (parallel.schedule)"
    interleaved = {"parallel.schedule": "interleaved", "parallel.chunks": 2}
    fewer_stages = "fewer pipeline ranks (parallel.pipeline)"
    halved_pipeline = {"parallel.pipeline": pipeline // 2}
    return [
        _Way("waits", more, larger_batch, pipeline > 1),
        _Way("waits", chunks, interleaved, can_have_stages),
        _Way("waits", fewer_stages, halved_pipeline, pipeline > 1),
    ]


def _ways_of_gradients(config: RunConfig, assumed: Assumptions) -> list[_Way]:
    """Return the changes that make the sums of gradients, the gathers of weights and the update
    shorter."""
    parallel = config.parallel
    train = config.train
    # under ZeRO-2 and 3 each micro-batch has traffic of its own
    sends_each = parallel.shards_gradients and config.num_microbatches > 1
    has_no_overlap = not parallel.overlaps(assumed.device)
    can_keep = parallel.shards_weights and kept_layers(config) < max(_layers_of_stages(config))
    can_shard = parallel.copies > 1 and parallel.zero_size != 1 and not parallel.zero
    is_offloaded = config.optimizer.offload == "host"

    overlap = "reductions beside the passes (parallel.overlap)"
    keep = "whole weights of layers (parallel.zero_keep)"
    lower_zero = "a lower stage of ZeRO (parallel.zero)"
    first_zero = {"parallel.zero": True, "parallel.zero_keep": 0}
    larger = "larger micro-batches (train.micro_batch)"
    more_a_step = "more micro-batches a step (train.global_batch)"
    larger_batch = {"train.global_batch": 2 * train.global_batch}
    on_gpu = "state on the GPU (optimizer.offload)"
    return [
        _Way("exposed", overlap, {"parallel.overlap": True}, has_no_overlap),
        _Way("exposed", keep, {"parallel.zero_keep": config.model.layers}, can_keep),
        _Way("exposed", lower_zero, first_zero, sends_each),
        _Way("exposed", larger, {"train.micro_batch": 2 * train.micro_batch}, sends_each),
        _Way("exposed", more_a_step, larger_batch, not parallel.shards_gradients),
        _Way("update", "ZeRO (parallel.zero)", {"parallel.zero": True}, can_shard),
        _Way("update", on_gpu, {"optimizer.offload": "none"}, is_offloaded),
        _Way("update", more_a_step, larger_batch),
    ]


def _layers_of_stages(config: RunConfig) -> list[int]:
    """Return the number of layers of each stage."""
    return [len(cost.cut.layers) for cost in passes_of(config).costs]


def _busiest_axis(config: RunConfig, predicted: Prediction, assumed: Assumptions) -> str:
    """Return the axis whose traffic within stages takes longest, by its key."""
    links = axis_links(config, assumed)
    traffic = predicted.traffic
    seconds = {
        "parallel.tensor": traffic.tp / links["tp"].bandwidth,
        "parallel.context": traffic.cp / links["cp"].bandwidth,
        "parallel.expert": traffic.experts / links["experts"].bandwidth,
    }
    return max(seconds, key=lambda axis: seconds[axis])
