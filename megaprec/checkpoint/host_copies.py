"""Copies of a GPU's tensors in pinned host memory, begun at once and waited for before they are
read.

A copy to ordinary host memory runs at some 3 GB/s, and the host waits for each. To pinned memory it
runs at the speed of the bus, in the order of the stream: kernels that are queued later, such as the
next update, begin after it, so nothing need be kept from changing the state. torch keeps pinned
memory that is freed, and the next save finds it there.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Bytes. torch rounds pinned memory up to a power of two, so blocks are such, and hold many tensors.
_SMALLEST_BLOCK = 1 << 26
LARGEST_BLOCK = 1 << 30
_ALIGNMENT = 64


def allocate_pinned(num_bytes: int) -> Tensor:
    """Return uint8 [num_bytes] in pinned memory, or in ordinary memory if no more can be pinned."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return torch.empty(num_bytes, dtype=torch.uint8)


class HostCopies:
    """Copies of tensors, one after the other in blocks of host memory.

    allocate: returns uint8 of so many bytes.
    """

    def __init__(self, allocate: Callable[[int], Tensor] = allocate_pinned) -> None:
        self._allocate = allocate
        self._newest_block = torch.empty(0, dtype=torch.uint8)  # empty: nothing was copied yet
        self._used = 0  # bytes of the newest block

    def start(self, values: Tensor) -> Tensor:
        """Start to copy `values` to the host, and return the copy. Do not read it before what
        `wait_for_started` returns has been called."""
        room = self._take(values.numel() * values.itemsize)
        copied = room.view(values.dtype).view(values.shape)
        return copied.copy_(values, non_blocking=True)

    def wait_for_started(self) -> Callable[[], None]:
        """Return a function that waits for all started copies; another thread may call it."""
        has_copied = len(self._newest_block) > 0
        # without copies there may be no GPU either
        if not has_copied:
            return do_not_wait
        done = torch.cuda.Event()
        done.record()
        return done.synchronize

    def _take(self, num_bytes: int) -> Tensor:
        """Return so many bytes that no other copy has."""
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if start + num_bytes > len(self._newest_block):
            usual = min(max(_SMALLEST_BLOCK, 2 * len(self._newest_block)), LARGEST_BLOCK)
            self._newest_block = self._allocate(max(usual, num_bytes))
            start = 0
        self._used = start + num_bytes
        return self._newest_block[start : self._used]


def do_not_wait() -> None:
    """Return at once: there is nothing to wait for."""
