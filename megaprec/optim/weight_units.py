"""The weights of a model part by the moment at which its forward pass reads them.

A layer is a module in a list or dict of modules, and not inside of another layer; it reads its
weights when it is called. A part that tells when it reads its other weights (`TellsReads`) reads
some before its layers and some after them. Of any other part all weights outside of the layers are
taken as read from the beginning of its forward pass to the end.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Protocol, TypeVar, runtime_checkable

from torch import nn

Buffer = TypeVar("Buffer", bound=Hashable)

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Moment(Enum):
    """The time at which weights are read in the forward pass of a model part."""

    THROUGHOUT = "from its beginning to its end"
    EARLY = "before the layers, and not in a backward pass"
    LAYER = "while a layer runs"
    LATE = "after the layers"


@dataclass(frozen=True)
class WeightUnit:
    """Weights that are read together.

    entry: the module before whose forward they must be there: a layer, the first module that runs
        after the layers, or the model part.
    """

    moment: Moment
    entry: nn.Module
    parameters: tuple[nn.Parameter, ...]


@runtime_checkable
class TellsReads(Protocol):
    """A model part that tells when it reads the weights outside of its layers."""

    def read_early(self) -> Sequence[nn.Parameter]:
        """Return the weights that are read before the layers, by operators whose backward passes do
        not read them."""
        ...

    def read_late(self) -> Mapping[nn.Module, Sequence[nn.Parameter]]:
        """Return, for modules that run after the layers, the weights that are read in or after
        their forward. They may have been read early too."""
        ...


def weight_units(model_part: nn.Module) -> list[WeightUnit]:
    """Return the units of a model part in the order of its forward pass. A parameter that is read
    early and late is in two."""
    layers: list[WeightUnit] = []
    in_layers = set[nn.Parameter]()
    for layer in layers_of(model_part):
        parameters = tuple(layer.parameters())
        in_layers.update(parameters)
        layers.append(WeightUnit(Moment.LAYER, layer, parameters))
    early: tuple[nn.Parameter, ...] = ()
    late: list[WeightUnit] = []
    if isinstance(model_part, TellsReads):
        early = tuple(model_part.read_early())
        for module, parameters in model_part.read_late().items():
            late.append(WeightUnit(Moment.LATE, module, tuple(parameters)))
    told = in_layers.union(early, *(unit.parameters for unit in late))
    others = [parameter for parameter in model_part.parameters() if parameter not in told]
    units = [
        WeightUnit(Moment.THROUGHOUT, model_part, tuple(others)),
        WeightUnit(Moment.EARLY, model_part, early),
        *layers,
        *late,
    ]
    return [unit for unit in units if unit.parameters]


def layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a module."""
    for child in module.children():
        if isinstance(module, _CONTAINERS):
            yield child
        else:
            yield from layers_of(child)


def kept_buffers(
    layers: Sequence[Collection[Buffer]],
    size_of: Callable[[Buffer], int],
    keep_layers: int,
    keep_bytes: int,
) -> set[Buffer]:
    """Return the buffers of the last layers, which stay whole under ZeRO-3: of `keep_layers` of
    them, and of as many as `keep_bytes` have room for.

    layers: the buffers of each layer of a rank, in the order of the forward pass.
    size_of: returns the bytes of a buffer, whole.
    """
    kept = set[Buffer]()
    for number, buffers in enumerate(reversed(layers)):
        with_layer = kept.union(buffers)
        has_room = sum(map(size_of, with_layer)) <= keep_bytes
        if number >= keep_layers and not has_room:
            break
        kept = with_layer
    return kept


def first_units(model_part: nn.Module) -> dict[nn.Parameter, int]:
    """Return for each parameter the number of the first unit that reads it."""
    numbers: dict[nn.Parameter, int] = {}
    for number, unit in enumerate(weight_units(model_part)):
        for parameter in unit.parameters:
            numbers.setdefault(parameter, number)
    return numbers


def forward_order(model_part: nn.Module) -> dict[nn.Parameter, int]:
    """Return the position of each parameter in a forward pass: as they are registered, but those
    last that are first read after the layers. A backward pass has the reverse order."""
    parameters = list(model_part.parameters())
    if isinstance(model_part, TellsReads):
        late = set(chain.from_iterable(model_part.read_late().values()))
        late.difference_update(model_part.read_early())
        parameters.sort(key=lambda parameter: parameter in late)
    return {parameter: position for position, parameter in enumerate(parameters)}
