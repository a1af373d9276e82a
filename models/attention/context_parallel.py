"""Attention of sequences that are cut over cp: a rank's queries attend to the keys of all ranks.

    gather   each rank all-gathers the keys and values of a whole sequence, for one layer at a time
    ring     each rank passes the keys and values of one rank on to the next: none ever holds all

Both are the same sums: attention is merged from the ranks' parts, in FP32 or wider, beginning with
the local part: by one call of a fused kernel for each (`fused_parts.py`), or by matrix products
(`partial.py`). Only their own query, key, value and result are saved for
the backward pass, which fetches the other parts again. It sums the gradients of keys and values in
FP32 or wider, by a reduce-scatter, or on their way round the ring. Communication of a part overlaps
with the work on the part before it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megaprec.comm.axis import Axis
from models.attention.fused_parts import FusedParts, FusedPartsGradients
from models.attention.partial import AttentionGradients, AttentionRule, MergedAttention
from parallel.sequence_cut import chunks_of_rank

AddGradient = Callable[[int, Tensor, Tensor], None]
"""A function of a rank, its part, and the sum to which it adds the part's gradient."""


def attend_over_ranks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cp: Axis,
    rule: AttentionRule,
    ring: bool,
    wide_dtype: torch.dtype,
    sinks: Tensor | None = None,
    fused: bool = False,
) -> Tensor:
    """Return attention of this rank's queries over the keys of all ranks of cp: [b, n, s, e] in the
    dtype of query.

    query [b, n, s, d], key [b, m, s, d], value [b, m, s, e]: those of this rank's tokens.
    rule: of positions in the whole sequence.
    wide_dtype: the dtype of scores and sums.
    sinks: [n] (`sink_attention.py`), whose gradient is that of this rank's tokens; None: without.
    fused: a fused kernel attends to the keys of each rank. It takes the scale of the rule alone,
        and d must be e.
    Collective over cp, forward and backward.
    """
    return _AttendOverRanks.apply(query, key, value, sinks, cp, rule, ring, wide_dtype, fused)


class _AttendOverRanks(torch.autograd.Function):
    """Attention whose backward pass fetches the other ranks' keys and values again.

    query [b, n, s, d], key [b, m, s, d], value [b, m, s, e] of this rank's
    tokens -> [b, n, s, e]. Collective over cp.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        cp: Axis,
        rule: AttentionRule,
        ring: bool,
        wide_dtype: torch.dtype,
        fused: bool,
    ) -> Tensor:
        length = query.shape[2]
        key_heads = key.shape[1]
        widths = (key.shape[-1], value.shape[-1])
        # a chunk of positions is a run of the partial attention
        local_runs = chunks_of_rank(cp.rank, cp.size, length)
        merged: FusedParts | MergedAttention
        if fused:
            merged = FusedParts(query, local_runs, rule.scale, sinks)
        else:
            merged = MergedAttention(
                query=query,
                runs=local_runs,
                heads=key_heads,
                width=widths[1],
                rule=rule,
                wide_dtype=wide_dtype,
                sinks=sinks,
            )
        parts_of_ranks = _pass_parts_around if ring else _gather_parts
        # key and value travel as one message
        for rank, part in parts_of_ranks(torch.cat((key, value), -1), cp):
            key_part, value_part = part.split(widths, -1)
            merged.add(key_part, value_part, chunks_of_rank(rank, cp.size, length))
        exact, log_sum = merged.result()
        # with the strides of activations [s, b, n, e], so that the next layer needs no copy
        activations = exact.new_empty((length, *exact.shape[:2], widths[1]), dtype=query.dtype)
        output = activations.permute(1, 2, 0, 3)
        output.copy_(exact)
        ctx.save_for_backward(query, key, value, sinks, output, log_sum)
        ctx.settings = cp, rule, ring, wide_dtype
        ctx.of_fused = merged.backward_inputs if isinstance(merged, FusedParts) else None
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, log_sum = ctx.saved_tensors
        cp, rule, ring, wide_dtype = ctx.settings
        length = query.shape[2]
        widths = (key.shape[-1], value.shape[-1])
        local_runs = chunks_of_rank(cp.rank, cp.size, length)
        gradients: FusedPartsGradients | AttentionGradients
        if ctx.of_fused is not None:
            gradients = FusedPartsGradients(
                query=query,
                runs=local_runs,
                output=output,
                log_sum=log_sum,
                grad=grad,
                scale=rule.scale,
                backward_inputs=ctx.of_fused,
            )
        else:
            gradients = AttentionGradients(
                query=query,
                runs=local_runs,
                output=output,
                log_sum=log_sum,
                grad=grad,
                rule=rule,
                wide_dtype=wide_dtype,
            )

        def add_gradient(
            rank: int,
            part: Tensor,
            total: Tensor,
        ) -> None:
            """Add to `total` the gradients of a rank's keys and values, `part`, that come from this
            rank's queries."""
            key_part, value_part = part.split(widths, -1)
            grad_key, grad_value = total.split(widths, -1)  # views of the total
            runs = chunks_of_rank(rank, cp.size, length)
            gradients.add(key_part, value_part, runs, grad_key, grad_value)

        sum_gradients = _sum_around_ring if ring else _sum_by_scatter
        total = sum_gradients(torch.cat((key, value), -1), cp, wide_dtype, add_gradient)
        grad_key, grad_value = total.split(widths, -1)
        grad_sinks = None if sinks is None else gradients.grad_sinks(sinks).to(sinks.dtype)
        return (
            gradients.grad_query().to(query.dtype),
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            grad_sinks,
            None,
            None,
            None,
            None,
            None,
        )


def _ranks_by_arrival(cp: Axis) -> Iterator[int]:
    """Yield the ranks in the order in which their parts come round the ring, this one first."""
    return ((cp.rank - step) % cp.size for step in range(cp.size))


def _pass_parts_around(part: Tensor, cp: Axis) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank and its part, passed on from rank to rank of cp.

    The next part is under way while the caller works on the one that it got.
    """
    for step, rank in enumerate(_ranks_by_arrival(cp)):
        wait_for_next = cp.start_shift(part) if step < cp.size - 1 else None
        yield rank, part
        if wait_for_next is not None:
            part = wait_for_next()


def _gather_parts(part: Tensor, cp: Axis) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank and its part, all-gathered over cp."""
    parts = cp.gather(part).chunk(cp.size)
    # In the order of the ring, so that both ways merge the same parts in the same order.
    for rank in _ranks_by_arrival(cp):
        yield rank, parts[rank]


def _sum_around_ring(
    part: Tensor,
    cp: Axis,
    wide_dtype: torch.dtype,
    add_gradient: AddGradient,
) -> Tensor:
    """Return the gradient of this rank's part, to which all ranks of cp have added.

    Each part goes round the ring, and the sum of its gradients follows it, in `wide_dtype`.
    add_gradient: adds what this rank has to the gradient of any rank's part.
    """
    wait_for_sum = None
    for rank, rank_part in _pass_parts_around(part, cp):
        total = torch.zeros(part.shape, dtype=wide_dtype, device=part.device)
        add_gradient(rank, rank_part, total)
        # The sum of the ranks before arrives while this rank computes its addend.
        if wait_for_sum is not None:
            total += wait_for_sum()
        wait_for_sum = cp.start_shift(total)
    assert wait_for_sum is not None
    # the last shift brings the sum to the rank whose part it is of
    return wait_for_sum()


def _sum_by_scatter(
    part: Tensor,
    cp: Axis,
    wide_dtype: torch.dtype,
    add_gradient: AddGradient,
) -> Tensor:
    """Return the gradient of this rank's part, as `_sum_around_ring` does: each rank computes its
    addends to all parts, and one reduce-scatter over cp sums them, in `wide_dtype`."""
    # One tensor, so that one reduce-scatter sums the gradients of all parts.
    totals = torch.zeros(
        (cp.size * len(part), *part.shape[1:]), dtype=wide_dtype, device=part.device
    )
    total_of_rank = totals.chunk(cp.size)
    for rank, rank_part in _gather_parts(part, cp):
        add_gradient(rank, rank_part, total_of_rank[rank])
    return cp.scatter_sum(totals)
