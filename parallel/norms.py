"""Norms over the features, always computed in the plan's `sensitive` dtype.

Norm weights are replicated on every tp rank. Under sequence parallelism each rank normalizes its
own shard of the sequence, and a norm of queries or keys always normalizes the rank's own heads. In
these cases each rank has a partial gradient.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaprec.comm.layout import Part
from megaprec.comm.main_grad import destination, note_weights_read, require_unchanged_weights
from parallel.context import Context
from parallel.layers import parameter
from parallel.leaves import PLAIN, Leaves
from parallel.linear import Widen, add_gradient, sum_dtype


class RMSNorm(nn.Module):
    """x [..., hidden] / root mean square * weight, in the dtype of products.

    differs_over_tp: x differs between tp ranks although the sequence is not sharded, as heads do.
    offset: added to the weight, which begins at scale - offset; Gemma's norms have an offset of 1.
    scale: the factor that the norm begins with.
    weighted: whether there is a weight; without one nothing is multiplied, and there is no
        parameter.
    """

    def __init__(
        self,
        context: Context,
        hidden: int,
        *,
        name: str,
        eps: float = 1e-5,
        differs_over_tp: bool = False,
        offset: float = 0.0,
        scale: float = 1.0,
        weighted: bool = True,
    ) -> None:
        super().__init__()
        self.context = context
        self.eps = eps
        self.offset = offset
        self.weight: nn.Parameter | None = None
        if weighted:
            self.weight = vector(
                context,
                f"{name}.weight",
                hidden,
                scale - offset,
                differs_over_tp,
            )

    def forward(self, x: Tensor) -> Tensor:
        plan = self.context.plan
        leaves = self.context.leaves
        return Normalize.apply(
            x,
            self.weight,
            self.eps,
            plan.sensitive,
            plan.compute,
            self.offset,
            leaves,
        )


class Normalize(torch.autograd.Function):
    """RMSNorm that saves only x and one number per row for the backward pass.

    With r = 1 / sqrt(mean(x^2) + eps) of a row, n = r x and w = weight + offset

        y = w n
        gradient of x       r (g - n mean(g n)),  where g = w * gradient of y
        gradient of weight  sum over rows of n * gradient of y

    x [..., hidden], weight [hidden] -> y [..., hidden]; saved: x, and r [..., 1] in the sensitive
    dtype. It makes half as many passes over memory as autograd would. Without a weight (None) w is
    1.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter | None,
        eps: float,
        sensitive: torch.dtype,
        output_dtype: torch.dtype,
        offset: float = 0.0,
        leaves: Leaves = PLAIN,
    ) -> Tensor:
        y, inverse = leaves(
            _norm,
            x,
            weight,
            eps,
            sensitive,
            output_dtype,
            offset,
        )
        ctx.weight = weight
        ctx.offset = offset
        ctx.leaves = leaves
        # the weight is not saved: the backward pass reads it again, and must find the same values
        if weight is not None:
            note_weights_read(ctx, weight)
        ctx.save_for_backward(x, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, inverse = ctx.saved_tensors
        if ctx.weight is None:
            grad_x = ctx.leaves(_plain_norm_gradient, grad, x, inverse)
            return grad_x, None, None, None, None, None, None
        require_unchanged_weights(ctx)
        weight_dtype = sum_dtype(ctx.weight, inverse.dtype)
        grad_x, summed = ctx.leaves(
            _norm_gradients,
            grad,
            x,
            inverse,
            ctx.weight,
            ctx.offset,
            weight_dtype,
        )
        grad_weight = add_gradient(ctx.weight, summed, destination(ctx, 1, ctx.weight))
        return grad_x, grad_weight, None, None, None, None, None


def _norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    sensitive: torch.dtype,
    output_dtype: torch.dtype,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """Return y [..., hidden] of `Normalize`, and one number per row: r [..., 1].

    By type promotion, products of x with tensors of the sensitive dtype are in the sensitive dtype.
    """
    # the mean square from the length: one pass over x, accumulated in the sensitive dtype, without
    # the squares in memory
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=sensitive)
    inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    y = x * inverse
    if weight is not None:
        y.mul_(shifted(weight, offset, sensitive))
    return y.to(output_dtype), inverse


def _norm_gradients(
    grad: Tensor,
    x: Tensor,
    inverse: Tensor,
    weight: Tensor,
    offset: float,
    weight_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and that of the weight summed over rows, [1, hidden], in
    `weight_dtype`."""
    normalized = x * inverse
    grad_normalized = grad * shifted(weight, offset, inverse.dtype)
    grad_x = _gradient_across(grad_normalized, normalized, inverse).to(x.dtype)
    rows = normalized.mul_(grad).flatten(0, -2)  # [rows, hidden]
    grad_weight = rows.sum(0, keepdim=True, dtype=weight_dtype)
    return grad_x, grad_weight


def _plain_norm_gradient(grad: Tensor, x: Tensor, inverse: Tensor) -> Tensor:
    """Return the gradient of x of a norm without a weight."""
    normalized = x * inverse
    # a copy: it is overwritten, and the gradient may be another's too
    grad_normalized = grad.to(inverse.dtype, copy=True)
    return _gradient_across(grad_normalized, normalized, inverse).to(x.dtype)


def _gradient_across(grad_normalized: Tensor, normalized: Tensor, inverse: Tensor) -> Tensor:
    """Return the gradient of x from that of the normalized x, which is overwritten.

    But for eps the normalized x does not change with x's length: the gradient loses its part along
    x.
    """
    along_x = (grad_normalized * normalized).mean(-1, keepdim=True)  # [..., 1]
    return grad_normalized.addcmul_(normalized, along_x, value=-1).mul_(inverse)


def shifted(
    weight: Tensor,
    offset: float,
    sensitive: torch.dtype,
) -> Tensor:
    """Return weight + offset in the sensitive dtype."""
    wide = weight.to(sensitive)
    return wide + offset if offset else wide


class LayerNorm(nn.Module):
    """(x - mean) / standard deviation * weight, plus a bias if there is one, over the last
    dimension, in the dtype of products.

    differs_over_tp: x differs between tp ranks although the sequence is not sharded, as heads do.
    scale: the value that the weight begins with.
    bias: whether there is one.
    """

    def __init__(
        self,
        context: Context,
        hidden: int,
        *,
        name: str,
        eps: float = 1e-5,
        differs_over_tp: bool = False,
        scale: float = 1.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.context = context
        self.eps = eps
        self.weight = vector(context, f"{name}.weight", hidden, scale, differs_over_tp)
        self.bias = vector(context, f"{name}.bias", hidden, 0.0, differs_over_tp) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        plan = self.context.plan
        # so that their gradients are not rounded to the dtype of the weights
        weight = Widen.apply(self.weight, plan.sensitive)
        bias = None if self.bias is None else Widen.apply(self.bias, plan.sensitive)
        return layer_norm(x, weight, bias, self.eps, plan.compute)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    output_dtype: torch.dtype,
) -> Tensor:
    """Return LayerNorm of x over its last dimension, in `output_dtype`.

    It is computed in the dtype of `weight`.
    """
    y = F.layer_norm(x.to(weight.dtype), weight.shape, weight, bias, eps)
    return y.to(output_dtype)


def vector(
    context: Context,
    name: str,
    hidden: int,
    value: float,
    differs_over_tp: bool = False,
) -> nn.Parameter:
    """Return a parameter [hidden], replicated over tp, filled with `value`.

    differs_over_tp: each rank has a partial gradient, also without sequence parallelism.
    """
    replicated = Part.cut(name, (hidden,), None, context.tp)
    return parameter(
        context,
        [replicated],
        std=0.0,
        partial=context.cut_sequence or differs_over_tp,
        mean=value,
    )
