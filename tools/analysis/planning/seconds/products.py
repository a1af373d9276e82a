"""The time of matrix products with weights: their FLOPs over the speed that products reach, or as
long as their weights take to be read."""

from dataclasses import dataclass

import torch

from megaprec.errors import UserError
from models.config import ModelConfig
from models.estimate.flops import StageCost
from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.config.rules.expert_ranks import expert_slices
from tools.config.run_file import RunConfig

# Where rows of a matrix begin, so that the tensor cores' fast kernels can load them.
ALIGNED_BYTES = 16


@dataclass(frozen=True)
class ProductSeconds:
    """Seconds of a stage's products for one micro-batch, on one rank.

    input: without those of the forward pass that are recomputed.
    """

    forward: float
    input: float
    weight: float
    recomputed: float


def fp8_share(config: RunConfig, cost: StageCost) -> float:
    """Return the fraction of a stage's layers whose products are in FP8."""
    fp8 = config.plan.fp8
    if fp8 is None:
        return 0.0
    # the first and the last layers of a model may stay in the wider dtype
    end = config.model.layers - fp8.last_layers
    layers = cost.cut.layers
    narrow = [layer for layer in layers if fp8.first_layers <= layer < end]
    return len(narrow) / len(layers) if layers else 0.0


def product_seconds(config: RunConfig, cost: StageCost, assumed: Assumptions) -> ProductSeconds:
    """Return the time of a stage's products with weights, for one micro-batch on one rank."""
    parallel = config.parallel
    model = config.sized_model
    ranks = parallel.tensor * parallel.context
    tokens = config.train.micro_batch * config.train.seq_length
    # FLOP/s of all ranks that share a micro-batch, for the FLOPs below are those of all of them
    speed = assumed.tflops * 1e12 * assumed.efficiency * ranks
    fp8_speed = _fp8_speed(config, assumed) * ranks
    share = fp8_share(config, cost)

    def of_layers(flops: float) -> float:
        """Return the seconds of FLOPs of layers, of which the fraction `share` is in FP8."""
        seconds_of_flop = share / fp8_speed + (1 - share) / speed
        return flops * seconds_of_flop

    head_speed = speed
    if has_misaligned_head(config):
        head_speed = speed / assumed.misaligned
    head_flops = 0.0
    if cost.cut.last:
        head_flops = tokens * _head_flops(model)
    layer_flops = cost.forward - cost.attention - cost.experts - head_flops
    # seconds of the products of one pass, of the experts and of all others
    others_seconds = of_layers(layer_flops) + head_flops / head_speed
    expert_speed = assumed.experts * _filled(config, assumed)
    experts_seconds = of_layers(cost.experts) / expert_speed

    # elements of the weights on this rank
    other_elements = (cost.parameters - cost.expert_parameters) / parallel.tensor
    ranks_of_experts = parallel.expert * expert_slices(parallel)
    expert_elements = cost.expert_parameters / ranks_of_experts
    bandwidth = assumed.bandwidth * 1e9
    # every product reads its weight: the slower of both counts
    reading = config.plan.compute.itemsize / bandwidth  # seconds of an element
    one_pass = max(others_seconds, other_elements * reading)
    one_pass += max(experts_seconds, expert_elements * reading)
    # the gradient of a weight is read and written where it adds up
    adding = 2 * config.plan.gradients.itemsize / bandwidth
    weight = max(others_seconds, other_elements * adding)
    weight += max(experts_seconds, expert_elements * adding)
    # The input gradient has the products of the forward pass, and attention's twice; the rest is
    # recomputed.
    recomputed = cost.input - cost.forward - cost.attention
    recomputed_layers = recomputed - cost.recomputed_attention - cost.recomputed_experts
    recomputed_seconds = of_layers(recomputed_layers)
    recomputed_seconds += of_layers(cost.recomputed_experts) / expert_speed
    return ProductSeconds(
        forward=one_pass,
        input=one_pass,
        weight=weight,
        recomputed=max(0.0, recomputed_seconds),
    )


def _fp8_speed(config: RunConfig, assumed: Assumptions) -> float:
    """Return the FLOP/s of a rank's FP8 products; those of others if no peak of FP8 is known.

    Raises UserError for NVFP4, which is emulated.
    """
    usual = assumed.tflops * 1e12 * assumed.efficiency
    fp8 = config.plan.fp8
    if fp8 is not None and fp8.scales.four_bits:
        raise UserError.of("planning.nvfp4_times", advice="predict a run with another kind")
    if fp8 is None or not assumed.fp8_tflops:
        return usual
    reached = assumed.fp8_efficiency * fp8.scales.speed
    return assumed.fp8_tflops * 1e12 * assumed.efficiency * reached


def _filled(config: RunConfig, assumed: Assumptions) -> float:
    """Return the fraction of their speed that products of experts reach with as many rows as an
    expert gets, if all get as many: few rows do not fill a GPU."""
    model = config.model
    parallel = config.parallel
    if not model.experts:
        return 1.0
    tokens = config.train.micro_batch * config.train.seq_length / parallel.context
    # of all ranks whose tokens travel to the expert
    tokens *= parallel.expert * expert_slices(parallel) / parallel.tensor
    rows = tokens * model.experts_per_token / model.experts  # of one expert
    return rows / (rows + assumed.half_rows)


def has_misaligned_head(config: RunConfig) -> bool:
    """Return True if the rows of a rank's logits, in half precision, do not begin at multiples of
    `ALIGNED_BYTES`. Of other dtypes no time is known."""
    itemsize = config.plan.compute.itemsize
    if itemsize != torch.bfloat16.itemsize:
        return False
    # the vocabulary is padded until the ranks can share it
    columns = -(-config.sized_model.vocab // config.parallel.tensor)
    row_bytes = columns * itemsize
    return row_bytes % ALIGNED_BYTES != 0


def _head_flops(model: ModelConfig) -> int:
    """Return the forward FLOPs of all output heads, per token."""
    heads = 1 + model.mtp_layers  # one for each module of multi-token prediction
    return heads * model.head_flops()
