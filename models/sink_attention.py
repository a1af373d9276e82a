"""Attention whose softmax has one more logit in its denominator: the sink, a number that each head
learns.

    weight[i, j] = exp(score[i, j]) / (exp(sink) + sum over k of exp(score[i, k]))

Weights of a token sum to less than one, so a head may attend to nothing (Xiao et al., 2023;
gpt-oss). The fused kernels know no sinks, but they return the log of the sum of exponentials of
each token, l. The attention with a sink is theirs times exp(l - m), where m = log(exp(l) +
exp(sink)). Their backward pass recomputes the weights from l: given m and the new output in place
of l and the old one, it computes the gradients of query, key and value of the attention with a
sink. The gradient of the sink is minus the sum over tokens of exp(sink - m) * (gradient of the
output) . (output).

So a sink costs two passes over the output, and no matrix of scores is kept. In half precision the
output is rounded once more than without a sink.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models import cpu_attention

_ALIGNED = 16  # elements: kernels want the rows of a bias to begin at multiples of it
_WIDEST = 256  # features of a head that flash attention takes
_ATEN = torch.ops.aten


def fuses(query: Tensor) -> bool:
    """Return True if `attend` has a kernel for such a query [b, n, s, d].

    A GPU's want d in eights, and no float64. Flash attention, in half precision, wants a GPU of
    compute capability 8.
    """
    if query.device.type == "cpu":
        return True
    width = query.shape[-1]
    half = query.dtype.itemsize == 2
    if width % 8 or query.dtype.itemsize > 4 or (half and width > _WIDEST):
        return False
    return (
        not half
        or query.device.type != "cuda"
        or torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return attention with sinks [n]: [b, n, s, d] like `query`, in its dtype.

    key, value: [b, n, t, d], or fewer heads where `takes_groups` of models.attention_kernels is True.
    attn_mask: bool [s, t] or [b, 1, s, t], True where a token (row) attends to another; None: to
        itself and all earlier ones.
    scale: None: 1 / sqrt(d).
    """
    bias = None if attn_mask is None else _bias(attn_mask, query)
    return _Attend.apply(query, key, value, sinks, bias, scale)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of scores [b, n, s, t] over t, with the sinks [n] in the denominator if
    there are any."""
    if sinks is None:
        return scores.softmax(-1)
    extra = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, extra), -1).softmax(-1)[..., :-1]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        bias: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        plain, kept, *rest = _forward(query, key, value, bias, scale)
        length = query.shape[2]
        sums = kept[..., :length]  # a kernel may return more rows than there are tokens
        total = torch.logaddexp(sums, sinks.to(sums.dtype)[:, None])
        output = (plain * (sums - total).exp().unsqueeze(-1)).to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, bias, output, total)
        ctx.rest = rest
        ctx.scale = scale
        ctx.padding = kept.shape[-1] - length
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, bias, output, total = ctx.saved_tensors
        along = (grad.to(total.dtype) * output).sum(-1)
        grad_sinks = (
            -((sinks.to(total.dtype)[:, None] - total).exp() * along).sum((0, 2)).to(sinks.dtype)
        )
        # The kernel reads its added rows too. Infinity, which it makes there itself, gives them no
        # weight.
        if ctx.padding:
            sums = torch.nn.functional.pad(total, (0, ctx.padding), value=torch.inf)
        else:
            sums = total
        grads = _backward(grad, query, key, value, bias, output, sums, ctx.rest, ctx.scale)
        return *grads, grad_sinks, None, None


def _bias(attn_mask: Tensor, query: Tensor) -> Tensor:
    """Return what a kernel adds to the scores: 0 where the mask is True, else -inf."""
    bias = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
    bias = bias.masked_fill_(~attn_mask, -torch.inf)
    if query.device.type == "cpu":
        return bias
    keys = bias.shape[-1]
    whole = torch.nn.functional.pad(bias, (0, -keys % _ALIGNED))[..., :keys]
    return whole.expand(*query.shape[:3], keys)


def _flash(query: Tensor, bias: Tensor | None) -> bool:
    """Return True if a GPU takes flash attention: half precision without a mask; else its other
    fused kernel."""
    return bias is None and query.dtype.itemsize == 2


def _forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor, *tuple[Any, ...]]:
    """Return the attention without sinks, its logs of sums [b, n, >= s], and what else `_backward`
    needs."""
    causal = bias is None
    if query.device.type == "cpu":
        return cpu_attention.forward(query, key, value, bias, scale)
    if _flash(query, bias):
        made = _ATEN._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, scale=scale
        )
        return *made[:2], *made[2:8]
    return _ATEN._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, 0.0, causal, scale=scale
    )


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    output: Tensor,
    sums: Tensor,
    rest: list[Any],
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value of an attention with this output and these logs
    of sums."""
    causal = bias is None
    held = (query, key, value)
    if query.device.type == "cpu":
        return cpu_attention.backward(grad, held, bias, output, sums, scale)
    if _flash(query, bias):
        kernel, (from_query, from_key, *most, seed, offset) = (
            _ATEN._scaled_dot_product_flash_attention_backward,
            rest,
        )
        places = from_query, from_key, *most
        return kernel(grad, *held, output, sums, *places, 0.0, causal, seed, offset, scale=scale)
    kernel = _ATEN._scaled_dot_product_efficient_attention_backward
    wanted = (True, True, True, False)
    return kernel(grad, *held, bias, output, sums, *rest, 0.0, wanted, causal, scale=scale)[:3]
