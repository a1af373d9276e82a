"""The distributed optimizer's flat state in a distributed checkpoint (dp_reshardable): a tensor for
every bucket.

    [chained_C.]optimizer.distributed.dp_group_idx_N.gbuf_idx_G.dtype_(P,
    G).bucket_idx_B.{param,exp_avg,exp_avg_sq}

N counts model-parallel ranks, tp before pp; where a rank has experts of its own, they have an
optimizer of their own, the second, whose N counts an expert's parts, then ep, then pp. G counts the
buffers of a rank's virtual stages. Each data-parallel rank wrote its share of a bucket in pieces,
what lies between parameters too.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.core.rules import Match
from tools.convert.core.tensors import Stored
from tools.convert.hf.folder import check_tensors
from tools.convert.megatron.distributed import Chunked
from tools.convert.megatron.experts import expert_of
from tools.convert.megatron.flat import FLAT, Bucket, Parameter, buckets_of, buffers_of
from tools.convert.megatron.layout import EMBEDDING, HEAD, part_shape
from tools.convert.megatron.order import Registered, parameters_of, shared, sizes_of, stages_of
from tools.convert.megatron.ranks import Held, Whole, wholes_of

_KEY = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)"
    r"\.dtype_\((\S+), \S+\)\.bucket_idx_(\d+)\.(\w+)"
)
# forms of the state: this one, and one unread
RESHARDABLE = "dp_reshardable"
GATHERED = "dp_zero_gather_scatter"
Place = tuple[int, int, int, str]  # optimizer, model-parallel rank, buffer, dtype of its parameters
Parts = dict[str, dict[str, dict[int, Held]]]  # kind -> name -> by tensor-parallel rank


@dataclass(frozen=True)
class _Rank:
    """A model-parallel rank of an optimizer, one of many data-parallel ones that share its state.

    own: of each virtual stage what it has of the model, in order. part: which part of a tensor;
    expert_part: and of an expert's.
    """

    optimizer: int
    number: int
    own: list[list[Match]]
    part: int
    expert_part: int


@dataclass(frozen=True)
class _Flat:
    """The masters or the moments of a bucket. starts: where each piece of it begins."""

    name: str
    length: int
    starts: list[int]
    pieces: list[Stored]


@dataclass(frozen=True)
class Saved:
    """The facts that the layout follows from. dtypes: of the weights, by name. padded: rows of the
    padded vocabulary.
    """

    path: Path
    args: Mapping[str, Any]
    model: ModelConfig
    found: Sequence[Match]
    dtypes: Mapping[str, torch.dtype]
    padded: int


def sharding_of(common: Mapping[str, Any]) -> str | None:
    """The form in which the distributed optimizer's state was saved, which the first of several
    optimizers says too."""
    said = common.get("optimizer")
    first = said.get(0, said) if isinstance(said, dict) else {}
    if isinstance(first, dict):
        return first.get("param_state_sharding_type")
    return None


def bucketed_state(saved: Saved, flats: Mapping[str, Chunked]) -> dict[str, Mapping[str, Held]]:
    """kind -> name of a match -> master, exp_avg or exp_avg_sq of the whole tensor. flats: the
    optimizer's tensors.

    UserError if they have not the layout that the args and the model lead to.
    """
    left = _by_buffer(saved, flats)
    parts: Parts = {kind: {} for kind in FLAT}
    for rank in _ranks(saved):
        _take(saved, rank, left, parts)
    if left:
        raise _unknown(saved)
    state = {}
    for kind, named in parts.items():
        by_name = {
            name: [of_rank[part] for part in sorted(of_rank)] for name, of_rank in named.items()
        }
        state[kind] = wholes_of(saved.path, list(saved.found), by_name, saved.model.vocab)
        check_tensors(saved.path, saved.found, state[kind])
    return state


def _unknown(saved: Saved) -> UserError:
    return UserError(
        f"{saved.path}: its distributed optimizer's flat state has not the layout that its "
        "args and its model lead to: "
        "have Megatron save with --dist-ckpt-optim-fully-reshardable, or convert with "
        "--weights-only"
    )


def _by_buffer(saved: Saved, flats: Mapping[str, Chunked]) -> dict[Place, list[dict[str, _Flat]]]:
    """By kind, the flat tensors of each bucket of every buffer."""
    found: dict[Place, dict[int, dict[str, _Flat]]] = {}
    for key, held in flats.items():
        match = _KEY.fullmatch(key)
        if not match or len(held.shape) != 1 or not held.chunks:
            raise _unknown(saved)
        optimizer, number, buffer, dtype, bucket, kind = match.groups()
        pieces = sorted(
            ((offset[0], stored) for offset, stored in held.chunks), key=lambda piece: piece[0]
        )
        flat = _Flat(
            key, held.shape[0], [start for start, _ in pieces], [stored for _, stored in pieces]
        )
        place = int(optimizer or 0), int(number), int(buffer), dtype
        found.setdefault(place, {}).setdefault(int(bucket), {})[kind] = flat
    return {place: [buckets[n] for n in sorted(buckets)] for place, buckets in found.items()}


def _ranks(saved: Saved) -> Iterator[_Rank]:
    """All that have state. Experts have an optimizer of their own where they are spread over
    ranks."""
    sizes = sizes_of(saved.args)
    stages = stages_of(saved.found, saved.args, saved.model)
    apart = sizes.ep > 1
    count = saved.model.experts // sizes.ep
    for p, t in product(range(sizes.pp), range(sizes.tp)):
        own = [
            [m for m in stage if not apart or expert_of(m.foreign) is None]
            for stage in stages[p :: sizes.pp]
        ]
        yield _Rank(0, p * sizes.tp + t, own, t, t % sizes.expert_tp)
    for p, e, t in (
        product(range(sizes.pp), range(sizes.ep), range(sizes.expert_tp)) if apart else ()
    ):
        mine = range(e * count, (e + 1) * count)
        own = [
            [m for m in stage if expert_of(m.foreign) in mine] for stage in stages[p :: sizes.pp]
        ]
        yield _Rank(1, (p * sizes.ep + e) * sizes.expert_tp + t, own, 0, t)


def _take(
    saved: Saved, rank: _Rank, left: dict[Place, list[dict[str, _Flat]]], parts: Parts
) -> None:
    """Moves a rank's flat tensors from `left` into `parts`."""
    registered = [
        {p.of[0].foreign: p for p in parameters_of(stage, saved.args)} for stage in rank.own
    ]
    buffers = [
        (named, buffer)
        for named in registered
        for buffer in buffers_of(_laid(saved, name, p) for name, p in named.items())
    ]
    for number, (named, buffer) in enumerate(buffers):
        held = left.pop((rank.optimizer, rank.number, number, str(buffer[0].dtype)), [])
        for bucket, flats in zip(_buckets(saved, buffer, held), held, strict=True):
            for name, start in bucket.starts.items():
                for kind, theirs in FLAT.items():
                    _put(saved, rank, named[name], flats[theirs], start, parts[kind])


def _laid(saved: Saved, name: str, parameter: Registered) -> Parameter:
    elements = sum(prod(_shape(saved, match)) for match in parameter.of)
    alone = name in shared(saved.model, sizes_of(saved.args).pp)
    return Parameter(name, elements, saved.dtypes[EMBEDDING if name == HEAD else name], alone)


def _shape(saved: Saved, match: Match) -> tuple[int, ...]:
    """Return the shape of a rank's part."""
    sizes = sizes_of(saved.args)
    tp = sizes.tp if expert_of(match.foreign) is None else sizes.expert_tp
    return part_shape(match.shape, match.cut, tp, saved.padded)


def _buckets(
    saved: Saved, buffer: Sequence[Parameter], held: Sequence[Mapping[str, _Flat]]
) -> list[Bucket]:
    """The buckets of a buffer, which end where what is held of them ends: any size of theirs will
    do."""
    if any(flats.keys() != set(FLAT.values()) for flats in held):
        raise _unknown(saved)
    lengths = [flats["param"].length for flats in held]
    buckets = buckets_of(buffer, lambda n, inside: lengths[n : n + 1] == [inside])
    if any(
        [flats[kind].length for flats in held] != [bucket.length for bucket in buckets]
        for kind in FLAT.values()
    ):
        raise _unknown(saved)
    return buckets


def _put(
    saved: Saved,
    rank: _Rank,
    parameter: Registered,
    flat: _Flat,
    start: int,
    named: dict[str, dict[int, Held]],
) -> None:
    """Notes where the tensors of a parameter are. That of a tied embedding is noted once."""
    for number, match in enumerate(parameter.of):
        shape = _shape(saved, match)
        part = rank.part if expert_of(match.foreign) is None else rank.expert_part
        read = partial(
            _read, saved.path, flat, start + number * prod(shape), shape, parameter.packed
        )
        if match.foreign in saved.dtypes:
            named.setdefault(match.foreign, {})[part] = Whole(shape, flat.pieces[0].dtype, read)


def _read(path: Path, flat: _Flat, start: int, shape: Sequence[int], turned: bool) -> Tensor:
    """A tensor from `start` on, out of the pieces. turned: it lies there transposed."""
    end = start + prod(shape)
    values = torch.empty(end - start, dtype=flat.pieces[0].dtype)
    filled = 0
    for n in range(bisect_right(flat.starts, start) - 1, bisect_left(flat.starts, end)):
        first = flat.starts[n]
        piece = flat.pieces[n]
        top = max(start, first)
        bottom = min(end, first + piece.shape[0])
        if top < bottom:
            values[top - start : bottom - start] = piece.rows(top - first, bottom - first)
            filled += bottom - top
    if filled != len(values):
        raise UserError(f"{path} lacks a part of {flat.name}")
    return values.view(shape[::-1]).t() if turned else values.view(shape)
