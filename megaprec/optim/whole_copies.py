"""A check that tensor-parallel ranks have the same gradients of the parameters that each of them
holds whole.

Such a gradient is computed from activations that all ranks of the group share, so that it is the
same on all of them. Ranks that a loop gives different samples compute numbers that belong to no
batch, and their copies of norms and biases drift apart, which no loss and no norm shows.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from math import nan

import torch

from megaprec.comm.axis import Axis
from megaprec.errors import UserError
from megaprec.optim.flat_buffer import Buffer, OwnedPiece
from megaprec.optim.main_grad import has_gradient

# The largest difference between sums of gradients, as a share of their norm, that rounding may be
# the reason of.
_MAX_DIFFERENCE = 0.05


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
    copies = list(_owned_copies(buffers, tp))
    # a sum and a sum of squares of each
    sums = torch.zeros(len(copies), 2, dtype=torch.float64, device=device)
    for number, (buffer, owned) in enumerate(copies):
        values = buffer.grads[owned.in_buffer]
        sums[number, 0] = values.sum(dtype=torch.float64)
        sums[number, 1] = values.double().square().sum()
        parameter = buffer.parameters[bisect_right(buffer.starts, owned.piece.start) - 1]
        if not has_gradient(parameter):
            sums[number] = nan
    largest = tp.max_(sums.clone())
    smallest = -tp.max_(-sums)
    difference = largest[:, 0] - smallest[:, 0]
    norms = largest[:, 1].sqrt()
    are_finite = largest.isfinite().all(1) & smallest.isfinite().all(1)
    differs = (difference > _MAX_DIFFERENCE * norms) & are_finite
    if world.max_(differs.any().float()).item():
        name = "a parameter"  # of another tensor-parallel group
        for (_, owned), is_different in zip(copies, differs.tolist(), strict=True):
            if is_different:
                name = owned.piece.part.name
                break
        raise UserError.of("optimizer.replicated_gradients_differ", name=name)


def _owned_copies(buffers: Sequence[Buffer], tp: Axis) -> Iterator[tuple[Buffer, OwnedPiece]]:
    """Yield this rank's elements of parameters that every rank of tp holds whole.

    All ranks of a tensor-parallel group own the same elements of them.
    """
    for buffer in buffers:
        if buffer.balances or buffer.of_experts:
            continue
        for owned in buffer.owned_pieces():
            if owned.piece.part.copies == tp.size:
                yield buffer, owned
