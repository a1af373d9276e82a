"""The distributed optimizer's flat state in a distributed checkpoint (dp_reshardable), by buckets.

    [chained_C.]optimizer.distributed.dp_group_idx_N.gbuf_idx_G.dtype_(P, Q).bucket_idx_B.KIND

KIND is param, exp_avg or exp_avg_sq, and P and Q are the dtypes of parameters and gradients.

N counts model-parallel ranks, tp before pp; where a rank has experts of its own, they have an
optimizer of their own, the second, whose N counts an expert's parts, then ep, then pp. G counts the
buffers of a rank's virtual stages. Each data-parallel rank wrote its share of a bucket in pieces,
what lies between parameters too.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterator, Mapping, Sequence
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
from tools.convert.core.rules import Match
from tools.convert.core.tensors import Stored
from tools.convert.hf.folder import check_tensors
from tools.convert.megatron.distributed import Chunked
from tools.convert.megatron.flat import FLAT, Bucket, Parameter, buckets_of, buffers_of
from tools.convert.megatron.layout import EMBEDDING, HEAD, expert_of, part_shape
from tools.convert.megatron.order import (
    Registered,
    parameters_of,
    shared_weights,
    sizes_of,
    stages_of,
)
from tools.convert.megatron.ranks import MergedTensor, TensorSource, merge_parts

_KEY = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)"
    r"\.dtype_\((\S+), \S+\)\.bucket_idx_(\d+)\.(\w+)"
)
# forms of the state: this one, and one unread
RESHARDABLE = "dp_reshardable"
GATHERED = "dp_zero_gather_scatter"
Parts = dict[str, dict[str, dict[int, TensorSource]]]  # kind -> name -> by tensor-parallel rank


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
class Saved:
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
    flat_layout: Saved, flats: Mapping[str, Chunked]
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
        for tensor_name, by_rank in parts_of_kind.items():
            parts_by_name[tensor_name] = [by_rank[part] for part in sorted(by_rank)]
        merged = merge_parts(
            flat_layout.path, list(flat_layout.expected), parts_by_name, flat_layout.model.vocab
        )
        check_tensors(flat_layout.path, flat_layout.expected, merged)
        state[kind] = merged
    return state


def _unknown_layout(flat_layout: Saved) -> UserError:
    return UserError.of("convert.megatron_flat_state", path=flat_layout.path)


def _group_by_buffer(flat_layout: Saved, flats: Mapping[str, Chunked]) -> dict[_BufferKey, Buckets]:
    """Return the flat tensors of each bucket of every buffer, by kind."""
    by_buffer: dict[_BufferKey, dict[int, dict[str, _Flat]]] = {}
    for tensor_name, tensor in flats.items():
        match = _KEY.fullmatch(tensor_name)
        if not match or len(tensor.shape) != 1 or not tensor.chunks:
            raise _unknown_layout(flat_layout)
        optimizer, number, buffer, dtype, bucket, kind = match.groups()
        # By where they begin, so that pieces are found by bisection.
        chunks = sorted(tensor.chunks, key=_first_element)
        starts = [offset[0] for offset, _ in chunks]
        pieces = [stored for _, stored in chunks]
        key = _BufferKey(int(optimizer or 0), int(number), int(buffer), dtype)
        buckets = by_buffer.setdefault(key, {})
        buckets.setdefault(int(bucket), {})[kind] = _Flat(
            tensor_name, tensor.shape[0], starts, pieces
        )
    return {
        key: [buckets[number] for number in sorted(buckets)] for key, buckets in by_buffer.items()
    }


def _first_element(chunk: tuple[Sequence[int], Stored]) -> int:
    offset, _ = chunk
    return offset[0]


def _ranks(flat_layout: Saved) -> Iterator[_OptimizerRank]:
    """Yield all ranks that have state. Experts have an optimizer of their own where they are spread
    over ranks."""
    sizes = sizes_of(flat_layout.args)
    stages = stages_of(flat_layout.expected, flat_layout.args, flat_layout.model)
    separate_experts = sizes.ep > 1
    # In the order of Megatron's numbers: tp runs fastest.
    for pp, tp in product(range(sizes.pp), range(sizes.tp)):
        local = stages[pp :: sizes.pp]
        if separate_experts:
            local = [_select_experts(stage, (None,)) for stage in local]
        yield _OptimizerRank(0, pp * sizes.tp + tp, local, tp, tp % sizes.expert_tp)
    if not separate_experts:
        return
    count = flat_layout.model.experts // sizes.ep
    for pp, ep, tp in product(range(sizes.pp), range(sizes.ep), range(sizes.expert_tp)):
        local_experts = range(ep * count, (ep + 1) * count)
        local = [_select_experts(stage, local_experts) for stage in stages[pp :: sizes.pp]]
        yield _OptimizerRank(1, (pp * sizes.ep + ep) * sizes.expert_tp + tp, local, 0, tp)


def _select_experts(stage: Sequence[Match], experts: Container[int | None]) -> list[Match]:
    """Return the tensors of some experts; None among them stands for what is no expert's."""
    return [match for match in stage if expert_of(match.foreign) in experts]


def _claim(
    flat_layout: Saved, rank: _OptimizerRank, unclaimed: dict[_BufferKey, Buckets], parts: Parts
) -> None:
    """Move a rank's flat tensors from `unclaimed` into `parts`."""
    for number, (registered, buffer) in enumerate(_buffers(flat_layout, rank)):
        key = _BufferKey(rank.optimizer, rank.number, number, str(buffer[0].dtype))
        flats_of_buckets = unclaimed.pop(key, [])
        buckets = _buckets(flat_layout, buffer, flats_of_buckets)
        for bucket, flats in zip(buckets, flats_of_buckets, strict=True):
            for tensor_name, start in bucket.starts.items():
                for kind, flat_name in FLAT.items():
                    flat = flats[flat_name]
                    _note_parts(
                        flat_layout, rank, registered[tensor_name], flat, start, parts[kind]
                    )


def _buffers(
    flat_layout: Saved, rank: _OptimizerRank
) -> list[tuple[dict[str, Registered], list[Parameter]]]:
    """Return (parameters of the virtual stage by name, parameters of the buffer) of a rank's
    buffers, over all virtual stages."""
    buffers = []
    for stage in rank.stages:
        registered: dict[str, Registered] = {}
        for parameter in parameters_of(stage, flat_layout.args):
            registered[parameter.matches[0].foreign] = parameter
        laid_out = [
            _lay_out(flat_layout, tensor_name, parameter)
            for tensor_name, parameter in registered.items()
        ]
        buffers += [(registered, buffer) for buffer in buffers_of(laid_out)]
    return buffers


def _lay_out(flat_layout: Saved, tensor_name: str, parameter: Registered) -> Parameter:
    elements = sum(prod(_local_shape(flat_layout, match)) for match in parameter.matches)
    # Its gradient is reduced over two stages besides, so it shares no bucket.
    alone = tensor_name in shared_weights(flat_layout.model, sizes_of(flat_layout.args).pp)
    # A tied head is a copy of the embedding, and has no weight of its own.
    dtype = flat_layout.dtypes[EMBEDDING if tensor_name == HEAD else tensor_name]
    return Parameter(tensor_name, elements, dtype, alone)


def _local_shape(flat_layout: Saved, match: Match) -> tuple[int, ...]:
    """Return the shape of a rank's part."""
    sizes = sizes_of(flat_layout.args)
    tp = sizes.tp if expert_of(match.foreign) is None else sizes.expert_tp
    return part_shape(match.shape, match.cut, tp, flat_layout.padded)


def _buckets(
    flat_layout: Saved, buffer: Sequence[Parameter], flats_of_buckets: Sequence[Mapping[str, _Flat]]
) -> list[Bucket]:
    """Return the buckets of a buffer, which end where what was saved of them ends: any size of
    theirs will do."""
    kinds = set(FLAT.values())
    if any(flats.keys() != kinds for flats in flats_of_buckets):
        raise _unknown_layout(flat_layout)
    saved_lengths = [flats["param"].length for flats in flats_of_buckets]

    def is_full(number: int, elements: int) -> bool:
        return saved_lengths[number : number + 1] == [elements]

    buckets = buckets_of(buffer, is_full)
    lengths = [bucket.length for bucket in buckets]
    for kind in kinds:
        if [flats[kind].length for flats in flats_of_buckets] != lengths:
            raise _unknown_layout(flat_layout)
    return buckets


def _note_parts(
    flat_layout: Saved,
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
            values[top - start : bottom - start] = piece.rows(
                top - piece_start, bottom - piece_start
            )
            filled += bottom - top
    if filled != len(values):
        raise UserError.of("convert.megatron_part_missing", path=checkpoint, name=flat.name)
    return values.view(shape[::-1]).t() if transposed else values.view(shape)
