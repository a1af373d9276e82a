"""Rounding of FP32 numbers to BF16, for weights and moments that are stored in 16 bits, and of FP64
numbers to any dtype.

A bfloat16 is the upper half of a float32, so rounding removes 16 bits. These can be stored
separately, or replaced by a random choice:

    split       the BF16 weight and the 16 bits that it lacks: together the FP32 number, bit for
                bit. The weight is rounded to nearest. A tie (one number in 65,536) goes away from
                zero, whereas torch rounds it to even, because the remainder has no bit left to
                record the direction. Every NaN becomes the same NaN
    stochastic  rounded up with a probability equal to the lost fraction, so that the mean is exact.
                Small updates then accumulate, whereas rounding to nearest would lose each one: a
                BF16 moment with a decay of 0.999 would never change, nor would a BF16 weight
                without an FP32 master. Above the largest finite bfloat16 the upper neighbour is
                inf, as in rounding to nearest

torch rounds FP64 to 16 bits by way of FP32, which rounds twice: a number beside a tie may become
the tie, and then go to the wrong side. `from_double` rounds once.

A single Python number is rounded without a tensor: where tensors have no storage, they have no
value either.
"""

import math

import torch
from torch import Tensor

_LOWER_BITS = 0xFFFF  # mask of the 16 bits that a bfloat16 lacks


def split(wide: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Write FP32 `wide` [n] into bfloat16 `weight` [n] and int16 `remainder` [n]."""
    # All NaNs become one NaN: the upper half of others would round to inf, or past the sign to
    # zero.
    one_nan = wide.nan_to_num(torch.nan, torch.inf, -torch.inf)
    bits = one_nan.view(torch.int32)
    weight.view(torch.int16).copy_(_upper(bits + 0x8000))  # half a unit up: to nearest
    remainder.copy_(bits)  # the lower 16 bits: narrowing integers wraps


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the FP32 numbers [n] that were passed to `split`."""
    lower = remainder.to(torch.int32)
    upper = weight.view(torch.int16).to(torch.int32) << 16
    # A negative remainder had its highest bit set, so the weight was rounded up; the sum undoes
    # that.
    return (upper + lower).view(torch.float32)


def stochastic(wide: Tensor, bits: Tensor) -> Tensor:
    """Return FP32 `wide` [n] rounded to bfloat16 with the lowest 16 bits of the random int64 `bits`
    [n]."""
    # carries into the upper half as often as the lost bits say
    random_fraction = (bits & _LOWER_BITS).to(torch.int32)
    raised = wide.view(torch.int32) + random_fraction
    rounded = _upper(raised).view(torch.bfloat16)
    # the bits of inf and NaN are no magnitudes, to which something can be added
    return torch.where(wide.isfinite(), rounded, wide.bfloat16())


def from_double(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """Return FP64 `wide` [...] rounded once to `dtype`: to nearest, ties to even."""
    if dtype.itemsize >= torch.float32.itemsize:
        return wide.to(dtype)
    # First to FP32, by "rounding to odd": a number that FP32 does not hold exactly becomes that
    # neighbour of it whose last bit is 1. Such a number is no tie of a narrower dtype, and lies on
    # the same side of each tie as before. So the second rounding is right.
    single = wide.float()
    error = wide - single.double()
    is_even = (single.view(torch.int32) & 1) == 0
    direction = torch.where(error > 0, torch.inf, -torch.inf).float()
    odd_neighbour = torch.nextafter(single, direction)
    rounded_to_odd = torch.where((error != 0) & is_even, odd_neighbour, single)
    return rounded_to_odd.to(dtype)


def nearest(number: float, dtype: torch.dtype) -> float:
    """Return a finite number rounded to the nearest one of `dtype`, ties to even; inf beyond its
    largest."""
    limits = torch.finfo(dtype)
    # The distance of neighbours: frexp's mantissa is between 0.5 and 1, where that is eps / 2.
    # Subnormals have the distance of the smallest normal numbers.
    _, exponent = math.frexp(number)
    smallest_unit = limits.smallest_normal * limits.eps
    unit = max(math.ldexp(limits.eps / 2, exponent), smallest_unit)
    rounded = round(number / unit) * unit  # Python rounds ties to even
    if abs(rounded) > limits.max:
        return math.copysign(math.inf, number)
    return rounded


def _upper(bits: Tensor) -> Tensor:
    """Return the upper 16 bits of int32 as int16."""
    return (bits >> 16).to(torch.int16)
