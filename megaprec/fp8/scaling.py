"""Scales from amaxes: factors that move numbers into the range of a format before they are rounded
to eight bits.

    scale = largest number of the format / 2**margin / amax          (Transformer Engine's formula)

The largest number of a tensor then becomes the largest of its format, or 2**margin below it to
leave room. An amax of 0, inf or NaN gives no scale: the previous one is kept. An amax so small that
its scale would be infinite gets the largest finite scale. All of this is tensor arithmetic: the
host reads no number.
"""

import torch
from torch import Tensor

# bits of float32
_EXPONENT = 0x7F80_0000
_MANTISSA = 0x007F_FFFF
_LARGEST = torch.finfo(torch.float32).max
_SMALLEST = torch.finfo(torch.float32).tiny


def scale_of(
    amax: Tensor,
    limit: float | Tensor,
    previous: float | Tensor = 1.0,
    power_2: bool = False,
) -> Tensor:
    """Return the scale that brings numbers up to `amax` (float32 of any shape) within `limit`.

    previous: kept where amax is 0, inf or NaN. power_2: True to round down to a power of two.
    """
    scale = (_as_tensor(limit, amax) / amax).clamp(max=_LARGEST)
    if power_2:
        scale = _down_to_power_2(scale)
    return torch.where((amax > 0) & amax.isfinite(), scale, previous)


def mx_inverse(amax: Tensor, limit: float) -> Tensor:
    """Return the inverse scale of an MX block, a power of two of dtype float8_e8m0fnu: amax / limit
    rounded up.

    Rounding up is Transformer Engine's and NVIDIA's choice, and no number saturates with it. The
    OCP specification (v1.0, 6.3) takes floor(log2(amax)) less the format's largest exponent, with
    which numbers may saturate. 0 gives the smallest power, inf the largest, NaN gives NaN.
    """
    bits = (amax / _as_tensor(limit, amax)).view(torch.int32)
    exponent = (bits & _EXPONENT) >> 23
    mantissa = bits & _MANTISSA
    # A power of two has mantissa 0. E8M0's smallest number, 2**-127, is a subnormal of float32.
    exact = torch.where(exponent == 0, 0x40_0000, 0)
    rounds_up = mantissa > exact
    code = (exponent + rounds_up).clamp(max=254)  # the largest power
    code = torch.where(amax.isnan(), 255, code)  # 255 is NaN
    return code.to(torch.uint8).view(torch.float8_e8m0fnu)


def _as_tensor(limit: float | Tensor, like: Tensor) -> Tensor:
    """Return `limit` as a tensor: torch's quotients with a number are products with a reciprocal,
    rounded twice."""
    return limit if isinstance(limit, Tensor) else like.new_full((), limit)


def _down_to_power_2(scale: Tensor) -> Tensor:
    """Return the scale without its mantissa. Subnormals, which have no such form, count as the
    smallest normal number."""
    bits = scale.clamp(min=_SMALLEST).view(torch.int32)
    return (bits & _EXPONENT).view(torch.float32)
