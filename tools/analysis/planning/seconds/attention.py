"""The time of attention's own products: of queries with keys, and of weights with values.

A fused kernel computes the half of the scores that is causal, and of a window its part only.
"""

from models.config import ModelConfig
from models.estimate.flops import StageCost
from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.config.run_file import RunConfig

# FLOPs of the backward pass over those of the forward pass, which has two products: the backward
# pass has four, and computes one of the forward pass again.
BACKWARD = 2.5


def causal_share(model: ModelConfig, seq_length: int) -> float:
    """Return the fraction of the scores counted by `attention_flops` that is computed.

    A query sees the keys before it, at most a window of them: of a window w of s keys that is
    w - w * w / (2 * s) for the mean query. Of a recurrence all products that are counted are
    computed; the share is that of all layers.
    """
    if model.delta_net or model.hybrid_pattern or model.has_global_heads:
        return _share_by_kind(model, seq_length)
    return _mean_share(model, seq_length)


def _share_by_kind(model: ModelConfig, seq_length: int) -> float:
    """Return the share of a model some of whose layers have no attention, or other heads; 1 if none
    has products of that kind."""
    counted = 0.0
    computed = 0.0
    for kind, count in model.count_kinds(range(model.layers)):
        flops = count * kind.attention_flops(seq_length)
        share = _mean_share(kind, seq_length) if kind.mixer == "attention" else 1.0
        counted += flops
        computed += share * flops
    return computed / counted if counted else 1.0


def _mean_share(model: ModelConfig, seq_length: int) -> float:
    """Return the share of the mean layer, if all have attention."""
    # without numbers of layers, all have the window
    windowed_layers = len(model.window_layers) or model.layers
    other_layers = model.layers - windowed_layers
    window = min(seq_length, model.window or seq_length)
    seen = windowed_layers * _mean_keys(window, seq_length)
    seen += other_layers * _mean_keys(seq_length, seq_length)
    counted = windowed_layers * window + other_layers * seq_length
    return seen / counted


def _mean_keys(window: int, seq_length: int) -> float:
    """Return how many keys the mean query of a sequence sees in a window."""
    return window - window * window / (2 * seq_length)


def attention_seconds(
    config: RunConfig, cost: StageCost, assumed: Assumptions
) -> tuple[float, float]:
    """Return the time of a stage's own products of attention, forward and backward, recomputation
    included."""
    ranks = config.parallel.tensor * config.parallel.context
    speed = assumed.tflops * 1e12 * assumed.efficiency * assumed.attention * ranks
    computed_share = causal_share(config.model, config.train.seq_length)
    forward = computed_share * cost.attention / speed
    recomputed = computed_share * cost.recomputed_attention / speed
    return forward, BACKWARD * forward + recomputed
