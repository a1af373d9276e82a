"""Reading Megatron's distributed checkpoints (torch_dist): whole tensors in chunks, whatever the
ranks were.

Over all ranks a tensor of the model has a name of its own, or lies among others of its kind in one
that stacks them:

    decoder.layers.self_attention.linear_proj.weight            all layers [layers, ...]
    decoder.layers.3.self_attention.linear_proj.weight          one
    decoder.layers.mlp.experts.experts.linear_fc1.weight        all experts [layers, experts, ...]
    decoder.layers.3.mlp.experts.experts.linear_fc1.weight      one layer's experts [experts, ...]
    decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight_w  one, gate (_w) and up (_v) apart
    decoder.layers.3.mixer.in_proj.weight.z                     of one, what it stacks, apart

Experts are saved alike whether a rank has them one by one, grouped or packed. FP32 masters and
moments stand beside the weights, each under the weight's name with a prefix.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.core.chunks import Chunked, merge_parts, require_inside
from tools.convert.core.rules import Match
from tools.convert.core.shards import MergedTensor
from tools.convert.core.tensors import Stored
from tools.convert.core.torch_files import contents, distributed_contents
from tools.convert.hf.folder import check_tensors
from tools.convert.megatron.ranks import LAYER

_EXPERT = re.compile(r"(.*\.mlp\.experts\.)local_experts\.(\d+)(\..*)")
# param is what the distributed optimizer calls a master; several optimizers in a row are chained.
_STATE = re.compile(
    r"(?:chained_\d+\.)?optimizer\.state\.(fp32_param|param|exp_avg|exp_avg_sq)\.(.*)"
)
_MASTERS = ("fp32_param", "param")
_OPTIMIZER_OBJECT = re.compile(
    r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_0\.(optimizer|grad_scaler)/shard_0_1"
)
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")


# What a mixer, or a gated delta net, stacks in one tensor: ends of names -> the parts' own.
_SECTIONS = {
    ".mixer.in_proj.weight": ("z", "x", "B", "C", "dt"),
    ".mixer.conv1d.weight": ("x", "B", "C"),
    ".mixer.conv1d.bias": ("x", "B", "C"),
    ".self_attention.in_proj.weight": ("query", "key", "value", "z", "beta", "alpha"),
    ".self_attention.conv1d.weight": ("query", "key", "value"),
}


class StackIndex(NamedTuple):
    """The number of a tensor among those that are stacked along a dim, and how many these are."""

    number: int
    count: int


class Spelling(NamedTuple):
    """A name that a tensor may have. indices: along the dims that stack it with others."""

    name: str
    indices: tuple[StackIndex, ...]


def read_common(checkpoint: Path) -> dict[str, Any]:
    """Return everything but tensors: args, progress, groups of the optimizer. Raises UserError
    without args."""
    common = _common(checkpoint)
    if "args" not in common:
        raise UserError.of(
            "convert.megatron_no_args", path=checkpoint, way_out=_way_out(checkpoint)
        )
    return common


def has_args(checkpoint: Path) -> bool:
    """Return True if a checkpoint says what its model is, as Megatron-LM's do; Megatron-core alone
    saves no args."""
    return "args" in _common(checkpoint)


def _common(checkpoint: Path) -> dict[str, Any]:
    file = checkpoint / "common.pt"
    (common,) = contents([file]) if file.is_file() else ({},)
    if isinstance(common, dict) and isinstance(common.get("args"), dict):
        return common
    return {}


def _way_out(checkpoint: Path) -> str:
    """Return what to do without args, also if the checkpoint is NeMo's."""
    with_config = (
        "megaprec convert --config RUN.toml reads the weights as the [model] of a run file says"
    )
    if checkpoint.name == "weights":
        return (
            f"; NeMo says it in a folder context/ beside weights/, and it is missing; {with_config}"
        )
    return f"; {with_config}, and megaprec import-args makes such a file of Megatron's command line"


@dataclass(frozen=True)
class DistributedContents:
    """A checkpoint's tensors, and what its optimizer says.

    by_kind: kind -> name -> tensor, of weight, and master, exp_avg, exp_avg_sq if by name.
    flat: other tensors of an optimizer, by key.
    optimizer: what the distributed optimizer says besides, as `common.pt` does of others. It may be
        empty.
    """

    by_kind: dict[str, dict[str, Chunked]]
    flat: dict[str, Chunked]
    optimizer: dict[str, Any]


def read_chunked(checkpoint: Path) -> DistributedContents:
    """Return the contents of a checkpoint, of which no values are read."""
    entries, optimizer_objects = distributed_contents(checkpoint)
    by_kind: dict[str, dict[str, Chunked]] = {"weight": {}}
    flat: dict[str, Chunked] = {}
    for entry_name, entry in entries.items():
        # Transformer Engine's scales and histories, which are no parameters.
        if "_extra_state" in entry_name:
            continue
        tensor = Chunked(entry_name, tuple(entry["shape"]), entry["chunks"])
        require_inside(checkpoint, tensor)
        state = _STATE.fullmatch(entry_name)
        # Flat buffers, without names of parameters.
        if _OPTIMIZER.match(entry_name) and not state:
            flat[entry_name] = tensor
            continue
        kind = "weight"
        tensor_name = entry_name
        if state:
            kind, tensor_name = state.groups()
            if kind in _MASTERS:
                kind = "master"
        tensors = by_kind.setdefault(kind, {})
        # Two optimizers in a row may each name a tensor, of which one is wrong.
        if tensor_name in tensors:
            raise UserError.of(
                "convert.megatron_optimizer_twice", path=checkpoint, kind=kind, name=tensor_name
            )
        tensors[tensor_name] = tensor
    return DistributedContents(by_kind, flat, _optimizer_settings(optimizer_objects))


def _optimizer_settings(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the first optimizer's first rank, which are the same for all: name ->
    content."""
    settings: dict[str, Any] = {}
    # Sorted: of several chained optimizers the first one counts.
    for entry_name in sorted(objects):
        if match := _OPTIMIZER_OBJECT.fullmatch(entry_name):
            (content,) = objects[entry_name]
            settings.setdefault(match[1], content)
    return {"optimizer": settings} if settings else {}


def merge_chunks(
    checkpoint: Path, expected: Sequence[Match], tensors: Mapping[str, Chunked], model: ModelConfig
) -> dict[str, MergedTensor]:
    """Return the tensor of each match, by its name. UserError unless `tensors` are these and no
    others."""
    merged: dict[str, MergedTensor] = {}
    used: set[str] = set()
    for match in expected:
        spelling = _find_spelling(match.foreign, tensors, model)
        if spelling is None:
            continue
        names, indices = spelling
        used.update(names)
        parts = [_unstack(checkpoint, tensors[tensor_name], indices) for tensor_name in names]
        merged[match.foreign] = _merge(checkpoint, match, parts, indices)
    check_tensors(checkpoint, expected, merged)
    surplus = sorted(tensors.keys() - used)
    if surplus:
        raise UserError.of(
            "convert.megatron_tensor_extra", path=checkpoint, name=tensors[surplus[0]].name
        )
    return merged


def _find_spelling(
    tensor_name: str, tensors: Mapping[str, Chunked], model: ModelConfig
) -> tuple[tuple[str, ...], tuple[StackIndex, ...]] | None:
    """Return the name under which the checkpoint has the tensor, or the names of its parts, and
    which of the tensors that are stacked under that name it is. None if the checkpoint lacks it."""
    for spelling in _spellings(tensor_name, model):
        whole = (spelling.name,)
        gate_and_up = (f"{spelling.name}_w", f"{spelling.name}_v")
        sections = _section_names(spelling.name)
        for names in (whole, gate_and_up, sections):
            if names and all(name in tensors for name in names):
                return names, spelling.indices
    return None


def _section_names(tensor_name: str) -> tuple[str, ...]:
    """Return the names of what is stacked in a tensor of a mixer or a gated delta net; none of
    others."""
    for end, sections in _SECTIONS.items():
        if tensor_name.endswith(end):
            return tuple(f"{tensor_name}.{section}" for section in sections)
    return ()


def _spellings(tensor_name: str, model: ModelConfig) -> list[Spelling]:
    """Return every name that the tensor may have, and where it is in a tensor of that name."""
    of_layer = [Spelling("", ())]
    inner_name = tensor_name
    if layer := LAYER.match(tensor_name):
        prefix, number, inner_name = layer.groups()
        stacked = StackIndex(int(number), model.layers)
        of_layer = [
            Spelling(f"{prefix}{int(number)}", ()),
            Spelling(prefix.removesuffix("."), (stacked,)),
        ]
    of_expert = [Spelling(inner_name, ())]
    if expert := _EXPERT.fullmatch(inner_name):
        prefix, number, suffix = expert.groups()
        stacked = StackIndex(int(number), model.experts)
        of_expert = [
            Spelling(f"{prefix}experts.{int(number)}{suffix}", ()),
            Spelling(f"{prefix}experts{suffix}", (stacked,)),
        ]
    spellings = []
    for outer, inner in product(of_layer, of_expert):
        spellings.append(Spelling(outer.name + inner.name, outer.indices + inner.indices))
    return spellings


def _unstack(checkpoint: Path, tensor: Chunked, indices: tuple[StackIndex, ...]) -> Chunked:
    """Return the tensor at `indices` of one that stacks others."""
    depth = len(indices)
    counts = tuple(index.count for index in indices)
    if tensor.shape[:depth] != counts:
        raise UserError.of(
            "convert.megatron_layer_count",
            path=checkpoint,
            name=tensor.name,
            shape=list(tensor.shape),
            counts=list(counts),
        )
    chunks = []
    for offset, stored in tensor.chunks:
        # the first dims are those that stack tensors; the others are the tensor's own
        stacked_dims = zip(indices, offset, strict=False)
        in_chunk = [index.number - start for index, start in stacked_dims]
        # Chunks of other layers or experts do not hold this tensor.
        limits = zip(in_chunk, stored.shape, strict=False)
        if all(0 <= number < size for number, size in limits):
            # A chunk of several stacked tensors: the part of it that is of this one.
            chunks.append((offset[depth:], _select(stored, in_chunk)))
    return Chunked(tensor.name, tensor.shape[depth:], chunks)


def _select(stored: Stored, index: Sequence[int]) -> Stored:
    """Return stored[index], read without the rest of it."""
    depth = len(index)
    strides = stored.strides
    if strides is None:
        dims = range(len(stored.shape))
        strides = [prod(stored.shape[dim + 1 :]) for dim in dims]
    steps = zip(index, strides, strict=False)
    elements = sum(number * stride for number, stride in steps)
    start = stored.start + elements * stored.dtype.itemsize
    inner_strides = None if stored.strides is None else stored.strides[depth:]
    return stored.part(stored.shape[depth:], start, inner_strides)


def _merge(
    checkpoint: Path, match: Match, parts: Sequence[Chunked], indices: tuple[StackIndex, ...]
) -> MergedTensor:
    """Return parts one below the other. What pads the vocabulary is left out."""
    numbers = [index.number for index in indices]
    whole = merge_parts(checkpoint, match.foreign, parts, numbers)
    # The vocabulary is padded for the ranks of the run that saved it.
    if match.cut != "vocabulary" or whole.shape[0] <= match.shape[0]:
        return whole
    rows = match.shape[0]
    return MergedTensor((rows, *whole.shape[1:]), whole.dtype, lambda: whole.read()[:rows])
