"""Attention of cut sequences, merged from a fused call for the keys of each rank, is that of the
whole sequence."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaprec.comm.axis import Axis
from models.attention.flash_windows import can_attend
from models.attention.fused_parts import FusedParts, FusedPartsGradients
from parallel.sequence_cut import chunks_of_rank, positions

HEADS = 4
KEY_HEADS = 2


def attend_as_ranks(whole: list[Tensor], ranks: int, scale: float) -> list[Tensor]:
    """The output, and the gradients of query, key and value, from all ranks of cp in turn."""
    tokens = whole[0].shape[2] // ranks
    places = [positions(Axis("cp", r, ranks), tokens, whole[0].device) for r in range(ranks)]
    runs = [chunks_of_rank(r, ranks, tokens) for r in range(ranks)]
    output = torch.zeros_like(whole[0])
    found = [torch.zeros_like(x, dtype=torch.float32) for x in whole[:3]]
    for rank, here in enumerate(places):
        query, _, _, grad = (x[:, :, here] for x in whole)
        order = [rank, *(other for other in range(ranks) if other != rank)]
        merged = FusedParts(query, runs[rank], scale)
        for other in order:
            key, value = (x[:, :, places[other]] for x in whole[1:3])
            merged.add(key, value, runs[other])
        wide_output, log_sum = merged.result()
        assert log_sum.dtype == torch.float32
        output[:, :, here] = wide_output.to(output.dtype)
        gradients = FusedPartsGradients(
            query,
            runs[rank],
            output[:, :, here],
            log_sum,
            grad,
            scale,
            merged.backward_inputs,
        )
        for other in order:
            there = places[other]
            key, value = (x[:, :, there] for x in whole[1:3])
            sums = [torch.zeros_like(x, dtype=torch.float32) for x in (key, value)]
            gradients.add(key, value, runs[other], sums[0], sums[1])
            found[1][:, :, there] += sums[0]
            found[2][:, :, there] += sums[1]
        found[0][:, :, here] = gradients.grad_query()
    return [output, *found]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize(("width", "length"), [(64, 400), (128, 512)])
def test_a_cut_sequence_attends_as_a_whole_one(
    width: int, length: int, samples: int, ranks: int, device: str
) -> None:
    random = torch.Generator().manual_seed(0)
    counts = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    whole = [
        torch.randn(samples, heads, length, width, generator=random).bfloat16().to(device)
        for heads in counts
    ]
    if device == "cuda" and torch.cuda.get_device_capability() >= (8, 0):
        assert can_attend(whole[0], whole[1], whole[2])
    scale = width**-0.5
    found = attend_as_ranks(whole, ranks, scale)
    query, key, value = exact = [x.cpu().double().requires_grad_() for x in whole[:3]]
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    expected = [output, *torch.autograd.grad(output, exact, whole[3].cpu().double())]
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all()
        assert (one.cpu().double() - other.detach()).norm() < 0.01 * other.detach().norm()
