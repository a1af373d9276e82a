"""Checks of the model that is given to the optimizer: its ranks, and the wrappers that have sharded
or wrapped it.

Each of torch's own wrappers averages gradients over ranks in its own way, and the optimizer reduces
them too. So that each gradient is reduced once, a wrapper is either supported here or refused by
name:

    DistributedDataParallel     its all-reduce is switched off; the optimizer reduces, in the plan's precision
    FSDP2, HSDP (DTensors)      reduce and shard by themselves, see `megaprec.optim.dtensors`
    FSDP1 (FlatParameters)      refused: the tensors in a flat parameter have neither names nor shapes
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
from megaprec.comm.experts import ExpertAxes
from megaprec.comm.layout import has_layout, layout_of, parameters_of
from megaprec.errors import UserError
from megaprec.fp8.params import fp8_param_of
from megaprec.optim.dtensors import is_dtensor, require_spread_over_all
from megaprec.optim.flat_buffer import param_dtype
from megaprec.precision.marks import keeping_marked
from megaprec.precision.patterns import require_used
from megaprec.precision.plan import PrecisionPlan, dtype_name


@dataclass(frozen=True)
class Ranks:
    """The ranks that train one model, as this rank sees them, and the device that it computes on.

    dp: those with equal weights, whose gradients are summed: replicas, and the ranks that share
        their sequences.
    """

    pp: Axis
    dp: Axis
    tp: Axis
    world: Axis
    device: torch.device
    experts: ExpertAxes | None = None

    @staticmethod
    def of(
        mesh: DeviceMesh | None, parts: Sequence[nn.Module], experts: ExpertAxes | None = None
    ) -> "Ranks":
        """Return the ranks of `mesh`, and those that share the experts of a layer.

        Without a mesh these are this process alone, or all ranks that torch has sharded each
        parameter over. Raises UserError if each of several ranks would train a separate model.
        """
        pp = Axis.of(mesh, "pp")
        dp = Axis.replicas(mesh)
        tp = Axis.of(mesh, "tp")
        device = device_of(mesh)
        if mesh is None:  # the device of the model
            device = next((p.device for p in parameters_of(parts)), device)
        spread = [(name, p) for name, p in named(parts) if is_dtensor(p)]
        if mesh is None and dist.is_initialized() and dist.get_world_size() > 1:
            if not spread:
                raise UserError(_without_mesh(device, dist.get_world_size()))
            dp = Axis("dp", dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
        world = dp if mesh is None else Axis.world(mesh)
        for name, parameter in spread:
            require_spread_over_all(name, parameter, pp, tp, world)
        return Ranks(
            pp, dp, tp, Axis("world", world.rank, world.size, world.group), device, experts
        )


def _without_mesh(device: torch.device, ranks: int) -> str:
    return (
        f"{ranks} ranks joined torch.distributed, but the optimizer was given no mesh, so "
        "each rank would train a "
        f'separate model: pass mesh=init_device_mesh("{device.type}", ({ranks},), '
        'mesh_dim_names=("dp",)), from '
        "torch.distributed.device_mesh"
    )


def named(parts: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every trained parameter once, with its path in the first part that contains it."""
    seen: set[nn.Parameter] = set()
    for part in parts:
        for name, parameter in part.named_parameters():
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                yield name, parameter


def require_known(parts: Sequence[nn.Module], tp: int, experts: ExpertAxes | None = None) -> None:
    """Raise UserError, naming parameters, for parameters that cannot be identified.

    These are FSDP1's flat parameters, parameters without a layout, parameters that were laid out
    for another number of tensor-parallel ranks, and experts of ranks of their own, of which the
    optimizer was not told.
    """
    if flat := [name for name, p in named(parts) if _is_flat(p)]:
        raise UserError(
            f"{flat[0]} is a flat parameter of FSDP1 (FullyShardedDataParallel), whose "
            "tensors have neither names nor "
            "shapes: use fully_shard (FSDP2), or pass the model unwrapped, because the "
            "optimizer shards its state over "
            "dp by itself"
        )
    everything = {name: p for part in parts for name, p in part.named_parameters()}
    if unheld := [line for name, p in everything.items() if (line := _without_values(name, p))]:
        raise UserError(*unheld)
    if impossible := [line for name, p in named(parts) if (line := _untrainable(name, p))]:
        raise UserError(*impossible)
    if bare := [(name, p) for name, p in named(parts) if not has_layout(p)]:
        name, first = bare[0]
        more = f"; {len(bare) - 1} others have none either" if len(bare) > 1 else ""
        raise UserError(
            f"{name}: a parameter of shape {tuple(first.shape)} has no layout: give it one with "
            "megaprec.attach_whole(model), which names parameters by their paths (after "
            "fully_shard, if it is used), "
            f"or with megaprec.attach for a part of a parallel layer{more}"
        )
    if reshaped := [line for name, p in named(parts) if (line := _reshaped(name, p))]:
        raise UserError(*reshaped)
    _require_apart(parts)
    _require_own_memory(parts)
    for layout in map(layout_of, parameters_of(parts)):
        if layout.expert and experts is None:
            raise UserError(
                f"{layout.parts[0].name} is an expert on ranks of its own: give the optimizer "
                "the experts= of its "
                "context"
            )
        ranks = experts.tp.size if layout.expert and experts else tp
        for part in layout.parts:
            if part.shards * part.copies != ranks:
                made = f"{part.shards} slices x {part.copies} copies"
                raise UserError(
                    f"{part.name} is laid out for {made}, but there are {ranks} "
                    "tensor-parallel ranks"
                )


def _without_values(name: str, parameter: nn.Parameter) -> str:
    """Return why a parameter, trained or frozen, cannot be moved or held; empty if it can."""
    if parameter.device.type == "meta":
        return (
            f"{name} is on the device meta and has no values: call model.to_empty and initialise "
            "or load it first"
        )
    if is_dtensor(parameter) or (parameter.layout == torch.strided and not parameter.is_nested):
        return ""
    kind = "nested" if parameter.is_nested else str(parameter.layout).removeprefix("torch.")
    return f"{name} is a {kind} tensor, and the optimizer has dense ones only: make it dense"


def _reshaped(name: str, parameter: nn.Parameter) -> str:
    """Return how a parameter differs from its layout; empty if it does not, or if torch has sharded
    it."""
    parts = layout_of(parameter).parts
    if parts[0].padded:
        laid_out = (sum(part.padded[0] for part in parts), *parts[0].padded[1:])
    else:
        laid_out = ()
    if is_dtensor(parameter) or tuple(parameter.shape) == laid_out:
        return ""
    return (
        f"{name} has the shape {tuple(parameter.shape)}, but {laid_out} when its layout was "
        "attached: replace the "
        "parameter, not its data, and call megaprec.attach_whole again"
    )


def _untrainable(name: str, parameter: nn.Parameter) -> str:
    """Return why no step can train the parameter; empty if one can."""
    if parameter.is_inference():
        return (
            f"{name} was made in inference mode, where autograd computes no gradients: make the "
            "model outside of it"
        )
    if not parameter.is_floating_point() and fp8_param_of(parameter) is None:
        held = str(parameter.dtype).removeprefix("torch.")
        return (
            f"{name} is {held}, and the optimizer has real numbers only: store real and imaginary "
            "parts"
        )
    return ""


def _require_apart(parts: Sequence[nn.Module]) -> None:
    """Raise UserError unless each trained parameter has a name of its own."""
    taken: dict[tuple[str, int, bool], str] = {}
    for path, parameter in named(parts):
        layout = layout_of(parameter)
        for part in layout.parts:
            key = part.name, part.rank, layout.again
            if key in taken:
                raise UserError(
                    f"{part.name} is the logical name of two parameters, {taken[key]} and "
                    f"{path}: name them apart, "
                    "e.g. by megaprec.attach_whole(part, prefix=...) with another prefix for "
                    "each part of the model"
                )
            taken[key] = path


@dataclass(frozen=True)
class _Place:
    """The memory of a tensor of the model."""

    device: str
    first: int
    end: int
    path: str
    trained: bool


def _places(parts: Sequence[nn.Module]) -> Iterator[_Place]:
    """Yield the places of all trained parameters, then those of what is not trained: frozen
    parameters and buffers."""
    trained = list(named(parts))
    rest = [(n, t) for part in parts for n, t in (*part.named_parameters(), *part.named_buffers())]
    own = {p for _, p in trained}
    for kept, among in ((True, trained), (False, [(n, t) for n, t in rest if t not in own])):
        for path, tensor in among:
            plain = tensor.layout == torch.strided and not (is_dtensor(tensor) or tensor.is_nested)
            if (
                plain and tensor.numel() and (first := tensor.data_ptr())
            ):  # no memory on the device meta
                reach = (
                    sum(
                        (n - 1) * step
                        for n, step in zip(tensor.shape, tensor.stride(), strict=True)
                    )
                    + 1
                )
                yield _Place(str(tensor.device), first, first + reach * tensor.itemsize, path, kept)


def _require_own_memory(parts: Sequence[nn.Module]) -> None:
    """Raise UserError unless each trained parameter has a memory that no other tensor of the model
    shares."""
    furthest: dict[tuple[str, bool], _Place] = {}
    for place in sorted(_places(parts), key=lambda place: (place.device, place.first)):
        for trained in (True, False):
            before = furthest.get((place.device, trained))
            if before is not None and place.first < before.end and (place.trained or trained):
                raise UserError(_shared(before, place))
        before = furthest.setdefault((place.device, place.trained), place)
        if place.end > before.end:
            furthest[place.device, place.trained] = place


def _shared(one: _Place, other: _Place) -> str:
    if one.trained and other.trained:
        return (
            f"{other.path} shares memory with {one.path}: the optimizer moves each into "
            "memory of its own, and they "
            "would no longer be tied; make them one nn.Parameter, or clone one of them"
        )
    moved, stays = (one, other) if one.trained else (other, one)
    return (
        f"{stays.path} is not trained and shares memory with {moved.path}, which is: the "
        "optimizer moves that into "
        f"memory of its own, and {stays.path} would keep its first values; compute it from "
        "the parameter in forward, "
        "or clone it"
    )


def _is_flat(parameter: nn.Parameter) -> bool:
    return getattr(parameter, "_is_flat_param", False) or getattr(
        parameter, "_fsdp_flattened", False
    )


def averages(parts: Sequence[nn.Module], dp: Axis, said: bool | None) -> bool:
    """Return True if gradients are averaged over dp.

    said: the user's choice. Raises UserError if neither the user nor a wrapper decides it.
    """
    spread = any(is_dtensor(p) for p in parameters_of(parts))
    if said and any(layout_of(p).expert for p in parameters_of(parts)):
        raise UserError(
            "average = True: an expert on ranks of its own has the rows of several dp ranks, "
            "and fewer replicas than "
            "there are dp ranks; scale the loss to a share of the mean over all ranks' "
            "samples, with average=False"
        )
    if spread and said is False:
        raise UserError(
            "average = False: fully_shard averages gradients over its ranks, so leave average out"
        )
    if dp.size == 1 or said is not None:
        return bool(said) and dp.size > 1
    if spread or any(_wrappers(parts)):
        return True
    raise UserError(
        f"the gradients of {dp.size} dp ranks can be averaged or summed: give average=True if "
        "each rank's loss is the "
        "mean over its own samples, as with DistributedDataParallel, or average=False if it "
        "is the rank's share of the "
        "mean over the samples of all ranks (their sum over the number of all samples)"
    )


def disable_ddp_sync(parts: Sequence[nn.Module]) -> None:
    """Disable the all-reduce of each DistributedDataParallel among the parts: the optimizer reduces
    gradients."""
    for wrapper in _wrappers(parts):
        wrapper.require_backward_grad_sync = False


def _wrappers(parts: Sequence[nn.Module]) -> Iterator[DistributedDataParallel]:
    return (m for part in parts for m in part.modules() if isinstance(m, DistributedDataParallel))


def require_nothing_left(parts: Sequence[nn.Module], overlap: bool, zero_size: int) -> None:
    """Raise UserError if the optimizer is asked to shard or to overlap parameters that fully_shard
    manages."""
    asked = {"overlap": overlap, "zero_size": zero_size}
    spread = next((p for p in parameters_of(parts) if is_dtensor(p)), None)
    if spread is not None and (key := next((key for key, value in asked.items() if value), "")):
        raise UserError(
            f"{key} = {asked[key]}: {layout_of(spread).parts[0].name} is sharded over ranks "
            "by fully_shard, which "
            f"reduces gradients and all-gathers weights by itself: leave {key} out"
        )


def with_marked(
    parts: Sequence[nn.Module],
    plan: PrecisionPlan,
    groups: Sequence[str],
    world: Axis,
    device: torch.device,
) -> tuple[PrecisionPlan, tuple[str, ...]]:
    """Return the plan with marked parameters in FP32, and their logical names. groups: patterns of
    the optimizer.

    Raises UserError for patterns that match nothing on any rank. Collective over the world.
    """
    laid_out = (
        parameter for part in parts for parameter in part.parameters() if has_layout(parameter)
    )
    names = sorted({n.name for p in laid_out for n in layout_of(p).parts})
    require_used("precision.keep_fp32", plan.keep_fp32, names, world, device)
    require_used("optimizer.groups", groups, names, world, device)
    return keeping_marked(parts, plan, world, device)


def move_rest(
    part: nn.Module, plan: PrecisionPlan, device: torch.device, marked: AbstractSet[nn.Parameter]
) -> None:
    """Move everything that is not trained to the device: frozen parameters, in their planned dtype,
    and buffers.

    marked: parameters that stay in FP32. Raises UserError for a frozen parameter that torch has
    sharded in another dtype.
    """
    for name, frozen in ((name, p) for name, p in part.named_parameters() if not p.requires_grad):
        usual = param_dtype(frozen, plan) if has_layout(frozen) else plan.parameters
        held = plan.sensitive if frozen in marked else usual
        if not is_dtensor(frozen):
            # whole and complex numbers as they are
            as_held = held if frozen.is_floating_point() else frozen.dtype
            frozen.data = frozen.data.to(device, as_held).contiguous()
        elif frozen.dtype != held:
            raise UserError(
                f"{name} is held in {dtype_name(frozen.dtype)} by fully_shard, but the plan "
                "has parameters = "
                f"{dtype_name(held)}: cast it before fully_shard"
            )
    for table in part.buffers():  # only users' models have buffers; those of this project have none
        table.data = table.data.to(device)
