"""The flat state of Megatron's distributed optimizer: how it is laid out, and distrib_optim.pt,
which holds it.

All FP32 masters of a rank lie one after another in one flat tensor, as the gradients lie in the
buffer that they are reduced in, and so do the moments: parameters from the last to the first, each
from a multiple of 64 elements on. A buffer is a row of buckets, of which each begins anew where the
one before it ends. Parameters of every dtype have a buffer of their own, so have those of every
virtual stage, and so have experts that other ranks have not. In distrib_optim.pt, beside a
model-parallel rank's file, a buffer is one tensor; see `buckets.py` for the other way.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from megaprec.errors import UserError
from tools.convert.core.tensors import Stored
from tools.convert.megatron.layout import is_expert, is_trained
from tools.convert.megatron.ranks import RankFile

# Kinds of state -> their names in the distributed optimizer.
FLAT = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
ALIGNED = 64  # elements
# Elements of a bucket by default: the larger of a minimum and a number for each data-parallel rank
# (megatron/core/distributed/distributed_data_parallel.py).
BUCKET_MINIMUM = 40_000_000
BUCKET_PER_RANK = 1_000_000


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
    """Return the buckets of a buffer. is_full(number, elements): whether that bucket ends where it
    has so many elements."""
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
    chunks: list[dict[str, dict[str, Stored]]] = [
        {kind: {} for kind in FLAT} for _ in rank_file.chunks
    ]
    for number, optimizer_state in enumerate(states):
        if optimizer_state is None:
            continue  # another rank has it
        optimizer = number if len(states) > 1 else None
        buffers = list(_buffers(rank_file, optimizer, shared))
        flats = list(_flats(rank_file, optimizer_state))
        # Other buffers than the model leads to: nothing in them would be where it is looked for.
        if len(buffers) != len(flats):
            raise _unknown_layout(rank_file)
        for (chunk, parameters), flat_tensors in zip(buffers, flats, strict=True):
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
        raise _unknown_layout(rank_file)
    named: dict[str, dict[str, Stored]] = {}
    for kind, flat_name in FLAT.items():
        named[kind] = {}
        for tensor_name, start in starts.items():
            named[kind][tensor_name] = _part(
                flat_tensors[flat_name], start, weights[tensor_name].shape
            )
    return named


def _unknown_layout(rank_file: RankFile) -> UserError:
    return UserError.of("convert.megatron_distrib_layout", folder=rank_file.folder)


def _flats(rank_file: RankFile, state: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the flat tensors of each buffer."""
    # Older versions save each bucket apart, in another layout.
    if not isinstance(state, dict) or not state.get("buckets_coalesced"):
        raise _unknown_layout(rank_file)
    required_keys = {"numel_unpadded", *FLAT.values()}
    for number in range(len(state)):
        # By dtype, one buffer each.
        for flat_tensors in state.get(number, {}).values():
            if not isinstance(flat_tensors, dict) or not required_keys <= flat_tensors.keys():
                raise _unknown_layout(rank_file)
            yield flat_tensors


def _buffers(
    rank_file: RankFile, optimizer: int | None, shared: Collection[str]
) -> Iterator[tuple[int, list[Parameter]]]:
    """Yield (chunk, parameters) of every buffer. optimizer: None for the only one, 1 for the
    experts', 0 for the other."""
    for number, chunk in enumerate(rank_file.chunks):
        parameters = []
        for tensor_name, stored in chunk.items():
            in_optimizer = optimizer is None or is_expert(tensor_name) == bool(optimizer)
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
            elements += sum(prod(stored.shape) for stored in chunk.values())
        return elements // buckets
    if stated_size := arguments.get("ddp_bucket_size"):
        return stated_size
    data_ranks = arguments.get("data_parallel_size") or 1
    context_ranks = arguments.get("context_parallel_size") or 1
    return max(BUCKET_MINIMUM, BUCKET_PER_RANK * data_ranks * context_ranks)


def _starts(parameters: Sequence[Parameter], bucket_size: int) -> tuple[dict[str, int], int]:
    """Return the start of each parameter in its buffer, and the length of the buffer without the
    padding of bucket ends.
    """

    def is_full(_: int, elements: int) -> bool:
        return 0 < bucket_size <= elements

    starts: dict[str, int] = {}
    elements_before = 0  # of the buckets before this one
    for bucket in buckets_of(parameters, is_full):
        starts |= {
            tensor_name: elements_before + start for tensor_name, start in bucket.starts.items()
        }
        elements_before += bucket.length
    return starts, elements_before


def _part(flat: Stored, start: int, shape: Sequence[int]) -> Stored:
    return flat.part(tuple(shape), flat.start + start * flat.dtype.itemsize)
