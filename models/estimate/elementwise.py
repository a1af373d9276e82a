"""The bytes of memory that operators between matrix products move, on one rank.

Norms, rotary positions, activation functions, residual sums, the router and permutation of experts,
casts to FP8 and the loss compute little; their time is that of reading and writing their operands.
Counted is what fused kernels move, as with `train.compile = "block"`: every operand is read or
written once by each of a layer's kernels. A backward pass moves twice as much, the operand and the
gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megaprec.precision.plan import PrecisionPlan
from models.config import ModelConfig
from models.decoder.stages import Cut

BACKWARD = 2  # bytes that a backward pass moves, in those of the forward pass
# A norm and the residual sum before it read two activations and write two.
RESIDUAL = 4
# The fused kernel of attention reads query, key and value and writes the output; rotary positions
# read and write query and key before.
ROTATED = 2
# Of logits, in FP32: they are copied from the dtype of the product and read for the maximum, for
# the sum of exponentials, and for the gradient, which is written in the dtype of the product.
LOGITS_FORWARD = 3
LOGITS_BACKWARD = 2
LOGIT_BYTES = (LOGITS_FORWARD + LOGITS_BACKWARD) * torch.float32.itemsize
# A cast of an activation is a part of the operator that makes it, and writes the codes of both
# directions.
FP8_CAST = 2


@dataclass(frozen=True)
class LayerShare:
    """The part of a layer that one rank computes.

    tensor: tensor-parallel ranks.
    sequence: they cut the sequence between products.
    slices: ranks over which each expert is cut.
    """

    tensor: int = 1
    sequence: bool = False
    slices: int = 1

    @property
    def sequence_ranks(self) -> int:
        """Return over how many ranks the sequence is cut between products."""
        return self.tensor if self.sequence else 1


def forward_bytes(
    config: ModelConfig, cut: Cut, layers: Sequence[int], plan: PrecisionPlan, share: LayerShare
) -> float:
    """Return the bytes that operators between matrix products move in a forward pass of layers of a
    stage, per token of the rank.

    layers: their numbers; of a last stage with modules of multi-token prediction each such module
        counts as the model's last layer.
    """
    modules = config.mtp_layers if cut.last and layers else 0
    last_layer = config.layers - 1
    numbers = [*layers, *[last_layer] * modules]
    kinds = config.count_kinds(numbers)
    return sum(count * _layer_bytes(kind, plan, share) for kind, count in kinds)


def loss_bytes(config: ModelConfig, tensor: int) -> tuple[float, float]:
    """Return the bytes that the loss moves per token in the forward and in the backward pass, on
    each of `tensor` ranks that share the vocabulary."""
    heads = 1 + config.mtp_layers
    logits = heads * config.vocab / tensor * torch.float32.itemsize
    return LOGITS_FORWARD * logits, LOGITS_BACKWARD * logits


def cast_bytes(config: ModelConfig, layers: Sequence[int], share: LayerShare) -> float:
    """Return the bytes that casts to FP8 of one operand of each product move in these layers, per
    token of the rank."""
    total = 0.0
    for number in layers:
        kind = config.kind_of_layer(number)
        # the inputs of the branches, the output of the mixer, and the feed-forward's inner features
        elements = _residual_elements(kind, share) * kind.branches
        elements += kind.mixer_width / share.tensor
        elements += _feed_forward_width(kind) / share.tensor
        total += elements * FP8_CAST
    return total


def _layer_bytes(config: ModelConfig, plan: PrecisionPlan, share: LayerShare) -> float:
    """Return the bytes that the operators between products move in one layer's forward pass, per
    token of the rank."""
    residual = config.branches * RESIDUAL * _residual_elements(config, share)
    mixer = _mixer_elements(config) / share.tensor
    # the activation function reads its operands and writes its result
    operands = 3 if config.gated else 2
    feed_forward = operands * _feed_forward_width(config) / share.tensor
    elements = residual + mixer + feed_forward
    nbytes = elements * plan.compute.itemsize
    if config.experts:
        nbytes += _expert_bytes(config, plan, share)
    return nbytes


def _mixer_elements(config: ModelConfig) -> int:
    """Return the elements that the operators of attention, or of what is in its place, read and
    write."""
    if not config.has_mixer:
        return 0
    if config.delta_net:
        return _delta_net_elements(config)
    return _mamba_elements(config) if config.mamba else _attention_elements(config)


def _attention_elements(config: ModelConfig) -> int:
    """Return the elements that rotary positions, attention's kernel and its gate read and write."""
    key_width = config.head_dim
    value_width = config.latent.value_dim or key_width
    kv_heads = config.heads if config.latent else config.kv_heads
    queries_and_keys = (config.heads + kv_heads) * key_width
    values_and_output = (config.heads + kv_heads) * value_width
    kernel = queries_and_keys + values_and_output
    # The gate and the output are read, and the output is written.
    gate = 3 * config.heads * value_width if config.attention_gate else 0
    return ROTATED * queries_and_keys + kernel + gate


def _delta_net_elements(config: ModelConfig) -> int:
    """Return the elements that the operators of a gated delta net read and write, each as a kernel
    of its own would: the convolution, the delta rule, and the norm with the gate."""
    sizes = config.delta_net
    convolution = 2 * sizes.convolved_width
    rule = sizes.convolved_width + sizes.value_width
    if sizes.gate_rank:
        # as wide as the keys: made from what is projected, and read by the rule
        rule += 3 * sizes.decay_width
    norm_and_gate = 3 * sizes.value_width
    return convolution + rule + norm_and_gate


def _mamba_elements(config: ModelConfig) -> int:
    """Return the elements that the operators of a Mamba-2 mixer read and write, each as a kernel of
    its own would: the convolution, the recurrence, and the gate with the norm."""
    sizes = config.mamba
    convolution = 2 * sizes.convolved_width
    recurrence = sizes.convolved_width + sizes.width
    gate_and_norm = 3 * sizes.width
    return convolution + recurrence + gate_and_norm


def _expert_bytes(config: ModelConfig, plan: PrecisionPlan, share: LayerShare) -> float:
    """Return the bytes that the router and the permutation of experts' rows move per token of the
    rank.

    Rows are read and written on their way to their experts, and so are the results.
    """
    tokens = share.slices / share.tensor  # the part of its tokens that the rank sends to experts
    # read and written, there and back
    rows = 4 * config.experts_per_token * config.hidden * tokens * plan.compute.itemsize
    # scores in FP32: read, written, and read by the choice
    scores = 3 * config.experts * torch.float32.itemsize
    return rows + scores / share.sequence_ranks


def _residual_elements(config: ModelConfig, share: LayerShare) -> float:
    """Return the features of a token between blocks that a rank has, on average over its tokens."""
    return config.hidden / share.sequence_ranks


def _feed_forward_width(config: ModelConfig) -> int:
    """Return the number of inner features of the feed-forward, or of all experts that a token
    passes; 0 if the layer has neither."""
    if not config.has_feed_forward:
        return 0
    if config.experts:
        return config.experts_per_token * config.ffn + config.shared_experts
    return config.ffn
