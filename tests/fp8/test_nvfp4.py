"""NVFP4 against tables of codes and formulas in NumPy, and what its training may depend on."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Part
from megaprec.fp8 import linear
from megaprec.fp8.eligibility import eligibility
from megaprec.fp8.formats import Role
from megaprec.fp8.matmul import describe_kernels, multiply
from megaprec.fp8.nvfp4 import (
    LARGEST,
    Microbatch,
    Rounding,
    encode,
    nvfp4_casts,
    round_e2m1,
    transform,
)
from megaprec.fp8.quantize import Codes, amax_of, counts_lost
from megaprec.fp8.state import FP8State
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.plan import plan
from models.engine.fp8_shadow import Shadow, run_shadow
from models.estimate.storage import SimulatedAxis
from parallel.activation_checkpoint import Recompute
from parallel.context import Context
from parallel.layers import ColumnParallelLinear, Rows
from tests.dialects.test_modes import distance
from tests.fp8.test_training import EXPERTS, MODEL, run
from tests.layouts import Run, batches, make_engine, share_of, train, train_all
from tests.project.test_readme import ROOT
from tests.refusals import raises
from tools.config.resolved_run import resolve_run
from tools.config.tables.precision_settings import FP8
from tools.journal.shadow_records import alarms

Float32 = NDArray[np.float32]

RECIPE = FP8Recipe("nvfp4")
# by their four bits, without the sign: one bit of mantissa, so that every other code is even
E2M1_CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
# exponents from 1 and subnormals; 1.75 * 2**8 is the largest number, after it comes NaN
E4M3_CODES = np.array(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e, m in product(range(1, 16), range(8))][:-1],
    dtype=np.float32,
)


def nearest(values: Float32, codes: Float32) -> Float32:
    """The nearest of the codes, the even one of two; by a search in the table of them."""
    magnitude = np.abs(values).astype(np.float64)
    upper = np.searchsorted(codes, magnitude).clip(1, len(codes) - 1)
    below = magnitude - codes[upper - 1]
    above = codes[upper] - magnitude
    is_up = (above < below) | ((above == below) & (upper % 2 == 0))
    return np.copysign(codes[np.where(is_up, upper, upper - 1)], values)


def numbers(count: int, seed: int = 0) -> Tensor:
    """Numbers around all codes of E2M1, some beyond the largest, and every tie."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, generator=generator) * 3
    ties = torch.arange(-28, 29) / 4
    return torch.cat([drawn, ties, torch.nextafter(ties, torch.tensor(9.0))])


def require_nearest_codes(count: int) -> None:
    values = numbers(count)
    expected = nearest(values.numpy(), E2M1_CODES)
    assert torch.equal(round_e2m1(values), torch.from_numpy(expected))


def test_codes_are_the_nearest_of_a_table_and_even_ones_in_a_tie() -> None:
    require_nearest_codes(100_000)


@pytest.mark.campaign
def test_ten_million_codes_are_the_nearest_of_a_table() -> None:
    require_nearest_codes(10_000_000)


def encode_in_numpy(x: Float32, height: int) -> tuple[Float32, Float32, np.float32]:
    """Codes, block scales and the scale of the tensor: each operation in float32, block by block,
    as in Transformer Engine's reference."""
    one = np.float32(1)
    tensor_scale = np.float32(448 * 6) / np.abs(x).max()
    sixth = tensor_scale * (one / np.float32(6))
    blocks = x.reshape(x.shape[0] // height, height, x.shape[1] // 16, 16)
    amax = np.abs(blocks).max((1, 3))
    scales = nearest(np.minimum(amax * sixth, np.float32(448)), E4M3_CODES)
    tensor_inverse = one / tensor_scale
    # blocks whose scale is rounded to zero
    with np.errstate(divide="ignore", over="ignore"):
        factors = np.minimum(one / (scales * tensor_inverse), np.finfo(np.float32).max)
        scaled = blocks * factors[:, None, :, None]
    return nearest(scaled.reshape(x.shape), E2M1_CODES), scales, tensor_inverse


def matrix(m: int, k: int, spread: float = 3.0, seed: int = 0) -> Tensor:
    """Blocks of very different sizes, the smallest of which no E4M3 scale holds."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(m, k // 16, generator=generator).mul(spread).exp()
    return torch.randn(m, k, generator=generator) * sizes.repeat_interleave(16, 1)


def require_bits(x: Tensor, height: int) -> None:
    codes = encode(x, amax_of(x), (height, 16))
    values, scales, tensor_inverse = encode_in_numpy(x.numpy(), height)
    assert torch.equal(codes.values.float(), torch.from_numpy(values))
    assert torch.equal(codes.inverse.float(), torch.from_numpy(scales))
    assert codes.tensor is not None and codes.tensor.item() == tensor_inverse


@pytest.mark.parametrize("height", [1, 16])
def test_scales_and_codes_are_bit_for_bit_those_of_another_implementation(height: int) -> None:
    require_bits(matrix(256, 384), height)


@pytest.mark.campaign
@pytest.mark.parametrize("height", [1, 16])
def test_ten_million_codes_with_scales_are_those_of_another_implementation(height: int) -> None:
    for seed in range(10):
        require_bits(matrix(1024, 1024, spread=1.0 + seed, seed=seed), height)


def test_a_weight_has_the_same_codes_in_both_directions_and_other_tensors_have_not() -> None:
    x = matrix(32, 48)
    codes, transposed = nvfp4_casts(x, "weight")
    assert codes.block == (16, 16) and codes.inverse.shape == (2, 3)
    assert torch.equal(codes.wide().t(), transposed.wide())
    codes, transposed = nvfp4_casts(x, "input")
    assert codes.inverse.shape == (32, 3) and transposed.inverse.shape == (48, 2)


def test_the_transform_is_orthogonal_with_the_signs_of_transformer_engine() -> None:
    made = transform(torch.eye(16))
    assert torch.equal(made @ made.t(), torch.eye(16))
    signs = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])
    sylvester = np.array([[(-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)])
    assert torch.equal(made, torch.from_numpy(signs[:, None] * sylvester / 4).float())


@pytest.mark.parametrize("tokens", [32, 21])
def test_the_transform_changes_no_product_over_tokens_nor_do_tokens_that_fill_up(
    tokens: int,
) -> None:
    gradient = matrix(tokens, 32, seed=1)
    x = matrix(tokens, 48, seed=2)
    made = transform(gradient.t()).double() @ transform(x.t()).double().t()
    plain = gradient.double().t() @ x.double()
    bound = 1e-6 * (gradient.double().norm() * x.double().norm())
    assert (made - plain).abs().max() < bound


def rounding(step: int = 0, sample: int = 0, outputs: Sequence[range] = ()) -> Rounding:
    spans = tuple(outputs) or (range(256),)
    return Rounding(7, "layers.0.up.weight", spans, Microbatch(step, torch.tensor(sample)))


def test_stochastic_rounding_takes_one_of_two_neighbours_and_is_right_in_the_mean() -> None:
    """Of each number from its own 65,536 draws, within five standard deviations."""
    values = numbers(20)
    values = values[(values.abs() < LARGEST) & (values % 0.5 != 0)][::4]
    rounds_up = rounding().rows
    draws = 256 * 256
    for value in values.tolist():
        x = torch.full((256, 256), value)
        rounded = round_e2m1(x, rounds_up)
        lower = E2M1_CODES[abs(value) >= E2M1_CODES].max()
        upper = E2M1_CODES[abs(value) <= E2M1_CODES].min()
        assert set(rounded.abs().unique().tolist()) <= {lower, upper}
        part = (abs(value) - lower) / (upper - lower) if upper > lower else 0.0
        deviation = (upper - lower) * math.sqrt(part * (1 - part) / draws)
        assert abs(rounded.double().mean().item() - value) <= 5 * deviation + 1e-12


def test_random_bits_are_those_of_the_logical_element_in_any_slice() -> None:
    """Query, key and value in one weight, cut over two ranks."""
    fractions = torch.rand(48, 96, generator=torch.Generator().manual_seed(0))
    whole = rounding(outputs=[range(96)])
    mine = [range(16, 32), range(48, 64), range(80, 96)]
    columns = torch.cat([torch.arange(span.start, span.stop) for span in mine])
    ours = fractions[:, columns]
    sliced = rounding(outputs=mine)
    assert torch.equal(sliced.rows(ours), whole.rows(fractions)[:, columns])
    assert torch.equal(sliced.columns(ours.t()), whole.columns(fractions.t())[columns])
    others = [rounding(1), rounding(0, 1), replace(rounding(), seed=8)]
    others.append(replace(rounding(), name="layers.1.up.weight"))
    same = [whole.rows(fractions), whole.columns(fractions.t()).t()]
    same += [replace(other, outputs=(range(96),)).rows(fractions) for other in others]
    for number, one in enumerate(same):
        assert not any(torch.equal(one, other) for other in same[:number])


def test_products_are_those_of_the_numbers_that_the_codes_stand_for() -> None:
    a, _ = nvfp4_casts(matrix(24, 64, spread=1.0), "input")
    b, _ = nvfp4_casts(matrix(32, 64, spread=1.0, seed=1), "weight")
    expected = a.wide().double() @ b.wide().double().t()
    bound = 1e-6 * a.wide().double().abs() @ b.wide().double().abs().t()
    assert ((multiply(a, b, torch.float32).double() - expected).abs() <= bound).all()


def test_an_inf_or_nan_reaches_the_product_and_other_blocks_keep_their_numbers() -> None:
    for bad in (torch.inf, -torch.inf, torch.nan):
        x = torch.ones(16, 32)
        x[3, 5] = bad
        codes, transposed = nvfp4_casts(x, "input")
        finite = codes.wide().isfinite()
        assert not finite[3, :16].any() and finite.sum() == x.numel() - 16
        assert not transposed.wide()[5].isfinite().any()


def test_numbers_that_vanish_are_counted_also_where_a_scale_does() -> None:
    x = torch.full((1, 48), 1.0)
    x[0, 1] = 0.01  # below 1 / 24 of the amax of its block
    x[0, 16:32] = 1e-9
    codes = encode(x, amax_of(x), (1, 16))
    saturated, compared, vanished, nonzero = counts_lost(x, codes).tolist()
    assert (saturated, compared, vanished, nonzero) == (0, 48, 17, 48)
    halved = replace(codes, inverse=(codes.inverse.float() / 2).to(codes.inverse.dtype))
    assert counts_lost(x, halved)[0] == 31


# Training

TRAINED = run(RECIPE, steps=2, micro_batch=4)


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_a_layout_trains_as_one_process_does(axes: dict[str, int]) -> None:
    runs = [TRAINED, replace(TRAINED, sequence=True)]
    runs.append(replace(TRAINED, recompute=Recompute(fraction=1.0)))
    single = train(TRAINED)
    wide = train(replace(TRAINED, changes={}))
    for result in train_all(runs, **axes):
        for grads, expected, reference in zip(result.grads, single.grads, wide.grads, strict=True):
            assert distance(expected, reference) > 0.1, "the products are not in NVFP4"
            assert distance(grads, expected) < 1e-5


def losses(one: Run) -> list[float]:
    """Of steps on the same batch, which the model can learn."""
    engine = make_engine(None, one)
    share = share_of(None, batches(one)[0])
    return [engine.step(share, one.lr, n).loss for n in range(one.steps)]


def test_a_small_model_learns_as_it_does_in_bf16() -> None:
    one = run(RECIPE, "bf16", model={**MODEL, "layers": 1}, micro_batch=8, steps=6)
    narrow = losses(one)
    wide = losses(replace(one, changes={}))
    assert wide[0] - wide[-1] > 0.5, "it learns nothing"
    assert narrow[-1] == pytest.approx(wide[-1], rel=0.05)


# Faults that the shadow names

NAME = "layers.1.mlp.down.weight"
Casts = tuple[Codes, Codes]


def shadow() -> Shadow:
    one = run(RECIPE, compute="bf16", micro_batch=8, steps=1)
    engine = make_engine(None, one)
    return run_shadow(engine.passes, share_of(None, batches(one)[0]), 0)


def rounds_to_zero(x: Tensor, casts: Casts) -> Casts:
    codes, transposed = casts
    return replace(codes, values=torch.zeros_like(codes.values)), transposed


def lacks_the_transform(x: Tensor, casts: Casts) -> Casts:
    codes, _ = casts
    return codes, encode(x.t().contiguous(), amax_of(x), (1, 16))


def scales_along_the_other_axis(x: Tensor, casts: Casts) -> Casts:
    codes, transposed = casts
    inverse = encode(transposed.wide().t(), amax_of(x), (1, 16)).inverse
    return codes, replace(transposed, inverse=inverse.reshape(transposed.inverse.shape))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (rounds_to_zero, f"100% of the numbers of {NAME}.gradient vanish"),
        (lacks_the_transform, f"of {NAME} is below"),
        (scales_along_the_other_axis, f"of {NAME} is below"),
    ],
)
def test_the_shadow_names_the_tensor_that_breaks(
    fault: Callable[[Tensor, Casts], Casts], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = linear.nvfp4_casts

    def casts(x: Tensor, role: Role, reduce_max: Any, rounding: Rounding | None) -> Casts:
        made = inner(x, role, reduce_max, rounding)
        return fault(x, made) if rounding and rounding.name == NAME else made

    monkeypatch.setattr(linear, "nvfp4_casts", casts)
    found = alarms(shadow(), FP8(kind="nvfp4"))
    assert any(said in alarm for alarm in found), found


def test_a_healthy_step_alarms_nobody() -> None:
    assert alarms(shadow(), FP8(kind="nvfp4")) == []


# What is refused


@pytest.mark.parametrize(
    ("keys", "code", "fields"),
    [
        (["model.experts=4"], "model.nvfp4_layers", {"key": "experts"}),
        (["model.mtp_layers=1"], "model.nvfp4_layers", {"key": "mtp_layers"}),
        (["parallel.context=2"], "parallel.nvfp4_context", {"size": 2}),
        (["parallel.tensor=4"], "parallel.nvfp4_copies", {"copies": 2}),
        (["fp8.parameters=true"], "fp8.nvfp4_parameters", {}),
        (["fp8.pad=true"], "fp8.nvfp4_pad", {}),
        (["fp8.backend=transformer_engine"], "fp8.backend_kind", {"kind": "nvfp4"}),
        (["train.numerics=canonical", "train.threads=1"], "config.canonical_nvfp4", {}),
    ],
)
def test_what_would_be_other_numbers_is_refused_before_launch(
    keys: list[str], code: str, fields: dict[str, Any]
) -> None:
    with raises(code, **fields):
        resolve_run(ROOT / "examples" / "demo.toml", ["fp8.kind=nvfp4", *keys])


def slice_of(outputs: int, shards: int) -> Part:
    """Return the first slice of a weight [outputs, 32] that is cut into so many."""
    tp = SimulatedAxis("tp", 0, shards)
    return Part.cut("layers.0.mlp.up.weight", (outputs, 32), 0, tp)


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_a_weight_that_does_not_fit_is_wide_in_every_layout(shards: int) -> None:
    """Padded to 128, slices of 127 outputs would fit 8 ranks."""
    assert eligibility(RECIPE, [slice_of(127, shards)], layers=1).fallback_reason


def test_a_weight_of_which_slices_alone_do_not_fit_is_refused() -> None:
    assert not eligibility(RECIPE, [slice_of(48, 1)], layers=1).fallback_reason
    with raises("fp8.nvfp4_slice", name="layers.0.mlp.up.weight", slices=2):
        eligibility(RECIPE, [slice_of(48, 2)], layers=1)


def test_what_would_be_other_numbers_is_refused_in_python() -> None:
    with raises("model.nvfp4_layers", key="experts"):
        make_engine(None, run(RECIPE, model=EXPERTS))
    precision = plan("bf16", fp8=RECIPE)
    weight = partial(ColumnParallelLinear, input_size=32, output=32, name="layers.0.up")
    context = Context(precision, fp8=FP8State(RECIPE, layers=1))
    with raises("parallel.nvfp4_context", size=2):
        weight(replace(context, cp=Axis("cp", 0, 2)))
    with raises("parallel.nvfp4_experts"):
        weight(context.for_experts("layers.0.experts"))
    copied = [Rows("layers.0.key", 32, shards=1)]
    with raises("parallel.nvfp4_copies", copies=2):
        weight(replace(context, tp=Axis("tp", 0, 2)), output=copied)


def test_gradients_of_layers_that_know_no_micro_batch_are_refused() -> None:
    context = Context(plan("bf16", fp8=RECIPE), fp8=FP8State(RECIPE, layers=1))
    layer = ColumnParallelLinear(context, 32, 32, name="layers.0.up")
    with context.fp8.autocast():
        y = layer(torch.ones(16, 1, 32, dtype=torch.bfloat16))
    with raises("fp8.nvfp4_microbatch", name="layers.0.up.weight"):
        y.sum().backward()


def test_each_tensor_that_is_stacked_in_a_weight_must_suit_the_blocks() -> None:
    """A block across two tensors would have other numbers where they are cut."""
    key = Part("layers.0.attention.key.weight", (8, 32))
    value = Part("layers.0.attention.value.weight", (8, 32))
    reason = eligibility(RECIPE, [key, value], layers=1).fallback_reason
    assert reason == "8 outputs (dim 0) are no multiple of 16 (layers.0.attention.key.weight)"


def test_products_are_emulated_on_every_device() -> None:
    for device in ("cpu", "meta"):
        ways = describe_kernels(RECIPE, torch.device(device), torch.bfloat16, torch.float32)
        assert all(way.startswith("emulated in FP32") for way in ways.values())
