"""The rule by which a step is a spike: what leaves its band is named, ordinary runs never are."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

from megaprec.diagnose.spike_monitor import MEMORY, NEEDED, WINDOW, SpikeMonitor
from megaprec.optim.decision.step_report import SPIKE, StepReport
from tests.work import calls_of

# losses, gradient norms and tokens of the steps of real runs of other shapes, by name
CLEAN = json.loads((Path(__file__).parent / "clean_runs.json").read_text())
TOKENS = 128
BLOCK = 8  # steps whose noise is moved together


class Step(NamedTuple):
    loss: float
    norm: float
    tokens: int = TOKENS
    outcome: Any = "applied"


def report(step: Step) -> StepReport:
    return StepReport(step.outcome, step.loss, step.norm, 0, 0.0, (0,), 1.0, 0.1)


def spikes(steps: Sequence[Step], monitor: SpikeMonitor | None = None) -> list[int]:
    """The numbers, from 1, of the steps that are spikes."""
    monitor = monitor or SpikeMonitor()
    return [
        number
        for number, step in enumerate(steps, 1)
        if monitor.note(report(step), monitor.limits(step.tokens), step.tokens)
    ]


def quiet(count: int, seed: int = 0) -> list[Step]:
    dice = random.Random(seed)
    return [
        Step(3.0 * math.exp(0.02 * dice.gauss(0, 1)), math.exp(0.2 * dice.gauss(0, 1)))
        for _ in range(count)
    ]


def resampled(steps: Sequence[Step], seed: int) -> list[Step]:
    """Another run with the trends of a real one, and its noise in another order of blocks."""
    dice = random.Random(seed)
    losses = _with_other_noise([step.loss for step in steps], dice)
    norms = _with_other_noise([step.norm for step in steps], dice)
    return [
        step._replace(loss=loss, norm=norm)
        for step, loss, norm in zip(steps, losses, norms, strict=True)
    ]


def _with_other_noise(values: Sequence[float], dice: random.Random) -> list[float]:
    logs = [math.log(value) for value in values]
    trend = [median(logs[max(0, at - 4) : at + 5]) for at in range(len(logs))]
    noise = [value - smooth for value, smooth in zip(logs, trend, strict=True)]
    # from nearby: the noise of other parts of a run is another
    moved: list[float] = []
    while len(moved) < len(noise):
        first = len(moved) + dice.randint(-2 * BLOCK, 2 * BLOCK)
        first = min(max(0, first), len(noise) - BLOCK)
        moved += noise[first : first + BLOCK]
    return [math.exp(smooth + extra) for smooth, extra in zip(trend, moved, strict=False)]


def clean(name: str) -> list[Step]:
    return [Step(*numbers) for numbers in CLEAN[name]]


@pytest.mark.parametrize("name", CLEAN)
def test_a_real_run_without_a_fault_has_no_spike(name: str) -> None:
    steps = clean(name)
    assert len(steps) >= 2 * WINDOW
    assert spikes(steps) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", CLEAN)
def test_ten_other_runs_with_the_noise_of_a_real_one_have_no_spike(name: str) -> None:
    assert [spikes(resampled(clean(name), seed)) for seed in range(10)] == [[]] * 10


@pytest.mark.parametrize("name", CLEAN)
def test_a_loss_and_a_norm_far_above_the_others_are_named_in_a_real_run(
    name: str,
) -> None:
    steps = clean(name)
    higher, larger = WINDOW + 20, WINDOW + 50
    steps[higher - 1] = steps[higher - 1]._replace(loss=steps[higher - 1].loss * 40)
    steps[larger - 1] = steps[larger - 1]._replace(norm=steps[larger - 1].norm * 40)
    assert spikes(steps) == [higher, larger]


def test_no_step_is_judged_before_enough_are_applied() -> None:
    steps = quiet(NEEDED)
    high = Step(30.0, 1.0)
    assert spikes([*steps[:-1], high]) == []
    assert spikes([*steps, high]) == [NEEDED + 1]


def test_steps_that_are_not_finite_are_no_part_of_the_band_and_no_spike() -> None:
    nan = float("nan")
    overflow = Step(nan, math.inf, TOKENS, "skipped_overflow")
    nothing = Step(nan, 0.0, TOKENS, "skipped_no_tokens")
    monitor = SpikeMonitor()
    steps = quiet(WINDOW)
    spikes(steps, monitor)
    limits = monitor.limits(TOKENS)
    assert spikes([overflow, nothing] * WINDOW, monitor) == []
    assert monitor.limits(TOKENS) == limits


@pytest.mark.parametrize("patience", [1, 3, 8, 20])
def test_another_level_is_a_spike_until_patience_ends(patience: int) -> None:
    monitor = SpikeMonitor(patience)
    spikes(quiet(MEMORY), monitor)
    assert skips([Step(30.0, 100.0)] * patience, monitor) == [*range(1, patience + 1)]
    assert monitor.hopeless


def test_two_spikes_that_were_applied_hide_no_third() -> None:
    steps = quiet(WINDOW + 30)
    places = (WINDOW + 5, WINDOW + 15, WINDOW + 25)
    for place in places:
        steps[place - 1] = Step(6.0, 20.0)
    assert spikes(steps) == [*places]


def test_what_comes_again_and_again_is_no_spike() -> None:
    steps = quiet(3 * WINDOW)
    for place in range(0, len(steps), 16):
        steps[place] = Step(6.0, 20.0)
    later = [number for number in spikes(steps) if number > WINDOW + 16]
    assert later == []


DRAWN = 20_000  # steps
PLANTED = 10.0  # times the usual loss and norm


def student(dice: random.Random, freedom: float) -> float:
    """Heavy tails: a value of Student's distribution."""
    return dice.gauss(0, 1) / math.sqrt(dice.gammavariate(freedom / 2, 2 / freedom))


def heavy_tails(freedom: float) -> list[float]:
    dice = random.Random(1)
    return [0.03 * student(dice, freedom) for _ in range(DRAWN)]


def correlated(memory: float) -> list[float]:
    """Noise of which a share stays from step to step."""
    dice = random.Random(2)
    values = [0.0]
    while len(values) < DRAWN:
        values.append(memory * values[-1] + math.sqrt(1 - memory**2) * 0.1 * dice.gauss(0, 1))
    return values


def hard_batches(share: float, factor: float) -> list[float]:
    """A share of the batches, at random places, has so many times the usual loss."""
    dice = random.Random(3)
    return [
        math.log(factor) * (dice.random() < share) + 0.02 * dice.gauss(0, 1) for _ in range(DRAWN)
    ]


def taken(noise: Sequence[float]) -> list[Step]:
    """Steps of which the loss has this noise, and the norm three times as much."""
    return [Step(3.0 * math.exp(value), math.exp(3 * value)) for value in noise]


def skips(steps: Sequence[Step], monitor: SpikeMonitor) -> list[int]:
    """The numbers, from 1, of the steps that a run leaves out which skips spikes."""
    found: list[int] = []
    for number, step in enumerate(steps, 1):
        limits = monitor.limits(step.tokens)
        if limits.loss < step.loss or limits.norm < step.norm:
            found.append(number)
            step = step._replace(outcome=SPIKE)
        monitor.note(report(step), limits, step.tokens)
    return found


LONG_RUNS = {
    "heavy tails": heavy_tails(3),
    "very heavy tails": heavy_tails(1.5),
    "noise that stays for 2 steps": correlated(0.5),
    "noise that stays for 10 steps": correlated(0.9),
    "noise that stays for 30 steps": correlated(0.97),
    "noise that stays for 100 steps": correlated(0.99),
    "noise that stays for 1000 steps": correlated(0.999),
    "one of 20 batches is hard": hard_batches(0.05, 1.5),
    "one of 20 batches is very hard": hard_batches(0.05, 10.0),
    "one of 5 batches is hard": hard_batches(0.2, 3.0),
}


@pytest.mark.cases(0, sample=4)
@pytest.mark.parametrize("name", LONG_RUNS)
def test_a_long_run_that_skips_spikes_never_stops_and_skips_what_it_would_note(name: str) -> None:
    steps = taken(LONG_RUNS[name])
    monitor = SpikeMonitor(patience=3)
    found: list[int] = []
    for start in range(0, DRAWN, 100):
        found += [start + number for number in skips(steps[start : start + 100], monitor)]
        assert not monitor.hopeless
    assert found == spikes(steps)
    assert len(found) <= DRAWN // 250


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize("share", [0.05, 0.03, 0.2])
def test_hard_batches_that_come_again_are_learned_by_a_run_that_skips_spikes(share: float) -> None:
    noise = hard_batches(share, 1.5)[:3000]
    hard = [number for number, value in enumerate(noise, 1) if value > 0.2]
    left_out = skips(taken(noise), SpikeMonitor())
    assert len(hard) > 60
    assert len(left_out) <= 0.05 * len(hard)


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize("noise", ["that stays", "normal"])
def test_rare_spikes_are_skipped_each_time(noise: str) -> None:
    dice = random.Random(4)
    values = hard_batches(0.0, 1.0) if noise == "normal" else correlated(0.9)
    planted: list[int] = []
    place = 300
    while place < 4000:
        planted.append(place)
        place += dice.randint(200, 800)
    for place in planted:
        values[place - 1] += math.log(PLANTED)
    steps = [Step(3.0 * math.exp(value), math.exp(value)) for value in values[:4000]]
    assert skips(steps, SpikeMonitor()) == planted


def test_a_loss_that_falls_and_stops_falling_is_no_spike() -> None:
    falling = [Step(10.0 * 0.9**number, 5.0 * 0.95**number) for number in range(60)]
    assert spikes([*falling, *[falling[-1]] * 60]) == []


def test_a_smaller_batch_may_have_more_noise() -> None:
    large = [step._replace(tokens=16 * TOKENS) for step in quiet(WINDOW)]
    monitor = SpikeMonitor()
    spikes(large, monitor)
    usual, smaller = monitor.limits(16 * TOKENS), monitor.limits(TOKENS)
    assert smaller.loss > usual.loss
    assert smaller.norm >= 4 * usual.norm
    assert monitor.limits(64 * TOKENS) == usual


def test_losses_that_are_not_positive_have_no_band() -> None:
    monitor = SpikeMonitor()
    spikes([Step(-1.0, 1.0)] * WINDOW, monitor)
    limits = monitor.limits(TOKENS)
    assert limits.loss == math.inf
    assert limits.norm < math.inf


def test_a_monitor_that_goes_on_from_its_saved_state_has_the_same_limits() -> None:
    steps = [*quiet(WINDOW + 9), Step(30.0, 1.0), *quiet(9, seed=1)]
    whole = SpikeMonitor()
    first = SpikeMonitor()
    for number, step in enumerate(steps):
        if number % 7 == 0:
            saved = json.loads(json.dumps(first.state_dict()))
            first = SpikeMonitor()
            first.load_state_dict(saved)
        limits = whole.limits(step.tokens)
        assert first.limits(step.tokens) == limits
        whole.note(report(step), limits, step.tokens)
        first.note(report(step), limits, step.tokens)
        assert first.state_dict() == whole.state_dict()


def test_after_too_many_spikes_in_a_row_it_is_hopeless_until_it_is_loaded_again() -> None:
    monitor = SpikeMonitor(patience=3)
    spikes(quiet(WINDOW), monitor)
    spike = Step(30.0, 1.0, TOKENS, "skipped_spike")
    spikes([spike] * 2, monitor)
    assert not monitor.hopeless
    spikes([spike], monitor)
    assert monitor.hopeless
    assert "3 spikes in a row" in monitor.advice()
    again = SpikeMonitor(patience=3)
    again.load_state_dict(monitor.state_dict())
    assert not again.hopeless
    spikes([quiet(1)[0]], monitor)
    assert not monitor.hopeless


def test_the_limits_of_a_step_cost_no_more_in_a_long_run() -> None:
    monitor = SpikeMonitor()
    spikes(quiet(MEMORY), monitor)
    calls = calls_of(lambda: monitor.limits(TOKENS))
    assert calls < 20 * MEMORY  # less than a millisecond
    spikes(quiet(3 * MEMORY), monitor)
    assert calls_of(lambda: monitor.limits(TOKENS)) == calls
