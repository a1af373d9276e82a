"""torch's fused attention for a CPU, in FP32 where bf16 products are slow.

On a CPU without instructions for bf16 the fused kernel takes five times as long in bf16 as in FP32.
There query, key and value are cast for the time of a pass, and only their bf16 forms are kept for
the backward pass.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megaprec.precision.gemm import slow_bf16

_ATEN = torch.ops.aten


def attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float | None
) -> Tensor:
    """Return attention of query, key and value [b, n, s, d], in their dtype.

    attn_mask: bool [s, t] or [b, 1, s, t], True where a token (row) attends to another; None: to
        itself and all earlier ones.
    scale: None: 1 / sqrt(d).
    """
    return _Attend.apply(query, key, value, attn_mask, scale)


def forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return attention [b, n, s, d], in FP32 or in the dtype of the query, and its logs of sums [b,
    n, s].

    bias: [s, t] or [b, 1, s, t], which is added to the scores; None: causal attention.
    """
    wide = _widened(query, key, value, bias)
    kernel = _ATEN._scaled_dot_product_flash_attention_for_cpu
    return kernel(*wide[:3], 0.0, bias is None, attn_mask=wide[3], scale=scale)


def backward(
    grad: Tensor,
    held: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    output: Tensor,
    sums: Tensor,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, `held`, of an attention with this output and
    these logs of sums."""
    wide = _widened(grad, *held, output, bias)
    kernel = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
    for_query, for_key, for_value = kernel(
        *wide[:5], sums, 0.0, bias is None, attn_mask=wide[5], scale=scale
    )
    return for_query.to(grad.dtype), for_key.to(grad.dtype), for_value.to(grad.dtype)


def _widened(*tensors: Tensor | None) -> list[Tensor | None]:
    return [each.float() if each is not None and slow_bf16(each) else each for each in tensors]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        output, sums = forward(query, key, value, _bias(attn_mask), scale)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, attn_mask, output, sums)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, attn_mask, output, sums = ctx.saved_tensors
        grads = backward(grad, (query, key, value), _bias(attn_mask), output, sums, ctx.scale)
        return *grads, None, None


def _bias(attn_mask: Tensor | None) -> Tensor | None:
    """Return what is added to the scores: 0 where the mask is True, else -inf."""
    if attn_mask is None:
        return None
    return torch.zeros(attn_mask.shape).masked_fill_(~attn_mask, -torch.inf)
