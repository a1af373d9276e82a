"""Tensors that systems save by rank, put together: what InternEvo's and NxD's folders have in
common.

The ranks of a stage each have a part of a cut tensor and a copy of any other. The rows of the name
tables say how a tensor is cut. Nothing is padded, so the parts must make the tensor that the model
asks for, no more and no less.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from megaprec.errors import UserError
from tools.convert.core.rules import Cut, Match
from tools.convert.core.tensors import Stored
from tools.convert.megatron.layout import BLOCKS, join_parts
from tools.convert.megatron.ranks import MergedTensor, TensorSource, checked_copy


class Part(NamedTuple):
    """Which part of a tensor a rank has, and of how many."""

    number: int
    count: int


PartOf = Callable[[str], Part]  # of a rank, by the name of a tensor


def collect_shards(
    path: Path, ranks: Iterable[tuple[PartOf, Mapping[str, Stored]]], lone: Sequence[str] = ()
) -> dict[str, list[TensorSource]]:
    """Return name -> its parts, over the ranks of one stage. Copies of a part must be the same.

    ranks: of each, which parts it has, and its tensors.
    lone: ends of names that only the first rank has.
    """
    copies: dict[str, dict[int, list[TensorSource]]] = {}
    counts: dict[str, int] = {}
    for part_of, tensors in ranks:
        for name, stored in tensors.items():
            if not stored.shape:
                raise UserError(f"{path}: {name} is a single number, and no tensor of a model is")
            part = part_of(name)
            counts[name] = part.count
            copies.setdefault(name, {}).setdefault(part.number, []).append(stored)
    shards: dict[str, list[TensorSource]] = {}
    for name, parts in copies.items():
        complete = sorted(parts) == [*range(counts[name])]
        on_first_alone = list(parts) == [0] and name.endswith(tuple(lone))
        if not complete and not on_first_alone:
            raise UserError(
                f"{path}: {name} is in the files of some ranks of a stage and not of others"
            )
    for name, parts in copies.items():
        shards[name] = [checked_copy(path, name, parts[number]) for number in sorted(parts)]
    return shards


def merge_shards(
    path: Path, expected: Sequence[Match], shards_by_name: Mapping[str, list[TensorSource]]
) -> dict[str, TensorSource]:
    """Return the whole tensors by name. Of one that is not expected the first part is returned, for
    `check_tensors` to speak of."""
    matches = {match.foreign: match for match in expected}
    merged: dict[str, TensorSource] = {}
    for name, shards in shards_by_name.items():
        merged[name] = _merge(path, matches[name], shards) if name in matches else shards[0]
    return merged


def _merge(path: Path, match: Match, shards: list[TensorSource]) -> TensorSource:
    """Return the tensor of `match` put together from its parts."""
    if match.cut == "whole" or len(shards) == 1:
        return checked_copy(path, match.foreign, shards)
    if len({shard.dtype for shard in shards}) > 1:
        raise UserError(f"{path}: {match.foreign} has values of another type on some ranks")
    shape = _joined_shape(match.cut, [shard.shape for shard in shards])
    if shape != match.shape:
        raise UserError(
            f"{path}: {match.foreign} of {len(shards)} ranks makes {list(shape or ())}, but "
            "the model asks for "
            f"{list(match.shape)}: files of ranks are missing, or it is another model that is "
            "described"
        )

    def read() -> Tensor:
        return join_parts((shard.read() for shard in shards), match.cut, match.shape, len(shards))

    return MergedTensor(match.shape, shards[0].dtype, read)


def _joined_shape(cut: Cut, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the shape of the parts put together; None if they do not fit each other."""
    dim = 1 if cut == "columns" else 0
    other_sizes = {(len(shape), *shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if len(other_sizes) != 1 or len(shapes[0]) <= dim:
        return None
    if any(shape[0] % BLOCKS.get(cut, 1) for shape in shapes):
        return None
    joined = list(shapes[0])
    joined[dim] = sum(shape[dim] for shape in shapes)
    return tuple(joined)
