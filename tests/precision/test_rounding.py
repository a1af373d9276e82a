"""The laws of FP32 kept in 16 bits: split numbers come back, and drawn ones are right in the
mean."""

import math
import random

import pytest
import torch
from torch import Tensor

from megaprec.comm.random import bits
from megaprec.precision.rounding import from_double, join, nearest, split, stochastic

LARGEST = 0x7F7F << 16  # the bits of the largest finite bfloat16
INF = float("inf")


def of_bits(patterns: Tensor) -> Tensor:
    """FP32 [n] of int64 bit patterns [n]."""
    return (
        torch.where(patterns >= 1 << 31, patterns - (1 << 32), patterns)
        .to(torch.int32)
        .view(torch.float32)
    )


def patterns() -> Tensor:
    """int64: all lower halves under upper ones of every class: zero, subnormal, ordinary, largest,
    inf, NaN."""
    upper = torch.tensor(
        [
            0,
            1,
            2,
            0x7F,
            0x80,
            0x3F7F,
            0x3F80,
            0x3F81,
            0x4049,
            0x7F7E,
            0x7F7F,
            0x7F80,
            0x7FC0,
            0x7FFF,
        ]
    )
    upper = torch.cat((upper, upper + 0x8000))
    return ((upper << 16)[:, None] + torch.arange(1 << 16)).flatten()


def halved(wide: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.empty_like(wide, dtype=torch.bfloat16)
    remainder = torch.empty_like(wide, dtype=torch.int16)
    split(wide, weight, remainder)
    return weight, remainder


def test_weight_and_remainder_are_the_number_bit_for_bit() -> None:
    wide = of_bits(patterns())
    weight, remainder = halved(wide)
    again = join(weight, remainder)
    number = ~wide.isnan()
    assert torch.equal(again[number].view(torch.int32), wide[number].view(torch.int32))
    assert torch.equal(again.isnan(), wide.isnan())
    assert torch.equal(weight.isnan(), wide.isnan()), "a NaN would look like a number to the layers"


def test_the_weight_is_the_nearest_and_a_tie_goes_away_from_zero() -> None:
    wide = of_bits(patterns())
    wide = wide[~wide.isnan()]
    weight, _ = halved(wide)
    tie = wide.view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(weight[~tie], wide[~tie].bfloat16())
    below, above = (x.view(torch.float32) for x in neighbours(wide))
    assert torch.equal(weight[tie].float(), above[tie])
    assert (above[tie].abs() > below[tie].abs()).all()
    assert not torch.equal(weight[tie], wide[tie].bfloat16()), "torch takes the even neighbour"


def neighbours(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Bits of the bfloat16 numbers next to each FP32 one, towards zero and away from it."""
    towards = wide.view(torch.int32) & ~0xFFFF
    return towards, towards + (wide.view(torch.int32) & 0xFFFF != 0).int() * (1 << 16)


def finite() -> Tensor:
    wide = of_bits(patterns())
    return wide[wide.isfinite()]


def test_a_drawn_number_is_one_of_the_two_neighbours() -> None:
    wide = finite()
    below, above = neighbours(wide)
    for number in range(3):
        drawn = stochastic(wide, bits(number, torch.arange(len(wide)))).float().view(torch.int32)
        assert ((drawn == below) | (drawn == above)).all()
        assert (drawn != below).any() and (drawn != above).any()


def test_the_lowest_draw_rounds_down_the_highest_up_and_bits_above_them_mean_nothing() -> None:
    wide = finite()
    below, above = neighbours(wide)
    low = torch.zeros(len(wide), dtype=torch.int64)
    high = torch.full((len(wide),), 0xFFFF)
    for other in (0, 1 << 16, -(1 << 40), torch.iinfo(torch.int64).min):
        assert torch.equal(stochastic(wide, low + other).float().view(torch.int32), below)
        assert torch.equal(stochastic(wide, high + other).float().view(torch.int32), above)


def test_what_bfloat16_can_hold_is_left_as_it_is() -> None:
    exact = of_bits(torch.arange(1 << 16) << 16)
    for number in range(3):
        drawn = stochastic(exact, bits(number, torch.arange(1 << 16)))
        assert torch.equal(drawn.isnan(), exact.isnan())
        assert torch.equal(drawn[~exact.isnan()].float(), exact[~exact.isnan()])


def test_no_infinity_is_made_of_what_bfloat16_can_hold_and_none_is_lost() -> None:
    draws = torch.tensor([0, 1, 0x7FFF, 0x8000, 0xFFFF])
    for sign in (0, 1 << 31):
        largest, infinite = (of_bits(torch.full((5,), b | sign)) for b in (LARGEST, 0x7F80 << 16))
        assert torch.equal(stochastic(largest, draws).float(), largest)
        assert torch.equal(stochastic(infinite, draws).float(), infinite)
        beyond = of_bits(torch.full((5,), LARGEST | 0x8000 | sign))
        assert stochastic(beyond, draws).isinf().tolist() == [False, False, False, True, True]
    every_nan = of_bits(
        torch.cat((torch.arange(0x7F800001, 0x7F810001), torch.arange(0x7FFF0000, 0x80000000)))
    )
    assert stochastic(every_nan, torch.full((len(every_nan),), 0xFFFF)).isnan().all()


def test_the_probability_is_the_part_lost_exactly() -> None:
    """Over all 65,536 draws a number is rounded up as often as it has units in its lower half."""
    draws = torch.arange(1 << 16)
    for low in (0, 1, 2, 0x1234, 0x7FFF, 0x8000, 0xFFFF):
        for high in (0x3F80, 0xC049, 0x0001):
            wide = of_bits(torch.full((1 << 16,), high << 16 | low))
            raised = (
                stochastic(wide, draws).float().view(torch.int32)
                != wide.view(torch.int32) & ~0xFFFF
            )
            assert raised.sum() == low


def test_the_mean_of_many_draws_is_the_number() -> None:
    """Within five standard errors of a coin that falls so: computed, not tuned."""
    n = 1 << 14
    for number, value in enumerate((1.001, -3.14159, 1e-3, 6.1e-39, 2.5e38)):
        wide = torch.full((n,), value)
        below, above = (float(x.view(torch.float32)[0]) for x in neighbours(wide))
        part = (float(wide[0]) - below) / (above - below)
        error = abs(above - below) * (part * (1 - part) / n) ** 0.5
        mean = stochastic(wide, bits(number, torch.arange(n))).double().mean()
        assert abs(mean - float(wide[0])) < 5 * error, value
        assert abs(wide[0].bfloat16().double() - float(wide[0])) > 5 * error, (
            "to nearest would be as good"
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_number_is_rounded_as_torch_rounds_it(dtype: torch.dtype) -> None:
    dice = random.Random(0)
    ties = [1 + n / 512 for n in range(-256, 513)] + [1 + n / 4096 for n in range(65)]
    largest = [torch.finfo(dtype).max * (1 - n / 4096) for n in range(9)] + [
        65519.9,
        65520.0,
        1e6,
        1e308,
    ]
    others = [
        dice.choice((-1, 1)) * dice.uniform(1, 2) * 2.0 ** dice.randint(-150, 150)
        for _ in range(2000)
    ]
    subnormal = [n * torch.finfo(dtype).smallest_normal / 2048 for n in range(0, 4096, 7)]
    for number in [*ties, *largest, *others, *subnormal]:
        assert nearest(number, dtype) == torch.tensor(number, dtype=torch.float64).to(dtype).item()
    assert nearest(0.0, dtype) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_doubles_are_rounded_once_beside_ties_too(dtype: torch.dtype) -> None:
    """Each number, each tie between two, and the doubles beside the ties, of all magnitudes."""
    limits = torch.finfo(dtype)
    dice = random.Random(7)
    exponents = [math.frexp(limits.tiny)[1] - 6, -3, 0, 1, 5, math.frexp(limits.max)[1]]
    numbers = [0.0, -0.0, limits.max, limits.tiny]
    for exponent in exponents:
        for _ in range(40):
            (number,) = from_double(
                doubles(math.ldexp(dice.uniform(0.5, 1), exponent)), dtype
            ).tolist()
            unit = limits.eps * 2.0 ** (math.frexp(number)[1] - 1)
            tie = number + max(unit, limits.smallest_normal * limits.eps) / 2
            numbers += [number, tie, math.nextafter(tie, 0), math.nextafter(tie, INF)]
    numbers = [number for number in numbers if abs(number) <= limits.max]
    numbers += [-number for number in numbers]
    made = from_double(doubles(*numbers), dtype).double().tolist()
    assert made == [nearest(number, dtype) for number in numbers]
    assert [math.copysign(1, each) for each in made] == [math.copysign(1, n) for n in numbers]


def test_torch_rounds_doubles_twice() -> None:
    """The reason for a rounding of our own: a double just above a tie."""
    wide = doubles(1 + 2**-8 + 2**-40)
    assert wide.bfloat16().item() == 1
    assert from_double(wide, torch.bfloat16).item() == 1 + 2**-7


def doubles(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)
