"""A router that has collapsed is named once, at the step; one that is healthy never."""

from typing import Any

import pytest

from megaprec.diagnose.router_monitor import STEPS, RouterMonitor
from megaprec.optim.decision.step_report import RouterReport, StepReport
from tests.layouts import Run, batches, make_engine, share_of
from tests.models.test_parity import MODELS

BELOW = 2.5  # experts that are used, of 8 with 2 a token: the bound is 2.6
ABOVE = 2.7


def report(*used: float, outcome: Any = "applied") -> StepReport:
    routers = [RouterReport(layer, 1.0, 0.0, count, 1.0) for layer, count in enumerate(used)]
    return StepReport(outcome, 1.0, 1.0, 0, 0.0, (0,), 1.0, 0.1, routers=tuple(routers))


def named(monitor: RouterMonitor, reports: list[StepReport]) -> list[tuple[int, int]]:
    """The steps, counted from 1, at which layers are named, with these."""
    return [
        (step, router.layer)
        for step, each in enumerate(reports, 1)
        for router in monitor.note(each)
    ]


def test_a_layer_is_named_after_as_many_steps_in_a_row_and_again_only_after_it_has_recovered() -> (
    None
):
    monitor = RouterMonitor(experts=8, per_token=2)
    first = [report(ABOVE, BELOW)] * (3 * STEPS)
    assert named(monitor, first) == [(STEPS, 1)]
    recovered = [report(ABOVE, ABOVE), *[report(ABOVE, BELOW)] * STEPS]
    assert named(monitor, recovered) == [(STEPS + 1, 1)]


def test_a_single_step_above_the_bound_starts_the_count_again() -> None:
    almost = [report(BELOW)] * (STEPS - 1)
    monitor = RouterMonitor(experts=8, per_token=2)
    assert not named(monitor, [*almost, report(ABOVE), *almost])


def test_skipped_steps_count_neither_way() -> None:
    skipped = report(ABOVE, outcome="skipped_overflow")
    reports = [report(BELOW), skipped] * STEPS
    assert named(RouterMonitor(experts=8, per_token=2), reports) == [(2 * STEPS - 1, 0)]
    skips = [report(BELOW, outcome="skipped_overflow")] * (2 * STEPS)
    assert not named(RouterMonitor(experts=8, per_token=2), skips)


def test_where_each_token_goes_to_all_experts_no_router_collapses() -> None:
    assert not named(RouterMonitor(experts=4, per_token=4), [report(4.0)] * (2 * STEPS))


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "model",
    [MODELS["mixtral"], MODELS["glm4_moe"], {**MODELS["mixtral"], "experts_per_token": 1}],
    ids=["two of five", "corrected", "one of five"],
)
def test_a_router_that_was_drawn_at_random_is_healthy_without_a_balance_loss(
    model: dict[str, Any],
) -> None:
    # with ten times this rate two of five experts do get all tokens of a layer
    run = Run({**model, "router_aux_loss": 0.0}, steps=STEPS + 4, lr=1e-3)
    engine = make_engine(None, run)
    reports = [
        engine.step(share_of(None, batch), run.lr, number)
        for number, batch in enumerate(batches(run))
    ]
    assert all(each.routers for each in reports)
    assert not named(RouterMonitor(run.config.experts, run.config.experts_per_token), reports)
