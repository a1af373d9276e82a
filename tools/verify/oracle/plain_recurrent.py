"""Gated delta nets, Kimi Delta Attention and Mamba-2 mixers of the plain decoder, token by token,
with the state of each head as a matrix."""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig
from tools.verify.oracle.plain_parts import Weights, divided_by_rms, linear


def delta_net(config: ModelConfig, w: Weights, n: int, x: Tensor, positions: Tensor) -> Tensor:
    """Return what the gated delta net of layer n makes of x [b, s, hidden]. It knows no
    positions.

    Before a value is written under its key, what the decayed state has there already is taken away:
    the delta rule.
    """
    sizes = config.delta_net
    b, s, _ = x.shape
    name = f"layers.{n}.delta_net"
    query = _unit_heads(config, w, f"{name}.query", x)
    query = query / sizes.key_dim**0.5
    key = _unit_heads(config, w, f"{name}.key", x)
    value = _active(w, f"{name}.value", x)
    value = value.view(b, s, -1, sizes.value_dim)
    strength = linear(w, f"{name}.strength", x)
    strength = strength.sigmoid()
    decay = _decay(config, w, name, x)
    state = x.new_zeros(b, sizes.value_heads, sizes.key_dim, sizes.value_dim)
    outputs: list[Tensor] = []
    for t in range(s):
        key_now = key[:, t]
        decay_now = decay[:, t, :, :, None]
        strength_now = strength[:, t, :, None]
        state = state * decay_now
        error = value[:, t] - _read(state, key_now)
        written = strength_now * error
        state = state + torch.einsum("bnk,bnv->bnkv", key_now, written)
        outputs.append(_read(state, query[:, t]))
    read = torch.stack(outputs, 1)
    normal = divided_by_rms(read, config.norm_eps)
    weight = w[f"{name}.output_norm.weight"]
    normal = normal * weight
    if sizes.gate_rank:
        gate = _by_way_of_few(w, f"{name}.gate", x)
        gate = gate.sigmoid()
    else:
        gate = linear(w, f"{name}.gate", x)
        gate = F.silu(gate)
    gated = normal.flatten(2) * gate
    return linear(w, f"{name}.output", gated)


def _by_way_of_few(w: Weights, name: str, x: Tensor) -> Tensor:
    """Return features that are made from few of x, of Kimi Delta Attention."""
    few = linear(w, f"{name}_down", x)
    return linear(w, f"{name}_up", few)


def _unit_heads(config: ModelConfig, w: Weights, name: str, x: Tensor) -> Tensor:
    """Return queries or keys of length one, one for each head of values, [b, s, n, key]."""
    sizes = config.delta_net
    b, s, _ = x.shape
    heads = _active(w, name, x)
    heads = heads.view(b, s, -1, sizes.key_dim)
    shared_by = sizes.value_heads // sizes.key_heads
    heads = heads.repeat_interleave(shared_by, 2)
    squares = heads.square().sum(-1, keepdim=True)
    return heads / (squares + 1e-6).sqrt()


def _active(w: Weights, name: str, x: Tensor) -> Tensor:
    """Return features of x that are convolved over the tokens, behind SiLU."""
    features = linear(w, name, x)
    convolved = _convolved(w, name, features)
    return F.silu(convolved)


def _decay(config: ModelConfig, w: Weights, name: str, x: Tensor) -> Tensor:
    """Return the factors by which a delta net forgets, [b, s, n, 1]; in Kimi Delta Attention each
    feature of a key has its own, [b, s, n, key]."""
    sizes = config.delta_net
    b, s, _ = x.shape
    log_rate = w[f"{name}.decay.log_rate"]
    rate = log_rate.exp()
    rate = rate.unsqueeze(-1)
    if sizes.gate_rank:
        step = _by_way_of_few(w, f"{name}.decay", x)
        step = step + w[f"{name}.decay.bias"]
    else:
        step = linear(w, f"{name}.decay", x)
    step = F.softplus(step)
    step = step.view(b, s, sizes.value_heads, -1)
    log_decay = -rate * step
    return log_decay.exp()


def _read(state: Tensor, key: Tensor) -> Tensor:
    """Return what a state [b, n, k, v] has under a key [b, n, k]."""
    return torch.einsum("bnkv,bnk->bnv", state, key)


def mamba(config: ModelConfig, w: Weights, n: int, x: Tensor, positions: Tensor) -> Tensor:
    """Return what the Mamba-2 mixer of layer n makes of x [b, s, hidden]. It knows no positions."""
    sizes = config.mamba
    b, s, _ = x.shape
    name = f"layers.{n}.mamba"

    def convolved(which: str, heads: int) -> Tensor:
        """Return [b, s, n, ...]; all heads of a group share its features."""
        features = linear(w, f"{name}.{which}", x)
        summed = _convolved(w, f"{name}.{which}", features)
        bias = w[f"{name}.{which}_convolution.bias"]
        active = F.silu(summed + bias)
        active = active.view(b, s, heads, -1)
        shared_by = sizes.heads // heads
        return active.repeat_interleave(shared_by, 2)

    query = convolved("query", sizes.groups)
    key = convolved("key", sizes.groups)
    value = convolved("value", sizes.heads)
    step = linear(w, f"{name}.step", x)
    step = F.softplus(step)
    step = step.clamp(min=sizes.least_step)
    log_rate = w[f"{name}.log_rate"]
    rate = log_rate.exp()
    state = x.new_zeros(b, sizes.heads, sizes.state_dim, sizes.head_dim)
    outputs: list[Tensor] = []
    for t in range(s):
        step_now = step[:, t]
        log_decay = -rate * step_now
        decay = log_decay.exp()
        decay = decay[..., None, None]
        written = torch.einsum("bnk,bnv,bn->bnkv", key[:, t], value[:, t], step_now)
        state = state * decay + written
        outputs.append(_read(state, query[:, t]))
    read = torch.stack(outputs, 1)
    skip = w[f"{name}.skip"]
    read = read + skip[:, None] * value
    gate = linear(w, f"{name}.gate", x)
    gate = F.silu(gate)
    gated = read.flatten(2) * gate
    # each group has a norm of its own
    groups = gated.unflatten(-1, (sizes.groups, -1))
    normal = divided_by_rms(groups, config.norm_eps)
    weight = w[f"{name}.output_norm.weight"]
    normal = normal.flatten(2) * weight
    return linear(w, f"{name}.output", normal)


def _convolved(w: Weights, name: str, features: Tensor) -> Tensor:
    """Return features [b, s, f], each summed over the tokens until its own, with weights."""
    weight = w[f"{name}_convolution.weight"]
    kernel = weight.shape[-1]
    num_before = kernel - 1
    padded = F.pad(features, (0, 0, num_before, 0))
    seen = padded.unfold(1, kernel, 1)  # [b, s, f, kernel]
    weighted = seen * weight
    return weighted.sum(-1)
