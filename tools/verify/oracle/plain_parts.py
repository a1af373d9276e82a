"""Norms, projections and caps of the plain decoder, by logical name of their weights."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig

Weights = Mapping[str, Tensor]
"""Weights by logical name."""


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Return the product with a weight, and with its bias if there is one."""
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def norm(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    """Return the LayerNorm or RMSNorm of x over its last dimension."""
    if not config.norm_weight:
        return divided_by_rms(x, config.norm_eps)
    weight = weights[f"{name}.weight"]
    if config.norm == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, weights.get(f"{name}.bias"), config.norm_eps)
    return rms_norm(config, weight, x)


def norm_if_there(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    """Return the norm of x before a branch or after it if the model has one there, otherwise x."""
    missing = "before" if name.endswith("_post_norm") else "after"
    return x if config.norm_at == missing else norm(config, weights, name, x)


def rms_norm(config: ModelConfig, weight: Tensor, x: Tensor) -> Tensor:
    """Return the RMSNorm of x over its last dimension."""
    return divided_by_rms(x, config.norm_eps) * (weight + config.norm_unit_offset)


def divided_by_rms(x: Tensor, eps: float) -> Tensor:
    """Return x over the root of the mean of its squares, over the last dimension."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def capped(x: Tensor, cap: float) -> Tensor:
    """Return x between -cap and cap; as it is if cap is 0."""
    return cap * (x / cap).tanh() if cap else x


def with_scaled_gradient(x: Tensor, scale: float) -> Tensor:
    """Return x, whose gradient is multiplied by `scale`."""
    return x * scale + x.detach() * (1 - scale) if scale != 1 else x
