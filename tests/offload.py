"""Host memory for tests on a CPU: "device" and "host" are two memories here, and copies between them
are as late as they may be."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megaprec.optim.state import host_memory
from megaprec.optim.state.host_memory import HostMemory


class Started:
    """A copy that was started. It runs when somebody waits for it, after all that it waits for."""

    def __init__(self, copy: Callable[[], object], after: Sequence["Started | None"]) -> None:
        self._copy = copy
        self._after = after
        self._is_done = False

    def finish(self) -> None:
        if self._is_done:
            return
        self._is_done = True
        for earlier in self._after:
            if earlier is not None:
                earlier.finish()
        self._copy()


class LateTransport:
    """Runs no copy before a wait for it, as a bus may; each direction has its own order.

    A device's own work is done at once here, so a copy that does not wait for it would be right: it
    is refused.
    """

    def __init__(self) -> None:
        self._last: dict[str, Started | None] = {"in": None, "out": None}
        self._newest_mark: Started | None = None  # of the device, after the last arrival

    def arrive(self, copy: Callable[[], object], after: Sequence[Any]) -> Started:
        self._newest_mark = None
        return self._start("in", copy, after)

    def leave(self, copy: Callable[[], object], after: Sequence[Any]) -> Started:
        assert self._newest_mark is not None, "no mark of the update"
        assert self._newest_mark in after, "a tile leaves before it is updated"
        return self._start("out", copy, after)

    def _start(self, way: str, copy: Callable[[], object], after: Sequence[Any]) -> Started:
        started = Started(copy, (self._last[way], *after))
        self._last[way] = started
        return started

    def mark(self) -> Started:
        self._newest_mark = Started(lambda: None, ())
        return self._newest_mark

    def hold_device(self, mark: Started | None) -> None:
        if mark is not None:
            mark.finish()

    hold_host = hold_device


class CpuHostMemory(HostMemory):
    """Host memory of an optimizer on a CPU, in tiles of a few elements."""

    tile_elements = 192

    def open(self, device: torch.device) -> None:
        self._device = device
        self._transport = LateTransport()

    def zeros(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        host_memory._SMALLEST_BLOCK = 1 << 12
        return super().zeros(num_elements, dtype)
