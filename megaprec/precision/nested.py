"""Tensors in the nested containers that modules take and return.

A container is a mapping (such as transformers' ModelOutput), a list or deque, a tuple or named
tuple, or a dataclass. Any other value, including a module, is a leaf and is not searched. A
container in which a tensor changes is copied and keeps its type; a container in which none changes
is returned as the same object.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in `value`, in order."""
    if isinstance(value, Tensor):
        yield value
    else:
        for item in _items(value).values():
            yield from tensors(item)


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with `change` applied to each tensor in it; no container of `value` is
    modified."""
    if isinstance(value, Tensor):
        return change(value)
    changes = {}
    for place, item in _items(value).items():
        if (new := mapped(item, change)) is not item:
            changes[place] = new
    return _changed(value, changes) if changes else value


def _items(value: Any) -> dict[Any, Any]:
    """Return the items of a container by key, index or field name; empty if `value` is no
    container."""
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, tuple | MutableSequence):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type | nn.Module):
        return {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
    return {}


def _changed(value: Any, changes: dict[Any, Any]) -> Any:
    """Return a copy of a container with some of its items replaced."""
    if isinstance(value, tuple):
        # a named tuple's constructor may take other arguments
        make = getattr(value, "_make", type(value))
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
