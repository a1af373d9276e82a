"""Experts in Megatron's files, where a rank numbers its own from zero and may pack them in one of
two other ways.

experts.local_experts.E.linear_fc1.weight    one by one, as the rest of the conversion knows them
experts.linear_fc1.weightE                   grouped, as Transformer Engine has them
experts.weight1                              grouped in one tensor, features in before features out
"""

import re
from collections.abc import Mapping
from math import prod

from megaprec.errors import UserError
from tools.convert.core.tensors import Stored

_LOCAL = re.compile(r"(.*\.experts\.local_experts\.)(\d+)(\..*)")
_GROUPED = re.compile(r"(.*\.experts\.)(linear_fc[12]\.(?:weight|bias))(\d+)")
_PACKED = re.compile(r"(.*\.experts\.)weight([12])")


def is_expert(name: str) -> bool:
    """Return True if the tensor belongs to an expert."""
    return ".mlp.experts." in name


def is_trained(name: str) -> bool:
    """Return False for a router's correction: a buffer of the model, in FP32, of which the
    optimizer has no state."""
    return not name.endswith(".router.expert_bias")


def with_global_experts(
    tensors: Mapping[str, Stored], hidden: int, count: int, first: int
) -> dict[str, Stored]:
    """Return a rank's tensors with experts one by one, numbered over all ranks.

    hidden: features of the model.
    count: experts of the rank.
    first: the number of its first expert.
    """
    renamed: dict[str, Stored] = {}
    for name, stored in tensors.items():
        if match := _LOCAL.fullmatch(name):
            prefix, number, suffix = match.groups()
            renamed[f"{prefix}{int(number) + first}{suffix}"] = stored
        elif match := _GROUPED.fullmatch(name):
            prefix, layer, number = match.groups()
            renamed[f"{prefix}local_experts.{int(number) + first}.{layer}"] = stored
        elif match := _PACKED.fullmatch(name):
            prefix, layer = match.groups()
            matrices = _unpack(stored, hidden, count, features_in_first=layer == "1")
            # All experts of the rank are in this one tensor.
            for expert, matrix in enumerate(matrices, first):
                renamed[f"{prefix}local_experts.{expert}.linear_fc{layer}.weight"] = matrix
        else:
            renamed[name] = stored
    return renamed


def local_name(name: str, count: int, grouped: bool) -> str:
    """Return the name that a tensor has on its rank, where experts are numbered from zero.

    count: experts of a rank.
    grouped: experts have the names of Transformer Engine.
    """
    match = _LOCAL.fullmatch(name)
    if not match:
        return name
    prefix, number, suffix = match.groups()
    # Each rank has as many experts, in order.
    local_number = int(number) % count
    if grouped:
        return f"{prefix.removesuffix('local_experts.')}{suffix.removeprefix('.')}{local_number}"
    return f"{prefix}{local_number}{suffix}"


def expert_of(name: str) -> int | None:
    """Return the number of the expert that a tensor belongs to, by its name of one by one."""
    match = _LOCAL.fullmatch(name)
    return int(match[2]) if match else None


def _unpack(stored: Stored, hidden: int, count: int, features_in_first: bool) -> list[Stored]:
    """Return each expert's matrix [features out, features in] of a tensor that has them all as
    [features in, features out].

    features_in_first: `hidden` is the number of features in; otherwise that of features out.
    """
    size = prod(stored.shape) // count
    if stored.strides is not None or size * count != prod(stored.shape) or size % hidden:
        raise UserError.of(
            "convert.megatron_expert_tensor",
            file=stored.file,
            shape=list(stored.shape),
            count=count,
        )
    features_in = hidden
    features_out = size // hidden
    if not features_in_first:
        features_in = size // hidden
        features_out = hidden
    nbytes = size * stored.dtype.itemsize
    shape = (features_out, features_in)
    # Experts lie one after another, each transposed: strides turn it without reading.
    strides = (1, features_out)
    starts = [stored.start + expert * nbytes for expert in range(count)]
    return [stored.part(shape, start, strides) for start in starts]
