"""Orthogonalization of a matrix by Newton-Schulz iterations, with matrix products alone.

If U S V^T is the singular value decomposition of a matrix, U V^T is the nearest matrix whose
singular values are all 1. An iteration replaces each singular value s by a s + b s^3 + c s^5,
without computing the decomposition. Keller Jordan's coefficients
(kellerjordan.github.io/posts/muon) do not converge to 1: they raise small values fast, and five
iterations bring most values between 0.7 and 1.2, which serves an optimizer as well.

The matrix is divided by its Frobenius norm first, because the iteration diverges for singular
values far above 1. Its shorter side is the left one of each product, so that the square matrices
are small.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megaprec.precision.gemm import product, sum_with_product

Coefficients = tuple[float, float, float]
PUBLISHED: Coefficients = (3.4445, -4.7750, 2.0315)


def orthogonalized(
    matrix: Tensor,
    coefficients: Coefficients = PUBLISHED,
    steps: int = 5,
    eps: float = 1e-7,
) -> Tensor:
    """Return the matrix [m, n] after `steps` iterations, in the dtype of `matrix`, in which every
    product is rounded.

    eps: the smallest norm by which the matrix is divided; a matrix of zeros stays zero. The norm of
    a bf16 matrix is computed in FP32.
    """
    wide = matrix if matrix.itemsize >= 4 else matrix.float()
    norm = torch.linalg.vector_norm(wide).clamp(min=eps)
    x = (wide / norm).to(matrix.dtype)
    is_tall = matrix.shape[0] > matrix.shape[1]
    if is_tall:
        x = x.t().contiguous()
    for _ in range(steps):
        x = _iterate(x, coefficients)
    return x.t().contiguous() if is_tall else x


def _iterate(x: Tensor, coefficients: Coefficients) -> Tensor:
    """Return a x + (b g + c g g) x with g = x x^T: of singular values a s + b s^3 + c s^5."""
    a, b, c = coefficients
    gram = product(x, x.t())
    polynomial = sum_with_product(gram, gram, gram, beta=b, alpha=c)
    return sum_with_product(x, polynomial, x, beta=a, alpha=1)


def iteration_flops(shape: Sequence[int], steps: int) -> int:
    """Return the floating-point operations of `orthogonalized` for a matrix: two for each
    multiply-add of a product."""
    short, long = sorted(shape)
    # each iteration: two products with a [short, long] matrix, and a square of a [short, short] one
    return steps * (4 * short * short * long + 2 * short**3)
