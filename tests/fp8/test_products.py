"""Quantised matrices and their products, by torch's kernels and emulated, against float64."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megaprec.fp8 import kernels
from megaprec.fp8.eligibility import misfit
from megaprec.fp8.formats import E4M3, E5M2
from megaprec.fp8.kernels import pad_to_multiples, swizzle_scales
from megaprec.fp8.matmul import (
    KERNELS,
    PRODUCTS,
    SLOW,
    add_product_,
    choose_kernel,
    describe_kernels,
    emulated,
    multiply,
)
from megaprec.fp8.quantize import Codes, amax_of, block_of, counts_lost, quantize, quantize_both
from megaprec.leaf_calls import uncompiled
from megaprec.precision.fp8_recipe import EIGHT_BIT_KINDS, FP8Recipe, Kind
from tests.launches import Counting
from tests.work import operators_of

SHAPES = [(48, 64, 32), (40, 272, 136), (7, 13, 5), (1, 300, 1)]  # m, k, n
CPU = torch.device("cpu")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU's kernels are tried as those of other devices are."""
    monkeypatch.delitem(SLOW, "cpu")
    choose_kernel.cache_clear()
    yield
    choose_kernel.cache_clear()


def matrix(m: int, k: int, seed: int = 0) -> Tensor:
    """Rows and columns of different sizes, so that each block has a scale of its own."""
    made = torch.Generator().manual_seed(seed)
    sizes = [torch.randn(n, generator=made).mul(2).exp() for n in (m, k)]
    return torch.randn(m, k, generator=made) * sizes[0][:, None] * sizes[1]


def factors(recipe: FP8Recipe, m: int, k: int, n: int) -> dict[str, tuple[Codes, Codes]]:
    """The codes of each of a layer's three products, x [m, k], weight [n, k], gradient [m, n]."""
    made: dict[str, tuple[Codes, Codes]] = {}
    for i, (role, shape) in enumerate(
        {"input": (m, k), "weight": (n, k), "gradient": (m, n)}.items()
    ):
        wide = matrix(*shape, seed=i)
        scale = 100 / wide.abs().max() if recipe.kind == "delayed" else None
        made[role] = quantize_both(wide, recipe, role, scale)  # pyright: ignore[reportArgumentType]
    (x, x_t), (w, w_t), (g, g_t) = made["input"], made["weight"], made["gradient"]
    return {"forward": (x, w), "input gradient": (g, w_t), "weight gradient": (g_t, x_t)}


def bound(a: Codes, b: Codes) -> Tensor:
    """Of the error of a sum in FP32, in any order, and of a few roundings of its terms or of the
    sum."""
    k = a.values.shape[1]
    return (k + 4) * 2.0**-24 * (a.wide().double().abs() @ b.wide().double().abs().t()) + 1e-40


@pytest.mark.parametrize("kind", EIGHT_BIT_KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_the_numbers_that_the_codes_stand_for(
    kind: Kind, shape: tuple[int, int, int]
) -> None:
    for name, (a, b) in factors(FP8Recipe(kind), *shape).items():
        told = a.wide().double() @ b.wide().double().t()
        for made in (emulated(a, b, torch.float32), multiply(a, b, torch.float32)):
            assert ((made.double() - told).abs() <= bound(a, b)).all(), name


@pytest.mark.parametrize("kind", ["delayed", "current", "rowwise"])
@pytest.mark.parametrize("form", ["hybrid", "e4m3"])
def test_scaled_mm_and_emulation_agree_forward_and_in_both_gradients(
    kind: Kind, form: Any, tried: None
) -> None:
    candidates = KERNELS["rowwise" if kind == "rowwise" else "current"]
    for shape in SHAPES:
        for name, (a, b) in factors(FP8Recipe(kind, form), *shape).items():
            assert a.values.dtype == (E5M2 if form == "hybrid" and name != "forward" else E4M3)
            right = emulated(a, b, torch.float32)
            for kernel in candidates:
                if (
                    kernel is kernels.rowwise
                    and choose_kernel("rowwise", E4M3, False, torch.float32, CPU)[0] is not kernel
                ):
                    # torch's CPU kernel of this kind came after the one for whole matrices
                    continue
                made = kernel(a, b, torch.float32, False)
                assert ((made - right).abs() <= 2 * bound(a, b)).all(), (name, kernel.__name__)
                half = kernel(a, b, torch.bfloat16, False)
                assert half.dtype == torch.bfloat16
                torch.testing.assert_close(
                    half.float(), right, rtol=2.0**-8, atol=float(2 * bound(a, b).max())
                )


@pytest.mark.parametrize("kind", ["delayed", "current"])
@pytest.mark.parametrize("total_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_first_gradient_of_a_step_is_written_by_the_product_itself(
    kind: Kind, total_dtype: torch.dtype, tried: None
) -> None:
    """With the bits of a product that is copied, and no copy. A shape that the kernel would have to
    pad takes a copy."""
    for shape in SHAPES:
        a, b = factors(FP8Recipe(kind), *shape)["weight gradient"]
        expected = multiply(a, b, total_dtype)
        total = torch.full_like(expected, torch.nan)
        used = operators_of(lambda a=a, b=b, total=total: add_product_(total, a, b, first=True))
        assert torch.equal(total, expected)
        n, k = b.values.shape
        has_copy = any("copy_" in name for name in used)
        assert has_copy == bool(n % 16 or k % 16)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scales_of_rows_are_applied_within_the_addition(shape: tuple[int, int, int]) -> None:
    a, b = factors(FP8Recipe("rowwise"), *shape)["weight gradient"]
    right = emulated(a, b, torch.float32)
    near = 3 * bound(a, b)
    total = torch.full_like(right, torch.nan)
    kernels.add_unscaled_rowwise_(total, a, b, first=True)
    assert ((total - right).abs() <= near).all()
    before = torch.randn_like(total) * right.abs().max()
    total.copy_(before)
    kernels.add_unscaled_rowwise_(total, a, b, first=False)
    rounding = 2.0**-22 * (before.abs() + right.abs())
    assert ((total - (before + right)).abs() <= near + rounding).all()


def bytes_of_gradient(kind: Kind, first: bool) -> float:
    """Bytes a weight beside the product that writes or reads FP32 of its own."""
    made = factors(FP8Recipe(kind), 64, 256, 512)["weight gradient"]
    # as a GPU's casts write them
    a, b = (Codes(codes.values.contiguous(), codes.inverse, codes.block) for codes in made)
    total = torch.zeros(len(a.values), len(b.values))
    add_product_(total, a, b, first=first)  # the kernel is chosen
    counting = Counting()
    with counting:
        add_product_(total, a, b, first=first)
    assert counting.cost is not None
    return counting.cost.bytes / total.numel()


def test_a_weight_gradient_moves_few_bytes_beside_its_product(
    monkeypatch: pytest.MonkeyPatch, tried: None
) -> None:
    """Of scales of rows 24 bytes a weight for the first micro-batch of a step and 28 for others,
    where both scales and the sum are a pass each."""
    monkeypatch.setitem(KERNELS, "rowwise", (kernels.unscaled_rowwise,))
    small = 0.1  # scales, and their copies
    assert bytes_of_gradient("current", first=True) == 0
    assert bytes_of_gradient("current", first=False) == 12
    assert bytes_of_gradient("rowwise", first=True) <= 16 + small
    assert bytes_of_gradient("rowwise", first=False) <= 20 + small


def ways_of(kind: Kind, out: torch.dtype = torch.bfloat16) -> dict[str, str]:
    return describe_kernels(FP8Recipe(kind), CPU, out, torch.float32)


def test_on_a_cpu_all_products_are_emulated_and_the_reason_is_told() -> None:
    for kind in KERNELS:
        for out in (torch.bfloat16, torch.float16, torch.float32):
            assert ways_of(kind, out) == dict.fromkeys(PRODUCTS, f"emulated in FP32: {SLOW['cpu']}")


def test_where_kernels_are_tried_those_that_torch_has_are_used_and_it_is_quoted_on_the_others(
    tried: None,
) -> None:
    assert all(said.endswith("rowwise kernel") for said in ways_of("rowwise").values())
    for kind in ("blockwise", "mx"):
        assert all(
            said.startswith("emulated in FP32: torch says ") for said in ways_of(kind).values()
        )


def test_a_product_on_a_cpu_is_one_product_in_fp32() -> None:
    """Kernels of torch for FP8 on CPUs take as long, or a thousand times as long."""
    for kind in EIGHT_BIT_KINDS:
        for a, b in factors(FP8Recipe(kind), 256, 256, 256).values():
            multiply(a, b, torch.bfloat16)  # the kernel is chosen
            used = operators_of(lambda a=a, b=b: multiply(a, b, torch.bfloat16))
            assert [name for name in used if "mm" in name] == ["aten.mm"]


def test_what_a_kernel_refuses_is_told_by_product(
    monkeypatch: pytest.MonkeyPatch, tried: None
) -> None:
    def no_fp32(a: Codes, b: Codes, out: torch.dtype, fast: bool) -> Tensor:
        if out == torch.float32:
            raise RuntimeError("only bfloat16. At line 7 of\nsome file")
        return emulated(a, b, out)

    monkeypatch.setitem(KERNELS, "rowwise", (no_fp32,))
    refused = 'emulated in FP32: torch says "only bfloat16"'
    made = "no_fp32 kernel"
    assert ways_of("rowwise") == {
        "forward": made,
        "input gradient": made,
        "weight gradient": refused,
    }


def test_a_kernel_that_errs_is_not_used(monkeypatch: pytest.MonkeyPatch, tried: None) -> None:
    def swapped(a: Codes, b: Codes, out: torch.dtype, fast: bool) -> Tensor:
        return emulated(a, Codes(b.values, b.inverse.flip(0), b.block), out)

    monkeypatch.setitem(KERNELS, "rowwise", (swapped,))
    said = ways_of("rowwise", torch.float16)["forward"]
    assert said.startswith("emulated in FP32: its swapped kernel is wrong by")
    a, b = factors(FP8Recipe("rowwise"), 16, 32, 16)["forward"]
    assert torch.equal(multiply(a, b, torch.float16), emulated(a, b, torch.float16))


def test_no_generator_is_drawn_from_to_try_kernels(tried: None) -> None:
    before = torch.get_rng_state()
    ways_of("rowwise")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", EIGHT_BIT_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_number_is_off_by_at_most_half_a_step_of_its_block(
    kind: Kind, dtype: torch.dtype
) -> None:
    """E4M3: 2**-4 of a normal number; below, half the smallest subnormal, 2**-10 of the scale."""
    x = torch.randn(48, 160, generator=torch.Generator().manual_seed(3)).mul(8).to(dtype)
    scale = 448 / x.float().abs().max() if kind == "delayed" else None
    over_last, over_first = quantize_both(x, FP8Recipe(kind), "input", scale)
    for codes, wide in ((over_last, x.double()), (over_first, x.double().t())):
        assert codes.values.shape == wide.shape
        smallest = codes.inverse.double().max() * 2.0**-10
        assert (
            (codes.wide().double() - wide).abs()
            <= (wide.abs() * 2.0**-4).clamp(min=smallest) * (1 + 1e-6)
        ).all()
        assert counts_lost(wide, codes)[0] == 0


@pytest.mark.parametrize("kind", ["current", "rowwise", "blockwise", "mx"])
@pytest.mark.parametrize("role", ["input", "weight", "gradient"])
@pytest.mark.parametrize("form", ["hybrid", "e4m3"])
def test_every_block_has_the_scale_of_its_own_amax(kind: Kind, role: Any, form: Any) -> None:
    recipe = FP8Recipe(kind, form)
    x = matrix(150, 300)
    codes = quantize(x, recipe, role)
    rows, columns = block_of(recipe, role, x.shape)
    most = 57344.0 if role == "gradient" and form == "hybrid" else 448.0
    for i in range(0, 150, rows):
        for j in range(0, 300, columns):
            asked = x[i : i + rows, j : j + columns].abs().max().item() / most
            got = codes.inverse.float()[i // rows, j // columns].item()
            if kind == "mx":
                assert asked <= got < 2 * asked, "a power of two, rounded up"
                assert torch.tensor(got).frexp().mantissa == 0.5
            else:
                assert got == pytest.approx(asked, rel=1e-6)


def test_blocks_are_those_of_the_recipes() -> None:
    shape = torch.Size([256, 384])
    told = {
        kind: [block_of(FP8Recipe(kind), role, shape) for role in ("input", "weight", "gradient")]
        for kind in EIGHT_BIT_KINDS
    }
    assert told == {
        "delayed": [(256, 384)] * 3,
        "current": [(256, 384)] * 3,
        "rowwise": [(1, 384)] * 3,
        "blockwise": [(1, 128), (128, 128), (1, 128)],
        "mx": [(1, 32)] * 3,
    }


@pytest.mark.parametrize("kind", ["rowwise", "blockwise", "mx"])
def test_the_two_directions_are_rounded_separately_from_the_wide_numbers(kind: Kind) -> None:
    x = matrix(256, 256)
    over_last, over_first = quantize_both(x, FP8Recipe(kind), "input")
    assert not torch.equal(over_first.wide(), over_last.wide().t())
    alone = quantize(x.t().contiguous(), FP8Recipe(kind), "input")
    assert torch.equal(over_first.wide(), alone.wide())


@pytest.mark.parametrize(
    ("kind", "role"), [("delayed", "input"), ("current", "gradient"), ("blockwise", "weight")]
)
def test_one_set_of_codes_serves_both_directions(kind: Kind, role: Any) -> None:
    x = matrix(256, 384)
    over_last, over_first = quantize_both(
        x, FP8Recipe(kind), role, torch.tensor(0.01) if kind == "delayed" else None
    )
    assert torch.equal(over_first.wide(), over_last.wide().t())


def as_compiled(leaf: Any, *arguments: Any, otherwise: Any = None) -> Any:
    """The form of a leaf that torch's compiler gets."""
    return leaf(*arguments)


@pytest.mark.parametrize("odd", [0.0, 3e4, torch.inf, -torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("leaves", [uncompiled, as_compiled])
def test_a_delayed_cast_that_notes_the_amax_has_the_codes_of_one_that_does_not(
    leaves: Any, dtype: torch.dtype, odd: float
) -> None:
    x = matrix(48, 80).to(dtype)
    x[5, 7] = odd
    cast = partial(quantize_both, x, FP8Recipe("delayed"), "input", torch.tensor(3.0))
    amaxes: list[Tensor] = []
    made = cast(leaves=leaves, note_amax=amaxes.append)
    for one, other in zip(made, cast(), strict=True):
        assert torch.equal(one.values.view(torch.uint8), other.values.view(torch.uint8))
        assert torch.equal(one.inverse, other.inverse) and one.block == other.block
    (amax,) = amaxes
    assert amax.dtype == torch.float32
    torch.testing.assert_close(amax, amax_of(x), rtol=0, atol=0, equal_nan=True)


def test_an_empty_matrix_has_the_amax_zero() -> None:
    amaxes: list[Tensor] = []
    for shape in ((0, 64), (16, 0)):
        scale = torch.ones(())
        quantize_both(
            torch.ones(shape), FP8Recipe("delayed"), "input", scale, note_amax=amaxes.append
        )
    assert [amax.item() for amax in amaxes] == [0.0, 0.0]


def test_ranks_that_hold_parts_of_a_tensor_round_it_as_one_would() -> None:
    x = matrix(64, 64)
    recipe = FP8Recipe("current")
    whole = quantize(x, recipe, "input")
    amax = x.abs().max()

    def agree(now: Tensor) -> None:
        torch.maximum(now, amax, out=now)

    for part in x.chunk(4, dim=1):
        mine = quantize(part, recipe, "input", reduce_max=agree)
        assert torch.equal(mine.inverse, whole.inverse)
    local = [quantize(part, recipe, "input").inverse for part in x.chunk(4, dim=1)]
    assert not all(torch.equal(inverse, whole.inverse) for inverse in local)


@pytest.mark.parametrize("kind", EIGHT_BIT_KINDS)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("role", ["input", "gradient"])
def test_an_overflow_reaches_the_product(kind: Kind, bad: float, role: Any) -> None:
    x = torch.ones(64, 64)
    x[3, 5] = bad
    scale = torch.tensor(2.0) if kind == "delayed" else None
    recipe = FP8Recipe(kind)
    codes = quantize(x, recipe, role, scale)
    other = quantize(torch.ones(32, 64), recipe, "weight", scale)
    for made in (multiply(codes, other, torch.float32), emulated(codes, other, torch.float32)):
        assert not made[3].isfinite().any()
        assert made[0].isfinite().all()


def test_zeros_and_empty_matrices_are_quantised_without_a_fuss() -> None:
    for kind in ("current", "rowwise", "blockwise", "mx"):
        assert (quantize(torch.zeros(64, 64), FP8Recipe(kind), "input").wide() == 0).all()
        empty, other = (quantize_both(torch.ones(m, 64), FP8Recipe(kind), "input") for m in (0, 16))
        assert multiply(empty[0], other[0], torch.float32).shape == (0, 16)
        assert torch.equal(multiply(empty[1], empty[1], torch.float32), torch.zeros(64, 64)), (
            "a sum of nothing"
        )
    assert amax_of(torch.zeros(0, 8)).tolist() == [[0.0]]


def test_the_amax_of_a_matrix_is_its_largest_magnitude_or_nan() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert amax_of(torch.tensor([[1.0, -3.0], [2.0, 0.5]], dtype=dtype)).tolist() == [[3.0]]
        assert (
            amax_of(torch.tensor([[1.0, torch.nan], [torch.inf, 0.5]], dtype=dtype)).isnan().all()
        )
        assert amax_of(torch.tensor([[1.0, -torch.inf]], dtype=dtype)).tolist() == [[torch.inf]]


def test_gradients_are_added_in_fp32() -> None:
    a, b = factors(FP8Recipe("current"), 64, 32, 48)["weight gradient"]
    total = torch.full((48, 32), 3.0)
    add_product_(total, a, b)
    told = 3 + a.wide().double() @ b.wide().double().t()
    assert ((total.double() - told).abs() <= bound(a, b) + 2.0**-23 * told.abs()).all()
    assert not torch.equal(total, 3 + multiply(a, b, torch.bfloat16).float()), (
        "the product was rounded to BF16"
    )


def test_what_codes_do_not_show_is_counted() -> None:
    codes = quantize(
        torch.tensor([[1.0, 500.0, 0.0, 460.0, -470.0, 2.0**-12]]),
        FP8Recipe(),
        "input",
        torch.ones(()),
    )
    x = torch.tensor([[1.0, 500.0, 0.0, 460.0, -470.0, 2.0**-12]])
    assert counts_lost(x, codes).tolist() == [2, 6, 1, 5], "460 becomes 448 by rounding; 0 is shown"


@pytest.mark.parametrize("kind", ["blockwise", "mx"])
def test_filling_up_with_zeros_changes_no_number(kind: Kind) -> None:
    for role in ("input", "weight"):
        codes = quantize(matrix(150, 300), FP8Recipe(kind), role)
        more = pad_to_multiples(codes, 128, 512)
        assert more.values.shape == (256, 512)
        assert more.inverse.shape == (-(-256 // codes.block[0]), 512 // codes.block[1])
        assert torch.equal(more.wide()[:150, :300], codes.wide())
        assert more.wide().count_nonzero() == codes.wide().count_nonzero()


def test_mx_scales_lie_in_the_order_that_cublas_documents() -> None:
    scales = torch.arange(256 * 8).remainder(251).to(torch.uint8).view(256, 8)
    flat = swizzle_scales(scales.view(torch.float8_e8m0fnu)).view(torch.uint8).flatten()
    for row in (0, 1, 31, 32, 100, 127, 128, 255):
        for column in range(8):
            tile = (row // 128) * 2 + column // 4
            place = tile * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + column % 4
            assert flat[place] == scales[row, column]


@pytest.mark.parametrize(
    ("kind", "shape", "said"),
    [
        ("delayed", (8, 16), ""),
        ("delayed", (12, 64), "12 outputs (dim 0) are no multiple of 8"),
        ("current", (64, 24), "24 inputs (dim 1) are no multiple of 16"),
        (
            "rowwise",
            (9, 9),
            "9 outputs (dim 0) are no multiple of 8 and 9 inputs (dim 1) are no multiple of 16",
        ),
        ("blockwise", (1376, 512), "1376 outputs (dim 0) are no multiple of 128"),
        ("mx", (96, 48), "48 inputs (dim 1) are no multiple of 32"),
    ],
)
def test_weights_that_do_not_suit_are_told_by_dim(
    kind: Kind, shape: tuple[int, int], said: str
) -> None:
    assert misfit(kind, *shape) == said


def test_transposed_codes_are_a_view_on_a_cpu_and_run_along_rows_on_a_gpu() -> None:
    for device in ("cpu", "meta"):  # the latter stands for a GPU
        codes = torch.empty(4, 8, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.ones(1, 1, device=device)
        turned = Codes(codes, scales, (4, 8)).t()
        assert turned.block == (8, 4)
        assert turned.values.shape == (8, 4)
        assert turned.values.is_contiguous() == (device == "meta")
