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
from tools.convert.megatron.experts import is_expert, is_trained
from tools.convert.megatron.ranks import Rank

FLAT = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
ALIGNED = 64  # elements


@dataclass(frozen=True)
class Parameter:
    """One of a rank's. alone: whether it has a bucket to itself, as an embedding has that two
    stages share."""

    name: str
    elements: int
    dtype: torch.dtype
    alone: bool


@dataclass(frozen=True)
class Bucket:
    """starts: where in it each parameter begins, by name. length: elements, without what pads its
    end."""

    starts: Mapping[str, int]
    length: int


def buffers_of(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """The parameters of each buffer of one virtual stage and one optimizer, given all in the order
    of the model."""
    by_dtype: dict[torch.dtype, list[Parameter]] = {}
    for p in parameters:
        by_dtype.setdefault(p.dtype, []).append(p)
    return list(by_dtype.values())


def buckets_of(parameters: Sequence[Parameter], full: Callable[[int, int], bool]) -> list[Bucket]:
    """The buckets of a buffer. full(n, elements): whether bucket n ends where it has so many
    elements."""
    found: list[Bucket] = []
    starts: dict[str, int] = {}
    inside = 0
    for p in reversed(parameters):
        inside = -(-inside // ALIGNED) * ALIGNED
        if p.alone and starts:
            found.append(Bucket(starts, inside))
            starts = {}
            inside = 0
        starts[p.name] = inside
        inside += p.elements
        if p.alone or full(len(found), inside):
            found.append(Bucket(starts, inside))
            starts = {}
            inside = 0
    return [*found, Bucket(starts, inside)] if starts else found


def flat_state(
    rank: Rank, state: Any, args: Mapping[str, Any], stage: int, shared: Collection[str]
) -> list[dict[str, dict[str, Stored]]]:
    """kind -> name -> tensor of each of the rank's chunks. state: what its distrib_optim.pt holds.

    shared: names of weights that the first and the last stage each have.
    """
    states = state if isinstance(state, list) else [state]
    named: list[dict[str, dict[str, Stored]]] = [{kind: {} for kind in FLAT} for _ in rank.chunks]
    for number, one in enumerate(states):
        if one is None:
            continue  # another rank has it
        flats = _flats(rank, one)
        for chunk, parameters in _by_buffer(rank, number if len(states) > 1 else None, shared):
            flat = next(flats, None)
            starts, total = _starts(parameters, 0 if chunk else _bucket_size(rank, args, stage))
            if flat is None or flat["numel_unpadded"] != total:
                raise _unknown(rank)
            for name, start in starts.items():
                for kind, theirs in FLAT.items():
                    named[chunk][kind][name] = _part(
                        flat[theirs], start, rank.chunks[chunk][name].shape
                    )
        if next(flats, None):
            raise _unknown(rank)
    return named


def _unknown(rank: Rank) -> UserError:
    return UserError(
        f"{rank.folder}/distrib_optim.pt has not the layout that its args and its model lead "
        "to: convert with "
        "--weights-only, or have Megatron save with --ckpt-format torch_dist "
        "--dist-ckpt-optim-fully-reshardable"
    )


def _flats(rank: Rank, state: Any) -> Iterator[Mapping[str, Any]]:
    """The flat tensors of each buffer."""
    if not isinstance(state, dict) or not state.get("buckets_coalesced"):
        raise _unknown(rank)
    for n in range(len(state)):
        for flat in state.get(n, {}).values():
            if not isinstance(flat, dict) or not {"numel_unpadded", *FLAT.values()} <= flat.keys():
                raise _unknown(rank)
            yield flat


def _by_buffer(
    rank: Rank, optimizer: int | None, shared: Collection[str]
) -> Iterator[tuple[int, list[Parameter]]]:
    """(chunk, parameters) of every buffer. optimizer: None for the only one, 1 for the experts', 0
    for the other."""
    for number, chunk in enumerate(rank.chunks):
        own = (
            Parameter(name, prod(stored.shape), stored.dtype, name in shared)
            for name, stored in chunk.items()
            if is_trained(name) and (optimizer is None or is_expert(name) == bool(optimizer))
        )
        yield from ((number, parameters) for parameters in buffers_of(own))


def _bucket_size(rank: Rank, args: Mapping[str, Any], stage: int) -> int:
    """Elements after which Megatron begins a new bucket of a rank's first chunk; 0: never, as in
    later stages."""
    if not args.get("overlap_grad_reduce") or stage:
        return 0
    if buckets := args.get("ddp_num_buckets"):
        return (
            sum(prod(stored.shape) for chunk in rank.chunks for stored in chunk.values()) // buckets
        )
    ranks = (args.get("data_parallel_size") or 1) * (args.get("context_parallel_size") or 1)
    return args.get("ddp_bucket_size") or max(40_000_000, 1_000_000 * ranks)


def _starts(parameters: Sequence[Parameter], bucket_size: int) -> tuple[dict[str, int], int]:
    """Return the start of each parameter in its buffer, and the length of the buffer without the
    padding of bucket ends.
    """
    starts: dict[str, int] = {}
    before = 0  # elements of the buckets before this one
    for bucket in buckets_of(parameters, lambda _, inside: 0 < bucket_size <= inside):
        starts |= {name: before + start for name, start in bucket.starts.items()}
        before += bucket.length
    return starts, before


def _part(flat: Stored, start: int, shape: Sequence[int]) -> Stored:
    return flat.part(tuple(shape), flat.start + start * flat.dtype.itemsize)
