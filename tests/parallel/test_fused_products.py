"""Which products are fused with their transfers over tp, what their passes keep, and what is said
where they cannot be."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from parallel import fused_products, linear
from parallel.context import Context
from parallel.layers import ColumnParallelLinear, RowParallelLinear
from parallel.pipeline.kinds import schedule
from tests.models.test_parity import MODELS
from tests.ranks import on_ranks
from tests.refusals import raises

TOKENS = 6
HIDDEN = 8
CPU = torch.device("cpu")
CALLS = ("product_of_gathered", "gathered_and_product", "sum_of_products")
NO_ACCESS = "CUDA driver error: invalid device ordinal"


def pair(mesh: DeviceMesh, fused: bool, compute: str = "fp32", **changes: Any) -> list[Any]:
    context = Context(
        plan(compute, **changes), Axis.of(mesh, "tp"), sequence=True, async_tensor=fused
    )
    up = ColumnParallelLinear(context, HIDDEN, 4 * HIDDEN, name="up")
    down = RowParallelLinear(context, 4 * HIDDEN, HIDDEN, name="down")
    return [layer.to(context.plan.parameters) for layer in (up, down)]


def shard(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(Axis.of(mesh, "tp").rank)
    x = torch.randn(TOKENS, 2, HIDDEN, generator=generator).to(dtype)
    return x.requires_grad_()


def told(names: list[str]) -> None:
    """Notes in `names` each fused call of the layers of this rank."""

    def telling(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def tell(*arguments: Any) -> Any:
            names.append(name)
            return call(*arguments)

        return tell

    for name in CALLS:
        setattr(linear, name, telling(name, getattr(fused_products, name)))


def refuse_products() -> None:
    """Lets all fused calls of this rank fail before their transfers."""

    def fail(*_: Any, **keywords: Any) -> Any:
        raise RuntimeError(NO_ACCESS)

    fused_products.fused_products = lambda device: (fail, fail)  # type: ignore[assignment]


def train(layers: list[Any], x: Tensor) -> list[Tensor]:
    """The output, and all gradients."""
    up, down = layers
    y = down(torch.tanh(up(x)))
    parameters = [x, up.weight, up.bias, down.weight, down.bias]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), parameters)]


@on_ranks(tp=2)
def test_each_transfer_that_a_pair_of_layers_waits_for_is_within_a_product(
    mesh: DeviceMesh,
) -> None:
    calls: list[str] = []
    told(calls)
    train(pair(mesh, fused=True), shard(mesh))
    assert calls == ["product_of_gathered", "sum_of_products", "gathered_and_product"]
    calls.clear()
    train(pair(mesh, fused=False), shard(mesh))
    assert not calls


@on_ranks(tp=2)
def test_a_layer_whose_products_are_wider_than_activations_waits_for_its_transfer(
    mesh: DeviceMesh,
) -> None:
    calls: list[str] = []
    told(calls)
    up, down = pair(mesh, True, "bf16", keep_fp32=("up.*",))
    down(up(shard(mesh, torch.bfloat16)))
    assert calls == ["sum_of_products"]


@pytest.mark.parametrize("tf32", [False, True])
@on_ranks(tp=2)
def test_two_ranks_sum_fused_products_to_the_same_bits(mesh: DeviceMesh, tf32: bool) -> None:
    """Of two addends there is one order, and a CPU rounds to TF32 by itself."""
    x = shard(mesh)
    apart = train(pair(mesh, False, tf32=tf32), x)
    fused = train(pair(mesh, True, tf32=tf32), x)
    for one, other in zip(apart, fused, strict=True):
        assert torch.equal(one, other)
    assert tf32 != torch.equal(fused[0], train(pair(mesh, True), x)[0])


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@on_ranks(tp=2)
def test_fused_products_of_halves_are_those_of_float64_but_for_rounding(
    mesh: DeviceMesh, compute: str
) -> None:
    layers = pair(mesh, True, compute)
    dtype = layers[0].products.dtype
    x = shard(mesh, dtype)
    exact = [layer.double() for layer in pair(mesh, False, "fp64")]
    for layer, wide in zip(layers, exact, strict=True):
        wide.weight.data.copy_(layer.weight.data)
    for ours, theirs in zip(
        train(layers, x), train(exact, x.detach().double().requires_grad_()), strict=True
    ):
        assert ours.dtype in (dtype, torch.float32)
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error < 4 * torch.finfo(dtype).eps


@on_ranks(tp=2)
def test_the_passes_keep_what_separate_ones_keep(mesh: DeviceMesh) -> None:
    def kept(fused: bool) -> list[tuple[int, ...]]:
        sizes: list[tuple[int, ...]] = []
        up, down = pair(mesh, fused)

        def pack(tensor: Tensor) -> Tensor:
            sizes.append((*tensor.shape,))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            down(up(shard(mesh)))
        return sizes

    assert kept(fused=True) == kept(fused=False)


@pytest.mark.parametrize("frozen", ["input", "up", "down"])
@on_ranks(tp=2)
def test_what_is_frozen_has_no_gradient_and_changes_no_other(mesh: DeviceMesh, frozen: str) -> None:
    def gradients(fused: bool) -> dict[str, Tensor | None]:
        up, down = pair(mesh, fused)
        x = shard(mesh)
        tensors = {"input": x, "up": up.weight, "down": down.weight}
        tensors[frozen].requires_grad_(False)
        down(up(x)).square().sum().backward()
        return {name: tensor.grad for name, tensor in tensors.items()}

    ours = gradients(fused=True)
    for name, theirs in gradients(fused=False).items():
        assert (ours[name] is None) == (theirs is None) == (name == frozen)
        assert theirs is None or torch.equal(ours[name], theirs)  # type: ignore[arg-type]


@on_ranks(tp=2)
def test_a_row_product_whose_input_has_no_gradient_gathers_that_of_its_weight(
    mesh: DeviceMesh,
) -> None:
    x = torch.randn(TOKENS, 2, 2 * HIDDEN, generator=torch.Generator().manual_seed(3))
    grads = []
    for fused in (False, True):
        _, down = pair(mesh, fused)
        down(x).square().sum().backward()
        grads.append(down.weight.grad)
    assert torch.equal(*grads)


@on_ranks(tp=2)
def test_a_weight_gradient_that_is_put_off_has_nothing_left_to_gather(mesh: DeviceMesh) -> None:
    _, down = pair(mesh, fused=True)
    weight = down.weight
    weight.main_grad = torch.zeros_like(weight)
    x = torch.randn(TOKENS, 2, 2 * HIDDEN, requires_grad=True)
    y = down(x)
    with down.context.deferred.collect() as work:
        y.square().sum().backward()
    assert not weight.main_grad.any()
    calls: list[str] = []
    told(calls)
    while work:
        work.popleft()()
    assert not calls
    y = x.detach() @ weight.t()
    full_grad = 2 * Axis.of(mesh, "tp").sum_(y.detach().clone())
    torch.testing.assert_close(
        weight.main_grad, full_grad.flatten(0, 1).t() @ x.detach().flatten(0, 1)
    )


@on_ranks(tp=2)
def test_ranks_that_can_compute_fused_products_may(mesh: DeviceMesh) -> None:
    fused_products.require_fused_products(mesh, CPU)


@on_ranks(tp=2)
def test_one_rank_that_cannot_compute_fused_products_stops_all(mesh: DeviceMesh) -> None:
    tp = Axis.of(mesh, "tp")
    own = fused_products.fused_products

    def without_access(device: str) -> Any:
        gather, product = own(device)

        def refuse(*arguments: Any, **keywords: Any) -> Any:
            # after the transfer, so that the other rank does not wait
            product(*arguments, **keywords)
            raise RuntimeError(f"{NO_ACCESS}\nand more")

        return gather, refuse if tp.rank == 1 else product

    fused_products.fused_products = without_access  # type: ignore[assignment]
    reason = f"RuntimeError: {NO_ACCESS}"
    with raises("parallel.async_tensor_unavailable", where="rank 1", reason=reason):
        fused_products.require_fused_products(mesh, CPU)


@on_ranks(dp=2, tp=2)
def test_ranks_of_one_tensor_group_that_cannot_compute_fused_products_stop_all(
    mesh: DeviceMesh,
) -> None:
    if Axis.of(mesh, "dp").rank == 1:
        refuse_products()
    reason = f"RuntimeError: {NO_ACCESS}"
    with raises("parallel.async_tensor_unavailable", where="rank 3", reason=reason) as refusal:
        fused_products.require_fused_products(mesh, CPU)
    assert len(refusal.value.problems) == 1


@on_ranks(tp=2)
def test_fused_products_that_are_wrong_are_not_taken(mesh: DeviceMesh) -> None:
    own = fused_products.fused_products

    def unsummed(device: str) -> Any:
        gather, product = own(device)
        return gather, lambda *arguments: product(*arguments) + 1

    fused_products.fused_products = unsummed  # type: ignore[assignment]
    with raises("parallel.async_tensor_unavailable", reason=re.compile("wrong numbers")):
        fused_products.require_fused_products(mesh, CPU)


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({}, "alone"),
        ({"canonical_shards": 2}, "canonical"),
    ],
)
def test_an_engine_refuses_what_no_product_can_be_fused_with(
    keys: dict[str, Any], code: str
) -> None:
    options = EngineOptions(1, 8, sequence=True, async_tensor=True, **keys)
    model = ModelConfig(**MODELS["gpt2"])
    with raises(f"parallel.async_tensor_{code}"):
        Engine.build(model, plan("fp32"), None, schedule("1f1b", 1, 1), options)
