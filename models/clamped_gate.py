"""The gated activation of gpt-oss, whose factors are clamped so that no product of them overflows
half precision.

    gate <= limit, -limit <= up <= limit
    y = (up + 1) * gate * sigmoid(alpha * gate)

With alpha = 1.702 the second factor is the fast approximation of gelu. Up has an offset of one, so
that a token whose up is 0 still passes its gate.
"""

from typing import Any

import torch
from torch import Tensor


class ClampedGate(torch.autograd.Function):
    """y [..., 2 n], gate and up -> [..., n]. Computes in FP32 or wider, again in the backward
    pass."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(y)
        ctx.alpha = alpha
        ctx.limit = limit
        gate, up = _clamped(y, limit)
        return torch.sigmoid(gate * alpha).mul_(gate).mul_(up.add_(1)).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        gate, up = _clamped(y, ctx.limit)
        share = torch.sigmoid(gate * ctx.alpha)
        grad_y = torch.empty_like(y)
        grad_gate, grad_up = grad_y.chunk(2, -1)
        whole_gate, whole_up = y.chunk(2, -1)
        grad_up.copy_((share * gate).mul_(grad).masked_fill_(whole_up.abs() > ctx.limit, 0))
        # of gate * sigmoid(alpha * gate)
        slope = (1 - share).mul_(gate).mul_(ctx.alpha).add_(1).mul_(share)
        grad_gate.copy_(slope.mul_(up.add_(1)).mul_(grad).masked_fill_(whole_gate > ctx.limit, 0))
        return grad_y, None, None


def _clamped(y: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return gate and up, clamped, as copies in FP32 or wider."""
    gate, up = y.to(torch.promote_types(y.dtype, torch.float32)).chunk(2, -1)
    return gate.clamp(max=limit), up.clamp(-limit, limit)
