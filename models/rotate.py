"""The rotation of queries and keys by the angles of their positions, which `models.rope`
computes."""

from typing import Any

import torch
from torch import Tensor

from parallel.leaves import PLAIN, Leaves


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
    half = cosine.shape[-1]
    turning, rest = x.split((2 * half, x.shape[-1] - 2 * half), -1)
    cosine, sine = (
        table.to(torch.promote_types(table.dtype, torch.float32)) for table in (cosine, sine)
    )
    # once: promotion would widen each factor again
    first, second = turning.to(cosine.dtype).chunk(2, -1)
    turned = torch.empty_like(x)
    turned[..., :half] = (first * cosine).addcmul_(second, sine, value=-1)
    turned[..., half : 2 * half] = (second * cosine).addcmul_(first, sine)
    turned[..., 2 * half :] = rest
    return turned
