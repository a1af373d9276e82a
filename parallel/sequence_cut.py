"""The cut of sequences over the ranks of cp: context parallelism.

A sequence is cut into 2 c chunks for c ranks, and rank r has chunks r and 2 c - 1 - r. Under causal
attention a token attends to all earlier ones, so the work of a chunk grows with its number; these
two chunks together are as much work on every rank:

    chunk    0  1  2  3  4  5  6  7
    rank     0  1  2  3  3  2  1  0

A rank computes everything but attention for its own tokens only, which it holds in the order of
their positions. Under sequence parallelism these tokens are cut once more, over tp.
"""

from math import lcm

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from parallel import collectives
from parallel.context import Context


def length_multiple(context: int, tensor: int = 1) -> int:
    """Return the number that the length of sequences must be a multiple of.

    context: the size of cp.
    tensor: the size of tp; 1 without sequence parallelism.
    """
    return context * lcm(2, tensor) if context > 1 else tensor


def chunks_of_rank(
    rank: int,
    size: int,
    num_tokens: int,
) -> tuple[range, range]:
    """Return the positions of both chunks of a rank of cp.

    rank, size: of cp. num_tokens: the tokens of each sequence that a rank has.
    """
    length = num_tokens // 2
    # one chunk from the beginning of the sequence, and its mirror image from the end
    first = rank * length
    second = (2 * size - 1 - rank) * length
    return range(first, first + length), range(second, second + length)


def positions(
    cp: Axis,
    num_tokens: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the positions of this rank's tokens in their sequence: int64 [num_tokens]."""
    if cp.size == 1:
        return torch.arange(num_tokens, device=device)
    own_chunks = chunks_of_rank(cp.rank, cp.size, num_tokens)
    parts = [torch.arange(chunk.start, chunk.stop, device=device) for chunk in own_chunks]
    return torch.cat(parts)


def positions_between(
    context: Context,
    length: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the positions of the `length` tokens that this rank has between blocks, in their
    sequence: int64 [length]."""
    # without sequence parallelism each tp rank has all tokens of its cp rank
    if not context.cut_sequence:
        return positions(context.cp, length, device)
    # the tokens of the cp rank, in order, are cut once more over tp
    positions_of_cp_rank = positions(context.cp, length * context.tp.size, device)
    return context.tp.chunk(positions_of_cp_rank)


def take_own_positions(
    x: Tensor,
    cp: Axis,
    dim: int,
) -> Tensor:
    """Return the part of x that belongs to this rank's tokens.

    dim: the one of the positions of a sequence.
    Raises ValueError unless the sequence can be cut.
    """
    if cp.size == 1:
        return x
    # chunks of other lengths would be other work for each rank
    if x.shape[dim] % (2 * cp.size):
        raise ValueError(
            f"sequences of {x.shape[dim]} tokens are not cut into {2 * cp.size} equal chunks"
        )
    own_chunks = chunks_of_rank(cp.rank, cp.size, x.shape[dim] // cp.size)
    parts = [x.narrow(dim, chunk.start, len(chunk)) for chunk in own_chunks]
    return torch.cat(parts, dim)


def mean_of_sequence(x: Tensor, cp: Axis) -> Tensor:
    """Return the mean of x [own tokens, ...] over the positions of whole sequences: [...].

    If every rank computes the same with it, each holds the whole gradient of its own tokens.
    """
    # every rank has as many tokens, so the mean of the means is the mean
    mean = x.mean(0)
    return collectives.reduce(mean, cp) / cp.size if cp.size > 1 else mean
