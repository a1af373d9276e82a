"""Mixed precision around any torch module: a wrapper that casts it, and marks for the parts that stay FP32.

    set_fp32_attr_to_module(model.router)
    model = NaiveAMPModel(model, dtype=torch.bfloat16)      # or PlannedModel(model, plan)

The first two have the names and arguments of InternEvo's (`internlm/core/naive_amp.py`). Where the original loses
something this does not: values of a part marked FP32 are never rounded, arguments are cast wherever they are nested
(`megaprec.precision.nested`) and by keyword too, integers are left alone, and every container comes back as its own
kind.
"""

from typing import Any, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.errors import UserError
from megaprec.precision.marks import compute_in_fp32, marked_parts
from megaprec.precision.marks import mark_fp32 as mark_fp32
from megaprec.precision.marks import module_has_fp32_attr as module_has_fp32_attr
from megaprec.precision.marks import set_fp32_attr_to_module as set_fp32_attr_to_module
from megaprec.precision.nested import mapped
from megaprec.precision.parallel_modes import Group, ParallelMode, axes_of, known_group
from megaprec.precision.patterns import matched, unmatched
from megaprec.precision.plan import TORCH_DTYPES, PrecisionPlan

HALVES = (torch.float16, torch.bfloat16)


class NaiveAMPModel(nn.Module):
    """`model` in `dtype`: its parameters, its floating buffers, and FP32 tensors among its inputs.

    output_to_fp32: half-precision outputs are made FP32.
    parallel_mode: the ranks over which buffers are averaged: an `Axis`, a process group, a DeviceMesh of one dim, or a
        `ParallelMode`, which may be InternEvo's own member or its name. A mode is looked up on `mesh`; without one DATA
        is the world, if that was never cut into groups.
    sync_buffer: buffers of floating and complex numbers are averaged over them before each forward pass in training and
        before the first one after `eval()`. Buffers of integers are left alone.
    dtype: torch.float16, bfloat16 or float32, or InternEvo's string for it. "torch.tf32" is FP32, and allows TF32 in
        this process from now on.

    Casts `model` in place. In a part marked by `set_fp32_attr_to_module` parameters and buffers keep their values,
    floating inputs come in FP32, and what comes out of FP32 is of `dtype`.
    Raises UserError for another dtype, and if buffers are to be averaged over ranks that are not known.
    """

    def __init__(
        self,
        model: nn.Module,
        output_to_fp32: bool = True,
        parallel_mode: Group = ParallelMode.DATA,
        sync_buffer: bool = True,
        dtype: torch.dtype | str = torch.float16,
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        self.model, self.output_to_fp32, self.dtype = model, output_to_fp32, _half_or_fp32(dtype)
        self._group, self._mesh = known_group(parallel_mode, mesh), mesh
        self.sync_buffer = sync_buffer
        self._first_eval = False
        _cast_tensors(model, self.dtype, self.dtype)
        _cast_borders(model, self.dtype)

    @property
    def sync_buffer(self) -> bool:
        """Whether buffers are averaged; False also where the group is this rank alone."""
        return bool(self._axes)

    @sync_buffer.setter
    def sync_buffer(self, on: bool) -> None:
        self._axes = axes_of(self._group, self._mesh, self.model) if on else ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training or self._first_eval:
            average_buffers(self.model, *self._axes)
            self._first_eval = False
        args, kwargs = mapped((args, kwargs), lambda t: t.to(self.dtype) if t.dtype == torch.float32 else t)
        outputs = self.model(*args, **kwargs)
        return mapped(outputs, lambda t: t.float() if t.dtype in HALVES else t) if self.output_to_fp32 else outputs

    def train(self, mode: bool = True) -> Self:
        """Sets the wrapper and the model to training, or to evaluation; returns the wrapper."""
        self._first_eval = not mode
        return super().train(mode)


class PlannedModel(nn.Module):
    """`model` as a plan has it: its parameters, buffers, inputs and outputs, and in FP32 what `keep_fp32` names.

    A module is kept if a pattern matches the path of one of its parameters. Casts `model` in place. Raises UserError
    for a pattern that matches none, and for a plan whose parameters are wider than its products: that is
    torch.autocast's to do.
    """

    def __init__(self, model: nn.Module, plan: PrecisionPlan) -> None:
        super().__init__()
        if plan.parameters != plan.compute:
            raise UserError("parameters wider than compute: run the model under torch.autocast instead")
        names = [name for name, _ in model.named_parameters()]
        if unused := list(unmatched("keep_fp32", plan.keep_fp32, matched(plan.keep_fp32, names), names)):
            raise UserError(*unused)
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
            args, kwargs = mapped((args, kwargs), lambda t: t.to(self.plan.compute) if t.is_floating_point() else t)
        outputs = self.model(*args, **kwargs)
        return mapped(outputs, lambda t: t.to(self.plan.output) if t.is_floating_point() else t)


@torch.no_grad()
def average_buffers(module: nn.Module, *axes: Axis) -> None:
    """Makes every buffer of floating or complex numbers in `module` its mean over the ranks of all `axes`.

    Added in FP32, or in FP64 if that is a buffer's dtype. Collective over each axis, whose ranks hold the same buffers.
    """
    kinds = (b for b in module.buffers() if b.is_floating_point() or b.is_complex())
    buffers = [torch.view_as_real(b) if b.is_complex() else b for b in kinds]
    if not axes or not buffers:
        return
    wide = torch.float64 if any(b.dtype == torch.float64 for b in buffers) else torch.float32
    packed = torch.cat([b.reshape(-1).to(wide) for b in buffers])
    for axis in axes:
        axis.sum_(packed.div_(axis.size))
    for buffer, mean in zip(buffers, packed.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))


def _half_or_fp32(dtype: object) -> torch.dtype:
    """The dtype that was given, perhaps by InternEvo's string; for "torch.tf32" sets torch's switches and returns FP32.

    Raises UserError for one that a model is not held in.
    """
    name = dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
    known = TORCH_DTYPES.get(name, torch.float32 if name == "tf32" else dtype)
    if known not in (*HALVES, torch.float32):
        raise UserError(
            f"dtype = {dtype!r}: must be torch.float16, torch.bfloat16 or torch.float32, or one of the strings "
            f"{', '.join(f'torch.{name}' for name in (*TORCH_DTYPES, 'tf32'))}"
        )
    if name == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    assert isinstance(known, torch.dtype)
    return known


def _cast_tensors(model: nn.Module, parameters: torch.dtype, buffers: torch.dtype) -> None:
    """Casts floating parameters and buffers; those of marked parts, wherever else they are used, are FP32."""
    kept = {id(tensor) for _, module in marked_parts(model) for tensor in (*module.parameters(), *module.buffers())}
    for tensors, dtype in ((model.parameters(), parameters), (model.buffers(), buffers)):
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(torch.float32 if id(tensor) in kept else dtype)


def _cast_borders(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts what goes into and comes out of the outermost marked parts."""
    for _, module in marked_parts(model):
        compute_in_fp32(module, lambda _: dtype)


def _to_own_dtype(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dtype = next(module.parameters(recurse=False)).dtype
    return mapped((args, kwargs), lambda t: t.to(dtype) if t.is_floating_point() else t)
