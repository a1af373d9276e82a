"""The flat state of Megatron's distributed optimizer: how it is laid out, and its two forms.

All FP32 masters of a rank lie one after another in one flat tensor, as the gradients lie in the
buffer that they are reduced in, and so do the moments: parameters from the last to the first, each
from a multiple of 64 elements on. A buffer is a row of buckets, of which each begins anew where the
one before it ends. Parameters of every dtype have a buffer of their own, so have those of every
virtual stage, and so have experts that other ranks have not.

distrib_optim.pt, beside a model-parallel rank's file, has a tensor for every buffer. A distributed
checkpoint (dp_reshardable) has one for every bucket:

    [chained_C.]optimizer.distributed.dp_group_idx_N.gbuf_idx_G.dtype_(P, Q).bucket_idx_B.KIND

KIND is param, exp_avg or exp_avg_sq, and P and Q are the dtypes of parameters and gradients. N
counts model-parallel ranks, tp before pp; where a rank has experts of its own, they have an
optimizer of their own, the second, whose N counts an expert's parts, then ep, then pp. G counts the
buffers of a rank's virtual stages. Each data-parallel rank wrote its share of a bucket in pieces,
what lies between parameters too.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.core.chunks import Chunked
from tools.convert.core.rules import Match
from tools.convert.core.shards import MergedTensor, TensorSource
from tools.convert.core.tensors import Stored
from tools.convert.hf.folder import check_tensors
from tools.convert.megatron.layout import (
    EMBEDDING,
    expert_of,
    is_expert,
    is_trained,
    part_shape,
)
from tools.convert.megatron.order import (
    Registered,
    parameters_of,
    shared_weights,
    sizes_of,
    stages_of,
)
from tools.convert.megatron.ranks import RankFile, merge_parts

# Kinds of state -> their names in the distributed optimizer.
FLAT = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
ALIGNED = 64  # elements
# Elements of a bucket by default: the larger of a minimum and a number for each data-parallel rank
# (megatron/core/distributed/distributed_data_parallel.py).
BUCKET_MINIMUM = 40_000_000
BUCKET_PER_RANK = 1_000_000
_KEY = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)"
    r"\.dtype_\((\S+), \S+\)\.bucket_idx_(\d+)\.(\w+)"
)
# forms of the state: this one, and one unread
RESHARDABLE = "dp_reshardable"
GATHERED = "dp_zero_gather_scatter"
# kind -> name of a tensor -> number of the part -> the part
Parts = dict[str, dict[str, dict[int, TensorSource]]]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a rank. alone: whether it has a bucket to itself, as an embedding has that two
    stages share."""

    name: str
    elements: int
    dtype: torch.dtype
    alone: bool


@dataclass(frozen=True)
class Bucket:
    """A bucket of a buffer.

    starts: where in it each parameter begins, by name.
    length: elements, without what pads its end.
    """

    starts: Mapping[str, int]
    length: int


def buffers_of(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """Return the parameters of each buffer of one virtual stage and one optimizer, given all in the
    order of the model."""
    by_dtype: dict[torch.dtype, list[Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    return list(by_dtype.values())


def buckets_of(
    parameters: Sequence[Parameter], is_full: Callable[[int, int], bool]
) -> list[Bucket]:
    """Return the buckets of a buffer.

    is_full: tells, of a bucket's number and the elements in it, whether it ends there.
    """
    buckets: list[Bucket] = []
    starts: dict[str, int] = {}
    length = 0
    # Gradients of the last layers are ready first, so their parameters come first.
    for parameter in reversed(parameters):
        # Each parameter begins at a multiple of ALIGNED elements.
        length = -(-length // ALIGNED) * ALIGNED
        if parameter.alone and starts:
            buckets.append(Bucket(starts, length))
            starts = {}
            length = 0
        starts[parameter.name] = length
        length += parameter.elements
        if parameter.alone or is_full(len(buckets), length):
            buckets.append(Bucket(starts, length))
            starts = {}
            length = 0
    if starts:
        buckets.append(Bucket(starts, length))
    return buckets


def flat_state(
    rank_file: RankFile,
    state: Any,
    arguments: Mapping[str, Any],
    stage: int,
    shared: Collection[str],
) -> list[dict[str, dict[str, Stored]]]:
    """Return kind -> name -> tensor of each of the rank's chunks.

    state: what its distrib_optim.pt holds.
    stage: the rank's pipeline stage.
    shared: names of weights that the first and the last stage each have.
    """
    states = state if isinstance(state, list) else [state]
    chunks: list[dict[str, dict[str, Stored]]] = []
    for _ in rank_file.chunks:
        chunks.append({kind: {} for kind in FLAT})
    for number, optimizer_state in enumerate(states):
        if optimizer_state is None:
            continue  # another rank has it
        # a rank has one optimizer, or a second one for its experts
        optimizer = number if len(states) > 1 else None
        buffers = list(_buffers_of_rank(rank_file, optimizer, shared))
        flats = list(_flats(rank_file, optimizer_state))
        # Other buffers than the model leads to: nothing in them would be where it is looked for.
        if len(buffers) != len(flats):
            raise _unknown_buffers(rank_file)
        for (chunk, parameters), flat_tensors in zip(buffers, flats, strict=True):
            # Megatron gives every later chunk one bucket (`disable_bucketing` of
            # DistributedDataParallel).
            bucket_size = 0 if chunk else _bucket_size(rank_file, arguments, stage)
            parts_by_kind = _name_parts(
                rank_file, rank_file.chunks[chunk], parameters, bucket_size, flat_tensors
            )
            for kind, tensors in parts_by_kind.items():
                chunks[chunk][kind] |= tensors
    return chunks


def _name_parts(
    rank_file: RankFile,
    weights: Mapping[str, Stored],
    parameters: Sequence[Parameter],
    bucket_size: int,
    flat_tensors: Mapping[str, Any],
) -> dict[str, dict[str, Stored]]:
    """Return kind -> name -> tensor of a buffer.

    weights: of its chunk.
    parameters: of the buffer, in the order of the model.
    bucket_size: elements after which a bucket ends; 0: never.
    flat_tensors: masters and moments of the buffer, in the words of the optimizer.
    """
    starts, length = _starts(parameters, bucket_size)
    if flat_tensors["numel_unpadded"] != length:
        raise _unknown_buffers(rank_file)
    named: dict[str, dict[str, Stored]] = {}
    for kind, flat_name in FLAT.items():
        flat = flat_tensors[flat_name]
        named[kind] = {}
        for tensor_name, start in starts.items():
            shape = weights[tensor_name].shape
            first_byte = flat.start + start * flat.dtype.itemsize
            named[kind][tensor_name] = flat.part(shape, first_byte)
    return named


def _unknown_buffers(rank_file: RankFile) -> UserError:
    return UserError.of("convert.megatron_distrib_layout", folder=rank_file.folder)


def _flats(rank_file: RankFile, state: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the flat tensors of each buffer."""
    # Older versions save each bucket apart, in another layout.
    if not isinstance(state, dict) or not state.get("buckets_coalesced"):
        raise _unknown_buffers(rank_file)
    required_keys = {"numel_unpadded", *FLAT.values()}
    # Chunks are counted from 0 among other keys, so there are no more numbers than keys.
    for number in range(len(state)):
        # By dtype, one buffer each.
        for flat_tensors in state.get(number, {}).values():
            if not isinstance(flat_tensors, dict) or not required_keys <= flat_tensors.keys():
                raise _unknown_buffers(rank_file)
            yield flat_tensors


def _buffers_of_rank(
    rank_file: RankFile, optimizer: int | None, shared: Collection[str]
) -> Iterator[tuple[int, list[Parameter]]]:
    """Yield (chunk, parameters) of every buffer. optimizer: None for the only one, 1 for the
    experts', 0 for the other."""
    for number, chunk in enumerate(rank_file.chunks):
        parameters = []
        for tensor_name, stored in chunk.items():
            is_of_experts = optimizer == 1
            in_optimizer = optimizer is None or is_expert(tensor_name) == is_of_experts
            if not is_trained(tensor_name) or not in_optimizer:
                continue
            elements = prod(stored.shape)
            alone = tensor_name in shared
            parameters.append(Parameter(tensor_name, elements, stored.dtype, alone))
        for buffer in buffers_of(parameters):
            yield number, buffer


def _bucket_size(rank_file: RankFile, arguments: Mapping[str, Any], stage: int) -> int:
    """Return the elements after which Megatron begins a new bucket of a rank's first chunk; 0:
    never, as in later stages."""
    if not arguments.get("overlap_grad_reduce") or stage:
        return 0
    if buckets := arguments.get("ddp_num_buckets"):
        elements = 0
        for chunk in rank_file.chunks:
            for stored in chunk.values():
                elements += prod(stored.shape)
        return elements // buckets
    if stated_size := arguments.get("ddp_bucket_size"):
        return stated_size
    data_ranks = arguments.get("data_parallel_size") or 1
    context_ranks = arguments.get("context_parallel_size") or 1
    return max(BUCKET_MINIMUM, BUCKET_PER_RANK * data_ranks * context_ranks)


def _starts(parameters: Sequence[Parameter], bucket_size: int) -> tuple[dict[str, int], int]:
    """Return the start of each parameter in its buffer, in elements, and the length of the buffer
    without the padding of bucket ends.
    """

    def is_full(_: int, elements: int) -> bool:
        return 0 < bucket_size <= elements

    starts: dict[str, int] = {}
    elements_before = 0  # of the buckets before this one
    for bucket in buckets_of(parameters, is_full):
        for tensor_name, start in bucket.starts.items():
            starts[tensor_name] = elements_before + start
        elements_before += bucket.length
    return starts, elements_before


class _BufferKey(NamedTuple):
    """The identity of a buffer among those of all ranks. dtype: of its parameters."""

    optimizer: int
    rank: int
    buffer: int
    dtype: str


@dataclass(frozen=True)
class _OptimizerRank:
    """A model-parallel rank of an optimizer, one of many data-parallel ones that share its state.

    stages: of each virtual stage what it has of the model, in order.
    part: which part of a tensor it has.
    expert_part: which part of an expert's tensor.
    """

    optimizer: int
    number: int
    stages: list[list[Match]]
    part: int
    expert_part: int


@dataclass(frozen=True)
class _Flat:
    """The masters or the moments of a bucket.

    length: elements.
    starts: where each piece of it begins.
    """

    name: str
    length: int
    starts: list[int]
    pieces: list[Stored]


Buckets = list[dict[str, _Flat]]  # of a buffer: by kind


@dataclass(frozen=True)
class FlatLayout:
    """The facts that the layout follows from.

    expected: the tensors that the optimizer trains.
    dtypes: of the weights, by name.
    padded: rows of the padded vocabulary.
    """

    path: Path
    args: Mapping[str, Any]
    model: ModelConfig
    expected: Sequence[Match]
    dtypes: Mapping[str, torch.dtype]
    padded: int


def sharding_of(common: Mapping[str, Any]) -> str | None:
    """Return the form in which the distributed optimizer's state was saved, which the first of
    several optimizers says too."""
    optimizer = common.get("optimizer")
    first = optimizer.get(0, optimizer) if isinstance(optimizer, dict) else {}
    if isinstance(first, dict):
        return first.get("param_state_sharding_type")
    return None


def bucketed_state(
    flat_layout: FlatLayout, flats: Mapping[str, Chunked]
) -> dict[str, Mapping[str, TensorSource]]:
    """Return kind -> name of a match -> master, exp_avg or exp_avg_sq of the whole tensor. flats:
    the optimizer's tensors.

    UserError if they have not the layout that the args and the model lead to.
    """
    # Each rank takes its buffers out; one that is left over belongs to none.
    unclaimed = _group_by_buffer(flat_layout, flats)
    parts: Parts = {kind: {} for kind in FLAT}
    for rank in _ranks(flat_layout):
        _claim(flat_layout, rank, unclaimed, parts)
    if unclaimed:
        raise _unknown_layout(flat_layout)
    state = {}
    for kind, parts_of_kind in parts.items():
        parts_by_name = {}
        for tensor_name, by_number in parts_of_kind.items():
            parts_by_name[tensor_name] = [by_number[number] for number in sorted(by_number)]
        merged = merge_parts(flat_layout.path, list(flat_layout.expected), parts_by_name)
        check_tensors(flat_layout.path, flat_layout.expected, merged)
        state[kind] = merged
    return state


def _unknown_layout(flat_layout: FlatLayout) -> UserError:
    return UserError.of("convert.megatron_flat_state", path=flat_layout.path)


def _group_by_buffer(
    flat_layout: FlatLayout, flats: Mapping[str, Chunked]
) -> dict[_BufferKey, Buckets]:
    """Return the flat tensors of each bucket of every buffer, by kind."""
    by_buffer: dict[_BufferKey, dict[int, dict[str, _Flat]]] = {}
    for tensor_name, tensor in flats.items():
        match = _KEY.fullmatch(tensor_name)
        if not match or len(tensor.shape) != 1 or not tensor.chunks:
            raise _unknown_layout(flat_layout)
        optimizer, rank, buffer, dtype, bucket, kind = match.groups()
        # By where they begin, so that pieces are found by bisection.
        chunks = sorted(tensor.chunks, key=_first_element)
        starts = [offset[0] for offset, _ in chunks]
        pieces = [stored for _, stored in chunks]
        # Only several optimizers in a row are numbered.
        key = _BufferKey(int(optimizer or 0), int(rank), int(buffer), dtype)
        by_number = by_buffer.setdefault(key, {})
        flats_by_kind = by_number.setdefault(int(bucket), {})
        flats_by_kind[kind] = _Flat(tensor_name, tensor.shape[0], starts, pieces)
    grouped: dict[_BufferKey, Buckets] = {}
    for key, by_number in by_buffer.items():
        grouped[key] = [by_number[number] for number in sorted(by_number)]
    return grouped


def _first_element(chunk: tuple[Sequence[int], Stored]) -> int:
    offset, _ = chunk
    return offset[0]


def _ranks(flat_layout: FlatLayout) -> Iterator[_OptimizerRank]:
    """Yield all ranks that have state. Experts have an optimizer of their own where they are spread
    over ranks."""
    sizes = sizes_of(flat_layout.args)
    stages = stages_of(flat_layout.expected, flat_layout.args, flat_layout.model)
    separate_experts = sizes.ep > 1
    # In the order of Megatron's numbers: tp runs fastest.
    for pp, tp in product(range(sizes.pp), range(sizes.tp)):
        # `stages` has one virtual stage of every rank, then the next of every rank.
        local = stages[pp :: sizes.pp]
        if separate_experts:
            local = [_select_experts(stage, (None,)) for stage in local]
        number = pp * sizes.tp + tp
        yield _OptimizerRank(0, number, local, part=tp, expert_part=tp % sizes.expert_tp)
    if not separate_experts:
        return
    experts_per_rank = flat_layout.model.experts // sizes.ep
    numbers = product(range(sizes.pp), range(sizes.ep), range(sizes.expert_tp))
    for pp, ep, tp in numbers:
        first_expert = ep * experts_per_rank
        local_experts = range(first_expert, first_expert + experts_per_rank)
        local = [_select_experts(stage, local_experts) for stage in stages[pp :: sizes.pp]]
        number = (pp * sizes.ep + ep) * sizes.expert_tp + tp
        # Nothing but experts is in this optimizer, so `part` is of nothing.
        yield _OptimizerRank(1, number, local, part=0, expert_part=tp)


def _select_experts(stage: Sequence[Match], experts: Container[int | None]) -> list[Match]:
    """Return the tensors of some experts; None among them stands for what is no expert's."""
    return [match for match in stage if expert_of(match.foreign) in experts]


def _claim(
    flat_layout: FlatLayout,
    rank: _OptimizerRank,
    unclaimed: dict[_BufferKey, Buckets],
    parts: Parts,
) -> None:
    """Move a rank's flat tensors from `unclaimed` into `parts`."""
    for number, (registered, buffer) in enumerate(_buffers(flat_layout, rank)):
        dtype = str(buffer[0].dtype)
        key = _BufferKey(rank.optimizer, rank.number, number, dtype)
        flats_of_buckets = unclaimed.pop(key, [])
        buckets = _buckets(flat_layout, buffer, flats_of_buckets)
        for bucket, flats in zip(buckets, flats_of_buckets, strict=True):
            for tensor_name, start in bucket.starts.items():
                parameter = registered[tensor_name]
                for kind, flat_name in FLAT.items():
                    flat = flats[flat_name]
                    _note_parts(flat_layout, rank, parameter, flat, start, parts[kind])


def _buffers(
    flat_layout: FlatLayout, rank: _OptimizerRank
) -> list[tuple[dict[str, Registered], list[Parameter]]]:
    """Return (parameters of the virtual stage by name, parameters of the buffer) of a rank's
    buffers, over all virtual stages."""
    buffers = []
    for stage in rank.stages:
        registered: dict[str, Registered] = {}
        for parameter in parameters_of(stage, flat_layout.args):
            # A packed one goes by the name of its first expert's tensor.
            registered[parameter.matches[0].foreign] = parameter
        laid_out = []
        for tensor_name, parameter in registered.items():
            laid_out.append(_lay_out(flat_layout, tensor_name, parameter))
        buffers += [(registered, buffer) for buffer in buffers_of(laid_out)]
    return buffers


def _lay_out(flat_layout: FlatLayout, tensor_name: str, parameter: Registered) -> Parameter:
    """Return a parameter as it lies in the flat buffers of its rank."""
    elements = sum(prod(_local_shape(flat_layout, match)) for match in parameter.matches)
    # Its gradient is reduced over two stages besides, so it shares no bucket.
    sizes = sizes_of(flat_layout.args)
    alone = tensor_name in shared_weights(flat_layout.model, sizes.pp)
    # A tied head is a copy of the embedding, and has no weight of its own.
    weight_name = tensor_name if tensor_name in flat_layout.dtypes else EMBEDDING
    return Parameter(tensor_name, elements, flat_layout.dtypes[weight_name], alone)


def _local_shape(flat_layout: FlatLayout, match: Match) -> tuple[int, ...]:
    """Return the shape of a rank's part."""
    sizes = sizes_of(flat_layout.args)
    tp = sizes.tp if expert_of(match.foreign) is None else sizes.expert_tp
    return part_shape(match.shape, match.cut, tp, flat_layout.padded)


def _buckets(
    flat_layout: FlatLayout,
    buffer: Sequence[Parameter],
    flats_of_buckets: Sequence[Mapping[str, _Flat]],
) -> list[Bucket]:
    """Return the buckets of a buffer, each as long as what was saved of it: the size after which
    Megatron began a new one need not be known. UserError if parameters do not fill them so."""
    kinds = set(FLAT.values())
    if any(flats.keys() != kinds for flats in flats_of_buckets):
        raise _unknown_layout(flat_layout)
    saved_lengths = [flats["param"].length for flats in flats_of_buckets]

    def is_full(number: int, elements: int) -> bool:
        return number < len(saved_lengths) and saved_lengths[number] == elements

    buckets = buckets_of(buffer, is_full)
    lengths = [bucket.length for bucket in buckets]
    for kind in kinds:
        if [flats[kind].length for flats in flats_of_buckets] != lengths:
            raise _unknown_layout(flat_layout)
    return buckets


def _note_parts(
    flat_layout: FlatLayout,
    rank: _OptimizerRank,
    parameter: Registered,
    flat: _Flat,
    start: int,
    parts: dict[str, dict[int, TensorSource]],
) -> None:
    """Note where the tensors of a parameter are. That of a tied embedding is noted once.

    start: where the parameter begins in `flat`.
    parts: of one kind; they are added to it.
    """
    dtype = flat.pieces[0].dtype
    for number, match in enumerate(parameter.matches):
        if match.foreign not in flat_layout.dtypes:  # the copy of a tied embedding
            continue
        shape = _local_shape(flat_layout, match)
        # Packed experts lie one after another.
        first = start + number * prod(shape)
        read = partial(_read, flat_layout.path, flat, first, shape, parameter.packed)
        part = rank.part if expert_of(match.foreign) is None else rank.expert_part
        parts.setdefault(match.foreign, {})[part] = MergedTensor(shape, dtype, read)


def _read(
    checkpoint: Path, flat: _Flat, start: int, shape: Sequence[int], transposed: bool
) -> Tensor:
    """Return a tensor from `start` on, out of the pieces. transposed: it lies there so."""
    end = start + prod(shape)
    values = torch.empty(end - start, dtype=flat.pieces[0].dtype)
    filled = 0
    # The pieces that overlap [start, end): from the last that begins at `start` or before.
    first_piece = bisect_right(flat.starts, start) - 1
    end_piece = bisect_left(flat.starts, end)
    for number in range(first_piece, end_piece):
        piece_start = flat.starts[number]
        piece = flat.pieces[number]
        top = max(start, piece_start)
        bottom = min(end, piece_start + piece.shape[0])
        if top < bottom:
            overlap = piece.rows(top - piece_start, bottom - piece_start)
            values[top - start : bottom - start] = overlap
            filled += bottom - top
    if filled != len(values):
        raise UserError.of("convert.part_missing", path=checkpoint, name=flat.name)
    if transposed:
        return values.view(shape[::-1]).t()
    return values.view(shape)
