"""Attention in bf16 on a CPU: matrix products, head by head.

torch's fused kernel uses the bf16 instructions of processors with AMX; on others it takes as long in bf16 as in FP32,
while torch's matrix product uses those of AVX512 too. The scores of each head are therefore computed by matrix
products, for as many query rows at a time as stay in a core's cache together with their scores. The backward pass
recomputes the scores: only query, key and value are kept. Scores and weights are rounded to bf16, as in the unfused
attention of Megatron-LM; softmax and the sums inside products are FP32.

Each head is computed separately, so its numbers do not depend on how many heads a rank has.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_ROWS = 256  # query rows at a time: their scores for 512 keys take a quarter of a megabyte
_SHORT = 128  # tokens: with fewer, the many small products take longer than the fused kernel


def worthwhile(query: Tensor, rounded: bool) -> bool:
    """Return True if `attend` is the faster way: query is bf16 [b, n, s, d] on a CPU with bf16 matrix instructions.

    rounded: the plan rounds scores to bf16, which `attend` does and torch's fused kernel does not. If it does not, the
    fused kernel is the faster one on a CPU with AMX.
    """
    if query.dtype != torch.bfloat16 or query.device.type != "cpu" or query.shape[2] < _SHORT:
        return False
    return rounded if torch.cpu._is_amx_tile_supported() else torch.cpu._is_avx512_bf16_supported()


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    rows: int = _ROWS,
    scale: float | None = None,
) -> Tensor:
    """Return causal attention, softmax(scale * query @ key.T) @ value: bf16 [b, n, s, d].

    key, value: [b, n / groups, s, d]; a head of theirs serves `groups` neighbouring heads of query. Their gradients are
        summed over these in FP32.
    attn_mask: bool [s, s] or [b, 1, s, s], True where a token (row) attends to another; None: to itself and all earlier
        ones.
    rows: the number of query rows that are computed at a time.
    scale: None: 1 / sqrt(d).
    """
    return _Attend.apply(query, key, value, attn_mask, rows, query.shape[-1] ** -0.5 if scale is None else scale)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, rows: int, scale: float
    ) -> Tensor:
        q, k, v = (x.contiguous() for x in (query, key, value))
        ctx.save_for_backward(q, k, v)
        ctx.attn_mask, ctx.rows, ctx.scale, groups = attn_mask, rows, scale, q.shape[1] // k.shape[1]
        mixed = torch.empty_like(query)  # with the query's strides, so that the next layer needs no copy
        for b, n, first, last, bias in _runs(query, attn_mask, rows):
            m = n // groups
            weights = _weights(q[b, n, first:last], k[b, m, :last], bias, scale)
            torch.mm(weights, v[b, m, :last], out=mixed[b, n, first:last])
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v), grad = ctx.saved_tensors, grad.contiguous()
        grad_q, grad_k, grad_v = torch.empty_like(q), *(torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
        scale, groups = ctx.scale, q.shape[1] // k.shape[1]
        for b, n, first, last, bias in _runs(q, ctx.attn_mask, ctx.rows):
            m, rows, wanted = n // groups, q[b, n, first:last], grad[b, n, first:last]
            weights = _weights(rows, k[b, m, :last], bias, scale)
            grad_v[b, m, :last] += weights.t() @ wanted
            grad_scores = torch._softmax_backward_data(wanted @ v[b, m, :last].t(), weights, -1, weights.dtype)
            grad_q[b, n, first:last].addmm_(grad_scores, k[b, m, :last], beta=0, alpha=scale)
            grad_k[b, m, :last].add_(grad_scores.t() @ rows, alpha=scale)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


def _runs(query: Tensor, attn_mask: Tensor | None, rows: int) -> Iterator[tuple[int, int, int, int, Tensor]]:
    """Yield sample, head, query rows [first, last), and the bias that is added to their scores for keys [0, last)."""
    samples, heads, length, _ = query.shape
    starts, places = range(0, length, rows), [(b, n) for b in range(samples) for n in range(heads)]
    if type(query) is not Tensor:  # a fake tensor has no values: the last, longest runs take as much memory as all
        starts, places = starts[-2:], places[:2]
    for first in starts:
        last = min(first + rows, length)
        attends = torch.ones(1, last - first, last, dtype=torch.bool).tril(first)
        if attn_mask is not None:
            attends = attends & attn_mask.view(-1, length, length)[:, first:last, :last]
        bias = torch.zeros(attends.shape, dtype=query.dtype).masked_fill_(~attends, -math.inf).expand(samples, -1, -1)
        yield from ((b, n, first, last, bias[b]) for b, n in places)


def _weights(query: Tensor, key: Tensor, bias: Tensor, scale: float) -> Tensor:
    return torch.softmax(torch.addmm(bias, query, key.t(), alpha=scale), -1)
