"""TF32: products of FP32 factors of which only ten bits of mantissa are used.

TF32 is not a dtype. On a device that supports it, two torch switches turn it on for the whole process; `tf32` sets them
for the duration of a `with` block. On other devices the same numbers result from rounding the factors of a product
with `round_tf32` first: a tensor core multiplies the rounded factors exactly and accumulates in FP32.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_DROPPED = 13  # bits of FP32's mantissa that TF32 lacks


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Context manager in which FP32 matrix products and convolutions may use TF32 (`on`), or must not.

    Sets torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32, and restores them at the end.
    """
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def round_tf32(values: Tensor) -> Tensor:
    """Return float32 `values` (any shape) rounded to the nearest TF32, ties away from zero, as float32.

    This is the rounding of PTX's cvt.rna.tf32.f32. inf and NaN are unchanged; a number that rounds beyond the largest
    TF32 becomes inf; subnormals keep the bits that TF32 has for them.
    """
    bits = values.contiguous().view(torch.int32)
    rounded = (bits + (1 << (_DROPPED - 1))) & -(1 << _DROPPED)
    return torch.where(values.isfinite(), rounded.view(torch.float32), values)


def product_tf32(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b of float32 factors rounded to TF32, accumulated in FP32."""
    return round_tf32(a) @ round_tf32(b)
