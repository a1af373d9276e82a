"""The rotation of queries and keys by the angles of their positions.

`models.rope` computes the angles.
"""

from typing import Any

import torch
from torch import Tensor

from parallel.leaves import PLAIN, Leaves

RotaryTables = tuple[Tensor, Tensor]
"""Cosine and sine of the angles of each position, as `models.rope.rotary_tables` returns them."""


class Rotate(torch.autograd.Function):
    """Rotates the first features of x by the angles of their position, in FP32 or wider, in every
    dtype of the tables.

    x [s, b, n, d]; cosine, sine [s, 1, 1, r / 2], where the first r <= d features are rotated. The
    backward pass rotates in the opposite direction.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor, leaves: Leaves = PLAIN
    ) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.leaves = leaves
        return leaves(_rotary, x, cosine, sine)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cosine, sine = ctx.saved_tensors
        return ctx.leaves(_rotary, grad, cosine, -sine), None, None, None


def _rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return x [s, b, n, d] with its first features rotated, in the dtype of x."""
    half = cosine.shape[-1]
    rotary_features, other_features = x.split((2 * half, x.shape[-1] - 2 * half), -1)
    wide = torch.promote_types(cosine.dtype, torch.float32)
    cosine = cosine.to(wide)
    sine = sine.to(wide)
    # Widened once: promotion would widen them in each of the four products again.
    first, second = rotary_features.to(wide).chunk(2, -1)
    rotated = torch.empty_like(x)
    rotated[..., :half] = (first * cosine).addcmul_(second, sine, value=-1)
    rotated[..., half : 2 * half] = (second * cosine).addcmul_(first, sine)
    rotated[..., 2 * half :] = other_features
    return rotated
