"""Exact sums: the same bits for every order of the numbers and every division among ranks.

A sum in floating point depends on the order of its terms, because each addition is rounded. Here
nothing is rounded before the end. Each number is cut into digits in the base 2^37, at fixed places
over the whole range of float64: the nearest multiple of the digit's unit is taken away from the
number, and the rest goes on to the next lower digit, until nothing is left. A digit is an integer
of at most 2^37 units, so float64 adds up to 2^15 of them without rounding. The sum of each such
block is added to one long integer, whose limbs are exchanged between ranks by an all-reduce, which
is exact in any order. `total` rounds once.

The idea of pre-rounding is that of Demmel and Nguyen (Fast Reproducible Floating-Point Summation,
2013); their sums keep a few digits below the largest number, these keep all of them.
"""

import math

import torch
from torch import Tensor

from megaprec.comm.axis import Axis

# numbers whose digits are added in float64 without rounding; they stay in a core's cache
BLOCK = 1 << 15
_DIGIT_BITS = 37  # 2^15 digits add up to 2^52 units, which float64 holds
_LOWEST = -1074  # exponent of the lowest unit, the smallest number of float64
_LIMIT = 2.0**998  # the end of the highest digit; numbers from here on count as infinite
_LIMB_BITS = 32  # of the limbs that are exchanged: sums over 2^20 ranks are exact in float64
_NUM_LIMBS = 68  # 2176 bits: all digits, and room for a sum of 2^100 numbers
LENGTH = _NUM_LIMBS + 1  # numbers in the exchanged form of a sum
_GPU_BLOCKS = 256  # that a GPU processes together, because each launch has a cost


class ExactSum:
    """A sum of float64 numbers on `device`, to which any number of tensors are added. The host
    waits for the device.

    length: the most numbers that are processed together; 0: a length that suits the device.
    """

    def __init__(self, device: torch.device, length: int = 0) -> None:
        self.device = device
        suitable_length = BLOCK if device.type == "cpu" else _GPU_BLOCKS * BLOCK
        self.length = length or suitable_length
        self._units = 0  # of 2^_LOWEST
        self._infinite = 0.0  # the sum of the numbers that are not finite
        self._digits = torch.empty(self.length, dtype=torch.float64, device=device)

    def add(self, values: Tensor) -> None:
        """Add all numbers of a tensor of any floating dtype."""
        flat = values.detach().reshape(-1)
        for run in flat.split(self.length):
            # a copy, for `add_` overwrites it
            self.add_(run.to(torch.float64, copy=True))

    def add_(self, values: Tensor) -> None:
        """Add at most `length` numbers of a flat float64 tensor, which is overwritten."""
        if not len(values):
            return
        highest = float(values.amax())
        lowest = float(values.amin())
        largest = max(highest, -lowest)
        if not largest < _LIMIT:  # also for NaN
            largest = self._set_aside(values)
        if largest > 0:
            self._take_digits(values, _digit_of(largest))

    def _set_aside(self, values: Tensor) -> float:
        """Add the numbers that are not finite to `_infinite`, put zeros in their places, and return
        the largest magnitude that is left."""
        finite = values.abs() < _LIMIT
        infinite = values[~finite].mul(math.inf)  # numbers from _LIMIT on too; a NaN stays one
        self._infinite += float(infinite.sum())
        values.masked_fill_(~finite, 0.0)
        return float(values.abs().amax())

    def _take_digits(self, remainder: Tensor, digit: int) -> None:
        """Add `remainder` [n] to the sum digit by digit, from number `digit` downwards, until
        nothing of it is left. It is overwritten."""
        digits = self._digits[: len(remainder)]
        while True:
            position = _DIGIT_BITS * digit
            # Numbers of this size are multiples of the digit's unit: adding one rounds to the
            # nearest multiple, and taking it away leaves the multiple.
            rounder = math.ldexp(1.5, position + _LOWEST + 52)
            torch.add(remainder, rounder, out=digits)
            digits.sub_(rounder)
            remainder.sub_(digits)
            for block_sum in _block_sums(digits):
                units_of_digit = _in_units(block_sum, position)
                self._units += units_of_digit << position
            if digit == 0 or not int(remainder.count_nonzero()):
                return
            digit -= 1

    def numbers(self) -> Tensor:
        """Return the sum as float64 [LENGTH], to be summed over ranks in any order."""
        limbs: list[float] = []
        units = self._units
        lowest_limb = (1 << _LIMB_BITS) - 1  # mask of its bits
        for _ in range(_NUM_LIMBS - 1):
            limbs.append(float(units & lowest_limb))
            units >>= _LIMB_BITS
        # the highest limb has the sign
        limbs.append(float(units))
        numbers = torch.tensor([*limbs, self._infinite], dtype=torch.float64)
        return numbers.to(self.device)


def total(numbers: Tensor) -> float:
    """Return the sum from its `numbers`, added over all ranks: the exact sum, rounded once. The
    host waits for it.

    It is inf or NaN if a number is, or if it is too large for float64.
    """
    *limbs, infinite = numbers.tolist()
    if infinite:
        return infinite
    units = 0
    for index, limb in enumerate(limbs):  # a sum over ranks may exceed the bits of a limb
        units += int(limb) << (_LIMB_BITS * index)
    try:
        return units / (1 << -_LOWEST)  # a quotient of integers is rounded once
    except OverflowError:
        return math.copysign(math.inf, units)


def exact_total(values: Tensor, axis: Axis) -> Tensor:
    """Return the exact sum of the numbers of each rank, rounded once: float64 []. Collective over
    `axis`."""
    local = ExactSum(values.device)
    local.add(values)
    numbers = axis.sum_(local.numbers())
    rounded = total(numbers)
    return torch.full((), rounded, dtype=torch.float64, device=values.device)


def _digit_of(largest: float) -> int:
    """Return the lowest digit that can hold numbers of this size."""
    _, exponent = math.frexp(largest)
    highest_bit = exponent - _LOWEST  # of the number, counted from the lowest unit
    num_digits = -(-highest_bit // _DIGIT_BITS)  # rounded up
    return max(0, num_digits - 1)


def _block_sums(digits: Tensor) -> list[float]:
    """Return the sums of the blocks of a flat tensor."""
    if len(digits) <= BLOCK:
        return [float(digits.sum())]
    end = len(digits) // BLOCK * BLOCK  # of the full blocks
    full_blocks = digits[:end].view(-1, BLOCK)
    full_sums = full_blocks.sum(1)
    last_block = digits[end:]
    last_sum = float(last_block.sum())
    return [*full_sums.tolist(), last_sum]


def _in_units(block_sum: float, position: int) -> int:
    """Return a sum of multiples of a digit's unit, 2^(position + _LOWEST), as a number of these
    units."""
    exponent = -(position + _LOWEST)
    # in two steps: one factor of 2^exponent could overflow
    half = exponent // 2
    partly_scaled = math.ldexp(block_sum, half)
    return int(math.ldexp(partly_scaled, exponent - half))
