"""Where the gradients of a parameter are summed over the micro-batches of a step: `main_grad`, its view of a buffer.

Nothing clears that memory between steps, for that would be one more trip over all of it. The first gradient of a step
is written over what the last step left there, the others are added. Who adds in a way that does not cover all of it, as
to some rows of a table, has it cleared first; and what no gradient came for is cleared before it is summed over ranks.
"""

from collections.abc import Iterable

from torch import Tensor, nn


def has_main_gradient(parameter: nn.Parameter) -> bool:
    """Whether gradients of the parameter go into a buffer, and not to autograd."""
    return getattr(parameter, "main_grad", None) is not None


def is_given(parameter: nn.Parameter) -> bool:
    """Whether `main_grad` holds gradients of this step."""
    return getattr(parameter, "megaprec_given", False)


def given(parameter: nn.Parameter) -> tuple[Tensor, bool]:
    """`main_grad`, and whether a gradient that goes there now is the first of the step and has to be written over what
    is there. It counts as given from now on."""
    first = not is_given(parameter)
    parameter.megaprec_given = True  # type: ignore[attr-defined]
    return parameter.main_grad, first  # type: ignore[attr-defined]


def cleared(parameter: nn.Parameter) -> Tensor:
    """`main_grad` with this step's gradients alone, to add to. It counts as given from now on."""
    main, first = given(parameter)
    return main.zero_() if first else main


def take(parameter: nn.Parameter) -> None:
    """Takes in a gradient that autograd made itself; what layers of ours have added themselves left none."""
    if parameter.grad is not None:
        main, first = given(parameter)
        main.copy_(parameter.grad) if first else main.add_(parameter.grad)
        parameter.grad = None


def complete(parameters: Iterable[nn.Parameter]) -> None:
    """Clears what no gradient of this step came for, without counting it as given."""
    for parameter in parameters:
        if not is_given(parameter):
            parameter.main_grad.zero_()  # type: ignore[attr-defined]


def forget(parameters: Iterable[nn.Parameter]) -> None:
    """Begins a new step."""
    for parameter in parameters:
        parameter.megaprec_given = False  # type: ignore[attr-defined]
