"""The gradient norm is that of float64 within 2e-7, whatever the gradients are like."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megaprec.optim.decision.grad_stats import _all_blocks, norm_of, statistics, sum_of_squares

CPU = torch.device("cpu")
BOUND = 2e-7
LENGTHS = (1, 63, 64, 1_000, (1 << 17) + 1, 3 * (1 << 17) + 4_097)


def equal(length: int, seed: int) -> Tensor:
    """The worst that rounding can do: each sum is rounded in the same direction."""
    return torch.full((length,), 1.0 + seed / 5)


def normal(length: int, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(length) * 1e-3


def heavy_tailed(length: int, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.distributions.StudentT(1.1).sample((length,))


def one_large(length: int, seed: int) -> Tensor:
    values = normal(length, seed)
    values[seed % length] = 1e4
    return values


def mostly_zero(length: int, seed: int) -> Tensor:
    return normal(length, seed) * (torch.rand(length) < 0.001)


def tiny(length: int, seed: int) -> Tensor:
    """Their squares are 0 in FP32."""
    return normal(length, seed) * 1e-24


def huge(length: int, seed: int) -> Tensor:
    """Their squares are inf in FP32."""
    return normal(length, seed) * 1e34


DRAWS = (equal, normal, heavy_tailed, one_large, mostly_zero, tiny, huge)
Draw = Callable[[int, int], Tensor]


def require_close(norm: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(norm, expected, rtol=BOUND, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("draw", DRAWS)
def test_the_l2_norm_of_gradients_is_that_of_float64(draw: Draw, dtype: torch.dtype) -> None:
    for seed in range(10):
        gradients = [draw(length, seed).to(dtype) for length in LENGTHS]
        wide = torch.cat(gradients).double()
        expected = wide.square().sum()

        squares, num_zeros = statistics(gradients, (), CPU).unbind()

        require_close(squares.sqrt(), expected.sqrt())
        assert num_zeros == (wide == 0).sum()
        require_close(sum_of_squares(torch.cat(gradients)).sqrt(), expected.sqrt())


@pytest.mark.parametrize("order", [0.5, 1.0, 3.0, 8.0, float("inf")])
@pytest.mark.parametrize("draw", DRAWS)
def test_any_other_norm_is_that_of_float64(draw: Draw, order: float) -> None:
    gradients = [draw(length, 1) for length in LENGTHS]
    wide = torch.cat(gradients).double()
    largest = wide.abs().max()

    norm = norm_of(gradients, order, CPU)

    # powers of tiny and huge numbers leave the range of float64 too
    require_close(norm, torch.linalg.vector_norm(wide / largest, order) * largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 5, 999, 1_000, (1 << 17) + 3, -1])
def test_the_sum_is_not_finite_if_one_element_is_not(
    place: int, value: float, dtype: torch.dtype
) -> None:
    gradients = normal((1 << 18) + 21, seed=2).to(dtype)
    assert sum_of_squares(gradients).isfinite()
    gradients[place] = value
    assert not sum_of_squares(gradients).isfinite()
    assert not statistics([gradients], (), CPU)[0].isfinite()


def test_a_gpu_counts_zeros_in_blocks_in_which_each_count_is_exact_in_fp32() -> None:
    on_gpu = torch.empty(3 << 25, device="meta")
    longest = max(len(block) for block in _all_blocks([on_gpu]))
    assert torch.tensor(longest - 1).float() < torch.tensor(longest).float()
