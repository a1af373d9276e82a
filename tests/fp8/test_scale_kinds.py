"""A kind of FP8 scales is its row, and its kernels where devices have some: all that tells kinds apart
reads the row."""

from collections.abc import Iterator, Mapping
from typing import Any, cast, get_args

import pytest
import torch

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Part
from megaprec.fp8.eligibility import eligibility
from megaprec.fp8.matmul import KERNELS, _kind_of, choose_kernel, describe_kernels, multiply
from megaprec.fp8.nvfp4 import nvfp4_casts
from megaprec.fp8.params import FP8Param
from megaprec.fp8.quantize import quantize
from megaprec.fp8.state import FP8State
from megaprec.precision.fp8_recipe import ALL, SCALE_KINDS, FP8Recipe, Kind, ScaleKind
from tests.fp8.test_products import bound, factors
from tools.config.key_help import key_tables

MADE_UP: Mapping[str, ScaleKind] = {
    "squares": ScaleKind("one per square of 64", (64, 64), (64, 64), (64, 64)),
    "halves": ScaleKind("one per 64 in a row", (1, 64), (64, 64), (64, 64), usual_format="e4m3"),
    "columns": ScaleKind("one per column", (ALL, 1), (ALL, 1), (8, 16)),
    "mx16": ScaleKind("one power of two per 16", (1, 16), (1, 16), (16, 16), power_2=True),
}


@pytest.fixture(params=MADE_UP)
def made_up(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FP8Recipe]:
    """A recipe of a kind that has a row, and nothing else anywhere."""
    kind = cast(Kind, request.param)
    monkeypatch.setitem(cast(dict[str, Any], SCALE_KINDS), kind, MADE_UP[kind])
    recipe = FP8Recipe("current")
    object.__setattr__(recipe, "kind", kind)  # its name is in no annotation
    object.__setattr__(recipe, "format", MADE_UP[kind].usual_format)
    choose_kernel.cache_clear()
    yield recipe
    choose_kernel.cache_clear()


def test_every_kind_has_a_row_and_kernels_are_of_kinds() -> None:
    kinds = {*get_args(Kind)}
    assert SCALE_KINDS.keys() == kinds
    assert kinds >= KERNELS.keys()


def test_the_help_says_the_scales_of_every_kind() -> None:
    (said,) = (key.help for table in key_tables() for key in table.keys if key.name == "fp8.kind")
    assert [kind for kind, row in SCALE_KINDS.items() if f"{kind}: {row.said}" not in said] == []


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


def test_a_kind_without_kernels_is_multiplied_everywhere(made_up: FP8Recipe) -> None:
    for a, b in factors(made_up, 128, 256, 192).values():
        assert _kind_of(a, b) == made_up.kind
        product = multiply(a, b, torch.float32).double()
        expected = a.wide().double() @ b.wide().double().t()
        assert ((product - expected).abs() <= bound(a, b)).all()
    for device in ("cpu", "meta"):
        said = describe_kernels(made_up, torch.device(device), torch.bfloat16, torch.float32)
        assert all(f"there is no kernel for {made_up.kind} here" in how for how in said.values())


def test_weights_that_are_stored_in_codes_have_the_scales_of_their_blocks(
    made_up: FP8Recipe,
) -> None:
    state = FP8State(made_up, 1, Axis("tp"))
    part = Part.cut("layers.0.mlp.up.weight", (128, 256), 0, Axis("tp"))
    param = FP8Param(state, eligibility(made_up, [part], 1))
    assert param.in_blocks
    assert (
        param.inverse.numel() == quantize(torch.ones(128, 256), made_up, "weight").inverse.numel()
    )
