"""Rotary positions: each head rotates pairs of its features by angles that grow with the position.

Pair i of n rotates by position * base ** (-i / n). The pairs are (x[i], x[i + n]), the halves of
the rotated features, as in Hugging Face's `rotate_half`, and not neighbours (x[2i], x[2i + 1]) as
in Meta's first Llama. If only a fraction of a head's features is rotated, it is the first ones.

All angles are computed in float64, in every dtype of the model.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from models.rope_scaling import RopeScaling, attention_factor
from parallel.leaves import PLAIN, Leaves

RotaryTables = tuple[Tensor, ...]
"""Cosine and sine of the angles of each position, as `rotary_tables` returns them; of a model whose
queries grow with their position the factors of queries besides, as `query_factors` does."""


class Rotate(torch.autograd.Function):
    """Rotates the first features of x by the angles of their position, in FP32 or wider, whatever
    the dtypes of x and the tables are.

    x [s, b, n, d]; cosine, sine [s, 1, 1, r / 2], where the first r <= d features are rotated. The
    backward pass rotates in the opposite direction.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cosine: Tensor,
        sine: Tensor,
        leaves: Leaves = PLAIN,
    ) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.leaves = leaves
        return leaves(_rotary, x, cosine, sine)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cosine, sine = ctx.saved_tensors
        # The opposite angle has the same cosine.
        grad_x = ctx.leaves(_rotary, grad, cosine, -sine)
        return grad_x, None, None, None


def _rotary(
    x: Tensor,
    cosine: Tensor,
    sine: Tensor,
) -> Tensor:
    """Return x [s, b, n, d] with its first features rotated, in the dtype of x."""
    num_pairs = cosine.shape[-1]
    num_rotary = 2 * num_pairs
    rotary_features, other_features = x.split((num_rotary, x.shape[-1] - num_rotary), -1)
    wide_dtype = torch.promote_types(cosine.dtype, torch.float32)
    cosine = cosine.to(wide_dtype)
    sine = sine.to(wide_dtype)
    # Widened once: promotion would widen them in each of the four products again.
    first, second = rotary_features.to(wide_dtype).chunk(2, -1)
    rotated = torch.empty_like(x)
    rotated[..., :num_pairs] = (first * cosine).addcmul_(second, sine, value=-1)
    rotated[..., num_pairs:num_rotary] = (second * cosine).addcmul_(first, sine)
    rotated[..., num_rotary:] = other_features
    return rotated


def rotary_tables(
    scaling: RopeScaling,
    base: float,
    dims: int,
    length: int,
    dtype: torch.dtype,
) -> RotaryTables:
    """Return (cosine, sine), each [length, 1, 1, dims / 2], of all positions of a sequence.

    base: of the wavelengths.
    dims: the number of rotated features of a head.
    length: the number of positions.
    """
    # [s, 1, 1, 1], to broadcast over samples and heads
    positions = torch.arange(length, dtype=torch.float64)[:, None, None, None]
    angles = positions * frequencies(scaling, base, dims, length)
    # Queries and keys times this: cheaper in the tables than in each layer.
    factor = attention_factor(scaling)
    cosine = angles.cos() * factor
    sine = angles.sin() * factor
    return cosine.to(dtype), sine.to(dtype)


def query_factors(scaling: RopeScaling, length: int, dtype: torch.dtype) -> Tensor:
    """Return the factors of queries, [length, 1, 1, 1]: 1 + query_beta * ln(1 + n) for a position
    in which n whole original lengths are contained.

    As in transformers' Ministral3Attention, which has the rule of Llama 4.
    """
    positions = torch.arange(length, dtype=torch.float64)[:, None, None, None]
    lengths_before = (positions / scaling.original_max_position_embeddings).floor()
    factors = 1 + scaling.query_beta * lengths_before.log1p()
    return factors.to(dtype)


def frequencies(
    scaling: RopeScaling,
    base: float,
    dims: int,
    length: int,
) -> Tensor:
    """Return float64 [dims / 2]: radians per position of each pair, in sequences of `length`
    tokens.

    The length matters only under dynamic scaling, which here uses the length of the current
    sequence. Hugging Face uses the longest sequence that the model has seen so far, which is the
    same if all sequences are equally long.
    """
    return FREQUENCIES[scaling.kind](scaling, base, dims, length)


def _plain(base: float, dims: int) -> Tensor:
    """Return the frequencies without a scaling."""
    first_features = torch.arange(0, dims, 2, dtype=torch.float64)
    return base ** (-first_features / dims)


def _unscaled(scaling: RopeScaling, base: float, dims: int, length: int) -> Tensor:
    return _plain(base, dims)


def _linear(scaling: RopeScaling, base: float, dims: int, length: int) -> Tensor:
    return _plain(base, dims) / scaling.factor


def _dynamic(scaling: RopeScaling, base: float, dims: int, length: int) -> Tensor:
    # as in Hugging Face: a larger base slows all pairs but the fastest one
    stretch = max(length / scaling.original_max_position_embeddings, 1)
    base_factor = scaling.factor * stretch - (scaling.factor - 1)
    exponent = dims / (dims - 2)
    return _plain(base * base_factor**exponent, dims)


def _proportional(scaling: RopeScaling, base: float, dims: int, length: int) -> Tensor:
    """Return the frequencies of which the slowest are 0, as in transformers'
    `_compute_proportional_rope_parameters`, which rounds down twice."""
    num_turning = int(scaling.fraction * dims // 2)
    frequencies = _plain(base, dims) / scaling.factor
    frequencies[num_turning:] = 0
    return frequencies


def _llama3(scaling: RopeScaling, base: float, dims: int, length: int) -> Tensor:
    plain = _plain(base, dims)
    return _blend(plain, scaling.factor, _slowness_by_wavelength(scaling, plain))


def _yarn(scaling: RopeScaling, base: float, dims: int, length: int) -> Tensor:
    return _blend(_plain(base, dims), scaling.factor, _slowness_by_turns(scaling, base, dims))


FREQUENCIES: Mapping[str, Callable[[RopeScaling, float, int, int], Tensor]] = {
    "none": _unscaled,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "proportional": _proportional,
}
"""The frequencies by `RopeScaling.kind`, of (scaling, base, dims, length)."""


def _blend(
    plain: Tensor,
    factor: float,
    slowness: Tensor,
) -> Tensor:
    """Return scaled frequencies [dims / 2] from those without a scaling: of slow pairs (slowness 1)
    divided by `factor`, of fast pairs (slowness 0) as they are, and of pairs between a mean of
    both, weighted by their slowness."""
    fast_part = plain * (1 - slowness)
    slow_part = plain / factor * slowness
    return fast_part + slow_part


def _slowness_by_wavelength(scaling: RopeScaling, plain: Tensor) -> Tensor:
    """Return the slowness of Llama 3, float64 [dims / 2]: from 0 to 1 over the pairs that make from
    high_freq_factor down to low_freq_factor turns within the original length."""
    # How often each pair turns within the original length.
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    ramp_width = scaling.high_freq_factor - scaling.low_freq_factor
    fastness = (turns - scaling.low_freq_factor) / ramp_width
    return 1 - fastness.clamp(0, 1)


def _slowness_by_turns(
    scaling: RopeScaling,
    base: float,
    dims: int,
) -> Tensor:
    """Return the slowness of YaRN (Peng et al., 2023), float64 [dims / 2]: from 0 to 1 over the
    pairs that make from beta_fast down to beta_slow turns within the original length."""

    def pair_of_turns(turns: float) -> float:
        """Return the index of the pair that makes `turns` turns over the original length."""
        positions_of_radian = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return dims * math.log(positions_of_radian) / (2 * math.log(base))

    last_fast = pair_of_turns(scaling.beta_fast)
    first_slow = pair_of_turns(scaling.beta_slow)
    if scaling.truncate:
        last_fast = math.floor(last_fast)
        first_slow = math.ceil(first_slow)
    # a head has no pairs beyond these
    last_fast = max(last_fast, 0)
    first_slow = min(first_slow, dims - 1)
    # Without pairs between, a step in place of a ramp: all pairs are fast or slow.
    ramp_width = (first_slow - last_fast) or 0.001
    pairs = torch.arange(dims // 2, dtype=torch.float64)
    return ((pairs - last_fast) / ramp_width).clamp(0, 1)
