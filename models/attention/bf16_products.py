"""Attention in bf16 on a CPU: matrix products, head by head.

torch's fused kernel uses the bf16 instructions of processors with AMX; on others it takes as long
in bf16 as in FP32, while torch's matrix product uses those of AVX512 too. The scores of each head
are therefore computed by matrix products, for as many query rows at a time as stay in a core's
cache together with their scores. The backward pass recomputes the scores: only query, key and value
are kept. Scores and weights are rounded to bf16, as in the unfused attention of Megatron-LM;
softmax and the sums inside products are FP32.

Each head is computed separately, so its numbers do not depend on how many heads a rank has.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megaprec.torch_private import has_amx, has_avx512_bf16, softmax_gradient
from models.attention.packing import bias_of_mask

# Heads at a time: fewer and larger calls. The scores of more do not stay in one core's cache.
_HEADS = 4
# Query rows at a time: their scores for 512 keys take a quarter of a megabyte.
_ROWS = 256
# Tokens: with fewer, the many small products take longer than the fused kernel.
_SHORT = 128


def is_faster(query: Tensor, rounded: bool) -> bool:
    """Return True if `attend` is the faster way: query is bf16 [b, n, s, d] on a CPU with bf16
    matrix instructions.

    rounded: the plan rounds scores to bf16, which `attend` does and torch's fused kernel does not.
        If it does not, the fused kernel is the faster one on a CPU with AMX.
    """
    if query.dtype != torch.bfloat16 or query.device.type != "cpu" or query.shape[2] < _SHORT:
        return False
    # With AMX torch's fused kernel uses the bf16 instructions itself.
    if has_amx():
        return rounded
    return has_avx512_bf16()


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
    if scale is None:
        scale = query.shape[-1] ** -0.5
    return _AttendInBlocks.apply(query, key, value, attn_mask, rows, scale)


class _AttendInBlocks(torch.autograd.Function):
    """Attention whose backward pass computes the weights of each block again.

    query [b, n, s, d], key and value [b, n / groups, s, d] -> [b, n, s, d].
    """

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
        contiguous_query = query.contiguous()
        key = key.contiguous()
        value = value.contiguous()
        ctx.save_for_backward(contiguous_query, key, value)
        ctx.attn_mask = attn_mask
        ctx.rows = rows
        ctx.scale = scale
        # with the query's strides, so that the next layer needs no copy
        output = torch.empty_like(query)
        for block in _blocks(contiguous_query, key, attn_mask, rows):
            block_query = block.of_queries(contiguous_query)
            weights = _weights(block_query, block.of_keys(key), block.bias, scale)
            # [heads, rows, keys] by [heads, keys, d]
            torch.bmm(weights, block.of_keys(value), out=block.of_queries(output))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        grad = grad.contiguous()
        scale = ctx.scale
        grad_query = torch.empty_like(query)
        # Several blocks add to a key's gradients, which bf16 would round each time.
        grad_key = torch.zeros_like(key, dtype=torch.float32)
        grad_value = torch.zeros_like(value, dtype=torch.float32)
        for block in _blocks(query, key, ctx.attn_mask, ctx.rows):
            block_query = block.of_queries(query)  # [heads, rows, d]
            block_key = block.of_keys(key)  # [heads, keys, d]
            block_grad = block.of_queries(grad)
            weights = _weights(block_query, block_key, block.bias, scale)
            block_grad_value = torch.bmm(weights.mT, block_grad)  # [heads, keys, d]
            block.add_to_keys(grad_value, block_grad_value, 1.0)
            grad_weights = torch.bmm(block_grad, block.of_keys(value).mT)  # [heads, rows, keys]
            # the gradient of the scores after the scale, by which the products below multiply
            grad_scores = softmax_gradient(grad_weights, weights, -1, weights.dtype)
            # beta = 0 overwrites: each query row is in one block only
            block.of_queries(grad_query).baddbmm_(grad_scores, block_key, beta=0, alpha=scale)
            block_grad_key = torch.bmm(grad_scores.mT, block_query)
            block.add_to_keys(grad_key, block_grad_key, scale)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


class _Block(NamedTuple):
    """Heads of a sample, some of its query rows, and all keys that these may attend to.

    key_heads: heads of the keys, one for each of `heads`; a list if several heads share one.
    rows: of the query; the keys are those from 0 to the last of these rows.
    bias: [1, rows, keys], added to the scores.
    """

    sample: int
    heads: slice
    key_heads: slice | list[int]
    rows: slice
    bias: Tensor

    def of_queries(self, x: Tensor) -> Tensor:
        """Return a view of these heads and rows of x [b, n, s, d]: [heads, rows, d]."""
        return x[self.sample, self.heads, self.rows]

    def of_keys(self, x: Tensor) -> Tensor:
        """Return these heads and keys of x [b, n / groups, s, d]: [heads, keys, d]; a copy if heads
        share keys."""
        return x[self.sample, self.key_heads, : self.rows.stop]

    def add_to_keys(
        self,
        total: Tensor,
        addend: Tensor,
        factor: float,
    ) -> None:
        """Add factor * addend [heads, keys, d] to these keys of total [b, n / groups, s, d]."""
        if isinstance(self.key_heads, slice):
            self.of_keys(total).add_(addend, alpha=factor)
            return
        # A list of heads selects a copy. Head by head, heads that share keys add up too.
        for key_head, head_addend in zip(self.key_heads, addend, strict=True):
            total[self.sample, key_head, : self.rows.stop].add_(head_addend, alpha=factor)


def _blocks(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    rows: int,
) -> Iterator[_Block]:
    """Yield the blocks of scores that are computed one after the other: for each range of query
    rows, each few heads of each sample.

    query: [b, n, s, d]. key: [b, n / groups, s, d]. rows: the number of query rows of a block.
    """
    samples, heads, length, _ = query.shape
    queries_of_key = heads // key.shape[1]
    head_slices: list[slice] = []
    for first_head in range(0, heads, _HEADS):
        head_slices.append(slice(first_head, min(first_head + _HEADS, heads)))
    heads_of_samples = list(product(range(samples), head_slices))
    first_rows = range(0, length, rows)
    if type(query) is not Tensor:
        # A fake tensor has no values: the last, longest blocks take as much memory as all.
        first_rows = first_rows[-2:]
        heads_of_samples = heads_of_samples[:2]
    for first_row in first_rows:
        stop_row = min(first_row + rows, length)
        bias = _make_bias(first_row, stop_row, attn_mask, query).expand(samples, -1, -1)
        for sample, block_heads in heads_of_samples:
            yield _Block(
                sample=sample,
                heads=block_heads,
                key_heads=_key_heads(block_heads, queries_of_key),
                rows=slice(first_row, stop_row),
                bias=bias[sample : sample + 1],
            )


def _make_bias(
    first: int,
    stop: int,
    attn_mask: Tensor | None,
    query: Tensor,
) -> Tensor:
    """Return what is added to the scores of the query rows from `first` to before `stop`, and of
    the keys from 0 to before `stop`.

    It is 0 where a row attends, else -inf: [1 or b, rows, keys], in the dtype of query.
    """
    attends = torch.ones(1, stop - first, stop, dtype=torch.bool).tril(first)
    if attn_mask is not None:
        length = query.shape[2]
        attends = attends & attn_mask.view(-1, length, length)[:, first:stop, :stop]
    return bias_of_mask(attends, query.dtype)


def _key_heads(heads: slice, queries_of_key: int) -> slice | list[int]:
    """Return the heads of keys that serve these heads of queries.

    queries_of_key: the number of query heads that one key head serves.
    """
    if queries_of_key == 1:
        return heads
    return [head // queries_of_key for head in range(heads.start, heads.stop)]


def _weights(
    query: Tensor,
    key: Tensor,
    bias: Tensor,
    scale: float,
) -> Tensor:
    """Return softmax(scale * query @ key.T + bias), [heads, rows, keys]."""
    return torch.softmax(torch.baddbmm(bias, query, key.mT, alpha=scale), -1)
