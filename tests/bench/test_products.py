"""The products of a step are all found, and nothing else is."""

import torch
from torch.nn import functional as F

from tools.bench.train import Products


def test_products_are_counted_by_shape_and_dtype_and_repeated_without_the_step() -> None:
    a = torch.randn(8, 16)
    b = torch.randn(16, 4)
    q = torch.randn(1, 2, 8, 16)
    with Products(torch.device("cpu")) as products:
        for _ in range(3):
            torch.relu(a @ b).add_(1.0)
        torch.mm(a.bfloat16(), b.bfloat16())
        F.scaled_dot_product_attention(q, q, q)
        torch.addmm(torch.zeros(4), a, b)
    assert sorted(products.counts.values()) == [1, 1, 1, 3]
    ticks = iter(range(10**6))
    assert products.seconds(lambda: float(next(ticks))) == 6.0, (
        "each call is between two looks at the clock"
    )
