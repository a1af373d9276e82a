"""Mixed precision around any torch module: a wrapper that casts it, and marks for the parts that stay FP32.

    set_fp32_attr_to_module(model.router)
    model = NaiveAMPModel(model, dtype=torch.bfloat16)      # or PlannedModel(model, plan)

The first two have the names and arguments of InternEvo's. Where the original loses something this does not: values of
a part marked FP32 are never rounded, arguments are cast wherever they are nested and by keyword too, integers are left
alone, and a tuple comes back as a tuple.
"""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Self

import torch
from torch import Tensor, nn

from megaprec.comm import Axis
from megaprec.plan import PrecisionPlan

HALVES = (torch.float16, torch.bfloat16)


def set_fp32_attr_to_module(module: nn.Module) -> None:
    """Marks `module`, and all in it, to be held and computed in FP32 when the model is wrapped."""
    module.is_fp32_module = True  # type: ignore[assignment]


def module_has_fp32_attr(module: nn.Module) -> bool:
    """Whether this very module is marked."""
    return bool(getattr(module, "is_fp32_module", False))


class NaiveAMPModel(nn.Module):
    """`model` in `dtype`: its parameters, its floating buffers, and FP32 tensors among its inputs.

    output_to_fp32: half-precision outputs are made FP32.
    parallel_mode: the axis over whose ranks buffers are averaged, the data-parallel one; None for a plain process.
    sync_buffer: floating buffers are averaged over it before each forward pass in training and before the first one
        after `eval()`. Buffers of integers are left alone.
    dtype: torch.float16, bfloat16 or float32.

    Casts `model` in place. In a part marked by `set_fp32_attr_to_module` parameters and buffers keep their values,
    floating inputs come in FP32, and what comes out of FP32 is of `dtype`.
    """

    def __init__(
        self,
        model: nn.Module,
        output_to_fp32: bool = True,
        parallel_mode: Axis | None = None,
        sync_buffer: bool = True,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        super().__init__()
        if dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ValueError(f"dtype = {dtype}: must be torch.float16, torch.bfloat16 or torch.float32")
        self.model, self.output_to_fp32, self.dtype = model, output_to_fp32, dtype
        self.axis = parallel_mode or Axis("dp")
        self.sync_buffer = sync_buffer and self.axis.size > 1
        self._first_eval = False
        _cast_tensors(model, dtype, dtype)
        _cast_borders(model, dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.sync_buffer and (self.training or self._first_eval):
            average_buffers(self.model, self.axis)
            self._first_eval = False
        args, kwargs = _mapped((args, kwargs), lambda t: t.to(self.dtype) if t.dtype == torch.float32 else t)
        outputs = self.model(*args, **kwargs)
        return _mapped(outputs, lambda t: t.float() if t.dtype in HALVES else t) if self.output_to_fp32 else outputs

    def train(self, mode: bool = True) -> Self:
        """Sets the wrapper and the model to training, or to evaluation; returns the wrapper."""
        self._first_eval = not mode
        return super().train(mode)


class PlannedModel(nn.Module):
    """`model` as a plan has it: its parameters, buffers, inputs and outputs, and in FP32 what `keep_fp32` names.

    A module is kept if a pattern matches the path of one of its parameters. Casts `model` in place. Raises ValueError
    for a plan whose parameters are wider than its products: that is torch.autocast's to do.
    """

    def __init__(self, model: nn.Module, plan: PrecisionPlan) -> None:
        super().__init__()
        if plan.parameters != plan.compute:
            raise ValueError("parameters wider than compute: run the model under torch.autocast instead")
        self.model, self.plan = model, plan
        mark_fp32(model, plan.keep_fp32)
        _cast_tensors(model, plan.parameters, plan.buffers)
        _cast_borders(model, plan.compute)
        if plan.cast_inputs in ("inner", "all"):
            for module in model.modules():
                if module is not model and any(True for _ in module.parameters(recurse=False)):
                    module.register_forward_pre_hook(_to_own_dtype, with_kwargs=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.plan.cast_inputs in ("root", "all"):
            args, kwargs = _mapped((args, kwargs), lambda t: t.to(self.plan.compute) if t.is_floating_point() else t)
        outputs = self.model(*args, **kwargs)
        return _mapped(outputs, lambda t: t.to(self.plan.output) if t.is_floating_point() else t)


def mark_fp32(model: nn.Module, patterns: Sequence[str]) -> None:
    """Marks every module of which a parameter's path in `model` matches one of the patterns (`fnmatch`)."""
    for path, module in model.named_modules():
        names = [f"{path}.{name}".lstrip(".") for name, _ in module.named_parameters(recurse=False)]
        if any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
            set_fp32_attr_to_module(module)


@torch.no_grad()
def average_buffers(module: nn.Module, axis: Axis) -> None:
    """Makes every floating buffer of `module` its mean over the ranks of `axis`, in its own dtype, added in FP32."""
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.copy_(axis.sum_(buffer.float() / axis.size))


def _cast_tensors(model: nn.Module, parameters: torch.dtype, buffers: torch.dtype) -> None:
    """Casts floating parameters and buffers; those of marked parts, wherever else they are used, are FP32."""
    marked = [module for module in model.modules() if module_has_fp32_attr(module)]
    kept = {id(tensor) for module in marked for tensor in (*module.parameters(), *module.buffers())}
    for tensors, dtype in ((model.parameters(), parameters), (model.buffers(), buffers)):
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(torch.float32 if id(tensor) in kept else dtype)


def _cast_borders(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts what goes into and comes out of the outermost marked parts."""
    if module_has_fp32_attr(module):
        _compute_in_fp32(module, dtype)
        return
    for child in module.children():
        _cast_borders(child, dtype)


def _to_own_dtype(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dtype = next(module.parameters(recurse=False)).dtype
    return _mapped((args, kwargs), lambda t: t.to(dtype) if t.is_floating_point() else t)


def _compute_in_fp32(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts floating inputs of `module` to FP32 and its FP32 outputs to `dtype`."""

    def widen(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _mapped((args, kwargs), lambda t: t.float() if t.is_floating_point() else t)

    def narrow(_: nn.Module, __: Any, outputs: Any) -> Any:
        return _mapped(outputs, lambda t: t.to(dtype) if t.dtype == torch.float32 else t)

    module.register_forward_pre_hook(widen, with_kwargs=True)
    module.register_forward_hook(narrow)


def _mapped(values: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`values` with `change` applied to each tensor in it; containers keep their kind."""
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return type(values)(*(_mapped(item, change) for item in values))
    if isinstance(values, list | tuple):
        return type(values)(_mapped(item, change) for item in values)
    if isinstance(values, Mapping):
        changed = {key: _mapped(item, change) for key, item in values.items()}
        return changed if type(values) is dict else type(values)(changed)  # type: ignore[call-arg]
    return values
