"""A factor of gradients that changes no value."""

from typing import Any

import torch
from torch import Tensor


class ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by `scale`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


def scale_gradient(x: Tensor, scale: float) -> Tensor:
    """Return x, whose gradient is multiplied by `scale`; x itself if that is 1."""
    return x if scale == 1 else ScaleGradient.apply(x, scale)
