"""Activations are what autograd would make of their formulas; a gated one keeps less."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

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
WITHOUT: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda y: F.gelu(y, approximate="tanh"),
    "gelu_exact": F.gelu,
    "relu2": lambda y: F.relu(y) ** 2,
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_every_activation_and_its_gradient_are_those_of_its_formula_by_autograd(kind: str) -> None:
    row = ACTIVATIONS[kind]
    y = torch.randn(5, 2, 22, dtype=torch.float64, requires_grad=True)
    made = row.apply(y, ActivationSettings(alpha=1.3, limit=0.6))
    expected = WITH_GATE[kind](*y.chunk(2, -1)) if row.gated else WITHOUT[kind](y)
    grad = torch.randn_like(made)
    torch.testing.assert_close(made, expected)
    ours, theirs = (torch.autograd.grad(x, y, grad)[0] for x in (made, expected))
    torch.testing.assert_close(ours, theirs)
