"""Collectives between CPU ranks, built from direct point-to-point messages.

gloo's own collectives pass data around a ring in small pieces. That is fastest for the all-reduce
of large tensors, but small all-reduces, all-gathers and reduce-scatters finish up to twice as soon
when every rank sends directly to every other rank (docs/performance.md). Sums computed here are
accumulated in FP32 or wider and rounded once; with either method all ranks get the same bits.
Messages of one axis are matched by order, and every rank runs the same program, so several
collectives may be in flight: each `start_` function returns the function that completes it.
"""

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megaprec.comm.waiting import Pending

# from this many bytes sent by each rank on, gloo's own ring all-reduce is faster
RING_BYTES = 1 << 18
# of a large reduce-scatter that are received at once, twice: a rank has so much memory beside it
PIECE_BYTES = 1 << 23

Finish = Callable[[], Tensor]  # waits for a collective and returns its result


def start_gather(
    tensor: Tensor,
    rank: int,
    group: dist.ProcessGroup,
    into: Tensor | None = None,
    tag: int = 0,
) -> Finish:
    """Start an all-gather: [n, ...] on each rank becomes [size * n, ...] in rank order.

    into: the tensor that receives the result; `tensor` is then its chunk number `rank`.
    tag: only gathers with the same one are matched.
    """
    size = group.size()
    full = into
    if full is None:
        full = tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:]))
    chunks = full.chunk(size)
    # The transfers are under way while this rank's own chunk is copied.
    works = _exchange([tensor] * size, list(chunks), rank, group, tag)
    if into is None:
        chunks[rank].copy_(tensor)
    return Pending(works, full, keep=(tensor,))


def start_exchange(
    tensor: Tensor,
    rank: int,
    group: dist.ProcessGroup,
) -> Finish:
    """Start an all-to-all: [size * n, ...] on each rank becomes chunk `rank` of each rank's, in
    rank order."""
    outgoing = tensor.chunk(group.size())
    received = torch.empty_like(tensor)
    incoming = received.chunk(group.size())
    works = _exchange(list(outgoing), list(incoming), rank, group)
    incoming[rank].copy_(outgoing[rank])
    return Pending(works, received, keep=(tensor,))


def start_scatter_sum(
    tensor: Tensor,
    rank: int,
    group: dist.ProcessGroup,
) -> Finish:
    """Start a reduce-scatter SUM: [size * n, ...] on each rank becomes this rank's [n, ...]."""
    size = group.size()
    summed_shape = (tensor.shape[0] // size, *tensor.shape[1:])
    finish_exchange = start_exchange(tensor, rank, group)
    return lambda: finish_exchange().view(size, *summed_shape).sum(0)


def start_scatter_sum_(
    tensor: Tensor,
    rank: int,
    group: dist.ProcessGroup,
) -> Callable[[], object]:
    """Start a reduce-scatter SUM in place: chunk `rank` of `tensor` becomes the sum, and the other
    chunk or chunks are undefined. The bits of the sum are those of `start_sum_`.

    Two ranks send half as much as in an all-reduce. More would add in another order than the ring.
    """
    sent_bytes = tensor.numel() * tensor.element_size()
    if group.size() == 2 and sent_bytes >= RING_BYTES:
        return _ScatterSumOfTwo(tensor, rank, group)
    return start_sum_(tensor, rank, group)


class _ScatterSumOfTwo:
    """A reduce-scatter SUM of two ranks in place, under way; a call completes it.

    Each sends the other's half in pieces. Two pieces are under way at a time: while one that has
    arrived is added, the next one arrives.
    """

    def __init__(self, tensor: Tensor, rank: int, group: dist.ProcessGroup) -> None:
        self._rank = rank
        self._group = group
        halves = tensor.chunk(2)
        length = PIECE_BYTES // tensor.element_size()
        self._own = halves[rank].split(length)
        self._sent = halves[1 - rank].split(length)
        first = self._own[0]
        self._received = [torch.empty_like(first) for _ in self._own[:2]]
        self._started: deque[Finish] = deque()
        for number in range(len(self._received)):
            self._start(number)

    def _start(self, number: int) -> None:
        """Start to exchange piece `number` of both halves. It is received in the memory of the
        piece before the last one."""
        own = self._own[number]
        received = self._received[number % 2][: len(own)]
        incoming = [received, received]  # of both ranks; that of this one is not read
        outgoing = [self._sent[number], self._sent[number]]
        works = _exchange(outgoing, incoming, self._rank, self._group)
        self._started.append(Pending(works, received))

    def __call__(self) -> None:
        """Wait for all pieces, and add each to this rank's half."""
        for number, own in enumerate(self._own):
            received = self._started.popleft()()
            own.add_(received)
            following = number + 2
            if following < len(self._own):
                self._start(following)


def start_sum_(
    tensor: Tensor,
    rank: int,
    group: dist.ProcessGroup,
) -> Finish:
    """Start an all-reduce SUM in place; `tensor` must be contiguous."""
    sent_bytes = tensor.numel() * tensor.element_size() * (group.size() - 1)
    if sent_bytes >= RING_BYTES:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        return Pending([work], tensor)
    finish_gather = start_gather(tensor.unsqueeze(0), rank, group)
    return lambda: tensor.copy_(finish_gather().sum(0))


def max_(
    tensor: Tensor,
    rank: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """All-reduce MAX in place; a NaN on any rank gives NaN."""
    finish_gather = start_gather(tensor.clone().unsqueeze(0), rank, group)
    return tensor.copy_(finish_gather().amax(0))


def start_uneven_exchange(
    outgoing: list[Tensor],
    incoming: list[Tensor],
    rank: int,
    group: dist.ProcessGroup,
) -> Callable[[], list[Tensor]]:
    """Start an all-to-all: outgoing[r] goes to rank r, incoming[r] comes from it.

    Sizes may differ, also be zero. The returned function waits and returns `incoming`, of which
    entry `rank` is outgoing[rank] itself.
    """
    works = _exchange(outgoing, incoming, rank, group)
    incoming[rank] = outgoing[rank]
    return Pending(works, incoming, keep=tuple(outgoing))


def _exchange(
    outgoing: list[Tensor],
    incoming: list[Tensor],
    rank: int,
    group: dist.ProcessGroup,
    tag: int = 0,
) -> list[dist.Work]:
    """Start to send outgoing[r] to each other rank r, and to receive incoming[r] from it.

    Tensors without elements are not sent; both sides know their sizes.
    tag: only messages with the same one are matched.
    """
    works: list[dist.Work | None] = []
    for step in range(1, group.size()):  # each rank begins with a different neighbour
        destination = (rank + step) % group.size()
        source = (rank - step) % group.size()
        if incoming[source].numel():
            received = incoming[source]
            works.append(dist.irecv(received, group=group, group_src=source, tag=tag))
        if outgoing[destination].numel():
            sent = outgoing[destination]
            works.append(dist.isend(sent, group=group, group_dst=destination, tag=tag))
    return [work for work in works if work is not None]
