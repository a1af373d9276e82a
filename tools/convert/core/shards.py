"""Tensors that systems save by rank, put together into whole ones, with layers counted over stages.

The ranks of a stage each have a part of a cut tensor and a copy of any other. The rows of the name
tables say how a tensor is cut.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megaprec.errors import UserError
from tools.convert.core.finite import same_values
from tools.convert.core.rules import Cut, Match
from tools.convert.core.tensors import Stored, torch_name

# How many equal blocks a tensor consists of that are each cut over the ranks.
_EQUAL_BLOCKS: dict[Cut, int] = {"halves": 2, "thirds": 3}


@dataclass(frozen=True)
class MergedTensor:
    """A tensor put together from those of the ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


TensorSource = Stored | MergedTensor
Shards = list[TensorSource]  # of a tensor, in order
Rank = TypeVar("Rank")


class ShardPart(NamedTuple):
    """The part of a tensor that a rank has: its number, and how many parts there are."""

    number: int
    count: int


PartOf = Callable[[str], ShardPart]  # of a rank, by the name of a tensor
RankTensors = tuple[PartOf, Mapping[str, Stored]]


def rows_of_blocks(cut: Cut, rows: int) -> list[int]:
    """Return the rows of each block of a tensor that is cut over the ranks, or of a rank's part,
    which has the same share of every block.

    rows: of the tensor or the part. If blocks would have fractions of rows these are cut off, and
        the sum is less than `rows`.
    """
    if isinstance(cut, tuple):
        whole = sum(cut)
        return [block * rows // whole for block in cut]
    count = _EQUAL_BLOCKS.get(cut, 1)
    return [rows // count] * count


def count_ranks(ranks: Iterable[Iterable[int]]) -> Iterator[int]:
    """Yield how many ranks there are along each axis."""
    numbers_by_axis = zip(*ranks, strict=True)
    for numbers in numbers_by_axis:
        # ranks are counted from 0
        yield 1 + max(numbers)


def file_of_each_rank(folder: Path, ranks: Mapping[str, Rank]) -> dict[Rank, Path]:
    """Return the file of each rank. ranks: by the names of files. UserError if two are of one
    rank."""
    files: dict[Rank, Path] = {}
    for file_name, rank in ranks.items():
        file = folder / file_name
        if rank in files:
            other_file = files[rank]
            raise UserError.of("convert.rank_twice", path=file, names=other_file.name)
        files[rank] = file
    return files


def collect_shards(
    checkpoint: Path, ranks: Iterable[RankTensors], lone: Sequence[str] = ()
) -> dict[str, Shards]:
    """Return the parts of each tensor by name, in their order, over the ranks of one stage.

    Ranks that have the same part have copies of it: reading raises UserError if they differ.
    ranks: of each, a function that says which part of a tensor it has, and its tensors.
    lone: ends of names of tensors that only the first rank has.
    """
    copies: dict[str, dict[int, Shards]] = {}  # by the number of the part
    counts: dict[str, int] = {}  # of parts that there must be
    for part_of, tensors in ranks:
        for tensor_name, stored in tensors.items():
            # Ranks put their parts together along a dimension, which a scalar has not.
            if not stored.shape:
                raise UserError.of("convert.tensor_scalar", path=checkpoint, name=tensor_name)
            part = part_of(tensor_name)
            counts[tensor_name] = part.count
            copies_by_number = copies.setdefault(tensor_name, {})
            copies_of_part = copies_by_number.setdefault(part.number, [])
            copies_of_part.append(stored)
    # What some ranks have and others lack was lost with a file, or is of another model.
    lone_ends = tuple(lone)
    for tensor_name, copies_by_number in copies.items():
        all_numbers = [*range(counts[tensor_name])]
        is_complete = sorted(copies_by_number) == all_numbers
        is_lone = list(copies_by_number) == [0] and tensor_name.endswith(lone_ends)
        if not is_complete and not is_lone:
            raise UserError.of("convert.missing_on_ranks", path=checkpoint, name=tensor_name)
    shards: dict[str, Shards] = {}
    for tensor_name, copies_by_number in copies.items():
        shards[tensor_name] = []
        for number in sorted(copies_by_number):
            shard = checked_copy(checkpoint, tensor_name, copies_by_number[number])
            shards[tensor_name].append(shard)
    return shards


def merge_shards(
    checkpoint: Path,
    expected: Sequence[Match],
    shards_by_name: Mapping[str, Sequence[TensorSource]],
) -> dict[str, TensorSource]:
    """Return the whole tensors by name. Of one that is not expected the first part is returned, for
    `check_tensors` to speak of."""
    matches = {match.foreign: match for match in expected}
    merged: dict[str, TensorSource] = {}
    for tensor_name, shards in shards_by_name.items():
        if tensor_name in matches:
            match = matches[tensor_name]
            merged[tensor_name] = _merge(checkpoint, match, shards)
        else:
            merged[tensor_name] = shards[0]
    return merged


def _merge(checkpoint: Path, match: Match, shards: Sequence[TensorSource]) -> TensorSource:
    """Return the tensor of `match` put together from its parts."""
    joined = join_shards(checkpoint, match.foreign, shards, match.cut)
    rows = match.shape[0]
    if match.cut == "vocabulary" and joined.shape[0] > rows:
        # Rows beyond those of the tensor pad the vocabulary.
        shape = (rows, *joined.shape[1:])
        return MergedTensor(shape, joined.dtype, lambda: joined.read()[:rows])
    # A single part of another shape is one that `check_tensors` speaks of.
    if len(shards) > 1 and joined.shape != match.shape:
        raise UserError.of(
            "convert.joined_shape",
            path=checkpoint,
            name=match.foreign,
            count=len(shards),
            shape=list(joined.shape),
            expected_shape=list(match.shape),
        )
    return joined


def join_shards(
    checkpoint: Path, tensor_name: str, shards: Sequence[TensorSource], cut: Cut
) -> TensorSource:
    """Return the parts of a tensor put together, whatever the model asks for. UserError if they do
    not fit each other."""
    # All ranks have the whole of it, or one rank has.
    if cut == "whole" or len(shards) == 1:
        return checked_copy(checkpoint, tensor_name, shards)
    require_one_dtype(checkpoint, tensor_name, shards)
    shapes = [shard.shape for shard in shards]
    shape = _joined_shape(cut, shapes)
    if shape is None:
        raise unlike_shapes(checkpoint, tensor_name, shards)

    def read() -> Tensor:
        parts = (shard.read() for shard in shards)  # one after another, to save memory
        return join_parts(parts, cut, shape)

    return MergedTensor(shape, shards[0].dtype, read)


def join_parts(parts: Iterator[Tensor], cut: Cut, shape: Sequence[int]) -> Tensor:
    """Return the tensor of this shape of the parts of all ranks, which are read one by one."""
    first = next(parts)
    # Allocated once; torch.cat would need all parts at the same time.
    joined = first.new_empty(shape)
    dim = 1 if cut == "columns" else 0
    block_rows = rows_of_blocks(cut, len(joined))
    blocks = joined.split(block_rows)  # views of it
    starts = [0] * len(blocks)  # in each block, where the next part begins
    for part in chain((first,), parts):
        rows_in_blocks = rows_of_blocks(cut, len(part))
        for number, values in enumerate(part.split(rows_in_blocks)):
            length = values.shape[dim]
            target = blocks[number].narrow(dim, starts[number], length)
            target.copy_(values)
            starts[number] += length
    return joined


def _joined_shape(cut: Cut, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the shape of the parts put together; None if they do not fit each other."""
    dim = 1 if cut == "columns" else 0
    first = shapes[0]
    if len(first) <= dim:
        return None
    length = 0
    before = first[:dim]
    after = first[dim + 1 :]
    for shape in shapes:
        # Blocks are cut evenly, and all sizes but that of the cut dimension are the same.
        if len(shape) != len(first):
            return None
        rows = shape[0]
        if sum(rows_of_blocks(cut, rows)) != rows:
            return None
        if shape[:dim] != before or shape[dim + 1 :] != after:
            return None
        length += shape[dim]
    return (*before, length, *after)


def checked_copy(
    checkpoint: Path, tensor_name: str, copies: Sequence[TensorSource]
) -> TensorSource:
    """Return the first of several copies; reading it raises UserError if another differs."""
    first, *others = copies
    if not others:
        return first
    require_one_dtype(checkpoint, tensor_name, copies)
    if any(copy.shape != first.shape for copy in others):
        raise unlike_shapes(checkpoint, tensor_name, copies)

    def read() -> Tensor:
        values = first.read()
        if not all(same_values(values, copy.read()) for copy in others):
            raise UserError.of("convert.ranks_disagree", path=checkpoint, name=tensor_name)
        return values

    return MergedTensor(first.shape, first.dtype, read)


def require_one_dtype(checkpoint: Path, tensor_name: str, parts: Sequence[TensorSource]) -> None:
    """Raise UserError if ranks hold a tensor in several dtypes: put together, some of it would be
    rounded."""
    # Sorted, so that the same files always give the same message.
    dtypes = sorted({torch_name(part.dtype) for part in parts})
    if len(dtypes) > 1:
        raise UserError.of(
            "convert.ranks_dtypes",
            path=checkpoint,
            name=tensor_name,
            dtypes=" and ".join(dtypes),
        )


def number_over_stages(
    checkpoint: Path,
    stages: Sequence[Mapping[str, list[TensorSource]]],
    layer: re.Pattern[str],
    ends: Mapping[str, int],
    repeated: Sequence[str] = (),
) -> dict[str, list[TensorSource]]:
    """Return the parts of each tensor of all stages, by its name with layers counted over all
    stages.

    layer: matches what is before a layer's number, the number and the rest of a name.
    ends: beginnings of names -> the stage that alone has them; UserError if another has them, for
        then files have each other's names.
    repeated: names that several stages may have, which must then be the same.
    """
    _check_ends(checkpoint, stages, ends, repeated)
    merged: dict[str, list[TensorSource]] = {}
    # Every stage counts its layers from 0.
    layers_before = 0
    for stage in stages:
        local_numbers = set()  # of the layers of this stage
        for tensor_name, parts in stage.items():
            global_name = tensor_name
            if match := layer.match(tensor_name):
                prefix, number, suffix = match.groups()
                local_numbers.add(number)
                global_number = int(number) + layers_before
                global_name = f"{prefix}{global_number}{suffix}"
            if global_name in merged and global_name not in repeated:
                raise UserError.of("convert.layer_twice", path=checkpoint, global_name=global_name)
            # The embedding beside modules of multi-token prediction is on the first stage and the
            # last.
            if global_name in merged:
                pairs = zip(merged[global_name], parts, strict=True)
                parts = [checked_copy(checkpoint, tensor_name, pair) for pair in pairs]
            merged[global_name] = parts
        layers_before += len(local_numbers)
    return merged


def _check_ends(
    checkpoint: Path,
    stages: Sequence[Mapping[str, list[TensorSource]]],
    ends: Mapping[str, int],
    repeated: Sequence[str],
) -> None:
    """Raise UserError for a tensor that only another stage has, as `number_over_stages` says."""
    for number, stage in enumerate(stages):
        for tensor_name in stage:
            owners = [owner for begin, owner in ends.items() if tensor_name.startswith(begin)]
            # What is not among the ends may be on any stage.
            owner = owners[0] if owners else number
            if owner != number and tensor_name not in repeated:
                raise UserError.of(
                    "convert.layer_of_stage",
                    path=checkpoint,
                    name=tensor_name,
                    owner=owner,
                    num_stages=len(stages),
                    number=number,
                )


def unlike_shapes(checkpoint: Path, tensor_name: str, shards: Sequence[TensorSource]) -> UserError:
    """Return the error about parts or copies of a tensor whose shapes do not fit each other."""
    shapes = ", ".join(str(list(shard.shape)) for shard in shards)
    return UserError.of("convert.ranks_shapes", path=checkpoint, name=tensor_name, shapes=shapes)


def notes_on_copies(
    checkpoint: Path, tensors: Mapping[Any, Sequence[Mapping[str, Stored]]]
) -> Iterator[str]:
    """Yield a note for each rank whose file holds what that of another does, by their checksums.

    tensors: of each rank, those of each of its chunks, without ranks that hold what another does by
        design. No two of these hold the same unless all began with the same random numbers.
    """
    first_files: dict[Any, Path] = {}
    for chunks in tensors.values():
        identities = []  # of all tensors of the rank
        files = []
        for number, chunk in enumerate(chunks):
            for tensor_name, stored in chunk.items():
                identity = (number, tensor_name, stored.shape, stored.dtype, stored.crc)
                identities.append(identity)
                files.append(stored.file)
        # Without a checksum of every tensor nothing can be said.
        if not identities or any(crc is None for *_, crc in identities):
            continue
        file = files[0]
        contents = frozenset(identities)
        first_file = first_files.setdefault(contents, file)
        if first_file != file:
            yield (
                f"{checkpoint}: {file} and {first_file} hold the same numbers throughout: "
                "one may be a copy of the other"
            )
