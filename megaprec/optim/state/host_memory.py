"""Masters, moments and averages in host memory, which travel to the device tile by tile.

An update is computed on the device, as without this: a host's arithmetic need not have the same
last bits, and the decision of a step (whether it is skipped, and the clip factor) is there only
when all gradients are. So a tile's masters and moments are copied into one of a few staging tiles
on the device, updated there, and copied back. On CUDA the copies run on two streams of their own,
one for each direction: the next tile arrives and the last one leaves while one is updated, because
the host gives all of this to the device without waiting. Device memory holds the staging tiles
only, whatever the size of the model.

    arrival    waits until the staging tile is free, and until what an earlier pass over the same
               buffer has sent away has arrived in host memory
    update     on the device's current stream, waits for the arrival
    departure  waits for the update; then the staging tile is free

After a pass over tiles the device's current stream waits for the last departure. So whatever the
device computes later, or the host after it has waited for the device, sees complete host memory.

Host memory is pinned, in large blocks: torch rounds each allocation up to a power of two.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megaprec.errors import UserError
from megaprec.optim.state.update_tile import TILE_ELEMENTS, Tile

NUM_STAGED = 3  # one arrives, one is updated, one leaves
_ALIGNMENT = 64  # bytes
_SMALLEST_BLOCK = 1 << 26
_LARGEST_BLOCK = 1 << 30

# A moment in what the device or a queue of copies was given; None: it has passed already.
Mark = Any


class Transport(Protocol):
    """The copies between device and host, and the waits among them."""

    def arrive(self, copy: Callable[[], object], after: Sequence[Mark]) -> Mark:
        """Start a copy to the device when all of `after` have passed."""
        ...

    def leave(self, copy: Callable[[], object], after: Sequence[Mark]) -> Mark:
        """Start a copy from the device when all of `after` have passed."""
        ...

    def mark(self) -> Mark:
        """Return the end of all work that the device has been given until now."""
        ...

    def hold_device(self, mark: Mark) -> None:
        """Let the device begin no later work before `mark`."""
        ...

    def hold_host(self, mark: Mark) -> None:
        """Wait for `mark`."""
        ...


class PlainTransport:
    """Copies in the order in which they are started, among all work of the device."""

    def arrive(self, copy: Callable[[], object], after: Sequence[Mark]) -> Mark:
        copy()

    def leave(self, copy: Callable[[], object], after: Sequence[Mark]) -> Mark:
        copy()

    def mark(self) -> Mark:
        return None

    def hold_device(self, mark: Mark) -> None:
        """Do nothing: the device works in order."""

    def hold_host(self, mark: Mark) -> None:
        """Do nothing: who reads the device's memory waits by itself."""


class CudaTransport:
    """Copies on two streams beside the device's current one. Marks are events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arrivals = torch.cuda.Stream(device)
        self._departures = torch.cuda.Stream(device)

    def arrive(self, copy: Callable[[], object], after: Sequence[Mark]) -> Mark:
        return self._start(self._arrivals, copy, after)

    def leave(self, copy: Callable[[], object], after: Sequence[Mark]) -> Mark:
        return self._start(self._departures, copy, after)

    def _start(
        self, stream: torch.cuda.Stream, copy: Callable[[], object], after: Sequence[Mark]
    ) -> Mark:
        """Start a copy on a stream when all of `after` have passed; return its end."""
        for mark in after:
            if mark is not None:
                stream.wait_event(mark)
        with torch.cuda.stream(stream):
            copy()
        return stream.record_event()

    def mark(self) -> Mark:
        return torch.cuda.current_stream(self._device).record_event()

    def hold_device(self, mark: Mark) -> None:
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)

    def hold_host(self, mark: Mark) -> None:
        if mark is not None:
            mark.synchronize()


class _StagingTile:
    """Device memory for what lies in host memory of one tile.

    free: the moment from which it may be written to.
    """

    def __init__(self) -> None:
        self.free: Mark = None
        self._room = torch.empty(0, dtype=torch.uint8)

    def make_room(self, num_bytes: int, device: torch.device, transport: Transport) -> None:
        """Have at least so many bytes; their values are undefined."""
        if len(self._room) >= num_bytes:
            return
        # the memory that is given up may be used anew at once
        transport.hold_device(self.free)
        self._room = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        # earlier work of the device may still use what this memory was before
        self.free = transport.mark()

    def take(self, start: int, like: Tensor) -> Tensor:
        """Return memory from byte `start` on for the values of `like`."""
        return self._room[start : start + like.nbytes].view(like.dtype)


class HostMemory:
    """The memory of masters, moments and averages on the host, of one optimizer."""

    tile_elements = TILE_ELEMENTS
    """Elements of a tile that travels."""

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._transport: Transport = PlainTransport()
        self._staging = [_StagingTile() for _ in range(NUM_STAGED)]
        self._num_staged = 0  # tiles until now: staging tiles are used in turn
        self._last: dict[object, Mark] = {}  # of the last pass over an owner's tiles
        self._newest_block = torch.empty(0, dtype=torch.uint8)
        self._used = 0  # bytes of the newest block
        self._addresses: set[int] = set()  # of all blocks

    def open(self, device: torch.device) -> None:
        """Begin to serve tensors of a device. Raise UserError for one that computes in host
        memory."""
        require_other_memory(device)
        is_new = device != self._device
        self._device = device
        if device.type == "cuda" and is_new:
            self._transport = CudaTransport(device)

    def zeros(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return zeros in host memory."""
        num_bytes = num_elements * dtype.itemsize
        start = _aligned(self._used)
        if start + num_bytes > len(self._newest_block):
            # blocks grow, so that a small model pins little and a large one needs few
            doubled = 2 * len(self._newest_block)
            usual_bytes = min(max(_SMALLEST_BLOCK, doubled), _LARGEST_BLOCK)
            self._newest_block = _allocate(max(usual_bytes, num_bytes), self._device)
            self._addresses.add(self._newest_block.data_ptr())
            start = 0
        self._used = start + num_bytes
        return self._newest_block[start : self._used].view(dtype).zero_()

    def holds(self, values: Tensor) -> bool:
        """Return True for a tensor of `zeros`, or a view of one."""
        return values.untyped_storage().data_ptr() in self._addresses

    def visit(
        self, owner: object, tiles: Iterable[Tile], written: Collection[str] | None = None
    ) -> Iterator[Tile]:
        """Yield each tile with all that it stores on the device, and bring back afterwards what was
        changed there. To be iterated to its end.

        owner: the same for all tiles that may share elements.
        written: names of what is brought back: "masters", "remainder" and moments; None: all.
        """
        transport = self._transport
        earlier_pass = self._last.get(owner)  # the end of the last pass over these tiles
        last_mark = earlier_pass
        for tile in tiles:
            on_host = {name: values for name, values in stored(tile) if self.holds(values)}
            staging = self._next_staging(on_host.values())
            on_device = _lay_out(staging, on_host)
            copy_there = partial(_copy_all, on_device, on_host)
            arrived = transport.arrive(copy_there, (staging.free, earlier_pass))
            transport.hold_device(arrived)
            yield _with_stored(tile, on_device)
            updated = transport.mark()
            staging.free = updated
            changed = {
                name: values
                for name, values in on_device.items()
                if written is None or name in written
            }
            if changed:
                copy_back = partial(_copy_all, on_host, changed)
                staging.free = transport.leave(copy_back, (updated,))
            last_mark = staging.free
        self._last[owner] = last_mark
        transport.hold_device(last_mark)

    def wait(self) -> None:
        """Wait, on the host, until all tensors may be read and written here."""
        # the device is behind all copies, and may still read
        self._transport.hold_host(self._transport.mark())

    def _next_staging(self, held: Iterable[Tensor]) -> _StagingTile:
        """Return the staging tile that was used longest ago, with room for these tensors."""
        staging = self._staging[self._num_staged % NUM_STAGED]
        self._num_staged += 1
        staging.make_room(staged_bytes(held), self._device, self._transport)
        return staging


def require_other_memory(device: torch.device) -> None:
    """Raise UserError for a device that computes in host memory, where nothing would be saved."""
    if device.type == "cpu":
        raise UserError.of("optimizer.offload_on_cpu")


def staged_bytes(held: Iterable[Tensor]) -> int:
    """Return the bytes of a staging tile for these tensors, each of which has a multiple of
    `_ALIGNMENT`."""
    return sum(_aligned(values.nbytes) for values in held)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _allocate(num_bytes: int, device: torch.device) -> Tensor:
    """Return uint8 [num_bytes], in pinned memory where the device is CUDA and so much can be
    pinned."""
    if device.type == "cuda":
        with suppress(RuntimeError):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(num_bytes, dtype=torch.uint8)


def stored(tile: Tile) -> Iterator[tuple[str, Tensor]]:
    """Yield what a tile stores beside weights and gradients, by name."""
    if tile.masters is not None:
        yield "masters", tile.masters
    if tile.remainder is not None:
        yield "remainder", tile.remainder
    yield from tile.moments


def _lay_out(staging: _StagingTile, held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return memory of a staging tile for each of these tensors."""
    staged: dict[str, Tensor] = {}
    start = 0
    for name, values in held.items():
        staged[name] = staging.take(start, values)
        start += _aligned(values.nbytes)
    return staged


def _with_stored(tile: Tile, staged: dict[str, Tensor]) -> Tile:
    """Return the tile with these tensors in the place of those in host memory."""
    moments = tuple((name, staged.get(name, values)) for name, values in tile.moments)
    masters = staged.get("masters", tile.masters)
    weights = tile.weights
    # of weights in FP8 an update changes the masters alone
    if masters is not None and tile.masters is tile.weights:
        weights = masters
    return replace(
        tile,
        weights=weights,
        masters=masters,
        remainder=staged.get("remainder", tile.remainder),
        moments=moments,
    )


def _copy_all(targets: dict[str, Tensor], sources: dict[str, Tensor]) -> None:
    """Start to copy each source to the target of its name."""
    for name, values in sources.items():
        targets[name].copy_(values, non_blocking=True)
