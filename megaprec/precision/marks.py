"""Parts of a model that are marked to stay FP32: who they are, and what goes into and comes out of them.

A mark is InternEvo's attribute on a module. It is heeded in three places: `megaprec.precision.module_wrappers`
casts any module, `parallel.fp32_marks` the stages that are trained, and the optimizer holds the parameters of a marked
part, their gradients and masters in FP32. A mark that nobody has seen to is refused there.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from glob import escape
from typing import Any

import torch
from torch import nn

from megaprec.comm.axis import Axis
from megaprec.comm.everyones import everyones
from megaprec.comm.layout import has_layout, layout_of
from megaprec.errors import UserError
from megaprec.precision.nested import mapped, tensors
from megaprec.precision.plan import PrecisionPlan, dtype_name


def set_fp32_attr_to_module(module: nn.Module) -> None:
    """Marks `module`, and all in it, to be held and computed in FP32 when the model is wrapped or trained."""
    module.is_fp32_module = True  # type: ignore[assignment]


def module_has_fp32_attr(module: nn.Module) -> bool:
    """Whether this very module is marked."""
    return bool(getattr(module, "is_fp32_module", False))


def marked_parts(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost marked modules, with their paths; what is in them is marked with them."""
    if module_has_fp32_attr(model):
        yield path or "the model", model
        return
    for name, child in model.named_children():
        yield from marked_parts(child, f"{path}.{name}" if path else name)


def mark_fp32(model: nn.Module, patterns: Sequence[str]) -> None:
    """Marks every module of which a parameter's path in `model` matches one of the patterns (`fnmatch`)."""
    for path, module in model.named_modules():
        names = [f"{path}.{name}".lstrip(".") for name, _ in module.named_parameters(recurse=False)]
        if any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
            set_fp32_attr_to_module(module)


def compute_in_fp32(
    module: nn.Module, out: Callable[[torch.dtype | None], torch.dtype], wide: torch.dtype = torch.float32
) -> None:
    """Casts floating inputs of `module` to `wide`, and its outputs in that to `out(dtype of the first of them)`.

    The first is the first tensor with dims; None if all that comes in are integers.
    """
    leaves = [wide]

    def widen(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        floating = (t.dtype for t in tensors((args, kwargs)) if t.is_floating_point() and t.dim())
        leaves[0] = out(next(floating, None))
        return mapped((args, kwargs), lambda t: t.to(wide) if t.is_floating_point() else t)

    def narrow(_: nn.Module, __: Any, outputs: Any) -> Any:
        return mapped(outputs, lambda t: t.to(leaves[0]) if t.dtype == wide else t)

    module.register_forward_pre_hook(widen, with_kwargs=True)
    module.register_forward_hook(narrow)
    module.computes_in_fp32 = True  # type: ignore[assignment]


def parameters_of_marked(parts: Sequence[nn.Module]) -> set[nn.Parameter]:
    """All parameters in marked parts."""
    return {parameter for part in parts for _, module in marked_parts(part) for parameter in module.parameters()}


def keeping_marked(
    parts: Sequence[nn.Module], plan: PrecisionPlan, world: Axis, device: torch.device
) -> tuple[PrecisionPlan, tuple[str, ...]]:
    """The plan that keeps what is marked on any rank, which may hold a tied copy of it here, and the names of that.

    Collective over the world. Raises UserError if a part is marked that nobody makes compute in FP32.
    """
    for path, module in (found for part in parts for found in marked_parts(part)):
        if not getattr(module, "computes_in_fp32", False) and plan.compute != plan.sensitive:
            raise UserError(
                f"{path} is marked FP32 and would compute in {dtype_name(plan.compute)}: call "
                "parallel.compute_marked_in_fp32 for the model before its optimizer is made, or wrap the model in "
                "megaprec.NaiveAMPModel"
            )
    held = [layout_of(p) for p in parameters_of_marked(parts) if has_layout(p)]
    mine = sorted({part.name for layout in held for part in layout.parts})
    if not world.max_(torch.tensor(float(len(mine)), device=device)):
        return plan, ()
    names = tuple(sorted(everyones(dict.fromkeys(mine), world, device)))
    return replace(plan, keep_fp32=(*plan.keep_fp32, *map(escape, names))), names
