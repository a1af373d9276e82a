"""Tensors in the nested containers that modules take and return.

A container is a mapping (such as transformers' ModelOutput), a list or deque, a tuple or named
tuple, or a dataclass. Any other value, including a module, is a leaf and is not searched. A
container in which a tensor changes is copied and keeps its type; a container in which none changes
is returned as the same object.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, MutableSequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in `value`, in order."""
    if isinstance(value, Tensor):
        yield value
    else:
        for item in _items(value).values():
            yield from tensors(item)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with `change` applied to each tensor in it; no container of `value` is
    modified."""
    if isinstance(value, Tensor):
        return change(value)
    changed_items: dict[Any, Any] = {}
    for key, item in _items(value).items():
        new_item = map_tensors(item, change)
        if new_item is not item:
            changed_items[key] = new_item
    return _replace_items(value, changed_items) if changed_items else value


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with its floating-point tensors, at any depth, cast to `dtype`."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(value, cast)


def cast_dtypes(value: Any, from_dtypes: Collection[torch.dtype], dtype: torch.dtype) -> Any:
    """Return `value` with its tensors of one of `from_dtypes`, at any depth, cast to `dtype`."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.dtype in from_dtypes else tensor

    return map_tensors(value, cast)


def _items(value: Any) -> dict[Any, Any]:
    """Return the items of a container by key, index or field name; empty if `value` is no
    container."""
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, tuple | MutableSequence):
        return dict(enumerate(value))
    # a dataclass itself, not one of its values, is a leaf
    if not is_dataclass(value) or isinstance(value, type | nn.Module):
        return {}
    items: dict[Any, Any] = {}
    for field in fields(value):
        if hasattr(value, field.name):  # the constructor may leave a field without a value
            items[field.name] = getattr(value, field.name)
    return items


def _replace_items(value: Any, changed_items: dict[Any, Any]) -> Any:
    """Return a copy of a container with some of its items replaced."""
    if isinstance(value, tuple):
        items = [changed_items.get(index, item) for index, item in enumerate(value)]
        # a named tuple's constructor may take other arguments
        make = getattr(value, "_make", type(value))
        return make(items)
    # a mapping without item assignment is made anew
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)({**value, **changed_items})  # type: ignore[call-arg]
    # a copy, not a new one: a container's type may have attributes besides its items
    replaced = copy(value)
    has_assignment = isinstance(value, MutableMapping | MutableSequence)
    for key, item in changed_items.items():
        if has_assignment:
            replaced[key] = item
        else:
            object.__setattr__(replaced, key, item)  # a frozen dataclass too
    return replaced
