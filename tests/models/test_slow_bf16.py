"""On a CPU without instructions for bf16, what is bf16 is multiplied in FP32 and rounded once, in
all that trains."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.muon.newton_schulz import orthogonalized
from megaprec.precision import gemm
from megaprec.precision.plan import plan
from models.attention import cpu_fused
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.decoder.stages import Stage
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from tests.families import BATCH, CASES, LENGTH, OURS
from tests.models.test_sink_attention import MASKS, B, D, N, S
from tools.bench.train import Products

# of the norm: the result is rounded by up to 2^-9, and with it what the gradients are computed from
BOUND = 2**-8


@pytest.fixture(autouse=True)
def slow() -> Iterator[None]:
    """Any processor is one without the instructions."""
    patch = pytest.MonkeyPatch()
    patch.setattr(gemm, "_has_bf16_products", lambda: False)
    yield
    patch.undo()


@pytest.mark.parametrize("has_products", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_products_are_slow_of_bf16_alone_and_on_a_cpu_without_the_instructions(
    device: str, dtype: torch.dtype, has_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A meta tensor stands for one on a GPU."""
    monkeypatch.setattr(gemm, "_has_bf16_products", lambda: has_products)
    is_slow = gemm.slow_bf16(torch.empty(2, dtype=dtype, device=device))
    assert is_slow == ((device, dtype, has_products) == ("cpu", torch.bfloat16, False))


def products_of_a_step(model: dict[str, Any], **options: Any) -> list[str]:
    """Products and fused attentions of a micro-batch's two passes, with their operands."""
    config = ModelConfig(**{**OURS, **model})
    made = plan("bf16", **options)
    stage = Stage(config, Context(made), cuts(config, 1, LENGTH)[0])
    ParallelAMPOptimizer([stage], made)
    with Products(torch.device("cpu")) as products:
        logits = stage(
            torch.arange(LENGTH * BATCH).view(LENGTH, BATCH), MicrobatchInfo(0, torch.arange(BATCH))
        )
        logits.float().square().mean().backward()
    return list(products.counts)


@pytest.mark.cases(4, sample=3)
@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "mistral", "gemma2", "gpt_oss", "mixtral", "deepseek_v3 yarn"]
)
@pytest.mark.parametrize("rounded", [False, True])
def test_no_product_of_a_training_step_is_made_in_bf16(name: str, rounded: bool) -> None:
    case = CASES[name]
    scores: dict[str, Any] = {"scores": torch.bfloat16} if rounded else {}
    found = products_of_a_step({"family": case.kind, **case.ours}, **scores)
    assert len(found) > 10
    assert not [each for each in found if "bfloat16" in each]


def test_products_are_rounded_once_and_sums_too() -> None:
    torch.manual_seed(0)
    a, b, base = (torch.randn(40, 40).bfloat16() for _ in range(3))
    exact = a.double() @ b.double()
    torch.testing.assert_close(gemm.product(a, b).double(), exact, rtol=2**-8, atol=1e-5)
    added = gemm.sum_with_product(base, a, b, 0.5, 2.0)
    torch.testing.assert_close(
        added.double(), 0.5 * base.double() + 2 * exact, rtol=2**-8, atol=1e-5
    )
    assert added.dtype == torch.bfloat16
    total = torch.ones(40, 40)
    gemm.add_product_(total, a, b)
    assert torch.equal(total, 1 + gemm.product(a, b).float()), (
        "as with instructions: rounded, then added in FP32"
    )


def test_muon_orthogonalizes_without_products_of_bf16() -> None:
    matrix = torch.randn(12, 20, generator=torch.Generator().manual_seed(0))
    with Products(torch.device("cpu")) as products:
        made = orthogonalized(matrix.bfloat16())
    assert made.dtype == torch.bfloat16 and len(products.counts) >= 3
    assert not [each for each in products.counts if "bfloat16" in each]
    assert (made - orthogonalized(matrix.double())).norm() < 2**-4 * made.norm()


def attention(dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Query, key, value and the gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(B, N, S, D, generator=generator).bfloat16().to(dtype) for _ in range(4))
    query, key, value, grad = (each.requires_grad_() for each in made)
    return (query, key, value), grad.detach()


@pytest.mark.parametrize("mask", MASKS)
def test_attention_and_its_gradients_are_those_of_float64_rounded(mask: str) -> None:
    seen = MASKS[mask]
    held, grad = attention(torch.bfloat16)
    mixed = cpu_fused.attend(*held, seen, None)
    wide, wanted = attention(torch.float64)
    exact = F.scaled_dot_product_attention(*wide, attn_mask=seen, is_causal=seen is None)
    ours = torch.autograd.grad(mixed, held, grad)
    theirs = torch.autograd.grad(exact, wide, wanted)
    for made, true in zip((mixed, *ours), (exact, *theirs), strict=True):
        assert made.dtype == torch.bfloat16
        assert (made - true).norm() < BOUND * true.norm()
