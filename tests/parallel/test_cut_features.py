"""What is computed from a slice of the features is that slice of what one process computes, or is
refused by name."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaprec import UserError
from parallel import unchecked
from parallel.cut_features import CutTensor, TensorCut, mark_cut
from tests.refusals import raises, shows

RANKS = 2
BATCH = 3
LENGTH = 5
HEADS = 4
SIZE = 6
Function = Callable[[Tensor], Tensor]


def features() -> Tensor:
    return torch.randn(
        LENGTH, BATCH, HEADS * SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )


def heads() -> Tensor:
    return features().view(LENGTH, BATCH, HEADS, SIZE).permute(1, 2, 0, 3)


def slices(x: Tensor, dim: int) -> list[CutTensor]:
    return [
        mark_cut(part.contiguous(), TensorCut(dim, "outputs of up", RANKS))
        for part in x.chunk(RANKS, dim)
    ]


def require_slices_of(whole: Tensor, parts: list[Tensor]) -> None:
    """Each part says along which dimension it is cut, and is that slice of the whole."""
    for rank, part in enumerate(parts):
        assert isinstance(part, CutTensor)
        cut = part.cut
        dim = cut.dim
        runs = (
            whole.unflatten(dim, (cut.outer, -1)).chunk(RANKS, dim + 1)[rank].flatten(dim, dim + 1)
        )
        torch.testing.assert_close(unchecked(part), runs, rtol=1e-12, atol=1e-12)


OF_FEATURES: dict[str, Function] = {
    "gelu": F.gelu,
    "method": lambda x: x.relu(),
    "module": nn.SiLU(),
    "numbers": lambda x: 1 - 2 * x / 3,
    "power": lambda x: x**2,
    "two": lambda x: x * torch.sigmoid(x),
    "each token": lambda x: (
        x * torch.rand(LENGTH, BATCH, 1, generator=torch.Generator().manual_seed(1))
    ),
    "where": lambda x: torch.where(x > 0, x, -x),
    "in place": lambda x: x.clone().mul_(2).clamp_(-1, 1),
    "dtype": lambda x: x.float().to(torch.float64),
    "heads": lambda x: x.view(LENGTH, BATCH, -1, SIZE),
    "heads by unflatten": lambda x: x.unflatten(-1, (-1, SIZE)),
    "heads by shape": lambda x: x.reshape(LENGTH, BATCH, x.shape[-1] // SIZE, SIZE),
    "heads by size": lambda x: x.reshape(*x.shape[:-1], x.size(-1) // SIZE, SIZE),
    "heads with ones": lambda x: x.view(LENGTH, 1, BATCH, -1, SIZE, 1),
    "tokens": lambda x: x.reshape(-1, x.shape[-1]),
    "tokens in all": lambda x: x.flatten(0, 1),
    "transposed": lambda x: x.transpose(0, 2),
    "T of all": lambda x: x.permute(2, 0, 1),
    "a token": lambda x: x[-1],
    "some tokens": lambda x: x[1:3, :, None],
    "mean of tokens": lambda x: x.mean(0),
    "max of tokens": lambda x: x.max(0, keepdim=True).values,
    "softmax of tokens": lambda x: x.softmax(1),
    "cumulative": lambda x: x.cumsum(0),
    "joined": lambda x: torch.cat((x, x), 0),
    "stacked": lambda x: torch.stack((x, -x), 1),
    "expanded": lambda x: x[:, None].expand(-1, 4, -1, -1),
    "repeated": lambda x: x.repeat_interleave(2, 1),
    "padded": lambda x: F.pad(x, (0, 0, 1, 1)),
    "unbound": lambda x: x.unbind(0)[2],
    "chunk of tokens": lambda x: x.chunk(3, 1)[1],
    "einsum": lambda x: torch.einsum("sbf,tb->tbf", x, torch.ones(2, BATCH, dtype=x.dtype)),
    "everything": lambda x: x.flatten(),
    "features first": lambda x: x.transpose(1, 2).flatten(1),
    "shuffled": lambda x: x.view(LENGTH, BATCH, -1, SIZE).transpose(2, 3).flatten(2),
    "flattened by name": lambda x: torch.flatten(input=x, start_dim=0, end_dim=1),
    "transposed by name": lambda x: torch.transpose(input=x, dim0=0, dim1=2),
    "softmax by name": lambda x: torch.softmax(input=x, dim=1),
    "mean by name": lambda x: torch.mean(input=x, dim=0),
    "joined by name": lambda x: torch.cat(tensors=(x, x), dim=0),
    "stacked by name": lambda x: torch.stack(tensors=(x, -x), dim=1),
    "mixed tokens": lambda x: torch.ones(2, LENGTH, dtype=x.dtype) @ x.transpose(0, 1),
}
OF_HEADS: dict[str, Function] = {
    "features": lambda x: x.permute(2, 0, 1, 3).flatten(2),
    "features by reshape": lambda x: x.permute(2, 0, 1, 3).reshape(LENGTH, BATCH, -1),
    "scores": lambda x: (
        (x @ x.transpose(-1, -2))
        .masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -9)
        .softmax(-1)
    ),
    "attention": lambda x: F.scaled_dot_product_attention(x, x.sin(), x.cos(), is_causal=True),
    "masked": lambda x: F.scaled_dot_product_attention(
        x, x, x, torch.ones(LENGTH, LENGTH).bool().tril()
    ),
    "masked by heads": lambda x: F.scaled_dot_product_attention(x, x, x, x @ x.mT),
    "einsum": lambda x: torch.einsum("bhqd,bhkd->bhqk", x, x.cos()),
    "one batch": lambda x: torch.bmm(
        x.reshape(-1, LENGTH, SIZE), x.reshape(-1, LENGTH, SIZE).transpose(1, 2)
    ),
    "one batch and back": lambda x: x.reshape(-1, LENGTH, SIZE).view(BATCH, -1, LENGTH, SIZE),
    "rotated": lambda x: torch.cat((-x[..., SIZE // 2 :], x[..., : SIZE // 2]), -1),
    "complex": lambda x: torch.view_as_real(
        torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * 1j
    ).flatten(3),
    "groups": lambda x: x[:, :, None].expand(-1, -1, 3, -1, -1).reshape(BATCH, -1, LENGTH, SIZE),
    "groups by repeats": lambda x: x.repeat_interleave(3, dim=1),
    "norm": lambda x: F.rms_norm(x, (SIZE,), eps=1e-5),
    "norm by name": lambda x: F.rms_norm(input=x, normalized_shape=(SIZE,), eps=1e-5),
    "linear by name": lambda x: F.linear(input=x, weight=torch.ones(3, SIZE, dtype=x.dtype)),
    "mean of head": lambda x: x - x.mean(-1, keepdim=True),
    "lower": lambda x: (x @ x.mT).tril(),
}


@pytest.mark.parametrize("name", OF_FEATURES)
def test_what_keeps_slices_of_features_returns_the_slice_of_what_one_process_returns(
    name: str,
) -> None:
    function = OF_FEATURES[name]
    require_slices_of(function(features()), [function(part) for part in slices(features(), 2)])


@pytest.mark.parametrize("name", OF_HEADS)
def test_what_keeps_slices_of_heads_returns_the_slice_of_what_one_process_returns(
    name: str,
) -> None:
    function = OF_HEADS[name]
    require_slices_of(function(heads()), [function(part) for part in slices(heads(), 1)])


def masked_by_other_heads(x: Tensor) -> Tensor:
    """Attention whose mask has the heads where query, key and value have the batch, of one size."""
    by_head = x.view(LENGTH, BATCH, -1, SIZE).permute(1, 2, 0, 3)[: HEADS // RANKS]
    mask = (by_head @ by_head.mT).transpose(0, 1)
    return F.scaled_dot_product_attention(by_head, by_head, by_head, mask)


MIXES: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda x: x.softmax(-1),
    "softmax without a dim": lambda x: F.softmax(x.flatten(0, 1), dim=1),
    "mean": lambda x: x.mean(),
    "mean of features": lambda x: x.mean(-1, keepdim=True),
    "norm": lambda x: x.norm(dim=-1),
    "vector norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "dropout": F.dropout,
    "feature dropout": lambda x: F.feature_alpha_dropout(x, training=True),
    "noise": lambda x: torch.rand_like(x),
    "glu": lambda x: F.glu(x, -1),
    "chunk": lambda x: x.chunk(2, -1)[0],
    "split": lambda x: x.split(3, dim=2)[1],
    "some features": lambda x: x[..., :4],
    "every other": lambda x: x[..., ::2],
    "one feature": lambda x: x[..., 0],
    "features by a list": lambda x: x[..., [0, 1]],
    "features by a tensor": lambda x: x.index_select(-1, torch.tensor([0, 1])),
    "roll": lambda x: x.roll(1, -1),
    "flip": lambda x: x.flip(-1),
    "sort": lambda x: x.sort(-1).values,
    "largest": lambda x: x.topk(2, -1).values,
    "cat of features": lambda x: torch.cat((x, x), -1),
    "head size from shape": lambda x: x.view(LENGTH, BATCH, HEADS, x.shape[-1] // HEADS),
    "head size open": lambda x: x.view(LENGTH, BATCH, HEADS, -1),
    "head size open by unflatten": lambda x: x.unflatten(-1, (HEADS, -1)),
    "all heads": lambda x: x.view(LENGTH, BATCH, HEADS, SIZE),
    "product": lambda x: x @ torch.ones(HEADS * SIZE // RANKS, 2, dtype=x.dtype),
    "squares": lambda x: x @ x.transpose(-1, -2),
    "outer": lambda x: x.unsqueeze(-1) * x.unsqueeze(-2),
    "linear": lambda x: F.linear(x, torch.ones(2, HEADS * SIZE // RANKS, dtype=x.dtype)),
    "linear by name": lambda x: F.linear(
        input=x, weight=torch.ones(2, HEADS * SIZE // RANKS, dtype=x.dtype)
    ),
    "einsum": lambda x: torch.einsum("sbf,sbf->sb", x, x),
    "mask of other heads": masked_by_other_heads,
    "attention over features": lambda x: F.scaled_dot_product_attention(x, x, x),
    "root of the size": lambda x: x * x.shape[-1] ** -0.5,
    "math's root of the size": lambda x: x / math.sqrt(x.size(-1)),
    "inverse of the size": lambda x: x * (1 / x.shape[-1]),
    "divided by the size": lambda x: x / x.shape[-1],
    "divided by the heads": lambda x: x.div(x.shape[-1] // SIZE),
    "filled with the size": lambda x: torch.full_like(x, fill_value=x.shape[-1]),
    "whole": lambda x: x + features(),
    "numbers of the slice": lambda x: x + torch.arange(x.shape[-1]),
    "noise of the slice": lambda x: x + torch.rand(x.shape),
    "numbers of features": lambda x: x + torch.arange(HEADS * SIZE),
    "layer norm": lambda x: F.layer_norm(x, (HEADS * SIZE,)),
    "group norm": lambda x: F.group_norm(x.flatten(0, 1), 2),
    "batch norm": lambda x: F.batch_norm(x.flatten(0, 1), None, None, training=True),
    "pool": lambda x: F.avg_pool1d(x, 2),
    "conv": lambda x: F.conv1d(x, torch.ones(1, BATCH, 1, dtype=x.dtype)),
    "prelu": lambda x: F.prelu(x, torch.ones(1, dtype=x.dtype, requires_grad=True)),
    "a learned number": lambda x: x * torch.ones((), dtype=x.dtype, requires_grad=True),
    "cross entropy": lambda x: F.cross_entropy(
        x.flatten(0, 1), torch.zeros(LENGTH * BATCH, dtype=torch.long)
    ),
    "squared error": lambda x: F.mse_loss(x, features()),
    "triangle": lambda x: x.tril(),
    "written into": lambda x: features().copy_(x),
    "a feature written": lambda x: x.__setitem__((..., 0), 0.0),
}


@pytest.mark.parametrize("name", MIXES)
def test_what_mixes_features_that_ranks_share_is_refused_in_one_line_with_the_layer(
    name: str,
) -> None:
    for part in slices(features(), 2):
        with pytest.raises(UserError) as refused:
            MIXES[name](part)
        (line,) = refused.value.problems
        assert shows(line, "parallel.module_refused", slices=re.compile("outputs of up$"))


def test_what_reads_no_values_or_shows_them_passes() -> None:
    part = slices(features(), 2)[0]
    assert part.dtype == torch.float64
    assert part.shape == (LENGTH, BATCH, HEADS * SIZE // RANKS)
    assert part.tolist() == unchecked(part).tolist()
    assert not part.requires_grad
    assert "CutTensor" in repr(part)
    assert torch.equal(part, unchecked(part))


def test_a_tensor_that_all_features_share_passes_only_without_a_gradient_of_its_own() -> None:
    part = slices(features(), 2)[0]
    number = torch.ones(1, dtype=torch.float64, requires_grad=True)
    with raises(
        "parallel.module_refused", advice=re.compile(r"^give it as parallel\.copy\(x, tp\)")
    ):
        _ = part * number
    with torch.no_grad():
        assert isinstance(part * number, CutTensor)
    assert isinstance(part * number.detach(), CutTensor)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (F.linear, (3, SIZE)),
        (lambda x, weight: F.rms_norm(x, (SIZE,), weight), (SIZE,)),
        (lambda x, bias: F.layer_norm(x, (SIZE,), None, bias), (SIZE,)),
    ],
)
def test_a_weight_that_is_a_slice_itself_is_refused_without_a_gradient_too(
    function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    weight = mark_cut(torch.ones(shape, dtype=torch.float64), TensorCut(0, "outputs of up", RANKS))
    with torch.no_grad(), raises("parallel.module_refused", reason=re.compile("different dim")):
        function(slices(heads(), 1)[0], weight)


def test_slices_are_those_of_plain_tensors_in_their_gradients() -> None:
    x = features().requires_grad_()
    part = mark_cut(x[..., : HEADS * SIZE // RANKS] * 1, TensorCut(2, "outputs of up", RANKS))
    y = F.gelu(part.view(LENGTH, BATCH, -1, SIZE)).flatten(2)
    unchecked(y).sum().backward()
    other = features().requires_grad_()
    F.gelu(other[..., : HEADS * SIZE // RANKS]).sum().backward()
    torch.testing.assert_close(x.grad, other.grad)
