"""Layers with a recurrent state whose sequences are cut over ranks compute what one rank computes:
outputs and gradients, wherever documents begin."""

import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.layout import layout_of
from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.estimate.storage import SimulatedAxis
from models.recurrent.gated_delta_net import GatedDeltaNet
from models.recurrent.kimi_delta_attention import KimiDeltaAttention
from models.recurrent.mamba_mixer import MambaMixer
from parallel.context import Context
from parallel.sequence_cut import positions, take_own_positions
from parallel.sequence_exchange import exchange_for_features, exchange_for_tokens
from tests.ranks import on_ranks, run_ranks
from tests.refusals import raises

CLOSE = 1e-12
SAMPLES = 2
SIZES: dict[str, Any] = {
    "layers": 2,
    "hidden": 12,
    "heads": 2,
    "ffn": 16,
    "vocab": 32,
    "init_std": 0.4,
}
KINDS = ("gated delta net", "Kimi Delta Attention", "Mamba-2")
CASES = [(kind, seed) for kind in KINDS for seed in range(4)]


class Drawn(NamedTuple):
    """A layer, what it reads [s, b, hidden], the gradient of its output, and the numbers of the
    tokens' documents [b, s]."""

    config: ModelConfig
    x: Tensor
    grad: Tensor
    documents: Tensor | None


class Made(NamedTuple):
    """The output of own tokens, the gradient of what was read, and those of weights by name."""

    output: Tensor
    grad_x: Tensor
    grads: dict[str, Tensor]


def drawn(kind: str, cp: int, seed: int) -> Drawn:
    """A layer of odd sizes, whose heads so many ranks can share."""
    dice = random.Random(f"{kind} {cp} {seed}")
    generator = torch.Generator().manual_seed(seed)
    few = dice.choice([n for n in (1, 2, 4) if cp % n == 0] + [cp, 2 * cp])
    many = max(few, cp) * dice.choice((1, 2))
    kernel = dice.choice((1, 2, 4))
    if kind == "Mamba-2":
        keys: dict[str, Any] = {
            "family": "nemotron_h",
            "hybrid_pattern": "M*",
            "mamba": {
                "heads": many,
                "head_dim": 3,
                "state_dim": dice.choice((2, 5)),
                "groups": few,
                "kernel": kernel,
            },
        }
    else:
        sizes = {"key_heads": few, "value_heads": many, "key_dim": 3, "value_dim": 2}
        if kind == "Kimi Delta Attention":
            sizes |= {"key_heads": many, "gate_rank": 4}
        keys = {"family": "qwen3", "delta_net": {**sizes, "kernel": kernel}, "delta_layers": (0,)}
    length = 2 * cp * dice.choice((1, 3, 5))
    shape = (length, SAMPLES, SIZES["hidden"])
    x, grad = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    begins = torch.rand(SAMPLES, length, generator=generator) < 0.2
    documents = begins.cumsum(1) if dice.random() < 0.7 else None
    return Drawn(ModelConfig(**SIZES, **keys), x, grad, documents)


def layer_of(config: ModelConfig, context: Context) -> GatedDeltaNet | MambaMixer:
    if config.mamba:
        return MambaMixer(config, context, "layers.0.mamba")
    kind = KimiDeltaAttention if config.delta_net.gate_rank else GatedDeltaNet
    return kind(config, context, "layers.0.delta_net")


def compute(one: Drawn, cp: Axis) -> Made:
    layer = layer_of(one.config, Context(plan("fp64"), cp=cp, seed=3))
    x = take_own_positions(one.x, cp, 0).clone().requires_grad_()
    output = layer(x, None, None, one.documents)
    output.backward(take_own_positions(one.grad, cp, 0))
    grads: dict[str, Tensor] = {}
    for parameter in layer.parameters():
        assert parameter.grad is not None
        for part, first, last in layout_of(parameter).spans():
            grads[part.name] = parameter.grad.view(-1)[first:last].view(part.shape)
    assert x.grad is not None
    return Made(output.detach(), x.grad, grads)


def compute_on_rank(mesh: DeviceMesh) -> list[Made]:
    cp = Axis.of(mesh, "cp")
    return [compute(drawn(kind, cp.size, seed), cp) for kind, seed in CASES]


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    distance = (found - expected).abs().max()
    assert distance <= CLOSE * max(1.0, expected.abs().max().item()), (what, distance)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("cp", [2, 4])
def test_layers_of_cut_sequences_are_those_of_one_rank(cp: int) -> None:
    ranks = run_ranks(compute_on_rank, {"cp": cp})
    for number, case in enumerate(CASES):
        whole = compute(drawn(case[0], cp, case[1]), Axis("cp"))
        made = [rank[number] for rank in ranks]
        for rank, part in enumerate(made):
            here = positions(Axis("cp", rank, cp), len(part.output))
            assert_close(part.output, whole.output[here], f"output of {case}")
            assert_close(part.grad_x, whole.grad_x[here], f"gradient of x of {case}")
        for name, expected in whole.grads.items():
            summed = torch.stack([part.grads[name] for part in made]).sum(0)
            assert_close(summed, expected, f"{name} of {case}")
            assert expected.any(), name


@on_ranks(cp=2)
def test_tokens_are_in_order_and_come_back_to_their_ranks(mesh: DeviceMesh) -> None:
    cp = Axis.of(mesh, "cp")
    tokens = torch.arange(8.0)
    features = torch.arange(6.0) * 100
    whole = tokens[:, None, None] + features  # [s, b, f]
    own = take_own_positions(whole, cp, 0).unflatten(-1, (2, 3)).requires_grad_()
    together = exchange_for_tokens(own, cp)
    assert torch.equal(together, whole[..., 3 * cp.rank : 3 * cp.rank + 3])
    back = exchange_for_features(together, cp)
    assert torch.equal(back, own)
    weights = torch.arange(48.0).view(8, 1, 6) ** 2
    own_weights = take_own_positions(weights, cp, 0).unflatten(-1, (2, 3))
    (grad,) = torch.autograd.grad((back * own_weights).sum(), own)
    assert torch.equal(grad, own_weights)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_ranks_cannot_share_are_refused_by_their_numbers(kind: str) -> None:
    config = drawn(kind, 2, 0).config
    name = "mamba" if config.mamba else "delta_net"
    context = Context(plan("fp64"), cp=SimulatedAxis("cp", 0, 3))
    with raises(f"model.context_{name}", context=3, ranks=3):
        layer_of(config, context)
