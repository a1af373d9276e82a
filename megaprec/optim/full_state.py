"""The whole state of an optimizer as logical tensors, on every rank: for models that fit, and for
inspection.

Exactly one rank counts each logical element and contributes it; a sum over the mesh assembles the
tensor.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.gathered_texts import gather_entries
from megaprec.errors import Problem, UserError
from megaprec.optim.flat_buffer import Buffer, OwnedPiece, Piece
from megaprec.precision.plan import DTYPES, dtype_name

_MAX_PROBLEMS = 5  # lines of an error; a state of another model differs in every tensor


class _Counted(NamedTuple):
    """Elements of a logical tensor that this rank alone counts. values: this rank's slice."""

    owned: OwnedPiece
    values: Tensor

    def add_to(self, full: Tensor) -> None:
        """Add the elements to the logical tensor."""
        piece = self.owned.piece
        local = full.new_zeros(piece.stop - piece.start)
        local[self.owned.in_part] = self.values[self.owned.in_shard]
        target = piece.part.take(full)
        target.add_(local.view(piece.part.local))


def gather_tensors(
    buffers: Sequence[Buffer], world: Axis, device: torch.device
) -> dict[str, Tensor]:
    """Return the masters ("weight") and the moments, by "kind/logical name", on the CPU. Collective
    over the world."""
    counted: dict[str, list[_Counted]] = defaultdict(list)
    headers: dict[str, tuple[list[int], str]] = {}
    for buffer in buffers:
        for kind, values in buffer.saved().items():
            dtype = dtype_name(values.dtype)
            for piece in buffer.pieces:
                key = _state_key(kind, piece)
                headers[key] = list(piece.part.shape), dtype
            # this rank's share: replicas and ranks of ZeRO-1 divide the elements among them
            for owned in buffer.owned_pieces(*buffer.share):
                if owned.piece.counts:
                    key = _state_key(kind, owned.piece)
                    counted[key].append(_Counted(owned, values))
    tensors: dict[str, Tensor] = {}
    all_headers = gather_entries(headers, world, device)
    # sorted: all ranks sum the same tensor at the same time
    for key, (shape, dtype) in sorted(all_headers.items()):
        full = torch.zeros(shape, dtype=DTYPES[dtype], device=device)
        for elements in counted.get(key, ()):
            elements.add_to(full)
        tensors[key] = world.sum_(full).cpu()
    return tensors


def load_tensors(
    tensors: dict[str, Tensor], buffers: Sequence[Buffer], world: Axis, device: torch.device
) -> None:
    """Load this rank's slices. Raise UserError on every rank, before anything is changed, if a
    tensor does not fit."""
    needed = list(_needed_pieces(buffers))
    problems = list(_shape_problems(tensors, needed))
    local_keys = dict.fromkeys(key for key, _ in needed)
    for key in local_keys:
        tensor = tensors.get(key)
        if tensor is not None and not tensor.is_floating_point():
            problems.append(Problem.of("optimizer.state_not_real", key=key, dtype=tensor.dtype))
    keys = gather_entries(local_keys, world, device)
    for key in tensors:
        if key not in keys:
            problems.append(Problem.of("optimizer.state_not_in_model", key=key))
    # a rank without problems must not go on alone
    num_problems = torch.tensor(float(len(problems)), device=device)
    if world.max_(num_problems):
        shown = problems[:_MAX_PROBLEMS] or [Problem.of("optimizer.state_elsewhere")]
        raise UserError(Problem.of("optimizer.state_of_other_model"), *shown)
    for buffer in buffers:
        for kind in buffer.saved_names:
            for owned in buffer.owned_pieces():
                full = tensors[_state_key(kind, owned.piece)]
                flat_part = owned.piece.part.take(full).reshape(-1)
                buffer.restore(kind, owned.in_shard.start, flat_part[owned.in_part])


def _shape_problems(
    tensors: dict[str, Tensor], needed: Sequence[tuple[str, Piece]]
) -> Iterator[Problem]:
    """Yield a problem for each piece whose logical tensor is missing or has another shape."""
    for key, piece in needed:
        shape = tuple(tensors[key].shape) if key in tensors else None
        if shape != piece.part.shape:
            yield Problem.of(
                "optimizer.state_shape",
                key=key,
                shape=list(piece.part.shape),
                described="not" if shape is None else list(shape),
            )


def _needed_pieces(buffers: Sequence[Buffer]) -> Iterator[tuple[str, Piece]]:
    for buffer in buffers:
        for kind in buffer.saved_names:
            for piece in buffer.pieces:
                yield _state_key(kind, piece), piece


def _state_key(kind: str, piece: Piece) -> str:
    return f"{kind}/{piece.part.name}"
