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
from megaprec.torch_private import cpu_attention, cpu_attention_gradients
from models.attention.packing import bias_of_mask

# The kernel would draw it from a generator that does not know the layout.
_NO_DROPOUT = 0.0


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Return attention of query, key and value [b, n, s, d], in their dtype.

    attn_mask: bool [s, t] or [b, 1, s, t], True where a token (row) attends to another; None: to
        itself and all earlier ones.
    scale: None: 1 / sqrt(d).
    """
    return _AttendInFP32.apply(query, key, value, attn_mask, scale)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    bias: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Return attention [b, n, s, d], in FP32 or in the dtype of the query, and its logs of sums [b,
    n, s].

    causal: a query attends to the keys up to its own row.
    bias: [s, t] or [b, 1, s, t], which is added to the scores.
    """
    return cpu_attention(
        _widen(query),
        _widen(key),
        _widen(value),
        _NO_DROPOUT,
        causal,
        attn_mask=_widen_bias(bias),
        scale=scale,
    )


def backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    output: Tensor,
    log_sums: Tensor,
    causal: bool,
    bias: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, in the dtype of `grad`.

    inputs: query, key and value.
    output, log_sums: of the attention, as `forward` returns them.
    """
    query, key, value = inputs
    grad_query, grad_key, grad_value = cpu_attention_gradients(
        _widen(grad),
        _widen(query),
        _widen(key),
        _widen(value),
        _widen(output),
        log_sums,
        _NO_DROPOUT,
        causal,
        attn_mask=_widen_bias(bias),
        scale=scale,
    )
    return grad_query.to(grad.dtype), grad_key.to(grad.dtype), grad_value.to(grad.dtype)


def _widen(x: Tensor) -> Tensor:
    # A CPU with instructions for bf16 needs no cast.
    return x.float() if slow_bf16(x) else x


def _widen_bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else _widen(bias)


class _AttendInFP32(torch.autograd.Function):
    """Attention in FP32, of which only the bf16 tensors are kept.

    query, key, value [b, n, s, d] -> [b, n, s, d], all bf16; FP32 log-sums [b, n, s] are kept too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        bias = None if attn_mask is None else bias_of_mask(attn_mask, torch.float32)
        output, log_sums = forward(query, key, value, bias is None, bias, scale)
        # The backward pass reads the rounded output: the wide one would be kept besides it.
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, attn_mask, output, log_sums)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, attn_mask, output, log_sums = ctx.saved_tensors
        # The mask is saved and not the bias, which takes four times its memory.
        bias = None if attn_mask is None else bias_of_mask(attn_mask, torch.float32)
        causal = bias is None
        inputs = (query, key, value)
        grads = backward(grad, inputs, output, log_sums, causal, bias, ctx.scale)
        return *grads, None, None
