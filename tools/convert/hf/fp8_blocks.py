"""FP8 weights with one scale for each block, as DeepSeek-V3 and Qwen3 publish them.

The files hold, in place of a matrix NAME [features out, features in] and blocks of 128 x 128,

    NAME              float8_e4m3fn [features out, features in]
    NAME_scale_inv    FP32 [features out / 128, features in / 128], rounded up: the last block of a
                      row or column may be smaller

Each number is multiplied in FP32 by the scale of its block, which is thus the inverse of the one it
was quantized with, and rounded to bf16. So do README_WEIGHTS.md and inference/kernel.py
(`weight_dequant`) of DeepSeek-V3.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from megaprec.errors import UserError
from tools.convert.core.tensors import Stored, torch_name
from tools.convert.hf.keys import short

FP8 = torch.float8_e4m3fn
SCALES = "_scale_inv"
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)
BLOCK = [128, 128]  # of a quantization_config that does not say
ROWS = 512  # that are dequantized at a time
# Values of quantization_config that are understood; None: any list of names.
_KNOWN: dict[str, tuple[Any, ...] | None] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic",),
    # how scales were rounded; they have the dtype that the files say
    "scale_fmt": ("float", "ue8m0", None),
    "expert_dtype": ("fp8", None),
    "dequantize": (True, False, None),
    "modules_to_convert": (None, []),
    "modules_to_not_convert": None,
    "ignored_layers": None,
}


@dataclass(frozen=True)
class Blocks:
    """A matrix that is stored in FP8 with a scale for each block. Read as bf16 [features out,
    features in]."""

    name: str
    codes: Stored
    scales: Stored
    block: tuple[int, int]

    dtype = torch.bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the matrix."""
        return self.codes.shape

    def read(self) -> Tensor:
        """Return the matrix. Raises UserError for a scale or a number that is not finite."""
        matrix = torch.empty(self.shape, dtype=self.dtype)
        for top in range(0, len(matrix), ROWS):
            bottom = min(top + ROWS, len(matrix))
            matrix[top:bottom] = self.rows(top, bottom)
        return matrix

    def rows(self, top: int, bottom: int) -> Tensor:
        """Return rows [top, bottom) of the matrix."""
        height, width = self.block
        # the row of blocks in which these rows begin, and that behind their last one
        first_block = top // height
        end_block = -(-bottom // height)
        scales = self.scales.rows(first_block, end_block).float()
        if not (scales.isfinite() & (scales > 0)).all():
            raise UserError.of(
                "convert.fp8_scale", file=self.scales.file, name=self.name, scales=SCALES
            )
        # The rows may begin and end inside of blocks.
        row_scales = scales.repeat_interleave(height, 0)
        row_scales = row_scales[top - first_block * height : bottom - first_block * height]
        values = self.codes.rows(top, bottom).float()
        # In FP32: FP8 times a scale is not exact in bf16.
        values *= row_scales.repeat_interleave(width, 1)[:, : values.shape[1]]
        rounded = values.to(self.dtype)
        if not rounded.isfinite().all():
            raise UserError.of("convert.fp8_not_finite", file=self.codes.file, name=self.name)
        return rounded


def require_known_blocks(quantization: Mapping[str, Any]) -> None:
    """Raise UserError unless a quantization_config of quant_method fp8 says blocks, and nothing
    that is not known."""
    block = quantization.get("weight_block_size", BLOCK)
    if block is None:
        raise UserError.of("convert.fp8_block_null")
    if not _is_size(block):
        raise UserError.of("convert.fp8_block_size", value=short(block))
    for key, value in quantization.items():
        if key != "weight_block_size" and not _is_understood(key, value):
            raise UserError.of("convert.fp8_config_key", key=key, value=short(value))


def _is_understood(key: str, value: Any) -> bool:
    """Return True for a setting of quantization_config that is among the known ones."""
    allowed = _KNOWN.get(key, ())
    if allowed is None:
        return value is None or _is_names(value)
    return value in allowed


def with_blocks(
    stored: Mapping[str, Stored], quantization: Mapping[str, Any] | None, path: object
) -> dict[str, Any]:
    """Return the tensors of a folder, with each FP8 matrix and its scales as one tensor.

    quantization: its quantization_config. Raises UserError if that does not say what is stored, for
        a matrix without scales, scales without a matrix, and scales of another shape.
    """
    # Keys of a dict, in order and found at once: a folder has tens of thousands of each.
    fp8_names = [name for name, tensor in stored.items() if tensor.dtype == FP8]
    quantized = dict.fromkeys(fp8_names)
    if quantization is None:
        if quantized:
            first = next(iter(quantized))
            raise UserError.of("convert.fp8_without_config", path=path, quantized=first)
        return dict(stored)
    if not quantized:
        raise UserError.of("convert.fp8_config_without_weights", path=path)
    scales = dict.fromkeys(name for name in stored if name.endswith(SCALES))
    _require_matrices(scales, quantized, path)
    for tensor_name in quantized:
        if _is_excepted(tensor_name, quantization):
            raise UserError.of("convert.fp8_excluded_weight", path=path, name=tensor_name)
    height, width = quantization.get("weight_block_size", BLOCK)
    tensors: dict[str, Any] = {}
    for tensor_name, tensor in stored.items():
        if tensor_name in quantized:
            tensors[tensor_name] = _matrix(tensor_name, stored, (height, width), path)
        elif tensor_name not in scales:
            tensors[tensor_name] = tensor
    return tensors


def _require_matrices(scales: Iterable[str], quantized: Collection[str], path: object) -> None:
    """Raise UserError for scales without a matrix."""
    for tensor_name in scales:
        matrix = tensor_name.removesuffix(SCALES)
        if matrix not in quantized:
            raise UserError.of(
                "convert.fp8_scale_without_weight", path=path, name=tensor_name, matrix=matrix
            )


def _remedy_without_scales(tensor_name: str, stored: Mapping[str, Stored]) -> str:
    """Return what to do about an FP8 matrix whose scales have another name, or are not there."""
    module = tensor_name.removesuffix("weight")
    others = [name for name in sorted(stored) if name.startswith(module) and name != tensor_name]
    if others:
        return (
            f"if {others[0]} holds the numbers that multiply its blocks, save it under that name; "
            "otherwise fetch the folder anew, or take the same model in BF16"
        )
    return "fetch the folder anew, with all its files, or take the same model in BF16"


def _matrix(
    tensor_name: str, stored: Mapping[str, Stored], block: tuple[int, int], path: object
) -> Blocks:
    """Return an FP8 matrix with its scales. Raises UserError if these do not fit it."""
    codes = stored[tensor_name]
    scales = stored.get(tensor_name + SCALES)
    if scales is None:
        raise UserError.of(
            "convert.fp8_scale_missing",
            path=path,
            name=tensor_name,
            scales=SCALES,
            remedy=_remedy_without_scales(tensor_name, stored),
        )
    # The last block of a row or column may be smaller. A tensor that is no matrix has another
    # number of dimensions than blocks, and is refused below.
    sizes = zip(codes.shape, block, strict=False)
    expected = tuple(-(-size // length) for size, length in sizes)
    if len(codes.shape) != 2 or scales.shape != expected:
        cause = ": they are transposed" if scales.shape == expected[::-1] else ""
        raise UserError.of(
            "convert.fp8_scale_shape",
            path=path,
            name=tensor_name,
            shape=list(codes.shape),
            block_rows=block[0],
            block_columns=block[1],
            scales=SCALES,
            expected=list(expected),
            scale_shape=list(scales.shape),
            cause=cause,
        )
    if scales.dtype not in SCALE_DTYPES:
        raise UserError.of(
            "convert.fp8_scale_dtype",
            path=path,
            name=tensor_name,
            scales=SCALES,
            dtype=torch_name(scales.dtype),
        )
    return Blocks(tensor_name, codes, scales, block)


def _is_size(block: Any) -> bool:
    """Return True for a list of two numbers above 0."""
    if not isinstance(block, list) or len(block) != 2:
        return False
    return all(type(length) is int and length > 0 for length in block)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_excepted(tensor_name: str, quantization: Mapping[str, Any]) -> bool:
    """Return True if a module of `modules_to_not_convert` has the tensor: by its name, its
    beginning or its end."""
    module = tensor_name.removesuffix(".weight")
    modules = quantization.get("modules_to_not_convert") or ()
    ignored = quantization.get("ignored_layers") or ()
    for pattern in (*modules, *ignored):
        for variant in (pattern, f"{pattern}.*", f"*.{pattern}"):
            if fnmatchcase(module, variant):
                return True
    return False
