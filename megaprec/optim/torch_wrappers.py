"""Models that torch has wrapped or sharded: DistributedDataParallel and `fully_shard` (DTensors).

Each of torch's wrappers averages gradients over ranks in its own way, and the optimizer reduces
them too. So that each gradient is reduced once, a wrapper is either supported here or refused:

    DistributedDataParallel  its all-reduce is switched off; the optimizer reduces, in the plan's
                             precision
    FSDP2, HSDP (DTensors)   reduce and shard by themselves
    FSDP1 (FlatParameters)   refused: the tensors in a flat parameter have neither names nor shapes

The placements of a DTensor say which slice of a logical tensor this rank holds, which is exactly a
layout. FSDP all-gathers weights from memory that it manages itself, so the optimizer does not take
over that memory. Instead a `DTensorSlice`, a copy of the slice, lies in a buffer, like any other
parameter. It receives the gradient before a step, and the updated slice is written back after the
step. FSDP has already averaged the gradient over all ranks, accumulated in the dtype of the
parameter: the optimizer reduces nothing, and refuses a plan whose dtypes differ from FSDP's.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Layout, Part, attach, layout_of, parameters_of
from megaprec.comm.main_grad import begin_accumulation
from megaprec.errors import UserError
from megaprec.precision.plan import PrecisionPlan, dtype_name

DTensor = Any  # importing torch's class takes half a second


def is_dtensor(parameter: Tensor) -> bool:
    """Return True if torch has sharded or replicated the parameter over ranks."""
    return hasattr(parameter, "placements") and hasattr(parameter, "to_local")


def require_spread_over_all(name: str, parameter: DTensor, pp: Axis, tp: Axis, world: Axis) -> None:
    """Raise UserError unless the DTensor is sharded along at most one dim, and all ranks are dp
    ranks that hold it."""
    sharded = [placement for placement in parameter.placements if not placement.is_replicate()]
    # by name: importing torch's class takes half a second
    kinds = {type(placement).__name__ for placement in sharded}
    if len(sharded) > 1 or not kinds <= {"Shard"}:
        placements = ", ".join(map(str, parameter.placements))
        raise UserError.of("optimizer.dtensor_placement", name=name, placements=placements)
    num_ranks = parameter.device_mesh.size()
    if num_ranks != world.size or pp.size * tp.size > 1:
        raise UserError.of(
            "optimizer.sharded_over_part",
            name=name,
            num_ranks=num_ranks,
            world_size=world.size,
            pipeline=pp.size,
            tensor=tp.size,
        )


class DTensorSlice:
    """A plain parameter for the slice that this rank holds of a DTensor, with the slice's layout.

    Raises UserError if the plan's dtypes differ from the DTensor's, or if the DTensor is not on
    `device`.
    """

    def __init__(self, parameter: DTensor, plan: PrecisionPlan, device: torch.device) -> None:
        self.dtensor = parameter
        part = _part_of(parameter)
        self.name = part.name
        _require_planned(part.name, parameter, plan)
        local = parameter.detach().to_local()
        if local.device != device:
            raise UserError.of(
                "optimizer.offloaded_parameter",
                name=part.name,
                device=local.device,
                model_device=device,
            )
        padded = local.new_zeros(part.padded)
        self._flat_slice(padded).copy_(local.reshape(-1))
        self.parameter = attach(nn.Parameter(padded), Layout((part,)))

    def _flat_slice(self, padded: Tensor) -> Tensor:
        """Return a view [n] of the elements of a padded tensor that are not padding. The padding
        comes last."""
        return padded.view(-1)[: self.dtensor.detach().to_local().numel()]

    def read_gradient(self) -> None:
        """Copy the DTensor's gradient, if there is one, into `main_grad`.

        Raises RuntimeError if the placements of the gradient differ from those of the parameter.
        """
        grad = self.dtensor.grad
        if grad is None:  # then the parameter counts as one without a gradient
            return
        placements = getattr(grad, "placements", "a plain tensor")
        if placements != self.dtensor.placements:
            raise RuntimeError(
                f"{self.name}: the gradient is placed as {placements}, its parameter as "
                f"{self.dtensor.placements}; nothing was changed"
            )
        # FSDP has accumulated over the micro-batches already: the copy overwrites
        main_grad, _ = begin_accumulation(self.parameter)
        main_grad.zero_()  # also the padding
        self._flat_slice(main_grad).copy_(grad.to_local().reshape(-1))

    @torch.no_grad()
    def write_weights(self) -> None:
        """Write the updated weights to the DTensor of the model."""
        # into FSDP's own memory, from which it all-gathers
        local = self.dtensor.detach().to_local()
        local.copy_(self._flat_slice(self.parameter.data).view_as(local))

    @torch.no_grad()
    def read_weights(self) -> None:
        """Copy the weights of the DTensor, to which someone may have written, into the buffer."""
        local = self.dtensor.detach().to_local()
        self._flat_slice(self.parameter.data).copy_(local.reshape(-1))

    def forget_gradient(self) -> None:
        """Clear the DTensor's gradient, to begin a new step."""
        self.dtensor.grad = None


def _part_of(parameter: DTensor) -> Part:
    """Return the slice that this rank holds, under the name in the DTensor's layout.

    The parameter is sharded over at most one axis of its mesh (`require_spread_over_all`).
    """
    (full,) = layout_of(parameter).parts
    mesh = parameter.device_mesh
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    dim: int | None = None
    shards = 1
    shard = 0
    copies = 1
    copy = 0
    for placement, rank, size in zip(parameter.placements, coordinates, mesh.shape, strict=True):
        if placement.is_replicate():
            copies = copies * size
            copy = copy * size + rank  # numbered over all replicated axes, the last one fastest
        else:
            dim = placement.dim
            shards = size
            shard = rank
    return Part(
        name=full.name,
        shape=full.shape,
        dim=dim,
        shards=shards,
        shard=shard,
        copies=copies,
        copy=copy,
        growth=full.growth,
        heads=full.heads,
    )


def _require_planned(name: str, parameter: DTensor, plan: PrecisionPlan) -> None:
    """Raise UserError unless FSDP stores, accumulates and reduces a parameter in the plan's
    dtypes."""
    planned = plan.param_dtype(name)
    actual = dtype_name(parameter.dtype)
    if parameter.dtype != planned:
        raise UserError.of(
            "optimizer.fsdp_parameter_dtype",
            name=name,
            actual=actual,
            dtype_name=dtype_name(planned),
            compute=plan.compute,
            planned=planned,
        )
    if planned == plan.parameters and plan.gradients != parameter.dtype:
        raise UserError.of(
            "optimizer.fsdp_gradient_dtype",
            name=name,
            actual=actual,
            dtype_name=dtype_name(plan.gradients),
        )
    if plan.reduce != plan.gradients:
        raise UserError.of(
            "optimizer.fsdp_reduce_dtype", name=name, dtype_name=dtype_name(plan.reduce)
        )


def averages(model_parts: Sequence[nn.Module], dp: Axis, choice: bool | None) -> bool:
    """Return True if gradients are averaged over dp.

    choice: the user's. Raises UserError if neither the user nor a wrapper decides it.
    """
    has_dtensors = any(is_dtensor(parameter) for parameter in parameters_of(model_parts))
    if choice and any(layout_of(parameter).expert for parameter in parameters_of(model_parts)):
        raise UserError.of("optimizer.average_with_experts")
    if has_dtensors and choice is False:
        raise UserError.of("optimizer.fsdp_averages")
    if dp.size == 1:
        return False  # nothing to divide by
    if choice is not None:
        return choice
    if has_dtensors or any(True for _ in _ddp_wrappers(model_parts)):
        return True
    raise UserError.of("optimizer.average_unset", size=dp.size)


def disable_ddp_sync(model_parts: Sequence[nn.Module]) -> None:
    """Disable the all-reduce of each DistributedDataParallel among the parts: the optimizer reduces
    gradients."""
    for wrapper in _ddp_wrappers(model_parts):
        wrapper.require_backward_grad_sync = False  # as within torch's no_sync


def _ddp_wrappers(model_parts: Sequence[nn.Module]) -> Iterator[DistributedDataParallel]:
    for model_part in model_parts:
        for module in model_part.modules():
            if isinstance(module, DistributedDataParallel):
                yield module


def require_no_double_sharding(
    model_parts: Sequence[nn.Module],
    settings: Mapping[str, int],
) -> None:
    """Raise UserError if the optimizer is asked to shard or to overlap parameters that fully_shard
    manages. settings: those that ask it, by name; 0 and False do not."""
    dtensor = next(filter(is_dtensor, parameters_of(model_parts)), None)
    if dtensor is None:
        return
    for key, value in settings.items():
        if value:
            raise UserError.of(
                "optimizer.fsdp_shards_itself",
                key=key,
                value=value,
                name=layout_of(dtensor).parts[0].name,
            )
