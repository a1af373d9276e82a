"""The FLOPs of one micro-batch in each stage of a model, and of one token in training.

Only matrix products are counted. The backward pass of a product y = x W.T has two products of the
same size, one for x (the input gradient) and one for W (the weight gradient). Attention's own
products have no weight, so both of their backward products belong to the input gradient, and so
does recomputation. Norms, softmax and activation functions are not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from models.config import ModelConfig
from models.decoder.stages import Cut
from models.parameter_counts import layer_expert_parameters, stage_parameters
from parallel.activation_checkpoint import KEEP, Recompute
from parallel.pipeline.instructions import Instruction, Op


@dataclass(frozen=True)
class StageCost:
    """The cost of one stage.

    forward, input, weight: FLOPs of the forward, the input gradient and the weight gradient of one
        micro-batch.
    parameters: number of elements; a tied head is counted in the stage that holds it. The copy of
        the embedding that modules of multi-token prediction read is not counted.
    attention: the part of `forward` that is attention's own products, as if it were not causal;
        `input` has twice as much.
    experts: the part of `forward`, of `weight` and of `input` that is products of routed experts.
    recomputed_attention, recomputed_experts: the parts of `input` that are such products of the
        forward pass once more.
    expert_parameters: elements of routed experts.
    """

    cut: Cut
    forward: float
    input: float
    weight: float
    parameters: int
    attention: float = 0.0
    experts: float = 0.0
    recomputed_attention: float = 0.0
    recomputed_experts: float = 0.0
    expert_parameters: int = 0

    def flops(self, instruction: Instruction) -> float:
        """Return the FLOPs of an instruction of this stage."""
        costs = {
            Op.FORWARD: self.forward,
            Op.BACKWARD: self.input + self.weight,
            Op.BACKWARD_INPUT: self.input,
            Op.BACKWARD_WEIGHT: self.weight,
        }
        # Messages and reductions have no products.
        return costs.get(instruction.op, 0.0)


def training_flops(config: ModelConfig, seq_length: int) -> int:
    """Return the FLOPs of the model's matrix products for one token, forward and backward: the
    numerator of MFU.

    A backward pass has twice the products of a forward pass; recomputation is not counted.
    Attention counts the whole sequence, or window, as if it were not causal. Of experts those are
    counted that a token is sent to, and modules of multi-token prediction are counted with their
    heads. The other rules are in appendix B of PaLM (Chowdhery et al., 2022), there without the
    products of an untied embedding.
    """
    forward = config.flops_per_token(seq_length) + config.mtp_flops(seq_length)
    return 3 * forward


def stage_costs(
    config: ModelConfig,
    cuts: Sequence[Cut],
    seq_length: int,
    micro_batch: int,
    recompute: Recompute = KEEP,
) -> list[StageCost]:
    """Return the cost of each stage, summed over its tp and cp ranks. The vocabulary must be
    known."""
    return [
        _stage_cost(config, cut, seq_length, seq_length * micro_batch, recompute) for cut in cuts
    ]


def _stage_cost(
    config: ModelConfig,
    cut: Cut,
    seq_length: int,
    tokens: int,
    recompute: Recompute,
) -> StageCost:
    """Return the cost of one stage. tokens: of a micro-batch."""
    # All FLOPs below are of one token. A module of multi-token prediction counts as a layer such as
    # the model's last one.
    modules = config.mtp_layers if cut.last else 0
    with_modules = [*cut.layers, *[config.layers - 1] * modules]
    attention = _attention_flops(config, with_modules, seq_length)
    layers = config.over_layers(lambda kind: kind.layer_flops(seq_length), cut.layers)
    head = config.head_flops() + config.mtp_flops(seq_length) if cut.last else 0
    weighted = layers + head - attention  # products with weights
    lookup = config.embedding_flops() if cut.first else 0
    # what the backward pass computes again
    recomputed = _recomputed_flops(config, recompute, cut, seq_length)
    repeated_layers = _whole_recomputed_layers(config, recompute, cut)
    repeated_attention = [*repeated_layers]
    if "attention" in recompute.modules:
        repeated_attention += with_modules
    experts = config.over_layers(ModelConfig.expert_flops, with_modules)
    repeated_experts = config.over_layers(ModelConfig.expert_flops, repeated_layers)
    return StageCost(
        cut,
        forward=tokens * (weighted + attention),
        input=tokens * (weighted + 2 * attention + lookup + recomputed),
        weight=tokens * weighted,
        parameters=stage_parameters(config, cut.layers, cut.first, cut.last),
        attention=tokens * attention,
        experts=tokens * experts,
        recomputed_attention=tokens * _attention_flops(config, repeated_attention, seq_length),
        recomputed_experts=tokens * repeated_experts,
        expert_parameters=config.over_layers(layer_expert_parameters, with_modules),
    )


def _attention_flops(config: ModelConfig, layers: Sequence[int], seq_length: int) -> int:
    """Return the FLOPs, per token, of the products without weights of attention, or of recurrences
    in its place, in layers, which may repeat."""
    return config.over_layers(lambda kind: kind.attention_flops(seq_length), layers)


def _recomputed_flops(
    config: ModelConfig,
    recompute: Recompute,
    cut: Cut,
    seq_length: int,
) -> int:
    """Return the FLOPs, per token, that a stage recomputes."""
    flops = sum(
        config.kind_of_layer(layer).recomputed_layer_flops(seq_length)
        for layer in _whole_recomputed_layers(config, recompute, cut)
    )
    if "attention" in recompute.modules:
        modules = config.mtp_layers if cut.last else 0
        layers = [*cut.layers, *[config.layers - 1] * modules]
        flops += config.over_layers(
            lambda kind: kind.recomputed_attention_flops(seq_length), layers
        )
    return flops


def _whole_recomputed_layers(config: ModelConfig, recompute: Recompute, cut: Cut) -> list[int]:
    """Return the numbers of the layers that a stage recomputes whole.

    A module of multi-token prediction has a layer such as the last one, recomputed if all layers
    are.
    """
    whole_layers = [*cut.layers[: recompute.count_whole_layers(len(cut.layers))]]
    modules = config.mtp_layers if cut.last else 0
    if len(whole_layers) == len(cut.layers):
        whole_layers += [config.layers - 1] * modules
    return whole_layers
