"""MXFP4 weights of gpt-oss' experts: four bits for each number, and a scale for each 32 of them.

A byte holds two numbers, the first in its lower half; each is one of 16 values. A scale is a byte e
and stands for 2 ** (e - 127). The published files hold, in place of a tensor NAME [experts,
features in, features out],

    NAME_blocks    uint8 [experts, features out, features in / 32, 16]
    NAME_scales    uint8 [experts, features out, features in / 32]

Every number is exact in bf16, so reading loses nothing. The format: OCP Microscaling Formats
specification 1.0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megaprec.errors import UserError
from tools.convert.core.tensors import Stored
from tools.convert.hf.keys import short

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BLOCK = 32  # numbers that share a scale
SCALE_BIAS = 127  # of the exponent that a scale is
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
        tensor = torch.empty(self.shape, dtype=self.dtype)
        for number, expert in enumerate(tensor):
            (blocks,) = self.blocks.rows(number, number + 1)
            (scales,) = self.scales.rows(number, number + 1)
            # Blocks run along the features in, which are the rows of the published tensor.
            values = dequantized(blocks, scales)
            expert.copy_(values.t())
            if not expert.isfinite().all():
                raise UserError.of("convert.mxfp4_scales", file=self.blocks.file, number=number)
        return tensor


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return FP32 [..., 32 * groups] from blocks uint8 [..., groups, 16] and scales uint8 [...,
    groups]."""
    values = torch.tensor(VALUES)
    # The first of two numbers is in the lower half of a byte.
    lower_bits = blocks & 15
    upper_bits = blocks >> 4
    lower = values[lower_bits.long()]
    upper = values[upper_bits.long()]
    pairs = torch.stack((lower, upper), -1)
    numbers = pairs.flatten(-2)  # [..., groups, 32]
    exponents = scales.int().unsqueeze(-1) - SCALE_BIAS
    scaled = torch.ldexp(numbers, exponents)
    return scaled.flatten(-2)


def require_known(quantization: Any) -> None:
    """Raise UserError unless quantization_config is null or says MXFP4."""
    if quantization is None:
        return
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "mxfp4":
        raise UserError.of("convert.mxfp4_method", value=short(quantization))
    unknown = set(quantization) - set(_KNOWN)
    if unknown:
        raise UserError.of("convert.mxfp4_config_key", unknown=", ".join(sorted(unknown)))


def with_quantized(stored: Mapping[str, Stored], quantization: Any, path: object) -> dict[str, Any]:
    """Return the tensors of a folder, with each pair of blocks and scales as one tensor.

    quantization: quantization_config, which says whether there are such pairs. Raises UserError if
        it does not say what is stored, or for a half of a pair.
    """
    halves = [name for name in stored if name.endswith((_BLOCKS, _SCALES))]
    # What is stored and what is said of it must go together.
    if bool(halves) != bool(quantization):
        stores = f"stores {halves[0]}" if halves else "stores no MXFP4 blocks"
        stated = "mxfp4" if quantization else "missing"
        raise UserError.of("convert.quantization_mismatch", path=path, stores=stores, stated=stated)
    tensors: dict[str, Any] = {name: stored[name] for name in stored if name not in halves}
    # Pairs are found by their blocks; what is left then are scales without blocks.
    for half in halves:
        if not half.endswith(_BLOCKS):
            continue
        tensor_name = half.removesuffix(_BLOCKS)
        scales = stored.get(tensor_name + _SCALES)
        if scales is None:
            raise UserError.of(
                "convert.mxfp4_pair_missing",
                path=path,
                name=tensor_name,
                blocks=_BLOCKS,
                scales=_SCALES,
            )
        where = f"{path}: {tensor_name}"
        tensors[tensor_name] = _pair(stored[half], scales, where)
    _require_blocks_of_scales(halves, path)
    return tensors


def _require_blocks_of_scales(halves: Sequence[str], path: object) -> None:
    """Raise UserError for scales without blocks."""
    for half in halves:
        if not half.endswith(_SCALES):
            continue
        blocks = half.removesuffix(_SCALES) + _BLOCKS
        if blocks not in halves:
            raise UserError.of("convert.mxfp4_blocks_missing", path=path, half=half)


def _pair(blocks: Stored, scales: Stored, where: str) -> Quantized:
    """Return blocks and scales as one tensor. Raises UserError unless they are. where: for
    messages."""
    same_groups = len(blocks.shape) == 4 and blocks.shape[:3] == scales.shape
    # A byte holds two of a block's numbers.
    are_whole = same_groups and blocks.shape[3] == BLOCK // 2
    are_bytes = {blocks.dtype, scales.dtype} == {torch.uint8}
    if not are_whole or not are_bytes:
        raise UserError.of(
            "convert.mxfp4_shapes",
            where=where,
            blocks_shape=list(blocks.shape),
            scales_shape=list(scales.shape),
        )
    return Quantized(blocks, scales)
