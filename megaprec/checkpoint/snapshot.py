"""The part of the state that this rank saves: flat ranges of its own slices, which no other rank
saves.

Under ZeRO-1 a rank owns a shard of masters and moments. Where several ranks hold the same data
(replicas without ZeRO, copies of a slice over tp, a parameter tied over pipeline stages), each
saves an equal part of it. So all ranks of a stage write the same number of bytes, but for padding,
and none needs values of another. Frozen parameters are in no buffer; the first replica saves them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megaprec.checkpoint.ranges import share
from megaprec.comm.layout import Part, layout_of
from megaprec.optim.flat_buffer import Buffer, Piece
from megaprec.optim.optimizer import ParallelAMPOptimizer


@dataclass
class Snapshot:
    """The tensors that rank `rank` writes, on the CPU. files: by file name and name in the file.
    entries: of checkpoint.json, by key.
    """

    rank: int
    files: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(
        self, kind: str, key: str, values: Tensor, shape: tuple[int, ...], chunk: dict[str, Any]
    ) -> None:
        """Add the stored tensor of one chunk to a file whose name begins with `kind`.

        A rank that saves several chunks of a tensor (of virtual ranks, or of tied copies) puts them
        in several files.
        shape: of the logical tensor. chunk: see `megaprec.checkpoint.ranges`.
        """
        dtype = str(values.dtype).removeprefix("torch.")
        entry = self.entries.setdefault(key, {"dtype": dtype, "shape": list(shape), "chunks": []})
        number = len(entry["chunks"])
        file = f"{kind}-{self.rank:05d}{f'-{number}' if number else ''}.safetensors"
        self.files.setdefault(file, {})[key.removeprefix("weight/")] = values
        entry["chunks"].append({"file": file, **chunk})


def take_snapshot(optimizer: ParallelAMPOptimizer, copy: bool) -> Snapshot:
    """Return what this rank saves. Without communication.

    copy: False returns views where the state is on the CPU; they must be written before the next
        step.
    """
    made = Snapshot(optimizer.world.rank)
    for buffer in optimizer.all_buffers():
        mine = list(owned_ranges(buffer, optimizer.pp.rank))
        for kind, values in buffer.saved().items() if mine else ():
            file = "model" if kind == "weight" else "optimizer"
            held = _on_cpu(values[mine[0][1] - buffer.first : mine[-1][2] - buffer.first], copy)
            for piece, first, last in mine:
                stored = held[first - mine[0][1] : last - mine[0][1]]
                _add(made, file, f"{kind}/{piece.part.name}", piece, first, last, stored)
    for frozen in optimizer.untrained.slices():
        if frozen.saved and frozen.values.numel():
            values = _on_cpu(frozen.values, copy).view(frozen.part.local)
            chunk = _place(frozen.part)
            made.add("model", key := f"weight/{frozen.part.name}", values, frozen.part.shape, chunk)
            made.entries[key]["frozen"] = True
    return made


def owned_ranges(buffer: Buffer, pp_rank: int) -> Iterator[tuple[Piece, int, int]]:
    """Yield the pieces that this rank saves a part of, with the elements [first, last) of the
    buffer, in order."""
    layouts = (layout for layout in map(layout_of, buffer.parameters) for _ in layout.parts)
    for piece, layout in zip(buffer.pieces, layouts, strict=True):
        first = max(piece.start, buffer.share[0])
        last = min(piece.stop, buffer.share[1])
        number = piece.part.copy + piece.part.copies * layout.holder(pp_rank)
        first, last = share(
            first, max(first, last), number, piece.part.copies * max(1, len(layout.tied))
        )
        if first < last:
            yield piece, first, last


def _on_cpu(values: Tensor, copy: bool) -> Tensor:
    """Return the values in host memory. copy: True if they must not share the memory of
    `values`."""
    held = values.detach().cpu()
    return held.clone() if copy and held.data_ptr() == values.data_ptr() else held


def _add(
    made: Snapshot, file: str, key: str, piece: Piece, first: int, last: int, values: Tensor
) -> None:
    part = piece.part
    chunk = _place(piece.part)
    if (first, last) == (piece.start, piece.stop):
        values = values.view(part.local)
    else:
        chunk["range"] = [first - piece.start, last - piece.start]
    made.add(file, key, values, part.shape, chunk)


def _place(part: Part) -> dict[str, Any]:
    """Return the rectangle of a slice in its logical tensor."""
    return {
        "offset": [part.start if d == part.dim else 0 for d in range(len(part.shape))],
        "shape": list(part.local),
    }
