"""Matrix products in the precision that the plan names.

A product is rounded to the dtype of its factors, whatever it was summed in. torch's half-precision product on
a CPU is some sixty times slower than its FP32 one, so there the factors are widened, multiplied in FP32 and the
result is rounded to half: what a tensor core does, with overflow to inf at the same magnitude. A CPU has no TF32
either: there FP32 factors are rounded to it first, so that what a GPU would make of them can be studied.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megaprec.precision.tf32 import product_tf32

_WIDENED = 1 << 16  # elements that a CPU widens at a time

Factor = tuple[Tensor, ...]
"""A factor of a product as whoever makes the product prepared it, and as autograd keeps it."""


class GemmProvider(Protocol):
    """Makes the three products of a linear layer y = x @ W.T, whatever its tensors are held in."""

    def now(self) -> "GemmProvider":
        """Who makes those of the forward pass that begins, and of its backward pass."""
        ...

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Factor]:
        """x [m, k], weight [n, k] -> y [m, n], and x as the gradient of the weight will need it."""
        ...

    def keep(self, x: Tensor) -> Factor:
        """The latter again, from the same x."""
        ...

    def gradient(self, grad: Tensor) -> tuple[Factor, Factor]:
        """grad [m, n], of y, as the gradient of x and as that of the weight needs it."""
        ...

    def input_gradient(self, grad: Factor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """weight [n, k] -> gradient of x [m, k], of `dtype`."""
        ...

    def weight_gradient(self, grad: Factor, x: Factor) -> Tensor:
        """-> [n, k]."""
        ...

    def add_weight_gradient_(self, total: Tensor, grad: Factor, x: Factor, first: bool) -> None:
        """total [n, k] += gradient of the weight, where `total` may be wider than the factors. first: written over what
        is there."""
        ...


@dataclass(frozen=True)
class Gemm:
    """`GemmProvider` in a dtype of two bytes or more. Factors are kept as they come, and cast for each product.

    dtype: of the factors: activations, weights and gradients are cast to it. out: of y. tf32: FP32 products see no more
    of their factors than TF32 has, on a CPU; elsewhere that is for the switches of `megaprec.precision.tf32` to say.
    grad_scale: what gradients of the weight are multiplied by; those of x are not.
    """

    dtype: torch.dtype
    out: torch.dtype
    tf32: bool = False
    grad_scale: float = 1.0

    def now(self) -> "Gemm":
        """This one."""
        return self

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Factor]:
        """x [m, k], weight [n, k] -> y [m, n], and x."""
        return product(x.to(self.dtype), weight.to(self.dtype).t(), self.tf32).to(self.out), (x,)

    def keep(self, x: Tensor) -> Factor:
        """x."""
        return (x,)

    def gradient(self, grad: Tensor) -> tuple[Factor, Factor]:
        """grad, twice."""
        return (grad,), (grad,)

    def input_gradient(self, grad: Factor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """weight [n, k] -> gradient of x [m, k], of `dtype`."""
        return product(grad[0].to(self.dtype), weight.to(self.dtype), self.tf32).to(dtype)

    def weight_gradient(self, grad: Factor, x: Factor) -> Tensor:
        """-> [n, k]."""
        made = product(grad[0].to(self.dtype).t(), x[0].to(self.dtype), self.tf32)
        return made if self.grad_scale == 1 else made.mul_(self.grad_scale)

    def add_weight_gradient_(self, total: Tensor, grad: Factor, x: Factor, first: bool) -> None:
        """total [n, k] += grad.T @ x, where `total` may be wider than the factors. first: written over it."""
        add_product_(total, grad[0].to(self.dtype).t(), x[0].to(self.dtype), self.tf32, first, self.grad_scale)


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


def add_product_(
    total: Tensor, a: Tensor, b: Tensor, tf32: bool = False, first: bool = False, scale: float = 1.0
) -> None:
    """total += scale * a @ b, or total = that if it is the first, where `total` may be wider than the factors. The
    product is rounded before it is scaled and added."""
    if total.dtype == a.dtype and not slow_half(a) and not (tf32 and lacks_tf32(a)):
        total.addmm_(a, b, beta=0 if first else 1, alpha=scale)  # 0 times what is there is 0, even if not finite
        return
    made = product(a, b, tf32)
    made = made if scale == 1 else made.mul_(scale)
    if first:
        total.copy_(made)
    else:
        _add_(total, made)


def _add_(total: Tensor, product: Tensor) -> None:
    """total += product. A CPU widens into memory of its own before it adds: few enough rows that this is in a cache."""
    real = type(total) is Tensor  # and not one that has a shape only
    if total.dtype == product.dtype or total.device.type != "cpu" or not real:
        total.add_(product)
        return
    rows = max(1, _WIDENED // max(1, product.shape[1]))
    for some, more in zip(total.split(rows), product.split(rows), strict=True):
        some.add_(more)
