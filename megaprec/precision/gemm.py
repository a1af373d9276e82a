"""Matrix products in the precision that the plan names.

A product is rounded to the dtype of its factors, whatever the dtype of accumulation. torch's FP16
product on a CPU is some sixty times slower than its FP32 product, and so is its BF16 product on a
CPU without vector instructions for it. There the factors are cast to FP32, multiplied, and the
result is rounded. A tensor core does the same, with overflow to inf at the same magnitude. A CPU
has no TF32 either, so there FP32 factors are first rounded to TF32, which shows the numbers that a
GPU would compute.

A GPU may cut a long sum into parts. torch lets cuBLAS add these in 16 bits, so that a product is
rounded several times; `fp32_sums` forbids that.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from megaprec.precision.gemm_provider import Factor
from megaprec.precision.tf32 import product_tf32, round_tf32
from megaprec.torch_private import has_bf16_products, has_kernel

# elements that a CPU casts to a wider dtype at a time: they stay in a core's cache
_ELEMENTS_PER_CAST = 1 << 16
_HALF = (torch.float16, torch.bfloat16)
# torch's switches that allow a GPU to sum in 16 bits
_NARROW_SUMS = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


@dataclass(frozen=True)
class Gemm:
    """A `GemmProvider` in a dtype of two bytes or more. Factors are saved as they are, and cast for
    each product.

    dtype: dtype of the factors: activations, weights and gradients are cast to it. out: dtype of y.
    tf32: on a CPU, factors of FP32 products are rounded to TF32; on other devices the switches of
        `megaprec.precision.tf32` decide.
    grad_scale: factor by which weight gradients are multiplied; input gradients are not.
    """

    dtype: torch.dtype
    out: torch.dtype
    tf32: bool = False
    grad_scale: float = 1.0

    def for_pass(self) -> "Gemm":
        """Return this provider."""
        return self

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Factor]:
        """Return y [m, n] from x [m, k] and weight [n, k], and x."""
        transposed = cast(weight, self.dtype).t()
        output = product(cast(x, self.dtype), transposed, self.tf32)
        return cast(output, self.out), (x,)

    def factor(self, x: Tensor) -> Tensor:
        """Return x as a product that another function computes takes it: in the dtype of the
        factors, and on a CPU rounded to TF32, if that is asked for."""
        narrow = cast(x, self.dtype)
        return round_tf32(narrow) if self.tf32 and lacks_tf32(narrow) else narrow

    def keep(self, x: Tensor) -> Factor:
        """Return x."""
        return (x,)

    def gradient_factors(self, grad: Tensor) -> tuple[Factor, Factor]:
        """Return `grad` unchanged, twice."""
        return (grad,), (grad,)

    def input_gradient(self, grad: Factor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the gradient of x, [m, k] in `dtype`, for a weight [n, k]."""
        (output_grad,) = grad
        input_grad = product(cast(output_grad, self.dtype), cast(weight, self.dtype), self.tf32)
        return cast(input_grad, dtype)

    def weight_gradient(self, grad: Factor, x: Factor) -> Tensor:
        """Return the gradient of the weight, [n, k]."""
        transposed_grad, narrow_x = self._weight_factors(grad, x)
        weight_grad = product(transposed_grad, narrow_x, self.tf32)
        if self.grad_scale != 1:
            weight_grad.mul_(self.grad_scale)
        return weight_grad

    def add_weight_gradient_(
        self,
        total: Tensor,
        grad: Factor,
        x: Factor,
        first: bool,
    ) -> None:
        """Add grad.T @ x to `total` [n, k], whose dtype may be wider than that of the factors.

        first: overwrite `total` instead.
        """
        transposed_grad, narrow_x = self._weight_factors(grad, x)
        add_product_(total, transposed_grad, narrow_x, self.tf32, first, self.grad_scale)

    def _weight_factors(self, grad: Factor, x: Factor) -> tuple[Tensor, Tensor]:
        """Return the factors of the weight's gradient, [n, m] and [m, k], in the dtype of
        products."""
        (output_grad,) = grad
        (layer_input,) = x
        return cast(output_grad, self.dtype).t(), cast(layer_input, self.dtype)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in another dtype; itself if it has that already, which `Tensor.to` takes
    microseconds to find."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def product(a: Tensor, b: Tensor, tf32: bool = False) -> Tensor:
    """Return a @ b, [m, k] @ [k, n] -> [m, n], in the dtype of the factors, or each product of as
    many matrices, [count, m, k] @ [count, k, n]."""
    if slow_half(a):
        return (a.float() @ b.float()).to(a.dtype)
    if tf32 and lacks_tf32(a):  # a GPU's own switches are set already
        return product_tf32(a, b)
    return a @ b


def sum_with_product(
    base: Tensor,
    a: Tensor,
    b: Tensor,
    beta: float,
    alpha: float,
) -> Tensor:
    """Return beta * base + alpha * a @ b, rounded once to the dtype of the factors. Each tensor is
    a matrix, or as many of them: [count, m, k] and so on."""
    add_product = torch.addmm if a.dim() == 2 else torch.baddbmm
    if slow_half(a):
        wide = add_product(
            base.float(),
            a.float(),
            b.float(),
            beta=beta,
            alpha=alpha,
        )
        return wide.to(a.dtype)
    return add_product(base, a, b, beta=beta, alpha=alpha)


@contextmanager
def fp32_sums() -> Iterator[None]:
    """Context manager in which a GPU sums 16-bit products in FP32 throughout. Puts torch's switches
    back at the end."""
    switches = torch.backends.cuda.matmul
    turned_off = [name for name in _NARROW_SUMS if getattr(switches, name)]
    for name in turned_off:
        setattr(switches, name, False)
    try:
        yield
    finally:
        for name in turned_off:
            setattr(switches, name, True)


def slow_half(tensor: Tensor) -> bool:
    """Return True if products of this tensor are faster in FP32, with the result rounded."""
    # the dtype first: most products are not in FP16 or bf16
    if tensor.dtype not in _HALF or tensor.device.type != "cpu":
        return False
    return tensor.dtype == torch.float16 or slow_bf16(tensor)


def slow_bf16(tensor: Tensor) -> bool:
    """Return True for bf16 on a CPU on which torch's product of bf16 is a plain loop: on x86 one
    without AVX512."""
    on_cpu = tensor.device.type == "cpu"
    return on_cpu and tensor.dtype == torch.bfloat16 and not _has_bf16_products()


_has_bf16_products = cache(has_bf16_products)


def lacks_tf32(tensor: Tensor) -> bool:
    """Return True if TF32 products of this tensor must be emulated by rounding the tensor."""
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def add_product_(
    total: Tensor,
    a: Tensor,
    b: Tensor,
    tf32: bool = False,
    first: bool = False,
    scale: float = 1.0,
) -> None:
    """Add scale * a @ b to `total`, whose dtype may be wider than that of the factors.

    The product is rounded to the dtype of the factors before it is scaled and added, except on a
    device whose product takes a wider total (`adds_unrounded`). first: overwrite `total` instead.
    """
    beta = 0 if first else 1  # 0 ignores `total`, even inf and NaN
    if adds_unrounded(total, a):
        torch.addmm(
            total,
            a,
            b,
            beta=beta,
            alpha=scale,
            out_dtype=total.dtype,
            out=total,
        )
        return
    emulates_tf32 = tf32 and lacks_tf32(a)
    if total.dtype == a.dtype and not slow_half(a) and not emulates_tf32:
        total.addmm_(a, b, beta=beta, alpha=scale)
        return
    # No kernel does it in one: multiply, round, then scale and add.
    rounded = product(a, b, tf32)
    if scale != 1:
        rounded.mul_(scale)
    if first:
        total.copy_(rounded)
    else:
        _add_(total, rounded)


def adds_unrounded(total: Tensor, factor: Tensor) -> bool:
    """Return True if torch adds products of such factors to an FP32 total inside the product,
    without rounding them.

    torch does so for 16-bit factors on CUDA (`_addmm_dtype_out_cuda` in
    aten/src/ATen/native/cuda/Blas.cpp), and has no such product for a CPU.
    """
    if factor.dtype not in _HALF or total.dtype != torch.float32:
        return False
    return _has_wide_totals(total.device.type)


@cache
def _has_wide_totals(device: str) -> bool:
    """Return True if torch has a kernel for a device that adds a product to a wider total."""
    dispatch_key = {"cuda": "CUDA", "cpu": "CPU"}.get(device)
    # older releases of torch lack the overload
    if dispatch_key is None or not hasattr(torch.ops.aten.addmm, "dtype_out"):
        return False
    return has_kernel("aten::addmm.dtype_out", dispatch_key)


def _add_(total: Tensor, product: Tensor) -> None:
    """Add `product` to `total`. On a CPU in blocks of rows, because torch casts `product` into a
    temporary tensor first, and a small temporary tensor stays in the cache."""
    is_fake = type(total) is not Tensor  # a shape without values, which no cache holds
    if total.dtype == product.dtype or total.device.type != "cpu" or is_fake:
        total.add_(product)
        return
    columns = max(1, product.shape[1])
    block_rows = max(1, _ELEMENTS_PER_CAST // columns)
    blocks = zip(total.split(block_rows), product.split(block_rows), strict=True)
    for total_block, product_block in blocks:
        total_block.add_(product_block)
