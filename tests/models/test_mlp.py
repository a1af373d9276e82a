"""Activations are what autograd would make of their formulas; a gated one keeps less."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.activations import ACTIVATIONS, SWIGLU, ActivationSettings, Gated


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_swiglu_has_the_bits_of_silu_times_the_other_half_and_keeps_nothing_but_its_input(
    dtype: torch.dtype,
) -> None:
    y = torch.randn(5, 2, 22).to(dtype).requires_grad_()
    grad = torch.randn(5, 2, 11).to(dtype)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: y.detach()):
        made = Gated.apply(y, SWIGLU)
    gate, up = y.chunk(2, -1)
    expected = F.silu(gate) * up
    assert torch.equal(made, expected)
    assert torch.equal(*(torch.autograd.grad(x, y, grad)[0] for x in (made, expected)))
    assert [tensor.data_ptr() for tensor in kept] == [y.data_ptr()]


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=0.6)
    return (up.clamp(-0.6, 0.6) + 1) * gate * torch.sigmoid(1.3 * gate)


WITH_GATE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "swiglu_clamped": _clamped,
}
WITHOUT: dict[str, Callable[..., Tensor]] = {
    "gelu": lambda y: F.gelu(y, approximate="tanh"),
    "gelu_exact": F.gelu,
    "relu2": lambda y: F.relu(y) ** 2,
    "xielu": lambda y, p, n: (
        torch.where(y > 0, F.softplus(p) * y * y, (0.5 + F.softplus(n)) * (y.exp() - 1 - y)) + y / 2
    ),
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_every_activation_and_its_gradient_are_those_of_its_formula_by_autograd(kind: str) -> None:
    row = ACTIVATIONS[kind]
    y = torch.randn(5, 2, 22, dtype=torch.float64, requires_grad=True)
    learned = [nn.Parameter(torch.randn(1, dtype=torch.float64)) for _ in row.parameters]
    given = ActivationSettings(1.3, 0.6, parameters=learned, sensitive=torch.float64)
    made = row.apply(y, given)
    if row.gated:
        expected = WITH_GATE[kind](*y.chunk(2, -1))
    else:
        expected = WITHOUT[kind](y, *learned)
    grad = torch.randn_like(made)
    torch.testing.assert_close(made, expected)
    ours, theirs = (torch.autograd.grad(x, (y, *learned), grad) for x in (made, expected))
    torch.testing.assert_close(ours, theirs)


def test_xielu_begins_with_the_published_numbers_and_ends_short_of_zero() -> None:
    first = [nn.Parameter(torch.tensor([x])) for x in ACTIVATIONS["xielu"].parameters.values()]
    y = torch.tensor([2.0, -1.0, -1e-7, 0.0], dtype=torch.float64, requires_grad=True)
    given = ActivationSettings(1.0, 1.0, parameters=first, sensitive=torch.float64)
    made = ACTIVATIONS["xielu"].apply(y, given)
    # 0.8 y^2 + y / 2, and 0.8 (e^y - 1 - y) + y / 2; above -1e-6 the exponential is that of -1e-6
    near_zero = 0.8 * (math.expm1(-1e-6) + 1e-7) - 0.5e-7
    at_minus_one = 0.8 * math.exp(-1) - 0.5
    at_zero = 0.8 * math.expm1(-1e-6)
    expected = torch.tensor([4.2, at_minus_one, near_zero, at_zero], dtype=torch.float64)
    torch.testing.assert_close(made.detach(), expected, rtol=1e-6, atol=1e-13)
    (slope,) = torch.autograd.grad(made.sum(), y)
    torch.testing.assert_close(slope[2].item(), 0.5 - 0.8, rtol=1e-6, atol=0)
