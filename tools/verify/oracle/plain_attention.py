"""Attention of the plain decoder: all scores are computed, and what is not seen is masked.

Shapes: b samples, s tokens, n heads, d features of a head.
"""

import torch
from torch import Tensor

from models.config import ModelConfig
from tools.verify.oracle.plain_parts import Weights, capped, divided_by_rms, linear, rms_norm
from tools.verify.oracle.plain_rotary import rotated

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, each [b, n, s, d]."""


def attention(
    config: ModelConfig, weights: Weights, layer: int, x: Tensor, positions: Tensor
) -> Tensor:
    """Return what the attention of a layer makes of x [b, s, hidden], of the same shape.
    positions: int64 [b, s]."""
    b, s, _ = x.shape
    name = f"layers.{layer}.attention"
    window = _window(config, layer)
    if not window:
        config = _with_global_heads(config)
    make_heads = _from_latents if config.latent else _projected
    query, key, value = make_heads(config, weights, name, x)
    if config.positions == "rope" and layer not in config.nope_layers:
        has_window = window > 0
        query = rotated(config, query, positions, has_window)
        key = rotated(config, key, positions, has_window)
        query = _scaled_by_position(config, query, positions)
    # heads of queries that share one of keys and values
    group = config.heads // config.kv_heads
    key = key.repeat_interleave(group, 1)
    value = value.repeat_interleave(group, 1)
    keys_as_columns = key.transpose(2, 3)
    products = query @ keys_as_columns  # [b, n, s, s]
    divisor = config.attention_scalar**0.5
    scores = products / divisor
    scores = capped(scores, config.attention_softcap)
    unseen = _unseen(s, window)
    scores = scores.masked_fill(unseen, float("-inf"))
    if config.attention_sinks:
        sinks = weights[f"{name}.sinks.weight"]
        probabilities = _softmax_with_sinks(scores, sinks)
    else:
        probabilities = scores.softmax(-1)
    mixed = probabilities @ value
    mixed = mixed.transpose(1, 2)
    mixed = mixed.reshape(b, s, -1)
    if config.attention_gate:
        gate = linear(weights, f"{name}.gate", x)
        mixed = mixed * gate.sigmoid()
    return linear(weights, f"{name}.output", mixed)


def _with_global_heads(config: ModelConfig) -> ModelConfig:
    """Return the model with the heads that layers without a window have for themselves."""
    own: dict[str, int] = {}
    if config.global_head_dim:
        own["head_dim"] = config.global_head_dim
    if config.global_kv_heads:
        own["kv_heads"] = config.global_kv_heads
    return config.model_copy(update=own)


def _window(config: ModelConfig, layer: int) -> int:
    """Return how many tokens a token of a layer sees, itself among them; 0: all before it too."""
    with_window = config.window_layers or range(config.layers)
    return config.window if layer in with_window else 0


def _unseen(s: int, window: int) -> Tensor:
    """Return True where a token [s, 1] does not see another [1, s]: a later one, or one that is
    outside of the window."""
    places = torch.arange(s)
    tokens_ago = places[:, None] - places
    is_later = tokens_ago < 0
    num_seen = window or s
    is_outside = tokens_ago >= num_seen
    return is_later | is_outside


def _softmax_with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """Return the weights of scores [b, n, s, s], which add up to less than one: one more logit of
    each head, its sink, takes part in the softmax and has no value."""
    b, _, s, _ = scores.shape
    sinks = sinks.view(-1, 1, 1)
    sinks = sinks.expand(b, -1, s, 1)
    logits = torch.cat((scores, sinks), -1)
    probabilities = logits.softmax(-1)
    return probabilities[..., :-1]


def _projected(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Heads:
    """Return queries, keys and values of one product each, which are not yet rotated."""
    query = linear(weights, f"{name}.query", x)
    key = linear(weights, f"{name}.key", x)
    # A layer without such a weight has its keys for values, before their norm.
    has_value = f"{name}.value.weight" in weights
    value = linear(weights, f"{name}.value", x) if has_value else key
    norm_over = config.qk_norm_over if config.qk_norm else "none"
    if norm_over == "all":
        query = _normal(config, weights, f"{name}.query_norm", query)
        key = _normal(config, weights, f"{name}.key_norm", key)
    query = _in_heads(query, config.heads)
    key = _in_heads(key, config.kv_heads)
    value = _in_heads(value, config.kv_heads)
    if norm_over == "head":
        query = _normal(config, weights, f"{name}.query_norm", query)
        key = _normal(config, weights, f"{name}.key_norm", key)
    if config.value_norm:
        value = divided_by_rms(value, config.norm_eps)
    return query, key, value


def _normal(config: ModelConfig, weights: Weights, name: str, features: Tensor) -> Tensor:
    """Return the RMSNorm of queries or keys, over their last dimension."""
    if not config.norm_weight:
        return divided_by_rms(features, config.norm_eps)
    weight = weights[f"{name}.weight"]
    return rms_norm(config, weight, features)


def _scaled_by_position(config: ModelConfig, query: Tensor, positions: Tensor) -> Tensor:
    """Return queries [b, n, s, d], each times 1 + beta * log(1 + position // original length).

    The factor is 1 within the original length, and larger in each further such length. A model
    without `query_beta` has its queries as they are.
    """
    scaling = config.rope_scaling
    if not scaling.query_beta:
        return query
    lengths_before = positions // scaling.original_max_position_embeddings
    growth = (1 + lengths_before.double()).log()
    factors = 1 + scaling.query_beta * growth  # float64 [b, s]
    factors = factors[:, None, :, None].to(query)
    return query * factors


def _in_heads(features: Tensor, num_heads: int) -> Tensor:
    """Return features [b, s, n * d] as [b, n, s, d]."""
    b, s, _ = features.shape
    heads = features.view(b, s, num_heads, -1)
    return heads.transpose(1, 2)


def _from_latents(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Heads:
    """Return queries, keys and values of latent attention (MLA), which are not yet rotated.

    In queries and keys the features that are rotated come first; all heads share those of keys.
    """
    if config.latent.query_rank:
        latent = _latent(config, weights, f"{name}.query", x)
        query = linear(weights, f"{name}.query_up", latent)
    else:
        query = linear(weights, f"{name}.query", x)
    latent_of_keys = _latent(config, weights, f"{name}.key_value", x)
    unrotated = linear(weights, f"{name}.key_up", latent_of_keys)
    latent_of_values = _latent(config, weights, f"{name}.key_value", x)
    value = linear(weights, f"{name}.value_up", latent_of_values)
    query = _in_heads(query, config.heads)
    unrotated = _in_heads(unrotated, config.heads)
    value = _in_heads(value, config.heads)
    to_rotate = linear(weights, f"{name}.key_rope", x)
    to_rotate = to_rotate.unsqueeze(1)
    to_rotate = to_rotate.expand(-1, config.heads, -1, -1)
    key = torch.cat((to_rotate, unrotated), -1)
    return query, key, value


def _latent(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    """Return the small vector of each token from which heads are made, behind its norm: [b, s,
    rank]."""
    down = linear(weights, f"{name}_down", x)
    normal = divided_by_rms(down, config.latent.norm_eps)
    weight = weights[f"{name}_down_norm.weight"]
    return normal * weight
