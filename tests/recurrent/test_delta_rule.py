"""The gated delta rule is exact at the ends of its ranges, and so is the convolution before it. Its
chunks are compared with its recurrence in `test_recurrences`."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.recurrent.delta_rule import DeltaInputs, chunked, recurrent
from models.recurrent.short_convolution import short_convolution
from tests.recurrent.recurrences import (
    DELTAS,
    ODD_BY_ROW,
    ODD_DELTA,
    RECURRENCES,
    DrawnDelta,
    assert_alike,
)

DELTA_RULE = RECURRENCES["delta rule"]


BOTH = pytest.mark.parametrize("odd", [ODD_DELTA, ODD_BY_ROW], ids=["of heads", "of rows"])


@BOTH
def test_a_decay_of_zero_and_one_is_exact(odd: DrawnDelta) -> None:
    inputs, state = replace(odd, documents=0.0).inputs()
    log_decay = inputs.log_decay.clone()
    log_decay[:, :, 3::5] = -torch.inf
    log_decay[:, :, 1::5] = 0.0
    inputs = replace(inputs, log_decay=log_decay)
    found = [*DELTA_RULE.results(partial(chunked, chunk=8), inputs, state)]
    expected = [*DELTA_RULE.results(recurrent, inputs, state)]
    assert all(values.isfinite().all() for values in found)
    assert_alike(found, expected)


@BOTH
def test_single_precision_is_close_for_strong_decays_before_weak_ones(odd: DrawnDelta) -> None:
    """Differences of sums from the beginning of a chunk would lose the weak ones."""
    inputs, state = replace(odd, length=64, documents=0.0).inputs()
    log_decay = inputs.log_decay.clone().fill_(-1e-3)
    log_decay[:, :, :8] = -1e4
    exact, _ = recurrent(replace(inputs, log_decay=log_decay), state)
    narrow = {name: getattr(inputs, name).float() for name in ("query", "key", "value", "strength")}
    found, _ = chunked(DeltaInputs(log_decay=log_decay.float(), **narrow), state.float())
    assert (found.double() - exact).abs().max() < 1e-5 * exact.abs().max()


def test_rows_that_decay_alike_are_a_head_that_decays() -> None:
    inputs, state = ODD_DELTA.inputs()
    rows = inputs.log_decay.unsqueeze(-1).expand(*inputs.key.shape)
    found = chunked(replace(inputs, log_decay=rows), state, 8)
    assert_alike(found, chunked(inputs, state, 8))


def test_rows_are_not_weighed_in_chunks_that_cannot_be_halved() -> None:
    inputs, _ = ODD_BY_ROW.inputs()
    with pytest.raises(ValueError, match="chunks of 24 tokens"):
        chunked(inputs, chunk=24)


@settings(max_examples=15)
@given(DELTAS, st.integers(1, 6))
def test_the_convolution_is_that_of_torch_document_by_document(
    drawn: DrawnDelta, kernel: int
) -> None:
    dice = torch.Generator().manual_seed(drawn.seed)
    features = 4
    length = drawn.length
    x = torch.randn(length, 1, features, generator=dice, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(features, kernel, generator=dice, dtype=torch.float64, requires_grad=True)
    begins = torch.rand(1, length, generator=dice) < drawn.documents
    starts = [0, *(begins[0, 1:].nonzero().flatten() + 1).tolist()]
    found = short_convolution(x, weight, begins=begins if drawn.documents else None)
    alone = [
        convolved_by_torch(x[start:stop], weight) for start, stop in pairwise([*starts, length])
    ]
    expected = torch.cat(alone)
    grad = torch.randn(expected.shape, generator=dice, dtype=torch.float64)
    ours = torch.autograd.grad((found * grad).sum(), (x, weight))
    theirs = torch.autograd.grad((expected * grad).sum(), (x, weight))
    assert_alike([found, *ours], [expected, *theirs])


def convolved_by_torch(x: Tensor, weight: Tensor) -> Tensor:
    features, kernel = weight.shape
    padded = F.pad(x.permute(1, 2, 0), (kernel - 1, 0))
    return F.conv1d(padded, weight.unsqueeze(1), groups=features).permute(2, 0, 1)


def test_a_convolution_goes_on_from_the_tokens_before() -> None:
    x = torch.randn(9, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    whole = short_convolution(x, weight)
    assert_alike([short_convolution(x[5:], weight, x[2:5])], [whole[5:]])
