"""Gated delta nets, Kimi Delta Attention and Mamba-2 mixers of the plain decoder, token by token,
with the state of each head as a matrix.

Shapes: b samples, s tokens, n heads, k features of a key, v of a value, f of a projection.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig
from tools.verify.oracle.plain_parts import Weights, divided_by_rms, linear


def delta_net(
    config: ModelConfig, weights: Weights, layer: int, x: Tensor, positions: Tensor
) -> Tensor:
    """Return what the gated delta net of a layer makes of x [b, s, hidden], of the same shape. It
    knows no positions.

    Before a value is written under its key, what the decayed state has there already is taken away:
    the delta rule.
    """
    sizes = config.delta_net
    b, s, _ = x.shape
    name = f"layers.{layer}.delta_net"
    query = _unit_heads(config, weights, f"{name}.query", x)
    # as attention divides its scores
    query = query / sizes.key_dim**0.5
    key = _unit_heads(config, weights, f"{name}.key", x)
    value = _active(weights, f"{name}.value", x)
    value = value.view(b, s, -1, sizes.value_dim)
    strength = linear(weights, f"{name}.strength", x)
    strength = strength.sigmoid()  # [b, s, n], the part of an error that is corrected
    decay = _decay(config, weights, name, x)
    state = x.new_zeros(b, sizes.value_heads, sizes.key_dim, sizes.value_dim)
    outputs: list[Tensor] = []
    for token in range(s):
        query_now = query[:, token]
        key_now = key[:, token]
        value_now = value[:, token]
        decay_now = decay[:, token, :, :, None]  # of each row of the state, or one of all
        strength_now = strength[:, token, :, None]
        state = state * decay_now
        remembered = _read(state, key_now)
        error = value_now - remembered
        written = strength_now * error
        state = state + torch.einsum("bnk,bnv->bnkv", key_now, written)
        output = _read(state, query_now)
        outputs.append(output)
    read = torch.stack(outputs, 1)  # [b, s, n, v]
    normal = divided_by_rms(read, config.norm_eps)
    weight = weights[f"{name}.output_norm.weight"]
    normal = normal * weight
    # of Kimi Delta Attention alone: its gate goes by way of a few features
    if sizes.gate_rank:
        gate = _by_way_of_few(weights, f"{name}.gate", x)
        gate = gate.sigmoid()
    else:
        gate = linear(weights, f"{name}.gate", x)
        gate = F.silu(gate)
    joined_heads = normal.flatten(2)
    gated = joined_heads * gate
    return linear(weights, f"{name}.output", gated)


def _by_way_of_few(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Return features [b, s, f] that two products make of x, the first of which has few results: in
    Kimi Delta Attention."""
    few = linear(weights, f"{name}_down", x)
    return linear(weights, f"{name}_up", few)


def _unit_heads(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    """Return queries or keys of length one, one for each head of values, [b, s, n, key]."""
    sizes = config.delta_net
    b, s, _ = x.shape
    heads = _active(weights, name, x)
    heads = heads.view(b, s, -1, sizes.key_dim)
    shared_by = sizes.value_heads // sizes.key_heads
    heads = heads.repeat_interleave(shared_by, 2)
    squares = heads.square()
    sum_of_squares = squares.sum(-1, keepdim=True)
    # of both, the small number of the published models: a head of zeros stays zero
    length = (sum_of_squares + 1e-6).sqrt()
    return heads / length


def _active(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Return features of x [b, s, f] that are convolved over the tokens, behind SiLU."""
    features = linear(weights, name, x)
    convolved = _convolved(weights, name, features)
    return F.silu(convolved)


def _decay(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    """Return the factors by which a delta net forgets, [b, s, n, 1]; in Kimi Delta Attention each
    feature of a key has its own, [b, s, n, key]."""
    sizes = config.delta_net
    b, s, _ = x.shape
    log_rate = weights[f"{name}.decay.log_rate"]
    rate = log_rate.exp()
    rate = rate.unsqueeze(-1)  # [n, 1], of all features of a key
    if sizes.gate_rank:
        step = _by_way_of_few(weights, f"{name}.decay", x)
        step = step + weights[f"{name}.decay.bias"]
    else:
        step = linear(weights, f"{name}.decay", x)
    step = F.softplus(step)
    step = step.view(b, s, sizes.value_heads, -1)
    log_decay = -rate * step
    return log_decay.exp()


def _read(state: Tensor, key: Tensor) -> Tensor:
    """Return what a state [b, n, k, v] has under a key [b, n, k]: a value [b, n, v]."""
    return torch.einsum("bnkv,bnk->bnv", state, key)


def mamba(
    config: ModelConfig, weights: Weights, layer: int, x: Tensor, positions: Tensor
) -> Tensor:
    """Return what the Mamba-2 mixer of a layer makes of x [b, s, hidden], of the same shape. It
    knows no positions."""
    sizes = config.mamba
    b, s, _ = x.shape
    name = f"layers.{layer}.mamba"

    def convolved(which: str, heads: int) -> Tensor:
        """Return queries, keys or values [b, s, n, features]. heads: those that have features of
        their own; each is repeated for the heads that share it."""
        features = linear(weights, f"{name}.{which}", x)
        summed = _convolved(weights, f"{name}.{which}", features)
        bias = weights[f"{name}.{which}_convolution.bias"]
        active = F.silu(summed + bias)
        active = active.view(b, s, heads, -1)
        shared_by = sizes.heads // heads
        return active.repeat_interleave(shared_by, 2)

    query = convolved("query", sizes.groups)
    key = convolved("key", sizes.groups)
    value = convolved("value", sizes.heads)
    step = linear(weights, f"{name}.step", x)
    step = F.softplus(step)
    step = step.clamp(min=sizes.least_step)  # [b, s, n]
    log_rate = weights[f"{name}.log_rate"]
    rate = log_rate.exp()
    state = x.new_zeros(b, sizes.heads, sizes.state_dim, sizes.head_dim)
    outputs: list[Tensor] = []
    for token in range(s):
        query_now = query[:, token]
        key_now = key[:, token]
        value_now = value[:, token]
        step_now = step[:, token]
        log_decay = -rate * step_now
        decay = log_decay.exp()
        decay = decay[..., None, None]
        written = torch.einsum("bnk,bnv,bn->bnkv", key_now, value_now, step_now)
        state = state * decay + written
        output = _read(state, query_now)
        outputs.append(output)
    read = torch.stack(outputs, 1)  # [b, s, n, v]
    skip = weights[f"{name}.skip"]
    # a value also passes by the state
    skipped = skip[:, None] * value
    read = read + skipped
    gate = linear(weights, f"{name}.gate", x)
    gate = F.silu(gate)
    joined_heads = read.flatten(2)
    gated = joined_heads * gate
    # each group has a norm of its own
    groups = gated.unflatten(-1, (sizes.groups, -1))
    normal = divided_by_rms(groups, config.norm_eps)
    weight = weights[f"{name}.output_norm.weight"]
    joined_groups = normal.flatten(2)
    normal = joined_groups * weight
    return linear(weights, f"{name}.output", normal)


def _convolved(weights: Weights, name: str, features: Tensor) -> Tensor:
    """Return features [b, s, f], each a weighted sum over the token's own and some before it."""
    weight = weights[f"{name}_convolution.weight"]
    kernel = weight.shape[-1]
    num_before = kernel - 1
    # zeros before the first token, so that none sees a later one
    padded = F.pad(features, (0, 0, num_before, 0))
    seen = padded.unfold(1, kernel, 1)  # [b, s, f, kernel]
    weighted = seen * weight
    return weighted.sum(-1)
