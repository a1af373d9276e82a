"""Megatron-LM's layout of tensors: files, names of experts, and the part of a tensor on each rank.

A checkpoint is a folder iter_0000100/ with one file per model-parallel rank,
mp_rank_TT/model_optim_rng.pt, or mp_rank_TT_PPP/ if there are pipeline stages. Layers are numbered
within a stage. The vocabulary is padded with rows that are not converted.

A rank numbers its experts from zero and may have them in three ways:

    experts.local_experts.E.linear_fc1.weight    one by one, as conversions know them
    experts.linear_fc1.weightE                   grouped, as Transformer Engine has them
    experts.weight1                              packed in one tensor: [features in, features out]
"""

import re
from collections.abc import Mapping, Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from megaprec.errors import UserError
from tools.convert.core.rules import Cut
from tools.convert.core.shards import rows_of_blocks
from tools.convert.core.tensors import Stored

FILE = "model_optim_rng.pt"
EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
TRACKER = "latest_checkpointed_iteration.txt"


def cut_part(tensor: Tensor, cut: Cut, rank: int, tensor_ranks: int, padded: int) -> Tensor:
    """Return the part of a whole tensor on a tensor-parallel rank.

    rank, tensor_ranks: its number, and how many there are.
    padded: rows of the padded vocabulary.
    """
    if cut == "whole" or (tensor_ranks == 1 and cut != "vocabulary"):
        return tensor
    if cut == "columns":
        return tensor.chunk(tensor_ranks, 1)[rank]
    if cut == "vocabulary":
        # The last ranks may have fewer tokens than rows.
        rows = padded // tensor_ranks
        top = rank * rows
        local = tensor[top : top + rows]
        num_missing = rows - len(local)
        return F.pad(local, (0, 0, 0, num_missing))
    # each block is cut over the ranks by itself
    block_rows = rows_of_blocks(cut, len(tensor))
    parts = []
    for block in tensor.split(block_rows):
        chunks = block.chunk(tensor_ranks)
        parts.append(chunks[rank])
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def part_shape(shape: Sequence[int], cut: Cut, tensor_ranks: int, padded: int) -> tuple[int, ...]:
    """Return the shape of what each rank has of a tensor of this shape. UserError if the tensor
    cannot be cut evenly.

    padded: rows of the padded vocabulary.
    """
    rows, *others = shape
    columns = others[0] if others else 0
    # What must be a multiple of the ranks; a vocabulary is padded to one.
    lengths = [columns]
    if cut != "columns":
        lengths = rows_of_blocks(cut, rows)
    is_cut = cut not in ("whole", "vocabulary")
    if is_cut and any(length % tensor_ranks for length in lengths):
        raise UserError.of("convert.megatron_uneven", shape=list(shape), tp=tensor_ranks)
    if cut == "whole":
        return tuple(shape)
    if cut == "columns":
        return rows, columns // tensor_ranks
    if cut == "vocabulary":
        return padded // tensor_ranks, *others
    return rows // tensor_ranks, *others


def rank_folder(tp_rank: int, pp_rank: int, pp: int, ep_rank: int = 0, ep: int = 1) -> str:
    """Return the name of a rank's folder. Pipeline and expert ranks are left out of it if there is
    one. pp, ep: how many there are."""
    name = f"mp_rank_{tp_rank:02d}"
    if pp > 1:
        name += f"_{pp_rank:03d}"
    if ep > 1:
        name += f"_{ep_rank:03d}"
    return name


_LOCAL = re.compile(r"(.*\.experts\.local_experts\.)(\d+)(\..*)")
_GROUPED = re.compile(r"(.*\.experts\.)(linear_fc[12]\.(?:weight|bias))(\d+)")
_PACKED = re.compile(r"(.*\.experts\.)weight([12])")


def is_expert(tensor_name: str) -> bool:
    """Return True if the tensor belongs to an expert."""
    return ".mlp.experts." in tensor_name


def is_trained(tensor_name: str) -> bool:
    """Return False for a router's correction: a buffer of the model, in FP32, of which the
    optimizer has no state."""
    return not tensor_name.endswith(".router.expert_bias")


def with_global_experts(
    tensors: Mapping[str, Stored], hidden: int, count: int, first: int
) -> dict[str, Stored]:
    """Return a rank's tensors with experts one by one, numbered over all ranks.

    hidden: features of the model.
    count: experts of the rank.
    first: the number of its first expert.
    """
    renamed: dict[str, Stored] = {}
    for tensor_name, stored in tensors.items():
        if match := _LOCAL.fullmatch(tensor_name):
            prefix, number, suffix = match.groups()
            expert = first + int(number)
            renamed[f"{prefix}{expert}{suffix}"] = stored
        elif match := _GROUPED.fullmatch(tensor_name):
            prefix, suffix, number = match.groups()
            expert = first + int(number)
            renamed[f"{prefix}local_experts.{expert}.{suffix}"] = stored
        elif match := _PACKED.fullmatch(tensor_name):
            prefix, linear = match.groups()
            # The first linear layer goes out from the model's features, the second back to them.
            matrices = _unpack(stored, hidden, count, is_hidden_in=linear == "1")
            # All experts of the rank are in this one tensor.
            for expert, matrix in enumerate(matrices, first):
                renamed[f"{prefix}local_experts.{expert}.linear_fc{linear}.weight"] = matrix
        else:
            renamed[tensor_name] = stored
    return renamed


def local_name(tensor_name: str, count: int, grouped: bool) -> str:
    """Return the name that a tensor has on its rank, where experts are numbered from zero.

    count: experts of a rank.
    grouped: experts have the names of Transformer Engine.
    """
    match = _LOCAL.fullmatch(tensor_name)
    if not match:
        return tensor_name
    prefix, number, suffix = match.groups()
    # Each rank has `count` neighbouring experts.
    local_number = int(number) % count
    if grouped:
        experts = prefix.removesuffix("local_experts.")
        weight = suffix.removeprefix(".")
        return f"{experts}{weight}{local_number}"
    return f"{prefix}{local_number}{suffix}"


def expert_of(tensor_name: str) -> int | None:
    """Return the number of the expert that a tensor belongs to, by its name where experts are one
    by one; None for a tensor of no expert."""
    match = _LOCAL.fullmatch(tensor_name)
    return int(match[2]) if match else None


def _unpack(stored: Stored, hidden: int, count: int, is_hidden_in: bool) -> list[Stored]:
    """Return each expert's matrix [features out, features in] of a tensor that has them all as
    [features in, features out].

    is_hidden_in: `hidden` is the number of features in; otherwise that of features out.
    """
    # Nothing but the tensor's size tells the width of an expert.
    elements = prod(stored.shape)
    size = elements // count
    is_whole = size * count == elements and size % hidden == 0
    # a tensor with strides is no longer as its file has it
    if stored.strides is not None or not is_whole:
        raise UserError.of(
            "convert.megatron_expert_tensor",
            file=stored.file,
            shape=list(stored.shape),
            count=count,
        )
    inner_features = size // hidden
    features_in = hidden
    features_out = inner_features
    if not is_hidden_in:
        features_in = inner_features
        features_out = hidden
    nbytes = size * stored.dtype.itemsize
    shape = (features_out, features_in)
    # Experts lie one after another, each transposed: strides turn it without reading.
    strides = (1, features_out)
    starts = [stored.start + expert * nbytes for expert in range(count)]
    return [stored.part(shape, start, strides) for start in starts]
