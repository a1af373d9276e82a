"""Learning rates against Megatron's formulas, worked out by hand."""

import math
from typing import Any

import pytest

from megaprec.errors import UserError
from megaprec.optim.lr import Kind, LRSchedule, Tail
from tests.refusals import sentence, shows


def schedule(
    kind: Kind, peak: float = 1.0, final: float = 0.2, warmup: int = 10, total: int = 110
) -> LRSchedule:
    return LRSchedule(kind, peak, final, warmup, total, decay=40)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_warm_up_rises_from_zero_and_reaches_the_peak_after_warmup_steps(kind: Kind) -> None:
    assert [schedule(kind).at(n) for n in (0, 1, 5, 10)] == [0.0, 0.1, 0.5, 1.0]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_without_warm_up_the_first_step_trains_at_the_peak(kind: Kind) -> None:
    assert schedule(kind, warmup=0).at(0) == 1.0


def test_constant_stays_at_the_peak_for_ever() -> None:
    assert {schedule("constant").at(n) for n in (10, 11, 110, 1000)} == {1.0}


def test_linear_falls_evenly_to_final() -> None:
    assert [schedule("linear").at(n) for n in (35, 60, 85, 110, 111)] == pytest.approx(
        [0.8, 0.6, 0.4, 0.2, 0.2]
    )


def test_cosine_falls_by_half_a_wave_to_final() -> None:
    quarter = 0.2 + 0.8 * (math.sqrt(0.5) + 1) / 2  # cos(pi / 4) at a quarter of the way
    assert [schedule("cosine").at(n) for n in (35, 60, 110, 111)] == pytest.approx(
        [quarter, 0.6, 0.2, 0.2]
    )


def test_wsd_holds_the_peak_until_its_tail_and_then_halves_towards_final() -> None:
    rates = [schedule("wsd").at(n) for n in (11, 70, 90, 110, 111)]
    assert rates == pytest.approx([1.0, 1.0, 0.2 + 0.8 * (2 * 0.5**0.5 - 1), 0.2, 0.2])


@pytest.mark.parametrize(
    ("tail", "halfway"),
    [
        ("exponential", 2 * 0.5**0.5 - 1),
        ("linear", 0.5),
        ("cosine", 0.5),
        ("sqrt", 1 - math.sqrt(0.5)),
    ],
)
def test_the_tail_of_wsd_has_the_shape_that_is_asked_for(tail: Tail, halfway: float) -> None:
    wsd = LRSchedule("wsd", 1.0, 0.2, 10, 110, decay=40, tail=tail)
    rates = [wsd.at(n) for n in (70, 90, 110, 111)]
    assert rates == pytest.approx([1.0, 0.2 + 0.8 * halfway, 0.2, 0.2])


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_run_that_is_all_warm_up_ends_at_the_peak(kind: Kind) -> None:
    assert schedule(kind, warmup=110).at(110) == 1.0


def test_everything_that_does_not_fit_is_reported_together() -> None:
    with pytest.raises(UserError) as caught:
        LRSchedule("wsd", peak=1e-3, final=1e-2, warmup=5, total=10, decay=6)
    decay, final = caught.value.problems
    assert shows(decay, "optimizer.schedule_decay", decay=6, longest=5)
    assert shows(final, "optimizer.schedule_final", final=0.01)
    with pytest.raises(UserError, match=sentence("optimizer.schedule_warmup", warmup=11, total=10)):
        LRSchedule("linear", 1.0, 0.0, warmup=11, total=10, decay=0)


GOOD: dict[str, Any] = {
    "kind": "cosine",
    "peak": 1.0,
    "final": 0,
    "warmup": 1,
    "total": 10,
    "decay": 0,
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "linaer"},
        {"kind": None},
        {"peak": math.inf},
        {"peak": "1e-3"},
        {"warmup": 0.1},
        {"total": "10"},
    ],
    ids=str,
)
def test_a_kind_that_there_is_not_and_a_share_for_a_length_are_refused_by_name(
    wrong: dict[str, Any],
) -> None:
    """Every other word was a cosine, and a warm-up of a tenth one of no step."""
    assert LRSchedule(**GOOD).at(10) == 0.0
    (name,) = wrong
    with pytest.raises(UserError, match=f"^{name} = .*: must be "):
        LRSchedule(**GOOD | wrong)
