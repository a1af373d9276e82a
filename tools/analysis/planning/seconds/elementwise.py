"""The time of operators between products: the bytes that they move over the bandwidth of memory."""

from models.estimate.elementwise import (
    BACKWARD,
    LOGIT_BYTES,
    LayerShare,
    cast_bytes,
    forward_bytes,
    loss_bytes,
)
from models.estimate.flops import StageCost
from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.analysis.planning.seconds.products import fp8_share
from tools.config.rules.expert_ranks import expert_slices
from tools.config.run_file import RunConfig

# Bytes that operators move, divided by those of fused kernels, by train.compile: norms, activation
# functions and rotary positions are several operators each where they are not compiled.
NOT_COMPILED = {"off": 2.0, "leaves": 1.2, "block": 1.0}


def elementwise_seconds(
    config: RunConfig, cost: StageCost, assumed: Assumptions
) -> tuple[float, float]:
    """Return the time of a stage's elementwise operators for one micro-batch, forward and
    backward, recomputation included."""
    parallel = config.parallel
    model = config.sized_model
    plan = config.plan
    cut = cost.cut
    share = LayerShare(parallel.tensor, parallel.sequence, expert_slices(parallel))
    tokens = config.train.micro_batch * config.train.seq_length / parallel.context
    recomputed_layers = cut.layers[: config.recompute.count_whole_layers(len(cut.layers))]

    unfused = NOT_COMPILED[config.compile_mode(assumed.device)]
    # bytes for each token, read and written
    forward = unfused * forward_bytes(model, cut, cut.layers, plan, share)
    recomputed = 0.0
    if recomputed_layers:
        recomputed = forward * len(recomputed_layers) / len(cut.layers)
    # forward operands, and in the backward pass the gradients of outputs, which are as wide
    casts = fp8_share(config, cost) * cast_bytes(model, cut.layers, share)
    backward = BACKWARD * forward + recomputed + 2 * casts
    forward += casts
    second_bytes = assumed.bandwidth * 1e9
    forward_seconds = tokens * forward / second_bytes
    backward_seconds = tokens * backward / second_bytes
    if cut.last:
        loss_forward, loss_backward = loss_bytes(model, parallel.tensor)
        seconds_of_byte = 1 / second_bytes
        if assumed.logit:
            seconds_of_byte = assumed.logit / LOGIT_BYTES
        forward_seconds += tokens * loss_forward * seconds_of_byte
        backward_seconds += tokens * loss_backward * seconds_of_byte
    return forward_seconds, backward_seconds
