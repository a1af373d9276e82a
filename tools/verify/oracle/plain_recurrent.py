"""Gated delta nets and Mamba-2 mixers of the plain decoder, token by token, with the state of each
head as a matrix."""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig
from tools.verify.oracle.plain_parts import Weights, divided_by_rms, linear


def delta_net(config: ModelConfig, w: Weights, n: int, x: Tensor, positions: Tensor) -> Tensor:
    """Return what the gated delta net of layer n makes of x [b, s, hidden]. It knows no
    positions."""
    sizes = config.delta_net
    b, s, _ = x.shape
    name = f"layers.{n}.delta_net"

    def convolved(which: str, width: int) -> Tensor:
        features = linear(w, f"{name}.{which}", x)
        return F.silu(_convolved(w, f"{name}.{which}", features)).view(b, s, -1, width)

    def unit(heads: Tensor) -> Tensor:
        of_each_value = heads.repeat_interleave(sizes.value_heads // sizes.key_heads, 2)
        return of_each_value / (of_each_value.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    query = unit(convolved("query", sizes.key_dim)) / sizes.key_dim**0.5
    key = unit(convolved("key", sizes.key_dim))
    value = convolved("value", sizes.value_dim)
    strength = linear(w, f"{name}.strength", x).sigmoid()
    rate = w[f"{name}.decay.log_rate"].exp()
    decay = (-rate * F.softplus(linear(w, f"{name}.decay", x))).exp()
    state = x.new_zeros(b, sizes.value_heads, sizes.key_dim, sizes.value_dim)
    outputs: list[Tensor] = []
    for t in range(s):
        state = state * decay[:, t, :, None, None]
        error = value[:, t] - torch.einsum("bnkv,bnk->bnv", state, key[:, t])
        written = strength[:, t, :, None] * error
        state = state + torch.einsum("bnk,bnv->bnkv", key[:, t], written)
        outputs.append(torch.einsum("bnkv,bnk->bnv", state, query[:, t]))
    normal = divided_by_rms(torch.stack(outputs, 1), config.norm_eps)
    read = (normal * w[f"{name}.output_norm.weight"]).flatten(2)
    return linear(w, f"{name}.output", read * F.silu(linear(w, f"{name}.gate", x)))


def mamba(config: ModelConfig, w: Weights, n: int, x: Tensor, positions: Tensor) -> Tensor:
    """Return what the Mamba-2 mixer of layer n makes of x [b, s, hidden]. It knows no positions."""
    sizes = config.mamba
    b, s, _ = x.shape
    name = f"layers.{n}.mamba"

    def convolved(which: str, heads: int) -> Tensor:
        made = _convolved(w, f"{name}.{which}", linear(w, f"{name}.{which}", x))
        active = F.silu(made + w[f"{name}.{which}_convolution.bias"]).view(b, s, heads, -1)
        return active.repeat_interleave(sizes.heads // heads, 2)

    query = convolved("query", sizes.groups)
    key = convolved("key", sizes.groups)
    value = convolved("value", sizes.heads)
    step = F.softplus(linear(w, f"{name}.step", x)).clamp(min=sizes.least_step)
    rate = w[f"{name}.log_rate"].exp()
    state = x.new_zeros(b, sizes.heads, sizes.state_dim, sizes.head_dim)
    outputs: list[Tensor] = []
    for t in range(s):
        decay = (-rate * step[:, t]).exp()
        written = torch.einsum("bnk,bnv,bn->bnkv", key[:, t], value[:, t], step[:, t])
        state = state * decay[..., None, None] + written
        outputs.append(torch.einsum("bnkv,bnk->bnv", state, query[:, t]))
    read = torch.stack(outputs, 1) + w[f"{name}.skip"][:, None] * value
    gated = read.flatten(2) * F.silu(linear(w, f"{name}.gate", x))
    groups = gated.unflatten(-1, (sizes.groups, -1))
    normal = divided_by_rms(groups, config.norm_eps).flatten(2)
    return linear(w, f"{name}.output", normal * w[f"{name}.output_norm.weight"])


def _convolved(w: Weights, name: str, features: Tensor) -> Tensor:
    """Return features [b, s, f], each summed over the tokens until its own, with weights."""
    weight = w[f"{name}_convolution.weight"]
    kernel = weight.shape[-1]
    seen = F.pad(features, (0, 0, kernel - 1, 0)).unfold(1, kernel, 1)  # [b, s, f, kernel]
    return (seen * weight).sum(-1)
