"""Updates, rates and averages beside numbers that a pencil gives: of a loss that is linear in the
weights, whose gradient is the same in each step."""

import math

import pytest
import torch
from torch import Tensor, nn

from megaprec.comm.layout import attach_whole
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules import load_balance
from megaprec.optim.rules.lr import LRSchedule
from megaprec.optim.rules.update_rules import SGD, AdamW
from megaprec.precision.plan import plan

RATE = 0.03
EPS = 0.25  # as large as a gradient, so that its place shows
DECAY = 0.4
STEPS = 4
AVERAGE = 0.75
# a matrix and a vector; the norm of all of it is 5
SLOPES = {
    "weight": torch.tensor([[1.0, -2.0], [2.0, 0.0]]),
    "bias": torch.tensor([4.0, 0.0]),
}
NORM = 5.0
FIRST = {
    "weight": torch.tensor([[0.7, 0.31], [-0.123, 1.9]]),
    "bias": torch.tensor([0.41, -0.77]),
}


class Line(nn.Module):
    """A loss that is linear in its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(FIRST["weight"].clone())
        self.bias = nn.Parameter(FIRST["bias"].clone())

    def forward(self) -> Tensor:
        weight = (self.weight.float() * SLOPES["weight"]).sum()
        return weight + (self.bias.float() * SLOPES["bias"]).sum()


def optimizer_of(line: Line, precision: str = "fp32", **options: object) -> ParallelAMPOptimizer:
    line.to(plan(precision).parameters)
    attach_whole(line)
    settings = {"clip": 0.0, "weight_decay": 0.0, **options}
    return ParallelAMPOptimizer([line], plan(precision), None, **settings)  # type: ignore[arg-type]


def take_step(line: Line, optimizer: ParallelAMPOptimizer, slope: float = 1.0) -> float:
    """The norm that the step reports."""
    (line() * slope * optimizer.scale).backward()
    return optimizer.step(lr=RATE).grad_norm


def masters(optimizer: ParallelAMPOptimizer, kind: str = "weight") -> dict[str, Tensor]:
    tensors = optimizer.state_dict()["tensors"]
    return {name: tensors[f"{kind}/{name}"].double() for name in FIRST}


def require_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values.double(), rtol=2e-6, atol=1e-6)


def after_adam(steps: int, decay: float) -> dict[str, Tensor]:
    """Both corrected moments of a gradient g that stays are g and g^2, so that each step is
    rate * g / (|g| + eps); before it a matrix, and no vector, shrinks by 1 - rate * decay."""
    expected = {}
    for name, first in FIRST.items():
        slope = SLOPES[name].double()
        move = RATE * slope / (slope.abs() + EPS)
        kept = 1 - RATE * decay if first.dim() == 2 else 1.0
        weights = first.double()
        for _ in range(steps):
            weights = weights * kept - move
        expected[name] = weights
    return expected


@pytest.mark.parametrize("decay", [0.0, DECAY])
def test_adam_moves_by_the_same_way_in_each_step_of_the_same_gradient(decay: float) -> None:
    line = Line()
    optimizer = optimizer_of(line, rule=AdamW(eps=EPS), weight_decay=decay)
    for step in range(1, STEPS + 1):
        take_step(line, optimizer)
        require_close(masters(optimizer), after_adam(step, decay))


def test_moments_are_geometric_sums_of_the_gradient_and_its_square() -> None:
    line = Line()
    optimizer = optimizer_of(line, rule=AdamW(betas=(0.9, 0.95), eps=EPS))
    for _ in range(STEPS):
        take_step(line, optimizer)
    first = {name: slope * (1 - 0.9**STEPS) for name, slope in SLOPES.items()}
    second = {name: slope.square() * (1 - 0.95**STEPS) for name, slope in SLOPES.items()}
    require_close(masters(optimizer, "exp_avg"), first)
    require_close(masters(optimizer, "exp_avg_sq"), second)


@pytest.mark.parametrize("limit", [0.01, 2.0, 6.0])
def test_a_clip_makes_the_norm_of_all_tensors_its_limit_and_leaves_shorter_gradients_alone(
    limit: float,
) -> None:
    """torch's rule, limit / (norm + 1e-6), at most 1."""
    line = Line()
    optimizer = optimizer_of(line, rule=SGD(momentum=0.0), clip=limit)
    norm = take_step(line, optimizer)
    factor = min(1.0, limit / (NORM + 1e-6))
    moved = {name: first - RATE * factor * SLOPES[name] for name, first in FIRST.items()}
    assert norm == pytest.approx(NORM, rel=1e-6)
    require_close(masters(optimizer), moved)


def test_a_norm_that_bf16_cannot_hold_is_reported_as_it_is() -> None:
    line = Line()
    optimizer = optimizer_of(line, rule=SGD(momentum=0.0), clip=1.0)
    assert take_step(line, optimizer, slope=1.001) == pytest.approx(5.005, rel=1e-6)


def test_the_average_is_the_weighted_sum_of_all_weights_that_steps_have_left() -> None:
    """Of weights w0 - n m: w0 - m (n - d (1 - d^n) / (1 - d)), for a decay d."""
    line = Line()
    optimizer = optimizer_of(line, rule=SGD(momentum=0.0), ema=AVERAGE)
    for _ in range(STEPS):
        take_step(line, optimizer)
    way = STEPS - AVERAGE * (1 - AVERAGE**STEPS) / (1 - AVERAGE)
    expected = {name: first - RATE * way * SLOPES[name] for name, first in FIRST.items()}
    require_close(masters(optimizer, "ema"), expected)


def test_a_loss_scale_leaves_an_update_as_it_is() -> None:
    line = Line()
    optimizer = optimizer_of(line, "fp16", rule=SGD(momentum=0.0))
    assert optimizer.scale > 1
    before = masters(optimizer)
    while take_step(line, optimizer) != pytest.approx(NORM, rel=1e-3):
        # a scale that was too high changes nothing
        assert all(torch.equal(masters(optimizer)[name], before[name]) for name in before)
    moved = {name: values - RATE * SLOPES[name] for name, values in before.items()}
    require_close(masters(optimizer), moved)


# --- rates

SCHEDULE = {"peak": 8.0, "final": 2.0, "warmup": 4, "total": 16, "decay": 4}


def test_a_warm_up_begins_with_nothing_and_has_the_peak_after_its_last_step() -> None:
    rates = LRSchedule("linear", **SCHEDULE)  # type: ignore[arg-type]
    assert [rates.at(done) for done in range(5)] == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_a_line_falls_by_the_same_in_each_step_until_its_last() -> None:
    rates = LRSchedule("linear", **SCHEDULE)  # type: ignore[arg-type]
    assert [rates.at(done) for done in (5, 6, 10, 15, 16, 17)] == [7.5, 7.0, 5.0, 2.5, 2.0, 2.0]


def test_a_cosine_is_at_three_quarters_a_half_and_a_quarter_where_a_wave_is() -> None:
    """At a third, a half and two thirds of its way."""
    rates = LRSchedule("cosine", **SCHEDULE)  # type: ignore[arg-type]
    heights = [(rates.at(done) - 2.0) / 6.0 for done in (4, 8, 10, 12, 16)]
    assert heights == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0], abs=1e-12)


def test_a_stable_rate_falls_in_its_last_steps_alone() -> None:
    rates = LRSchedule("wsd", **SCHEDULE, tail="sqrt")  # type: ignore[arg-type]
    heights = [(rates.at(done) - 2.0) / 6.0 for done in (4, 11, 12, 13, 16)]
    assert heights == pytest.approx([1.0, 1.0, 1.0, 1 - math.sqrt(0.25), 0.0], abs=1e-12)


# --- corrections of routers


def test_a_correction_falls_where_more_tokens_go_than_the_mean_and_rises_where_fewer_do() -> None:
    assert load_balance.corrections(torch.tensor([3.0, 1.0, 2.0])).tolist() == [-1.0, 1.0, 0.0]
