"""The forecast of the loss after twice the steps, on real runs whose continuation is known."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.verdict.forecast_runs import CURVES, curves, texts, train
from tools.analysis.verdict.forecast import FEWEST, Forecast, forecast

# the factors of a forecast were taken from the runs before this number
FIRST_UNSEEN = 45
FIRST_STEP = 40  # of which a forecast is tried
UNSEEN = {number: curve for number, curve in curves().items() if number >= FIRST_UNSEEN}


def forecasts(curve: dict[str, Any], every: int) -> Iterator[tuple[Forecast, float]]:
    """Yield what would have been forecast at each evaluation of which every nth is known, and the
    loss that came."""
    steps = np.array(curve["steps"])
    losses = np.array(curve["losses"])
    loss_of_step = dict(zip(curve["steps"], curve["losses"], strict=True))
    for end, step in enumerate(curve["steps"], 1):
        if step >= FIRST_STEP and 2 * step in loss_of_step:
            # the newest one is known
            known = np.arange(end)[::-1][::every][::-1]
            made = forecast(steps[known].tolist(), losses[known], [1e-3] * len(known))
            yield made, loss_of_step[2 * step]


def held(made: Forecast, loss: float) -> bool:
    return made.low <= loss <= made.high


@pytest.mark.parametrize("every", [1, 2])
def test_the_band_holds_nine_times_in_ten_on_runs_that_it_was_not_made_of(every: int) -> None:
    """However dense the evaluations are."""
    found = [
        held(*one)
        for curve in UNSEEN.values()
        for one in forecasts(curve, every)
        if not one[0].reason
    ]
    assert len(found) >= 100
    assert sum(found) >= 0.9 * len(found)


def test_so_does_the_last_forecast_of_each_run() -> None:
    found = list[bool]()
    for curve in UNSEEN.values():
        known = [held(*one) for one in forecasts(curve, 1) if not one[0].reason]
        found += known[-1:]
    assert len(UNSEEN) >= 40
    assert len(found) >= len(UNSEEN) / 2
    assert sum(found) >= 0.9 * len(found)


def test_the_band_is_no_wider_than_what_the_loss_fell_in_the_last_doubling() -> None:
    for curve in UNSEEN.values():
        steps = np.array(curve["steps"])
        losses = np.array(curve["losses"])
        made = forecast(curve["steps"], losses, [1e-3] * len(losses))
        if not made.reason:
            fell = losses[steps <= steps[-1] // 2][-1] - losses[-1]
            assert made.low < made.loss < made.high < losses[-1] + 0.5 * fell
            assert made.high - made.low < 2 * fell


@pytest.mark.campaign
def test_the_band_holds_on_runs_that_no_one_has_seen(tmp_path: Any) -> None:
    sources = texts(tmp_path, None)
    found = list[bool]()
    for number in range(1000, 1050):
        text = sources[number % len(sources)]
        if text is not None:
            curve = train(number, text, tmp_path)
            found += [held(*one) for one in forecasts(curve, 1) if not one[0].reason]
    assert sum(found) >= 0.9 * len(found)


def test_the_curves_are_those_of_real_runs_of_all_families() -> None:
    families = {curve["settings"][0] for curve in curves().values()}
    assert len(families) == 12, CURVES
    assert {curve["text"] for curve in UNSEEN.values()} == {
        "python",
        "cpp",
        "prose",
        "docs",
        "shakespeare",
    }


def test_what_comes_is_not_known_where_the_last_doublings_do_not_tell() -> None:
    steps = [50 * number for number in range(1, 33)]
    at = np.array(steps, np.float64)
    falling = 5 + 3 * at**-0.3
    constant = [1e-3] * 32
    assert not forecast(steps, falling, constant).reason
    cosine = [1e-3 * (1 + math.cos(math.pi * step / 1600)) / 2 for step in steps]
    assert "learning rate changed" in forecast(steps, falling, cosine).reason
    assert "are not known" in forecast(steps, falling, [*constant[1:], math.nan]).reason
    few = 3 * FEWEST + 1  # three of these lie in the doubling before the last one
    assert "too few" in forecast(steps[:few], falling[:few], constant[:few]).reason
    assert "does not fall" in forecast(steps, falling[::-1], constant).reason
    assert "still brings more" in forecast(steps, 9 - (at / 400) ** 1.5, constant).reason
    noisy = falling + np.random.default_rng(0).normal(0, 0.5, 32)
    assert forecast(steps, noisy, constant).reason
