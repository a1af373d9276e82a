"""A digest sees every bit and its place, and is the same however the tensor lies in memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaprec.comm.tensor_digests import WIDTH, digest, hexadecimal
from tests.flips import INTEGERS

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.bool,
)


def values(count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 4
    return drawn > 0 if dtype == torch.bool else drawn.to(dtype)


def differ(x: Tensor, y: Tensor) -> bool:
    return bool((digest(x) != digest(y)).all())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_flipped_bit_changes_both_sums(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES[:5]))
    count = data.draw(st.sampled_from((1, 3, 7, 64, 1001, WIDTH + 5)))
    x = values(count, dtype)
    y = x.clone()
    bit = data.draw(st.integers(0, 8 * x.itemsize - 1))
    place = data.draw(st.integers(0, count - 1))
    mask = -(1 << bit) if x.itemsize == 8 and bit == 63 else 1 << bit
    integers = y.view(INTEGERS[x.itemsize])
    integers[place] ^= torch.tensor(mask).to(integers.dtype)
    assert differ(x, y)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_two_elements_that_are_swapped_change_both_sums(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES[:6]))
    count = data.draw(st.sampled_from((2, 9, 300, 3 * WIDTH + 1)))
    one = data.draw(st.integers(0, count - 1))
    other = data.draw(st.integers(0, count - 1))
    x = values(count, dtype)
    x[one], x[other] = 2.0, 3.0
    y = x.clone()
    y[one], y[other] = x[other].clone(), x[one].clone()
    assert differ(x, y) == (one != other)


@pytest.mark.parametrize("dtype", DTYPES[:5])
def test_rows_that_are_swapped_and_signs_that_are_flipped_change_both_sums(
    dtype: torch.dtype,
) -> None:
    x = values(96 * 1024, dtype).view(96, 1024)
    for one, other in ((0, 1), (3, 67), (94, 95)):
        y = x.clone()
        y.view(torch.uint8)[[one, other]] = x.view(torch.uint8)[[other, one]]
        assert differ(x, y)
    pairs = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(1))[:200].view(-1, 2)
    for pair in pairs:  # two sign bits: where sums modulo 2^64 are weakest
        y = x.clone()
        y.view(-1)[pair] = (-y.view(-1)[pair].float()).to(dtype)
        assert differ(x, y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_digest_does_not_depend_on_where_and_how_the_tensor_lies(dtype: torch.dtype) -> None:
    x = values(7 * 33, dtype).view(7, 33)
    moved = torch.cat([values(5, dtype), x.view(-1)])[5:].view(7, 33)
    for other in (x.clone(), moved, x.t().contiguous().t()):
        assert torch.equal(digest(other), digest(x))


def test_a_digest_of_nothing_is_zero_and_shows_as_digits() -> None:
    assert digest(torch.zeros(0)).tolist() == [0, 0]
    assert hexadecimal(torch.tensor([-1, 1])) == "f" * 16 + "0" * 15 + "1"


def test_digests_are_those_that_earlier_versions_recorded() -> None:
    """Of bytes that fill no lane, one, and several rows; a record is compared with digests of
    later versions."""
    stored = torch.arange(70_001, dtype=torch.int32).view(torch.uint8)
    recorded = {
        0: [0, 0],
        7: [-5425118339200278463, -6866051095014778367],
        9: [-4720585058930482121, 5437236268711929971],
        280_004: [-364622919676340476, -6388712757080911722],
    }
    assert {size: digest(stored[:size]).tolist() for size in recorded} == recorded
