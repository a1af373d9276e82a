"""RMSNorm over features that are sharded over tp, such as those of all heads: it adds the squares
of all ranks."""

from typing import Any

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Part, layout_of
from megaprec.comm.main_grad import destination, note_weights_read, require_unchanged_weights
from parallel.context import Context
from parallel.layers import parameter
from parallel.linear import add_gradient
from parallel.norms import shifted


class ShardedRMSNorm(nn.Module):
    """RMSNorm over features that are sharded over tp: x [..., own features], in the dtype of
    products.

    width: the number of features of all ranks.
    shards: the number of slices of the features over tp, if it is smaller than the number of ranks
        (key/value heads).
    offset: added to the weight, which begins at 1 - offset.
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
        self.context = context
        self.eps = eps
        self.offset = offset
        part = Part.cut(f"{name}.weight", (width,), 0, context.tp, shards)
        self.weight = parameter(
            context,
            [part],
            0.0,
            partial=True,
            mean=1.0 - offset,
        )

    def forward(self, x: Tensor) -> Tensor:
        plan = self.context.plan
        return _NormalizeSharded.apply(
            x,
            self.weight,
            self.eps,
            plan.sensitive,
            plan.compute,
            self.context.tp,
            self.offset,
        )


class _NormalizeSharded(torch.autograd.Function):
    """The autograd function of `ShardedRMSNorm`; formulas as in `parallel.norms.Normalize`.

    x [..., local features], weight [local features] -> [..., local features]. Several ranks may
    hold the same slice of x. The sum of squares then counts it once. Each of these ranks has only
    an addend of the slice's gradient, and contributes only its part of the term that all features
    share.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        eps: float,
        sensitive: torch.dtype,
        output_dtype: torch.dtype,
        tp: Axis,
        offset: float,
    ) -> Tensor:
        part = layout_of(weight).parts[0]
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=sensitive)
        # `copies` ranks hold the same slice, and the sum over all ranks is to count it once
        squares = length.square_().div_(part.copies)
        mean_square = tp.sum_(squares).div_(part.shape[0])  # [..., 1], over all features
        inverse = mean_square.add_(eps).rsqrt_()
        ctx.weight = weight
        ctx.tp = tp
        ctx.part = part
        ctx.offset = offset
        # the weight is not saved: the backward pass reads it again, and must find the same values
        note_weights_read(ctx, weight)
        ctx.save_for_backward(x, inverse)
        y = (x * inverse).mul_(shifted(weight, offset, sensitive))
        return y.to(output_dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        require_unchanged_weights(ctx)
        x, inverse = ctx.saved_tensors
        normalized = x * inverse
        grad_normalized = grad * shifted(ctx.weight, ctx.offset, inverse.dtype)
        local_products = (grad_normalized * normalized).sum(-1, keepdim=True)  # [..., 1]
        # the mean over all features, as in `parallel.norms`
        along_x = ctx.tp.sum_(local_products).div_(ctx.part.shape[0])
        # The gradients of ranks that hold the same slice are added up later: each has its share.
        along_x.div_(ctx.part.copies)
        wide_grad_x = grad_normalized.addcmul_(normalized, along_x, value=-1).mul_(inverse)
        grad_x = wide_grad_x.to(x.dtype)
        rows = normalized.mul_(grad).flatten(0, -2)
        grad_weight = add_gradient(ctx.weight, rows, destination(ctx, 1, ctx.weight))
        return grad_x, grad_weight, None, None, None, None, None
