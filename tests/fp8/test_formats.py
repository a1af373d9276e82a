"""The two FP8 formats: every code, every tie and its neighbours, and what becomes of numbers that
do not fit."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from megaprec.fp8.formats import E4M3, E5M2, cast, format_of, limit
from megaprec.precision.fp8_recipe import FP8Recipe

SIZES = {E4M3: (4, 3, 7), E5M2: (5, 2, 15)}  # bits of exponent, bits of mantissa, bias
WIDE = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = pytest.mark.parametrize("dtype", SIZES, ids=["e4m3", "e5m2"])


def meant(code: int, dtype: torch.dtype) -> float:
    """What an eight-bit code stands for, by the paper's table."""
    bits, mantissa_bits, bias = SIZES[dtype]
    sign = -1.0 if code >> 7 else 1.0
    exponent = (code >> mantissa_bits) & (2**bits - 1)
    mantissa = code & (2**mantissa_bits - 1)
    if dtype == E4M3 and code & 0x7F == 0x7F:
        return math.nan
    if dtype == E5M2 and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


def codes(tensor: Tensor) -> list[int]:
    return tensor.view(torch.uint8).tolist()


def nearest(value: float, dtype: torch.dtype) -> int:
    """The code of a finite number, by search: of two equally near the one whose last bit is 0; the
    largest beyond."""
    finite = [c for c in range(128) if math.isfinite(meant(c, dtype))]
    best = min(finite, key=lambda c: (abs(meant(c, dtype) - abs(value)), c & 1))
    return best | (0x80 if math.copysign(1, value) < 0 else 0)


@FORMATS
def test_every_code_stands_for_what_the_paper_says_and_is_cast_to_itself(
    dtype: torch.dtype,
) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    told = torch.tensor([meant(code, dtype) for code in range(256)])
    torch.testing.assert_close(every, told, rtol=0, atol=0, equal_nan=True)
    kept = ~told.isnan()
    for wide in WIDE:
        back = cast(told.to(wide), dtype)
        assert torch.equal(back.view(torch.uint8)[kept], torch.arange(256, dtype=torch.uint8)[kept])
        assert back.float()[~kept].isnan().all()


@FORMATS
@pytest.mark.parametrize("wide", WIDE, ids=str)
def test_ties_go_to_even_and_their_neighbours_to_the_nearest(
    dtype: torch.dtype, wide: torch.dtype
) -> None:
    values = sorted(meant(code, dtype) for code in range(128) if math.isfinite(meant(code, dtype)))
    ties = [(a + b) / 2 for a, b in pairwise(values)]
    tied = torch.tensor(ties, dtype=torch.float64).to(wide)
    assert tied.tolist() == ties, "the wide dtype holds every tie"
    far = torch.full_like(tied, torch.inf)
    tried = torch.cat(
        [tied, tied.nextafter(far), tied.nextafter(-far), -tied, -tied.nextafter(far)]
    )
    assert codes(cast(tried, dtype)) == [nearest(value, dtype) for value in tried.tolist()]
    assert codes(cast(tried, dtype)) == codes(tried.to(dtype)), "torch's own cast rounds the same"


@FORMATS
def test_finite_numbers_saturate_wherever_they_come_from(dtype: torch.dtype) -> None:
    most = limit(dtype)
    for wide in WIDE:
        beyond = torch.tensor(
            [most, 1.01 * most, 1.1 * most, torch.finfo(wide).max], dtype=torch.float64
        ).to(wide)
        beyond = beyond[beyond.isfinite()]
        assert cast(beyond, dtype).float().tolist() == [most] * len(beyond)
        assert cast(-beyond, dtype).float().tolist() == [-most] * len(beyond)


@FORMATS
def test_an_overflow_stays_visible(dtype: torch.dtype) -> None:
    for wide in WIDE:
        seen = cast(
            torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0], dtype=wide), dtype
        ).float()
        assert seen.isfinite().tolist() == [False, False, False, True]
    if dtype == E5M2:
        assert cast(torch.tensor([torch.inf, -torch.inf]), dtype).float().tolist() == [
            torch.inf,
            -torch.inf,
        ]


@FORMATS
def test_a_scale_too_high_saturates_but_makes_no_infinity(dtype: torch.dtype) -> None:
    scale = torch.tensor(torch.finfo(torch.float32).max)
    assert cast(torch.tensor([2.0, -1e30, 0.0]), dtype, scale).float().tolist() == [
        limit(dtype),
        -limit(dtype),
        0.0,
    ]
    assert not cast(torch.tensor([torch.inf]), dtype, scale).float().isfinite().any()


def test_a_half_is_scaled_before_it_is_rounded() -> None:
    """60000 * 0.005 is 300, though 60000 * 2 would overflow a half and 0.005 is no half."""
    x = torch.tensor([60000.0, 6e-8], dtype=torch.float16)
    assert cast(x, E4M3, torch.tensor(0.005)).float().tolist() == [288.0, 0.0]
    assert cast(x, E4M3, torch.tensor(2.0**20)).float().tolist() == [448.0, 0.0625]


def test_zero_keeps_its_sign() -> None:
    assert codes(cast(torch.tensor([0.0, -0.0]), E4M3)) == [0x00, 0x80]


def test_gradients_alone_are_in_e5m2_and_only_in_hybrid() -> None:
    told = [
        format_of(FP8Recipe(format=form), role)
        for form in ("hybrid", "e4m3")
        for role in ("input", "gradient")
    ]
    assert told == [E4M3, E5M2, E4M3, E4M3]
    assert format_of(FP8Recipe(), "weight") == E4M3


@pytest.mark.parametrize(
    ("kind", "gradients"),
    [
        ("delayed", E5M2),
        ("current", E5M2),
        ("rowwise", E5M2),
        ("blockwise", E4M3),
        ("mx", E4M3),
        ("nvfp4", E4M3),
    ],
)
def test_gradients_have_the_format_that_is_usual_for_the_kind(
    kind: Any, gradients: torch.dtype
) -> None:
    """The defaults of Transformer Engine's recipes: scales of blocks leave range enough."""
    recipe = FP8Recipe(kind)
    assert format_of(recipe, "gradient") == gradients
    assert format_of(recipe, "input") == format_of(recipe, "weight") == E4M3
    if kind != "nvfp4":
        assert format_of(FP8Recipe(kind, format="hybrid"), "gradient") == E5M2
        assert format_of(FP8Recipe(kind, format="e4m3"), "gradient") == E4M3
    assert recipe.format in ("hybrid", "e4m3"), "what a plan has is said"
