"""torch's fused attention with the logs of sums, which correct and merge attentions: forward and
backward.

Each kernel returns besides its output the log of the sum of exponentials of each query's scores.
Its backward pass computes the weights again from these logs, so it is exact for a softmax over more
than the keys that it gets: given the output and the logs of sums over all of them, it returns the
gradients that come from its own.

Query is [b, n, s, d], key and value [b, n, t, d], or fewer heads where the kernel takes groups
(`takes_groups` of `models.attention.kernels`). No kernel drops weights: it would draw dropout from
a generator that does not know the layout.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megaprec.torch_private import (
    efficient_attention,
    efficient_attention_gradients,
    flash_attention_by_heads,
    flash_attention_gradients,
)
from models.attention import cpu_fused

_NO_DROPOUT = 0.0


class FusedAttention(NamedTuple):
    """The result of a fused kernel."""

    output: Tensor  # [b, n, s, d]
    log_sums: Tensor  # [b, n, s], of the exponentials of each query's scores
    backward_inputs: tuple[Any, ...]  # what else the kernel's backward pass wants


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> FusedAttention:
    """Return the attention of each query to all keys, or if `causal` to those up to its own row, by
    the fused kernel for the device and the dtype.

    bias: [s, t] or [b, 1, s, t], or on a GPU [b, n, s, t], which is added to the scores.
    scale: None: 1 / sqrt(d).
    """
    if query.device.type == "cpu":
        output, log_sums = cpu_fused.forward(query, key, value, causal, bias, scale)
        return FusedAttention(output, log_sums, ())
    if _takes_flash(query, bias):
        output, log_sums, query_starts, key_starts, _, _, seed, offset, _ = (
            flash_attention_by_heads(query, key, value, _NO_DROPOUT, causal, scale=scale)
        )
        return FusedAttention(output, log_sums, (query_starts, key_starts, seed, offset))
    output, log_sums, *others = efficient_attention(
        query,
        key,
        value,
        bias,
        True,
        _NO_DROPOUT,
        causal,
        scale=scale,
    )
    # The kernel may return more rows than queries, and wants as many in its backward pass.
    rows = log_sums.shape[-1]
    log_sums_of_queries = log_sums[..., : query.shape[2]]
    return FusedAttention(output, log_sums_of_queries, backward_inputs=(rows, *others))


def backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    output: Tensor,
    log_sums: Tensor,
    backward_inputs: tuple[Any, ...],
    causal: bool,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value that come from these keys.

    grad: the gradient of the output.
    inputs: query, key and value.
    output, log_sums: of an attention to these keys, and perhaps to others.
    backward_inputs: from `forward`, of a call with as many queries. Flash attention, which half
        precision takes without a bias, wants those of any call.
    """
    query, key, _ = inputs
    if query.device.type == "cpu":
        return cpu_fused.backward(grad, inputs, output, log_sums, causal, bias, scale)
    if _takes_flash(query, bias):
        query_starts, key_starts, seed, offset = backward_inputs
        return flash_attention_gradients(
            grad,
            *inputs,
            output,
            log_sums.contiguous(),
            query_starts,
            key_starts,
            query.shape[2],
            key.shape[2],
            _NO_DROPOUT,
            causal,
            seed,
            offset,
            scale=scale,
        )
    rows, *others = backward_inputs
    # The kernel reads the rows beyond those of queries too. Infinity, which it makes there itself,
    # gives them no weight.
    added_rows = rows - query.shape[2]
    if added_rows:
        log_sums = F.pad(log_sums, (0, added_rows), value=torch.inf)
    wanted_gradients = (True, True, True, False)  # none of the bias
    grads = efficient_attention_gradients(
        grad,
        *inputs,
        bias,
        output,
        log_sums,
        *others,
        _NO_DROPOUT,
        wanted_gradients,
        causal,
        scale=scale,
    )
    return grads[:3]


def _takes_flash(query: Tensor, bias: Tensor | None) -> bool:
    """Return True if a GPU takes flash attention: half precision without a bias; else its other
    fused kernel."""
    return bias is None and query.dtype.itemsize == 2
