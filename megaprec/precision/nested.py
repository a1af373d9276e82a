"""Tensors in whatever modules pass each other: containers within containers.

A container is a mapping (transformers' ModelOutput is one), a list or a queue, a tuple with or without names, or a
dataclass. Everything else, a module too, is taken as it is: what it holds is its own. A container of which a tensor
changes is copied and comes back as its own kind; one of which none does is handed back itself.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in `value`, in order."""
    if isinstance(value, Tensor):
        yield value
    else:
        for item in _items(value).values():
            yield from tensors(item)


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `change` applied to each tensor in it; no container that was given is written to."""
    if isinstance(value, Tensor):
        return change(value)
    changes = {}
    for place, item in _items(value).items():
        if (new := mapped(item, change)) is not item:
            changes[place] = new
    return _changed(value, changes) if changes else value


def _items(value: Any) -> dict[Any, Any]:
    """What a container holds, by key, number or field; nothing for what is none."""
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, tuple | MutableSequence):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type | nn.Module):
        return {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
    return {}


def _changed(value: Any, changes: dict[Any, Any]) -> Any:
    """A copy of a container with some of its items changed."""
    if isinstance(value, tuple):
        make = getattr(value, "_make", type(value))  # of a named tuple: its constructor may take other arguments
        return make([changes.get(n, item) for n, item in enumerate(value)])
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)({**value, **changes})  # type: ignore[call-arg]
    new = copy(value)
    for place, item in changes.items():
        if isinstance(value, MutableMapping | MutableSequence):
            new[place] = item
        else:
            object.__setattr__(new, place, item)  # a frozen dataclass too
    return new
