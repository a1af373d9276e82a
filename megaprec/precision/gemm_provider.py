"""The interface by which a linear layer computes its products, in whatever precision."""

from typing import Protocol

import torch
from torch import Tensor

Factor = tuple[Tensor, ...]
"""A factor of a matrix product, such as the input of a layer, in the form in which a `GemmProvider`
uses it and autograd saves it for backward: one tensor, or codes and their scales."""


class GemmProvider(Protocol):
    """Computes the three products of a linear layer y = x @ W.T: of its output, its input gradient
    and its weight gradient."""

    def for_pass(self) -> "GemmProvider":
        """Return the provider for the forward pass that is beginning, and for its backward pass."""
        ...

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Factor]:
        """Return y [m, n] from x [m, k] and weight [n, k], and x in the form that `weight_gradient`
        needs."""
        ...

    def keep(self, x: Tensor) -> Factor:
        """Return x in the form that `weight_gradient` needs, as `forward` does, without the
        product."""
        ...

    def gradient_factors(self, grad: Tensor) -> tuple[Factor, Factor]:
        """Return the gradient of y, [m, n], in the form for `input_gradient` and in the form for
        `weight_gradient`."""
        ...

    def input_gradient(self, grad: Factor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the gradient of x, [m, k] in `dtype`, for a weight [n, k]."""
        ...

    def weight_gradient(self, grad: Factor, x: Factor) -> Tensor:
        """Return the gradient of the weight, [n, k]."""
        ...

    def add_weight_gradient_(
        self,
        total: Tensor,
        grad: Factor,
        x: Factor,
        first: bool,
    ) -> None:
        """Add the gradient of the weight to `total` [n, k], whose dtype may be wider than that of
        the factors.

        first: overwrite `total` instead.
        """
        ...
