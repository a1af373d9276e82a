"""Losses beside that of the next token lead to where mathematics says, and dropout keeps the mean and
leaves evaluations alone."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.optim.decision.step_report import StepReport
from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from parallel.context import Context
from parallel.dropout import MicrobatchInfo, dropout
from parallel.pipeline.kinds import schedule
from tests.closed_forms.sources import (
    CHAIN,
    VOCAB,
    conditional_entropy,
    draw_chain,
    draw_uniform,
    share_of,
)
from tests.ranks import run_ranks

LENGTH = 16
SAMPLES = 16
SIZES: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 2, "ffn": 64}
NO_ATTENTION = {"family": "nemotron_h", "hybrid_pattern": "--", **SIZES}
EXPERTS = {"family": "mixtral", "experts": 4, "experts_per_token": 1, **SIZES}


def engine_of(mesh: DeviceMesh, model: dict[str, Any]) -> Engine:
    return Engine.build(
        ModelConfig(vocab=VOCAB, max_positions=LENGTH, **model),
        plan("fp32"),
        mesh,
        schedule("1f1b", 1, 1),
        EngineOptions(micro_batch=SAMPLES, seq_length=LENGTH, seed=3),
        weight_decay=0.0,
    )


def reports(mesh: DeviceMesh, model: dict[str, Any], stream: torch.Tensor) -> list[StepReport]:
    """The reports of 120 steps on the same batch."""
    engine = engine_of(mesh, model)
    share = share_of(stream)
    return [engine.step(share, 1e-2 * (1 - step / 120), step) for step in range(120)]


def test_a_z_loss_leads_the_sums_of_exponentials_to_one_and_leaves_the_loss_its_minimum() -> None:
    stream = draw_chain(CHAIN, SAMPLES, LENGTH + 1, seed=5)
    entropy = conditional_entropy(stream[:, :-1], stream[:, 1:])

    (said,) = run_ranks(reports, {}, model={**NO_ATTENTION, "z_loss": 0.1}, stream=stream)

    first, last = said[0].z_loss, said[-1].z_loss
    assert first is not None
    assert last is not None
    assert last < 1e-2 < first
    assert said[-1].loss == pytest.approx(entropy, abs=1e-2)


def test_a_balance_loss_leads_to_experts_of_equal_loads() -> None:
    """The smallest balance loss is 1, that of loads and probabilities that are all equal."""
    stream = draw_uniform(SAMPLES, LENGTH + 1, seed=5)

    (said,) = run_ranks(reports, {}, model={**EXPERTS, "router_aux_loss": 1.0}, stream=stream)

    for first, last in zip(said[0].routers, said[-1].routers, strict=True):
        assert first.balance_loss is not None
        assert last.balance_loss is not None
        assert abs(last.balance_loss - 1) < 0.005 < first.balance_loss - 1
        assert last.max_load - last.min_load < first.max_load - first.min_load


def held_out_loss(mesh: DeviceMesh, model: dict[str, Any], stream: torch.Tensor) -> float:
    return engine_of(mesh, model).evaluate(share_of(stream))


def test_an_evaluation_drops_nothing() -> None:
    stream = draw_uniform(SAMPLES, LENGTH + 1, seed=5)
    model = {"family": "gpt2", **SIZES}
    dropping = {**model, "dropout": 0.5, "attention_dropout": 0.5, "embedding_dropout": 0.5}

    losses = [
        run_ranks(held_out_loss, {}, model=each, stream=stream)[0] for each in (model, dropping)
    ]

    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_mean_of_what_it_is_given_and_of_its_gradient(
    probability: float,
) -> None:
    """To six standard deviations, those of kept ones divided by the probability of being kept."""
    samples = torch.arange(SAMPLES)
    x = torch.ones(64, SAMPLES, 64, requires_grad=True)
    y = dropout(x, probability, Context(plan("fp32")), "here", MicrobatchInfo(0, samples))
    y.sum().backward()
    assert x.grad is not None
    deviation = (probability / (1 - probability) / x.numel()) ** 0.5
    for mean in (y.mean().item(), x.grad.mean().item()):
        assert abs(mean - 1) < 6 * deviation
