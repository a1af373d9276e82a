"""The largest part of a predicted step, and the keys that make it less, in a sentence."""

from tools.analysis.planning.speed import Prediction

# kind of time -> its name, and what makes it less
ADVICE = {
    "compute": ("matrix products", "FP8, or less recomputation"),
    "attention": ("attention", "shorter sequences, or a window"),
    "elementwise": ("memory between products", 'train.compile = "block", or sequence parallelism'),
    "fixed": ("launches and latency", "larger micro-batches, or fewer tensor ranks"),
    "tp": ("traffic within stages", "fewer tensor ranks, all in one machine"),
    "waits": ("waiting for other stages", "more micro-batches or chunks, or fewer stages"),
    "exposed": ("replicas", "more micro-batches a step, or parallel.overlap"),
    "update": ("the update", "ZeRO over more replicas"),
}

MOSTLY_PRODUCTS = 0.8


def seconds_by_kind(predicted: Prediction) -> dict[str, float]:
    """Return the seconds of a step that each kind of time takes, by the keys of ADVICE; together
    they are the step."""
    in_passes = ("compute", "attention", "elementwise", "fixed", "tp")
    seconds = {kind: getattr(predicted, kind) for kind in (*in_passes, "exposed", "update")}
    seconds["waits"] = max(0.0, predicted.seconds - sum(seconds.values()))
    return seconds


def named_seconds(predicted: Prediction) -> dict[str, float]:
    """Return `seconds_by_kind` by the names of kinds."""
    return {ADVICE[kind][0]: seconds for kind, seconds in seconds_by_kind(predicted).items()}


def shares(predicted: Prediction) -> dict[str, float]:
    """Return the fraction of a step that each kind of time takes; together they are 1."""
    seconds = seconds_by_kind(predicted)
    return {kind: of_kind / predicted.seconds for kind, of_kind in seconds.items()}


def describe_bottleneck(predicted: Prediction) -> tuple[str, str]:
    """Return the largest part of a step beside products, or products if they are four fifths of it,
    and what makes it less."""
    by_kind = shares(predicted)
    products = by_kind["compute"]
    others = {kind: share for kind, share in by_kind.items() if kind != "compute"}
    kind = "compute"
    if products < MOSTLY_PRODUCTS:
        kind = max(others, key=lambda kind: others[kind])
    name, advice = ADVICE[kind]
    text = f"{name} {by_kind[kind]:.0%} of the step"
    if kind != "compute":
        text += f", products {products:.0%}"
    return text, f"less by {advice}"
