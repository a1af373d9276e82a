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
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.attention import fused_kernels
from models.attention.packing import bias_of_mask

# Elements: kernels want the rows of a bias to begin at multiples of it.
_BIAS_ALIGNMENT = 16
# Features of a head: flash attention takes no more.
_FLASH_WIDEST = 256


def fuses(query: Tensor) -> bool:
    """Return True if `attend` has a kernel for such a query [b, n, s, d].

    The kernels of a GPU want d in multiples of 8, and no float64. Flash attention, in half
    precision, wants a GPU of compute capability 8.0 or later.
    """
    if query.device.type == "cpu":
        return True
    width = query.shape[-1]
    if width % 8 or query.dtype.itemsize > 4:
        return False
    # Without flash attention, in FP32, every GPU has a kernel.
    if query.dtype.itemsize != 2:
        return True
    if width > _FLASH_WIDEST:
        return False
    # Meta tensors stand for a GPU's.
    if query.device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(query.device) >= (8, 0)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return attention with sinks [n]: [b, n, s, d] like `query`, in its dtype.

    key, value: [b, n, t, d], or fewer heads where `takes_groups` of `models.attention.kernels` is
        True.
    attn_mask: bool [s, t] or [b, 1, s, t], True where a token (row) attends to another; None: to
        itself and all earlier ones.
    scale: None: 1 / sqrt(d).
    """
    bias = None if attn_mask is None else _make_bias(attn_mask, query)
    return _AttendWithSinks.apply(query, key, value, sinks, bias, scale)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of scores [b, n, s, t] over t, with the sinks [n] in the denominator if
    there are any."""
    if sinks is None:
        return scores.softmax(-1)
    sink_of_head = sinks.to(scores.dtype).view(1, -1, 1, 1)
    sink_scores = sink_of_head.expand(*scores.shape[:3], 1)  # [b, n, s, 1]
    weights = torch.cat((scores, sink_scores), -1).softmax(-1)
    return weights[..., :-1]  # without that of the sink, whose value is zero


class _AttendWithSinks(torch.autograd.Function):
    """A fused attention, corrected for sinks; see the module.

    query [b, n, s, d], key [b, n, t, d], value [b, n, t, e], sinks [n], bias [b, n, s, t] or None
    -> [b, n, s, e].
    """

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
        causal = bias is None
        fused = fused_kernels.forward(query, key, value, causal, bias, scale)
        log_sums = fused.log_sums  # l [b, n, s]
        sink_column = sinks.to(log_sums.dtype)[:, None]  # [n, 1]
        log_sums_with_sinks = torch.logaddexp(log_sums, sink_column)  # m [b, n, s]
        factors = (log_sums - log_sums_with_sinks).exp()  # exp(l - m)
        wide_output = fused.output * factors.unsqueeze(-1)
        output = wide_output.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, bias, output, log_sums_with_sinks)
        ctx.backward_inputs = fused.backward_inputs
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, bias, output, log_sums = ctx.saved_tensors
        grad_dot_output = (grad.to(log_sums.dtype) * output).sum(-1)  # [b, n, s]
        sink_column = sinks.to(log_sums.dtype)[:, None]  # [n, 1]
        sink_weights = (sink_column - log_sums).exp()  # exp(sink - m) [b, n, s]
        sum_over_tokens = (sink_weights * grad_dot_output).sum((0, 2))  # [n]
        grad_sinks = -sum_over_tokens.to(sinks.dtype)
        grads = fused_kernels.backward(
            grad,
            (query, key, value),
            output,
            log_sums,
            ctx.backward_inputs,
            bias is None,
            bias,
            ctx.scale,
        )
        return *grads, grad_sinks, None, None


def _make_bias(attn_mask: Tensor, query: Tensor) -> Tensor:
    """Return what a kernel adds to the scores, 0 where the mask is True, else -inf, in the dtype of
    query: of the shape of the mask, on a GPU [b, n, s, t]."""
    bias = bias_of_mask(attn_mask, query.dtype)
    if query.device.type == "cpu":
        return bias
    keys = bias.shape[-1]
    # padded and cut again: a view whose rows begin where the kernel wants them
    padding = -keys % _BIAS_ALIGNMENT
    aligned = F.pad(bias, (0, padding))[..., :keys]
    return aligned.expand(*query.shape[:3], keys)
