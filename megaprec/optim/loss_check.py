"""The check that ranks which compute one loss together have given `step` one loss.

All tensor-parallel ranks of a group hold the whole loss of their samples, so a step counts that of
the first one. A loss of a part of the outputs, as of a head of style "column", is another one on
each rank, and its gradient is that of no loss of the model. A loss that is broadcast to all stages
of a pipeline would be counted once for each stage.
"""

from math import inf, nan

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.errors import UserError

# the share of a loss by which ranks may differ: products are rounded to bf16 or FP16
_RELATIVE_TOLERANCE = 1e-3
# what rounding may leave of a loss whose terms cancel, as those of a policy
_ABSOLUTE_TOLERANCE = 1e-6


def require_same_loss(loss: Tensor | None, tp: Axis, world: Axis, device: torch.device) -> None:
    """Raise UserError on every rank if the ranks of a tensor-parallel group have given different
    losses.

    Rounding is allowed for, and losses that are not finite are not compared. Only the first rank of
    a group may have one, the others None or 0. Collective over the world.
    """
    if tp.size == 1:
        return
    total = _total(loss, device)
    is_absent = loss is None or bool(tp.rank > 0 and total == 0)
    compared = torch.full_like(total, nan) if is_absent else total
    # the loss of the first rank on all of them: -inf is below every loss of the others
    is_first = tp.rank == 0 and loss is not None
    first = tp.max_(total.clone() if is_first else torch.full_like(total, -inf))
    tolerance = _RELATIVE_TOLERANCE
    if loss is not None and loss.is_floating_point():
        tolerance = max(tolerance, 4 * torch.finfo(loss.dtype).eps)
    difference = (compared - first).abs()
    differs = difference > (tolerance * first.abs()).clamp(min=_ABSOLUTE_TOLERANCE)
    lacks_first = first.isneginf()
    differs |= lacks_first
    differs &= compared.isfinite() & (first.isfinite() | lacks_first)
    if world.max_(differs.double()):
        raise UserError.of("optimizer.losses_differ_over_tensor_ranks")


def require_loss_of_one_stage(
    loss: Tensor | None, pp: Axis, world: Axis, device: torch.device
) -> None:
    """Raise UserError on every rank if all stages of a pipeline have given one and the same loss,
    not 0.

    Losses that differ are added, as those of the routers of each stage. Collective over the world.
    """
    if pp.size == 1:
        return
    slots = torch.zeros(pp.size, dtype=torch.float64, device=device)
    slots[pp.rank] = _total(loss, device)
    of_stages = pp.sum_(slots)
    first = of_stages[0]
    is_repeated = first.isfinite() & (first != 0) & (of_stages == first).all()
    if world.max_(is_repeated.double()):
        raise UserError.of("optimizer.loss_on_all_stages")


def require_loss_of_all_replicas(
    loss: Tensor | None, dp: Axis, world: Axis, device: torch.device
) -> None:
    """Raise UserError on every rank if some replicas have given a loss and others have not.

    The mean over replicas would be too small. Collective over the world.
    """
    if dp.size == 1:
        return
    gave_loss = torch.zeros(dp.size, dtype=torch.float64, device=device)
    gave_loss[dp.rank] = float(loss is not None)
    num_given = int((world.sum_(gave_loss) > 0).sum())
    if 0 < num_given < dp.size:
        raise UserError.of("optimizer.loss_on_some_replicas", num_given=num_given, size=dp.size)


def _total(loss: Tensor | None, device: torch.device) -> Tensor:
    """Return a loss, or the sum of those of micro-batches, as float64 []; 0 for None."""
    if loss is None:
        return torch.zeros((), dtype=torch.float64, device=device)
    return loss.detach().to(device).double().sum()
