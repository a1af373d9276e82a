"""Biases of experts, and gpt-oss' activation: the plain formula and its gradient, in a loop and
grouped."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.precision.plan import plan
from models.activations import ClampedGate
from models.config import ModelConfig
from models.feed_forward import moe
from models.feed_forward.expert_bias import add_biases, features_of_bias, make_bias_of_sum
from models.feed_forward.moe import Expert, MixtureOfExperts
from parallel.activation_checkpoint import Recompute
from parallel.context import Context
from tests import oracle

GPT_OSS: dict[str, Any] = {
    "family": "gpt_oss",
    "layers": 1,
    "hidden": 8,
    "heads": 2,
    "ffn": 12,
    "experts": 4,
    "experts_per_token": 2,
    "init_std": 0.5,
}


def plain_gate(y: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = y.chunk(2, -1)
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def test_the_clamped_gate_and_its_gradient_are_those_of_the_formula() -> None:
    y = torch.randn(
        50, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    grad = torch.randn(50, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours = ClampedGate.apply(y, 1.3, 0.7)
    theirs = plain_gate(y, 1.3, 0.7)
    assert ((y[:, :12] > 0.7).any() and (y[:, 12:] < -0.7).any()) and (y.abs() < 0.7).any()
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-15)
    (one,), (other,) = (torch.autograd.grad(made, y, grad) for made in (ours, theirs))
    torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-14)


def test_the_clamped_gate_rounds_once() -> None:
    y = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).mul_(4).bfloat16()
    exact = plain_gate(y.double(), 1.702, 7.0)
    assert torch.equal(ClampedGate.apply(y, 1.702, 7.0), exact.float().bfloat16())


def layer(**switches: Any) -> tuple[MixtureOfExperts, dict[str, Tensor]]:
    """A layer with biases that matter, and its logical tensors."""
    made = MixtureOfExperts(ModelConfig(**{**GPT_OSS, **switches}), Context(plan("fp64")), "mlp")
    generator = torch.Generator().manual_seed(3)
    named: dict[str, Any] = {
        "mlp.router.weight": made.router.weight,
        "mlp.router.bias": made.router.bias,
    }
    made.to(torch.float64)
    for n, expert in enumerate(made.experts.values()):
        assert (
            isinstance(expert, Expert)
            and expert.inner.bias is not None
            and expert.down_bias is not None
        )
        for bias in (expert.inner.bias, expert.down_bias):
            bias.data.normal_(generator=generator)
        name = f"mlp.experts.{n}"
        for kind, whole in (("weight", expert.inner.weight), ("bias", expert.inner.bias)):
            named |= {f"{name}.gate.{kind}": whole[:12], f"{name}.up.{kind}": whole[12:]}
        named |= {f"{name}.down.weight": expert.down.weight, f"{name}.down.bias": expert.down_bias}
    return made, named


def some() -> Tensor:
    return torch.randn(7, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "switches", [{}, {"experts_per_token": 1}, {"router_bias": False}, {"swiglu_limit": 0.3}]
)
def test_every_token_goes_through_its_experts_and_their_biases(switches: dict[str, Any]) -> None:
    experts, weights = layer(**switches)
    weights = {name: weight for name, weight in weights.items() if weight is not None}
    y = experts(some(), None)
    plain = oracle.experts(experts.config, weights, "mlp", some(), [])
    torch.testing.assert_close(y, plain, rtol=1e-13, atol=1e-13)
    held = list(experts.parameters())
    found, expected = (torch.autograd.grad(made.square().sum(), held) for made in (y, plain))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_biases_of_an_expert_without_rows_have_a_gradient_of_zero() -> None:
    experts, weights = layer()
    weights["mlp.router.bias"].data.copy_(torch.tensor([0.0, 99.0, 0.0, 98.0]))
    experts(some(), None).sum().backward()
    for n, expert in enumerate(experts.experts.values()):
        assert isinstance(expert, Expert)
        for bias in (expert.inner.bias, expert.down_bias):
            assert isinstance(bias, nn.Parameter) and bias.grad is not None
            assert bool(bias.grad.any()) == (n in (1, 3))


@pytest.mark.parametrize("again", [(), ("activation",)])
@pytest.mark.parametrize("main", [False, True, "in a bucket"])
def test_grouped_products_add_the_biases_of_a_loop(
    main: bool | str, again: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's grouped product on a CPU takes bf16 alone; float64 ones are made expert by expert."""

    def grouped(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        spans = list(zip((0, *offs.tolist()[:-1]), offs.tolist(), strict=True))
        if b.dim() == 2:
            return torch.stack([a[:, i:j] @ b[i:j] for i, j in spans])
        return torch.cat([a[i:j] @ b[e] for e, (i, j) in enumerate(spans)])

    monkeypatch.setattr(torch, "_grouped_mm", grouped)
    grads = []
    for way in (False, True):
        monkeypatch.setattr(moe, "groups_on", lambda *_, way=way: way)
        context = Context(plan("fp64"), recompute=Recompute(again))
        experts = MixtureOfExperts(ModelConfig(**GPT_OSS), context, "mlp").to(torch.float64)
        sizes = [parameter.numel() for parameter in experts.parameters()]
        bucket = torch.full((sum(sizes),), torch.nan, dtype=torch.float64)
        for parameter, part in zip(experts.parameters(), bucket.split(sizes), strict=True):
            if main:
                total = part.view(parameter.shape)
                parameter.main_grad = total if main == "in a bucket" else total.clone()  # type: ignore[attr-defined]
        x = some().requires_grad_()
        for _ in range(2):  # micro-batches
            experts(x, None).square().sum().backward()
        held = [p.main_grad if main else p.grad for p in experts.parameters()]  # type: ignore[attr-defined]
        grads.append([x.grad, *held])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_each_feature_of_a_sum_gets_its_bias_on_one_rank(size: int) -> None:
    """Ten features, which three and eight ranks do not share evenly."""
    whole = torch.arange(1.0, 11.0, dtype=torch.float64)
    parts = []
    for rank in range(size):
        bias = make_bias_of_sum(Context(plan("fp64"), Axis("tp", rank, size)), "down.bias", 10)
        own = features_of_bias(bias)
        bias.data[: own.stop - own.start] = whole[own]
        y = torch.zeros(4, 10, dtype=torch.float64, requires_grad=True)
        added = add_biases(y, [bias], features=own)
        added.sum().backward()
        assert bias.grad is not None and bias.grad[: own.stop - own.start].eq(4).all()
        parts.append(added.detach())
    assert torch.equal(torch.stack(parts).sum(0), whole.expand(4, 10))


def test_biases_without_experts_and_limits_without_a_clamp_are_refused_by_name() -> None:
    sizes = {"layers": 1, "hidden": 8, "heads": 2}
    for key, value in (
        ("expert_bias", True),
        ("router_bias", True),
        ("swiglu_limit", 3.0),
        ("swiglu_alpha", 1.0),
    ):
        with pytest.raises(ValueError, match=key):
            ModelConfig(**{**sizes, key: value})
