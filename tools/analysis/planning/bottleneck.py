"""The largest part of a predicted step, and what makes it less, in a sentence.

No advice names what a run already has.
"""

from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.analysis.planning.seconds.links import axis_links
from tools.analysis.planning.speed import Prediction
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
    return text, f"less by {' or '.join(ways)}"


def _ways_to_less(
    kind: str, config: RunConfig, predicted: Prediction, assumed: Assumptions
) -> list[str]:
    """Return the changes of a run that make a kind of time less."""
    parallel = config.parallel
    model = config.model
    tensor_ranks = parallel.tensor > 1
    replicas = parallel.copies > 1
    pipeline = parallel.pipeline > 1
    recomputes = parallel.recompute != "none"
    is_compiled = config.compile_mode(assumed.device) == "block"
    can_take_fp8 = assumed.fp8_tflops > 0 and not config.plan.fp8
    can_cut_sequences = tensor_ranks and not parallel.sequence
    # Of still more stages each has few layers, and the head is a large part of its own.
    can_have_stages = parallel.schedule == "1f1b" and 2 * parallel.pipeline <= model.layers
    busiest = _busiest_axis(config, predicted, assumed)
    # kind of time, change, and whether it is one that the run has not got
    ways = (
        ("compute", "less recomputation", recomputes),
        ("compute", "FP8", can_take_fp8),
        ("attention", "less recomputation", recomputes),
        ("attention", "shorter sequences", True),
        ("attention", "a window", not model.window),
        ("elementwise", "less recomputation", recomputes),
        ("elementwise", 'train.compile = "block"', not is_compiled),
        ("elementwise", "sequence parallelism", can_cut_sequences),
        ("fixed", 'train.compile = "block"', not is_compiled),
        ("fixed", "larger micro-batches", True),
        ("fixed", "fewer tensor ranks", tensor_ranks),
        ("tp", f"fewer ranks of {busiest}", True),
        ("waits", "more micro-batches", pipeline),
        ("waits", "several stages on each rank (parallel.chunks)", pipeline and can_have_stages),
        ("waits", "fewer pipeline ranks", pipeline),
        ("exposed", "parallel.overlap", not parallel.overlaps(assumed.device)),
        ("exposed", "more micro-batches a step", True),
        ("update", "ZeRO", replicas and not parallel.zero),
        ("update", "more micro-batches a step", True),
    )
    return [change for of_kind, change, is_open in ways if of_kind == kind and is_open]


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
