"""Predictions for published runs are as near to their measured speeds as is said."""

import pytest

from tests.planning.backtest import (
    Compared,
    by_what_is_known,
    compare,
    errors_of,
    published_runs,
    rank_correlations,
)
from tests.planning.fit import fit_of, held_out, in_sample, published_constants
from tools.analysis.planning.accuracy import MEASURED, PLAIN, Accuracy


@pytest.fixture(scope="module")
def compared() -> list[Compared]:
    return compare(published_runs())


def holds(said: Accuracy, errors: list[float]) -> None:
    """Compare what a plan prints with the errors, to half a per cent."""
    found = errors_of(errors)
    assert found.runs == said.runs
    assert found.median == pytest.approx(said.median, abs=0.005)
    assert found.most == pytest.approx(said.most, abs=0.005)


@pytest.mark.campaign
def test_the_error_that_a_plan_prints_is_that_of_runs_held_out_of_the_fit() -> None:
    """Also the constants in use are as good as those fitted once more, to a per cent, so they are
    those of the fit and not of other hands."""
    fit = fit_of(published_runs())
    held = held_out(fit)
    holds(PLAIN, [plain for plain, _ in held.errors])
    holds(MEASURED, [factored for _, factored in held.errors if factored is not None])
    in_use = in_sample(fit, published_constants())
    refitted = in_sample(fit, fit.constants())
    medians = [errors_of([plain for plain, _ in errors]).median for errors in (in_use, refitted)]
    assert medians[0] == pytest.approx(medians[1], abs=0.01)


@pytest.mark.slow
def test_the_errors_in_sample_are_those_of_the_page(
    compared: list[Compared],
) -> None:
    plain = errors_of([one.error for one in compared])
    assert plain.median == pytest.approx(0.038, abs=0.005)
    assert plain.most == pytest.approx(0.305, abs=0.005)
    calibrated = errors_of([one.calibrated for one in compared if one.calibrated is not None])
    assert calibrated.median == pytest.approx(0.035, abs=0.005)
    assert calibrated.most == pytest.approx(0.225, abs=0.005)


@pytest.mark.slow
def test_fp8_is_foretold_as_well_as_bf16(compared: list[Compared]) -> None:
    by_precision: dict[str, list[float]] = {"bf16": [], "fp8": []}
    for one in compared:
        by_precision[one.run.row["precision"]].append(one.error)
    medians = {name: errors_of(errors).median for name, errors in by_precision.items()}
    assert medians["fp8"] < medians["bf16"] + 0.03


@pytest.mark.slow
def test_the_order_of_a_models_layouts_is_as_near_as_the_page_says(
    compared: list[Compared],
) -> None:
    """The goal of 0.8 is met on one machine, and missed on two, whose network was slow."""
    correlations = rank_correlations(compared)
    one_machine = correlations.pop("nanotron 2024, 24 x 2048, 8 H100, bf16")
    assert one_machine > 0.8
    two_machines = correlations.pop("nanotron 2024, 24 x 2048, 16 H100, bf16")
    assert two_machines == pytest.approx(0.78, abs=0.01)
    assert not correlations


@pytest.mark.slow
def test_facts_without_a_source_do_not_make_all_of_the_accuracy() -> None:
    """With those of a source alone half of the runs are within 5.4 %, and the page says so."""
    known = by_what_is_known(published_runs())
    sourced = errors_of([one.error for one in known["facts with a source"]])
    assert sourced.median == pytest.approx(0.054, abs=0.005)
    assert sourced.most == pytest.approx(0.372, abs=0.005)
