"""Experts in Megatron's files, where a rank numbers its own from zero and may pack them in one of
two other ways.

experts.local_experts.E.linear_fc1.weight    one by one: the names that the rest of the conversion knows
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


def one_by_one(
    held: Mapping[str, Stored], hidden: int, count: int, first: int
) -> dict[str, Stored]:
    """A rank's tensors under the names of the first way. count: its experts; first: the number of
    the first of them."""
    found: dict[str, Stored] = {}
    for name, stored in held.items():
        if match := _LOCAL.fullmatch(name):
            found[f"{match[1]}{int(match[2]) + first}{match[3]}"] = stored
        elif match := _GROUPED.fullmatch(name):
            found[f"{match[1]}local_experts.{int(match[3]) + first}.{match[2]}"] = stored
        elif match := _PACKED.fullmatch(name):
            for e, own in enumerate(_unpacked(stored, hidden, count, match[2] == "1")):
                found[f"{match[1]}local_experts.{e + first}.linear_fc{match[2]}.weight"] = own
        else:
            found[name] = stored
    return found


def local_name(name: str, count: int, grouped: bool) -> str:
    """The way back, for one of a rank's own experts: numbered from zero, grouped or not."""
    if not (match := _LOCAL.fullmatch(name)):
        return name
    number = int(match[2]) % count
    if grouped:
        return f"{match[1].removesuffix('local_experts.')}{match[3].removeprefix('.')}{number}"
    return f"{match[1]}{number}{match[3]}"


def expert_of(name: str) -> int | None:
    """The number of the expert that a tensor named in the first way belongs to."""
    match = _LOCAL.fullmatch(name)
    return int(match[2]) if match else None


def _unpacked(stored: Stored, hidden: int, count: int, features_in_first: bool) -> list[Stored]:
    """Each expert's matrix [features out, features in] of a tensor that has them all as [features
    in, features out]."""
    size = prod(stored.shape) // count
    if stored.strides is not None or size * count != prod(stored.shape) or size % hidden:
        raise UserError(f"{stored.file}: {list(stored.shape)} is no tensor of {count} experts")
    rows, columns = (hidden, size // hidden) if features_in_first else (size // hidden, hidden)
    starts = [stored.start + e * size * stored.dtype.itemsize for e in range(count)]
    return [stored.part((columns, rows), start, (1, columns)) for start in starts]
