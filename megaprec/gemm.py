"""Matrix products in the precision that the plan names.

A product is rounded to the dtype of its factors, whatever it was summed in. torch's half-precision product on
a CPU is some sixty times slower than its FP32 one, so there the factors are widened, multiplied in FP32 and the
result is rounded to half: what a tensor core does, with overflow to inf at the same magnitude.
"""

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor) -> Tensor:
    """[m, k] @ [k, n] -> [m, n], in the dtype of the factors."""
    if slow_half(a):
        return (a.float() @ b.float()).half()
    return a @ b


def slow_half(tensor: Tensor) -> bool:
    """Whether products of this tensor had better be made in FP32 and rounded."""
    return tensor.dtype == torch.float16 and tensor.device.type == "cpu"


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where `total` may be wider than the factors. The product is rounded before it is added."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(product(a, b))
