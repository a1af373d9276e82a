"""The bytes that a rank sends in an instruction to ranks of the same stage, and in a step to its
replicas."""

import torch

from models.config import ModelConfig
from models.estimate.flops import StageCost
from models.parameter_counts import end_parameters, expert_parameters, num_parameters
from parallel.pipeline.instructions import Op
from tools.config.rules.expert_ranks import expert_replicas, expert_slices, replicas_sharing_state
from tools.config.run_file import RunConfig
from tools.config.sharding import sharding_of
from tools.config.tables.settings import Parallel


def bytes_of(op: Op, forward: float, input_gradient: float, weight_gradient: float = 0.0) -> float:
    """Return the bytes that an instruction sends, by those of forward pass, input gradient and
    weight gradient; 0 for an instruction that computes none of these."""
    by_op = {
        Op.FORWARD: forward,
        Op.BACKWARD: input_gradient + weight_gradient,
        Op.BACKWARD_INPUT: input_gradient,
        Op.BACKWARD_WEIGHT: weight_gradient,
    }
    return by_op.get(op, 0.0)


def local_tokens(config: RunConfig) -> int:
    """Return the tokens of a micro-batch that a context-parallel rank has."""
    train = config.train
    tokens_of_sequence = train.seq_length // config.parallel.context
    return tokens_of_sequence * train.micro_batch


def tensor_bytes(config: RunConfig, cost: StageCost, op: Op) -> float:
    """Return the bytes that a rank sends to its tensor-parallel ranks in an instruction.

    A block gathers or copies its input and sums or scatters its output, each in both directions;
    with sequence parallelism inputs are gathered again for the weight gradients, but not those of
    experts. Whole experts alone have nothing to sum under sequence parallelism. An all-reduce is a
    reduce-scatter and an all-gather.
    """
    parallel = config.parallel
    model = config.model
    cut = cost.cut
    layers = len(cut.layers)
    # a gather or a scatter of one activation, of which the rank has its own part
    activation = local_tokens(config) * model.hidden * config.plan.compute.itemsize
    transfer = activation * (1 - 1 / parallel.tensor)
    num_expert_layers = expert_layers(config, cost)
    # layers that sum nothing over tp
    unsummed = 0
    if parallel.sequence and expert_slices(parallel) == 1 and not model.shared_experts:
        unsummed = num_expert_layers
    # of each branch of a layer a gather and a scatter, or an all-reduce, which is both
    branches = model.over_layers(lambda kind: kind.branches, cut.layers)
    forward = (2 * branches - unsummed) * transfer
    # of Kimi Delta Attention, what all heads share: gathered, and its gradient summed
    shared_width = model.over_layers(lambda kind: 2 * kind.delta_net.gate_rank, cut.layers)
    shared = transfer * shared_width / model.hidden
    if parallel.sequence:
        forward += shared
    recomputed = config.recompute.count_whole_layers(layers) / layers
    # the input gradient reverses the forward's transfers; a recomputed layer makes them again
    input_gradient = forward * (1 + recomputed)
    # the gradient of the head's input is summed, that of the embedding's output gathered
    input_gradient += _end_bytes(parallel, transfer, summed=cut.last, gathered=cut.first)
    if not parallel.sequence:
        input_gradient += 2 * shared
    weight_gradient = 0.0
    if parallel.sequence:
        inputs_gathered_again = branches - num_expert_layers
        if cut.last:
            inputs_gathered_again += 1  # that of the head
        weight_gradient = inputs_gathered_again * transfer
    # last, for a recomputed layer repeats neither the embedding's transfer nor the head's
    forward += _end_bytes(parallel, transfer, summed=cut.first, gathered=cut.last)
    return bytes_of(op, forward, input_gradient, weight_gradient)


def _end_bytes(parallel: Parallel, transfer: float, summed: bool, gathered: bool) -> float:
    """Return the bytes that embedding and head send in a pass.

    transfer: of a gather or a scatter of one activation. summed: the stage has the end whose result
    is summed over the ranks. gathered: it has the other end, which is gathered under sequence
    parallelism.
    """
    sent = 0.0
    if summed:
        # under sequence parallelism a scatter, else an all-reduce, which is also a gather
        sent += transfer if parallel.sequence else 2 * transfer
    if gathered and parallel.sequence:
        sent += transfer
    return sent


def expert_layers(config: RunConfig, cost: StageCost) -> int:
    """Return how many layers of a stage have experts."""
    with_experts = {*config.model.expert_layers}
    return sum(layer in with_experts for layer in cost.cut.layers)


def expert_bytes(config: RunConfig, cost: StageCost, op: Op) -> float:
    """Return the bytes that a rank sends to the ranks of other experts in an instruction, if all
    get as many tokens.

    Rows go to their experts and results come back, in the forward pass and for the input gradient.
    """
    parallel = config.parallel
    model = config.model
    if parallel.expert == 1:
        return 0.0
    layers = len(cost.cut.layers)
    tokens = local_tokens(config) * expert_slices(parallel) / parallel.tensor
    rows = tokens * model.experts_per_token * expert_layers(config, cost)
    row_bytes = model.hidden * config.plan.compute.itemsize
    # there and back, but for the experts of the rank itself
    share_elsewhere = 1 - 1 / parallel.expert
    forward = 2 * rows * row_bytes * share_elsewhere
    recomputed = config.recompute.count_whole_layers(layers) / layers
    input_gradient = forward * (1 + recomputed)
    return bytes_of(op, forward, input_gradient)


def context_bytes(config: RunConfig, cost: StageCost, op: Op) -> float:
    """Return the bytes that a rank sends to the ranks that share its sequences in an instruction.

    Each layer with attention sends the own keys and values to all others, forward and backward, and
    their gradients, in FP32, once more: by ring they go all the way round, and by gather they are
    summed where they belong. A layer with a recurrent state exchanges tokens for heads.
    """
    parallel = config.parallel
    model = config.model
    if parallel.context == 1:
        return 0.0
    with_attention = {*model.attention_layers}
    layers = [layer for layer in cost.cut.layers if layer in with_attention]
    others = parallel.context - 1

    def features(kind: ModelConfig) -> int:
        """Return the features of keys and values of a layer on a rank."""
        # with more ranks than heads each rank has a copy of one
        local_heads = max(1, kind.kv_heads // parallel.tensor)
        return 2 * local_heads * kind.head_dim

    # elements of keys and values, of all layers
    elements = model.over_layers(features, layers) * local_tokens(config)
    sent = elements * config.plan.attention.itemsize * others
    # in a ring a gradient takes one hop more than its keys, back to their rank
    gradient_hops = parallel.context if config.engine_options.ring else others
    gradients = elements * torch.float32.itemsize * gradient_hops
    recomputed_passes = _passes_again(config, len(cost.cut.layers))
    passes = 1 + recomputed_passes
    input_gradient = passes * sent + gradients
    kinds = model.count_kinds(cost.cut.layers)
    exchanged = sum(count * _exchanged_bytes(config, kind) for kind, count in kinds)
    input_gradient += passes * exchanged
    return bytes_of(op, sent + exchanged, input_gradient)


def _passes_again(config: RunConfig, layers: int) -> float:
    """Return how often a layer's attention, or what is in its place, is computed again, on average
    over the layers of a stage."""
    times = config.recompute.count_whole_layers(layers) / layers
    if "attention" in config.recompute.modules:
        times += 1
    return times


def _exchanged_bytes(config: RunConfig, kind: ModelConfig) -> float:
    """Return the bytes that a rank sends to exchange tokens for heads and back in a layer with a
    recurrent state; 0 of another layer."""
    parallel = config.parallel
    ranks = parallel.tensor * parallel.context
    if sizes := kind.delta_net:
        # heads of keys that all of the ranks have, some of them as copies
        key_heads = max(sizes.key_heads, ranks)
        keys = 2 * key_heads * sizes.key_dim
        values = sizes.value_width
        read = keys + values + sizes.value_heads + sizes.decay_width
    elif mixer := kind.mamba:
        groups = max(mixer.groups, ranks)
        values = mixer.width
        read = 2 * groups * mixer.state_dim + values + mixer.heads
    else:
        return 0.0
    # what is read in the dtype of products, and the results in the sensitive one
    plan = config.plan
    of_token = read * plan.compute.itemsize + values * plan.sensitive.itemsize
    share_elsewhere = 1 - 1 / parallel.context
    return share_elsewhere * of_token / parallel.tensor * local_tokens(config)


def whole_gradients(config: RunConfig, held: float) -> float:
    """Return the bytes of the gradients of all parameters of a rank, before replicas share them
    out. held: the bytes of those that it keeps."""
    if not config.parallel.shards_gradients:
        return held
    expert_elements, other_elements = elements_of_pipeline(config)
    held_of_experts = expert_elements / replicas_sharing_state(config.parallel)
    held_of_others = other_elements / sharding_of(config).zero
    held_elements = held_of_experts + held_of_others
    return held * (expert_elements + other_elements) / held_elements


def whole_weights(config: RunConfig, gradients: float, held: float) -> float:
    """Return the bytes of the weights of a rank's parameters, as they travel.

    gradients: bytes of all of them. held: the bytes of weights that the rank keeps.
    """
    if not config.parallel.shards_weights:
        return held
    return gradients * weight_itemsize(config) / config.plan.gradients.itemsize


def weight_itemsize(config: RunConfig) -> int:
    """Return the bytes of an element of the weights, as they travel."""
    plan = config.plan
    in_codes = plan.fp8 is not None and plan.fp8.parameters
    if in_codes:  # of FP8
        return 1
    return plan.parameters.itemsize


def kept_layers(config: RunConfig) -> float:
    """Return how many layers of a rank ZeRO-3 keeps whole by parallel.zero_keep, if the rank has so
    many. Where the key is a size, they are as many layers of the mean size as fit into it."""
    parallel = config.parallel
    if not parallel.keep_bytes:
        return parallel.keep_layers
    expert_elements, other_elements = elements_of_pipeline(config)
    at_ends = end_parameters(config.sized_model) / parallel.tensor
    in_layers = expert_elements + other_elements - at_ends
    bytes_of_layer = in_layers / config.model.layers * weight_itemsize(config)
    return parallel.keep_bytes // bytes_of_layer


def layer_gathers(config: RunConfig) -> float:
    """Return how often a step gathers the weights of a layer under ZeRO-3, on average: twice in
    each micro-batch, or once if they are kept."""
    kept_of_pipeline = kept_layers(config) * config.parallel.pipeline
    kept_share = min(1.0, kept_of_pipeline / config.model.layers)
    return kept_share + (1 - kept_share) * 2 * config.num_microbatches


def _weight_gathers(config: RunConfig) -> tuple[float, float]:
    """Return how often a step gathers the weights of experts, and others, on average."""
    if not config.parallel.shards_weights:
        return 1.0, 1.0
    model = config.sized_model
    of_layers = layer_gathers(config)
    # embedding and head are gathered for one pass, or stay until the other
    others = num_parameters(model) - expert_parameters(model)
    share_at_ends = end_parameters(model) / others
    more_at_ends = config.num_microbatches - of_layers
    return of_layers, of_layers + share_at_ends * more_at_ends


def replica_bytes(config: RunConfig, gradients: float, weights: float) -> float:
    """Return the bytes that a rank sends to its replicas in a step: gradients, under ZeRO-2 and 3
    of each micro-batch, and weights, under ZeRO-3 in each pass through a layer.

    gradients, weights: the bytes of the rank's parameters.
    """
    parallel = config.parallel
    plan = config.plan
    # gradients are held in one dtype and may travel in another
    travelling = gradients * plan.reduce.itemsize / plan.gradients.itemsize
    if parallel.shards_gradients:
        travelling *= config.num_microbatches
    expert_elements, other_elements = elements_of_pipeline(config)
    expert_share = expert_elements / (expert_elements + other_elements)
    expert_gathers, other_gathers = _weight_gathers(config)
    # by part of the weights: their share, its gathers, its replicas, and those among them that
    # share state
    parts = (
        (1 - expert_share, other_gathers, parallel.copies, sharding_of(config).zero),
        (expert_share, expert_gathers, expert_replicas(parallel), replicas_sharing_state(parallel)),
    )
    sent = 0.0
    for share, gathers, replicas, sharers in parts:
        transfers = 1 if sharers == replicas else 2  # a reduce-scatter, or an all-reduce
        of_gradients = transfers * (1 - 1 / replicas) * travelling
        of_weights = gathers * (1 - 1 / sharers) * weights
        sent += share * (of_gradients + of_weights)
    return sent


def elements_of_pipeline(config: RunConfig) -> tuple[float, float]:
    """Return the elements of experts and of other weights that the ranks of a pipeline hold
    together."""
    parallel = config.parallel
    model = config.sized_model
    in_experts = expert_parameters(model)
    others = num_parameters(model) - in_experts
    expert_ranks = parallel.expert * expert_slices(parallel)
    return in_experts / expert_ranks, others / parallel.tensor
