"""The state of Megatron's distributed optimizer: distrib_optim.pt beside a model-parallel rank's file.

All FP32 masters of a rank lie one after another in one flat tensor, as the gradients lie in the buffer that they are
reduced in, and so do the moments: parameters from the last to the first, each from a multiple of 64 elements on. A
buffer is a row of buckets, of which each begins anew where the one before it ends. Parameters of every dtype have a
buffer of their own, so have those of every virtual stage, and so have experts that other ranks have not.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from megaprec.errors import UserError
from tools.convert.megatron_experts import is_expert
from tools.convert.megatron_ranks import Rank
from tools.convert.tensors import Stored

FLAT = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
ALIGNED = 64  # elements
SHARED = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class _Parameter:
    name: str
    stored: Stored
    alone: bool  # has a bucket to itself


def flat_state(
    rank: Rank, state: Any, args: Mapping[str, Any], stage: int, tied: bool
) -> list[dict[str, dict[str, Stored]]]:
    """kind -> name -> tensor of each of the rank's chunks. state: what its distrib_optim.pt holds.

    tied: whether the first and the last stage each have a copy of the embedding.
    """
    states = state if isinstance(state, list) else [state]
    named: list[dict[str, dict[str, Stored]]] = [{kind: {} for kind in FLAT} for _ in rank.chunks]
    for number, one in enumerate(states):
        if one is None:
            continue  # another rank has it
        buffers = _buffers(rank, one)
        for chunk, parameters in _by_buffer(rank, number if len(states) > 1 else None, tied):
            flat = next(buffers, None)
            starts, total = _starts(parameters, _bucket_size(args, stage, chunk, rank.chunks[chunk]))
            if flat is None or flat["numel_unpadded"] != total:
                raise _unknown(rank)
            for p in parameters:
                for kind, theirs in FLAT.items():
                    named[chunk][kind][p.name] = _part(flat[theirs], starts[p.name], p.stored.shape)
        if next(buffers, None):
            raise _unknown(rank)
    return named


def _unknown(rank: Rank) -> UserError:
    return UserError(
        f"{rank.folder}/distrib_optim.pt has not the layout that its args and its model lead to: remove these files to "
        "convert weights only, or have Megatron save with --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable"
    )


def _buffers(rank: Rank, state: Any) -> Iterator[Mapping[str, Any]]:
    """The flat tensors of each buffer."""
    if not isinstance(state, dict) or not state.get("buckets_coalesced"):
        raise _unknown(rank)
    for n in range(len(state)):
        for flat in state.get(n, {}).values():
            if not isinstance(flat, dict) or not {"numel_unpadded", *FLAT.values()} <= flat.keys():
                raise _unknown(rank)
            yield flat


def _by_buffer(rank: Rank, optimizer: int | None, tied: bool) -> Iterator[tuple[int, list[_Parameter]]]:
    """(chunk, parameters) of every buffer. optimizer: None for the only one, 1 for the experts', 0 for the other."""
    for number, chunk in enumerate(rank.chunks):
        by_dtype: dict[torch.dtype, list[_Parameter]] = {}
        for name, stored in chunk.items():
            if optimizer is None or is_expert(name) == bool(optimizer):
                by_dtype.setdefault(stored.dtype, []).append(_Parameter(name, stored, tied and name in SHARED))
        yield from ((number, parameters) for parameters in by_dtype.values())


def _bucket_size(args: Mapping[str, Any], stage: int, chunk: int, parameters: Mapping[str, Stored]) -> int:
    """Elements after which Megatron begins a new bucket; 0: never. Only a first stage's first chunk has several."""
    if not args.get("overlap_grad_reduce") or stage or chunk:
        return 0
    if buckets := args.get("ddp_num_buckets"):
        return sum(prod(stored.shape) for stored in parameters.values()) // buckets
    return args.get("ddp_bucket_size") or max(40_000_000, 1_000_000 * (args.get("data_parallel_size") or 1))


def _starts(parameters: Sequence[_Parameter], bucket_size: int) -> tuple[dict[str, int], int]:
    """Where each parameter begins, and how long the buffer is, without what pads the end of a bucket."""
    starts: dict[str, int] = {}
    before = inside = 0  # elements of the buckets before this one; of this one
    for p in reversed(parameters):
        inside = -(-inside // ALIGNED) * ALIGNED
        if p.alone:
            before, inside = before + inside, 0
        starts[p.name] = before + inside
        inside += prod(p.stored.shape)
        if p.alone or (bucket_size and inside >= bucket_size):
            before, inside = before + inside, 0
    return starts, before + inside


def _part(flat: Stored, start: int, shape: Sequence[int]) -> Stored:
    return replace(flat, shape=tuple(shape), start=flat.start + start * flat.dtype.itemsize, strides=None)
