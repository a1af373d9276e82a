"""The part of the state that this rank saves: flat ranges of its own slices, which no other rank
saves.

Under ZeRO-1 a rank owns a shard of masters and moments. Where several ranks hold the same data
(replicas without ZeRO, copies of a slice over tp, a parameter tied over pipeline stages), each
saves an equal part of it. So all ranks of a stage write the same number of bytes, but for padding,
and none needs values of another. Frozen parameters are in no buffer; the first replica saves them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megaprec.checkpoint import host_copies
from megaprec.checkpoint.host_copies import HostCopies, do_not_wait
from megaprec.checkpoint.ranges import share
from megaprec.comm.layout import Layout, Part, layout_of
from megaprec.errors import UserError
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.state.flat_buffer import Buffer, Piece
from megaprec.optim.state.frozen_state import FrozenSlice


@dataclass
class Snapshot:
    """The tensors that rank `rank` writes, on the CPU.

    files: by file name and name in the file. Call `wait` before you read these tensors.
    entries: of checkpoint.json, by key.
    wait: waits for copies from a GPU that are under way.
    """

    rank: int
    files: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    wait: Callable[[], None] = do_not_wait

    def add(
        self,
        kind: str,
        key: str,
        values: Tensor,
        shape: tuple[int, ...],
        chunk: dict[str, Any],
    ) -> None:
        """Add the stored tensor of one chunk to a file whose name begins with `kind`.

        A rank that saves several chunks of a tensor (of virtual ranks, or of tied copies) puts them
        in several files.
        shape: of the logical tensor.
        chunk: see `megaprec.checkpoint.ranges`.
        """
        dtype = str(values.dtype).removeprefix("torch.")
        new_entry = {"dtype": dtype, "shape": list(shape), "chunks": []}
        entry = self.entries.setdefault(key, new_entry)
        number = len(entry["chunks"])
        suffix = f"-{number}" if number else ""
        file = f"{kind}-{self.rank:05d}{suffix}.safetensors"
        tensors = self.files.setdefault(file, {})
        tensors[key.removeprefix("weight/")] = values
        entry["chunks"].append({"file": file, **chunk})


class OwnedRange(NamedTuple):
    """The part of a piece that this rank saves: elements [first, last) of the buffer."""

    piece: Piece
    first: int
    last: int


def take_snapshot(optimizer: ParallelAMPOptimizer, copy: bool) -> Snapshot:
    """Return what this rank saves. Without communication.

    copy: False returns views where the state is on the CPU; they must be written before the next
        step.
    """
    snapshot = Snapshot(optimizer.world.rank)
    copies = HostCopies()
    for buffer in optimizer.all_buffers():
        _add_buffer(snapshot, buffer, optimizer.pp.rank, copy, copies)
    for frozen in _saved_frozen(optimizer):
        part = frozen.part
        key = f"weight/{part.name}"
        values = _on_cpu(frozen.values, copy, copies).view(part.local)
        snapshot.add("model", key, values, part.shape, _rectangle(part))
        # a resumed run that trains it finds no moments, and is told why
        snapshot.entries[key]["frozen"] = True
    snapshot.wait = copies.wait_for_started()
    return snapshot


def copied_bytes(optimizer: ParallelAMPOptimizer) -> Iterator[int]:
    """Yield the number of bytes of each copy from a GPU that `take_snapshot` begins, in its
    order."""
    for buffer in optimizer.all_buffers():
        ranges = list(owned_ranges(buffer, optimizer.pp.rank))
        for values in buffer.saved_empty().values():
            if not _goes_to_pinned_memory(values.device):
                continue
            for run in _runs(ranges, values.itemsize):
                first = run[0].first
                last = run[-1].last
                yield (last - first) * values.itemsize
    # what cannot be saved is refused by name after the first step
    with suppress(UserError):
        for frozen in _saved_frozen(optimizer):
            if _goes_to_pinned_memory(frozen.values.device):
                yield frozen.values.nbytes


def _saved_frozen(optimizer: ParallelAMPOptimizer) -> Iterator[FrozenSlice]:
    """Yield the slices of frozen parameters that this rank saves."""
    for frozen in optimizer.frozen.slices():
        if frozen.saved and frozen.values.numel():
            yield frozen


def _add_buffer(
    snapshot: Snapshot,
    buffer: Buffer,
    pp_rank: int,
    copy: bool,
    copies: HostCopies,
) -> None:
    """Add what this rank saves of the weights and moments in a buffer."""
    ranges = list(owned_ranges(buffer, pp_rank))
    if not ranges:
        return
    for kind, values in buffer.saved().items():
        file = "model" if kind == "weight" else "optimizer"
        for run in _runs(ranges, values.itemsize):
            # one copy from the device for a run; `values` begins at element `buffer.start`
            first = run[0].first
            last = run[-1].last
            values_of_run = values[first - buffer.start : last - buffer.start]
            on_cpu = _on_cpu(values_of_run, copy, copies)
            for saved_range in run:
                stored = on_cpu[saved_range.first - first : saved_range.last - first]
                _add_range(snapshot, file, kind, saved_range, stored)


def _runs(ranges: Sequence[OwnedRange], itemsize: int) -> Iterator[list[OwnedRange]]:
    """Yield the ranges, which are in order, in lists of neighbours. A list spans at most as many
    bytes as the largest block of pinned memory has, or is a single range.

    Such memory is rounded up to a power of two: a block for a buffer of all experts of a layer
    could be gigabytes too large.
    """
    most = host_copies.LARGEST_BLOCK // itemsize
    run: list[OwnedRange] = []
    for saved_range in ranges:
        if run and saved_range.last - run[0].first > most:
            yield run
            run = []
        run.append(saved_range)
    if run:
        yield run


def owned_ranges(buffer: Buffer, pp_rank: int) -> Iterator[OwnedRange]:
    """Yield the pieces that this rank saves a part of, with the elements [first, last) of the
    buffer, in order."""
    layouts: list[Layout] = []
    for parameter in buffer.parameters:
        layout = layout_of(parameter)
        # a parameter with several stacked parts has a piece for each of them
        layouts += [layout] * len(layout.parts)
    share_start, share_stop = buffer.share
    for piece, layout in zip(buffer.pieces, layouts, strict=True):
        # what of the piece is in this rank's share of the buffer, which may be nothing
        start = max(piece.start, share_start)
        stop = max(start, min(piece.stop, share_stop))
        # Ranks that hold the same elements save an equal part each: those of tp with a copy of the
        # slice, on each pipeline rank with a copy of a tied parameter.
        tp_copies = piece.part.copies
        number_of_copy = piece.part.copy + tp_copies * layout.holder(pp_rank)
        num_copies = tp_copies * max(1, len(layout.tied))
        first, last = share(start, stop, number_of_copy, num_copies)
        if first < last:
            yield OwnedRange(piece, first, last)


def _on_cpu(
    values: Tensor,
    copy: bool,
    copies: HostCopies,
) -> Tensor:
    """Return the values in host memory.

    copy: True if they must not share the memory of `values`.
    copies: takes values of a GPU, whose copy is only started here.
    """
    if _goes_to_pinned_memory(values.device):
        return copies.start(values.detach())
    on_cpu = values.detach().cpu()
    # What comes from a device is a copy already.
    shares_memory = on_cpu.data_ptr() == values.data_ptr()
    if copy and shares_memory:
        return on_cpu.clone()
    return on_cpu


def _goes_to_pinned_memory(device: torch.device) -> bool:
    return device.type == "cuda"


def _add_range(
    snapshot: Snapshot,
    file: str,
    kind: str,
    saved_range: OwnedRange,
    values: Tensor,
) -> None:
    """Add a range of a piece: as a rectangle if it is the full slice, else as a flat range of
    it."""
    piece, first, last = saved_range
    part = piece.part
    chunk = _rectangle(part)
    if (first, last) == (piece.start, piece.stop):
        values = values.view(part.local)
    else:
        chunk["range"] = [first - piece.start, last - piece.start]
    snapshot.add(file, f"{kind}/{part.name}", values, part.shape, chunk)


def _rectangle(part: Part) -> dict[str, Any]:
    """Return the rectangle of a slice in its logical tensor, as a chunk of checkpoint.json."""
    offset = [0] * len(part.shape)
    if part.dim is not None:
        offset[part.dim] = part.start
    return {"offset": offset, "shape": list(part.local)}
