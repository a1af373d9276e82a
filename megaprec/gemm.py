"""Matrix products in the precision that the plan names.

A product is rounded to the dtype of its factors, whatever it was summed in. torch's half-precision product on
a CPU is some sixty times slower than its FP32 one, so there the factors are widened, multiplied in FP32 and the
result is rounded to half: what a tensor core does, with overflow to inf at the same magnitude. A CPU has no TF32
either: there FP32 factors are rounded to it first, so that what a GPU would make of them can be studied.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megaprec.tf32 import product_tf32


@dataclass(frozen=True)
class Gemm:
    """How the three products of a linear layer y = x @ W.T are made, whatever its tensors are held in.

    dtype: of the factors: activations, weights and gradients are cast to it. out: of y. tf32: FP32 products see no more
    of their factors than TF32 has, on a CPU; elsewhere that is for the switches of `megaprec.tf32` to say.
    """

    dtype: torch.dtype
    out: torch.dtype
    tf32: bool = False

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [m, k], weight [n, k] -> y [m, n]."""
        return product(x.to(self.dtype), weight.to(self.dtype).t(), self.tf32).to(self.out)

    def input_gradient(self, grad: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """grad [m, n], weight [n, k] -> gradient of x [m, k], of `dtype`."""
        return product(grad.to(self.dtype), weight.to(self.dtype), self.tf32).to(dtype)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """grad [m, n], x [m, k] -> [n, k]."""
        return product(grad.to(self.dtype).t(), x.to(self.dtype), self.tf32)

    def add_weight_gradient_(self, total: Tensor, grad: Tensor, x: Tensor) -> None:
        """total [n, k] += grad.T @ x, where `total` may be wider than the factors."""
        add_product_(total, grad.to(self.dtype).t(), x.to(self.dtype), self.tf32)


def product(a: Tensor, b: Tensor, tf32: bool = False) -> Tensor:
    """[m, k] @ [k, n] -> [m, n], in the dtype of the factors."""
    if slow_half(a):
        return (a.float() @ b.float()).half()
    return product_tf32(a, b) if tf32 and lacks_tf32(a) else a @ b


def slow_half(tensor: Tensor) -> bool:
    """Whether products of this tensor had better be made in FP32 and rounded."""
    return tensor.dtype == torch.float16 and tensor.device.type == "cpu"


def lacks_tf32(tensor: Tensor) -> bool:
    """Whether products of this tensor in TF32 must be made by rounding it."""
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def add_product_(total: Tensor, a: Tensor, b: Tensor, tf32: bool = False) -> None:
    """total += a @ b, where `total` may be wider than the factors. The product is rounded before it is added."""
    if total.dtype == a.dtype and not slow_half(a) and not (tf32 and lacks_tf32(a)):
        total.addmm_(a, b)
    else:
        total.add_(product(a, b, tf32))
