"""A step above a limit of its loss or its gradient norm changes nothing, on any rank of any
layout."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.optim.decision.step_limits import NO_LIMITS, StepLimits
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.precision.plan import LossScaling
from tests.logical import INF, SHAPES, Case, give, gradient, make_optimizer
from tests.ranks import run_ranks

LOSS = 3.0
NORMS = [
    math.sqrt(sum(gradient(name, step).square().sum().item() for name in SHAPES))
    for step in range(5)
]
LAYOUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({}, {}),
    ({"tp": 2}, {"ema": 0.9}),
    ({"pp": 2}, {"overlap": True}),
    ({"dp": 2}, {"zero_size": 2}),
    ({"dp": 2}, {"zero_size": 2, "shard_gradients": True}),
    ({"pp": 2, "dp": 2}, {"zero_size": 0}),
    ({"dp": 2, "tp": 2}, {"zero_size": 1}),
]


def state(optimizer: ParallelAMPOptimizer) -> list[Tensor]:
    """Weights, masters, moments and the count of steps."""
    optimizer.wait()
    tensors = [optimizer.applied_steps]
    for buffer in optimizer.all_buffers():
        tensors += [buffer.weights, *buffer.saved().values()]
    return [tensor.clone() for tensor in tensors]


def take(optimizer: ParallelAMPOptimizer, step: int, limits: StepLimits) -> tuple[str, bool]:
    """A step's outcome, and whether it has left the state as it was."""
    before = state(optimizer)
    give(optimizer, step)
    is_last = optimizer.pp.rank == optimizer.pp.size - 1
    loss = torch.tensor(LOSS / optimizer.dp.size) if is_last else None
    report = optimizer.step(1e-2, loss, limits=limits)
    unchanged = all(torch.equal(a, b) for a, b in zip(state(optimizer), before, strict=True))
    return report.outcome, unchanged


def limited(mesh: DeviceMesh | None, case: Case) -> list[tuple[str, bool]]:
    """The body of ranks: steps below and above a limit, and one whose loss is the limit."""
    optimizer = make_optimizer(mesh, case)
    # norms are summed in FP32
    below = [norm * (1 - 1e-5) for norm in NORMS]
    above = [norm * (1 + 1e-5) for norm in NORMS]
    return [
        take(optimizer, 0, NO_LIMITS),
        take(optimizer, 1, StepLimits(norm=below[1])),
        take(optimizer, 2, StepLimits(LOSS, above[2])),
        take(optimizer, 3, StepLimits(loss=math.nextafter(LOSS, 0))),
        take(optimizer, 4, StepLimits(INF, above[4])),
    ]


EXPECTED = [
    ("applied", False),
    ("skipped_spike", True),
    ("applied", False),
    ("skipped_spike", True),
    ("applied", False),
]


@pytest.mark.cases(3, sample=1)
@pytest.mark.parametrize(("axes", "options"), LAYOUTS, ids=str)
def test_a_step_above_a_limit_changes_nothing_in_any_layout_and_one_at_the_limit_is_applied(
    axes: dict[str, int], options: dict[str, Any]
) -> None:
    case = Case("fp32", {"scaling": LossScaling("dynamic", initial=16.0)}, options)
    for rank in run_ranks(limited, axes, case=case) if axes else [limited(None, case)]:
        assert rank == EXPECTED


def test_what_is_skipped_leaves_no_trace_in_the_steps_after_it() -> None:
    """Steps 1 and 3 alone are the steps 0 to 3 of which 0 and 2 are skipped."""
    case = Case("fp32", {}, {"ema": 0.9})
    one = make_optimizer(None, case)
    other = make_optimizer(None, case)
    for step in range(4):
        skips = step % 2 == 0
        outcome, _ = take(one, step, StepLimits(loss=1.0) if skips else NO_LIMITS)
        assert outcome == ("skipped_spike" if skips else "applied")
        if not skips:
            take(other, step, NO_LIMITS)
    assert all(torch.equal(a, b) for a, b in zip(state(one), state(other), strict=True))


@pytest.mark.parametrize(
    ("on_nonfinite", "outcome"), [("skip", "skipped_overflow"), ("ignore", "applied_nonfinite")]
)
@pytest.mark.parametrize(("gradient", "loss"), [(INF, LOSS), (1.0, math.nan), (1.0, INF)])
def test_a_step_that_is_not_finite_is_an_overflow_and_no_spike(
    gradient: float, loss: float, on_nonfinite: str, outcome: str
) -> None:
    optimizer = make_optimizer(None, Case("fp32", {"on_nonfinite": on_nonfinite}))
    give(optimizer, 0)
    optimizer.all_buffers()[0].grads[0] = gradient
    before = state(optimizer)
    report = optimizer.step(1e-2, torch.tensor(loss), limits=StepLimits(LOSS, 0.5))
    unchanged = all(torch.equal(a, b) for a, b in zip(state(optimizer), before, strict=True))
    assert (report.outcome, unchanged) == (outcome, on_nonfinite == "skip")


def disagree(mesh: DeviceMesh, here: StepLimits, there: StepLimits) -> str:
    """The error of ranks of which the last has other limits; nothing may change by it."""
    optimizer = make_optimizer(mesh, Case("fp32"))
    give(optimizer, 0)
    before = state(optimizer)
    is_last = optimizer.world.rank == optimizer.world.size - 1
    with pytest.raises(RuntimeError) as raised:
        optimizer.step(1e-2, limits=there if is_last else here)
    assert all(torch.equal(a, b) for a, b in zip(state(optimizer), before, strict=True))
    return str(raised.value)


@pytest.mark.parametrize(
    ("here", "there"),
    [(StepLimits(3.0, 2.0), StepLimits(3.0, 2.5)), (NO_LIMITS, StepLimits(3.0, 2.0))],
)
def test_ranks_with_different_limits_all_raise_and_change_nothing(
    here: StepLimits, there: StepLimits
) -> None:
    for axes in ({"dp": 2}, {"pp": 2}):
        said = run_ranks(disagree, axes, here=here, there=there)
        assert all("limits of the step" in line for line in said)
        assert "3 of the loss" in said[1]
