"""Attention by matrix products in bf16 is attention, as near to float64 as bf16 allows."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaprec.precision.plan import plan
from models.attention.attention import Attention
from models.attention.bf16_products import attend, is_faster
from models.config import ModelConfig
from parallel.context import Context

SAMPLES = 2
HEADS = 3
LENGTH = 130
DIM = 40
BOUND = 2**-7  # of the norm: scores, weights and result are each rounded by up to 2^-9


def tensors(length: int = LENGTH) -> list[Tensor]:
    """Query, key, value and the gradient of the result, [b, n, s, d] as a model has them: views of
    [s, b, n, d]."""
    torch.manual_seed(0)
    return [
        torch.randn(length, SAMPLES, HEADS, DIM).bfloat16().permute(1, 2, 0, 3) for _ in range(4)
    ]


def mask(kind: str) -> Tensor | None:
    """Return the attention mask, True where a token attends: to no later token, and to fewer
    earlier ones."""
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    documents = torch.tensor([[0] * 50 + [1] * 80, [0] * 129 + [1]])
    return {
        "later": None,
        "window": seen.triu(-6),
        "documents": seen & (documents[:, None, :, None] == documents[:, None, None, :]),
    }[kind]


def exact(kind: str) -> list[Tensor]:
    """Result and gradients in float64."""
    query, key, value, grad = (x.double().requires_grad_() for x in tensors())
    seen = mask(kind)
    mixed = F.scaled_dot_product_attention(query, key, value, seen, is_causal=seen is None)
    return [mixed, *torch.autograd.grad(mixed, (query, key, value), grad)]


@pytest.mark.parametrize("rows", [512, 48, 129])
@pytest.mark.parametrize("kind", ["later", "window", "documents"])
def test_result_and_gradients_are_those_of_float64_as_near_as_bf16_allows(
    kind: str, rows: int
) -> None:
    query, key, value, grad = (x.requires_grad_() for x in tensors())
    mixed = attend(query, key, value, mask(kind), rows)
    gradients = torch.autograd.grad(mixed, (query, key, value), grad)
    for made, true in zip([mixed, *gradients], exact(kind), strict=True):
        assert made.dtype == torch.bfloat16
        assert (made - true).norm() < BOUND * true.norm()


@pytest.mark.parametrize("kind", ["later", "window", "documents"])
def test_what_a_token_does_not_see_has_no_gradient_at_all(kind: str) -> None:
    query, key, value, _ = (x.requires_grad_() for x in tensors())
    mixed = attend(query, key, value, mask(kind), 48)
    token = 100
    seen = mask(kind)
    if seen is None:
        expected = torch.arange(LENGTH) <= token
    else:
        expected = seen.expand(SAMPLES, 1, -1, -1)[0, 0, token]
    for gradient in torch.autograd.grad(mixed[0, :, token].sum(), (key, value)):
        assert not gradient[1].any()
        assert torch.equal(gradient[0].ne(0).any(-1), expected.expand(HEADS, -1))


def test_a_head_has_the_same_bits_whichever_others_are_computed_with_it() -> None:
    query, key, value, grad = (x.requires_grad_() for x in tensors())
    mixed = attend(query, key, value)
    alone = attend(query[:, 1:2], key[:, 1:2], value[:, 1:2])
    assert torch.equal(alone, mixed[:, 1:2])
    ones = torch.autograd.grad(alone, (query, key, value), grad[:, 1:2])
    for one, among in zip(ones, torch.autograd.grad(mixed, (query, key, value), grad), strict=True):
        assert torch.equal(one[:, 1], among[:, 1])


@pytest.mark.parametrize(("heads", "shared"), [(1, 1), (5, 5), (6, 2), (8, 8)])
@pytest.mark.parametrize("kind", ["later", "documents"])
def test_heads_that_are_computed_together_have_the_bits_that_they_have_one_by_one(
    kind: str, heads: int, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made() -> list[Tensor]:
        torch.manual_seed(0)
        query, grad = (torch.randn(SAMPLES, heads, LENGTH, DIM).bfloat16() for _ in range(2))
        key, value = (torch.randn(SAMPLES, shared, LENGTH, DIM).bfloat16() for _ in range(2))
        for x in (query, key, value):
            x.requires_grad_()
        mixed = attend(query, key, value, mask(kind), 48)
        return [mixed, *torch.autograd.grad(mixed, (query, key, value), grad)]

    together = made()
    monkeypatch.setattr("models.attention.bf16_products._HEADS", 1)
    assert all(map(torch.equal, together, made()))


def test_a_number_that_is_not_finite_comes_out_of_every_token_that_it_reaches() -> None:
    reached = torch.arange(LENGTH) >= 60
    for which in range(3):
        query, key, value, _ = some = tensors()
        some[which][0, 0, 60, 3] = torch.inf
        broken = attend(query, key, value)[0, 0].isfinite().all(-1).logical_not()
        raised = query[0, 0, :, 3] > 0  # a weight of exp(-inf) is a finite one
        assert (
            broken[60] if which == 0 else torch.all(broken | ~(reached & (raised | (which == 2))))
        )


@pytest.mark.parametrize("kind", ["later", "window", "documents"])
def test_a_layer_has_it_see_what_the_layer_sees(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.attention.bf16_products.is_faster", lambda *_: True)
    config = ModelConfig(
        layers=1, hidden=16, heads=4, kv_heads=2, window=7 if kind == "window" else 0
    )
    layer = Attention(config, Context(plan("bf16")), "attention").bfloat16()
    seen = mask(kind)
    x = torch.randn(LENGTH, SAMPLES, 16, dtype=torch.bfloat16, requires_grad=True)
    (reached,) = torch.autograd.grad(
        layer(x, None, None, seen if kind == "documents" else None)[100, 0].sum(), x
    )
    if seen is None:
        expected = torch.arange(LENGTH) <= 100
    else:
        expected = seen.expand(SAMPLES, 1, -1, -1)[0, 0, 100]
    assert torch.equal(reached[:, 0].ne(0).any(-1), expected)
    assert not reached[:, 1].any()


@pytest.mark.parametrize("rounded", [False, True], ids=["scores in FP32", "scores in bf16"])
def test_it_is_left_to_the_fused_kernel_where_that_is_the_faster_one(
    rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, *_ = tensors()
    for amx, avx512 in ((True, True), (False, True), (False, False)):
        monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda amx=amx: amx)
        monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda avx512=avx512: avx512)
        assert not is_faster(query.float(), rounded)
        assert not is_faster(query[:, :, :127], rounded)
        assert not is_faster(query.to("meta"), rounded)
        assert is_faster(query, rounded) == ((rounded or not amx) and avx512)
