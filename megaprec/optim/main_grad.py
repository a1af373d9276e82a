"""Where the gradients of a parameter are summed over the micro-batches of a step: `main_grad`, its view of a buffer.

Nothing clears that memory between steps, for that would be one more trip over all of it. The first gradient of a step
is written over what the last step left there, the others are added. Who adds in a way that does not cover all of it, as
to some rows of a table, has it cleared first; and what no gradient came for is cleared before it is summed over ranks.

`parameter.grad`, where autograd puts gradients, is empty but within a backward pass. Whoever looks there in between, to
clip or to unscale, would find nothing and go on with a norm of 0; a `Guarded` parameter says so instead.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megaprec.comm.layout import layout_of
from megaprec.errors import UserError

_grad: Any = torch.Tensor.grad  # autograd's place, whatever a class puts before it


class Guarded(nn.Parameter):
    """A parameter whose `grad` raises UserError while its gradients of this step are in `main_grad`."""

    @property
    def grad(self) -> Tensor | None:
        if has_gradient(self):
            name = layout_of(self).parts[0].name
            raise UserError(
                f"{name}.grad is empty, for ParallelAMPOptimizer has taken the gradient: the optimizer clips by itself "
                "(clip=), scales the loss (loss * optimizer.scale, no torch.amp.GradScaler), reports the norm (step) "
                "and clears (optimizer.zero_grad); the sum on this rank, still scaled, is in main_grad"
            )
        return _grad.__get__(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        _grad.__set__(self, None)


def collect(parameter: nn.Parameter, main: Tensor) -> None:
    """From now on gradients of the parameter go into `main`, of its shape; what an earlier backward pass has left is
    the first of them."""
    parameter.main_grad = main  # type: ignore[attr-defined]
    parameter.megaprec_given = False  # type: ignore[attr-defined]
    parameter.register_post_accumulate_grad_hook(accumulate_autograd_grad)
    accumulate_autograd_grad(parameter)
    if type(parameter) is nn.Parameter:
        parameter.__class__ = Guarded


def has_main_grad(parameter: nn.Parameter) -> bool:
    """Whether gradients of the parameter go into a buffer, and not to autograd."""
    return getattr(parameter, "main_grad", None) is not None


def has_gradient(parameter: nn.Parameter) -> bool:
    """Whether `main_grad` holds gradients of this step."""
    return getattr(parameter, "megaprec_given", False)


def begin_accumulation(parameter: nn.Parameter) -> tuple[Tensor, bool]:
    """`main_grad`, and whether a gradient that goes there now is the first of the step and has to be written over what
    is there. From now on the parameter has a gradient."""
    first = not has_gradient(parameter)
    parameter.megaprec_given = True  # type: ignore[attr-defined]
    return parameter.main_grad, first  # type: ignore[attr-defined]


def cleared(parameter: nn.Parameter) -> Tensor:
    """`main_grad` with this step's gradients alone, to add to. From now on the parameter has a gradient."""
    main, first = begin_accumulation(parameter)
    return main.zero_() if first else main


def accumulate_autograd_grad(parameter: nn.Parameter) -> None:
    """Takes in a gradient that autograd made itself; what layers of ours have added themselves left none."""
    if (grad := _grad.__get__(parameter)) is not None:
        main, first = begin_accumulation(parameter)
        main.copy_(grad) if first else main.add_(grad)
        parameter.grad = None


def zero_missing_grads(parameters: Iterable[nn.Parameter]) -> None:
    """Takes in what was put into `grad` by hand, and clears what no gradient of this step came for, without counting
    it as a gradient."""
    for parameter in parameters:
        accumulate_autograd_grad(parameter)
        if not has_gradient(parameter):
            parameter.main_grad.zero_()  # type: ignore[attr-defined]


def reset_accumulation(parameters: Iterable[nn.Parameter]) -> None:
    """Begins a new step."""
    for parameter in parameters:
        parameter.megaprec_given = False  # type: ignore[attr-defined]
        parameter.grad = None
