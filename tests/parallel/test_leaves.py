"""Leaves: a compiled form serves exactly the call that it was made for, and computes what its leaf
computes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.attention.regions import NormRule
from parallel.compiled_leaves import copied, trial_difference
from parallel.leaves import PLAIN, LeafCall, Leaves, call_of, row_by_row

X = torch.arange(12.0).view(3, 4)


def double(x: Tensor, by: int = 2) -> Tensor:
    return x * by


def add_(x: Tensor, y: Tensor) -> Tensor:
    return x.add_(y)


def form_of(call: LeafCall) -> Leaves:
    """Leaves in which this call alone has a compiled form, whose results are all -1."""
    return Leaves({call: lambda *tensors: torch.full_like(tensors[0], -1)})


def test_a_compiled_form_serves_no_other_shape_stride_dtype_value_or_device() -> None:
    made = form_of(call_of(double, (X, 2)))
    assert made(double, X, 2).eq(-1).all()
    assert made(double, X.clone().requires_grad_(), 2).eq(-1).all(), (
        "whether autograd looks on is no difference"
    )
    for x, by in ((X[:2], 2), (X.t().contiguous().t(), 2), (X.double(), 2), (X, 3)):
        assert torch.equal(made(double, x, by), x * by)
    assert made(double, X.to("meta"), 2).is_meta
    assert torch.equal(made(add_, X.clone(), X), 2 * X), "nor another leaf"


def test_a_call_is_noted_and_runs_as_it_is_compiled() -> None:
    noted: dict[LeafCall, None] = {}
    assert torch.equal(Leaves(recorded_calls=noted)(double, X), 2 * X)
    assert [*noted] == [call_of(double, (X,))]
    assert torch.equal(Leaves(recorded_calls=noted)(double, X, otherwise=lambda x: x + 1), 2 * X)
    assert torch.equal(PLAIN(double, X, otherwise=lambda x: x + 1), X + 1)
    assert len(noted) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, y: x.add_(y).mul_(1 + 1e-3),
        lambda x, y: x.add_(y).nan_to_num_() * float("nan"),
        lambda x, y: (x + y).t().contiguous().t(),
        lambda x, y: (x + y).double(),
        lambda x, y: (x + y)[:2],
    ],
)
def test_a_form_that_computes_something_else_is_found_on_trial(wrong: Any) -> None:
    call = call_of(add_, (X, X))
    assert trial_difference(call, lambda x, y: x.add_(y)) == ""
    assert trial_difference(call, wrong)


def scaled_sum(x: Tensor, y: Tensor) -> Tensor:
    """Rounds once more than a compiled form, which keeps the sum in FP32."""
    return ((x.float() + y.float()).to(x.dtype) * 3).to(x.dtype)


def without_last_row(x: Tensor) -> Tensor:
    x[-1] = 0
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda y: y / 2,
        lambda y: y * 1.03,
        lambda y: y.roll(1),
        lambda y: y.clamp(max=2),
        without_last_row,
    ],
    ids=["half", "3 % more", "moved", "clamped", "a row less"],
)
def test_in_half_precision_a_wrong_form_is_no_rounding(dtype: torch.dtype, wrong: Any) -> None:
    x = torch.zeros(64, 32, dtype=dtype)
    call = call_of(scaled_sum, (x, x))

    def fused(x: Tensor, y: Tensor) -> Tensor:
        return (x.float() + y.float()) * 3

    assert trial_difference(call, lambda x, y: fused(x, y).to(dtype)) == ""
    assert trial_difference(call, lambda x, y: wrong(fused(x, y)).to(dtype))


@row_by_row
def row_sums(x: Tensor) -> Tensor:
    return x.float().sum(1)


@pytest.mark.parametrize("row", [0, 511, -512, -1])
def test_a_leaf_of_many_rows_is_tried_on_the_first_and_last_of_them(row: int) -> None:
    rows = 5000
    call = call_of(row_sums, (torch.zeros(rows, 3),))
    tried_rows = []

    def plain(x: Tensor) -> Tensor:
        tried_rows.append(len(x))
        return x.sum(1)

    def wrong(x: Tensor) -> Tensor:
        result = x.sum(1)
        result[row] += 1
        return result

    assert trial_difference(call, plain) == ""
    assert tried_rows == [rows], "the compiled form is made for all rows"
    assert trial_difference(call, wrong)


def test_a_trial_computes_no_more_than_some_rows_by_the_leaf_itself() -> None:
    computed: list[int] = []

    @row_by_row
    def noted(x: Tensor) -> Tensor:
        computed.append(len(x))
        return x.sum(1)

    assert trial_difference(call_of(noted, (torch.zeros(5000, 3),)), lambda x: x.sum(1)) == ""
    assert computed == [1024, 1024], "in the dtype of the call, and in float64"


def test_a_trial_in_float64_widens_dtypes_that_arguments_name() -> None:
    rule = NormRule(1e-5, torch.float32, torch.bfloat16)
    call = call_of(double, (X, torch.bfloat16, rule, torch.int64)).in_float64()
    spec, dtype, wide_rule, integer = call.arguments
    assert spec.dtype == dtype == torch.float64
    assert (wide_rule.sensitive, wide_rule.compute) == (torch.float64, torch.float64)
    assert integer == torch.int64


def test_calls_without_a_compiled_form_are_counted_by_name() -> None:
    made = form_of(call_of(double, (X, 2)))
    made(double, X, 2)
    made(double, X[:2], 2)
    made(double, X, 3)
    made.call_region(add_, X.clone(), X)
    assert made.misses == {"double": 2, "add": 1}
    plain = Leaves()
    plain(double, X)
    assert not plain.misses, "nothing is compiled, and so nothing is missed"


def test_arguments_of_a_trial_have_the_strides_of_the_call() -> None:
    x = torch.zeros(4, 2, 12)[..., 4:8].unflatten(-1, (2, 2))
    call = call_of(double, (x, torch.tensor([True]), torch.tensor([3])))
    first, second, third = call.example_tensors()
    assert (first.shape, first.stride()) == (x.shape, x.stride())
    assert second.all() and not third.any()
    assert copied(first).stride() == copied(first, in_float64=True).stride() == x.stride()
    assert call.on("meta").arguments[0].device == "meta"


def to_fp8(x: Tensor) -> Tensor:
    return (x * 3).to(torch.float8_e4m3fn)


def test_codes_of_fp8_may_move_by_a_step_where_rounding_turns_and_by_no_more() -> None:
    call = call_of(to_fp8, (torch.zeros(100, 100),))
    assert trial_difference(call, lambda x: to_fp8(x * (1 + 1e-6))) == ""
    assert trial_difference(call, lambda x: to_fp8(x * 1.2))
    assert trial_difference(call, lambda x: to_fp8(x * float("nan")))
