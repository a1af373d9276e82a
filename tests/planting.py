"""Faults that tests plant: what takes the place of a function is called as that function is.

Most planted faults are tried in campaigns only. One that replaces nothing, or that its callers
cannot call, would go unseen until then: so each is planted in a fast test as well, without a run.
"""

import inspect
from typing import Any


def put(where: Any, name: str, what: Any) -> None:
    """Put `what` in the place of an attribute: it must be there and, if it is a function, take the
    same arguments."""
    assert hasattr(where, name), f"{where} has no {name}: this would change nothing"
    before = inspect.getattr_static(where, name)
    assert callable_alike(before, what), (
        f"{where}.{name} takes other arguments than what is put in its place"
    )
    setattr(where, name, what)


def callable_alike(before: Any, after: Any) -> bool:
    """Whether each call of the first function by position is a call of the second; True if one's
    signature is unknown."""
    old, new = (_numbers(one) for one in (before, after))
    return old is None or new is None or (new[0] <= old[0] and new[1] >= old[1])


def _numbers(function: Any) -> tuple[float, float] | None:
    """The numbers of arguments that a function needs, and that it takes at most."""
    function = function.__func__ if isinstance(function, staticmethod | classmethod) else function
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    several = any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters)
    named = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    needed = sum(one.default is one.empty for one in named)
    return (0 if several else needed), (float("inf") if several else len(named))
