"""The gradients of embedding and head can be made smaller, in every layout as in a plain model."""

from typing import Any

import pytest
import torch

from models.config import ModelConfig
from tests import oracle
from tests.layouts import Run, batches, train_all
from tests.models.test_parity import differing

MODEL: dict[str, Any] = {
    "family": "gpt2",
    "layers": 2,
    "hidden": 16,
    "heads": 4,
    "vocab": 101,
    "max_positions": 10,
    "embedding_grad_scale": 0.1,
    "head_grad_scale": 0.3,
}


def plain(run: Run, weights: oracle.Weights) -> oracle.Weights:
    """Gradients of the same model, where shares of the embedding that is looked up and of the head
    are detached."""
    w = {name: value.clone().requires_grad_() for name, value in weights.items()}
    table = w["embedding.weight"]
    scale = run.config.embedding_grad_scale
    used = w | {"embedding.weight": scale * table + (1 - scale) * table.detach()}
    head = table if run.config.tied else w["head.weight"]
    scale = run.config.head_grad_scale
    used["head.weight"] = scale * head + (1 - scale) * head.detach()
    unscaled = {"embedding_grad_scale": 1.0, "head_grad_scale": 1.0}
    untied = ModelConfig(**{**run.model, **unscaled, "tied": False})
    loss, router_loss, *_ = oracle.mean_loss(untied, used, *batches(run)[0])
    (loss + router_loss).backward()
    return {name: value.grad for name, value in w.items() if value.grad is not None}


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize(
    "layout", [(1, 1, 1), (2, 1, 1), (2, 2, 1)], ids=lambda x: "tp{} pp{} dp{}".format(*x)
)
def test_the_gradients_of_embedding_and_head_are_scaled_each_by_its_own_factor_even_if_they_are_tied(
    layout: tuple[int, int, int],
) -> None:
    runs = [Run({**MODEL, "tied": tied}, steps=1, sequence=layout[0] > 1) for tied in (True, False)]
    for run, result in zip(runs, train_all(runs, *layout), strict=True):
        assert not (wrong := differing(result.grads[0], plain(run, result.before))), (
            f"tied {run.config.tied}: {wrong}"
        )


def test_only_their_gradients_change() -> None:
    whole = {**MODEL, "embedding_grad_scale": 1.0, "head_grad_scale": 1.0, "tied": False}
    small, large = train_all([Run({**MODEL, "tied": False}, steps=1), Run(whole, steps=1)])
    for name, grad in large.grads[0].items():
        scale = {"embedding.weight": 0.1, "head.weight": 0.3}.get(name, 1.0)
        torch.testing.assert_close(small.grads[0][name], scale * grad, rtol=1e-12, atol=0)
