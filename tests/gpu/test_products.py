"""Products that only a GPU makes in its own way are those of the formula: grouped, and added to
FP32 totals."""

import pytest
import torch

from megaprec.precision.gemm import add_product_, adds_unrounded, fp32_sums
from models.feed_forward.grouped_products import GroupedLinear, groups_on, sums_in_triton
from parallel.weight_grad_queue import WeightGradQueue

ENDS = {"several": (3, 3, 100, 112), "none": (0, 0, 0, 0), "all of one": (0, 0, 64, 64)}


def near(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    return bool(
        (one.detach().cpu().double() - other.detach()).norm() <= tolerance * other.detach().norm()
    )


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_grouped_products_are_those_of_a_loop_also_of_no_rows(
    ends: tuple[int, ...], device: str
) -> None:
    random = torch.Generator().manual_seed(0)
    flat = torch.randn(
        4, 64 * 32 + 64, generator=random
    ).bfloat16()  # as in a bucket: at equal distances
    x, grad = (torch.randn(ends[-1], width, generator=random).bfloat16() for width in (32, 64))
    there = flat.to(device)
    weights = [torch.nn.Parameter(row[: 64 * 32].view(64, 32)) for row in there]
    if device == "cuda":
        assert groups_on(torch.device(device), torch.bfloat16, (32, 64))
    rows = x.to(device).requires_grad_()
    y = GroupedLinear.apply(
        rows, torch.tensor(ends, dtype=torch.int32, device=device), WeightGradQueue(), *weights
    )
    found = torch.autograd.grad(y, [rows, *weights], grad.to(device))
    for expert, (first, last) in enumerate(zip((0, *ends), ends, strict=False)):
        weight = flat[expert, : 64 * 32].view(64, 32).double()
        mine = x[first:last].double()
        gradient = grad[first:last].double()
        assert near(y[first:last], mine @ weight.t(), 0.01)
        assert near(found[0][first:last], gradient @ weight, 0.01)
        assert near(found[1 + expert], gradient.t() @ mine, 0.01)


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_weight_gradients_of_experts_are_added_to_fp32_totals(
    ends: tuple[int, ...], device: str
) -> None:
    random = torch.Generator().manual_seed(0)
    size = 200 * 136
    flat = torch.zeros(2, 4, size + 64, device=device)  # weights, totals
    weights = [torch.nn.Parameter(row[:size].view(200, 136).bfloat16()) for row in flat[0]]
    for weight, row in zip(weights, flat[1], strict=True):
        weight.main_grad = row[:size].view(200, 136).fill_(torch.nan)  # type: ignore[attr-defined]
    exact = torch.zeros(4, 200, 136, dtype=torch.float64)
    for _ in range(2):  # micro-batches
        x, grad = (torch.randn(ends[-1], n, generator=random).bfloat16() for n in (136, 200))
        rows = x.to(device).requires_grad_()
        ends_there = torch.tensor(ends, dtype=torch.int32, device=device)
        y = GroupedLinear.apply(rows, ends_there, WeightGradQueue(), *weights)
        y.backward(grad.to(device))
        for expert, (first, last) in enumerate(zip((0, *ends), ends, strict=False)):
            exact[expert] += grad[first:last].double().t() @ x[first:last].double()
    rounds = sums_in_triton(torch.device(device)) is None
    for weight, total in zip(weights, exact, strict=True):
        assert near(weight.main_grad, total, 0.01 if rounds else 1e-5)  # type: ignore[attr-defined]
    assert not flat[1, :, size:].any()


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_is_added_to_an_fp32_total_and_scaled(
    dtype: torch.dtype, first: bool, device: str
) -> None:
    random = torch.Generator().manual_seed(0)
    grad, x = (torch.randn(512, width, generator=random).to(dtype) for width in (48, 80))
    total = torch.full((48, 80), torch.nan) if first else torch.randn(48, 80, generator=random)
    exact = 0.5 * (grad.double().t() @ x.double()) + (0.0 if first else total.double())
    there = total.to(device)
    with fp32_sums():
        add_product_(there, grad.to(device).t(), x.to(device), first=first, scale=0.5)
    assert near(there, exact, 1e-5 if adds_unrounded(there, grad.to(device)) else 0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_long_product_is_rounded_once(dtype: torch.dtype, device: str) -> None:
    """Few results and a long sum: the shape whose sum cuBLAS cuts into parts."""
    random = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 1 << 16, generator=random).to(dtype) for _ in range(2))
    exact = a.double() @ b.double().t()
    with fp32_sums():
        ours = a.to(device) @ b.to(device).t()
    apart = (ours.cpu().double() - exact).abs()
    assert (apart <= torch.finfo(dtype).eps * exact.abs() + 1e-3 * exact.abs().mean()).all()
