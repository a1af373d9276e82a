"""Orthogonalization of a matrix by Newton-Schulz iterations, with matrix products alone.

If U S V^T is the singular value decomposition of a matrix, U V^T is the nearest matrix whose
singular values are all 1. An iteration replaces each singular value s by a s + b s^3 + c s^5,
without computing the decomposition. Keller Jordan's coefficients
(kellerjordan.github.io/posts/muon) do not converge to 1: they raise small values fast, and five
iterations bring most values between 0.7 and 1.2, which serves an optimizer as well.

The matrix is divided by its Frobenius norm first, because the iteration diverges for singular
values far above 1. Its shorter side is the left one of each product, so that the square matrices
are small.

Several matrices of one shape, those of the heads of a projection, are iterated together: each
product is then one batched product, which a GPU launches once and not once for each head.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megaprec.precision.gemm import product, sum_with_product

Coefficients = tuple[float, float, float]  # a, b and c
PUBLISHED: Coefficients = (3.4445, -4.7750, 2.0315)


class MatrixStack(NamedTuple):
    """A logical matrix [count * rows, columns] as `count` matrices, one below the other, of which
    each is orthogonalized by itself."""

    count: int
    rows: int
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of one of the matrices."""
        return self.rows, self.columns

    @property
    def whole(self) -> tuple[int, int]:
        """Return the shape of all of them together."""
        return self.count * self.rows, self.columns

    def apart(self, whole: Tensor) -> Tensor:
        """Return a logical matrix as `orthogonalized` takes it: [count, rows, columns], or itself
        if it is one."""
        return whole if self.count == 1 else whole.view(self)

    def flops(self, steps: int) -> int:
        """Return the floating-point operations of `orthogonalized` for all of them: two for each
        multiply-add of a product."""
        short, long = sorted(self.shape)
        # each iteration: two products with a [short, long] matrix, and a square of a [short, short]
        # one
        products_with_matrix = 4 * short * short * long
        square = 2 * short**3
        return self.count * steps * (products_with_matrix + square)


def orthogonalized(
    matrix: Tensor,
    coefficients: Coefficients = PUBLISHED,
    steps: int = 5,
    eps: float = 1e-7,
) -> Tensor:
    """Return the matrix [m, n] after `steps` iterations, in the dtype of `matrix`, in which every
    product is rounded; or several matrices [count, m, n], each by itself.

    eps: the smallest norm by which the matrix is divided; a matrix of zeros stays zero. The norm of
    a bf16 matrix is computed in FP32.
    """
    wide = matrix if matrix.itemsize >= 4 else matrix.float()
    # keepdim: each of several matrices is divided by its own
    norm = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True).clamp(min=eps)
    x = (wide / norm).to(matrix.dtype)
    rows, columns = matrix.shape[-2:]
    # transposed, so that its square matrices [rows, rows] are the smaller ones
    is_tall = rows > columns
    if is_tall:
        x = x.mT.contiguous()
    for _ in range(steps):
        x = _iterate(x, coefficients)
    return x.mT.contiguous() if is_tall else x


def _iterate(x: Tensor, coefficients: Coefficients) -> Tensor:
    """Return a x + (b g + c g g) x with g = x x^T, of the shape of x: of singular values
    a s + b s^3 + c s^5."""
    a, b, c = coefficients
    gram = product(x, x.mT)
    polynomial = sum_with_product(gram, gram, gram, beta=b, alpha=c)
    return sum_with_product(x, polynomial, x, beta=a, alpha=1)
