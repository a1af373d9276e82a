"""A lower bound of the bytes that one layer keeps of a micro-batch, without running it.

Weight gradients need the inputs of products, and attention's backward pass its query, key and
value. Other operands are kept too, and are not counted; `models.estimate.memory` counts all of
them, and takes longer.
"""

from megaprec.precision.plan import PrecisionPlan
from models.config import ModelConfig
from models.estimate.elementwise import LayerShare
from parallel.activation_checkpoint import Recompute


def least_bytes_of_layer(
    config: ModelConfig, plan: PrecisionPlan, share: LayerShare, recompute: Recompute
) -> float:
    """Return the bytes that a layer keeps at least, per token of the rank. Whole layers that are
    recomputed keep their input."""
    # codes of FP8 have a byte
    itemsize = 1 if plan.fp8 else plan.compute.itemsize
    residual = config.hidden / share.sequence_ranks
    all_are_recomputed = recompute.fraction == 1.0 and not recompute.layers
    if all_are_recomputed:
        return residual * itemsize
    # the input of a norm, and that of the product after it
    elements = residual
    if "norm" not in recompute.modules:
        elements += residual
    # latents are projected up once more where attention is recomputed
    if not (config.latent and "attention" in recompute.modules):
        value_width = config.latent.value_dim or config.head_dim
        kv_heads = config.heads if config.latent else config.kv_heads
        queries_and_keys = (config.heads + kv_heads) * config.head_dim
        values = kv_heads * value_width
        elements += (queries_and_keys + values) / share.tensor
    elements += _feed_forward_elements(config, share, recompute)
    return elements * itemsize


def _feed_forward_elements(config: ModelConfig, share: LayerShare, recompute: Recompute) -> float:
    """Return the elements that a feed-forward keeps per token of the rank: what its activation
    function reads and writes, and the rows of experts."""
    width = config.ffn
    rows = 0.0
    if config.experts:
        width = config.experts_per_token * config.ffn + config.shared_experts
        rows = config.experts_per_token * config.hidden * share.slices / share.tensor
    operands = 2 if config.gated else 1
    if "activation" not in recompute.modules:
        operands += 1
    return rows + operands * width / share.tensor
