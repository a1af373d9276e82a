"""Products of FP8 codes: by the device's own FP8 kernels where it has them, else of the same numbers in FP32."""

import torch
from torch import Tensor

from megaprec.fp8.quantize import Codes, spread


def multiply(a: Codes, b: Codes, out: torch.dtype, fast: bool = False) -> Tensor:
    """a [m, k], b [n, k] -> a @ b.T [m, n], summed in FP32 and rounded to `out` once.

    fast: a tensor core may sum with fewer bits (Hopper's fast accumulation), as Transformer Engine does forward.
    """
    return emulated(a, b).to(out)


def add_product_(total: Tensor, a: Codes, b: Codes) -> None:
    """total [m, n] += a [m, k] @ b [n, k].T, for main gradients."""
    total.add_(multiply(a, b, total.dtype))


def emulated(a: Codes, b: Codes) -> Tensor:
    """a [m, k], b [n, k] -> a @ b.T, float32 [m, n]: of codes, scaled afterwards, or of scaled numbers."""
    (m, k), n = a.values.shape, b.values.shape[0]
    if min(a.block[1], b.block[1]) < k:
        return a.wide() @ b.wide().t()
    product = a.values.float() @ b.values.float().t()
    rows, columns = (spread(c.inverse, c.block, c.values.shape) for c in (a, b))
    return product * rows * columns.t()
