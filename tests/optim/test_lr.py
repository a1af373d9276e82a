"""Learning rates against Megatron's formulas, worked out by hand and of random schedules, and
against torch's schedulers where these coincide."""

import math
import random
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from megaprec.errors import UserError
from megaprec.optim.rules.lr import SCHEDULES, Kind, LRSchedule, Tail
from tests.refusals import sentence, shows


def schedule(
    kind: Kind, peak: float = 1.0, final: float = 0.2, warmup: int = 10, total: int = 110
) -> LRSchedule:
    return LRSchedule(kind, peak, final, warmup, total, decay=40)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_warm_up_rises_from_zero_and_reaches_the_peak_after_warmup_steps(kind: Kind) -> None:
    assert [schedule(kind).at(n) for n in (0, 1, 5, 10)] == [0.0, 0.1, 0.5, 1.0]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_warm_up_may_begin_with_a_rate_of_its_own(kind: Kind) -> None:
    rates = LRSchedule(kind, 1.0, 0.2, 10, 110, 40, initial=0.5)
    assert [rates.at(n) for n in (0, 1, 5, 10)] == [0.5, 0.55, 0.75, 1.0]
    assert [rates.at(n) for n in range(10, 130)] == [schedule(kind).at(n) for n in range(10, 130)]


@pytest.mark.parametrize("warmup", [1, 3, 100, 2000])
def test_nanogpts_warm_up_is_that_of_an_initial_rate(warmup: int) -> None:
    """get_lr of its train.py, which counts steps from 0."""
    peak = 1e-3
    rates = LRSchedule("cosine", peak, 1e-4, warmup, 5000, 0, initial=peak / (warmup + 1))
    for it in range(warmup):
        assert rates.at(it) == pytest.approx(peak * (it + 1) / (warmup + 1), rel=4e-16)
    for it in range(warmup, 5001):
        ratio = (it - warmup) / (5000 - warmup)
        coefficient = 0.5 * (1.0 + math.cos(math.pi * ratio))
        assert rates.at(it) == pytest.approx(1e-4 + coefficient * (peak - 1e-4), rel=4e-16)


@pytest.mark.parametrize("initial", [-0.1, 1.1])
def test_a_warm_up_begins_between_zero_and_the_peak(initial: float) -> None:
    with pytest.raises(UserError, match=sentence("optimizer.schedule_initial")):
        LRSchedule("cosine", 1.0, 0.0, 10, 110, 0, initial=initial)


@pytest.mark.parametrize("kind", SCHEDULES)
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


KINDS: list[tuple[Kind, Tail]] = [
    ("constant", "exponential"),
    ("linear", "exponential"),
    ("cosine", "exponential"),
    ("wsd", "exponential"),
    ("wsd", "linear"),
    ("wsd", "cosine"),
    ("wsd", "sqrt"),
]
RANDOM_SCHEDULES = 1000


def megatrons_rate(schedule: LRSchedule, done: int) -> float:
    """OptimizerParamScheduler.get_lr of Megatron-core: the count `done` may be one of steps or of
    samples."""
    peak = schedule.peak
    first = schedule.initial
    if schedule.warmup > 0 and done <= schedule.warmup:
        return first + ((peak - first) * float(done) / float(schedule.warmup))
    if schedule.kind == "constant":
        return peak
    if done > schedule.total:
        return schedule.final
    ratio = float(done - schedule.warmup) / float(schedule.total - schedule.warmup)
    if schedule.kind == "linear":
        height = 1.0 - ratio
    elif schedule.kind == "cosine":
        height = 0.5 * (math.cos(math.pi * ratio) + 1.0)
    else:
        anneal_start = schedule.total - schedule.decay
        height = 1.0
        if done > anneal_start:
            part = float(done - anneal_start) / float(schedule.decay)
            height = {
                "linear": 1.0 - part,
                "cosine": 0.5 * (math.cos(math.pi * part) + 1.0),
                "exponential": 2.0 * math.pow(0.5, part) - 1.0,
                "sqrt": 1.0 - math.sqrt(part),
            }[schedule.tail]
    return schedule.final + height * (peak - schedule.final)


def random_schedule(dice: random.Random, kind: Kind, tail: Tail) -> LRSchedule:
    """From one unit of length to 10**12 samples, often with phases of length 0."""
    total = dice.choice([dice.randint(2, 20), dice.randint(2, 10**5), dice.randint(2, 10**12)])
    warmup = dice.choice([0, dice.randrange(total), min(total - 1, dice.randint(1, 9))])
    peak = 10.0 ** dice.uniform(-6, 0)
    final = dice.choice([0.0, peak, peak * dice.random()])
    decay = dice.randint(1, total - warmup)
    initial = dice.choice([0.0, peak, peak * dice.random()])
    return LRSchedule(kind, peak, final, warmup, total, decay, tail, initial)


@pytest.mark.parametrize(("kind", "tail"), KINDS)
def test_random_schedules_have_megatrons_rates_in_steps_and_in_samples(
    kind: Kind, tail: Tail
) -> None:
    dice = random.Random(f"{kind} {tail}")
    for _ in range(RANDOM_SCHEDULES):
        schedule = random_schedule(dice, kind, tail)
        total = schedule.total
        ends = (0, schedule.warmup, total - schedule.decay, total)
        # one step, or one batch of samples, to both sides of each end
        size = dice.choice([1, dice.randint(1, 4096)])
        counts = {max(0, end + side * size) for end in ends for side in (-1, 0, 1)}
        counts |= {dice.randrange(2 * total) for _ in range(10)}
        for done in counts:
            expected = megatrons_rate(schedule, done)
            assert math.isclose(schedule.at(done), expected, rel_tol=1e-12), (schedule, done)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_random_schedules_without_warm_up_have_the_rates_of_torchs_schedulers(kind: Kind) -> None:
    dice = random.Random(kind)
    for _ in range(30):
        total = dice.randint(1, 60)
        peak = 10.0 ** dice.uniform(-6, 0)
        final = peak * dice.random()
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
        theirs = {
            "constant": lr_scheduler.ConstantLR(optimizer, 1.0),
            "linear": lr_scheduler.LinearLR(optimizer, 1.0, final / peak, total),
            "cosine": lr_scheduler.CosineAnnealingLR(optimizer, total, final),
        }[kind]
        ours = LRSchedule(kind, peak, final, 0, total, 0)
        for done in range(total + 1):
            assert ours.at(done) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
            optimizer.step()
            theirs.step()


def test_a_warm_up_from_an_initial_rate_has_the_rates_of_torchs() -> None:
    """LinearLR, and torchtitan's of (n + 1) / warmup, reach the peak a step earlier."""
    for warmup in (2, 3, 7, 50):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
        theirs = lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)
        ours = LRSchedule("constant", 1e-3, 0.0, warmup - 1, 100, 0, initial=1e-3 / warmup)
        for done in range(warmup + 5):
            assert ours.at(done) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
            optimizer.step()
            theirs.step()


def test_a_warm_up_has_the_rates_of_torchs_from_the_second_step_on() -> None:
    """torch's begins with peak / warmup, Megatron's with 0."""
    for warmup in (2, 3, 7, 50):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
        theirs = lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)
        ours = LRSchedule("constant", 1e-3, 0.0, warmup, 100, 0)
        for done in range(1, warmup + 5):
            assert ours.at(done) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
            optimizer.step()
            theirs.step()
