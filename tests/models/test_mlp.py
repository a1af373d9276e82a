"""The gated activation is what autograd would make of it, and keeps less."""

import pytest
import torch
import torch.nn.functional as F

from models.activations import SWIGLU, Gated


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
