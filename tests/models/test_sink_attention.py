"""A sink is one more logit in the softmax of a head: the same numbers and gradients as a key that
has no value."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaprec.precision.plan import plan
from models.attention import fused_kernels, sink_attention
from models.attention.attention import Attention
from models.attention.kernels import softcap
from models.attention.packing import causal_mask
from models.config import ModelConfig
from parallel.context import Context
from parallel.dropout import MicrobatchInfo

B = 2
N = 3
S = 9
D = 6
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])
MASKS = {
    "causal": None,
    "window": causal_mask(S, 3, None, torch.device("cpu")),
    "documents": causal_mask(S, 0, DOCUMENTS, torch.device("cpu")),
}


Four = tuple[Tensor, Tensor, Tensor, Tensor]


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Four, Tensor]:
    """Query, key, value and sinks of a size that matters, and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, N, S, D), (B, N, S, D), (B, N, S, D), (N,), (B, N, S, D))
    made = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    )
    query, key, value, sinks, wanted = (x.requires_grad_() for x in made)
    return (query, key, value, sinks), wanted.detach()


def plainly(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor | None
) -> Tensor:
    """The sink as a key that all tokens see, whose score is the sink and whose value is 0."""
    scores = query @ key.transpose(2, 3) / D**0.5
    seen = torch.ones(S, S, dtype=torch.bool).tril() if mask is None else mask
    scores = scores.masked_fill(~seen, -torch.inf)
    whole = torch.cat((sinks.view(1, N, 1, 1).expand(B, N, S, 1), scores), -1).softmax(-1)
    return whole @ torch.cat((torch.zeros(B, N, 1, D, dtype=value.dtype), value), 2)


@pytest.mark.parametrize("mask", MASKS)
def test_outputs_and_all_gradients_are_those_of_one_more_key(mask: str) -> None:
    leaves, wanted = tensors()
    ours = sink_attention.attend(*leaves, MASKS[mask])
    theirs = plainly(*leaves, MASKS[mask])
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    found, expected = (torch.autograd.grad(y, leaves, wanted) for y in (ours, theirs))
    for name, one, other in zip(("query", "key", "value", "sinks"), found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_are_as_exact_as_without_sinks(dtype: torch.dtype) -> None:
    leaves, wanted = tensors(dtype)
    sinks = leaves[3].detach().float().requires_grad_()
    query, key, value, last = (leaf.detach().double().requires_grad_() for leaf in leaves)
    exact = query, key, value, last

    def apart(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
        return [
            ((a.double() - b).norm() / b.norm()).item()
            for a, b in zip(found, expected, strict=True)
        ]

    y = sink_attention.attend(*leaves[:3], sinks)
    true = plainly(*exact, None)
    found = [y, *torch.autograd.grad(y, [*leaves[:3], sinks], wanted)]
    with_sinks = apart(found, [true, *torch.autograd.grad(true, exact, wanted.double())])
    y, true = (
        F.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v, _ in (leaves, exact)
    )
    found = [y, *torch.autograd.grad(y, leaves[:3], wanted)]
    without = apart(found, [true, *torch.autograd.grad(true, exact[:3], wanted.double())])
    assert max(with_sinks) < 3 * max(without)


def test_a_sink_of_minus_infinity_is_none_and_a_large_one_takes_all() -> None:
    (query, key, value, _), _ = tensors()
    plain = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    none, all_of_it = (torch.full((N,), x, dtype=torch.float64) for x in (-torch.inf, 1e4))
    torch.testing.assert_close(sink_attention.attend(query, key, value, none), plain)
    assert sink_attention.attend(query, key, value, all_of_it).abs().max() < 1e-300


def test_a_window_of_one_token_leaves_it_and_the_sink() -> None:
    leaves, _ = tensors()
    made = sink_attention.attend(*leaves, causal_mask(S, 1, None, torch.device("cpu")))
    score = (leaves[0] * leaves[1]).sum(-1, keepdim=True) / D**0.5
    torch.testing.assert_close(made, leaves[2] * torch.sigmoid(score - leaves[3].view(1, N, 1, 1)))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_s_kernels_give_the_shapes_that_the_gradient_needs(
    dtype: torch.dtype, masked: bool
) -> None:
    """Meta tensors stand for a GPU's, whose kernels check what they are given."""
    with torch.device("meta"):
        query, key, value = leaves = [
            torch.empty(B, N, S, 8, dtype=dtype, requires_grad=True) for _ in range(3)
        ]
        sinks = torch.empty(N, requires_grad=True)
        mask = torch.empty(B, 1, S, S, dtype=torch.bool) if masked else None
        y = sink_attention.attend(query, key, value, sinks, mask)
        grads = torch.autograd.grad(y, [*leaves, sinks], torch.empty_like(y))
    assert [grad.shape for grad in grads] == [x.shape for x in (*leaves, sinks)]


def test_rows_that_a_kernel_adds_to_the_sums_are_given_back_as_it_makes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's efficient attention makes multiples of 32 rows, and its backward pass reads all:
    infinity, no weight."""
    kernel = fused_kernels.efficient_attention_gradients
    pad = F.pad
    given = list[Tensor]()
    added = list[float]()

    def recording_pad(x: Tensor, sizes: Sequence[int], value: float) -> Tensor:
        added.append(value)
        return pad(x, sizes, value=value)

    def recording_kernel(*args: Any, **options: Any) -> Any:
        given.append(args[6])
        return kernel(*args, **options)

    monkeypatch.setattr(F, "pad", recording_pad)
    monkeypatch.setattr(fused_kernels, "efficient_attention_gradients", recording_kernel)
    with torch.device("meta"):
        query, key, value = (torch.empty(B, N, S, 8, requires_grad=True) for _ in range(3))
        attended = sink_attention.attend(query, key, value, torch.empty(N))
        attended.backward(torch.empty_like(attended))
    assert given[0].shape == (B, N, 32)
    assert added == [torch.inf]


def test_a_gpu_without_a_kernel_for_heads_of_such_a_width_or_dtype_takes_the_unfused_way() -> None:
    cases = {
        (8, torch.bfloat16): True,
        (6, torch.bfloat16): False,
        (8, torch.float64): False,
        (256, torch.float16): True,
        (264, torch.float16): False,
        (264, torch.float32): True,
    }
    for (width, dtype), fused in cases.items():
        assert (
            sink_attention.fuses(torch.empty(B, N, S, width, dtype=dtype, device="meta")) == fused
        )
        assert sink_attention.fuses(torch.empty(B, N, S, width, dtype=dtype))


def layer(compute: str = "fp64", **switches: float) -> Attention:
    """One layer of attention with large weights."""
    sizes = {
        "layers": 1,
        "hidden": 16,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "experts": 2,
        "experts_per_token": 1,
    }
    config = ModelConfig(**{"family": "gpt_oss", **sizes, "init_std": 0.5, **switches})  # type: ignore[arg-type]
    made = Attention(config, Context(plan(compute)), "attention")
    return made.to(plan(compute).parameters)


def test_sinks_count_in_attention_with_dropout_too() -> None:
    """Dropout that drops nothing takes the unfused path."""
    fused = layer()
    plain = layer(attention_dropout=1e-14)
    x = torch.randn(S, B, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    place = MicrobatchInfo(0, torch.arange(B))
    torch.testing.assert_close(fused(x, None, place), plain(x, None, place), rtol=1e-12, atol=1e-12)
    without = layer(attention_sinks=False)
    assert (fused(x, None, place) - without(x, None, place)).abs().max() > 1e-2, (
        "the sinks do nothing"
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_soft_cap_is_the_identity_for_small_numbers_and_never_exceeded(
    dtype: torch.dtype,
) -> None:
    x = torch.tensor([-1e4, -3.0, -1e-3, 0.0, 1e-3, 2.0, 1e4], dtype=dtype, requires_grad=True)
    y = softcap(x, 5.0)
    expected = 5 * torch.tanh(x.detach().double() / 5)
    torch.testing.assert_close(y.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=0)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(
        grad.double(), 1 - (expected / 5) ** 2, rtol=4 * torch.finfo(dtype).eps, atol=1e-7
    )
    assert softcap(x, 0.0) is x


def test_the_gradient_of_a_soft_cap_does_not_read_its_output_which_the_loss_overwrites() -> None:
    x = torch.linspace(-3, 3, 7, dtype=torch.float64, requires_grad=True)
    y = softcap(x, 2.0)
    y.detach().fill_(9.0)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(x))
    torch.testing.assert_close(grad, 1 - torch.tanh(x.detach() / 2) ** 2)
