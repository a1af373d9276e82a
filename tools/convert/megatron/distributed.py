"""Reading Megatron's distributed checkpoints (torch_dist): whole tensors in chunks, whatever the
ranks were.

Over all ranks a tensor of the model has a name of its own, or lies among others of its kind in one
that stacks them:

    decoder.layers.self_attention.linear_proj.weight             all layers [layers, ...]
    decoder.layers.3.self_attention.linear_proj.weight           one
    decoder.layers.mlp.experts.experts.linear_fc1.weight         all layers and experts [layers, experts, ...]
    decoder.layers.3.mlp.experts.experts.linear_fc1.weight       one layer's experts [experts, ...]
    decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight_w   one, gate (_w) and up (_v) apart

Experts are saved alike whether a rank has them one by one, grouped or packed. FP32 masters and
moments stand beside the weights, each under the weight's name with a prefix.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from tools.convert.core.torch_files import contents, distributed_contents
from tools.convert.hf.folder import check_tensors
from tools.convert.megatron.ranks import LAYER, Whole, require_one_dtype

_EXPERT = re.compile(r"(.*\.mlp\.experts\.)local_experts\.(\d+)(\..*)")
# param is what the distributed optimizer calls a master; several optimizers in a row are chained.
_STATE = re.compile(
    r"(?:chained_\d+\.)?optimizer\.state\.(fp32_param|param|exp_avg|exp_avg_sq)\.(.*)"
)
_MASTERS = ("fp32_param", "param")
_SAID = re.compile(
    r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_0\.(optimizer|grad_scaler)/shard_0_1"
)
BRIDGE = "run_config.yaml"
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")


@dataclass(frozen=True)
class Chunked:
    """A tensor of the checkpoint. chunks: where each begins, and where its values lie."""

    name: str
    shape: tuple[int, ...]
    chunks: Sequence[tuple[Sequence[int], Stored]]


Index = tuple[tuple[int, int], ...]  # along the dims that stack: (which, of how many)


def read_common(path: Path) -> dict[str, Any]:
    """Return everything but tensors: args, progress, groups of the optimizer. Raises UserError
    without args."""
    common = _common(path)
    if "args" not in common:
        raise UserError(
            f"{path}: common.pt has no args, which say what the model is{_bridge(path)}"
        )
    return common


def has_args(path: Path) -> bool:
    """Return True if a checkpoint says what its model is, as Megatron-LM's do; Megatron-core alone
    saves no args."""
    return "args" in _common(path)


def _common(path: Path) -> dict[str, Any]:
    common = contents([path / "common.pt"])[0] if (path / "common.pt").is_file() else {}
    if isinstance(common, dict) and isinstance(common.get("args"), dict):
        return common
    return {}


def _bridge(path: Path) -> str:
    """A way out, if the checkpoint is NeMo's or Megatron-Bridge's
    (megatron/bridge/training/checkpointing.py)."""
    way = "megaprec convert --config RUN.toml reads the weights as the [model] of a run file says"
    if path.name == "weights":
        return f"; NeMo says it in a folder context/ beside weights/, and it is missing; {way}"
    if not (path / BRIDGE).is_file():
        return f"; {way}, and megaprec import-args makes such a file of Megatron's command line"
    return (
        f"; {BRIDGE} beside it, of Megatron-Bridge, does, but is not read here: "
        "AutoBridge.export_ckpt of "
        "megatron.bridge makes a Hugging Face folder of it, which is"
    )


@dataclass(frozen=True)
class Contents:
    """A checkpoint's tensors. by_kind: kind -> name -> tensor, of weight, and master, exp_avg,
    exp_avg_sq if by name.

    flat: other tensors of an optimizer, by key. said: what the distributed optimizer says besides,
    as `common.pt` does of others. It may be empty.
    """

    by_kind: dict[str, dict[str, Chunked]]
    flat: dict[str, Chunked]
    said: dict[str, Any]


def read_chunked(path: Path) -> Contents:
    """Looks into the checkpoint, but reads no values."""
    held, said = distributed_contents(path)
    by_kind: dict[str, dict[str, Chunked]] = {"weight": {}}
    flat: dict[str, Chunked] = {}
    for key, entry in held.items():
        if "_extra_state" in key:
            continue
        tensor = Chunked(key, tuple(entry["shape"]), entry["chunks"])
        _check_inside(path, tensor)
        state = _STATE.fullmatch(key)
        if _OPTIMIZER.match(key) and not state:
            flat[key] = tensor
            continue
        if not state:
            kind, name = ("weight", key)
        else:
            kind, name = ("master" if state[1] in _MASTERS else state[1], state[2])
        of_kind = by_kind.setdefault(kind, {})
        if name in of_kind:
            raise UserError(f"{path}: two optimizers have the {kind} of {name}")
        of_kind[name] = tensor
    return Contents(by_kind, flat, _said(said))


def _said(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the first optimizer's first rank, which are the same for all: name ->
    content."""
    ends = {key: match for key in sorted(objects) if (match := _SAID.fullmatch(key))}
    told: dict[str, Any] = {}
    for key, match in ends.items():
        (content,) = objects[key]
        told.setdefault(match[1], content)
    return {"optimizer": told} if told else {}


def _check_inside(path: Path, held: Chunked) -> None:
    for offset, stored in held.chunks:
        dims = len(held.shape)
        places = zip(offset, stored.shape, held.shape, strict=False)
        if (len(offset), len(stored.shape)) != (dims, dims) or any(
            o < 0 or o + n > size for o, n, size in places
        ):
            raise UserError(f"{path}: a part of {held.name} does not lie in it")


def _check_apart(path: Path, held: Chunked) -> None:
    """Raise UserError if two parts of a tensor overlap: together they may have its size and yet
    leave a hole."""
    begun: list[
        tuple[Sequence[int], Sequence[int]]
    ] = []  # where each of those begins and ends that go on here
    for first, stored in sorted(
        ((list(offset), stored) for offset, stored in held.chunks), key=lambda one: one[0]
    ):
        last = [o + n for o, n in zip(first, stored.shape, strict=True)]
        begun = [one for one in begun if not first or one[1][0] > first[0]]
        for a, b in begun:
            if all(
                max(o, p) < min(end, stop)
                for o, p, end, stop in zip(a, first, b, last, strict=True)
            ):
                raise UserError(f"{path}: two parts of {held.name} overlap: .metadata is damaged")
        begun.append((first, last))


def whole_tensors(
    path: Path, found: Sequence[Match], held: Mapping[str, Chunked], model: ModelConfig
) -> dict[str, Whole]:
    """The tensor of each match, by its name. UserError unless `held` are these and no others."""
    wholes: dict[str, Whole] = {}
    used: set[str] = set()
    for match in found:
        if place := _place(match.foreign, held, model):
            names, index = place
            used.update(names)
            wholes[match.foreign] = _whole(
                path, match, [_stacked(path, held[name], index) for name in names], index
            )
    check_tensors(path, found, wholes)
    if surplus := sorted(held.keys() - used):
        raise UserError(
            f"{path} has the tensor {held[surplus[0]].name}, which its model has no place for"
        )
    return wholes


def _place(
    name: str, held: Mapping[str, Chunked], model: ModelConfig
) -> tuple[tuple[str, ...], Index] | None:
    """Under which names the tensor is there, one or a gate's and an up's, and which of those
    stacked in it."""
    for there, index in _shown(name, model):
        for names in ((there,), (f"{there}_w", f"{there}_v")):
            if all(n in held for n in names):
                return names, index
    return None


def _shown(name: str, model: ModelConfig) -> list[tuple[str, Index]]:
    """Every name that the tensor may have, and where it is in a tensor of that name."""
    layers: list[tuple[str, Index]] = [("", ())]
    rest = name
    if layer := LAYER.match(name):
        front = layer[1]
        n = int(layer[2])
        rest = layer[3]
        layers = [(f"{front}{n}", ()), (front.removesuffix("."), ((n, model.layers),))]
    experts: list[tuple[str, Index]] = [(rest, ())]
    if expert := _EXPERT.fullmatch(rest):
        e = int(expert[2])
        experts = [(f"{expert[1]}experts.{e}{expert[3]}", ())]
        experts += [(f"{expert[1]}experts{expert[3]}", ((e, model.experts),))]
    return [(a + b, i + j) for (a, i), (b, j) in product(layers, experts)]


def _stacked(path: Path, held: Chunked, index: Index) -> Chunked:
    """Return the tensor at `index` of one that stacks others."""
    sizes = tuple(size for _, size in index)
    if held.shape[: len(index)] != sizes:
        raise UserError(
            f"{path}: {held.name} is {list(held.shape)}, but its args say {list(sizes)} of its kind"
        )
    at = [number for number, _ in index]
    chunks = []
    for offset, stored in held.chunks:
        inside = [number - first for number, first in zip(at, offset, strict=False)]
        if all(0 <= i < n for i, n in zip(inside, stored.shape, strict=False)):
            chunks.append((offset[len(at) :], _at(stored, inside)))
    return Chunked(held.name, held.shape[len(at) :], chunks)


def _at(stored: Stored, index: Sequence[int]) -> Stored:
    """stored[index], read without the rest of it."""
    strides = stored.strides or [prod(stored.shape[dim + 1 :]) for dim in range(len(stored.shape))]
    start = (
        stored.start
        + sum(i * n for i, n in zip(index, strides, strict=False)) * stored.dtype.itemsize
    )
    left = None if stored.strides is None else stored.strides[len(index) :]
    return stored.part(stored.shape[len(index) :], start, left)


def _whole(path: Path, match: Match, parts: Sequence[Chunked], index: Index) -> Whole:
    """Parts one below the other. What pads the vocabulary is left out."""
    if not all(part.chunks for part in parts):
        raise UserError(
            f"{path} lacks a part of {parts[0].name}{[number for number, _ in index] or ''}"
        )
    for part in parts:
        _check_apart(path, part)
    require_one_dtype(path, match.foreign, [stored for part in parts for _, stored in part.chunks])
    first = parts[0]
    if not first.shape:
        raise UserError(f"{path}: {first.name} is a single number, and no tensor of a model is")
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    wanted = (min(shape[0], match.shape[0]), *shape[1:]) if match.cut == "vocabulary" else shape
    dtype = first.chunks[0][1].dtype
    return Whole(
        wanted, dtype, lambda: _read(path, parts, torch.empty(shape, dtype=dtype))[: wanted[0]]
    )


def _read(path: Path, parts: Sequence[Chunked], whole: Tensor) -> Tensor:
    for part, own in zip(parts, whole.split([part.shape[0] for part in parts]), strict=True):
        filled = 0
        for offset, stored in part.chunks:
            own[tuple(slice(o, o + n) for o, n in zip(offset, stored.shape, strict=True))] = (
                stored.read()
            )
            filled += prod(stored.shape)
        if filled != own.numel():
            raise UserError(f"{path} lacks a part of {part.name}")
    return whole
