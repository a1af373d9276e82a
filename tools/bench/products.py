"""The products of a training step, timed alone: the speed that a step would have if it did nothing
else.

One step is recorded: each matrix product and fused attention with the shapes, strides and dtypes of
its operands. Then each of them is repeated with random numbers, with nothing between, and the
medians are summed. All ranks do so at the same time, for they share the machine's memory and caches
in training too.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

NAMES = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_int_mm")
FUSED = "_scaled_dot_product"  # beginning of the names of fused attention
REPEATS = 9  # of each product; the first warms up


@dataclass(frozen=True)
class Operand:
    """A tensor's shape, strides and dtype."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self) -> Tensor:
        """Return random numbers of this form."""
        empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        if self.dtype.is_floating_point and self.dtype.itemsize > 1:
            return empty.normal_()
        return empty.zero_()


class Products(TorchDispatchMode):
    """Counts the products that are computed while it is active: (operator, arguments as text) ->
    number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()
        self.calls: dict[str, Callable[[], Callable[[], object]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in NAMES or name.startswith(FUSED):
            operands = tree_map(_describe, (args, kwargs or {}))
            key = f"{func} {operands}"
            self.counts[key] += 1
            self.calls.setdefault(key, _make_call(func, operands))
        return func(*args, **(kwargs or {}))

    def seconds(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Return the seconds of all recorded products, each alone, by this clock."""
        total = 0.0
        for key, count in self.counts.items():
            total += count * _median_seconds(self.calls[key](), clock)
        return total


def _describe(value: Any) -> Any:
    """Return the form of a tensor; any other value as it is."""
    if not isinstance(value, Tensor):
        return value
    return Operand(tuple(value.shape), value.stride(), value.dtype, value.device)


def _make_call(func: Any, operands: Any) -> Callable[[], Callable[[], object]]:
    """Return a function that makes operands and returns the call with them."""

    def prepare() -> Callable[[], object]:
        args, kwargs = tree_map(
            lambda value: value.make() if isinstance(value, Operand) else value, operands
        )
        return lambda: func(*args, **kwargs)

    return prepare


def _median_seconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    times = []
    for _ in range(REPEATS):
        start = clock()
        call()
        times.append(clock() - start)
    return statistics.median(times[1:])
