"""The part of the state that this rank saves: flat ranges of its own slices, which no other rank saves.

Under ZeRO-1 a rank owns a shard of masters and moments. Where several ranks hold the same data (replicas without ZeRO,
copies of a slice over tp, a parameter tied over pipeline stages), each saves an equal part of it. So all ranks of a
stage write the same number of bytes, but for padding, and none needs values of another.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megaprec.checkpoint.ranges import share
from megaprec.comm.layout import layout_of
from megaprec.optim.flat_buffer import Buffer, Piece
from megaprec.optim.optimizer import ParallelAMPOptimizer


@dataclass
class Snapshot:
    """The tensors that a rank writes, on the CPU. files: by file name and name in the file. entries: of
    checkpoint.json, by key.
    """

    files: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, file: str, key: str, values: Tensor, shape: tuple[int, ...], chunk: dict[str, Any]) -> None:
        """Add the stored tensor of one chunk. shape: of the logical tensor. chunk: see `megaprec.checkpoint.ranges`."""
        self.files.setdefault(file, {})[key.removeprefix("weight/")] = values
        dtype = str(values.dtype).removeprefix("torch.")
        self.entries[key] = {"dtype": dtype, "shape": list(shape), "chunks": [{"file": file, **chunk}]}


def take_snapshot(optimizer: ParallelAMPOptimizer, copy: bool) -> Snapshot:
    """Return what this rank saves. Without communication.

    copy: False returns views where the state is on the CPU; they must be written before the next step.
    """
    made, rank = Snapshot(), optimizer.world.rank
    for buffer in optimizer.all_buffers():
        mine = list(owned_ranges(buffer, optimizer.pp.rank))
        for kind, values in buffer.saved().items() if mine else ():
            file = f"{'model' if kind == 'weight' else 'optimizer'}-{rank:05d}.safetensors"
            held = _on_cpu(values[mine[0][1] - buffer.first : mine[-1][2] - buffer.first], copy)
            for piece, first, last in mine:
                stored = held[first - mine[0][1] : last - mine[0][1]]
                _add(made, file, f"{kind}/{piece.part.name}", piece, first, last, stored)
    return made


def owned_ranges(buffer: Buffer, pp_rank: int) -> Iterator[tuple[Piece, int, int]]:
    """Yield the pieces that this rank saves a part of, with the elements [first, last) of the buffer, in order."""
    layouts = (layout_of(parameter) for parameter in buffer.parameters)
    tied = (layout.tied or (pp_rank,) for layout in layouts for _ in layout.parts)
    for piece, stages in zip(buffer.pieces, tied, strict=True):
        first, last = max(piece.start, buffer.share[0]), min(piece.stop, buffer.share[1])
        number = piece.part.copy + piece.part.copies * stages.index(pp_rank)
        first, last = share(first, max(first, last), number, piece.part.copies * len(stages))
        if first < last:
            yield piece, first, last


def _on_cpu(values: Tensor, copy: bool) -> Tensor:
    """Return the values in host memory. copy: True if they must not share the memory of `values`."""
    held = values.detach().cpu()
    return held.clone() if copy and held.data_ptr() == values.data_ptr() else held


def _add(made: Snapshot, file: str, key: str, piece: Piece, first: int, last: int, values: Tensor) -> None:
    part = piece.part
    chunk: dict[str, Any] = {
        "offset": [part.start if d == part.dim else 0 for d in range(len(part.shape))],
        "shape": list(part.local),
    }
    if (first, last) == (piece.start, piece.stop):
        values = values.view(part.local)
    else:
        chunk["range"] = [first - piece.start, last - piece.start]
    made.add(file, key, values, part.shape, chunk)
