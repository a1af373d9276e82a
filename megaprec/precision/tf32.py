"""TF32: FP32 whose products see only ten bits of mantissa.

TF32 is no dtype. On a device that has it, it is two switches of torch's that hold for the whole process; `tf32` sets
them for as long as a `with` block lasts. Elsewhere its numbers can be had by rounding the factors of a product with
`round_tf32` first: a tensor core multiplies what is left exactly and adds in FP32.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_DROPPED = 13  # bits of FP32's mantissa that TF32 lacks


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Within the block products of matrices and convolutions in FP32 may be made in TF32, or may not.

    Sets torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32, and puts back what they were.
    """
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def round_tf32(values: Tensor) -> Tensor:
    """float32 of any shape, rounded to the nearest TF32 and, halfway between two, away from zero (float32 again).

    That is the rounding of PTX's cvt.rna.tf32.f32. inf and NaN stay what they are; what rounds beyond the largest TF32
    becomes inf; subnormals keep the bits that TF32 has for them.
    """
    bits = values.contiguous().view(torch.int32)
    rounded = (bits + (1 << (_DROPPED - 1))) & -(1 << _DROPPED)
    return torch.where(values.isfinite(), rounded.view(torch.float32), values)


def product_tf32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of float32, from factors rounded to TF32, added in FP32."""
    return round_tf32(a) @ round_tf32(b)
