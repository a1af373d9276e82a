"""Attention within windows and documents is what its mask says, on a GPU without the mask."""

import pytest
import torch
import torch.nn.functional as F

from megaprec.precision.plan import plan
from models.attention.attention import Attention
from models.attention.flash_windows import Documents, can_attend
from models.attention.packing import causal_mask
from models.config import ModelConfig
from parallel.context import Context

S = 200


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [0, 2, 70])
def test_attention_within_windows_and_documents_is_that_of_the_mask(
    window: int, packed: bool, device: str
) -> None:
    config = ModelConfig(
        family="mistral", layers=1, hidden=64, heads=4, kv_heads=2, ffn=64, vocab=64, window=window
    )
    attention = Attention(config, Context(plan("bf16")), "attention")
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, S, 16, generator=random).bfloat16() for n in (4, 2, 2))
    numbers = (torch.rand(2, S, generator=random) < 0.05).long().cumsum(1)
    count = int((numbers[:, 1:] != numbers[:, :-1]).sum()) + 2
    exact = q.double().requires_grad_(), k.double().requires_grad_(), v.double().requires_grad_()
    mask = causal_mask(S, window, numbers if packed else None, q.device)
    theirs = F.scaled_dot_product_attention(*exact, mask, enable_gqa=True)
    here = (
        q.to(device).requires_grad_(),
        k.to(device).requires_grad_(),
        v.to(device).requires_grad_(),
    )
    if device == "cuda" and torch.cuda.get_device_capability() >= (8, 0):
        assert can_attend(*here)
    ours = attention._core_attention(
        *here, None, Documents(numbers.to(device), count) if packed else None
    )
    wanted = torch.randn(ours.shape, generator=random)
    gradients = torch.autograd.grad(ours, here, wanted.to(ours))
    expected = torch.autograd.grad(theirs, exact, wanted.double())
    for one, other in zip((ours, *gradients), (theirs, *expected), strict=True):
        assert (one.detach().cpu().double() - other.detach()).norm() < 0.01 * other.detach().norm()
