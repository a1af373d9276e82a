"""Grouped products of experts: the numbers of a loop over experts, from counts that never leave the
device."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megaprec.comm.axis import Axis
from megaprec.optim.model_buffers import buckets
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.feed_forward import grouped_products
from models.feed_forward.grouped_products import GroupedLinear, stack_weights
from models.feed_forward.moe import Expert, MixtureOfExperts, count_choices
from parallel.activation_checkpoint import Recompute, RecomputedModule
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.weight_grad_queue import WeightGradQueue

ENDS = (3, 3, 10, 12)  # the second expert has no rows


def weights_in_one_memory(experts: int, n: int, k: int, gap: int) -> list[nn.Parameter]:
    flat = torch.randn(experts * (n * k + gap), dtype=torch.float32)
    return [nn.Parameter(flat[e * (n * k + gap) :][: n * k].view(n, k)) for e in range(experts)]


@pytest.mark.parametrize("gap", [0, 64])
def test_weights_at_equal_distances_are_one_tensor_without_a_copy(gap: int) -> None:
    weights = weights_in_one_memory(4, 8, 16, gap)
    whole = stack_weights(weights)
    assert whole.untyped_storage().data_ptr() == weights[0].untyped_storage().data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(whole, weights, strict=True))


def test_weights_elsewhere_are_copied_stack_weights() -> None:
    weights = weights_in_one_memory(4, 8, 16, 64)
    for some in (
        weights[::-1],
        [weights[0], weights[1], weights[3]],
        [nn.Parameter(w.clone()) for w in weights],
    ):
        assert all(torch.equal(a, b) for a, b in zip(stack_weights(some), some, strict=True))
        assert (
            stack_weights(some).untyped_storage().data_ptr() != some[0].untyped_storage().data_ptr()
        )


@pytest.mark.parametrize("main", [False, True], ids=["autograd", "main gradients"])
def test_grouped_products_are_those_of_a_loop(main: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device leaves in memory for an expert without rows is planted, and not taken for a
    gradient."""
    torch.manual_seed(0)
    weights = weights_in_one_memory(4, 8, 16, 64)
    x = torch.randn(12, 16, requires_grad=True)
    ends = torch.tensor(ENDS, dtype=torch.int32)
    grad = torch.randn(12, 8)
    firsts = (0, *ENDS[:-1])
    if main:
        totals = weights_in_one_memory(4, 8, 16, 64)
        for weight, total in zip(weights, totals, strict=True):
            weight.main_grad = total.detach().fill_(torch.nan)  # type: ignore[attr-defined]
    inner = torch._grouped_mm

    def dirty(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        made = inner(a, b, offs=offs)
        if b.dim() == 2:
            made[1] = float("nan")
        return made

    monkeypatch.setattr(torch, "_grouped_mm", dirty)
    y = GroupedLinear.apply(x, ends, WeightGradQueue(), *weights)
    y.backward(grad)
    for weight, first, last in zip(weights, firsts, ENDS, strict=True):
        torch.testing.assert_close(y[first:last], x[first:last] @ weight.t())
        given = weight.main_grad if main else weight.grad  # type: ignore[attr-defined]
        torch.testing.assert_close(given, grad[first:last].t() @ x[first:last])
        torch.testing.assert_close(x.grad[first:last], grad[first:last] @ weight)  # type: ignore[index]
    assert not main or all(weight.grad is None for weight in weights)


@pytest.mark.parametrize("recompute", [(), ("activation",)])
def test_experts_compute_the_same_grouped(
    recompute: tuple[RecomputedModule, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(
        family="mixtral", layers=1, hidden=16, heads=2, ffn=32, experts=4, init_std=0.5
    )
    place = MicrobatchInfo(0, torch.arange(3), torch.ones(()))
    results = []
    for grouped in (False, True):
        monkeypatch.setattr(
            Expert, "uses_grouped_products", lambda self, x, grouped=grouped: grouped
        )
        layer = MixtureOfExperts(
            config, Context(plan("fp32"), recompute=Recompute(recompute)), "mlp"
        )
        x = torch.randn(9, 3, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = layer(x, place)
        y.square().sum().backward()
        results.append((y, x.grad, *(p.grad for p in layer.parameters())))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_counts_are_those_of_bincount() -> None:
    chosen = torch.randint(0, 5, (7, 2))
    assert torch.equal(count_choices(chosen, 8), chosen.flatten().bincount(minlength=8))


class Operators(TorchDispatchMode):
    """Lists the operators that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class SumsInTriton:
    """In place of the module `grouped_sums`: its kernel is one launch."""

    def __init__(self) -> None:
        self.firsts: list[bool] = []

    def add_products_(
        self, totals: Tensor, grad: Tensor, x: Tensor, ends: Tensor, first: bool
    ) -> None:
        assert totals.shape == (len(ends), grad.shape[1], x.shape[1])
        assert totals.dtype == torch.float32
        self.firsts.append(first)
        totals.zero_()


def operators_of_experts(
    experts: int,
    monkeypatch: pytest.MonkeyPatch,
    family: str = "mixtral",
    sums: SumsInTriton | None = None,
    **sizes: int,
) -> list[str]:
    """The operators of the passes of a layer whose optimizer is one on a GPU, where meta tensors
    stand for its; in the second micro-batch of a step. sums: None: as without Triton. sizes: of
    the model, in place of small ones."""
    monkeypatch.setattr(grouped_products, "sums_in_triton", lambda _: sums)
    fields: dict[str, Any] = {"family": family, "experts": experts}
    fields |= {"layers": 1, "hidden": 64, "heads": 2, "ffn": 96, **sizes}
    config = ModelConfig(**fields)
    with torch.device("meta"):
        layer = MixtureOfExperts(config.with_zero_weights, Context(plan("bf16")), "mlp")
        for bucket in buckets([*layer.parameters()], plan("bf16"), 1, whole_groups=True):
            Buffer(bucket, plan("bf16"), Axis("dp"), Axis("zero"), 0, torch.device("meta"))
        x = torch.empty(32, 1, config.hidden, dtype=torch.bfloat16, requires_grad=True)
        operators = Operators()
        for _ in range(2):
            operators.names.clear()
            with operators:
                y = layer(x, MicrobatchInfo(0, torch.arange(1), torch.ones(())))
                y.backward(torch.empty_like(y))
    return operators.names


def test_gradients_of_all_experts_are_summed_by_one_kernel_where_triton_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plainly = operators_of_experts(8, monkeypatch)
    sums = SumsInTriton()
    operators = operators_of_experts(8, monkeypatch, sums=sums)
    assert sums.firsts == [True, True, False, False]
    assert operators.count("aten::_grouped_mm") == 4
    assert len(operators) == len(plainly) - 8


def test_a_layer_launches_as_many_kernels_for_many_experts_as_for_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = operators_of_experts(4, monkeypatch)
    many = operators_of_experts(64, monkeypatch)
    assert few == many
    assert few.count("aten::_grouped_mm") == 6
    assert "aten::stack" not in few
    assert len(few) <= 113  # of which 11 sum what the router measures


@pytest.mark.parametrize(
    ("experts", "hidden", "ffn"), [(8, 4096, 14336), (128, 4096, 1536), (256, 7168, 2048)], ids=str
)
def test_so_does_a_layer_whose_experts_are_large(
    experts: int, hidden: int, ffn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of Mixtral 8x7B, of Qwen3-235B and of DeepSeek-V3, all on one GPU: experts that do not
    lie together are copied in each pass."""
    sums = SumsInTriton()
    few = operators_of_experts(4, monkeypatch, sums=sums)
    large = operators_of_experts(
        experts, monkeypatch, sums=sums, hidden=hidden, heads=hidden // 128, ffn=ffn
    )
    assert large == few


def test_so_does_a_layer_whose_experts_have_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    few = operators_of_experts(4, monkeypatch, "gpt_oss")
    many = operators_of_experts(64, monkeypatch, "gpt_oss")
    assert few == many


def test_the_experts_of_a_layer_lie_in_one_bucket_on_a_gpu_alone() -> None:
    config = ModelConfig(family="mixtral", layers=1, hidden=16, heads=2, ffn=32, experts=4)
    layer = MixtureOfExperts(config, Context(plan("fp32")), "mlp")
    parameters = [*layer.parameters()]
    router, *of_experts = parameters
    assert buckets(parameters, plan("fp32"), 1) == [[parameter] for parameter in parameters]
    whole = buckets(parameters, plan("fp32"), 1, whole_groups=True)
    assert [list(map(id, bucket)) for bucket in whole] == [[id(router)], list(map(id, of_experts))]


@pytest.mark.parametrize(
    ("device", "dtype", "features", "grouped"),
    [
        ("meta", torch.bfloat16, (8, 64), True),
        ("meta", torch.bfloat16, (8, 4), False),
        ("meta", torch.float16, (8, 64), False),
        ("meta", torch.float32, (8, 64), False),
        ("cpu", torch.bfloat16, (8, 64), False),
    ],
    ids=str,
)
def test_grouped_products_are_those_of_gpus_in_bf16_whose_rows_are_aligned(
    device: str,
    dtype: torch.dtype,
    features: tuple[int, ...],
    grouped: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grouped_products, "has_grouped_products", lambda: True)
    assert grouped_products.groups_on(torch.device(device), dtype, features) == grouped
    monkeypatch.setattr(grouped_products, "has_grouped_products", lambda: False)
    assert not grouped_products.groups_on(torch.device(device), dtype, features)
