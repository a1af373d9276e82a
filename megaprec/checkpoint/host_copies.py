"""Copies of a GPU's tensors in pinned host memory, begun at once and waited for before they are
read.

A copy to ordinary host memory runs at some 3 GB/s, and the host waits for each. To pinned memory it
runs at the speed of the bus, in the order of the stream: kernels that are queued later, such as the
next update, begin after it, so nothing need be kept from changing the state.

To pin memory takes about as long as an ordinary copy into it. torch keeps pinned memory that is
freed, and later saves find it there; `PinnedAhead` lets the first one find it too.
"""

from collections.abc import Callable, Iterable
from threading import Event, Thread

import torch
from torch import Tensor

# Bytes. torch rounds pinned memory up to a power of two, so blocks are such, and hold many tensors.
# While a block is pinned, CUDA may let other threads of the process wait: no block is larger than
# it must be.
_SMALLEST_BLOCK = 1 << 26
LARGEST_BLOCK = 1 << 28
_ALIGNMENT = 64


def allocate_pinned(num_bytes: int) -> Tensor:
    """Return uint8 [num_bytes] in pinned memory, or in ordinary memory if no more can be pinned."""
    block = pin(num_bytes)
    if block is None:
        return torch.empty(num_bytes, dtype=torch.uint8)
    return block


def pin(num_bytes: int) -> Tensor | None:
    """Return uint8 [num_bytes] in pinned memory, or None if no more can be pinned."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return None


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
        block_size = len(self._newest_block)
        start = _start_in_block(self._used, num_bytes, block_size)
        if start is None:
            self._newest_block = self._allocate(_next_block(num_bytes, block_size))
            start = 0
        self._used = start + num_bytes
        return self._newest_block[start : self._used]


def block_sizes(copies: Iterable[int]) -> list[int]:
    """Return the bytes of each block that `HostCopies` allocates for copies of so many bytes, in
    their order."""
    sizes: list[int] = []
    used = 0
    for num_bytes in copies:
        newest = sizes[-1] if sizes else 0
        start = _start_in_block(used, num_bytes, newest)
        if start is None:
            sizes.append(_next_block(num_bytes, newest))
            start = 0
        used = start + num_bytes
    return sizes


def _start_in_block(used: int, num_bytes: int, block_size: int) -> int | None:
    """Return where the next copy begins in a block of which `used` bytes are taken; None if there
    is no room for it."""
    start = -(-used // _ALIGNMENT) * _ALIGNMENT
    return start if start + num_bytes <= block_size else None


def _next_block(num_bytes: int, block_size: int) -> int:
    """Return the bytes of the block after one of `block_size`, which holds `num_bytes` at least."""
    usual_bytes = min(max(_SMALLEST_BLOCK, 2 * block_size), LARGEST_BLOCK)
    # torch would round up to a power of two anyway: the rest is room for more copies
    power_of_two = 1 << max(0, num_bytes - 1).bit_length()
    return max(usual_bytes, power_of_two)


class PinnedAhead:
    """Pinned memory for the first copies of a run, allocated by a thread while the run goes on.

    A context manager: the thread runs within the context. It holds all blocks that it has pinned,
    since torch would give a freed one out again. `release` frees them all, and whoever then asks
    torch for blocks of these sizes has them at once. The thread ends at the first block that cannot
    be pinned.

    sizes: of the blocks, in bytes.
    pin: returns a block of so many bytes, or None.
    """

    def __init__(
        self,
        sizes: Iterable[int],
        pin: Callable[[int], Tensor | None] = pin,
    ) -> None:
        self._sizes = list(sizes)
        self._pin = pin
        self._blocks: list[Tensor] = []
        self._stopping = Event()
        self._thread = Thread(target=self._pin_all, daemon=True, name="pinned memory for saves")

    def __enter__(self) -> "PinnedAhead":
        if self._sizes:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Free the blocks. Wait for the one that is being pinned; no other is begun."""
        self._stopping.set()
        self.join()
        self._blocks.clear()

    def join(self) -> None:
        """Wait until all blocks are there."""
        if self._thread.ident is not None:
            self._thread.join()

    def _pin_all(self) -> None:
        """Pin one block after the other, until all are there, one cannot be pinned, or `release`
        was called."""
        for size in self._sizes:
            if self._stopping.is_set():
                return
            block = self._pin(size)
            if block is None:
                return
            self._blocks.append(block)


def do_not_wait() -> None:
    """Return at once: there is nothing to wait for."""
