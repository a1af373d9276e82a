"""Trace of the first inf or NaN: hooks that check all tensors that pass through a tree of modules.

    with Trace(model) as trace:
        loss = model(x).mean()
        trace.look("loss", loss)
        loss.backward()
    print(trace.found)

In the forward pass every module's inputs and outputs are checked, and in the backward pass the
gradients of both and of its own parameters. The first tensor that is not finite tells where the inf
or NaN arose. If it is an output, or the gradient of an input, it arose in that module, because the
module's own inputs were still finite. If it is an input, or the gradient of an output, it arose in
the calling module, between its submodules. The trace works for any module: outputs may be nested,
gradients may be in `grad` or in `main_grad`. Each tensor is checked immediately, which is slow:
trace a single micro-batch, not a whole training run.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megaprec.comm.main_grad import gradient_of_step, has_main_grad
from megaprec.diagnose.module_trace import trace_modules
from megaprec.precision.nested import map_tensors, tensors


@dataclass(frozen=True)
class CheckedTensor:
    """A tensor that was checked: its description and its largest finite magnitude."""

    what: str
    largest: float


@dataclass(frozen=True)
class NonfiniteFinding:
    """The first tensor that was not finite.

    module: dotted path of the module in which it arose, "" for the whole model; None if outside the
        model: in its inputs, or in a computation on its output. kind: the module's class.
    parameters: names of the module's own parameters; logical names if they have a layout.
    what: description of the tensor. dtype: the dtype in which the tensor was computed; for a
        parameter's gradient the dtype of the parameter, in which its product is computed, not the
        dtype of accumulation.
    infs, nans: how many of its `elements` are inf and NaN. largest: the largest magnitude of the
        other elements.
    given: the largest magnitude that entered the module: of its inputs or, in the backward pass, of
        its output's gradient.
    """

    module: str | None
    kind: str
    parameters: tuple[str, ...]
    what: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    infs: int
    nans: int
    elements: int
    largest: float
    given: float


class Trace(AbstractContextManager["Trace"]):
    """Context manager that traces `model` during one forward and, optionally, one backward pass.

    found: the first tensor that was not finite, None so far. seen: all tensors before it, in order.
    The gradients of the parameters must be zero or None at the beginning. The trace does not change
    any number.
    """

    def __init__(self, model: nn.Module) -> None:
        self.found: NonfiniteFinding | None = None
        self.seen: list[CheckedTensor] = []
        self._modules = dict(model.named_modules())
        self._running: list[str] = []  # paths of the modules that have been entered and not left
        self._entering: dict[str, float] = {}  # by path: the largest magnitude that entered
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> "Trace":
        hooks = trace_modules(self._modules, self._check_outputs, self._check_inputs, self._running)
        self._hooks += hooks
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        # gradients of parameters that no hook has looked at
        if error is None:
            for module_path in self._modules:
                self._look_at_parameters(module_path)

    def look(
        self,
        description: str,
        tensor: Tensor,
        module: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> float:
        """Check a tensor that was computed in `module`, by default outside, and return its largest
        finite magnitude.

        dtype: the dtype in which it was computed, if that is not its own.
        """
        detached_values = tensor.detach()
        finite = detached_values.isfinite()
        largest = 0.0
        # an empty tensor has no maximum
        if detached_values.numel():
            largest = detached_values.where(finite, 0).abs().max().item()
        # only what comes before the first finding is kept
        if self.found is None and finite.all():
            self.seen.append(CheckedTensor(description, largest))
        elif self.found is None:
            self.found = self._finding(
                description,
                detached_values,
                largest,
                module,
                dtype or detached_values.dtype,
            )
        return largest

    def _finding(
        self,
        description: str,
        detached_values: Tensor,
        largest: float,
        module_path: str | None,
        dtype: torch.dtype,
    ) -> NonfiniteFinding:
        """Return the finding about a tensor that is not finite. largest: its largest finite
        magnitude. The other arguments are those of `look`, with the path of the module."""
        module = self._modules.get(module_path) if module_path is not None else None
        parameters: tuple[str, ...] = ()
        # of the module's inputs, in a backward pass of its output's gradient
        entering = 0.0
        if module_path is not None:
            parameters = tuple(name for name, _ in self._parameters(module_path))
            entering = self._entering.get(module_path, 0.0)
        return NonfiniteFinding(
            module=module_path,
            kind="" if module is None else type(module).__name__,
            parameters=parameters,
            what=description,
            shape=tuple(detached_values.shape),
            dtype=dtype,
            infs=int(detached_values.isinf().sum()),
            nans=int(detached_values.isnan().sum()),
            elements=detached_values.numel(),
            largest=largest,
            given=entering,
        )

    def _caller(self) -> str | None:
        """Return the path of the module that calls the present one; None outside of the model."""
        return self._running[-1] if self._running else None

    def _check_inputs(
        self, module_path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the inputs of a module before its forward pass; return them as views whose
        gradients are checked too."""
        largest = 0.0
        for tensor in _floating_inputs((args, kwargs)):
            # an inf or NaN in an input arose in the calling module
            magnitude = self.look(f"input of {_describe(module_path)}", tensor, self._caller())
            largest = max(largest, magnitude)
        self._entering[module_path] = largest
        watch = partial(self._watch, hook=partial(self._check_input_gradient, module_path))
        return map_tensors(args, watch), map_tensors(kwargs, watch)

    def _check_outputs(self, module_path: str, output: Any) -> Any:
        """Check the outputs of a module after its forward pass; return them as views whose
        gradients are checked too."""
        for tensor in filter(Tensor.is_floating_point, tensors(output)):
            self.look(f"output of {_describe(module_path)}", tensor, module_path)
        check = partial(self._check_output_gradient, module_path, self._caller())
        return map_tensors(output, partial(self._watch, hook=check))

    def _watch(self, tensor: Tensor, hook: Callable[[Tensor], None]) -> Tensor:
        """Return a view of the tensor with a gradient hook. A view, because the tensor may be used
        elsewhere too."""
        has_gradient = tensor.requires_grad and torch.is_grad_enabled()
        if not has_gradient or isinstance(tensor, nn.Parameter):
            return tensor
        # the hook of a view sees the gradient of this use alone
        view = tensor.view_as(tensor)
        self._hooks.append(view.register_hook(hook))
        return view

    def _check_output_gradient(
        self, module_path: str, caller: str | None, gradient: Tensor
    ) -> None:
        """Check the gradient of a module's output, after the gradients of its caller's own
        parameters."""
        # By now the backward pass has computed what the caller did after this module.
        if caller is not None:
            self._look_at_parameters(caller)
        largest = self.look(f"gradient of the output of {_describe(module_path)}", gradient, caller)
        self._entering[module_path] = largest

    def _check_input_gradient(self, module_path: str, gradient: Tensor) -> None:
        self._look_at_parameters(module_path)
        self.look(f"gradient of the input of {_describe(module_path)}", gradient, module_path)

    def _look_at_parameters(self, module_path: str) -> None:
        """Check the gradients of a module's own parameters."""
        for parameter_name, parameter in self._parameters(module_path):
            if has_main_grad(parameter):  # beside main_grad, reading grad may raise
                gradient = gradient_of_step(parameter)
            else:
                gradient = parameter.grad
            # after the first finding nothing else is kept, so nothing else is read
            if gradient is None or self.found is not None:
                continue
            if not gradient.isfinite().all():
                self.look(f"gradient of {parameter_name}", gradient, module_path, parameter.dtype)

    def _parameters(self, module_path: str) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield name and parameter of a module's own parameters."""
        module = self._modules[module_path]
        for parameter_name, parameter in module.named_parameters(module_path, recurse=False):
            layout = getattr(parameter, "megaprec_layout", None)
            # the parallel layers' parameters have names that do not depend on the layout
            if layout is not None:
                parameter_name = " + ".join(part.name for part in layout.parts)
            yield parameter_name, parameter


def _describe(module_path: str) -> str:
    return module_path or "the model"


def _floating_inputs(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point inputs of a module; scalars without gradient, such as the loss
    scale, are left out."""
    for tensor in tensors(value):
        if tensor.is_floating_point() and (tensor.dim() or tensor.requires_grad):
            yield tensor
