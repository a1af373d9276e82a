"""Norms over the features, always computed in the plan's `sensitive` dtype.

Norm weights are replicated on every tp rank. Under sequence parallelism each rank normalizes its own shard of the
sequence, and a norm of queries or keys always normalizes the rank's own heads. In these cases each rank has a partial
gradient. A norm over the features of all heads, which are sharded over tp, adds the squares of all ranks.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Part, layout_of
from megaprec.optim.main_grad import destination
from parallel.context import Context
from parallel.layers import parameter
from parallel.leaves import PLAIN, Leaves
from parallel.linear import Widen, add_gradient, sum_dtype


class RMSNorm(nn.Module):
    """x [..., hidden] / root mean square * weight, in the dtype of products.

    own: x differs between tp ranks although the sequence is not sharded, as attention heads do.
    offset: added to the weight, which begins at 1 - offset; Gemma's norms have an offset of 1.
    """

    def __init__(
        self,
        context: Context,
        hidden: int,
        *,
        name: str,
        eps: float = 1e-5,
        own: bool = False,
        offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.context, self.eps, self.offset = context, eps, offset
        self.weight = vector(context, f"{name}.weight", hidden, 1.0 - offset, own)

    def forward(self, x: Tensor) -> Tensor:
        plan = self.context.plan
        leaves = self.context.leaves
        return _Normalize.apply(x, self.weight, self.eps, plan.sensitive, plan.compute, self.offset, leaves)


class _Normalize(torch.autograd.Function):
    """RMSNorm that saves only x and one number per row for the backward pass.

    It makes half as many passes over memory as autograd would.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        eps: float,
        sensitive: torch.dtype,
        made: torch.dtype,
        offset: float = 0.0,
        leaves: Leaves = PLAIN,
    ) -> Tensor:
        y, inverse = leaves(_norm, x, weight, eps, sensitive, made, offset)
        ctx.weight, ctx.offset, ctx.leaves = weight, offset, leaves
        ctx.save_for_backward(x, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, inverse = ctx.saved_tensors
        wide = sum_dtype(ctx.weight, inverse.dtype)
        grad_x, summed = ctx.leaves(_norm_gradients, grad, x, inverse, ctx.weight, ctx.offset, wide)
        return grad_x, add_gradient(ctx.weight, summed, destination(ctx, 1, ctx.weight)), None, None, None, None, None


def _norm(
    x: Tensor, weight: Tensor, eps: float, sensitive: torch.dtype, made: torch.dtype, offset: float
) -> tuple[Tensor, Tensor]:
    """Return the normalized x, and one number per row: 1 / root mean square.

    By type promotion, products of x with tensors of the sensitive dtype are in the sensitive dtype.
    """
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=sensitive)
    inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * inverse).mul_(_factor(weight, offset, sensitive)).to(made), inverse


def _norm_gradients(
    grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, offset: float, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and that of the weight summed over rows, [1, hidden], in the dtype `wide`."""
    normal = x * inverse
    inner = grad * _factor(weight, offset, inverse.dtype)
    along = (inner * normal).mean(-1, keepdim=True)
    grad_x = inner.addcmul_(normal, along, value=-1).mul_(inverse).to(x.dtype)
    return grad_x, normal.mul_(grad).flatten(0, -2).sum(0, keepdim=True, dtype=wide)


def _factor(weight: Tensor, offset: float, sensitive: torch.dtype) -> Tensor:
    """Return weight + offset in the sensitive dtype."""
    wide = weight.to(sensitive)
    return wide + offset if offset else wide


class ShardedRMSNorm(nn.Module):
    """RMSNorm over features that are sharded over tp: x [..., own features], in the dtype of products.

    width: the number of features of all ranks. shards: the number of slices of the features over tp, if it is smaller
    than the number of ranks (key/value heads). offset: as in `RMSNorm`.
    Each pass all-reduces one number per row over tp.
    """

    def __init__(
        self,
        context: Context,
        width: int,
        *,
        name: str,
        eps: float = 1e-5,
        shards: int | None = None,
        offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.context, self.eps, self.offset = context, eps, offset
        part = Part.cut(f"{name}.weight", (width,), 0, context.tp, shards)
        self.weight = parameter(context, [part], 0.0, partial=True, mean=1.0 - offset)

    def forward(self, x: Tensor) -> Tensor:
        plan = self.context.plan
        return _NormalizeSharded.apply(
            x, self.weight, self.eps, plan.sensitive, plan.compute, self.context.tp, self.offset
        )


class _NormalizeSharded(torch.autograd.Function):
    """The autograd function of `ShardedRMSNorm`.

    Several ranks may hold the same slice of x. The sum of squares then counts it once. Each of these ranks has only an
    addend of the slice's gradient, and contributes only its part of the term that all features share.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        eps: float,
        sensitive: torch.dtype,
        made: torch.dtype,
        tp: Axis,
        offset: float,
    ) -> Tensor:
        part = layout_of(weight).parts[0]
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=sensitive).square_().div_(part.copies)
        inverse = tp.sum_(squares).div_(part.shape[0]).add_(eps).rsqrt_()
        ctx.weight, ctx.tp, ctx.part, ctx.offset = weight, tp, part, offset
        ctx.save_for_backward(x, inverse)
        return (x * inverse).mul_(_factor(weight, offset, sensitive)).to(made)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, inverse = ctx.saved_tensors
        normal = x * inverse
        inner = grad * _factor(ctx.weight, ctx.offset, inverse.dtype)
        along = ctx.tp.sum_((inner * normal).sum(-1, keepdim=True)).div_(ctx.part.shape[0] * ctx.part.copies)
        grad_x = inner.addcmul_(normal, along, value=-1).mul_(inverse).to(x.dtype)
        grad_weight = add_gradient(ctx.weight, normal.mul_(grad).flatten(0, -2), destination(ctx, 1, ctx.weight))
        return grad_x, grad_weight, None, None, None, None, None


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
