"""A kind of FP8 scales is known wherever kinds are told apart."""

from typing import get_args

from megaprec.fp8.matmul import KERNELS
from megaprec.precision.fp8_recipe import SCALE_KINDS, Kind
from tools.analysis.planning.seconds.products import FP8_SPEED


def test_every_kind_has_a_row_kernels_and_a_speed() -> None:
    kinds = {*get_args(Kind)}
    assert SCALE_KINDS.keys() == kinds
    # kernels see delayed scales as current ones
    assert KERNELS.keys() | {"delayed"} == kinds
    assert FP8_SPEED.keys() == {kind for kind in kinds if not SCALE_KINDS[kind].four_bits}
