"""Norms over the features, always computed in the plan's `sensitive` dtype.

Norm weights are replicated on every tp rank. Under sequence parallelism each rank normalizes its own shard of the
sequence, and a norm of queries or keys always normalizes the rank's own heads. In these cases each rank has a partial
gradient.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaprec.comm.layout import Part
from parallel.context import Context
from parallel.layers import parameter
from parallel.linear import Widen, add_gradient


class RMSNorm(nn.Module):
    """x [..., hidden] / root mean square * weight, in the dtype of products.

    own: x differs between tp ranks although the sequence is not sharded, as attention heads do.
    """

    def __init__(self, context: Context, hidden: int, *, name: str, eps: float = 1e-5, own: bool = False) -> None:
        super().__init__()
        self.context, self.eps = context, eps
        self.weight = vector(context, f"{name}.weight", hidden, 1.0, own)

    def forward(self, x: Tensor) -> Tensor:
        plan = self.context.plan
        return _Normalize.apply(x, self.weight, self.eps, plan.sensitive, plan.compute)


class _Normalize(torch.autograd.Function):
    """RMSNorm that saves only x and one number per row for the backward pass.

    It makes half as many passes over memory as autograd would. By type promotion, products of x with tensors of the
    sensitive dtype are in the sensitive dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, eps: float, sensitive: torch.dtype, made: torch.dtype
    ) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=sensitive)
        inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.weight = weight
        ctx.save_for_backward(x, inverse)
        return (x * inverse).mul_(weight).to(made)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        x, inverse = ctx.saved_tensors
        normal = x * inverse
        inner = grad * ctx.weight.to(inverse.dtype)
        along = (inner * normal).mean(-1, keepdim=True)
        grad_x = inner.addcmul_(normal, along, value=-1).mul_(inverse).to(x.dtype)
        return grad_x, add_gradient(ctx.weight, normal.mul_(grad).flatten(0, -2)), None, None, None


class LayerNorm(nn.Module):
    """(x - mean) / standard deviation * weight + bias over the last dimension, in the dtype of products."""

    def __init__(self, context: Context, hidden: int, *, name: str, eps: float = 1e-5) -> None:
        super().__init__()
        self.context, self.eps = context, eps
        self.weight = vector(context, f"{name}.weight", hidden, 1.0)
        self.bias = vector(context, f"{name}.bias", hidden, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        plan = self.context.plan
        weight, bias = Widen.apply(self.weight, plan.sensitive), Widen.apply(self.bias, plan.sensitive)
        return F.layer_norm(x.to(plan.sensitive), weight.shape, weight, bias, self.eps).to(plan.compute)


def vector(context: Context, name: str, hidden: int, value: float, own: bool = False) -> nn.Parameter:
    """Return a parameter [hidden], replicated over tp, filled with `value`. own: each rank has a partial gradient."""
    whole = Part.cut(name, (hidden,), None, context.tp)
    return parameter(context, [whole], 0.0, context.cut_sequence or own, mean=value)
