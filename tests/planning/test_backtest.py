"""Predictions for published runs are as near to their measured speeds as is said."""

import pytest

from tests.planning.backtest import Compared, compare, errors_of, published_runs, rank_correlations
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


@pytest.mark.slow
def test_the_error_that_a_plan_prints_is_that_of_the_published_runs(
    compared: list[Compared],
) -> None:
    holds(PLAIN, [one.error for one in compared])
    holds(MEASURED, [one.calibrated for one in compared if one.calibrated is not None])


@pytest.mark.slow
def test_fp8_is_foretold_as_well_as_bf16(compared: list[Compared]) -> None:
    by_precision: dict[str, list[float]] = {"bf16": [], "fp8": []}
    for one in compared:
        by_precision[one.run.row["precision"]].append(one.error)
    medians = {name: errors_of(errors).median for name, errors in by_precision.items()}
    assert medians["fp8"] < medians["bf16"] + 0.03


@pytest.mark.slow
def test_layouts_of_a_model_are_not_in_another_order(compared: list[Compared]) -> None:
    """Of the two groups of which enough layouts were published one has a slow network, and both
    have pipelines that were slower than their schedules explain (docs/planning.md)."""
    correlations = rank_correlations(compared)
    assert len(correlations) == 2
    for name, value in correlations.items():
        assert value > 0.4, name
