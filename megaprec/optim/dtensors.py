"""Parameters that torch has sharded over ranks (DTensors, as `fully_shard` makes them), and their
updates.

The placements of a DTensor say which slice of a logical tensor this rank holds, which is exactly a
layout. FSDP all-gathers weights from memory that it manages itself, so the optimizer does not take
over that memory. Instead a `StandIn` of the slice lies in a buffer, like any other parameter. It
receives the gradient before a step, and the updated slice is written back after the step.

FSDP has already averaged the gradient over all ranks, accumulated in the dtype of the parameter.
The optimizer therefore reduces nothing here, and refuses a plan whose dtypes differ from FSDP's.
"""

from typing import Any

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Layout, Part, attach, layout_of
from megaprec.errors import UserError
from megaprec.optim.main_grad import set_gradient
from megaprec.precision.plan import PrecisionPlan, dtype_name

DTensor = Any  # importing torch's class takes half a second


def is_dtensor(parameter: Tensor) -> bool:
    """Return True if torch has sharded or replicated the parameter over ranks."""
    return hasattr(parameter, "placements") and hasattr(parameter, "to_local")


def require_spread_over_all(name: str, parameter: DTensor, pp: Axis, tp: Axis, world: Axis) -> None:
    """Raise UserError unless the DTensor is sharded along at most one dim, and all ranks are dp
    ranks that hold it."""
    cut = [placement for placement in parameter.placements if not placement.is_replicate()]
    if len(cut) > 1 or any(type(placement).__name__ != "Shard" for placement in cut):
        placed = ", ".join(map(str, parameter.placements))
        raise UserError(
            f"{name} is a DTensor placed as ({placed}): the optimizer supports DTensors that "
            "are sharded along one dim "
            "over one axis of their mesh, as by fully_shard alone; use megaprec's "
            "tensor-parallel layers in place of "
            "parallelize_module"
        )
    if parameter.device_mesh.size() != world.size or pp.size * tp.size > 1:
        raise UserError(
            f"{name} is sharded over {parameter.device_mesh.size()} ranks by fully_shard, but "
            f"{world.size} ranks train "
            f"the model, as pipeline {pp.size} x tensor {tp.size} x data: apply fully_shard "
            "over all ranks, or leave "
            "fully_shard out, because the optimizer shards its state over dp by itself"
        )


class StandIn:
    """A plain parameter for the slice that this rank holds of a DTensor, with the slice's layout.

    Raises UserError if the plan's dtypes differ from the DTensor's, or if the DTensor is not on
    `device`.
    """

    def __init__(self, spread: DTensor, plan: PrecisionPlan, device: torch.device) -> None:
        self.spread = spread
        part = _part_of(spread)
        self.name = part.name
        _require_planned(part.name, spread, plan)
        local = spread.detach().to_local()
        if local.device != device:
            raise UserError(
                f"{part.name} is on {local.device}, not on {device}: leave fully_shard's "
                "offload_policy out"
            )
        whole = local.new_zeros(part.padded)
        self._flat_slice(whole).copy_(local.reshape(-1))
        self.parameter = attach(nn.Parameter(whole), Layout((part,)))

    def _flat_slice(self, padded: Tensor) -> Tensor:
        """Return a view [n] of the elements of a padded tensor that are not padding. The padding
        comes last."""
        return padded.view(-1)[: self.spread.detach().to_local().numel()]

    def take_gradient(self) -> None:
        """Copy the DTensor's gradient, if there is one, into `main_grad`.

        Raises RuntimeError if the placements of the gradient differ from those of the parameter.
        """
        grad = self.spread.grad
        if grad is None:
            return
        placed = getattr(grad, "placements", "a plain tensor")
        if placed != self.spread.placements:
            raise RuntimeError(
                f"{self.name}: the gradient is placed as {placed}, its parameter as "
                f"{self.spread.placements}; nothing "
                "was changed"
            )
        set_gradient(self.parameter, True)
        main: Tensor = self.parameter.main_grad  # type: ignore[attr-defined]
        self._flat_slice(main).copy_(grad.to_local().reshape(-1))

    @torch.no_grad()
    def give_back(self) -> None:
        """Write the updated weights to the DTensor of the model."""
        local = self.spread.detach().to_local()
        local.copy_(self._flat_slice(self.parameter.data).view_as(local))

    @torch.no_grad()
    def take_up(self) -> None:
        """Copy the weights of the DTensor, to which someone may have written, into the buffer."""
        self._flat_slice(self.parameter.data).copy_(self.spread.detach().to_local().reshape(-1))

    def forget_gradient(self) -> None:
        """Clear the DTensor's gradient, to begin a new step."""
        self.spread.grad = None


def _part_of(spread: DTensor) -> Part:
    """Return the slice that this rank holds, under the name in the DTensor's layout."""
    (whole,) = layout_of(spread).parts
    coordinate = spread.device_mesh.get_coordinate()
    assert coordinate is not None
    axes = list(zip(spread.placements, coordinate, spread.device_mesh.shape, strict=True))
    copies = 1
    copy = 0
    for placement, rank, size in axes:
        if placement.is_replicate():
            copies = copies * size
            copy = copy * size + rank
    cut = [
        (placement, rank, size) for placement, rank, size in axes if not placement.is_replicate()
    ]
    if not cut:
        return Part(whole.name, whole.shape, copies=copies, copy=copy)
    ((placement, shard, shards),) = cut
    dim: int = placement.dim
    return Part(whole.name, whole.shape, dim, shards, shard, copies, copy)


def _require_planned(name: str, spread: DTensor, plan: PrecisionPlan) -> None:
    held = plan.param_dtype(name)
    said = dtype_name(spread.dtype)
    if spread.dtype != held:
        raise UserError(
            f"{name} is held in {said} by fully_shard, but the plan has parameters = "
            f"{dtype_name(held)}: make the plan "
            f'with parameters="{said}" and give fully_shard a '
            f"MixedPrecisionPolicy(param_dtype={plan.compute}), or "
            f"cast the model to {held} before fully_shard"
        )
    if plan.param_dtype(name) == plan.parameters and plan.gradients != spread.dtype:
        raise UserError(
            f"{name}: fully_shard accumulates gradients in {said}, the dtype of the "
            "parameter, but the plan has "
            f"gradients = {dtype_name(plan.gradients)}: make the plan with "
            f'gradients="{said}", or let fully_shard hold '
            f'FP32 parameters and make the plan with parameters="fp32"'
        )
    if plan.reduce != plan.gradients:
        raise UserError(
            f"{name}: fully_shard reduces gradients by itself, but the plan has reduce = "
            f"{dtype_name(plan.reduce)}: "
            "leave reduce out and give fully_shard a MixedPrecisionPolicy(reduce_dtype=...)"
        )
