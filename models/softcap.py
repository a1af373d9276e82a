"""Soft-capping (Gemma 2): cap * tanh(x / cap), which is x while x is small and never exceeds the
cap."""

from typing import Any

import torch
from torch import Tensor


def softcap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap) in the dtype of x; x itself if cap is 0."""
    return _Softcap.apply(x, cap) if cap else x


class _Softcap(torch.autograd.Function):
    """Computes in FP32 or wider, and saves x: the loss overwrites logits with their gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.cap = cap
        return _wide(x).div_(cap).tanh_().mul_(cap).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        slope = _wide(x).div_(ctx.cap).tanh_().square_().neg_().add_(1)  # 1 - tanh(x / cap)^2
        return slope.mul_(grad).to(grad.dtype), None


def _wide(x: Tensor) -> Tensor:
    """Return a copy of x in FP32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
