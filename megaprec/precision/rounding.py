"""FP32 numbers in 16 bits, for weights and moments that are kept so.

A bfloat16 is the upper half of a float32, so what rounding takes away is 16 bits that can be kept beside it or
drawn for:

    split       the weight and the 16 bits it lacks: together the FP32 number, bit for bit. The weight is rounded to
                nearest; a tie (one number in 65,536) goes away from zero, where torch goes to the even neighbour,
                for the remainder has no bit left to say which way a tie went. Of a NaN only that it is one is kept
    stochastic  rounded up with a probability equal to the part lost, so that the mean is exact. Small updates then
                add up, where rounding to nearest would lose each one: a BF16 average with a decay of 0.999 stands
                still, and so does a BF16 weight that is its own master. Beyond the largest finite bfloat16 the upper
                neighbour is inf, as it is for rounding to nearest
"""

import torch
from torch import Tensor

_LOW = 0xFFFF


def split(wide: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """FP32 [n] into bfloat16 weight [n] and int16 remainder [n]."""
    # One NaN for all: the upper half of others would round to inf, or past the sign to zero.
    bits = wide.nan_to_num(torch.nan, torch.inf, -torch.inf).view(torch.int32)
    weight.view(torch.int16).copy_(_upper(bits + 0x8000))
    remainder.copy_(bits)  # the lower 16 bits: narrowing integers wraps


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The FP32 number [n] that `split` was given."""
    low = remainder.to(torch.int32)
    upper = weight.view(torch.int16).to(torch.int32) << 16
    # A remainder read as negative had its highest bit set, so the weight was rounded up: the sum takes that back.
    return (upper + low).view(torch.float32)


def stochastic(wide: Tensor, bits: Tensor) -> Tensor:
    """FP32 [n] rounded to bfloat16 by random int64 `bits` [n], of which the lowest 16 are used."""
    raised = wide.view(torch.int32) + (bits & _LOW).to(torch.int32)
    rounded = _upper(raised).view(torch.bfloat16)
    return torch.where(wide.isfinite(), rounded, wide.bfloat16())


def _upper(bits: Tensor) -> Tensor:
    return (bits >> 16).to(torch.int16)
