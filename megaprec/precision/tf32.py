"""TF32: products of FP32 factors of which only ten bits of mantissa are used.

TF32 is not a dtype. On a device that supports it, torch's switches turn it on for the whole
process; `tf32` sets them for the duration of a `with` block. On other devices the same numbers
result from rounding the factors of a product with `round_tf32` first: a tensor core multiplies the
rounded factors exactly and accumulates in FP32.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_DROPPED_BITS = 13  # of FP32's mantissa, which TF32 lacks


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Context manager in which FP32 matrix products and convolutions may use TF32 (`on`), or must
    not.

    torch has each switch twice: `allow_tf32`, and since 2.9 `fp32_precision`. Both are set, and put
    back at the end. On a CPU, FP32 products are in FP32 inside, whatever
    `torch.set_float32_matmul_precision` has allowed.
    """
    backends: Any = torch.backends
    cuda = backends.cuda.matmul
    cudnn = backends.cudnn
    cpu = backends.mkldnn.matmul
    matmul_precision = _read_switch(torch.get_float32_matmul_precision)
    cuda_allowed = _read_switch(lambda: cuda.allow_tf32)
    cudnn_allowed = _read_switch(lambda: cudnn.allow_tf32)
    newer_switches = (cuda, cudnn.conv, cudnn.rnn, cpu)
    newer_values = [switch.fp32_precision for switch in newer_switches]
    # the older switches first: torch lets them write the newer ones
    cuda.allow_tf32 = cudnn.allow_tf32 = on
    cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "tf32" if on else "ieee"
    cpu.fp32_precision = "ieee"
    try:
        yield
    finally:
        # Unknown (None) counts as torch's default: TF32 in convolutions only.
        cuda.allow_tf32 = cuda_allowed is True
        cudnn.allow_tf32 = cudnn_allowed is not False
        if matmul_precision == "medium":  # which the older switch does not know
            torch.set_float32_matmul_precision(matmul_precision)
        for switch, value in zip(newer_switches, newer_values, strict=True):
            switch.fp32_precision = value


def _read_switch(read: Callable[[], Any]) -> Any:
    """Return what an older switch says; None if torch refuses, because newer ones were set
    otherwise."""
    try:
        return read()
    except RuntimeError:
        return None


def round_tf32(values: Tensor) -> Tensor:
    """Return float32 `values` (any shape) rounded to the nearest TF32, ties away from zero, as
    float32.

    This is the rounding of PTX's cvt.rna.tf32.f32. inf and NaN are unchanged; a number that rounds
    beyond the largest TF32 becomes inf; subnormals keep the bits that TF32 has for them.
    """
    bits = values.contiguous().view(torch.int32)
    half_unit = 1 << (_DROPPED_BITS - 1)  # added to the magnitude: ties go away from zero
    mask = -(1 << _DROPPED_BITS)
    rounded = (bits + half_unit) & mask
    return torch.where(values.isfinite(), rounded.view(torch.float32), values)


def product_tf32(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b of float32 factors rounded to TF32, accumulated in FP32."""
    return round_tf32(a) @ round_tf32(b)
