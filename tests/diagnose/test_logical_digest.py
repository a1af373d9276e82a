"""A digest of a logical tensor sees every bit and its place, and does not depend on how ranks share
the tensor."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Part
from megaprec.comm.tensor_digests import BLOCK, digest_terms, hexadecimal
from tests.flips import INTEGERS

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
SHAPES = [(), (1,), (7,), (5, 3), (64, 1001), (3, 4, 5), (6, 1), (BLOCK + 3,), (2, BLOCK + 1)]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)


def whole(x: Tensor) -> Tensor:
    return digest_terms(x.reshape(-1), Part("x", tuple(x.shape)), 0)


def differ(x: Tensor, y: Tensor) -> bool:
    return bool((whole(x) != whole(y)).all())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_slices_along_any_dim_and_runs_of_them_add_up_to_the_whole(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(SHAPES[1:6]))
    x = values(shape, data.draw(st.sampled_from(DTYPES)))
    size = data.draw(st.integers(1, 5))
    dim = data.draw(st.sampled_from([None, *range(len(shape))]))
    total = torch.zeros(2, dtype=torch.int64)
    for rank in range(size):
        part = Part.cut("x", shape, dim, Axis("tp", rank, size))
        own = part.take(x).reshape(-1)
        ends = sorted(data.draw(st.lists(st.integers(0, len(own)), max_size=4)))
        runs = zip([0, *ends], [*ends, len(own)], strict=True)
        total += (
            sum((digest_terms(own[a:b], part, a) for a, b in runs), total * 0)
            if part.copy == 0
            else 0
        )
    assert torch.equal(total, whole(x))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_each_flipped_bit_changes_both_sums(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    x = values(data.draw(st.sampled_from(SHAPES)), dtype)
    y = x.clone()
    bit = data.draw(st.integers(0, 8 * x.itemsize - 1))
    place = data.draw(st.integers(0, x.numel() - 1))
    mask = -(1 << bit) if x.itemsize == 8 and bit == 63 else 1 << bit
    integers = y.view(INTEGERS[x.itemsize]).view(-1)
    integers[place] ^= torch.tensor(mask).to(integers.dtype)
    if (
        not x.view(-1)[place].float().isnan() and not y.view(-1)[place].float().isnan()
    ):  # NaNs of eight bits are one
        assert differ(x, y)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_two_elements_that_are_swapped_change_both_sums(data: st.DataObject) -> None:
    x = values(data.draw(st.sampled_from(SHAPES[2:])), data.draw(st.sampled_from(DTYPES)))
    flat = x.view(-1)
    one = data.draw(st.integers(0, len(flat) - 1))
    other = data.draw(st.integers(0, len(flat) - 1).filter(lambda place: place != one))
    flat[one], flat[other] = 2.0, -2.0
    y = x.clone()
    y.view(-1)[one], y.view(-1)[other] = -2.0, 2.0
    assert differ(x, y)


@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_rows_columns_and_signs_that_are_exchanged_change_both_sums(dtype: torch.dtype) -> None:
    x = values((48, 512), dtype)
    assert differ(x, x.flip(0)) and differ(x, x.flip(1)) and differ(x, x.view(96, 256))
    assert differ(x[:, :48], x[:, :48].t().contiguous())
    pairs = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(1))[:60].view(-1, 2)
    for pair in pairs:  # two sign bits: where sums modulo 2^64 are weakest
        y = x.clone()
        y.view(-1)[pair] *= -1
        assert differ(x, y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_zero_is_zero_and_nothing_else_is(dtype: torch.dtype) -> None:
    zeros = torch.zeros(5, 3)
    assert torch.equal(whole((-zeros).to(dtype)), whole(zeros.to(dtype)))
    assert whole(zeros.to(dtype)).tolist() == [0, 0]
    smallest = torch.ones(1, dtype=INTEGERS[dtype.itemsize]).view(dtype)
    assert (whole(smallest) != 0).all(), "a subnormal number counts"


def test_a_digest_shows_as_digits() -> None:
    assert hexadecimal(torch.tensor([-1, 1])) == "f" * 16 + "0" * 15 + "1"
    assert prod(whole(torch.zeros(0)).tolist()) == 0
