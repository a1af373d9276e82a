"""Main gradients: the sum of a parameter's gradients over the micro-batches of a step, in a view of
a buffer.

The `main_grad` memory is not cleared between steps, which would cost one more pass over all of it.
The first gradient of a step overwrites the old values, and later ones are added. Code that adds to
only some elements, for instance to some rows of a table, has the view cleared first; and the views
of parameters that received no gradient are cleared before gradients are reduced over ranks.

`parameter.grad`, the destination of autograd's gradients, is empty outside a backward pass. Code
that reads it there, to clip or to unscale, would find nothing and continue with a norm of 0; code
that discards or replaces it would do so in vain. A `GuardedParameter` raises an error instead.

Under ZeRO-2 the memory behind `main_grad` comes with the first gradient of a micro-batch and goes
when gradients have been reduced. Between the two `main_grad` is no tensor but an `AbsentGradient`,
which has a shape and a dtype, and raises an error in place of a view that values could be written
to or read from by mistake. `begin_accumulation` gives `main_grad` its memory.

Layers add gradients to `main_grad` by themselves, in the backward pass of an autograd function.
`destination` says whether they may: `torch.autograd.grad` runs the same function, but asks for
other gradients or wants them returned.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from threading import Thread, current_thread
from types import new_class
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from megaprec.comm.layout import has_layout, layout_of
from megaprec.errors import UserError
from megaprec.torch_private import (
    backward_pass_executes,
    has_hooks,
    num_writes,
    without_torch_function,
)

_autograd_grad: Any = torch.Tensor.grad  # autograd's own, even if a subclass overrides `grad`


class Destination(Enum):
    """The place of a parameter's gradient that a layer computes in its own backward function."""

    MAIN = "it is added to main_grad"
    AUTOGRAD = "it is returned to autograd"
    NOWHERE = "nobody asked for it"


@dataclass
class GradientSlot:
    """The state of a parameter's `main_grad` in a step.

    make_room: gives `main_grad` its memory; None if it has it for good.
    has_gradient: it holds gradients of this step, to which the next one is added.
    taken: gradients of this step were taken out of it (`take_gradients`), under ZeRO-2.
    closed: the last sum over the ranks of this step has begun, so that no gradient may come.
    thread: that has added to it in this step; None before the first.
    several_threads: another thread, which still ran, has added to it too.
    """

    make_room: Callable[[], None] | None = None
    has_gradient: bool = False
    taken: bool = False
    closed: bool = False
    thread: Thread | None = None
    several_threads: bool = False


def _slot(parameter: nn.Parameter) -> GradientSlot:
    """Return the slot of a parameter, which has one from its first gradient on at the latest."""
    try:
        return parameter.megaprec_gradient_slot  # type: ignore[attr-defined]
    except AttributeError:
        slot = GradientSlot()
        parameter.megaprec_gradient_slot = slot  # type: ignore[attr-defined]
        return slot


class AbsentGradient:
    """Stands for the `main_grad` of a parameter while that has no memory.

    name: the parameter's. Raises UserError for anything but its shape and its dtype.
    """

    def __init__(self, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype

    def __getattr__(self, attribute: str) -> NoReturn:
        # Python and torch ask objects for what these may have, and take no for an answer.
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise UserError.of("optimizer.gradient_without_memory", name=self.name)


class GuardedParameter(nn.Parameter):
    """A parameter whose `grad` raises UserError while its gradients of this step are in
    `main_grad`."""

    @property
    def grad(self) -> Tensor | None:
        if received_gradient(self):
            name = layout_of(self).parts[0].name
            raise UserError.of("optimizer.grad_is_taken", name=name)
        return _autograd_grad.__get__(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _require_none_of_this_step(self)
        _autograd_grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        _require_none_of_this_step(self)
        _autograd_grad.__set__(self, None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle an ordinary parameter with its layout: a copy's gradients are not those of the
        optimizer.

        A parameter that `copy.deepcopy` has made has no layout.
        """
        plain = nn.Parameter(self.detach(), self.requires_grad)
        if has_layout(self):
            plain.megaprec_layout = layout_of(self)  # type: ignore[attr-defined]
        return plain.__reduce_ex__(protocol)


def _require_none_of_this_step(parameter: nn.Parameter) -> None:
    """Raise UserError for a gradient that `grad` would neither discard nor replace."""
    if received_gradient(parameter):
        name = layout_of(parameter).parts[0].name
        raise UserError.of("optimizer.grad_beside_main_grad", name=name)


def attach_main_grad(
    parameter: nn.Parameter,
    main: Tensor | AbsentGradient,
    make_room: Callable[[], None] | None = None,
) -> None:
    """Accumulate all later gradients of the parameter in `main`, which has the parameter's shape.

    A gradient that an earlier backward pass has left in `grad` is accumulated first.
    make_room: called before each gradient is accumulated, to give `main_grad` its memory; None if
        `main` has it for good.
    """
    parameter.main_grad = main  # type: ignore[attr-defined]
    parameter.megaprec_gradient_slot = GradientSlot(make_room)  # type: ignore[attr-defined]
    parameter.register_post_accumulate_grad_hook(_accumulate_in_thread)
    accumulate_autograd_grad(parameter)
    if not isinstance(parameter, GuardedParameter):
        parameter.__class__ = _guarded_class(type(parameter))


@cache
def _guarded_class(parameter_class: type[nn.Parameter]) -> type[GuardedParameter]:
    """Return the class of guarded parameters of this class, which may be a user's own."""
    if parameter_class is nn.Parameter:
        return GuardedParameter
    name = f"Guarded{parameter_class.__name__}"
    return new_class(name, (GuardedParameter, parameter_class))


def has_main_grad(parameter: nn.Parameter) -> bool:
    """Return True if gradients of the parameter accumulate in a buffer, and not in `grad`."""
    return getattr(parameter, "main_grad", None) is not None


def destination(ctx: Any, number: int, parameter: nn.Parameter) -> Destination:
    """Return where the backward function of `ctx` is to put the gradient of a parameter.

    number: of the parameter among those arguments that are tensors. Raises UserError for what a
    gradient that is added to `main_grad` cannot be: seen by a hook, or differentiated.
    """
    node, _ = ctx.next_functions[number]
    return _destination_of(node, parameter)


def destinations(
    ctx: Any,
    first: int,
    parameters: Sequence[nn.Parameter],
) -> list[Destination]:
    """Return the `destination` of each of several parameters.

    first: the number of the first one; the others follow.
    """
    next_functions = ctx.next_functions  # read once: torch makes the whole tuple each time
    places: list[Destination] = []
    for number, parameter in enumerate(parameters, first):
        node, _ = next_functions[number]
        places.append(_destination_of(node, parameter))
    return places


def _destination_of(node: Any, parameter: nn.Parameter) -> Destination:
    """Return the `destination` of a parameter, whose gradient autograd gives to `node`."""
    if not parameter.requires_grad:
        return Destination.NOWHERE
    if not has_main_grad(parameter):
        return Destination.AUTOGRAD
    try:
        if node is None or not backward_pass_executes(node):
            return Destination.NOWHERE
    except RuntimeError:
        # how torch says that the gradient of a leaf is to be returned by torch.autograd.grad
        return Destination.AUTOGRAD
    if has_hooks(parameter):
        raise UserError.of("optimizer.hook_never_called", name=layout_of(parameter).parts[0].name)
    # a backward pass has gradients enabled only under create_graph=True
    if torch.is_grad_enabled():
        raise UserError.of("optimizer.second_derivative", name=layout_of(parameter).parts[0].name)
    return Destination.MAIN


def note_weights_read(ctx: Any, *weights: Tensor) -> None:
    """Note in the forward pass that the backward pass of `ctx` reads these weights too, which must
    be the same then."""
    ctx.weights_read = [
        (weight, num_writes(weight)) for weight in weights if not weight.is_inference()
    ]


def require_unchanged_weights(ctx: Any) -> None:
    """Raise UserError if weights that the forward pass read were changed since: the gradient would
    be of neither.

    autograd looks at the versions of what it saves for a layer of torch; layers that read weights
    by themselves do so. A gather of ZeRO-3 is no write: it fills flat memory, whose version is not
    that of its parameters.
    """
    for weight, version in ctx.weights_read:
        if num_writes(weight) != version:
            name = layout_of(weight).parts[0].name if has_layout(weight) else "a weight"
            raise UserError.of("optimizer.weight_changed_before_backward", name=name)


def has_gradient(parameter: nn.Parameter) -> bool:
    """Return True if `main_grad` holds gradients of this step, to which the next one is added."""
    slot: GradientSlot | None = getattr(parameter, "megaprec_gradient_slot", None)
    return slot is not None and slot.has_gradient


def received_gradient(parameter: nn.Parameter) -> bool:
    """Return True if gradients of this step are in `main_grad`, or were taken out of it."""
    slot: GradientSlot | None = getattr(parameter, "megaprec_gradient_slot", None)
    return slot is not None and (slot.has_gradient or slot.taken)


def forget_gradient(parameter: nn.Parameter) -> None:
    """Mark the parameter as having no gradient in `main_grad`: the next one overwrites the view."""
    _forget(_slot(parameter))


def _forget(slot: GradientSlot) -> None:
    slot.has_gradient = False
    slot.thread = None
    slot.several_threads = False


def mark_gradient(parameter: nn.Parameter) -> None:
    """Mark the parameter as having the gradient of this step that was written to `main_grad`.

    Raises UserError if that has no memory.
    """
    main_grad: Tensor | AbsentGradient = parameter.main_grad  # type: ignore[attr-defined]
    if isinstance(main_grad, AbsentGradient):
        raise UserError.of("optimizer.gradient_without_memory", name=main_grad.name)
    _slot(parameter).has_gradient = True


def take_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Mark the gradients in the parameters' `main_grad` as taken out of it, within the step: the
    next ones overwrite the views."""
    for parameter in parameters:
        if has_gradient(parameter):
            _slot(parameter).taken = True
            forget_gradient(parameter)


def main_grad_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype in which gradients of the parameter accumulate, which is known before they
    have memory."""
    main_grad: Tensor | AbsentGradient = parameter.main_grad  # type: ignore[attr-defined]
    return main_grad.dtype


def gradient_of_step(parameter: nn.Parameter) -> Tensor | None:
    """Return the sum of the gradients of this step so far, in `main_grad`; None if there is none,
    whatever an earlier step has left there."""
    return parameter.main_grad if has_gradient(parameter) else None  # type: ignore[attr-defined]


def begin_accumulation(parameter: nn.Parameter) -> tuple[Tensor, bool]:
    """Return `main_grad`, and True if the next gradient is the first of the step and must overwrite
    the old values.

    The parameter is marked as having a gradient. Raises UserError if the sum over the ranks of its
    gradients has begun, and if another thread has added to it.
    """
    slot = _slot(parameter)
    if slot.closed:
        raise UserError.of(
            "optimizer.gradient_after_reduction", name=layout_of(parameter).parts[0].name
        )
    _require_one_thread(parameter, slot)
    if slot.make_room is not None:
        slot.make_room()
    is_first = not slot.has_gradient
    slot.has_gradient = True
    return parameter.main_grad, is_first  # type: ignore[attr-defined]


def begin_cleared(parameter: nn.Parameter) -> Tensor:
    """Return `main_grad`, to add to, cleared of values of earlier steps. Mark the parameter as
    having a gradient."""
    main_grad, is_first = begin_accumulation(parameter)
    return main_grad.zero_() if is_first else main_grad


def watch_gradient(parameter: nn.Parameter, on_gradient: Callable[[], None]) -> object:
    """Call a function whenever a backward pass has finished the gradient of a parameter; return an
    object that must be kept as long as it is to be called."""
    # The node that accumulates a leaf's gradient is found behind any use of the leaf. autograd
    # executes it even if a layer returned no gradient, because it has added to `main_grad`
    # itself; a hook of the parameter is not called then.
    # a weight that has no values at present has a node too
    with torch.enable_grad(), without_torch_function():
        use = parameter.view_as(parameter).grad_fn
    assert use is not None
    (node, _), *_ = use.next_functions
    assert node is not None

    def after_node(*_: Tensor | tuple[Tensor, ...]) -> None:
        on_gradient()

    node.register_hook(after_node)
    return node


def _accumulate_in_thread(parameter: nn.Parameter) -> None:
    """Accumulate a gradient that autograd has just computed.

    The threads are compared even if there is no `grad`, because another thread's hook may have
    taken it.
    """
    _require_one_thread(parameter, _slot(parameter))
    accumulate_autograd_grad(parameter)


def _require_one_thread(parameter: nn.Parameter, slot: GradientSlot) -> None:
    """Raise UserError if another thread, which still runs, has added to the gradient of this step:
    one could be lost. slot: of the parameter.

    autograd computes on a CPU in the thread that calls it, but on a GPU in one thread of the
    device.
    """
    if not parameter.is_cpu:
        return
    current = current_thread()
    owner = slot.thread
    is_anothers = owner is not None and owner is not current and owner.is_alive()
    if slot.several_threads or is_anothers:
        slot.several_threads = True
        name = layout_of(parameter).parts[0].name
        raise UserError.of("optimizer.backward_from_threads", name=name)
    slot.thread = current


def accumulate_autograd_grad(parameter: nn.Parameter) -> None:
    """Move a gradient from autograd's `grad` to `main_grad`. Layers that accumulate by themselves
    leave no `grad`."""
    grad = _autograd_grad.__get__(parameter)
    if grad is None:
        return
    _autograd_grad.__set__(parameter, None)
    if grad.requires_grad:  # of backward(create_graph=True)
        grad = grad.detach()
    if grad.is_sparse:  # of nn.Embedding(sparse=True)
        grad = grad.to_dense()
    main_grad, is_first = begin_accumulation(parameter)
    if is_first:
        main_grad.copy_(grad)
    else:
        main_grad.add_(grad)


def zero_missing_grads(parameters: Iterable[nn.Parameter]) -> None:
    """Accumulate gradients that were assigned to `grad`, and clear `main_grad` where it holds no
    gradient of this step.

    A cleared `main_grad` does not count as a gradient.
    """
    for parameter in parameters:
        slot = _slot(parameter)
        # the thread in which the error was raised may have swallowed it
        if slot.several_threads:
            _require_one_thread(parameter, slot)
        accumulate_autograd_grad(parameter)
        if not slot.has_gradient:
            if slot.make_room is not None:
                slot.make_room()
            parameter.main_grad.zero_()  # type: ignore[attr-defined]


def set_closed(parameters: Iterable[nn.Parameter], closed: bool) -> None:
    """Mark the parameters as taking no gradient, since their sum over the ranks has begun, or as
    taking them again."""
    for parameter in parameters:
        _slot(parameter).closed = closed


def reset_accumulation(parameters: Iterable[nn.Parameter]) -> None:
    """Mark the parameters as having no gradient, to begin a new step."""
    for parameter in parameters:
        slot = _slot(parameter)
        _forget(slot)
        slot.taken = False
        _autograd_grad.__set__(parameter, None)
