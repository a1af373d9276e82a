"""A check that tensor-parallel ranks have the same gradients of the parameters that each of them
holds whole.

Such a gradient is computed from activations that all ranks of the group share, so that it is the
same on all of them. Ranks that a loop gives different samples compute numbers that belong to no
batch, and their copies of norms and biases drift apart, which no loss and no norm shows.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import nan

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.errors import UserError
from megaprec.optim.flat_buffer import Buffer, Piece
from megaprec.optim.main_grad import has_gradient

SHARE = 0.05
"""The largest difference between sums of gradients, as a share of their norm, that rounding may be the reason of."""


def require_same_copies(
    buffers: Sequence[Buffer], tp: Axis, world: Axis, device: torch.device
) -> None:
    """Raise UserError on every rank if copies have different gradients on ranks of tp. Collective
    over the world.

    buffers: with final gradients in their own slices. Gradients that are not finite, and those that
        are missing, are not compared.
    """
    if tp.size == 1:
        return
    copies = [
        (b, p)
        for b in buffers
        if not (b.balances or b.of_experts)
        for p in b.pieces
        if p.part.copies == tp.size
    ]
    sums = torch.zeros(len(copies), 2, dtype=torch.float64, device=device)
    for n, (buffer, piece) in enumerate(copies):
        values = _own_values(buffer, piece)
        sums[n, 0], sums[n, 1] = values.sum(dtype=torch.float64), values.double().square().sum()
        if not has_gradient(buffer.parameters[bisect_right(buffer.starts, piece.start) - 1]):
            sums[n] = nan
    largest = tp.max_(sums.clone())
    smallest = -tp.max_(-sums)
    apart = largest[:, 0] - smallest[:, 0] > SHARE * largest[:, 1].sqrt()
    apart &= largest.isfinite().all(1) & smallest.isfinite().all(1)
    if world.max_(apart.any().float()).item():
        names = [
            piece.part.name
            for (_, piece), differs in zip(copies, apart.tolist(), strict=True)
            if differs
        ]
        raise UserError(
            f"{names[0] if names else 'a parameter'} is whole on each tensor-parallel rank, "
            "but these ranks have "
            "different gradients of it: give all ranks of one tensor-parallel group the same "
            "samples, in the same "
            "order; nothing was changed"
        )


def _own_values(buffer: Buffer, piece: Piece) -> Tensor:
    """Return the gradients of a piece that lie in this rank's slice."""
    first = max(piece.start, buffer.first)
    last = min(piece.stop, buffer.last)
    return buffer.grads[first : max(first, last)]
