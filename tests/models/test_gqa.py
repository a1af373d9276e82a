"""Key/value heads that serve several query heads: right whether they are repeated or not."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as fused

from megaprec.comm.axis import Axis
from megaprec.optim.state.partial_grads import sum_partial
from megaprec.precision.plan import plan
from models.attention import bf16_products, kernels
from models.attention.kernels import takes_groups
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.decoder.stages import Stage
from parallel.context import Context

S = 128
D = 16
HEADS = 8
KV = 2


def heads(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, n, S, D) for n in (HEADS, KV, KV, HEADS))
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def gradients(attend: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    query, key, value, wanted = heads(torch.bfloat16)
    leaves = [x.to(dtype).requires_grad_() for x in (query, key, value)]
    y = attend(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, wanted.to(dtype))


def repeated(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = (x.repeat_interleave(HEADS // KV, 1) for x in (key, value))
    return fused(query, key, value, is_causal=True)


def products(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return bf16_products.attend(query, key, value, rows=48)


def products_repeated(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return products(query, *(x.repeat_interleave(HEADS // KV, 1) for x in (key, value)))


def errors(attend: Callable[..., Tensor]) -> list[float]:
    exact = gradients(repeated, torch.float64)
    ours = gradients(attend, torch.bfloat16)
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True)]


def test_products_read_a_shared_head_without_a_copy_and_sum_its_gradients_in_fp32() -> None:
    ours = gradients(products, torch.bfloat16)
    copied = gradients(products_repeated, torch.bfloat16)
    assert torch.equal(ours[0], copied[0]) and torch.equal(ours[1], copied[1])
    pairs = list(zip(errors(products), errors(products_repeated), strict=True))
    assert all(one <= 1.02 * other for one, other in pairs), pairs


def test_what_is_kept_of_a_shared_head_is_one_head() -> None:
    query, key, value, _ = (x.requires_grad_() for x in heads(torch.bfloat16))
    mixed = products(query, key, value)  # while it lives, so does what is kept for its gradient
    kept = mixed.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert sum(x.nbytes for x in kept) == query.nbytes + key.nbytes + value.nbytes


def test_torchs_kernel_for_cpus_sums_a_shared_head_less_exactly_so_heads_are_repeated_there() -> (
    None
):
    def shared(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return fused(query, key, value, is_causal=True, enable_gqa=True)

    _, _, *ours = errors(shared)
    _, _, *copied = errors(repeated)
    assert min(ours) > 1.1 * max(copied), (
        "this torch sums them as exactly: `takes_groups` may say so"
    )
    assert not takes_groups(heads(torch.bfloat16)[0], masked=False)


@pytest.mark.parametrize(
    ("device", "dtype", "masked", "takes"),
    [
        ("meta", torch.bfloat16, False, True),
        ("meta", torch.float16, False, True),
        ("meta", torch.bfloat16, True, False),
        ("meta", torch.float32, False, False),
        ("cpu", torch.bfloat16, False, False),
    ],
    ids=str,
)
def test_flash_attention_reads_shared_heads_itself_in_16_bits_and_without_a_mask(
    device: str, dtype: torch.dtype, masked: bool, takes: bool
) -> None:
    assert takes_groups(torch.zeros(1, dtype=dtype, device=device), masked) == takes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_cpu_attends_in_fp32_where_its_kernel_is_slow_in_half_precision_and_then_alone(
    dtype: torch.dtype,
) -> None:
    """That is float16."""
    wanted = torch.float32 if dtype == torch.float16 else dtype
    x = torch.zeros(1, 2, 3, 4, dtype=dtype)
    assert [one.dtype for one in kernels.prepare_fused(x, x, x, None)] == [wanted] * 3


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("positions", [4, 6])
def test_torchs_kernel_is_told_of_groups_only_where_heads_are_shared(
    kv_heads: int, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some backends take no groups, so that a needless word would cost them."""
    told = list[bool]()

    def seen(query: Tensor, *others: Any, enable_gqa: bool, **more: Any) -> Tensor:
        told.append(enable_gqa)
        return query

    monkeypatch.setattr(kernels.F, "scaled_dot_product_attention", seen)
    monkeypatch.setattr(kernels, "prepare_fused", lambda q, k, v, mask: (q, k, v))
    query = torch.zeros(2, 4, positions, 8)
    shared = torch.zeros(2, kv_heads, positions, 8)
    inputs = SimpleNamespace(mask_of=lambda query: None, scale=None)
    kernels.KERNELS[kernels.Kernel.TORCH_FUSED](query, shared, shared, inputs)  # type: ignore[arg-type]
    assert told == [kv_heads != 4]


def test_of_the_gradients_of_heads_those_travel_that_ranks_share() -> None:
    """Two key/value heads over four ranks: a slot for each of the two, for keys and for values."""
    width, hidden, layers = 8, 32, 2
    sizes: dict[str, Any] = {"hidden": hidden, "heads": 4, "kv_heads": 2, "layers": layers}
    config = ModelConfig(family="llama", head_dim=width, ffn=32, vocab=64, **sizes)
    sent: list[int] = []

    class Sending(Axis):
        def sum_(self, tensor: Tensor) -> Tensor:
            sent.append(tensor.numel())
            return tensor

    (whole,) = cuts(config, 1, 8)
    stage = Stage(config, Context(plan("fp32"), Axis("tp", 0, 4)), whole)
    parameters = [*stage.parameters()]
    for parameter in parameters:
        parameter.main_grad = torch.ones_like(parameter)  # type: ignore[attr-defined]
    sum_partial(parameters, Sending("tp", 0, 4))
    assert sent == [layers * 2 * 2 * width * hidden]
