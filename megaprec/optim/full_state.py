"""The whole state of an optimizer as logical tensors, on every rank: for models that fit, and for
inspection.

Exactly one rank counts each logical element and contributes it; a sum over the mesh assembles the
tensor.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.everyones import everyones
from megaprec.errors import UserError
from megaprec.optim.flat_buffer import Buffer, OwnedPiece, Piece
from megaprec.precision.plan import DTYPES, dtype_name

_MAX_PROBLEMS = 5  # lines of an error; a state of another model differs in every tensor


def gather_tensors(
    buffers: Sequence[Buffer], world: Axis, device: torch.device
) -> dict[str, Tensor]:
    """Return the masters ("weight") and the moments, by "kind/logical name", on the CPU. Collective
    over the world."""
    counted: dict[str, list[tuple[OwnedPiece, Tensor]]] = defaultdict(list)
    descriptions: dict[str, tuple[list[int], str]] = {}
    for buffer in buffers:
        for kind, values in buffer.saved().items():
            for piece in buffer.pieces:
                key = _state_key(kind, piece)
                descriptions[key] = list(piece.part.shape), dtype_name(values.dtype)
            for owned in buffer.owned_pieces(*buffer.share):
                if owned.piece.counts:
                    counted[_state_key(kind, owned.piece)].append((owned, values))
    tensors: dict[str, Tensor] = {}
    for key, (shape, dtype) in sorted(everyones(descriptions, world, device).items()):
        full = torch.zeros(shape, dtype=DTYPES[dtype], device=device)
        for owned, values in counted.get(key, ()):
            _add_elements(full, owned, values)
        tensors[key] = world.sum_(full).cpu()
    return tensors


def _add_elements(full: Tensor, owned: OwnedPiece, values: Tensor) -> None:
    """Add the elements of a piece, from this rank's slice `values`, to the logical tensor."""
    piece = owned.piece
    local = full.new_zeros(piece.stop - piece.start)
    local[owned.in_part] = values[owned.in_shard]
    piece.part.take(full).add_(local.view(piece.part.local))


def load_tensors(
    tensors: dict[str, Tensor], buffers: Sequence[Buffer], world: Axis, device: torch.device
) -> None:
    """Load this rank's slices. Raise UserError on every rank, before anything is changed, if a
    tensor does not fit."""
    needed = list(_needed_pieces(buffers))
    problems = list(_shape_problems(tensors, needed))
    names = dict.fromkeys(key for key, _ in needed)
    for key in names:
        if key in tensors and not tensors[key].is_floating_point():
            problems.append(
                f"{key} of the state is {tensors[key].dtype}: must be a floating-point tensor"
            )
    model_names = everyones(names, world, device)
    for key in tensors:
        if key not in model_names:
            problems.append(f"{key} of the state is not in the model")
    if world.max_(torch.tensor(float(len(problems)), device=device)):
        lines = problems[:_MAX_PROBLEMS] or ["another rank says which tensors differ"]
        raise UserError("the state is of another model", *lines)
    for buffer in buffers:
        for kind in buffer.saved_names:
            for owned in buffer.owned_pieces():
                full = tensors[_state_key(kind, owned.piece)]
                values = owned.piece.part.take(full).reshape(-1)[owned.in_part]
                buffer.restore(kind, owned.in_shard.start, values)


def _shape_problems(
    tensors: dict[str, Tensor], needed: Sequence[tuple[str, Piece]]
) -> Iterator[str]:
    """Yield a line for each piece whose logical tensor the state lacks, or has in another shape."""
    for key, piece in needed:
        shape = tuple(tensors[key].shape) if key in tensors else None
        if shape != piece.part.shape:
            described = "not" if shape is None else list(shape)
            yield f"{key} is {list(piece.part.shape)} in the model, {described} in the state"


def _needed_pieces(buffers: Sequence[Buffer]) -> Iterator[tuple[str, Piece]]:
    for buffer in buffers:
        for kind in buffer.saved_names:
            for piece in buffer.pieces:
                yield _state_key(kind, piece), piece


def _state_key(kind: str, piece: Piece) -> str:
    return f"{kind}/{piece.part.name}"
