"""MXFP4 weights of gpt-oss' experts: four bits for each number, and a scale for each 32 of them.

A byte holds two numbers, the first in its lower half; each is one of 16 values. A scale is a byte e
and stands for 2 ** (e - 127). The published files hold, in place of a tensor NAME [experts,
features in, features out],

    NAME_blocks    uint8 [experts, features out, features in / 32, 16]
    NAME_scales    uint8 [experts, features out, features in / 32]

Every number is exact in bf16, so reading loses nothing. The format: OCP Microscaling Formats
specification 1.0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megaprec.errors import UserError
from tools.convert.core.tensors import Stored
from tools.convert.hf.kinds import short

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BLOCK = 32  # numbers that share a scale
_BLOCKS = "_blocks"
_SCALES = "_scales"
_KNOWN = ("quant_method", "modules_to_not_convert", "dequantize")


@dataclass(frozen=True)
class Quantized:
    """A tensor that is stored as blocks and scales. Read as bf16 [experts, features in, features
    out]."""

    blocks: Stored
    scales: Stored

    dtype = torch.bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the tensor that is read."""
        experts, outputs, groups, _ = self.blocks.shape
        return experts, groups * BLOCK, outputs

    def read(self) -> Tensor:
        """Return the tensor, one expert after the other. Raises UserError for a scale that is no
        number."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        for e, expert in enumerate(whole):
            blocks, scales = (part.rows(e, e + 1)[0] for part in (self.blocks, self.scales))
            expert.copy_(dequantized(blocks, scales).t())
            if not expert.isfinite().all():
                raise UserError(
                    f"{self.blocks.file}: MXFP4 scales of expert {e} are beyond what bf16 holds"
                )
        return whole


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return FP32 [..., 32 * groups] from blocks uint8 [..., groups, 16] and scales uint8 [...,
    groups]."""
    values = torch.tensor(VALUES)
    numbers = torch.stack((values[(blocks & 15).long()], values[(blocks >> 4).long()]), -1).flatten(
        -2
    )
    return torch.ldexp(numbers, scales.int().unsqueeze(-1) - 127).flatten(-2)


def require_known(said: Any) -> None:
    """Raise UserError unless quantization_config is null or says MXFP4."""
    if said is None:
        return
    if not isinstance(said, Mapping) or said.get("quant_method") != "mxfp4":
        raise UserError(
            f"config.json has quantization_config = {short(said)}: only weights of "
            "quant_method = 'mxfp4' can be read"
        )
    if unknown := sorted(set(said) - set(_KNOWN)):
        raise UserError(
            f"config.json has quantization_config with {', '.join(unknown)}, which is not known"
        )


def with_quantized(stored: Mapping[str, Stored], said: Any, path: object) -> dict[str, Any]:
    """Return the tensors of a folder, with each pair of blocks and scales as one tensor.

    said: quantization_config, which says whether there are such pairs. Raises UserError if it does
    not say what is stored, or for a half of a pair.
    """
    names = [name.removesuffix(_BLOCKS) for name in stored if name.endswith(_BLOCKS)]
    halves = [name for name in stored if name.endswith((_BLOCKS, _SCALES))]
    if bool(halves) != bool(said):
        stores = f"stores {halves[0]}" if halves else "stores no MXFP4 blocks"
        raise UserError(
            f"{path} {stores}, but quantization_config is {'mxfp4' if said else 'missing'}"
        )
    whole: dict[str, Any] = {name: one for name, one in stored.items() if name not in halves}
    for name in names:
        if name + _SCALES not in stored:
            raise UserError(f"{path} has {name}{_BLOCKS}, but lacks {name}{_SCALES}")
        whole[name] = _pair(stored[name + _BLOCKS], stored[name + _SCALES], f"{path}: {name}")
    if lost := [
        name
        for name in halves
        if name.endswith(_SCALES) and name.removesuffix(_SCALES) not in names
    ]:
        raise UserError(f"{path} has {lost[0]}, but lacks its blocks")
    return whole


def _pair(blocks: Stored, scales: Stored, what: str) -> Quantized:
    fits = (
        len(blocks.shape) == 4
        and blocks.shape[3] == BLOCK // 2
        and blocks.shape[:3] == scales.shape
    )
    if not fits or {blocks.dtype, scales.dtype} != {torch.uint8}:
        raise UserError(
            f"{what}: blocks {list(blocks.shape)} and scales {list(scales.shape)} are no "
            "MXFP4 tensor"
        )
    return Quantized(blocks, scales)
