"""Attention in bf16 on a CPU: matrix products, head by head.

torch's fused kernel uses the bf16 instructions of processors with AMX; on others it takes as long
in bf16 as in FP32, while torch's matrix product uses those of AVX512 too. The scores of each head
are therefore computed by matrix products, for as many query rows at a time as stay in a core's
cache together with their scores. The backward pass recomputes the scores: only query, key and value
are kept. Scores and weights are rounded to bf16, as in the unfused attention of Megatron-LM;
softmax and the sums inside products are FP32.

Each head is computed separately, so its numbers do not depend on how many heads a rank has.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_HEADS = (
    4  # heads at a time: fewer and larger calls; the scores of more do not stay in one core's cache
)
_ROWS = 256  # query rows at a time: their scores for 512 keys take a quarter of a megabyte
_SHORT = 128  # tokens: with fewer, the many small products take longer than the fused kernel


def worthwhile(query: Tensor, rounded: bool) -> bool:
    """Return True if `attend` is the faster way: query is bf16 [b, n, s, d] on a CPU with bf16
    matrix instructions.

    rounded: the plan rounds scores to bf16, which `attend` does and torch's fused kernel does not.
    If it does not, the fused kernel is the faster one on a CPU with AMX.
    """
    if query.dtype != torch.bfloat16 or query.device.type != "cpu" or query.shape[2] < _SHORT:
        return False
    if torch.cpu._is_amx_tile_supported():
        return rounded
    return torch.cpu._is_avx512_bf16_supported()


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    rows: int = _ROWS,
    scale: float | None = None,
) -> Tensor:
    """Return causal attention, softmax(scale * query @ key.T) @ value: bf16 [b, n, s, d].

    key, value: [b, n / groups, s, d]; a head of theirs serves `groups` neighbouring heads of query.
        Their gradients are summed over these in FP32.
    attn_mask: bool [s, s] or [b, 1, s, s], True where a token (row) attends to another; None: to
        itself and all earlier ones.
    rows: the number of query rows that are computed at a time.
    scale: None: 1 / sqrt(d).
    """
    return _Attend.apply(
        query, key, value, attn_mask, rows, query.shape[-1] ** -0.5 if scale is None else scale
    )


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        rows: int,
        scale: float,
    ) -> Tensor:
        q, k, v = (x.contiguous() for x in (query, key, value))
        ctx.save_for_backward(q, k, v)
        ctx.attn_mask = attn_mask
        ctx.rows = rows
        ctx.scale = scale
        # with the query's strides, so that the next layer needs no copy
        mixed = torch.empty_like(query)
        for run in _runs(q, k, attn_mask, rows):
            weights = _weights(run.queries(q), run.keys(k), run.bias, scale)
            torch.bmm(weights, run.keys(v), out=run.queries(mixed))
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v), grad, scale = ctx.saved_tensors, grad.contiguous(), ctx.scale
        grad_q, grad_k, grad_v = (
            torch.empty_like(q),
            *(torch.zeros_like(x, dtype=torch.float32) for x in (k, v)),
        )
        for run in _runs(q, k, ctx.attn_mask, ctx.rows):
            rows = run.queries(q)
            keys = run.keys(k)
            wanted = run.queries(grad)
            weights = _weights(rows, keys, run.bias, scale)
            run.add(grad_v, torch.bmm(weights.mT, wanted), 1.0)
            grad_scores = torch._softmax_backward_data(
                torch.bmm(wanted, run.keys(v).mT), weights, -1, weights.dtype
            )
            run.queries(grad_q).baddbmm_(grad_scores, keys, beta=0, alpha=scale)
            run.add(grad_k, torch.bmm(grad_scores.mT, rows), scale)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


class _Run(NamedTuple):
    """Heads of a sample, some of its query rows, and all keys that these may attend to: [0,
    last)."""

    sample: int
    heads: slice
    # heads of the keys, one for each of heads; a list if several heads share one
    key_heads: slice | list[int]
    rows: slice
    bias: Tensor  # [1, rows, keys], added to the scores

    def queries(self, x: Tensor) -> Tensor:
        """Return a view of these heads and rows of x [b, n, s, d]: [heads, rows, d]."""
        return x[self.sample, self.heads, self.rows]

    def keys(self, x: Tensor) -> Tensor:
        """Return these heads and keys of x [b, n / groups, s, d]: [heads, keys, d]; a copy if heads
        share keys."""
        return x[self.sample, self.key_heads, : self.rows.stop]

    def add(self, total: Tensor, part: Tensor, factor: float) -> None:
        """Add factor * part [heads, keys, d] to these keys of total [b, n / groups, s, d]."""
        if isinstance(self.key_heads, slice):
            self.keys(total).add_(part, alpha=factor)
            return
        for head, one in zip(self.key_heads, part, strict=True):
            total[self.sample, head, : self.rows.stop].add_(one, alpha=factor)


def _runs(query: Tensor, key: Tensor, attn_mask: Tensor | None, rows: int) -> Iterator[_Run]:
    """Yield what is computed together: for each block of query rows, some heads of each sample."""
    samples, heads, length, _ = query.shape
    groups = heads // key.shape[1]
    together = [slice(n, min(n + _HEADS, heads)) for n in range(0, heads, _HEADS)]
    starts = range(0, length, rows)
    places = [(b, some) for b in range(samples) for some in together]
    if (
        type(query) is not Tensor
    ):  # a fake tensor has no values: the last, longest runs take as much memory as all
        starts = starts[-2:]
        places = places[:2]
    for first in starts:
        last = min(first + rows, length)
        attends = torch.ones(1, last - first, last, dtype=torch.bool).tril(first)
        if attn_mask is not None:
            attends = attends & attn_mask.view(-1, length, length)[:, first:last, :last]
        bias = (
            torch.zeros(attends.shape, dtype=query.dtype)
            .masked_fill_(~attends, -math.inf)
            .expand(samples, -1, -1)
        )
        for b, some in places:
            keys = some if groups == 1 else [n // groups for n in range(some.start, some.stop)]
            yield _Run(b, some, keys, slice(first, last), bias[b : b + 1])


def _weights(query: Tensor, key: Tensor, bias: Tensor, scale: float) -> Tensor:
    return torch.softmax(torch.baddbmm(bias, query, key.mT, alpha=scale), -1)
