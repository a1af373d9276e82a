"""The exchange of tokens for features over the ranks of cp (`parallel.sequence_cut`): a rank that
has some tokens with all features gets all tokens with some features, and the other way round.

A layer whose tokens depend on all earlier ones, such as a recurrence, then computes whole sequences
of its own features as one rank would, and adds no sum: the results are those of uncut sequences. It
is one all-to-all in each direction, and the same in the backward pass. Its amount does not grow
with the number of ranks: a rank sends all of its features but those that it keeps.
DeepSpeed-Ulysses (Jacobs et al., 2023) exchanges tokens for heads of attention so.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from megaprec.comm.axis import Axis


def exchange_for_tokens(x: Tensor, cp: Axis) -> Tensor:
    """Return all tokens of this rank's f features, [whole s, b, f].

    x: [own s, b, ranks, f], this rank's tokens with the features of each rank of cp.
    Collective over cp, forward and backward.
    """
    if cp.size == 1:
        return x.squeeze(2)
    to_ranks = x.movedim(2, 0).flatten(0, 1)  # [ranks * own s, b, f]
    from_ranks = _Exchange.apply(to_ranks, cp)
    # of each rank a chunk from the beginning of the sequence, and its mirror image from the end
    chunks = from_ranks.unflatten(0, (cp.size, 2, -1))  # [ranks, 2, half, b, f]
    first, last = chunks.unbind(1)
    in_order = torch.cat((first, last.flip(0)))  # [2 * ranks, half, b, f]
    return in_order.flatten(0, 1)


def exchange_for_features(x: Tensor, cp: Axis) -> Tensor:
    """Return this rank's tokens with the features of each rank of cp, [own s, b, ranks, f]: the
    inverse of `exchange_for_tokens`.

    x: [whole s, b, f], all tokens of this rank's f features.
    Collective over cp, forward and backward.
    """
    if cp.size == 1:
        return x.unsqueeze(2)
    # a rank has a chunk from the first half of the sequence, and its mirror image from the second
    chunks = x.unflatten(0, (2, cp.size, -1))  # [2, ranks, half, b, f]
    first, mirrored = chunks.unbind(0)
    of_ranks = torch.stack((first, mirrored.flip(0)), 1)  # [ranks, 2, half, b, f]
    from_ranks = _Exchange.apply(of_ranks.flatten(0, 2), cp)
    return from_ranks.unflatten(0, (cp.size, -1)).movedim(0, 2)


class _Exchange(Function):
    """All-to-all of the chunks of dim 0. What is sent to a rank comes back as a gradient by the
    same exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: Axis) -> Tensor:
        ctx.cp = cp
        return cp.exchange(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.cp.exchange(grad), None
