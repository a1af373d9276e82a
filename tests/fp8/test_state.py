"""What FP8 layers share: when they compute in FP8, when amaxes count, how long a cast of a weight
lives."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Part
from megaprec.errors import UserError
from megaprec.fp8 import linear
from megaprec.fp8.eligibility import eligibility
from megaprec.fp8.quantize import quantize
from megaprec.fp8.state import FP8State
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.precision.fp8_recipe import FP8Recipe, Kind
from megaprec.precision.plan import PrecisionPlan, plan
from parallel.context import Context
from parallel.layers import ColumnParallelLinear, RowParallelLinear

WIDTH = 32
INNER = 64


class Pair(nn.Module):
    """A column-parallel and a row-parallel layer."""

    def __init__(self, made: PrecisionPlan, layers: int = 1) -> None:
        super().__init__()
        self.fp8 = FP8State(made.fp8, layers)
        context = Context(made, seed=1, fp8=self.fp8)
        self.up = ColumnParallelLinear(context, WIDTH, INNER, name="layers.0.up", std=0.1)
        self.down = RowParallelLinear(context, INNER, WIDTH, name="layers.0.down", std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def pair(kind: Kind = "delayed", **fields: Any) -> tuple[Pair, ParallelAMPOptimizer, Tensor]:
    made = plan("bf16", fp8=FP8Recipe(kind, **fields))
    model = Pair(made)
    x = (
        torch.randn(8, 2, WIDTH, generator=torch.Generator().manual_seed(0))
        .bfloat16()
        .requires_grad_()
    )
    return model, ParallelAMPOptimizer([model], made), x


def grads(model: Pair) -> list[Tensor]:
    return [p.main_grad.clone() for p in model.parameters()]  # type: ignore[attr-defined]


def test_layers_compute_in_fp8_inside_an_autocast_alone() -> None:
    model, _, x = pair()
    made = plan("bf16")
    wide = Pair(made)
    ParallelAMPOptimizer([wide], made)
    expected = wide(x)
    assert torch.equal(model(x), expected)
    with model.fp8.autocast():
        assert not torch.equal(model(x), expected)
        with model.fp8.autocast(enabled=False):
            assert torch.equal(model(x), expected), "inner settings apply inside"
        assert not torch.equal(model(x), expected), "outer ones are restored"
    assert torch.equal(model(x), expected)


def test_a_history_rolls_once_for_an_outermost_autocast_in_training() -> None:
    model, _, x = pair()
    for _ in range(3):
        with model.fp8.autocast():
            with model.fp8.autocast():
                model(x).sum().backward()
            model(x * 2).sum().backward()
    with torch.no_grad(), model.fp8.autocast():
        model(x * 64)
    model.fp8.roll()
    model.fp8.roll()
    assert model.fp8.rolls == 3
    history = model.fp8.bank.history[:, model.fp8.names.index("layers.0.up.weight.input")]
    assert history[-4:].tolist() == [0.0, *[2 * x.abs().max().item()] * 3], (
        "the larger of two micro-batches, three times"
    )


def test_backward_passes_follow_their_forward_passes_outside_of_the_autocast() -> None:
    model, _, x = pair()
    with model.fp8.autocast():
        inside = model(x)
        inside.sum().backward()
    expected = grads(model)
    now = model.fp8.bank.step_amax.clone()
    model, _, x = pair()
    with model.fp8.autocast():
        y = model(x)
    y.sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(grads(model), expected, strict=True))
    assert torch.equal(model.fp8.bank.step_amax, now) and (now > 0).all()


def test_calibrating_records_what_computing_records_and_computes_wide() -> None:
    model, _, x = pair()
    expected = model(x)
    with model.fp8.autocast(enabled=False, calibrating=True):
        y = model(x)
        y.sum().backward()
    assert torch.equal(y, expected)
    assert (model.fp8.bank.step_amax > 0).all()
    assert (
        model.fp8.bank.step_amax[model.fp8.names.index("layers.0.up.weight.input")] == x.abs().max()
    )


@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_a_recomputed_pass_gives_the_same_bits_and_the_same_amaxes(kind: Kind) -> None:
    found = []
    for again in (False, True):
        model, optimizer, x = pair(kind)
        for _ in range(2):
            with model.fp8.autocast():
                y = checkpoint(model, x, use_reentrant=False) if again else model(x)
                assert isinstance(y, Tensor)
                y.square().sum().backward()
            found.append(
                [*grads(model), *([model.fp8.bank.step_amax.clone()] if kind == "delayed" else [])]
            )
            optimizer.step(1e-2)
    half = len(found) // 2
    for plain, recomputed in zip(found[:half], found[half:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def casts(model: Pair, x: Tensor) -> list[str]:
    """Roles of what is cast in a forward pass."""
    seen: list[str] = []
    inner = linear.quantize_both

    def noted(x: Tensor, recipe: FP8Recipe, role: Any, **options: Any) -> Any:
        seen.append(role)
        return inner(x, recipe, role, **options)

    with patch.object(linear, "quantize_both", noted):
        model(x)
    return seen


def require_fresh_casts() -> None:
    """Within one autocast a weight is cast once, and again after whatever changes it."""
    model, optimizer, x = pair("current")
    with model.fp8.autocast():
        assert casts(model, x).count("weight") == 2
        assert casts(model, x).count("weight") == 0
        model(x).sum().backward()
        optimizer.step(1e-1)
        assert casts(model, x).count("weight") == 2, "stale after a step"
        changed = model(x)
        optimizer.load_state_dict(optimizer.state_dict())
        assert casts(model, x).count("weight") == 2, "stale after loading"
        with torch.no_grad():
            model.up.weight.mul_(2.0)
        assert casts(model, x).count("weight") == 1, "stale after a change in place"
        assert not torch.equal(model(x), changed)
    with model.fp8.autocast():
        assert casts(model, x).count("weight") == 2, "kept for longer than a pass"


def test_a_cast_of_a_weight_is_made_once_a_pass_and_never_stale() -> None:
    require_fresh_casts()


def test_what_is_kept_of_an_input_takes_a_byte_an_element() -> None:
    for kind in ("delayed", "current", "rowwise", "mx"):
        model, _, x = pair(kind)
        saved: list[Tensor] = []
        with (
            model.fp8.autocast(),
            saved_tensors_hooks(lambda t, saved=saved: (saved.append(t), t)[1], lambda t: t),
        ):
            model.up(x)
        (values, inverse) = saved
        assert values.dtype == torch.float8_e4m3fn and values.nbytes == x.numel()
        assert inverse.nbytes <= x.numel() // 2


def test_an_overflow_in_half_precision_is_not_hidden_and_a_large_number_saturates() -> None:
    require_saturation()


def require_saturation() -> None:
    recipe = FP8Recipe()
    numbers = torch.tensor([[600.0, -1e6, torch.inf]])
    ours = quantize(numbers, recipe, "input", scale=torch.ones(1)).values.float()
    assert ours[0, :2].tolist() == [448.0, -448.0] and not ours[0, 2].isfinite()


def test_weight_gradients_are_wide_where_the_recipe_says_so() -> None:
    model, _, x = pair(weight_gradients=False)
    with model.fp8.autocast():
        y = model.up(x)
        grad = torch.randn_like(y)
        y.backward(grad)
    wide = grad.flatten(0, 1).t() @ x.detach().flatten(0, 1)
    assert torch.equal(model.up.weight.main_grad, wide.float())  # type: ignore[attr-defined]
    assert torch.equal(model.up.bias.main_grad, grad.flatten(0, 1).sum(0, dtype=torch.float32))  # type: ignore


def parts(name: str, rows: int = 32, columns: int = 32) -> list[Part]:
    return [Part(name, (rows, columns))]


@pytest.mark.parametrize(
    ("fields", "name", "shape", "why"),
    [
        ({}, "layers.0.mlp.up.weight", (32, 32), ""),
        ({"first_layers": 1}, "layers.0.mlp.up.weight", (32, 32), "fp8.first_layers = 1"),
        ({"first_layers": 1}, "layers.1.mlp.up.weight", (32, 32), ""),
        ({"last_layers": 2}, "layers.2.mlp.up.weight", (32, 32), "fp8.last_layers = 2"),
        ({"last_layers": 2}, "layers.1.mlp.up.weight", (32, 32), ""),
        (
            {"wide": ("*.down.weight",)},
            "layers.1.mlp.down.weight",
            (32, 32),
            'fp8.wide has "*.down.weight"',
        ),
        ({}, "up.weight", (12, 32), "12 outputs (dim 0) are no multiple of 8, and fp8.pad = false"),
        ({}, "up.weight", (8, 24), "24 inputs (dim 1) are no multiple of 16, and fp8.pad = false"),
        ({"pad": True}, "up.weight", (12, 24), ""),
        (
            {"kind": "mx"},
            "up.weight",
            (48, 32),
            "48 outputs (dim 0) are no multiple of 32, and fp8.pad = false",
        ),
        (
            {"kind": "blockwise"},
            "up.weight",
            (256, 192),
            "192 inputs (dim 1) are no multiple of 128, and fp8.pad = false",
        ),
    ],
)
def test_a_weight_stays_wide_for_a_reason_that_is_told(
    fields: dict[str, Any], name: str, shape: tuple[int, int], why: str
) -> None:
    assert eligibility(FP8Recipe(**fields), parts(name, *shape), layers=4).fallback_reason == why


def test_of_several_parts_the_first_one_says_why_a_weight_stays_wide() -> None:
    """The weight has its name."""
    recipe = FP8Recipe(wide=("*.value.*", "*.key.*"))
    key, value = (f"layers.0.attention.{name}.weight" for name in ("key", "value"))
    for names, why in ((key, value), "*.key.*"), ((value, key), "*.value.*"):
        made = eligibility(recipe, [part for name in names for part in parts(name)], layers=4)
        assert (made.name, made.fallback_reason) == (names[0], f'fp8.wide has "{why}"')


def test_weights_kept_in_fp32_are_not_in_fp8() -> None:
    made = plan("bf16", fp8=FP8Recipe(), keep_fp32=("*.up.*",))
    assert [one.name for one in Pair(made).fp8.registered] == ["layers.0.down.weight"]


def test_a_padded_weight_has_the_same_products() -> None:
    """Zeros add nothing: against the codes multiplied in float64."""
    recipe = FP8Recipe("current", pad=True)
    state = FP8State(recipe)
    layer = ColumnParallelLinear(
        Context(plan("fp32", fp8=recipe), fp8=state), 20, 12, name="up", bias=False, std=0.5
    )
    x = torch.randn(5, 1, 20, generator=torch.Generator().manual_seed(0))
    with state.autocast():
        y = layer(x)
    a = quantize(x[:, 0], recipe, "input")
    b = quantize(layer.weight.detach(), recipe, "weight")
    torch.testing.assert_close(
        y[:, 0].double(), a.wide().double() @ b.wide().double().t(), rtol=1e-6, atol=1e-6
    )


def test_what_is_not_computed_is_refused() -> None:
    for key in ("dot_product_attention", "multi_head_attention"):
        with pytest.raises(UserError, match=f"fp8.{key} = true: .*; use false"):
            FP8State.over(None, replace(FP8Recipe(), **{key: True}), 1)


def test_layers_need_the_state_of_the_plans_recipe_and_come_before_the_first_pass() -> None:
    with pytest.raises(ValueError, match="FP8State of the same recipe"):
        Context(plan("bf16", fp8=FP8Recipe()))
    model, _, x = pair()
    with model.fp8.autocast():
        model(x)
    with pytest.raises(RuntimeError, match=r"late.weight was registered after the first pass"):
        model.fp8.register(parts("late.weight"))
    with (
        pytest.raises(ValueError, match="fixed when the layers are built"),
        model.fp8.autocast(fp8_recipe=FP8Recipe("mx")),
    ):
        pass


def test_a_state_is_of_the_axes_that_it_is_given_and_of_single_ranks_without() -> None:
    tp, stage, dp = Axis("tp", 0, 2), Axis("stage", 0, 3), Axis("dp", 0, 4)
    given = FP8State(tp=tp, stage=stage, dp=dp)
    assert (given.tp, given.stage, given.dp) == (tp, stage, dp)
    assert FP8State(tp=tp).stage is tp
    alone = FP8State()
    assert [axis.size for axis in (alone.tp, alone.stage, alone.dp)] == [1, 1, 1]
