"""The two eight-bit formats, and the rounding to them. NVFP4's codes, of four bits, are numbers of
E4M3 too.

    E4M3   sign, 4 bits of exponent, 3 of mantissa: up to 448, no infinity, one NaN a sign
    E5M2   sign, 5 bits of exponent, 2 of mantissa: up to 57344, with infinity and NaN as in half
           precision

("FP8 Formats for Deep Learning", Micikevicius et al., 2022.) Rounding is to nearest, ties to even,
and subnormals are kept. A finite number beyond the largest becomes the largest: only the scale was
too high, and one large number should not cost a step. A number that was infinite or NaN before
scaling stays non-finite (NaN in E4M3, which has no infinity), so that loss scaling still detects an
overflow. Transformer Engine saturates infinities too, and torch's own cast does one or the other
depending on the release; here both cases are handled before torch casts.
"""

from typing import Literal

import torch
from torch import Tensor

from megaprec.precision.fp8_recipe import FP8Recipe

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

Role = Literal["input", "weight", "gradient"]


def format_of(recipe: FP8Recipe, role: Role) -> torch.dtype:
    """Return the format of a factor of a linear layer's products: input, weight or gradient of the
    output."""
    if recipe.scales.four_bits:
        return E4M3
    return E5M2 if role == "gradient" and recipe.format == "hybrid" else E4M3


def limit(dtype: torch.dtype) -> float:
    """Return the largest finite number of a format."""
    return torch.finfo(dtype).max


def cast(values: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """Return values * scale, rounded to `dtype` from FP32.

    values: fp32, bf16 or fp16. scale: finite, float32, of a shape that broadcasts; None is 1.
    """
    wide = values.float()
    scaled = wide if scale is None else wide * scale
    # finite numbers first; infinities are put back, and NaN passes through clamp
    saturated = scaled.clamp(-limit(dtype), limit(dtype))
    infinite = wide if dtype == E5M2 else torch.nan  # E4M3 has no infinity
    return torch.where(values.isinf(), infinite, saturated).to(dtype)
