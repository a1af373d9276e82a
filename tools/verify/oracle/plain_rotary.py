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
    turned_first = turned.real.to(x)
    turned_second = turned.imag.to(x)
    unrotated = x[..., dims:]
    return torch.cat((turned_first, turned_second, unrotated), -1)


def _unscaled(base: float, half: int) -> Tensor:
    """Return radians per position of each pair without any scaling, float64 [half]."""
    pairs = torch.arange(half, dtype=torch.float64)
    return base ** (-pairs / half)


def _frequencies(config: ModelConfig, half: int, length: int) -> Tensor:
    """Return radians per position of each pair, float64 [half]."""
    scaling = config.rope_scaling
    base = config.rope_base
    if scaling.kind == "dynamic":
        # a text within the original length has the original base
        longer = max(1.0, length / scaling.original_max_position_embeddings)
        growth = scaling.factor * longer - scaling.factor + 1
        base *= growth ** (half / (half - 1))
    plain = _unscaled(base, half)
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "proportional":
        num_turning = math.floor(scaling.fraction * 2 * half / 2)
        is_turning = torch.arange(half) < num_turning
        return is_turning * plain / scaling.factor
    if scaling.kind == "llama3":
        unscaled_share = _left_by_llama3(config, plain)
    elif scaling.kind == "yarn":
        unscaled_share = _left_by_yarn(config, half)
    else:
        return plain
    unscaled = unscaled_share * plain
    scaled = (1 - unscaled_share) * plain / scaling.factor
    return unscaled + scaled


def _left_by_llama3(config: ModelConfig, plain: Tensor) -> Tensor:
    """Return the share of each frequency that is left as it is, from 0 to 1, float64 [half]: all of
    those that turn often within the original length, and none of those that turn seldom.

    plain: the frequencies without any scaling.
    """
    scaling = config.rope_scaling
    wavelengths = 2 * math.pi / plain
    fewest_turns = scaling.low_freq_factor
    most_turns = scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings / wavelengths
    share = (turns - fewest_turns) / (most_turns - fewest_turns)
    return share.clamp(0, 1)


def _left_by_yarn(config: ModelConfig, half: int) -> Tensor:
    """Return the share of each frequency that is left as it is, from 0 to 1, float64 [half]. It
    falls evenly from the pair that turns `beta_fast` times to that which turns `beta_slow` times.
    """
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
    # as transformers bounds them: by features, of which there are twice as many as pairs
    fast = max(fast, 0)
    slow = min(slow, 2 * half - 1)
    if fast == slow:
        slow += 0.001  # no division by zero; the number is transformers'
    pairs = torch.arange(half, dtype=torch.float64)
    ramp = (pairs - fast) / (slow - fast)
    return 1 - ramp.clamp(0, 1)


def _yarn_factor(config: ModelConfig) -> float:
    """Return the factor of rotated features: 1 but for YaRN, which makes logits of longer texts
    sharper."""
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
