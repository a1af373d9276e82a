"""A kind of FP8 scales is known wherever kinds are told apart."""

from typing import get_args

import pytest
import torch

from megaprec.fp8.matmul import KERNELS, _kind_of
from megaprec.fp8.nvfp4 import nvfp4_casts
from megaprec.fp8.quantize import quantize
from megaprec.precision.fp8_recipe import SCALE_KINDS, FP8Recipe, Kind
from tools.analysis.planning.seconds.products import FP8_SPEED


def test_every_kind_has_a_row_kernels_and_a_speed() -> None:
    kinds = {*get_args(Kind)}
    assert SCALE_KINDS.keys() == kinds
    # kernels see delayed scales as current ones
    assert KERNELS.keys() | {"delayed"} == kinds
    assert FP8_SPEED.keys() == {kind for kind in kinds if not SCALE_KINDS[kind].four_bits}


@pytest.mark.parametrize("kind", SCALE_KINDS)
def test_kernels_see_the_kind_of_scales_that_codes_have(kind: Kind) -> None:
    x = torch.randn(256, 256)
    if SCALE_KINDS[kind].four_bits:
        a, b = nvfp4_casts(x, "input")[0], nvfp4_casts(x, "weight")[0]
    else:
        scale = torch.ones(()) if SCALE_KINDS[kind].keeps_history else None
        recipe = FP8Recipe(kind)
        a, b = quantize(x, recipe, "input", scale), quantize(x, recipe, "weight", scale)
    # kernels see delayed scales as current ones
    assert _kind_of(a, b) == ("current" if kind == "delayed" else kind)
