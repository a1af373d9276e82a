"""FP32 marks: modules that are marked to stay in FP32, and the casts of their inputs and outputs.

A mark is InternEvo's attribute on a module. It is used in three places:
`megaprec.precision.module_wrappers` casts any module, `parallel.fp32_marks` casts the stages that
are trained, and the optimizer keeps the parameters of a marked module, their gradients and their
masters in FP32. The optimizer refuses a mark for which no casts were installed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from glob import escape
from typing import Any

import torch
from torch import nn

from megaprec.comm.axis import Axis
from megaprec.comm.gathered_texts import gather_entries
from megaprec.comm.layout import has_layout, layout_of
from megaprec.errors import UserError
from megaprec.precision.nested import cast_dtypes, cast_floating, tensors
from megaprec.precision.patterns import match_patterns
from megaprec.precision.plan import PrecisionPlan, dtype_name

CASTS_ITSELF = "casts_itself_by_megaprec"  # attribute of wrappers, which cast what they wrap
_IS_CAST = "is_cast_by_megaprec"  # attribute of the modules of a wrapped model


def set_fp32_attr_to_module(module: nn.Module) -> None:
    """Mark `module` and all its submodules to stay and compute in FP32 when the model is wrapped or
    trained.

    Raises UserError for what is no module, and for a module of a model that is already wrapped,
    which was rounded.
    """
    require_module(module, "module")
    if getattr(module, _IS_CAST, False) and not module_has_fp32_attr(module):
        raise UserError.of("precision.fp32_mark_too_late", kind=type(module).__name__)
    # InternEvo's name of the attribute
    module.is_fp32_module = True  # type: ignore[assignment]


def require_module(value: object, name: str) -> None:
    """Raise UserError for what is no torch module."""
    if not isinstance(value, nn.Module):
        raise UserError.of("precision.not_a_module", name=name, value=value)


def note_cast(model: nn.Module) -> None:
    """Remember that a model was cast, so that marks come too late."""
    for module in model.modules():
        setattr(module, _IS_CAST, True)


def module_has_fp32_attr(module: nn.Module) -> bool:
    """Return True if this module itself is marked."""
    return bool(getattr(module, "is_fp32_module", False))


def outermost_marked(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) of the outermost marked modules; a mark includes all submodules.

    Of a marked container that is never called, such as a ModuleList, these are the modules in it.
    """
    yield from _marked_in(model, path, False)


def _marked_in(module: nn.Module, path: str, within: bool) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost marked modules in `module`. within: it is in a marked container."""
    is_marked = within or module_has_fp32_attr(module)
    if is_marked and not _is_container(module):
        yield path or "the model", module
        return
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        yield from _marked_in(child, child_path, is_marked)


def _is_container(module: nn.Module) -> bool:
    """Return True for a module without a forward pass, whose hooks would never run: it only holds
    other modules. One that holds nothing, or tensors of its own, is no container."""
    # a module may have got a forward of its own as an attribute, which is no method
    forward = getattr(module.forward, "__func__", module.forward)
    if forward is not nn.Module.forward:
        return False
    own_tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    has_children = next(module.children(), None) is not None
    return has_children and not own_tensors


def mark_fp32(model: nn.Module, patterns: Sequence[str]) -> None:
    """Mark every module that has a parameter whose path in `model` matches one of the patterns
    (`fnmatch`)."""
    for path, module in model.named_modules():
        own_names = [name for name, _ in module.named_parameters(recurse=False)]
        paths = [f"{path}.{name}".lstrip(".") for name in own_names]  # the model's own path is ""
        if any(match_patterns(patterns, paths)):
            set_fp32_attr_to_module(module)


def compute_in_fp32(
    module: nn.Module,
    out: Callable[[torch.dtype | None], torch.dtype],
    wide: torch.dtype = torch.float32,
) -> None:
    """Make `module` cast its floating-point inputs to `wide`, and its outputs of dtype `wide` to
    `out(input dtype)`.

    The input dtype is that of the first floating-point input that is not a scalar; None if there is
    none.
    """
    output_dtype = wide  # of the pass that is under way

    def widen(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal output_dtype
        output_dtype = out(_first_floating_dtype((args, kwargs)))
        return cast_floating((args, kwargs), wide)

    def narrow(_: nn.Module, __: Any, outputs: Any) -> Any:
        return cast_dtypes(outputs, (wide,), output_dtype)

    module.register_forward_pre_hook(widen, with_kwargs=True)
    module.register_forward_hook(narrow)
    # the optimizer looks for it: see `keep_marked_in_fp32`
    module.computes_in_fp32 = True  # type: ignore[assignment]


def _first_floating_dtype(inputs: Any) -> torch.dtype | None:
    """Return the dtype of the first floating-point input that is not a scalar, None if there is
    none."""
    for tensor in tensors(inputs):
        # a scalar, such as a loss weight, does not say in which dtype the model computes
        if tensor.is_floating_point() and tensor.dim():
            return tensor.dtype
    return None


def parameters_of_marked(model_parts: Sequence[nn.Module]) -> set[nn.Parameter]:
    """Return all parameters of marked modules."""
    parameters: set[nn.Parameter] = set()
    for model in model_parts:
        for _, module in outermost_marked(model):
            parameters |= set(module.parameters())
    return parameters


def keep_marked_in_fp32(
    model_parts: Sequence[nn.Module],
    plan: PrecisionPlan,
    world: Axis,
    device: torch.device,
) -> tuple[PrecisionPlan, tuple[str, ...]]:
    """Return the plan that keeps every parameter in FP32 that is marked on any rank, and the names
    of these parameters.

    A tied parameter may be marked on another rank only. Collective over the world. Raises UserError
    if a marked module would not compute in FP32.
    """
    for model in model_parts:
        for path, module in outermost_marked(model):
            has_casts = getattr(module, "computes_in_fp32", False)
            if not has_casts and plan.compute != plan.sensitive:
                raise UserError.of(
                    "precision.fp32_mark_unused", path=path, dtype_name=dtype_name(plan.compute)
                )
    local_names: set[str] = set()
    for parameter in parameters_of_marked(model_parts):
        if has_layout(parameter):
            local_names |= {part.name for part in layout_of(parameter).parts}
    # As a rule nothing is marked: one number costs less than an exchange of names.
    most_marked = world.max_(torch.tensor(float(len(local_names)), device=device))
    if not most_marked:
        return plan, ()
    names_of_ranks = gather_entries(dict.fromkeys(sorted(local_names)), world, device)
    names = tuple(sorted(names_of_ranks))
    patterns = (*plan.keep_fp32, *map(escape, names))  # names are meant literally
    return replace(plan, keep_fp32=patterns), names
