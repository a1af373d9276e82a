"""Tensors without storage on a CPU behave as real ones do, and foretell what torch's own fake
tensors do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.engine.options import EngineOptions
from models.estimate.memory import ActivationBytes, StageMemory
from models.estimate.on_cpu import OnCPU
from models.estimate.storage import LiveMemory
from parallel.activation_checkpoint import KEEP, MODULES, Recompute
from tests.models.test_memory import BATCH, FAMILIES, LENGTH, middle


def kept(family: str, **how: Any) -> ActivationBytes:
    precision = plan(how.pop("precision", "bf16"), fp8=how.pop("fp8", None))
    tp = how.pop("tp", 2)
    device = how.pop("device", "cpu")
    options = EngineOptions(BATCH, LENGTH, **how)
    memory = StageMemory(ModelConfig(**FAMILIES[family]), precision, options, tp, device=device)
    return memory.activation_bytes(middle(FAMILIES[family]))


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "how",
    [
        {"recompute": KEEP},
        {"recompute": Recompute(MODULES), "sequence": True},
        {"precision": "fp32", "tp": 1},
        {"fp8": FP8Recipe(kind="current")},
    ],
    ids=["bf16", "recompute", "fp32", "fp8"],
)
@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3", "gpt_oss"])
def test_a_stage_keeps_what_torchs_own_fake_tensors_say(
    family: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = kept(family, **how)
    monkeypatch.setattr("models.estimate.storage.OnCPU", FakeTensorMode)
    assert ours == kept(family, **how)
    assert ours.activations > 0


def passes_of_a_layer() -> list[Tensor | None]:
    """What is made by factories, products, views, casts, attention, in-place operators and a
    backward pass."""
    layer = nn.Linear(8, 24)
    x = torch.zeros(2, 16, 8, requires_grad=True)
    query, key, value = layer(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    halves = torch.cat([mixed.bfloat16(), mixed.to(torch.bfloat16)], -1).transpose(1, 2)
    counts = torch.arange(3)[None].expand(2, 3) + torch.tensor([1, 2, 3])
    (halves.float().sum() * 2.0).backward()
    return [
        query,
        mixed,
        halves,
        counts,
        counts > 2,
        x.grad,
        layer.weight.grad,
        layer.weight.data.mul_(2).t(),
    ]


def test_tensors_have_the_shapes_strides_and_dtypes_of_real_ones() -> None:
    real = passes_of_a_layer()
    with OnCPU():
        found = passes_of_a_layer()
    for one, other in zip(found, real, strict=True):
        assert one is not None and other is not None
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert one.device == other.device == torch.device("cpu")
        assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        assert not one.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "write", [lambda x: x.add_(1), lambda x: torch.add(x, 1, out=x), lambda x: x.copy_(x + 1)]
)
def test_what_is_written_to_is_the_same_tensor(write: Callable[[Tensor], Tensor]) -> None:
    with OnCPU():
        x = torch.zeros(4)
        view = x.view(2, 2)
        assert write(x) is x
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_a_real_tensor_among_them_is_refused_for_its_bytes_would_not_be_counted() -> None:
    real = torch.ones(4)
    with OnCPU(), pytest.raises(TypeError, match="a real tensor"):
        torch.zeros(4).add_(real)


def test_all_results_of_an_operator_count_and_views_and_what_is_written_to_do_not() -> None:
    x = torch.rand(1000)
    out = torch.rand(1000)
    with LiveMemory() as live:
        kept = [*x.sort(), *x.split(10), torch.add(x, 1, out=out)]
    assert live.now == 1000 * (4 + 8)
    assert len(kept) == 103
