"""Scales from largest magnitudes: how far numbers are moved up before they are rounded to eight bits.

    scale = largest number of the format / 2**margin / amax          (Transformer Engine's formula)

so that the largest number of a tensor lands on the largest of its format, 2**margin below it if room is to be left.
Of an amax that says nothing (0, inf or NaN) no scale is made: the one before is kept. One so small that its scale would
be infinite gets the largest finite scale. All of this is tensor arithmetic: no number is read by the host.
"""

import torch
from torch import Tensor

_EXPONENT, _MANTISSA = 0x7F80_0000, 0x007F_FFFF
_LARGEST, _SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


def scale_of(amax: Tensor, limit: float | Tensor, before: float | Tensor = 1.0, power_2: bool = False) -> Tensor:
    """The scale for numbers up to `amax` (float32 of any shape), which come to lie within `limit`.

    before: kept where amax is 0, inf or NaN. power_2: rounded down to a power of two.
    """
    scale = (_as_tensor(limit, amax) / amax).clamp(max=_LARGEST)
    if power_2:
        scale = _down_to_power_2(scale)
    return torch.where((amax > 0) & amax.isfinite(), scale, before)


def mx_inverse(amax: Tensor, limit: float) -> Tensor:
    """The factor, a power of two of dtype float8_e8m0fnu, that undoes an MX block's scale: amax / limit rounded up.

    Rounding up is Transformer Engine's and NVIDIA's choice, with which no number saturates; the OCP specification
    (v1.0, 6.3) takes floor(log2(amax)) less the format's largest exponent, which may. 0 gives the smallest power, inf
    the largest, NaN gives NaN.
    """
    bits = (amax / _as_tensor(limit, amax)).view(torch.int32)
    exponent, mantissa = (bits & _EXPONENT) >> 23, bits & _MANTISSA
    halfway = torch.where(exponent == 0, 0x40_0000, 0)  # E8M0's smallest, 2**-127, is a subnormal of float32
    code = (exponent + (mantissa > halfway)).clamp(max=254)
    return torch.where(amax.isnan(), 255, code).to(torch.uint8).view(torch.float8_e8m0fnu)


def _as_tensor(limit: float | Tensor, like: Tensor) -> Tensor:
    """Of a quotient with a number torch makes a product with a reciprocal, which is rounded twice."""
    return limit if isinstance(limit, Tensor) else like.new_full((), limit)


def _down_to_power_2(scale: Tensor) -> Tensor:
    return (scale.clamp(min=_SMALLEST).view(torch.int32) & _EXPONENT).view(torch.float32)
