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
        # `gate` and `up` are copies, so they may be overwritten.
        gate, up = _clamp(y, limit)
        return torch.sigmoid(gate * alpha).mul_(gate).mul_(up.add_(1)).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        gate, up = _clamp(y, ctx.limit)
        sigmoid = torch.sigmoid(gate * ctx.alpha)
        grad_y = torch.empty_like(y)
        grad_gate, grad_up = grad_y.chunk(2, -1)
        unclamped_gate, unclamped_up = y.chunk(2, -1)
        # What was clamped has no gradient.
        up_is_clamped = unclamped_up.abs() > ctx.limit
        grad_up.copy_((sigmoid * gate).mul_(grad).masked_fill_(up_is_clamped, 0))
        # of gate * sigmoid(alpha * gate)
        slope = (1 - sigmoid).mul_(gate).mul_(ctx.alpha).add_(1).mul_(sigmoid)
        gate_is_clamped = unclamped_gate > ctx.limit
        grad_gate.copy_(slope.mul_(up.add_(1)).mul_(grad).masked_fill_(gate_is_clamped, 0))
        return grad_y, None, None


def _clamp(y: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return gate and up, clamped, as copies in FP32 or wider."""
    gate, up = y.to(torch.promote_types(y.dtype, torch.float32)).chunk(2, -1)
    return gate.clamp(max=limit), up.clamp(-limit, limit)
