"""TF32: ten bits of mantissa, halfway cases away from zero, special values as they are, and
switches put back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaprec.precision.tf32 import product_tf32, round_tf32, tf32

INF = float("inf")
NAN = float("nan")
ULP = 2.0**-10  # of TF32, between 1 and 2


def rounded(value: float) -> float:
    return round_tf32(torch.tensor(value)).item()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, 0.0),
        (1.0, 1.0),
        (1 + ULP, 1 + ULP),
        (1 + ULP / 2 - 2**-23, 1.0),
        (1 + ULP / 2, 1 + ULP),  # a tie goes away from zero, also from an even number
        (1 + ULP * 1.5, 1 + ULP * 2),
        (-1 - ULP / 2, -1 - ULP),
        (2 - 2**-23, 2.0),  # carries into the exponent
        (2.0**127 * (2 - ULP), 2.0**127 * (2 - ULP)),  # the largest
        (2.0**127 * (2 - 2**-23), INF),
        (-(2.0**127) * (2 - ULP / 2), -INF),
        (INF, INF),
        (-INF, -INF),
        (2.0**-126, 2.0**-126),  # the smallest normal
        (2.0**-136, 2.0**-136),  # the smallest subnormal
        (2.0**-137, 2.0**-136),
        (2.0**-138, 0.0),
        (2.0**-149, 0.0),
    ],
)
def test_values_where_rounding_is_special(value: float, expected: float) -> None:
    assert rounded(value) == expected


def test_zero_keeps_its_sign() -> None:
    assert torch.signbit(round_tf32(torch.tensor([-0.0, -(2.0**-149)]))).all()


def test_nan_stays_nan_with_any_payload() -> None:
    bits = torch.tensor(
        [0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1, -(2**31) + 0x7F800001], dtype=torch.int64
    ).int()
    assert round_tf32(bits.view(torch.float32)).isnan().all()


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_every_number_goes_to_the_nearest_tf32_and_ties_away_from_zero(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    ours = round_tf32(torch.from_numpy(values.copy())).numpy()
    exponent = np.clip(np.frexp(values.astype(np.float64))[1] - 1, -126, None)
    step = np.exp2(exponent.astype(np.float64) - 10)
    exact = np.sign(values) * np.floor(np.abs(values.astype(np.float64)) / step + 0.5) * step
    with np.errstate(over="ignore"):
        expected = exact.astype(np.float32)
    assert np.array_equal(ours, expected)
    assert not (np.frombuffer(ours[np.isfinite(ours)].tobytes(), np.uint32) & 0x1FFF).any()


def test_rounding_takes_any_shape_and_leaves_its_input_alone() -> None:
    values = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).t()
    before = values.clone()
    assert round_tf32(values).shape == (4, 3)
    assert torch.equal(values, before)
    assert torch.equal(round_tf32(round_tf32(values)), round_tf32(values))


def test_a_product_is_as_far_from_fp32s_as_ten_bits_allow() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(32, 64, generator=generator)
    b = torch.randn(64, 16, generator=generator)
    exact = a.double() @ b.double()
    ours = product_tf32(a, b)
    bound = (a.abs().double() @ b.abs().double()) * (2 * 2.0**-11 + 2.0**-22) + 64 * 2.0**-20
    assert ((ours - exact).abs() <= bound).all()
    assert not torch.equal(ours, a @ b)
    assert torch.equal(ours, round_tf32(a) @ round_tf32(b))


def switches() -> tuple[bool, bool]:
    return bool(torch.backends.cuda.matmul.allow_tf32), torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("on", [False, True])
def test_the_switches_hold_in_the_block_and_are_put_back_even_after_an_error(
    before: bool, on: bool
) -> None:
    inside = []

    def fail() -> None:
        with tf32(on):
            inside.append(switches())
            raise KeyError

    untouched = switches()
    with tf32(before):
        with pytest.raises(KeyError):
            fail()
        assert switches() == (before, before)
    assert inside == [(on, on)]
    assert switches() == untouched


def all_switches() -> list[object]:
    torch_wide: Any = torch.backends
    cuda = torch_wide.cuda.matmul
    cudnn = torch_wide.cudnn
    host = torch_wide.mkldnn.matmul
    return [
        *(switch.fp32_precision for switch in (cuda, cudnn.conv, cudnn.rnn, host)),
        *(said(read) for read in (lambda: cuda.allow_tf32, lambda: cudnn.allow_tf32)),
        said(torch.get_float32_matmul_precision),
    ]


def said(read: Callable[[], object]) -> object:
    try:
        return read()
    except RuntimeError:  # torch refuses to say what its older switch is after a newer one was set
        return "mixed"


SET_BY_USERS: dict[str, Callable[[], object]] = {
    "matmul": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "convolution": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),  # type: ignore[attr-defined]
    "all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
}


@contextmanager
def as_before() -> Iterator[None]:
    """Puts back what a test sets: the newer switches, after the older ones are at torch's
    defaults."""
    torch_wide: Any = torch.backends
    cuda = torch_wide.cuda.matmul
    cudnn = torch_wide.cudnn
    host = torch_wide.mkldnn.matmul
    try:
        yield
    finally:
        torch_wide.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
        cudnn.allow_tf32 = True
        cuda.fp32_precision = host.fp32_precision = "none"
        cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "tf32"


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("name", SET_BY_USERS)
def test_switches_that_users_set_in_any_of_torchs_ways_are_overruled_and_put_back(
    name: str, on: bool
) -> None:
    with as_before():
        SET_BY_USERS[name]()
        before = all_switches()
        with tf32(on):
            now = "tf32" if on else "ieee"
            assert all_switches() == [now, now, now, "ieee", on, on, "high" if on else "highest"]
        assert all_switches() == before


def test_what_is_not_a_number_in_tf32_is_nan() -> None:
    assert np.isnan(rounded(NAN))
