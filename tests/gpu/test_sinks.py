"""Attention with sinks is what the plain formula says: by flash attention, or by torch's other
fused kernel."""

import pytest
import torch

from models.attention import sink_attention
from models.attention.packing import causal_mask

B = 2
N = 4
D = 64


@pytest.mark.parametrize("length", [64, 200])
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_with_sinks_and_its_gradients_are_those_of_the_formula(
    dtype: torch.dtype, window: int, length: int, device: str
) -> None:
    random = torch.Generator().manual_seed(0)
    heads = torch.randn(4, B, N, length, D, generator=random).to(dtype)
    sinks = torch.randn(N, generator=random)
    exact = [x.double().requires_grad_() for x in heads[:3]]
    last = sinks.double().requires_grad_()
    mask = causal_mask(length, window, None, torch.device("cpu"))
    scores = (exact[0] @ exact[1].transpose(2, 3) / D**0.5).masked_fill(~mask, -torch.inf)
    theirs = sink_attention.softmax(scores, last) @ exact[2]
    query, key, value, own = here = [x.to(device).requires_grad_() for x in (*heads[:3], sinks)]
    ours = sink_attention.attend(query, key, value, own, mask.to(device) if window else None)
    found = torch.autograd.grad(ours, here, heads[3].to(device))
    expected = torch.autograd.grad(theirs, [*exact, last], heads[3].double())
    for one, other in zip((ours, *found), (theirs, *expected), strict=True):
        assert one.isfinite().all()
        assert (one.detach().cpu().double() - other.detach()).norm() < 0.02 * other.detach().norm()
