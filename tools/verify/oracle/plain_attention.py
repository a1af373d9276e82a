"""Attention of the plain decoder: all scores are computed, and what is not seen is masked."""

import torch
from torch import Tensor

from models.config import ModelConfig
from tools.verify.oracle.plain_parts import Weights, capped, divided_by_rms, linear, rms_norm
from tools.verify.oracle.plain_rotary import rotated

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, each [b, n, s, d]."""


def attention(config: ModelConfig, w: Weights, n: int, x: Tensor, positions: Tensor) -> Tensor:
    """Return what attention of layer n makes of x [b, s, hidden]. positions: int64 [b, s]."""
    b, s, _ = x.shape
    name = f"layers.{n}.attention"
    window = config.window if n in (config.window_layers or range(config.layers)) else 0
    make_heads = _from_latents if config.latent else _projected
    query, key, value = make_heads(config, w, name, x)
    if config.positions == "rope":
        query = rotated(config, query, positions, bool(window))
        key = rotated(config, key, positions, bool(window))
    groups = config.heads // config.kv_heads
    key = key.repeat_interleave(groups, 1)
    value = value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) / config.attention_scalar**0.5
    scores = capped(scores, config.attention_softcap)
    ago = torch.arange(s)[:, None] - torch.arange(s)
    hidden = (ago < 0) | (ago >= (window or s))
    scores = scores.masked_fill(hidden, float("-inf"))
    if config.attention_sinks:
        # one more logit, which has no value
        sinks = w[f"{name}.sinks.weight"].view(-1, 1, 1).expand(b, -1, s, 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    mixed = (weights @ value).transpose(1, 2).reshape(b, s, -1)
    if config.attention_gate:
        mixed = mixed * linear(w, f"{name}.gate", x).sigmoid()
    return linear(w, f"{name}.output", mixed)


def _projected(config: ModelConfig, w: Weights, name: str, x: Tensor) -> Heads:
    """Return queries, keys and values, which are not yet rotated."""
    b, s, _ = x.shape
    query = linear(w, f"{name}.query", x)
    key = linear(w, f"{name}.key", x)
    value = linear(w, f"{name}.value", x)
    if config.qk_norm and config.qk_norm_over == "all":
        query = rms_norm(config, w[f"{name}.query_norm.weight"], query)
        key = rms_norm(config, w[f"{name}.key_norm.weight"], key)
    query, key, value = (
        features.view(b, s, -1, config.head_dim).transpose(1, 2) for features in (query, key, value)
    )
    if config.qk_norm and config.qk_norm_over == "head":
        query = rms_norm(config, w[f"{name}.query_norm.weight"], query)
        key = rms_norm(config, w[f"{name}.key_norm.weight"], key)
    return query, key, value


def _from_latents(config: ModelConfig, w: Weights, name: str, x: Tensor) -> Heads:
    """Return queries, keys and values, which are not yet rotated: the features that turn come
    first, and all heads share those of their keys."""
    sizes = config.latent
    b, s, _ = x.shape

    def normal(which: str) -> Tensor:
        latent = linear(w, f"{name}.{which}_down", x)
        weight = w[f"{name}.{which}_down_norm.weight"]
        return divided_by_rms(latent, sizes.norm_eps) * weight

    if sizes.query_rank:
        query = linear(w, f"{name}.query_up", normal("query"))
    else:
        query = linear(w, f"{name}.query", x)
    still = linear(w, f"{name}.key_up", normal("key_value"))
    value = linear(w, f"{name}.value_up", normal("key_value"))
    query, still, value = (
        features.view(b, s, config.heads, -1).transpose(1, 2) for features in (query, still, value)
    )
    turning = linear(w, f"{name}.key_rope", x).unsqueeze(1).expand(-1, config.heads, -1, -1)
    return query, torch.cat((turning, still), -1), value
