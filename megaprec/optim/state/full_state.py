"""The whole state of an optimizer as logical tensors, on every rank: for models that fit, and for
inspection.

Exactly one rank counts each logical element and contributes it; a sum over the mesh assembles the
tensor.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.gathered_texts import gather_entries
from megaprec.errors import Problem, UserError
from megaprec.optim.state.flat_buffer import Buffer, OwnedPiece, Piece
from megaprec.precision.plan import DTYPES, dtype_name

_MAX_PROBLEMS = 5  # lines of an error; a state of another model differs in every tensor


class _Counted(NamedTuple):
    """Elements of a logical tensor that this rank alone counts.

    values: this rank's slice [local] of the buffer in which they lie.
    """

    owned: OwnedPiece
    values: Tensor

    def add_to(self, full: Tensor) -> None:
        """Add the elements at their places in the logical tensor `full`."""
        piece = self.owned.piece
        num_elements = piece.stop - piece.start
        flat_part = full.new_zeros(num_elements)
        flat_part[self.owned.in_part] = self.values[self.owned.in_shard]
        target = piece.part.take(full)  # a view
        target.add_(flat_part.view(piece.part.local))


def gather_tensors(
    buffers: Sequence[Buffer],
    world: Axis,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return the masters ("weight") and the moments, by "kind/logical name", on the CPU. Collective
    over the world."""
    counted: dict[str, list[_Counted]] = defaultdict(list)
    # shape and dtype of the logical tensors of which this rank holds slices
    headers: dict[str, tuple[list[int], str]] = {}
    for buffer in buffers:
        for kind, values in buffer.saved().items():
            for piece in buffer.pieces:
                state_key = _state_key(kind, piece)
                shape = list(piece.part.shape)
                headers[state_key] = (shape, dtype_name(values.dtype))
            # this rank's share: replicas and ranks of ZeRO-1 divide the elements among them
            for owned in buffer.owned_pieces(*buffer.share):
                if owned.piece.counts:
                    state_key = _state_key(kind, owned.piece)
                    counted_elements = _Counted(owned, values)
                    counted[state_key].append(counted_elements)
    tensors: dict[str, Tensor] = {}
    all_headers = gather_entries(headers, world, device)
    # sorted: all ranks sum the same tensor at the same time
    for state_key, (shape, dtype) in sorted(all_headers.items()):
        full_tensor = torch.zeros(shape, dtype=DTYPES[dtype], device=device)
        for counted_elements in counted.get(state_key, ()):
            counted_elements.add_to(full_tensor)
        tensors[state_key] = world.sum_(full_tensor).cpu()
    return tensors


def load_tensors(
    tensors: dict[str, Tensor],
    buffers: Sequence[Buffer],
    world: Axis,
    device: torch.device,
) -> None:
    """Load this rank's slices from whole tensors by "kind/logical name". Raise UserError on every
    rank, before anything is changed, if a tensor does not fit. Collective over the world."""
    needed = dict(_needed_pieces(buffers))
    problems = list(_problems(tensors, needed))
    # other ranks hold other tensors of the model
    keys_of_model = gather_entries(dict.fromkeys(needed), world, device)
    for state_key in tensors:
        if state_key not in keys_of_model:
            problems.append(Problem.of("optimizer.state_not_in_model", key=state_key))
    # a rank without problems must not go on alone
    num_problems = torch.tensor(float(len(problems)), device=device)
    if world.max_(num_problems):
        heading = Problem.of("optimizer.state_of_other_model")
        shown = problems[:_MAX_PROBLEMS] or [Problem.of("optimizer.state_elsewhere")]
        raise UserError(heading, *shown)
    for buffer in buffers:
        for kind in buffer.saved_names:
            for owned in buffer.owned_pieces():
                full_tensor = tensors[_state_key(kind, owned.piece)]
                own_part = owned.piece.part.take(full_tensor)
                elements = own_part.reshape(-1)[owned.in_part]
                buffer.restore(kind, owned.in_shard.start, elements)


def _problems(tensors: dict[str, Tensor], needed: Mapping[str, Piece]) -> Iterator[Problem]:
    """Yield a problem for each needed tensor that is missing, or of another shape or kind."""
    for state_key, piece in needed.items():
        tensor = tensors.get(state_key)
        shape = piece.part.shape
        if tensor is None or tuple(tensor.shape) != shape:
            saved_shape = "not" if tensor is None else list(tensor.shape)
            yield Problem.of(
                "optimizer.state_shape",
                key=state_key,
                shape=list(shape),
                saved_shape=saved_shape,
            )
        elif not tensor.is_floating_point():
            yield Problem.of("optimizer.state_not_real", key=state_key, dtype=tensor.dtype)


def _needed_pieces(buffers: Sequence[Buffer]) -> Iterator[tuple[str, Piece]]:
    """Yield the "kind/logical name" of each tensor that this rank loads slices of, and one of its
    pieces."""
    for buffer in buffers:
        for kind in buffer.saved_names:
            for piece in buffer.pieces:
                yield _state_key(kind, piece), piece


def _state_key(kind: str, piece: Piece) -> str:
    return f"{kind}/{piece.part.name}"
