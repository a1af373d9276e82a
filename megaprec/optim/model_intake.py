"""Checks of the model that is given to the optimizer: its ranks, and the wrappers that have sharded
or wrapped it.

Each of torch's own wrappers averages gradients over ranks in its own way, and the optimizer reduces
them too. So that each gradient is reduced once, a wrapper is either supported here or refused by
name:

    DistributedDataParallel  its all-reduce is switched off; the optimizer reduces, in the plan's
                             precision
    FSDP2, HSDP (DTensors)   reduce and shard by themselves, see `megaprec.optim.dtensors`
    FSDP1 (FlatParameters)   refused: the tensors in a flat parameter have neither names nor shapes
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from megaprec.comm.axis import Axis, device_of
from megaprec.comm.experts import ExpertAxes
from megaprec.comm.layout import Layout, has_layout, layout_of, parameters_of
from megaprec.errors import UserError
from megaprec.fp8.params import fp8_param_of
from megaprec.optim.dtensors import is_dtensor, require_spread_over_all
from megaprec.optim.flat_buffer import param_dtype
from megaprec.precision.marks import keep_marked_in_fp32
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
        mesh: DeviceMesh | None, model_parts: Sequence[nn.Module], experts: ExpertAxes | None = None
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
            device = next((parameter.device for parameter in parameters_of(model_parts)), device)
        dtensors = [
            (path, parameter)
            for path, parameter in trained_parameters(model_parts)
            if is_dtensor(parameter)
        ]
        if mesh is None and dist.is_initialized() and dist.get_world_size() > 1:
            if not dtensors:
                raise UserError(_explain_missing_mesh(device, dist.get_world_size()))
            dp = Axis("dp", dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
        world = dp if mesh is None else Axis.world(mesh)
        for path, parameter in dtensors:
            require_spread_over_all(path, parameter, pp, tp, world)
        world = Axis("world", world.rank, world.size, world.group)
        return Ranks(pp, dp, tp, world, device, experts)


def _explain_missing_mesh(device: torch.device, ranks: int) -> str:
    return (
        f"{ranks} ranks joined torch.distributed, but the optimizer was given no mesh, so each "
        f'rank would train a separate model: pass mesh=init_device_mesh("{device.type}", '
        f'({ranks},), mesh_dim_names=("dp",)), from torch.distributed.device_mesh'
    )


def trained_parameters(model_parts: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every trained parameter once, with its path in the first part that contains it."""
    seen: set[nn.Parameter] = set()
    for model_part in model_parts:
        for path, parameter in model_part.named_parameters():
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                yield path, parameter


def require_identifiable(
    model_parts: Sequence[nn.Module], tp: int, experts: ExpertAxes | None = None
) -> None:
    """Raise UserError, naming parameters, for parameters that cannot be identified.

    These are FSDP1's flat parameters, parameters without a layout, parameters that were laid out
    for another number of tensor-parallel ranks, and experts of ranks of their own, of which the
    optimizer was not told.
    """
    trained = list(trained_parameters(model_parts))
    for path, parameter in trained:
        if _is_flat(parameter):
            raise UserError.of("optimizer.fsdp1", path=path)
    everything: dict[str, nn.Parameter] = {}
    for model_part in model_parts:
        everything.update(model_part.named_parameters())
    _require_no_problems(_unusable_memory, everything.items())
    _require_no_problems(_untrainable, trained)
    _require_layouts(trained)
    _require_no_problems(_shape_problem, trained)
    _require_distinct_names(model_parts)
    _require_own_memory(model_parts)
    for layout in map(layout_of, parameters_of(model_parts)):
        _require_laid_out_for(layout, tp, experts)


def _require_no_problems(
    describe: Callable[[str, nn.Parameter], str],
    parameters: Iterable[tuple[str, nn.Parameter]],
) -> None:
    """Raise UserError with the lines that `describe` returns of parameters, if it returns any."""
    problems = [describe(path, parameter) for path, parameter in parameters]
    if any(problems):
        raise UserError(*filter(None, problems))


def _require_layouts(parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise UserError if some of the parameters have no layout."""
    bare = [(path, parameter) for path, parameter in parameters if not has_layout(parameter)]
    if not bare:
        return
    path, first = bare[0]
    others = f"; {len(bare) - 1} others have none either" if len(bare) > 1 else ""
    raise UserError.of(
        "optimizer.layout_missing", path=path, shape=tuple(first.shape), others=others
    )


def _require_laid_out_for(layout: Layout, tp: int, experts: ExpertAxes | None) -> None:
    """Raise UserError unless the layout is one for `tp` tensor-parallel ranks, or for those of its
    experts."""
    if layout.expert and experts is None:
        raise UserError.of("optimizer.experts_argument_missing", name=layout.parts[0].name)
    ranks = experts.tp.size if layout.expert and experts else tp
    for part in layout.parts:
        if part.shards * part.copies != ranks:
            raise UserError.of(
                "optimizer.layout_with_copies_of_other_ranks",
                name=part.name,
                shards=part.shards,
                copies=part.copies,
                ranks=ranks,
            )


def _unusable_memory(path: str, parameter: nn.Parameter) -> str:
    """Return why a parameter, trained or frozen, cannot be moved or held; empty if it can."""
    if parameter.device.type == "meta":
        return (
            f"{path} is on the device meta and has no values: call model.to_empty and initialise "
            "or load it first"
        )
    if is_dtensor(parameter) or (parameter.layout == torch.strided and not parameter.is_nested):
        return ""
    kind = "nested" if parameter.is_nested else str(parameter.layout).removeprefix("torch.")
    return f"{path} is a {kind} tensor, and the optimizer has dense ones only: make it dense"


def _shape_problem(path: str, parameter: nn.Parameter) -> str:
    """Return how a parameter differs from its layout; empty if it does not, or if torch has sharded
    it."""
    parts = layout_of(parameter).parts
    expected: tuple[int, ...] = ()
    if parts[0].padded:  # parts are stacked along their first dim
        num_rows = sum(part.padded[0] for part in parts)
        expected = (num_rows, *parts[0].padded[1:])
    if is_dtensor(parameter) or tuple(parameter.shape) == expected:
        return ""
    return (
        f"{path} has the shape {tuple(parameter.shape)}, but {expected} when its layout was "
        "attached: replace the parameter, not its data, and call megaprec.attach_whole again"
    )


def _untrainable(path: str, parameter: nn.Parameter) -> str:
    """Return why no step can train the parameter; empty if one can."""
    if parameter.is_inference():
        return (
            f"{path} was made in inference mode, where autograd computes no gradients: make the "
            "model outside of it"
        )
    if not parameter.is_floating_point() and fp8_param_of(parameter) is None:
        dtype = str(parameter.dtype).removeprefix("torch.")
        return (
            f"{path} is {dtype}, and the optimizer has real numbers only: store real and imaginary "
            "parts"
        )
    return ""


def _require_distinct_names(model_parts: Sequence[nn.Module]) -> None:
    """Raise UserError unless each trained parameter has a name of its own."""
    paths: dict[tuple[str, int, bool], str] = {}
    for path, parameter in trained_parameters(model_parts):
        layout = layout_of(parameter)
        for part in layout.parts:
            key = part.name, part.rank, layout.again
            if key in paths:
                raise UserError.of(
                    "optimizer.name_twice", name=part.name, paths=paths[key], path=path
                )
            paths[key] = path


@dataclass(frozen=True)
class _MemorySpan:
    """The memory of a tensor of the model: addresses [first, end) of a device."""

    device: str
    first: int
    end: int
    path: str
    trained: bool


def _memory_spans(model_parts: Sequence[nn.Module]) -> Iterator[_MemorySpan]:
    """Yield the memory of all trained parameters, then that of what is not trained: frozen
    parameters and buffers."""
    trained = dict.fromkeys(parameter for _, parameter in trained_parameters(model_parts))
    for path, parameter in trained_parameters(model_parts):
        yield from _memory_span(path, parameter, trained=True)
    for model_part in model_parts:
        for path, tensor in (*model_part.named_parameters(), *model_part.named_buffers()):
            if tensor not in trained:
                yield from _memory_span(path, tensor, trained=False)


def _memory_span(path: str, tensor: Tensor, trained: bool) -> Iterator[_MemorySpan]:
    """Yield the memory of a tensor, if it has an address."""
    is_special = is_dtensor(tensor) or tensor.is_nested
    is_plain = tensor.layout == torch.strided and not is_special
    # a tensor without elements has no memory, nor has one on the device meta
    if not is_plain or not tensor.numel() or not tensor.data_ptr():
        return
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    first = tensor.data_ptr()
    end = first + (last + 1) * tensor.itemsize
    yield _MemorySpan(str(tensor.device), first, end, path, trained)


def _require_own_memory(model_parts: Sequence[nn.Module]) -> None:
    """Raise UserError unless each trained parameter has a memory that no other tensor of the model
    shares."""
    # the span that reaches furthest so far, of trained and of other tensors of each device
    furthest: dict[tuple[str, bool], _MemorySpan] = {}
    # in the order of addresses a span can overlap only those that reach beyond its start
    for span in sorted(_memory_spans(model_parts), key=lambda span: (span.device, span.first)):
        for trained in (True, False):
            before = furthest.get((span.device, trained))
            is_moved = span.trained or trained  # else they stay together
            if is_moved and before is not None and span.first < before.end:
                raise UserError(_explain_sharing(before, span))
        before = furthest.setdefault((span.device, span.trained), span)
        if span.end > before.end:
            furthest[span.device, span.trained] = span


def _explain_sharing(first: _MemorySpan, second: _MemorySpan) -> str:
    if first.trained and second.trained:
        return (
            f"{second.path} shares memory with {first.path}: the optimizer moves each into memory "
            "of its own, and they would no longer be tied; make them one nn.Parameter, or clone "
            "one of them"
        )
    moved, stays = (first, second) if first.trained else (second, first)
    return (
        f"{stays.path} is not trained and shares memory with {moved.path}, which is: the "
        f"optimizer moves that into memory of its own, and {stays.path} would keep its first "
        "values; compute it from the parameter in forward, or clone it"
    )


def _is_flat(parameter: nn.Parameter) -> bool:
    # the flat parameter itself, and with use_orig_params the parameters that are views of it
    return any(getattr(parameter, mark, False) for mark in ("_is_flat_param", "_fsdp_flattened"))


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
    model_parts: Sequence[nn.Module], overlap: bool, zero_size: int
) -> None:
    """Raise UserError if the optimizer is asked to shard or to overlap parameters that fully_shard
    manages."""
    dtensor = next(filter(is_dtensor, parameters_of(model_parts)), None)
    if dtensor is None:
        return
    for key, value in {"overlap": overlap, "zero_size": zero_size}.items():
        if value:
            raise UserError.of(
                "optimizer.fsdp_shards_itself",
                key=key,
                value=value,
                name=layout_of(dtensor).parts[0].name,
            )


def plan_with_marked(
    model_parts: Sequence[nn.Module],
    plan: PrecisionPlan,
    groups: Sequence[str],
    world: Axis,
    device: torch.device,
) -> tuple[PrecisionPlan, tuple[str, ...]]:
    """Return the plan with marked parameters in FP32, and their logical names.

    groups: patterns of the optimizer.

    Raises UserError for patterns that match nothing on any rank. Collective over the world.
    """
    names = set[str]()
    for module in model_parts:
        for parameter in filter(has_layout, module.parameters()):
            names.update(part.name for part in layout_of(parameter).parts)
    sorted_names = sorted(names)
    require_used("precision.keep_fp32", plan.keep_fp32, sorted_names, world, device)
    require_used("optimizer.groups", groups, sorted_names, world, device)
    return keep_marked_in_fp32(model_parts, plan, world, device)


def move_rest(
    model_part: nn.Module,
    plan: PrecisionPlan,
    device: torch.device,
    marked: AbstractSet[nn.Parameter],
) -> None:
    """Move everything that is not trained to the device: frozen parameters, in their planned dtype,
    and buffers.

    marked: parameters that stay in FP32. Raises UserError for a frozen parameter that torch has
    sharded in another dtype.
    """
    for path, parameter in model_part.named_parameters():
        if parameter.requires_grad:
            continue
        if parameter in marked:
            planned = plan.sensitive
        else:
            planned = param_dtype(parameter, plan) if has_layout(parameter) else plan.parameters
        if not is_dtensor(parameter):
            # whole and complex numbers stay as they are
            dtype = planned if parameter.is_floating_point() else parameter.dtype
            parameter.data = parameter.data.to(device, dtype).contiguous()
        elif parameter.dtype != planned:
            raise UserError.of(
                "optimizer.fsdp_cast_before",
                path=path,
                dtype=dtype_name(parameter.dtype),
                planned_dtype=dtype_name(planned),
            )
    # only users' models have buffers; those of this project have none
    for buffer in model_part.buffers():
        buffer.data = buffer.data.to(device)
