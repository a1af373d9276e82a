"""Attention of sequences that are cut over cp: each rank attends with its own queries to the keys
of all ranks.

    gather   each rank all-gathers the keys and values of a whole sequence, for one layer at a time
    ring     each rank passes the keys and values of one rank on to the next: none ever holds all of them

Both are the same sums: attention is merged from the ranks' parts (`partial_attention.py`), in FP32
or wider, beginning with the own part. Only their own query, key, value and result are kept for the
backward pass, which fetches the other parts again. It sums the gradients of keys and values in FP32
or wider, by a reduce-scatter, or on their way round the ring. Communication of a part overlaps with
the work on the part before it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megaprec.comm.axis import Axis
from models.partial_attention import Gradients, Merged, Rule
from parallel.sequence_cut import chunks

Add = Callable[[int, Tensor, Tensor], None]
"""A function of a rank, its part, and the sum to which the part's gradient is added."""


def attend_over_ranks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cp: Axis,
    rule: Rule,
    ring: bool,
    wide: torch.dtype,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention of this rank's queries over the keys of all ranks of cp: [b, n, s, e] in the
    dtype of query.

    query [b, n, s, d], key [b, m, s, d], value [b, m, s, e]: those of this rank's tokens. rule: of
    positions in the whole sequence. wide: the dtype of scores and sums. sinks: [n]
    (`models.sink_attention`), whose gradient is that of this rank's tokens; None: without.
    Collective over cp, forward and backward.
    """
    return _Attend.apply(query, key, value, sinks, cp, rule, ring, wide)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        cp: Axis,
        rule: Rule,
        ring: bool,
        wide: torch.dtype,
    ) -> Tensor:
        own = query.shape[2]
        widths = (key.shape[-1], value.shape[-1])
        merged = Merged(
            query, chunks(cp.rank, cp.size, own), key.shape[1], widths[1], rule, wide, sinks
        )
        for rank, part in (_around if ring else _gathered)(torch.cat((key, value), -1), cp):
            key_part, value_part = part.split(widths, -1)
            merged.add(key_part, value_part, chunks(rank, cp.size, own))
        exact, log_sum = merged.result()
        # The strides of activations [s, b, n, e], so that the next layer needs no copy.
        mixed = exact.new_empty((own, *exact.shape[:2], widths[1]), dtype=query.dtype).permute(
            1, 2, 0, 3
        )
        mixed.copy_(exact)
        ctx.save_for_backward(query, key, value, sinks, mixed, log_sum)
        ctx.settings = cp, rule, ring, wide
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, mixed, log_sum = ctx.saved_tensors
        cp, rule, ring, wide = ctx.settings
        own = query.shape[2]
        widths = (key.shape[-1], value.shape[-1])
        sums = Gradients(query, chunks(cp.rank, cp.size, own), mixed, log_sum, grad, rule, wide)

        def add(rank: int, part: Tensor, into: Tensor) -> None:
            (key_part, value_part), (of_key, of_value) = (
                part.split(widths, -1),
                into.split(widths, -1),
            )
            sums.add(key_part, value_part, chunks(rank, cp.size, own), (of_key, of_value))

        total = (_summed_around if ring else _summed_by_scatter)(
            torch.cat((key, value), -1), cp, wide, add
        )
        of_key, of_value = total.split(widths, -1)
        of_sinks = None if sinks is None else sums.of_sinks(sinks).to(sinks.dtype)
        grads = (
            sums.of_query().to(query.dtype),
            of_key.to(key.dtype),
            of_value.to(value.dtype),
            of_sinks,
        )
        return *grads, None, None, None, None


def _turn(cp: Axis) -> Iterator[int]:
    """Yield the ranks in the order in which their parts come round the ring, this one first."""
    return ((cp.rank - step) % cp.size for step in range(cp.size))


def _around(part: Tensor, cp: Axis) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank and its part, passed on from rank to rank; the next one is under way
    meanwhile."""
    for step, rank in enumerate(_turn(cp)):
        arrived = cp.start_shift(part) if step < cp.size - 1 else None
        yield rank, part
        if arrived is not None:
            part = arrived()


def _gathered(part: Tensor, cp: Axis) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank and its part, all-gathered."""
    parts = cp.gather(part).chunk(cp.size)
    yield from ((rank, parts[rank]) for rank in _turn(cp))


def _summed_around(part: Tensor, cp: Axis, wide: torch.dtype, add: Add) -> Tensor:
    """Return the gradient of this rank's part: it follows the part round the ring, and every rank
    adds to it."""
    arriving = None
    for rank, one in _around(part, cp):
        own = torch.zeros(part.shape, dtype=wide, device=part.device)
        add(rank, one, own)
        if arriving is not None:
            own += arriving()
        arriving = cp.start_shift(own)
    assert arriving is not None
    return arriving()


def _summed_by_scatter(part: Tensor, cp: Axis, wide: torch.dtype, add: Add) -> Tensor:
    """Return the gradient of this rank's part, summed by a reduce-scatter of the gradients of all
    parts."""
    sums = torch.zeros((cp.size * len(part), *part.shape[1:]), dtype=wide, device=part.device)
    of_rank = sums.chunk(cp.size)
    for rank, one in _gathered(part, cp):
        add(rank, one, of_rank[rank])
    return cp.scatter_sum(sums)
