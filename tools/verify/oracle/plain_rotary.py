"""Rotary positions of the plain decoder: complex products, by the formulas of the papers.

Linear scaling: Chen et al., 2023. Dynamic: "NTK-aware" with the base by the length. llama3: Llama
3.1's. YaRN: Peng et al., 2023. Proportional: Gemma 4's, of which the slowest pairs stand still.
"""

import math

import torch
from torch import Tensor

from models.config import ModelConfig


def rotated(config: ModelConfig, x: Tensor, positions: Tensor, has_window: bool) -> Tensor:
    """Return x [b, n, s, d] with its first features rotated: (x[i], x[i + half]) times exp(i *
    position * frequency).

    positions: int64 [b, s]. has_window: the layer's attention has a window.
    """
    dims = config.latent.rope_dim or int(config.head_dim * config.rotary_fraction)
    half = dims // 2
    if has_window and config.window_rope_base:
        frequencies = _unscaled(config.window_rope_base, half)
        factor = 1.0
    else:
        frequencies = _frequencies(config, half, positions.shape[1])
        factor = _yarn_factor(config)
    angles = positions.double()[..., None] * frequencies
    angles = angles.unsqueeze(1)  # of all heads
    lengths = torch.full_like(angles, factor)
    turns = torch.polar(lengths, angles)
    first = x[..., :half].double()
    second = x[..., half:dims].double()
    turned = torch.complex(first, second) * turns
    unrotated = x[..., dims:]
    return torch.cat((turned.real.to(x), turned.imag.to(x), unrotated), -1)


def _unscaled(base: float, half: int) -> Tensor:
    pairs = torch.arange(half, dtype=torch.float64)
    return base ** (-pairs / half)


def _frequencies(config: ModelConfig, half: int, length: int) -> Tensor:
    """Return radians per position of each pair, float64 [half]."""
    scaling = config.rope_scaling
    base = config.rope_base
    if scaling.kind == "dynamic":
        longer = max(1.0, length / scaling.original_max_position_embeddings)
        growth = scaling.factor * longer - scaling.factor + 1
        base *= growth ** (half / (half - 1))
    plain = _unscaled(base, half)
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "proportional":
        turning = math.floor(scaling.fraction * 2 * half / 2)
        turns = torch.arange(half) < turning
        return turns * plain / scaling.factor
    if scaling.kind == "llama3":
        left = _left_by_llama3(config, plain)
    elif scaling.kind == "yarn":
        left = _left_by_yarn(config, half)
    else:
        return plain
    kept = left * plain
    stretched = (1 - left) * plain / scaling.factor
    return kept + stretched


def _left_by_llama3(config: ModelConfig, plain: Tensor) -> Tensor:
    """Return the share of each frequency that is left as it is."""
    scaling = config.rope_scaling
    wavelengths = 2 * math.pi / plain
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings / wavelengths
    share = (turns - low) / (high - low)
    return share.clamp(0, 1)


def _left_by_yarn(config: ModelConfig, half: int) -> Tensor:
    """Return the share of each frequency that is left as it is."""
    scaling = config.rope_scaling

    def pair(turns: float) -> float:
        """Return the number, which need not be whole, of the pair that turns so often within the
        original length."""
        frequency = 2 * math.pi * turns / scaling.original_max_position_embeddings
        return -half * math.log(frequency) / math.log(config.rope_base)

    fast = pair(scaling.beta_fast)
    slow = pair(scaling.beta_slow)
    if scaling.truncate:
        fast = math.floor(fast)
        slow = math.ceil(slow)
    fast = max(fast, 0)
    slow = min(slow, 2 * half - 1)
    if fast == slow:
        slow += 0.001  # no division by zero; the number is transformers'
    pairs = torch.arange(half, dtype=torch.float64)
    ramp = (pairs - fast) / (slow - fast)
    return 1 - ramp.clamp(0, 1)


def _yarn_factor(config: ModelConfig) -> float:
    """Return the factor of rotated features."""
    scaling = config.rope_scaling
    if scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor:
        return scaling.attention_factor
    growth = 0.1 * math.log(scaling.factor)
    if scaling.mscale and scaling.mscale_all_dim:
        of_some = 1 + growth * scaling.mscale
        of_all = 1 + growth * scaling.mscale_all_dim
        return of_some / of_all
    return 1 + growth
