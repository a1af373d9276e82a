"""Leaves: functions of tensors without products, messages or state, which torch may compile into
one pass over memory.

A norm, a rotation, a gate, dropout or a loss is a row of operators, each of which reads and writes
memory. torch's compiler makes one loop of it, in C++ for a CPU and in Triton for a GPU. Autograd
functions call their leaves through `Leaves`, which knows the compiled form of each call: one for
each leaf, specs of its tensors and values of its other arguments. A call without a compiled form
runs operator by operator, so nothing is ever compiled during a step. Regions (`parallel.regions`)
are called through it too.

Compiled code rounds differently, because numbers between operators stay unrounded. Autograd keeps
the same tensors.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Leaf = TypeVar("Leaf", bound=Callable[..., Any])
_ROW_BY_ROW = "_computes_row_by_row"  # attribute of a leaf


def row_by_row(leaf: Leaf) -> Leaf:
    """Mark a leaf that computes each row by itself, and return it: it can be tried on some rows.

    The first dim of all its tensors and results is the same rows, and a row of the results follows
    from that row of its tensors alone.
    """
    setattr(leaf, _ROW_BY_ROW, True)
    return leaf


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's shape, strides, dtype and type of device: what a compiled form is made for."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    def example(self) -> Tensor:
        """Return a tensor of this spec: of normally distributed numbers, of True, or of integer
        zeros."""
        empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        # a mask, which masks nothing
        if self.dtype == torch.bool:
            return empty.fill_(True)
        if self.dtype.is_floating_point:
            return empty.normal_()
        # zero is an index of every table
        return empty.zero_()


@dataclass(frozen=True)
class LeafCall:
    """A leaf with the specs of its tensors and the values of its other arguments.

    region: the function is a region: gradients flow through its compiled form.
    """

    leaf: Callable[..., Any]
    arguments: tuple[Any, ...]
    region: bool = False

    @property
    def name(self) -> str:
        """Return the name of the leaf, for people."""
        return self.leaf.__name__.strip("_").replace("_", " ")

    def on(self, device: str) -> "LeafCall":
        """Return this call with the specs of its tensors on a type of device, such as "cuda"."""
        arguments = [
            replace(argument, device=device) if isinstance(argument, TensorSpec) else argument
            for argument in self.arguments
        ]
        return replace(self, arguments=tuple(arguments))

    @property
    def is_row_by_row(self) -> bool:
        """Return True if the leaf is marked so (`row_by_row`)."""
        return getattr(self.leaf, _ROW_BY_ROW, False)

    def in_float64(self) -> "LeafCall":
        """Return this call with tensors of float64 in place of other floating-point ones, and with
        float64 wherever an argument names such a dtype."""
        return replace(self, arguments=tuple(map(_widened, self.arguments)))

    def example_tensors(self) -> list[Tensor]:
        """Return tensors of the call's specs, for a trial."""
        return [
            argument.example() for argument in self.arguments if isinstance(argument, TensorSpec)
        ]

    def run(self, tensors: Iterable[Tensor]) -> Any:
        """Return the result of the leaf on these tensors and the other arguments."""
        # in the places of their specs
        remaining = iter(tensors)
        arguments = [
            next(remaining) if isinstance(argument, TensorSpec) else argument
            for argument in self.arguments
        ]
        return self.leaf(*arguments)


def call_of(
    leaf: Callable[..., Any],
    arguments: tuple[Any, ...],
    region: bool = False,
) -> LeafCall:
    """Return the call whose compiled form computes leaf(*arguments)."""
    return LeafCall(leaf, tuple(map(_spec, arguments)), region)


def _spec(argument: Any) -> Any:
    """Return the spec of a tensor; any other argument as it is."""
    if not isinstance(argument, Tensor):
        return argument
    return TensorSpec(
        tuple(argument.shape), argument.stride(), argument.dtype, argument.device.type
    )


def _widened(argument: Any) -> Any:
    """Return an argument of a call with float64 in place of other floating-point dtypes."""
    if isinstance(argument, torch.dtype):
        return torch.float64 if argument.is_floating_point else argument
    # the specs of tensors, and settings of regions that name dtypes (`models.attention.regions`)
    if is_dataclass(argument) and not isinstance(argument, type):
        values = {item.name: _widened(getattr(argument, item.name)) for item in fields(argument)}
        return replace(argument, **values)
    return argument


def _tensor_arguments(arguments: tuple[Any, ...]) -> list[Tensor]:
    return [argument for argument in arguments if isinstance(argument, Tensor)]


@dataclass(frozen=True)
class Leaves:
    """The form in which leaves are called: compiled where the call has a compiled form, otherwise
    as they are.

    names: the names of all ranks' compiled leaves, in one text.
    recorded_calls: if given, every call is noted in it, and leaves run as in a run in which all
        are compiled.
    by_region: modules are to call regions, where there is one, instead of its leaves.
    misses: the number of calls without a compiled form, by name, if any call has one.
    """

    compiled: Mapping[LeafCall, Callable[..., Any]] = field(default_factory=dict)
    names: str = ""
    recorded_calls: dict[LeafCall, None] | None = None
    by_region: bool = False
    misses: Counter[str] = field(default_factory=Counter, compare=False)

    def __call__(
        self,
        leaf: Callable[..., Any],
        *arguments: Any,
        otherwise: Callable[..., Any] | None = None,
    ) -> Any:
        """Return the leaf's result.

        otherwise: a function that computes the same, and is better if the leaf is not compiled.
        Called without autograd's history, as in an autograd function.
        """
        plain = otherwise or leaf
        # before the specs of the arguments are made: this is called in every step
        if not self.compiled and self.recorded_calls is None:
            return plain(*arguments)
        call = call_of(leaf, arguments)
        if self.recorded_calls is not None:
            self.recorded_calls[call] = None
            return leaf(*arguments)
        if call in self.compiled:
            tensors = [tensor.detach() for tensor in _tensor_arguments(arguments)]
            return self.compiled[call](*tensors)
        self.misses[call.name] += 1
        return plain(*arguments)

    def call_region(self, region: Callable[..., Any], *arguments: Any) -> Any:
        """Return the results of a region (`parallel.regions`), through which gradients flow to its
        arguments: by its compiled form, if the call has one."""
        call = call_of(region, arguments, region=True)
        if self.recorded_calls is not None:
            self.recorded_calls[call] = None
        if call in self.compiled:
            return self.compiled[call](*_tensor_arguments(arguments))
        if self.compiled:
            self.misses[call.name] += 1
        return region(*arguments)


PLAIN = Leaves()
"""All leaves run operator by operator."""
