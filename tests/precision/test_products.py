"""Products of real layers in the precision of their plan: weights kept in FP32 among BF16 ones, and
TF32 on a CPU."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.precision import gemm
from megaprec.precision.plan import PrecisionPlan, plan
from megaprec.precision.tf32 import round_tf32
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.decoder.stages import Stage
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from parallel.linear import InputLayout, Linear
from parallel.weight_grad_queue import WeightGradQueue, Work
from tests.dialects.test_modes import MODEL

IN = 48
OUT = 32
KINDS = {"column": ColumnParallelLinear, "row": RowParallelLinear}
FP32_UNIT = 2.0**-24


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def used(kind: str, made: PrecisionPlan, **options: Any) -> dict[str, Tensor]:
    """The factors of a layer's three products and what comes of them, all [rows, columns]."""
    layer = KINDS[kind](Context(made), IN, OUT, name="kept", bias=False, std=0.5, **options)
    original = layer.weight.detach().clone()
    ParallelAMPOptimizer([layer], made)
    x = numbers(5, 2, IN).to(made.compute).requires_grad_()
    y = layer(x)
    grad = numbers(*y.shape, seed=1).to(y.dtype)
    y.backward(grad)
    assert x.grad is not None
    found = {"x": x.detach(), "y": y.detach(), "grad": grad, "grad x": x.grad}
    flat = {name: values.flatten(0, 1) for name, values in found.items()}
    gradient: Tensor = layer.weight.main_grad  # pyright: ignore[reportAttributeAccessIssue]
    return flat | {"weight": layer.weight.detach(), "original": original, "grad weight": gradient}


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_kept_in_fp32_is_unrounded_and_multiplied_in_fp32(kind: str) -> None:
    f = used(kind, plan("bf16", keep_fp32=("kept.*",)))
    assert (f["weight"].dtype, f["grad weight"].dtype) == (torch.float32, torch.float32)
    assert torch.equal(f["weight"], f["original"]), (
        "the weight was rounded on its way into the buffer"
    )
    assert not torch.equal(f["weight"], f["weight"].bfloat16().float())
    x = f["x"].float()
    grad = f["grad"].float()
    assert torch.equal(f["y"], (x @ f["weight"].t()).bfloat16()), "rounded once, on its way out"
    assert torch.equal(f["grad x"], (grad @ f["weight"]).bfloat16())
    torch.testing.assert_close(f["grad weight"], grad.t() @ x, rtol=1e-6, atol=1e-6)
    assert not torch.equal(f["grad weight"], f["grad weight"].bfloat16().float())


def test_an_embedding_kept_in_fp32_hands_out_activations_and_gathers_fp32_gradients() -> None:
    made = plan("bf16", keep_fp32=("kept.*",))
    layer = VocabParallelEmbedding(Context(made), 7, IN, name="kept")
    ParallelAMPOptimizer([layer], made)
    ids = torch.full((256, 1), 3)
    x = layer(ids)
    assert (x.dtype, layer.weight.dtype) == (torch.bfloat16, torch.float32)
    x.backward(torch.full_like(x, 1.0) + torch.eye(256, IN).unsqueeze(1).bfloat16() * 2.0**-7)
    gradient: Tensor = layer.weight.main_grad  # pyright: ignore[reportAttributeAccessIssue]
    assert gradient[3].tolist() == [256 + 2.0**-7] * IN, "BF16 cannot hold this sum"


@pytest.mark.parametrize("kind", KINDS)
def test_all_three_products_of_a_layer_are_those_of_factors_rounded_to_tf32(kind: str) -> None:
    """Against float64: factors of TF32 multiply exactly in FP32, so only the additions round, k of
    them at most."""
    f = used(kind, plan("fp32", tf32=True))
    products = {
        "y": ("x", "weight t"),
        "grad x": ("grad", "weight"),
        "grad weight": ("grad t", "x"),
    }
    for made, names in products.items():
        a, b = (
            f[name.removesuffix(" t")].t() if name.endswith(" t") else f[name] for name in names
        )
        rounded = round_tf32(a).double() @ round_tf32(b).double()
        bound = (
            a.shape[1] * FP32_UNIT * (round_tf32(a).double().abs() @ round_tf32(b).double().abs())
        )
        assert ((f[made] - rounded).abs() <= bound).all(), made
        assert ((f[made] - a.double() @ b.double()).abs() > bound).float().mean() > 0.5, (
            f"{made} is made in FP32"
        )


def test_tf32_changes_no_product_of_another_dtype() -> None:
    for compute in ("bf16", "fp16", "fp64"):
        plain = used("column", plan(compute))
        asked = used("column", plan(compute, tf32=True))
        assert all(torch.equal(plain[name], asked[name]) for name in plain)


@pytest.mark.parametrize(
    ("compute", "output", "training", "evaluation"),
    [
        (
            "bf16",
            "fp32",
            torch.bfloat16,
            torch.float32,
        ),  # to widen them changes no number of the loss
        ("bf16", "bf16", torch.bfloat16, torch.bfloat16),
        ("fp32", "bf16", torch.bfloat16, torch.bfloat16),
        ("bf16", "fp16", torch.float16, torch.float16),
    ],
)
def test_logits_are_handed_out_in_the_plans_output(
    compute: str, output: str, training: torch.dtype, evaluation: torch.dtype
) -> None:
    made = plan(
        compute,
        output={"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[output],
    )
    config = ModelConfig(**MODEL)
    stage = Stage(config, Context(made), cuts(config, 1, 8)[0])
    ParallelAMPOptimizer([stage], made)
    ids = torch.arange(8).unsqueeze(1)
    assert stage(ids, MicrobatchInfo(0, torch.arange(1))).dtype == training
    assert stage(ids).dtype == evaluation


class Telling(Axis):
    """An axis of one rank that says when it is asked for what."""

    seen: ClassVar[list[str]] = []

    def start_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        self.seen.append("gather begun")
        return lambda: (self.seen.append("gather waited for"), tensor)[1]

    def start_scatter_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        self.seen.append("input's gradient made")
        return lambda: tensor


@pytest.mark.parametrize("split", [False, True])
def test_a_cut_input_is_gathered_beside_the_input_s_gradient_unless_the_weight_s_is_put_off(
    split: bool,
) -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    deferred = WeightGradQueue()
    seen = Telling.seen
    weight.main_grad = torch.zeros(3, 2)  # type: ignore[attr-defined]
    x = torch.ones(4, 1, 2, requires_grad=True)
    y = Linear.apply(x, weight, None, InputLayout.SEQUENCE, Telling("tp"), deferred)
    seen.clear()
    with deferred.collect() if split else nullcontext(Work()) as work:
        y.sum().backward()
        seen.append("first half done")
    while work:
        work.popleft()()
    put_off = ["input's gradient made", "first half done", "gather begun", "gather waited for"]
    at_once = ["gather begun", "input's gradient made", "gather waited for", "first half done"]
    assert seen == (put_off if split else at_once)
    assert torch.equal(weight.main_grad, torch.full((3, 2), 4.0))  # type: ignore[attr-defined]


def test_weight_gradients_are_added_unrounded_where_the_device_has_such_a_product() -> None:
    """CUDA's kernel is stood in for by one for the CPU that adds in FP64."""

    def kernel(
        total: Tensor,
        a: Tensor,
        b: Tensor,
        out_dtype: torch.dtype,
        *,
        beta: float = 1,
        alpha: float = 1,
        out: Tensor,
    ) -> Tensor:
        assert total.data_ptr() == out.data_ptr() and out_dtype == out.dtype
        return out.copy_((total.double() * beta if beta else 0) + alpha * (a.double() @ b.double()))

    a = torch.randn(32, 48).bfloat16().t()
    b = torch.randn(32, 16).bfloat16()
    exact = a.double() @ b.double()
    with_cpu_kernel = torch.library.Library("aten", "IMPL")
    with_cpu_kernel.impl("addmm.dtype_out", kernel, "CPU")
    gemm._has_wide_totals.cache_clear()
    try:
        total = torch.full((48, 16), torch.nan)
        gemm.add_product_(total, a, b, first=True)
        assert torch.equal(total, exact.float())
        gemm.add_product_(total, a, b, scale=0.5)
        torch.testing.assert_close(total.double(), 1.5 * exact, rtol=1e-6, atol=1e-6)
        assert not gemm.adds_unrounded(total.bfloat16(), a) and not gemm.adds_unrounded(
            total, a.float()
        )
    finally:
        with_cpu_kernel._destroy()
        gemm._has_wide_totals.cache_clear()
    rounded = torch.zeros(48, 16)
    gemm.add_product_(rounded, a, b, first=True)
    assert not torch.equal(rounded, exact.float()), "nothing is rounded here either"
