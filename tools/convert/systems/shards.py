"""Tensors that systems save by rank, put together: what InternEvo's and NxD's folders have in
common.

The ranks of a stage each have a part of a cut tensor and a copy of any other. The rows of the name
tables say how a tensor is cut. Nothing is padded, so the parts must make the tensor that the model
asks for, no more and no less.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from megaprec.errors import UserError
from tools.convert.core.rules import Cut, Match
from tools.convert.core.tensors import Stored
from tools.convert.megatron.layout import BLOCKS, join_parts
from tools.convert.megatron.ranks import MergedTensor, TensorSource, checked_copy

# of a tensor's name: which part a rank has, and of how many
PartOf = Callable[[str], tuple[int, int]]


def collect_shards(
    path: Path, ranks: Iterable[tuple[PartOf, Mapping[str, Stored]]], lone: Sequence[str] = ()
) -> dict[str, list[TensorSource]]:
    """Name -> its parts, over the ranks of one stage. Copies of a part must be alike.

    lone: ends of names that only the first rank has.
    """
    copies: dict[str, dict[int, list[TensorSource]]] = {}
    counts: dict[str, int] = {}
    for place, held in ranks:
        for name, stored in held.items():
            if not stored.shape:
                raise UserError(f"{path}: {name} is a single number, and no tensor of a model is")
            number, counts[name] = place(name)
            copies.setdefault(name, {}).setdefault(number, []).append(stored)
    for name, parts in copies.items():
        if sorted(parts) != [*range(counts[name])] and not (
            list(parts) == [0] and name.endswith(tuple(lone))
        ):
            raise UserError(
                f"{path}: {name} is in the files of some ranks of a stage and not of others"
            )
    return {
        name: [checked_copy(path, name, parts[n]) for n in sorted(parts)]
        for name, parts in copies.items()
    }


def merge_shards(
    path: Path, found: Sequence[Match], by_name: Mapping[str, list[TensorSource]]
) -> dict[str, TensorSource]:
    """The whole tensors by name. One that is not in `found` is returned for `check_tensors` to
    speak of."""
    known = {match.foreign: match for match in found}
    return {
        name: _whole(path, known[name], parts) if name in known else parts[0]
        for name, parts in by_name.items()
    }


def _whole(path: Path, match: Match, parts: list[TensorSource]) -> TensorSource:
    if match.cut == "whole" or len(parts) == 1:
        return checked_copy(path, match.foreign, parts)
    if len({part.dtype for part in parts}) > 1:
        raise UserError(f"{path}: {match.foreign} has values of another type on some ranks")
    shape = _joined(match.cut, [part.shape for part in parts])
    if shape != match.shape:
        raise UserError(
            f"{path}: {match.foreign} of {len(parts)} ranks makes {list(shape or ())}, but "
            "the model asks for "
            f"{list(match.shape)}: files of ranks are missing, or it is another model that is "
            "described"
        )

    def read() -> Tensor:
        return join_parts((part.read() for part in parts), match.cut, match.shape, len(parts))

    return MergedTensor(match.shape, parts[0].dtype, read)


def _joined(cut: Cut, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Shape of the parts put together; None if they do not fit each other."""
    dim = 1 if cut == "columns" else 0
    others = {(len(shape), *shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if (
        len(others) != 1
        or len(shapes[0]) <= dim
        or any(shape[0] % BLOCKS.get(cut, 1) for shape in shapes)
    ):
        return None
    first = shapes[0]
    return (*first[:dim], sum(shape[dim] for shape in shapes), *first[dim + 1 :])
