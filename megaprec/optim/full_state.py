"""The whole state of an optimizer as logical tensors, on every rank: for models that fit, and for
inspection.

Exactly one rank counts each logical element and contributes it; a sum over the mesh assembles the
tensor.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.everyones import everyones
from megaprec.errors import UserError
from megaprec.optim.flat_buffer import Buffer, Piece
from megaprec.precision.plan import DTYPES, dtype_name


def gather_tensors(
    buffers: Sequence[Buffer], world: Axis, device: torch.device
) -> dict[str, Tensor]:
    """Return the masters ("weight") and the moments, by "kind/logical name", on the CPU. Collective
    over the world."""
    mine: dict[str, list[tuple[Buffer, Piece, Tensor]]] = {}
    described: dict[str, tuple[list[int], str]] = {}
    for buffer in buffers:
        for kind, values in buffer.saved().items():
            for piece in buffer.pieces:
                key = f"{kind}/{piece.part.name}"
                mine.setdefault(key, []).append((buffer, piece, values))
                described[key] = list(piece.part.shape), dtype_name(values.dtype)
    tensors: dict[str, Tensor] = {}
    for key, (shape, dtype) in sorted(everyones(described, world, device).items()):
        whole = torch.zeros(shape, dtype=DTYPES[dtype], device=device)
        for buffer, piece, values in mine.get(key, ()):
            _fill(whole, buffer, piece, values)
        tensors[key] = world.sum_(whole).cpu()
    return tensors


def _fill(whole: Tensor, buffer: Buffer, piece: Piece, values: Tensor) -> None:
    """Write the elements of `piece` that this rank counts, from this rank's slice `values`, into
    the logical tensor."""
    first = max(piece.start, buffer.share[0])
    last = min(piece.stop, buffer.share[1])
    if not piece.counts or first >= last:
        return
    local = whole.new_zeros(piece.stop - piece.start)
    local[first - piece.start : last - piece.start] = values[
        first - buffer.first : last - buffer.first
    ]
    piece.part.take(whole).add_(local.view(piece.part.local))


def load_tensors(
    tensors: dict[str, Tensor], buffers: Sequence[Buffer], world: Axis, device: torch.device
) -> None:
    """Load this rank's slices. Raise UserError on every rank, before anything is changed, if a
    tensor does not fit."""
    needed = list(_needed(buffers))
    wrong = [
        f"{key} is {list(piece.part.shape)} in the model, "
        f"{list(tensors[key].shape) if key in tensors else 'not'} in "
        "the state"
        for key, _, piece in needed
        if key not in tensors or tuple(tensors[key].shape) != piece.part.shape
    ]
    wrong += [
        f"{key} of the state is {tensors[key].dtype}: must be a floating-point tensor"
        for key in dict.fromkeys(key for key, _, _ in needed)
        if key in tensors and not tensors[key].is_floating_point()
    ]
    known = everyones({key: None for key, _, _ in needed}, world, device)
    wrong += [f"{key} of the state is not in the model" for key in tensors if key not in known]
    if world.max_(torch.tensor(float(len(wrong)), device=device)):
        raise UserError(
            "the state is of another model",
            *(wrong[:5] or ["another rank says which tensors differ"]),
        )
    for key, buffer, piece in needed:
        first = max(piece.start, buffer.first)
        last = min(piece.stop, buffer.last)
        if first < last:
            values = piece.part.take(tensors[key]).reshape(-1)[
                first - piece.start : last - piece.start
            ]
            buffer.restore(key.partition("/")[0], first - buffer.first, values)


def _needed(buffers: Sequence[Buffer]) -> Iterator[tuple[str, Buffer, Piece]]:
    for buffer in buffers:
        for kind in buffer.saved_names:
            for piece in buffer.pieces:
                yield f"{kind}/{piece.part.name}", buffer, piece
