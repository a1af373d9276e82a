"""Mixed-precision wrappers for any torch module, with marks for submodules that stay in FP32.

    set_fp32_attr_to_module(model.router)
    model = NaiveAMPModel(model, dtype=torch.bfloat16)      # or PlannedModel(model, plan)

`NaiveAMPModel` and `set_fp32_attr_to_module` have the names and arguments of InternEvo's own
(`internlm/core/naive_amp.py`). They differ where the original loses information: values of a module
marked FP32 are never rounded, positional and keyword arguments are cast at any depth of nesting
(`megaprec.precision.nested`), integers are unchanged, and every container keeps its type.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.errors import Problem, UserError
from megaprec.precision.marks import compute_in_fp32, note_cast, outermost_marked, require_module
from megaprec.precision.marks import mark_fp32 as mark_fp32
from megaprec.precision.marks import module_has_fp32_attr as module_has_fp32_attr
from megaprec.precision.marks import set_fp32_attr_to_module as set_fp32_attr_to_module
from megaprec.precision.nested import cast_dtypes, cast_floating
from megaprec.precision.parallel_modes import Group, ParallelMode, axes_of, known_group
from megaprec.precision.patterns import match_patterns, unmatched_problems
from megaprec.precision.plan import TORCH_DTYPES, PrecisionPlan, dtype_name
from megaprec.torch_private import StatisticsNorm

HALVES = (torch.float16, torch.bfloat16)


class NaiveAMPModel(nn.Module):
    """A wrapper that runs `model` in `dtype`: its parameters, floating-point buffers and FP32
    inputs are cast.

    output_to_fp32: half-precision outputs are cast to FP32.
    parallel_mode: the ranks over which buffers are averaged: an `Axis`, a process group, a
        DeviceMesh of one dim, or a `ParallelMode`, InternEvo's own member or its name. A mode is
        looked up on `mesh`; without a mesh, DATA means the whole world, provided that the world was
        never split into groups.
    sync_buffer: floating-point and complex buffers are averaged over these ranks before each
        forward pass in training and before the first forward pass after `eval()`. Integer buffers
        are unchanged.
    dtype: torch.float16, bfloat16 or float32, or InternEvo's string for it. "torch.tf32" means FP32
        and also allows TF32 in this process from then on.

    Casts `model` in place. A module marked by `set_fp32_attr_to_module` keeps the values of its
    parameters and buffers, gets floating-point inputs in FP32, and its FP32 outputs are cast to
    `dtype`. Raises UserError for another dtype or kind of argument, and if the ranks over which to
    average buffers are not known.
    """

    casts_itself_by_megaprec = True

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
        require_module(model, "model")
        for name, value in (("output_to_fp32", output_to_fp32), ("sync_buffer", sync_buffer)):
            if not isinstance(value, bool):
                raise UserError.of("precision.not_a_bool", name=name, value=value)
        if mesh is not None and not isinstance(mesh, DeviceMesh):
            raise UserError.of("precision.not_a_mesh", mesh=mesh)
        self.model = model
        self.output_to_fp32 = output_to_fp32
        self.dtype = _use_dtype(dtype)
        self._group = known_group(parallel_mode, mesh)
        self._mesh = mesh
        self.sync_buffer = sync_buffer  # its setter finds the ranks, from the model, group and mesh
        self._first_eval = False  # True from `eval()` to the first forward pass after it
        _cast_tensors(model, self.dtype, self.dtype)
        _install_casts_at_marked(model, self.dtype)
        note_cast(self)

    @property
    def sync_buffer(self) -> bool:
        """Return True if buffers are averaged; False also if the group has only this rank."""
        return bool(self._axes)

    @sync_buffer.setter
    def sync_buffer(self, on: bool) -> None:
        self._axes = axes_of(self._group, self._mesh, self.model) if on else ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Average the buffers if their time has come, and return what the model returns for inputs
        in its dtype, in FP32 if that was asked for."""
        if self.training or self._first_eval:
            average_buffers(self.model, *self._axes)
            self._first_eval = False
        # InternEvo casts FP32 alone: half-precision inputs keep their dtype
        args, kwargs = cast_dtypes((args, kwargs), (torch.float32,), self.dtype)
        outputs = self.model(*args, **kwargs)
        if self.output_to_fp32:
            return cast_dtypes(outputs, HALVES, torch.float32)
        return outputs

    def train(self, mode: bool = True) -> Self:
        """Set the wrapper and the model to training or evaluation mode, and return the wrapper."""
        self._first_eval = not mode
        return super().train(mode)


class PlannedModel(nn.Module):
    """A wrapper that casts the parameters, buffers, inputs and outputs of `model` to the dtypes of
    a plan.

    A module stays in FP32 if a pattern of `plan.keep_fp32` matches the path of one of its
    parameters. Casts `model` in place. Raises UserError for a pattern that matches no parameter,
    for a plan whose parameters are wider than its compute dtype (use torch.autocast for that), for
    a plan with FP8 if no layer of `model` could compute in it, and for a batch norm whose 16-bit
    weights torch does not compute beside statistics in FP32.
    """

    casts_itself_by_megaprec = True

    def __init__(self, model: nn.Module, plan: PrecisionPlan) -> None:
        super().__init__()
        require_module(model, "model")
        if not isinstance(plan, PrecisionPlan):
            raise UserError.of("precision.not_a_plan", plan=plan)
        if plan.parameters != plan.compute:
            raise UserError.of("precision.parameters_wider")
        if plan.fp8 is not None and not _has_parallel_layers(model):
            raise UserError.of(
                "precision.fp8_only_casts", fp8_kind=plan.fp8.kind, model_kind=type(model).__name__
            )
        names = [name for name, _ in model.named_parameters()]
        matches = match_patterns(plan.keep_fp32, names)
        if unused := list(unmatched_problems("keep_fp32", plan.keep_fp32, matches, names)):
            raise UserError(*unused)
        self.model = model
        self.plan = plan
        # marks first: the casts below leave marked modules in FP32
        mark_fp32(model, plan.keep_fp32)
        _keep_statistics(model, plan)
        _cast_tensors(model, plan.parameters, plan.buffers)
        _install_casts_at_marked(model, plan.compute)
        if plan.cast_inputs in ("inner", "all"):
            for module in model.modules():
                if module is not model and _has_own_parameters(module):
                    module.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
        note_cast(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.plan.cast_inputs in ("root", "all"):
            args, kwargs = cast_floating((args, kwargs), self.plan.compute)
        outputs = self.model(*args, **kwargs)
        return cast_floating(outputs, self.plan.output)


@torch.no_grad()
def average_buffers(module: nn.Module, *axes: Axis) -> None:
    """Replace every floating-point or complex buffer in `module` by its mean over the ranks of all
    `axes`.

    The sum is in FP32, or in FP64 if a buffer is FP64. Collective over each axis; its ranks must
    have the same buffers.
    """
    buffers: list[Tensor] = []
    for buffer in module.buffers():
        if buffer.is_complex():
            buffers.append(torch.view_as_real(buffer))  # a view: the mean is written through it
        elif buffer.is_floating_point():
            buffers.append(buffer)
    if not axes or not buffers:
        return
    dtypes = {buffer.dtype for buffer in buffers}
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    packed = torch.cat([buffer.reshape(-1).to(wide) for buffer in buffers])
    for axis in axes:
        axis.sum_(packed.div_(axis.size))  # divided first, so that the sum cannot overflow
    means = packed.split([buffer.numel() for buffer in buffers])
    for buffer, mean in zip(buffers, means, strict=True):
        buffer.copy_(mean.view_as(buffer))


def _use_dtype(dtype: object) -> torch.dtype:
    """Return `dtype`, which may be InternEvo's string for it, as a torch dtype.

    For "torch.tf32", set torch's TF32 switches and return FP32. Raises UserError for any other
    dtype.
    """
    name = dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
    by_name = {**TORCH_DTYPES, "tf32": torch.float32}
    known = by_name.get(name, dtype)
    if known not in (*HALVES, torch.float32):
        strings = ", ".join(f"torch.{string}" for string in by_name)
        raise UserError.of("precision.dtype_argument", dtype=dtype, strings=strings)
    if name == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    assert isinstance(known, torch.dtype)
    return known


def _keep_statistics(model: nn.Module, plan: PrecisionPlan) -> None:
    """Let batch norms work under a plan whose buffers are wider than its parameters: torch computes
    no 16-bit weights beside FP32 statistics.

    Those without weights are marked to stay in FP32. Raises UserError for the others that are not
    marked.
    """
    if plan.parameters == plan.buffers:
        return
    # marked modules already keep weights and statistics together
    marked_modules: set[nn.Module] = set()
    for _, outermost in outermost_marked(model):
        marked_modules |= set(outermost.modules())
    problems: list[Problem] = []
    for path, module in model.named_modules():
        if not isinstance(module, StatisticsNorm) or module.running_mean is None:
            continue
        if module in marked_modules:
            continue
        if not module.affine:  # without weights a mark changes no parameter's dtype
            set_fp32_attr_to_module(module)
            continue
        pattern = f"{path}.*" if path else "*"
        problems.append(
            Problem.of(
                "precision.batch_norm",
                module=path or "the model",
                module_kind=type(module).__name__,
                parameters=dtype_name(plan.parameters),
                buffers=dtype_name(plan.buffers),
                sensitive=dtype_name(plan.sensitive),
                pattern=pattern,
            )
        )
    if problems:
        raise UserError(*problems)


def _has_parallel_layers(model: nn.Module) -> bool:
    """Return True if a module holds a `GemmProvider`, by which the parallel layers compute their
    products."""
    for module in model.modules():
        # by a method that nothing else has: a protocol cannot be asked for
        if any(hasattr(value, "weight_gradient") for value in vars(module).values()):
            return True
    return False


def _has_own_parameters(module: nn.Module) -> bool:
    """Return True if the module itself has a parameter, not only modules in it."""
    return next(module.parameters(recurse=False), None) is not None


def _cast_tensors(model: nn.Module, parameters: torch.dtype, buffers: torch.dtype) -> None:
    """Cast floating-point parameters and buffers; those of a marked module become FP32, even if
    shared with others."""
    # by identity: a parameter that is shared with a marked module is listed under other names
    of_marked: set[int] = set()
    for _, module in outermost_marked(model):
        marked_tensors = (*module.parameters(), *module.buffers())
        of_marked |= {id(tensor) for tensor in marked_tensors}
    dtypes: list[tuple[Tensor, torch.dtype]] = []
    dtypes += [(parameter, parameters) for parameter in model.parameters()]
    dtypes += [(buffer, buffers) for buffer in model.buffers()]
    for tensor, dtype in dtypes:
        if tensor.is_floating_point():
            new_dtype = torch.float32 if id(tensor) in of_marked else dtype
            # in place, so that whoever holds the parameter, an optimizer too, sees it cast
            tensor.data = tensor.data.to(new_dtype)


def _install_casts_at_marked(model: nn.Module, dtype: torch.dtype) -> None:
    """Install casts of the inputs and outputs of the outermost marked modules."""
    for _, module in outermost_marked(model):
        compute_in_fp32(module, lambda _: dtype)
    note_cast(model)


def _cast_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cast the inputs of a module to the dtype of its first parameter, before its forward pass."""
    dtype = next(module.parameters(recurse=False)).dtype
    return cast_floating((args, kwargs), dtype)
