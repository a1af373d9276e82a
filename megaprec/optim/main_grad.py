"""Main gradients: the sum of a parameter's gradients over the micro-batches of a step, in a view of a buffer.

The `main_grad` memory is not cleared between steps, which would cost one more pass over all of it. The first gradient
of a step overwrites the old values, and later ones are added. Code that adds to only some elements, for instance to
some rows of a table, has the view cleared first; and the views of parameters that received no gradient are cleared
before gradients are reduced over ranks.

`parameter.grad`, the destination of autograd's gradients, is empty outside a backward pass. Code that reads it there,
to clip or to unscale, would find nothing and continue with a norm of 0; a `Guarded` parameter raises an error instead.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megaprec.comm.layout import layout_of
from megaprec.errors import UserError

_grad: Any = torch.Tensor.grad  # autograd's own attribute, even if a subclass overrides `grad`


class Guarded(nn.Parameter):
    """A parameter whose `grad` raises UserError while its gradients of this step are in `main_grad`."""

    @property
    def grad(self) -> Tensor | None:
        if has_gradient(self):
            name = layout_of(self).parts[0].name
            raise UserError(
                f"{name}.grad is empty, because ParallelAMPOptimizer has taken the gradient: the optimizer clips by "
                "itself (clip=), scales the loss (loss * optimizer.scale, no torch.amp.GradScaler), reports the norm "
                "(step) and clears (optimizer.zero_grad); the sum on this rank, still scaled, is in main_grad"
            )
        return _grad.__get__(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        _grad.__set__(self, None)


def collect(parameter: nn.Parameter, main: Tensor) -> None:
    """Accumulate all later gradients of the parameter in `main`, which has the parameter's shape.

    A gradient that an earlier backward pass has left in `grad` is accumulated first.
    """
    parameter.main_grad = main  # type: ignore[attr-defined]
    parameter.megaprec_given = False  # type: ignore[attr-defined]
    parameter.register_post_accumulate_grad_hook(accumulate_autograd_grad)
    accumulate_autograd_grad(parameter)
    if type(parameter) is nn.Parameter:
        parameter.__class__ = Guarded


def has_main_grad(parameter: nn.Parameter) -> bool:
    """Return True if gradients of the parameter accumulate in a buffer, and not in `grad`."""
    return getattr(parameter, "main_grad", None) is not None


def has_gradient(parameter: nn.Parameter) -> bool:
    """Return True if `main_grad` holds gradients of this step."""
    return getattr(parameter, "megaprec_given", False)


def set_gradient(parameter: nn.Parameter, given: bool) -> None:
    """Mark the parameter as having a gradient in `main_grad` or none; the next gradient then overwrites the view."""
    parameter.megaprec_given = given  # type: ignore[attr-defined]


def begin_accumulation(parameter: nn.Parameter) -> tuple[Tensor, bool]:
    """Return `main_grad`, and True if the next gradient is the first of the step and must overwrite the old values.

    The parameter is marked as having a gradient.
    """
    first = not has_gradient(parameter)
    parameter.megaprec_given = True  # type: ignore[attr-defined]
    return parameter.main_grad, first  # type: ignore[attr-defined]


def cleared(parameter: nn.Parameter) -> Tensor:
    """Return `main_grad`, to add to, cleared of values of earlier steps. Mark the parameter as having a gradient."""
    main, first = begin_accumulation(parameter)
    return main.zero_() if first else main


def accumulate_autograd_grad(parameter: nn.Parameter) -> None:
    """Move a gradient from autograd's `grad` to `main_grad`. Layers that accumulate by themselves leave no `grad`."""
    if (grad := _grad.__get__(parameter)) is not None:
        main, first = begin_accumulation(parameter)
        main.copy_(grad) if first else main.add_(grad)
        parameter.grad = None


def zero_missing_grads(parameters: Iterable[nn.Parameter]) -> None:
    """Accumulate gradients that were assigned to `grad`, and clear `main_grad` where no gradient of this step arrived.

    A cleared `main_grad` does not count as a gradient.
    """
    for parameter in parameters:
        accumulate_autograd_grad(parameter)
        if not has_gradient(parameter):
            parameter.main_grad.zero_()  # type: ignore[attr-defined]


def reset_accumulation(parameters: Iterable[nn.Parameter]) -> None:
    """Mark the parameters as having no gradient, to begin a new step."""
    for parameter in parameters:
        parameter.megaprec_given = False  # type: ignore[attr-defined]
        parameter.grad = None
