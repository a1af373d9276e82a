"""Statistics and AdamW's update in one pass over memory each: the same numbers within rounding, in
few launches and bytes."""

import os
import shutil
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Layout, Part, attach, attach_whole
from megaprec.optim.decision import one_pass
from megaprec.optim.decision.grad_stats import statistics
from megaprec.optim.decision.one_pass import (
    AdamWNumbers,
    adamw_,
    adamw_numbers,
    has_one_pass,
    runs,
    squares_and_zeros,
    statistics_in_one_pass,
    update_in_one_pass,
)
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.param_groups import Group
from megaprec.optim.rules.update_rules import SGD, AdamW, Step
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.optim.state.update_tile import Tile
from megaprec.precision.plan import LossScaling, PrecisionPlan, plan
from parallel.leaves import LeafCall, Leaves, TensorSpec
from tests.launches import Counting, tensors_in
from tools.training import compiling
from tools.training.compiling import one_pass_calls, try_calls

LENGTHS = (1024, 256)
RULE = AdamW((0.9, 0.95), 1e-8)
CPU = torch.device("cpu")
BF16 = plan("bf16")


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of lengths that take no time."""
    monkeypatch.setattr(one_pass, "LENGTHS", LENGTHS)
    monkeypatch.setattr(compiling, "LENGTHS", LENGTHS)


class CountedLeaves(Leaves):
    """Leaves that count the calls with a compiled form, and the others."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        object.__setattr__(self, "calls", [0, 0])

    def __call__(
        self,
        leaf: Callable[..., Any],
        *arguments: Any,
        otherwise: Callable[..., Any] | None = None,
    ) -> Any:
        calls: list[int] = self.calls  # type: ignore[attr-defined]
        calls[0] += 1

        def counted(*arguments: Any) -> Any:
            calls[1] += 1
            return (otherwise or leaf)(*arguments)

        return super().__call__(leaf, *arguments, otherwise=counted)


@cache
def forms_of(precision: PrecisionPlan, by_compiler: bool) -> dict[LeafCall, Callable[..., Any]]:
    """Forms of the leaves of an optimizer with this plan on a CPU: compiled by torch, or the leaves
    themselves."""
    calls = [call.on("cpu") for call in one_pass_calls(precision, RULE)]
    if not by_compiler:
        return {call: partial(run, call) for call in calls}
    forms, reasons = try_calls(calls)
    assert reasons == {}
    return forms


def run(call: LeafCall, *tensors: Tensor) -> Any:
    return call.run(tensors)


def leaves_of(precision: PrecisionPlan, by_compiler: bool) -> CountedLeaves:
    if by_compiler and not shutil.which((os.environ.get("CC") or "cc").split()[0]):
        pytest.skip("needs a C compiler")
    return CountedLeaves(forms_of(precision, by_compiler))


BY_COMPILER = pytest.mark.parametrize(
    "by_compiler",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["by operators", "compiled"],
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(70, 90)
        self.second = nn.Linear(90, 30)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def train(precision: PrecisionPlan, leaves: Leaves | None) -> list[Tensor]:
    """Masters and moments after four steps, of which the second is skipped."""
    net = Net().double()
    attach_whole(net)
    optimizer = ParallelAMPOptimizer(
        [net],
        precision,
        rule=RULE,
        clip=0.3,
        groups=[Group("second.*", lr=0.5)],
        leaves=leaves,
    )
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(16, 70, generator=generator, dtype=torch.float64)
        loss = net(x.to(net.first.weight.dtype)).square().mean()
        (loss * optimizer.scale * (float("inf") if number == 1 else 1.0)).backward()
        report = optimizer.step(lr=1e-2)
        assert report.outcome == ("skipped_overflow" if number == 1 else "applied")
    state: list[Tensor] = []
    for buffer in optimizer.all_buffers():
        state += [values.clone() for values in buffer.saved().values()]
        state.append(buffer.weights.clone())
    return state


@pytest.mark.cases(None, sample=1)
@BY_COMPILER
@pytest.mark.usefixtures("short_runs")
@pytest.mark.parametrize("compute", ["fp64", "fp32", "bf16"])
def test_the_update_in_one_pass_is_that_of_torchs_kernel_within_rounding(
    compute: str, by_compiler: bool
) -> None:
    scaling = LossScaling("constant", initial=64.0) if compute != "fp64" else None
    precision = plan(compute, scaling)
    leaves = leaves_of(precision, by_compiler)
    ours = train(precision, leaves)
    theirs = train(precision, None)
    calls, uncompiled = leaves.calls  # type: ignore[attr-defined]
    assert calls > 20 and uncompiled == 0
    assert not leaves.misses, "a step of an ordinary run has no call without a compiled form"
    rtol = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 1e-5}[compute]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        is_bf16 = mine.dtype == torch.bfloat16  # rounded from masters: to a neighbour at most
        allowed = 0.01 if is_bf16 else rtol
        torch.testing.assert_close(mine, other, rtol=allowed, atol=allowed * 1e-2)


@pytest.mark.usefixtures("short_runs")
def test_one_update_is_torchs_adamw_in_float64() -> None:
    n = 5000
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(n, generator=generator, dtype=torch.float64) for _ in range(3)]
    weights, first, second = tensors
    reference = nn.Parameter(weights.clone())
    theirs = torch.optim.AdamW(
        [reference], lr=0.01, betas=RULE.betas, eps=RULE.eps, weight_decay=0.3, fused=False
    )
    exp_avg = torch.zeros(n, dtype=torch.float64)
    exp_avg_sq = torch.zeros(n, dtype=torch.float64)
    for number, gradient in enumerate((first, second, first * second), 1):
        reference.grad = gradient.clone()
        theirs.step()
        step = step_of(number, divisor=8.0)
        numbers = adamw_numbers(RULE, step)
        adamw_(None, gradient * 8, weights, exp_avg, exp_avg_sq, *numbers, RULE.betas, RULE.eps)
    torch.testing.assert_close(weights, reference.detach(), rtol=1e-13, atol=1e-14)
    state = theirs.state[reference]
    torch.testing.assert_close(exp_avg, state["exp_avg"], rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(exp_avg_sq, state["exp_avg_sq"], rtol=1e-13, atol=1e-14)


def test_a_divisor_beyond_fp32_divides_as_two_smaller_ones_do() -> None:
    gradient = torch.full((256,), 2.0**100)
    updated: list[list[Tensor]] = []
    for values, divisor in ((gradient, 2.0**140), (gradient * 2.0**-100, 2.0**40)):
        weights, exp_avg, exp_avg_sq = torch.ones(256), torch.zeros(256), torch.zeros(256)
        numbers = adamw_numbers(RULE, step_of(1, divisor))
        adamw_(None, values, weights, exp_avg, exp_avg_sq, *numbers, RULE.betas, RULE.eps)
        updated.append([weights, exp_avg, exp_avg_sq])
    for beyond, within in zip(*updated, strict=True):
        torch.testing.assert_close(beyond, within, rtol=1e-6, atol=0.0)


def step_of(number: int, divisor: float = 1.0, skip: float = 0.0) -> Step:
    return Step(
        lr=0.01,
        weight_decay=0.3,
        divisor=torch.tensor(divisor, dtype=torch.float64),
        skip=torch.tensor(skip),
        applied=torch.tensor(float(number)),
    )


def tile_of(n: int, device: torch.device = CPU, precision: PrecisionPlan = BF16) -> Tile:
    """A tile of weights, by default in bf16 with FP32 masters."""
    parameter = nn.Parameter(torch.ones(n, device=device))
    attach(parameter, Layout((Part("weight", (n,)),)))
    buffer = Buffer([parameter], precision, Axis("dp"), Axis("zero"), 0, device, RULE.names)
    return next(buffer.tiles(0, n, n))


def values_of(tile: Tile) -> list[Tensor]:
    assert tile.masters is not None
    return [tile.weights, tile.masters, *(moments for _, moments in tile.moments)]


def update(call: Any, tile: Tile, numbers: AdamWNumbers) -> None:
    def refuse() -> None:
        raise AssertionError("not compiled")

    update_in_one_pass(call, tile, RULE, numbers, refuse)


@BY_COMPILER
@pytest.mark.usefixtures("short_runs")
def test_an_element_does_not_depend_on_the_run_that_it_is_in(by_compiler: bool) -> None:
    """Of the longest run, of a shorter one, or of a rest that is padded."""
    leaves = leaves_of(plan("bf16"), by_compiler)
    numbers = adamw_numbers(RULE, step_of(1))
    updated: list[list[Tensor]] = []
    for n in (1024, 256, 77):
        tile = tile_of(n)
        generator = torch.Generator().manual_seed(2)
        for values in (tile.grads, *values_of(tile)[1:]):
            values.copy_(torch.rand(1024, generator=generator)[:n])
        for start, stop in runs(0, n):
            assert (start, stop) == (0, n)
        update(leaves, tile, numbers)
        updated.append(values_of(tile))
    for values in zip(*updated, strict=True):
        longest, shorter, rest = values
        assert torch.equal(longest[:256], shorter)
        assert torch.equal(longest[:77], rest)


@BY_COMPILER
@pytest.mark.usefixtures("short_runs")
def test_a_skipped_update_leaves_every_bit(by_compiler: bool) -> None:
    leaves = leaves_of(plan("bf16"), by_compiler)
    tile = tile_of(1024)
    tile.grads.fill_(float("nan"))
    before = [values.clone() for values in values_of(tile)]
    update(leaves, tile, adamw_numbers(RULE, step_of(1, skip=1.0)))
    for values, old in zip(values_of(tile), before, strict=True):
        assert torch.equal(values, old)
    assert tile.grads.isnan().all(), "the gradients are searched for what was not finite"


@pytest.mark.cases(None, sample=1)
@BY_COMPILER
@pytest.mark.usefixtures("short_runs")
@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan"), 3e38])
def test_statistics_in_one_read_are_those_of_two(bad: float, by_compiler: bool) -> None:
    leaves = leaves_of(plan("fp32"), by_compiler)
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(n, generator=generator) for n in (2048 + 256 + 3, 5, 256)]
    gradients[0][7] = bad
    gradients[2][::3] = 0
    ours = statistics(gradients, (), CPU, leaves)
    assert not leaves.misses, "rests, which have any length, are no calls that were foreseen"
    theirs = statistics(gradients, (), CPU)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0, equal_nan=True)
    assert ours[1] == theirs[1]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"parameters": "fp32"}, True),
        ({"masters": "split"}, False),
        ({"masters": "none"}, False),
        ({"moments": "bf16"}, False),
        ({"rounding": "stochastic"}, False),
    ],
)
def test_what_is_rounded_in_another_way_is_left_to_torchs_kernels(
    changes: dict[str, Any], expected: bool
) -> None:
    tile = tile_of(256, precision=plan("bf16", **changes))
    assert has_one_pass(tile, RULE) == expected
    assert not has_one_pass(tile, SGD())


class AsOneLaunch:
    """Calls each leaf as one launch, which reads its arguments, but not the weights that an update
    overwrites."""

    def __init__(self, counting: Counting) -> None:
        self.counting = counting

    def __call__(
        self,
        leaf: Callable[..., Any],
        *arguments: Any,
        otherwise: Callable[..., Any] | None = None,
    ) -> Any:
        read = arguments[1:] if leaf is adamw_ else arguments
        with self.counting.as_one(inputs=lambda: read) as results:
            returned = leaf(*arguments)
            results += tensors_in(returned)
        return returned


def test_a_step_of_the_optimizer_moves_34_bytes_a_parameter_in_few_launches() -> None:
    """Of bf16 weights with FP32 gradients, masters and moments, without a message."""
    meta = torch.device("meta")
    n = sum(one_pass.LENGTHS)
    tile = tile_of(n, meta)
    counting = Counting()
    call = AsOneLaunch(counting)
    numbers = adamw_numbers(RULE, Step(0.1, 0.1, *torch.ones(3, device=meta).unbind()))
    with counting, torch.no_grad():
        statistics_in_one_pass(call, [tile.grads], lambda run: squares_and_zeros(run))
    assert counting.cost is not None
    # a stack and a sum beside three runs
    assert counting.cost.launches <= 3 + 2
    assert counting.cost.bytes <= 4 * n + 1000
    counting = Counting()
    call = AsOneLaunch(counting)
    buffer_tiles = [tile_of(stop - start, meta) for start, stop in runs(0, n)]
    with counting, torch.no_grad():
        for each in buffer_tiles:
            update(call, each, numbers)
    assert counting.cost is not None
    assert counting.cost.launches == 3
    assert counting.cost.bytes <= 30 * n + 1000


def test_the_forms_of_a_plan_are_few_and_of_the_lengths_of_runs() -> None:
    for compute in ("bf16", "fp32"):
        calls = one_pass_calls(plan(compute), RULE)
        assert len(calls) <= 3 * len(one_pass.LENGTHS)
        for call in calls:
            flat = [each for each in call.arguments if isinstance(each, TensorSpec) and each.shape]
            lengths = {each.shape[0] for each in flat} - {4}
            assert len(lengths) == 1 and lengths <= {*one_pass.LENGTHS}
