"""Leaves: functions of tensors without products, messages or state, which torch may compile into
one pass over memory.

A norm, a rotation, a gate, dropout or a loss is a row of operators, each of which reads and writes
memory. torch's compiler makes one loop of it, in C++ for a CPU and in Triton for a GPU. Autograd
functions call their leaves through `Leaves`, which knows the compiled form of each call: one for
each leaf, forms of its tensors and values of its other arguments. A call without a compiled form
runs operator by operator, so nothing is ever compiled during a step. Regions (`parallel.regions`)
are called through it too.

Compiled code rounds differently, because numbers between operators stay unrounded. Autograd keeps
the same tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Form:
    """A tensor's shape, strides, dtype and type of device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    def made(self) -> Tensor:
        """Return a tensor of this form: normal numbers; zeros, which are valid indices, if it has
        integers."""
        empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        if self.dtype == torch.bool:
            return empty.fill_(True)
        return empty.normal_() if self.dtype.is_floating_point else empty.zero_()


@dataclass(frozen=True)
class Call:
    """A leaf with the forms of its tensors and the values of its other arguments.

    region: the function is a region: gradients flow through its compiled form.
    """

    leaf: Callable[..., Any]
    arguments: tuple[Any, ...]
    region: bool = False

    @property
    def name(self) -> str:
        """Return the name of the leaf, for people."""
        return self.leaf.__name__.strip("_").replace("_", " ")

    def on(self, device: str) -> "Call":
        """Return this call with tensors of a device."""
        moved = (replace(a, device=device) if isinstance(a, Form) else a for a in self.arguments)
        return replace(self, arguments=tuple(moved))

    def made(self) -> list[Any]:
        """Return arguments for a trial."""
        return [a.made() if isinstance(a, Form) else a for a in self.arguments]

    def bound(self, tensors: Any) -> Any:
        """Return the result of the leaf on these tensors and the other arguments."""
        given = iter(tensors)
        return self.leaf(*(next(given) if isinstance(a, Form) else a for a in self.arguments))


def call_of(leaf: Callable[..., Any], arguments: tuple[Any, ...], region: bool = False) -> Call:
    """Return the call that a compiled form is found by."""
    return Call(leaf, tuple(_form(a) if isinstance(a, Tensor) else a for a in arguments), region)


def _form(x: Tensor) -> Form:
    return Form(tuple(x.shape), x.stride(), x.dtype, x.device.type)


@dataclass(frozen=True)
class Leaves:
    """The form in which leaves are called: compiled where the call has a compiled form, otherwise
    as they are.

    names: the names of all ranks' compiled leaves, in one text.
    noted: if given, every call is noted in it.
    by_region: modules are to call regions, where there is one, instead of its leaves.
    """

    compiled: Mapping[Call, Callable[..., Any]] = field(default_factory=dict)
    names: str = ""
    noted: dict[Call, None] | None = None
    by_region: bool = False

    def __call__(
        self, leaf: Callable[..., Any], *arguments: Any, otherwise: Callable[..., Any] | None = None
    ) -> Any:
        """Return the leaf's result. otherwise: a function that computes the same and is better if
        it is not compiled.

        Called without autograd's history, as in an autograd function.
        """
        if self.compiled or self.noted is not None:
            call = call_of(leaf, arguments)
            if self.noted is not None:
                self.noted[call] = None
            if call in self.compiled:
                return self.compiled[call](
                    *(a.detach() for a in arguments if isinstance(a, Tensor))
                )
        return (otherwise or leaf)(*arguments)

    def through(self, region: Callable[..., Any], *arguments: Any) -> Any:
        """Return the results of a region, through which gradients flow to its arguments."""
        call = call_of(region, arguments, region=True)
        if self.noted is not None:
            self.noted[call] = None
        if call in self.compiled:
            return self.compiled[call](*(a for a in arguments if isinstance(a, Tensor)))
        return region(*arguments)


PLAIN = Leaves()
"""All leaves run operator by operator."""
