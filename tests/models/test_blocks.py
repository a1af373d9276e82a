"""Attention sees what it should, whichever way it is computed."""

import pytest
import torch

from megaprec.precision.plan import plan
from models.blocks import Attention
from models.config import ModelConfig
from parallel.context import Context
from parallel.dropout import MicrobatchInfo


def attend(window: int, dropout: float, x: torch.Tensor) -> torch.Tensor:
    config = ModelConfig(
        layers=1, hidden=8, heads=2, kv_heads=1, window=window, attention_dropout=dropout
    )
    return Attention(config, Context(plan("fp64")), "attention")(
        x, None, MicrobatchInfo(0, torch.arange(x.shape[1]))
    )


@pytest.mark.parametrize("window", [0, 1, 3, 7, 100])
def test_a_token_attends_to_the_last_of_its_window_and_to_no_other(window: int) -> None:
    x = torch.randn(7, 2, 8, dtype=torch.float64, requires_grad=True)
    (seen,) = torch.autograd.grad(attend(window, 0.0, x)[5].sum(), x)
    expected = [token <= 5 and (window == 0 or token > 5 - window) for token in range(7)]
    assert seen.flatten(1).any(1).tolist() == expected


@pytest.mark.parametrize("window", [0, 3])
def test_attention_with_a_dropout_that_drops_nothing_is_attention_without(window: int) -> None:
    x = torch.randn(7, 2, 8, dtype=torch.float64)
    torch.testing.assert_close(
        attend(window, 1e-17, x), attend(window, 0.0, x), rtol=1e-12, atol=1e-15
    )
