"""The work that a call takes, counted: it is the same on a slow machine and on a busy one."""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


def calls_of(work: Callable[[], object]) -> int:
    """Return how many functions, of Python and of C, are called."""
    calls = 0

    def note(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


def flops_of(work: Callable[[], object]) -> int:
    """Return the FLOPs of the matrix products and of attention."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def operators_of(work: Callable[[], object]) -> list[str]:
    """Return the names of torch's operators that are called, in order, as "aten.mm"."""
    with _Names() as names:
        work()
    return names.found


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Tensor:
        self.found.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))
