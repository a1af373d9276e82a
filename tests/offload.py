"""Host memory for tests on a CPU: "device" and "host" are two memories here, and copies between them
are as late as they may be."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megaprec.optim.state import host_memory
from megaprec.optim.state.host_memory import HostMemory

_GRAIN = 2  # bytes of host memory, of the narrowest element, whose last departure is kept


class Started:
    """A copy that was started. It runs when somebody waits for it, after all that it waits for.

    behind: the number of the last departure that is surely over when this is.
    """

    def __init__(
        self, copy: Callable[[], object], after: Sequence["Started | None"], behind: int = 0
    ) -> None:
        self._copy = copy
        self._after = [earlier for earlier in after if earlier is not None]
        self._is_done = False
        self.behind = max([behind, *(earlier.behind for earlier in self._after)])

    def finish(self) -> None:
        if self._is_done:
            return
        self._is_done = True
        for earlier in self._after:
            earlier.finish()
        self._copy()


class LateTransport:
    """Runs no copy before a wait for it, as a bus may; each direction has its own order.

    A device's own work is done at once here, and so are copies that the device waits for. What
    would be right by that alone is refused: a tile that leaves without waiting for its update, and
    one that arrives without waiting for what has left to its place in host memory.
    """

    def __init__(self) -> None:
        self._last: dict[str, Started | None] = {"in": None, "out": None}
        self._newest_mark: Started | None = None  # of the device, after the last arrival
        self._device_behind = 0  # the last departure that the device has waited for
        self._num_left = 0
        self._left_to: dict[int, int] = {}  # grain of host memory -> number of a departure

    def arrive(self, copy: Callable[[], object], after: Sequence[Any]) -> Started:
        self._newest_mark = None
        started = self._start("in", copy, after)
        for grain in _grains(copy, 1):
            assert self._left_to.get(grain, 0) <= started.behind, "a tile arrives too early"
        return started

    def leave(self, copy: Callable[[], object], after: Sequence[Any]) -> Started:
        assert self._newest_mark is not None, "no mark of the update"
        assert self._newest_mark in after, "a tile leaves before it is updated"
        self._num_left += 1
        for grain in _grains(copy, 0):
            self._left_to[grain] = self._num_left
        return self._start("out", copy, after, self._num_left)

    def _start(
        self, way: str, copy: Callable[[], object], after: Sequence[Any], behind: int = 0
    ) -> Started:
        started = Started(copy, (self._last[way], *after), behind)
        self._last[way] = started
        return started

    def mark(self) -> Started:
        self._newest_mark = Started(lambda: None, (), self._device_behind)
        return self._newest_mark

    def hold_device(self, mark: Started | None) -> None:
        if mark is not None:
            self._device_behind = max(self._device_behind, mark.behind)
            mark.finish()

    hold_host = hold_device


def _grains(copy: Callable[[], object], argument: int) -> Iterator[int]:
    """Yield the grains of memory of a copy's targets (argument 0) or sources (1)."""
    assert isinstance(copy, partial)
    for values in copy.args[argument].values():
        start = values.data_ptr()
        yield from range(start // _GRAIN, -(-(start + values.nbytes) // _GRAIN))


class CpuHostMemory(HostMemory):
    """Host memory of an optimizer on a CPU, in tiles of a few elements."""

    tile_elements = 192

    def open(self, device: torch.device) -> None:
        self._device = device
        self._transport = LateTransport()

    def zeros(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        host_memory._SMALLEST_BLOCK = 1 << 12
        return super().zeros(num_elements, dtype)
