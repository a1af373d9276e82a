"""Exact sums are those of `math.fsum`, in every order and every division."""

import math

import pytest
import torch
from torch import Tensor

from megaprec.optim.canonical.exact_sum import BLOCK, LENGTH, ExactSum, total

CPU = torch.device("cpu")


def summed(*parts: Tensor) -> float:
    """Return the sum of tensors, each summed by a rank of its own."""
    numbers = torch.zeros(LENGTH, dtype=torch.float64)
    for part in parts:
        one = ExactSum(CPU)
        one.add(part)
        numbers += one.numbers()
    return total(numbers)


def wild(seed: int, most: int) -> Tensor:
    """Return numbers of both signs, from subnormal to nearly the largest, or all of like size."""
    generator = torch.Generator().manual_seed(seed)
    n = int(torch.randint(0, most, (), generator=generator))
    low, high = ((-1074, 970), (-40, 40), (-1074, -1000), (0, 1))[seed % 4]
    sizes = torch.randint(low, high, (n,), generator=generator).double()
    return torch.randn(n, dtype=torch.float64, generator=generator).clamp(-4, 4) * torch.exp2(sizes)


def require_exact(seed: int, most: int) -> None:
    values = wild(seed, most)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(values), generator=generator)
    ranks = int(torch.randint(1, 9, (), generator=generator))
    expected = math.fsum(values.tolist())
    assert summed(values) == expected, seed
    assert summed(*values[order].tensor_split(ranks)) == expected, seed


def test_a_sum_is_exact_in_every_order_and_division() -> None:
    for seed in range(150):
        require_exact(seed, 300)
    require_exact(1000, 3 * BLOCK)


@pytest.mark.slow
def test_a_thousand_sums_are_exact_in_every_order_and_division() -> None:
    for seed in range(1000):
        require_exact(seed, 3 * BLOCK if seed % 50 == 0 else 2000)


def test_sums_of_low_precision_are_exact_also_if_many_blocks_are_processed_together() -> None:
    values = torch.randn(5 * BLOCK + 77, generator=torch.Generator().manual_seed(0))
    together = ExactSum(CPU, length=3 * BLOCK)
    together.add(values)
    assert total(together.numbers()) == math.fsum(values.double().tolist())
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert summed(values.to(dtype)) == math.fsum(values.to(dtype).double().tolist())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([math.inf, 1.0], math.inf),
        ([-math.inf, 1e300], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.nan, 1.0], math.nan),
        ([math.inf, math.nan], math.nan),
        ([1e308, 1.0], math.inf),  # too large for the highest digit
        ([2.0**997] * 3, 3 * 2.0**997),
        ([5e-324, -5e-324], 0.0),
        ([2.0**900, 5e-324, -(2.0**900)], 5e-324),
        ([], 0.0),
    ],
)
def test_extreme_numbers_have_their_exact_sum_or_are_reported(
    values: list[float], expected: float
) -> None:
    got = summed(torch.tensor(values, dtype=torch.float64))
    apart = summed(*torch.tensor(values, dtype=torch.float64).split(1))
    assert got == apart == expected or (
        math.isnan(expected) and math.isnan(got) and math.isnan(apart)
    )


def test_the_sums_of_very_many_ranks_are_exact() -> None:
    """2^20 ranks that hold the largest sum that one can: the exchanged numbers stay integers of
    float64."""
    one = ExactSum(CPU)
    one.add(torch.full((1000,), 2.0**997 * (1 + 2.0**-30), dtype=torch.float64))
    one.add(torch.tensor([5e-324], dtype=torch.float64))
    numbers = one.numbers() * 2**20
    assert numbers.abs().max() < 2**53
    small = ExactSum(CPU)
    small.add(torch.tensor([1.0 + 2.0**-52, -(2.0**-1074)], dtype=torch.float64))
    # the rest is less than half of the last place
    assert total(small.numbers() * 2**20) == 2**20 * (1.0 + 2.0**-52)


def test_a_gpu_adds_256_blocks_of_a_cpu_at_a_time() -> None:
    on_cpu = ExactSum(torch.device("cpu"))
    on_gpu = ExactSum(torch.device("meta"))  # which stands for one
    assert (on_cpu.length, on_gpu.length) == (1 << 15, 1 << 23)
    assert ExactSum(torch.device("meta"), length=7).length == 7
