"""What a model brings to the optimizer: which ranks it is trained on, and who has wrapped or cut it before.

torch's own wrappers average gradients over ranks, each in its way, and the optimizer sums them too. So that each
gradient is summed once, a wrapper is either known here or refused by name:

    DistributedDataParallel     its sums are switched off; the optimizer makes them, in the plan's precision
    FSDP2, HSDP (DTensors)      sums and cuts by itself, see `megaprec.optim.dtensors`
    FSDP1 (FlatParameters)      refused: what a flat parameter holds has neither names nor shapes
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from megaprec.comm.axis import Axis, device_of
from megaprec.comm.layout import has_layout, layout_of, parameters_of
from megaprec.errors import UserError
from megaprec.optim.dtensors import is_dtensor, require_spread_over_all
from megaprec.optim.flat_buffer import param_dtype
from megaprec.precision.plan import PrecisionPlan, dtype_name


@dataclass(frozen=True)
class Ranks:
    """The ranks that train one model, as this rank sees them, and the device that it computes on."""

    pp: Axis
    dp: Axis
    tp: Axis
    world: Axis
    device: torch.device

    @staticmethod
    def of(mesh: DeviceMesh | None, parts: Sequence[nn.Module]) -> "Ranks":
        """Those of `mesh`; without one this process alone, or all ranks that torch has spread each parameter over.

        Raises UserError where a model of its own would be trained on each of several ranks.
        """
        pp, dp, tp = (Axis.of(mesh, name) for name in ("pp", "dp", "tp"))
        device = device_of(mesh)
        if mesh is None:  # wherever the model is
            device = next((p.device for p in parameters_of(parts)), device)
        spread = [(name, p) for name, p in named(parts) if is_dtensor(p)]
        if mesh is None and dist.is_initialized() and dist.get_world_size() > 1:
            if not spread:
                raise UserError(_without_mesh(device, dist.get_world_size()))
            dp = Axis("dp", dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
        world = dp if mesh is None else Axis.world(mesh)
        for name, parameter in spread:
            require_spread_over_all(name, parameter, pp, tp, world)
        return Ranks(pp, dp, tp, Axis("world", world.rank, world.size, world.group), device)


def _without_mesh(device: torch.device, ranks: int) -> str:
    return (
        f"{ranks} ranks joined torch.distributed, but the optimizer was given no mesh, and each rank would train a "
        f'model of its own: pass mesh=init_device_mesh("{device.type}", ({ranks},), mesh_dim_names=("dp",)), from '
        "torch.distributed.device_mesh"
    )


def named(parts: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Every trained parameter once, with its path in the part that it was first met in."""
    seen: set[nn.Parameter] = set()
    for part in parts:
        for name, parameter in part.named_parameters():
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                yield name, parameter


def require_known(parts: Sequence[nn.Module], tp: int) -> None:
    """Raises UserError, naming parameters, for what cannot be told apart in the memory that parts hold: FSDP1's flat
    parameters, parameters without a layout, and those that were laid out for another number of tensor ranks."""
    if flat := [name for name, p in named(parts) if _is_flat(p)]:
        raise UserError(
            f"{flat[0]} is a flat parameter of FSDP1 (FullyShardedDataParallel), which has neither the names nor the "
            "shapes of what it holds: use fully_shard (FSDP2), or pass the model unwrapped, for the optimizer cuts its "
            "state over dp by itself"
        )
    if bare := [(name, p) for name, p in named(parts) if not has_layout(p)]:
        name, first = bare[0]
        more = f"; {len(bare) - 1} others have none either" if len(bare) > 1 else ""
        raise UserError(
            f"{name}: a parameter of shape {tuple(first.shape)} has no layout: give it one with "
            "megaprec.attach_whole(model), after fully_shard if that is used, which names each by its path, or a part "
            f"of a parallel layer with megaprec.attach{more}"
        )
    for part in (part for p in parameters_of(parts) for part in layout_of(p).parts):
        if part.shards * part.copies != tp:
            made = f"{part.shards} slices x {part.copies} copies"
            raise UserError(f"{part.name} is laid out for {made}, but there are {tp} tensor-parallel ranks")


def _is_flat(parameter: nn.Parameter) -> bool:
    return getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False)


def averages(parts: Sequence[nn.Module], dp: Axis, said: bool | None) -> bool:
    """Whether gradients are averaged over dp. said: what the user says of it. Raises UserError if nothing says it."""
    spread = any(is_dtensor(p) for p in parameters_of(parts))
    if spread and said is False:
        raise UserError("average = False: fully_shard averages gradients over its ranks, so leave average out")
    if dp.size == 1 or said is not None:
        return bool(said) and dp.size > 1
    if spread or any(_wrappers(parts)):
        return True
    raise UserError(
        f"the gradients of {dp.size} dp ranks can be averaged or summed: give average=True if each rank's loss is the "
        "mean over its own samples, as with DistributedDataParallel, or average=False if it is the rank's share of the "
        "mean over the samples of all ranks (their sum over the number of all samples)"
    )


def disable_ddp_sync(parts: Sequence[nn.Module]) -> None:
    """Leaves the sums of each DistributedDataParallel among the parts to the optimizer."""
    for wrapper in _wrappers(parts):
        wrapper.require_backward_grad_sync = False


def _wrappers(parts: Sequence[nn.Module]) -> Iterator[DistributedDataParallel]:
    return (m for part in parts for m in part.modules() if isinstance(m, DistributedDataParallel))


def require_nothing_left(parts: Sequence[nn.Module], overlap: bool, zero_size: int) -> None:
    """Raises UserError if the optimizer is asked to cut or to overlap what fully_shard does by itself."""
    asked = {"overlap": overlap, "zero_size": zero_size}
    spread = next((p for p in parameters_of(parts) if is_dtensor(p)), None)
    if spread is not None and (key := next((key for key, value in asked.items() if value), "")):
        raise UserError(
            f"{key} = {asked[key]}: {layout_of(spread).parts[0].name} is cut over ranks by fully_shard, which sums "
            f"gradients and collects weights by itself: leave {key} out"
        )


def move_rest(part: nn.Module, plan: PrecisionPlan, device: torch.device, marked: AbstractSet[nn.Parameter]) -> None:
    """Moves to the device what is not trained: frozen parameters, in the dtype that they would be held in, and
    buffers. marked: parameters that stay in FP32.

    Raises UserError for a frozen parameter that torch has spread over ranks in another dtype.
    """
    for name, frozen in ((name, p) for name, p in part.named_parameters() if not p.requires_grad):
        usual = param_dtype(frozen, plan) if has_layout(frozen) else plan.parameters
        held = plan.sensitive if frozen in marked else usual
        if not is_dtensor(frozen):
            frozen.data = frozen.data.to(device, held)
        elif frozen.dtype != held:
            raise UserError(
                f"{name} is held in {dtype_name(frozen.dtype)} by fully_shard, but the plan has parameters = "
                f"{dtype_name(held)}: cast it before fully_shard"
            )
    for table in part.buffers():  # of models of the user's own; ours have none
        table.data = table.data.to(device)
