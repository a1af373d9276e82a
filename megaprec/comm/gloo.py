"""Collectives between CPU ranks, built from direct point-to-point messages.

gloo's own collectives pass data around a ring in small pieces. That is fastest for the all-reduce
of large tensors, but small all-reduces, all-gathers and reduce-scatters finish up to twice as soon
when every rank sends directly to every other rank (docs/performance.md). Sums computed here are
accumulated in FP32 or wider and rounded once; with either method all ranks get the same bits.
Messages of one axis are matched by order, and every rank runs the same program, so several
collectives may be in flight: each `start_` function returns the function that completes it.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megaprec.comm.waiting import wait_for

RING = 1 << 18  # from this many bytes sent by each rank on, gloo's own ring all-reduce is faster

Finish = Callable[[], Tensor]


def start_gather(
    tensor: Tensor, rank: int, group: dist.ProcessGroup, into: Tensor | None = None
) -> Finish:
    """Start an all-gather: [n, ...] on each rank becomes [size * n, ...] in rank order.

    into: the tensor that receives the result; `tensor` may be a chunk of it.
    """
    size = group.size()
    whole = tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:])) if into is None else into
    chunks = whole.chunk(size)
    works = _exchange([tensor] * size, list(chunks), rank, group)

    def finish() -> Tensor:
        if into is None:
            chunks[rank].copy_(tensor)
        for work in works:
            wait_for(work)
        return whole

    return finish


def start_exchange(tensor: Tensor, rank: int, group: dist.ProcessGroup) -> Finish:
    """Start an all-to-all: [size * n, ...] on each rank becomes chunk `rank` of each rank's, in
    rank order."""
    chunks = tensor.chunk(group.size())
    received = torch.empty_like(tensor)
    incoming = received.chunk(group.size())
    works = _exchange(list(chunks), list(incoming), rank, group)

    def finish() -> Tensor:
        incoming[rank].copy_(chunks[rank])
        for work in works:
            wait_for(work)
        return received

    return finish


def start_scatter_sum(tensor: Tensor, rank: int, group: dist.ProcessGroup) -> Finish:
    """Start a reduce-scatter SUM: [size * n, ...] on each rank becomes this rank's [n, ...]."""
    exchanged = start_exchange(tensor, rank, group)
    size = group.size()
    return lambda: exchanged().view(size, tensor.shape[0] // size, *tensor.shape[1:]).sum(0)


def start_sum_(tensor: Tensor, rank: int, group: dist.ProcessGroup) -> Finish:
    """Start an all-reduce SUM in place; `tensor` must be contiguous."""
    if tensor.numel() * tensor.element_size() * (group.size() - 1) >= RING:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        return lambda: (wait_for(work), tensor)[1]
    gathered = start_gather(tensor.unsqueeze(0), rank, group)
    return lambda: tensor.copy_(gathered().sum(0))


def max_(tensor: Tensor, rank: int, group: dist.ProcessGroup) -> Tensor:
    """All-reduce MAX in place; a NaN on any rank gives NaN."""
    return tensor.copy_(start_gather(tensor.clone().unsqueeze(0), rank, group)().amax(0))


def start_uneven_exchange(
    outgoing: list[Tensor], incoming: list[Tensor], rank: int, group: dist.ProcessGroup
) -> Callable[[], list[Tensor]]:
    """Start an all-to-all: outgoing[r] goes to rank r, incoming[r] comes from it. Sizes may differ,
    also be zero.

    The returned function waits and returns `incoming`, whose own entry is then `outgoing`'s.
    """
    works = _exchange(outgoing, incoming, rank, group)

    def finish() -> list[Tensor]:
        incoming[rank] = outgoing[rank]
        for work in works:
            wait_for(work)
        return incoming

    return finish


def _exchange(
    outgoing: list[Tensor], incoming: list[Tensor], rank: int, group: dist.ProcessGroup
) -> list[dist.Work]:
    """Start sending outgoing[r] to each other rank r of the group and receiving incoming[r] from
    it.

    Tensors without elements are not sent; both sides know their sizes.
    """
    works: list[dist.Work | None] = []
    for step in range(1, group.size()):  # each rank begins with a different neighbour
        to = (rank + step) % group.size()
        source = (rank - step) % group.size()
        if incoming[source].numel():
            works.append(dist.irecv(incoming[source], group=group, group_src=source))
        if outgoing[to].numel():
            works.append(dist.isend(outgoing[to], group=group, group_dst=to))
    return [work for work in works if work is not None]
