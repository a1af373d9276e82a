"""Experts: no token is dropped, none weighs more in another layout, and the router learns from all
that it decides."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.layout import layout_of
from megaprec.precision.plan import LossScaling, plan
from models.config import ModelConfig
from models.feed_forward import router
from models.feed_forward.moe import MixtureOfExperts
from models.feed_forward.router import Router, WithLoss
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from tests import oracle
from tests.layouts import Run, batches, train, train_all
from tests.models.test_parity import MODELS, differing, plain
from tests.optim.test_mutations import Bug, parity

SMALL: dict[str, Any] = {
    "family": "mixtral",
    "layers": 1,
    "hidden": 8,
    "heads": 2,
    "ffn": 12,
    "experts": 4,
}
MIXTRAL = Run(MODELS["mixtral"])


def layer(compute: str = "fp64", **switches: Any) -> tuple[MixtureOfExperts, dict[str, Tensor]]:
    """A layer with large weights on one rank, and its logical tensors."""
    made = MixtureOfExperts(
        ModelConfig(**{**SMALL, "init_std": 0.5, **switches}), Context(plan(compute)), "mlp"
    )
    made.to(plan(compute).parameters)
    named = {
        part.name: parameter.detach().view(-1)[first:last].view(part.shape)
        for parameter in made.parameters()
        for part, first, last in layout_of(parameter).spans()
    }
    return made, named


def some(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "switches", [{}, {"norm_topk": False}, {"experts_per_token": 1}, {"experts_per_token": 4}]
)
def test_every_token_goes_through_all_its_experts(switches: dict[str, Any]) -> None:
    experts, weights = layer(**switches)
    x = some(7, 3, 8)
    torch.testing.assert_close(
        experts(x, None),
        oracle.experts(experts.config, weights, "mlp", x, []),
        rtol=1e-13,
        atol=1e-13,
    )


def test_no_token_is_dropped_when_all_want_the_same_experts() -> None:
    experts, weights = layer()
    weights["mlp.router.weight"].copy_(torch.tensor([[0.0], [3.0], [0.0], [2.0]]).expand(4, 8))
    x = some(7, 3, 8).abs().requires_grad_()
    y = experts(x, None)
    torch.testing.assert_close(
        y, oracle.experts(experts.config, weights, "mlp", x, []), rtol=1e-13, atol=1e-13
    )
    y.sum().backward()
    grads = {
        n: [p.grad for p in expert.parameters()]
        for n, expert in enumerate(experts.experts.values())
    }
    for n, found in grads.items():
        for grad in found:
            assert grad is not None, "an expert without tokens has a gradient too"
            assert bool(grad.any()) == (n in (1, 3))


def test_a_router_decides_in_fp32_what_half_precision_could_not_tell_apart() -> None:
    experts, weights = layer("bf16", hidden=64, experts=32, experts_per_token=1)
    x = some(512, 8, 64).bfloat16()
    router = weights["mlp.router.weight"]
    exact = (x.double() @ router.double().T).argmax(-1, keepdim=True)
    assert torch.equal(experts.router(x, None)[1], exact)
    assert not torch.equal((x @ router.T).argmax(-1, keepdim=True), exact), (
        "there was nothing to tell apart"
    )


def test_the_balance_loss_is_one_if_balanced_and_as_many_as_experts_if_one_gets_all() -> None:
    config = ModelConfig(**{**SMALL, "experts_per_token": 1, "router_aux_loss": 1.0})
    even = torch.eye(4).repeat(2, 1).unsqueeze(1)
    one = torch.eye(4)[[2] * 8].unsqueeze(1)
    for probabilities, expected in ((even, 1.0), (one, 4.0)):
        chosen = probabilities.argmax(-1, keepdim=True)
        balance, _ = router.router_losses(config, probabilities, probabilities, chosen, Axis("cp"))
        assert balance.tolist() == [expected]


def test_losses_of_a_router_need_to_know_what_a_sample_weighs() -> None:
    experts, _ = layer()
    with pytest.raises(
        ValueError, match=r"microbatch.weight: the loss scale over the samples of a batch"
    ):
        experts(some(7, 3, 8), MicrobatchInfo(0, torch.arange(3)))


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("micro_batch", [1, 8])
def test_the_size_of_a_micro_batch_changes_nothing(micro_batch: int) -> None:
    result = train(replace(MIXTRAL, micro_batch=micro_batch))
    for grads, record in zip(result.grads, plain("mixtral"), strict=True):
        assert not (wrong := differing(grads, record["grads"])), (
            f"gradients differ, by these ratios: {wrong}"
        )


def test_a_run_in_fp64_computes_in_fp64_throughout() -> None:
    """One third of a loss, or of a sample, is another number in FP32: every layout would share the
    error."""
    runs = [Run(MODELS[name], samples=6, steps=1) for name in ("mixtral", "glm4_moe")]
    assert any(run.config.router_z_loss for run in runs) and any(
        run.config.router_aux_loss for run in runs
    )
    for run, result in zip(runs, train_all(runs), strict=True):
        (record,) = oracle.train(run.config, result.before, batches(run), run.lr, run.clip)
        assert result.reports[0].grad_norm == pytest.approx(record["norm"], rel=1e-13)
        largest = max(float(grad.abs().max()) for grad in record["grads"].values())  # type: ignore[attr-defined]
        for name, grad in record["grads"].items():  # type: ignore[attr-defined]
            torch.testing.assert_close(
                result.grads[0][name], grad, rtol=1e-10, atol=1e-13 * largest
            )


def test_losses_of_routers_are_scaled_like_any_other_on_every_stage() -> None:
    result = train(replace(MIXTRAL, scaling=LossScaling("constant", 1024.0)), tp=2, pp=2)
    for scaled, record in zip(result.grads, plain("mixtral"), strict=True):
        grads = {name: grad / 1024 for name, grad in scaled.items()}
        assert not (wrong := differing(grads, record["grads"])), (
            f"gradients differ, by these ratios: {wrong}"
        )


@pytest.mark.cases(1)
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_experts_train_in_half_precision(compute: str) -> None:
    scaling = LossScaling("constant", 2.0**10) if compute == "fp16" else None
    result = train(replace(MIXTRAL, compute=compute, scaling=scaling, sequence=True), tp=2)
    assert [report.outcome for report in result.reports] == ["applied"] * MIXTRAL.steps
    for report, record in zip(result.reports, plain("mixtral"), strict=True):
        assert report.loss == pytest.approx(record["loss"], rel=2e-2)


def the_router_is_not_summed_over_tp() -> None:
    inner = router.parameter
    router.parameter = lambda *arguments, partial: inner(*arguments, partial=False)


def every_tp_rank_adds_the_losses_of_routers() -> None:
    inner = WithLoss.apply
    WithLoss.apply = lambda x, loss, weight: inner(x, loss, weight * 2)


def losses_of_routers_stop_at_the_last_stage() -> None:
    inner = Router.forward

    def route(self: Router, x: Tensor, microbatch: MicrobatchInfo | None) -> tuple[Tensor, Tensor]:
        counts = "layers.2" in layout_of(self.weight).parts[0].name
        return inner(self, x, microbatch if counts else None)

    Router.forward = route


def the_balance_is_of_a_micro_batch() -> None:
    """As in Hugging Face's Mixtral, within a layer."""

    def losses(
        config: ModelConfig, logits: Tensor, probabilities: Tensor, chosen: Tensor, cp: Axis
    ) -> tuple[Tensor, Tensor]:
        samples = logits.shape[1]
        joined = [
            x.transpose(0, 1).reshape(-1, 1, x.shape[-1]) for x in (logits, probabilities, chosen)
        ]
        balance, z = ROUTER_LOSSES(config, joined[0], joined[1], joined[2], cp)
        return balance * samples, z * samples

    router.router_losses = losses


ROUTER_LOSSES = router.router_losses


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    ("bug", "layout"),
    [
        (the_router_is_not_summed_over_tp, (2, 1, 1)),
        (every_tp_rank_adds_the_losses_of_routers, (2, 1, 1)),
        (losses_of_routers_stop_at_the_last_stage, (1, 2, 1)),
        (the_balance_is_of_a_micro_batch, (1, 1, 1)),
    ],
)
def test_parity_fails_if(
    bug: Bug, layout: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    with pytest.raises(AssertionError):
        parity("mixtral", *layout)(bug, monkeypatch, tmp_path)
