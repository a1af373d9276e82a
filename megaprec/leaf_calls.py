"""Calls of leaves: functions of tensors and settings, without messages or state, that may have a
compiled form.

The numerics call their leaves through a `CallLeaf`, which whoever compiles them gives
(`parallel.leaves.Leaves`).
"""

from collections.abc import Callable
from typing import Any, Protocol


class CallLeaf(Protocol):
    """Calls leaf(*arguments) in its compiled form; without one, otherwise(*arguments) or the
    leaf."""

    def __call__(
        self,
        leaf: Callable[..., Any],
        *arguments: Any,
        otherwise: Callable[..., Any] | None = None,
    ) -> Any: ...


def uncompiled(
    leaf: Callable[..., Any],
    *arguments: Any,
    otherwise: Callable[..., Any] | None = None,
) -> Any:
    """Call a leaf, or what is to be called in its place, operator by operator."""
    return (otherwise or leaf)(*arguments)
