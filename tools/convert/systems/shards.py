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
    """The part of a tensor that a rank has: its number, and how many parts there are."""

    number: int
    count: int


PartOf = Callable[[str], Part]  # of a rank, by the name of a tensor
RankTensors = tuple[PartOf, Mapping[str, Stored]]
Shards = list[TensorSource]  # of a tensor, in order


def collect_shards(
    checkpoint: Path, ranks: Iterable[RankTensors], lone: Sequence[str] = ()
) -> dict[str, Shards]:
    """Return name -> its parts, over the ranks of one stage. Copies of a part must be the same.

    ranks: of each, which parts it has, and its tensors.
    lone: ends of names that only the first rank has.
    """
    copies: dict[str, dict[int, Shards]] = {}  # by the number of the part
    counts: dict[str, int] = {}  # of parts that there must be
    for part_of, tensors in ranks:
        for tensor_name, stored in tensors.items():
            if not stored.shape:
                raise UserError.of("convert.megatron_scalar", path=checkpoint, name=tensor_name)
            part = part_of(tensor_name)
            counts[tensor_name] = part.count
            shards_by_number = copies.setdefault(tensor_name, {})
            shards_by_number.setdefault(part.number, []).append(stored)
    for tensor_name, shards_by_number in copies.items():
        is_complete = sorted(shards_by_number) == [*range(counts[tensor_name])]
        is_lone = list(shards_by_number) == [0] and tensor_name.endswith(tuple(lone))
        if not is_complete and not is_lone:
            raise UserError.of("convert.nxd_missing_on_ranks", path=checkpoint, name=tensor_name)
    shards: dict[str, Shards] = {}
    for tensor_name, shards_by_number in copies.items():
        shards[tensor_name] = []
        for number in sorted(shards_by_number):
            shard = checked_copy(checkpoint, tensor_name, shards_by_number[number])
            shards[tensor_name].append(shard)
    return shards


def merge_shards(
    checkpoint: Path, expected: Sequence[Match], shards_by_name: Mapping[str, Shards]
) -> dict[str, TensorSource]:
    """Return the whole tensors by name. Of one that is not expected the first part is returned, for
    `check_tensors` to speak of."""
    matches = {match.foreign: match for match in expected}
    merged: dict[str, TensorSource] = {}
    for tensor_name, shards in shards_by_name.items():
        if tensor_name in matches:
            merged[tensor_name] = _merge(checkpoint, matches[tensor_name], shards)
        else:
            merged[tensor_name] = shards[0]
    return merged


def _merge(checkpoint: Path, match: Match, shards: Shards) -> TensorSource:
    """Return the tensor of `match` put together from its parts."""
    if match.cut == "whole" or len(shards) == 1:
        return checked_copy(checkpoint, match.foreign, shards)
    count = len(shards)
    dtypes = {shard.dtype for shard in shards}
    if len(dtypes) > 1:
        raise UserError.of("convert.nxd_dtype", path=checkpoint, foreign=match.foreign)
    shape = _joined_shape(match.cut, [shard.shape for shard in shards])
    if shape != match.shape:
        raise UserError.of(
            "convert.nxd_shape",
            path=checkpoint,
            foreign=match.foreign,
            count=count,
            shape=list(shape or ()),
            expected_shape=list(match.shape),
        )

    def read() -> Tensor:
        parts = (shard.read() for shard in shards)  # one after another, to save memory
        return join_parts(parts, match.cut, match.shape, count)

    return MergedTensor(match.shape, shards[0].dtype, read)


def _joined_shape(cut: Cut, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the shape of the parts put together; None if they do not fit each other."""
    dim = 1 if cut == "columns" else 0
    joined = list(shapes[0])
    if len(joined) <= dim:
        return None
    blocks = BLOCKS.get(cut, 1)
    joined[dim] = 0
    for shape in shapes:
        # All sizes but that of the cut dimension are the same, and blocks are cut evenly.
        same_sizes = shape[:dim] == shapes[0][:dim] and shape[dim + 1 :] == shapes[0][dim + 1 :]
        if len(shape) != len(joined) or not same_sizes or shape[0] % blocks:
            return None
        joined[dim] += shape[dim]
    return tuple(joined)
