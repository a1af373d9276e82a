"""The verdict on a curve of losses, on curves of which it is known what they do."""

from collections import Counter
from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest

from tests.work import calls_of
from tools.analysis.verdict.student import quantile
from tools.analysis.verdict.trend import Evaluation, Trend, chance_of_order, difference, judge

PIECES = 64
TOKENS = np.full(PIECES, 128.0)


def curve(
    dice: np.random.Generator, means: list[float], jitter: float, hard: float = 1.0
) -> list[Evaluation]:
    """Evaluations of a text with easy and hard pieces (`hard`), each of which moves by itself."""
    difficulty = dice.normal(0, hard, PIECES)
    evaluations = []
    for number, mean in enumerate(means, 1):
        level = mean + dice.normal(0, jitter)
        losses = difficulty + level + dice.normal(0, 0.05, PIECES)
        evaluations.append(Evaluation(50 * number, losses * 128, TOKENS))
    return evaluations


def verdicts(shape: Callable[[float], float], count: int, jitter: float) -> Counter[str]:
    dice = np.random.default_rng(count)
    found = Counter[str]()
    for _ in range(100):
        means = [shape(number / count) for number in range(1, count + 1)]
        found[judge(curve(dice, means, jitter), constant(count)).kind] += 1
    return found


def constant(count: int) -> list[float]:
    """The learning rates of so many evaluations of a run that does not change its own."""
    return [1e-3] * count


@pytest.mark.parametrize("count", [4, 6, 12, 30])
@pytest.mark.parametrize("jitter", [0.0, 0.005, 0.02])
def test_a_falling_loss_is_still_learning_and_a_flat_one_rarely(count: int, jitter: float) -> None:
    assert verdicts(lambda share: 5 + 3 * share**-0.4, count, jitter)["still learning"] >= 95
    flat = verdicts(lambda _: 4.0, count, jitter)
    assert flat["still learning"] <= 12 and flat["rises"] <= 12


def test_a_flat_loss_that_is_measured_well_has_stopped() -> None:
    assert verdicts(lambda _: 4.0, 30, 0.005)["has stopped"] >= 85
    assert verdicts(lambda share: 5 + 3 * share**-0.4, 30, 0.005)["has stopped"] == 0


@pytest.mark.parametrize("count", [12, 30])
def test_a_loss_that_rises_after_its_lowest_point_is_found(count: int) -> None:
    bowl = verdicts(lambda share: 4 + 0.5 * (share - 0.5) ** 2 * 4, count, 0.005)
    assert bowl["rises"] >= 95
    means = [4 + 0.5 * (number / count - 0.5) ** 2 * 4 for number in range(1, count + 1)]
    found = judge(curve(np.random.default_rng(1), means, 0.0), constant(count))
    assert abs(found.since - 25 * count) <= 100  # the step of the lowest point


def test_too_few_evaluations_or_samples_are_no_verdict() -> None:
    dice = np.random.default_rng(0)
    assert judge(curve(dice, [3.0, 2.0, 1.0], 0.0), constant(3)).kind == "not known"
    few = [Evaluation(step, np.ones(3) / step, np.ones(3)) for step in range(1, 9)]
    assert judge(few, constant(8)) == Trend("not known", "too few samples: 3, of 4 at least")


@pytest.mark.parametrize(
    ("last_rate", "kind"),
    [(1e-3, "still learning"), (1e-4, "still learning"), (0.0, "fell with its rate")],
)
def test_a_loss_that_falls_while_the_rate_comes_to_its_end_is_not_called_still_learning(
    last_rate: float, kind: str
) -> None:
    means = [5 + 3 * number**-0.4 for number in range(1, 13)]
    rates = np.linspace(1e-3, last_rate, 12).tolist()
    assert judge(curve(np.random.default_rng(0), means, 0.0), rates).kind == kind


@pytest.mark.parametrize("shape", [lambda _: 4.0, lambda share: 5 + 3 * share**-0.4])
def test_the_verdict_is_the_same_however_densely_a_wandering_loss_is_evaluated(
    shape: Callable[[float], float],
) -> None:
    """The loss of neighbouring evaluations goes up and down together."""
    found = {100: Counter[str](), 1600: Counter[str]()}
    for seed in range(60):
        dice = np.random.default_rng(seed)
        wander = dice.normal(0, 0.005, 101)
        moments = np.linspace(0, 1, 1601)[1:]
        jitter = np.interp(moments, np.linspace(0, 1, 101), wander)
        means = [shape(moment) + up for moment, up in zip(moments.tolist(), jitter, strict=True)]
        for count, kinds in found.items():
            some = means[1600 // count - 1 :: 1600 // count]
            kinds[judge(curve(dice, some, 0.0), constant(count)).kind] += 1
    sparse = found[100]
    dense = found[1600]
    assert max(abs(sparse[kind] - dense[kind]) for kind in {*sparse, *dense}) <= 12


def test_the_work_of_a_verdict_grows_with_the_number_of_evaluations() -> None:
    dice = np.random.default_rng(0)

    def work(count: int) -> int:
        means = [5 + 3 * number**-0.4 for number in range(1, count + 1)]
        evaluations = curve(dice, means, 0.01)
        return calls_of(lambda: judge(evaluations, constant(count)))

    assert work(4000) < 20 * work(400)


def test_a_paired_difference_is_known_better_than_both_losses() -> None:
    """Its interval holds the true difference in about 95 of 100 cases, however hard the text is."""
    dice = np.random.default_rng(5)
    held = 0
    for _ in range(300):
        first, second = curve(dice, [4.0, 3.99], 0.0, hard=2.0)
        change = difference(first, second)
        held += abs(change.nats + 0.01) <= change.margin
        assert change.error < first.error / 10
    assert 270 <= held <= 297


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_chance_of_an_order_is_that_among_all_orders(count: int) -> None:
    def rising(order: tuple[int, ...]) -> int:
        return sum(order[i] < order[j] for j in range(count) for i in range(j))

    orders = list(permutations(range(count)))
    for order in orders[:20]:
        as_steady = sum(rising(other) <= rising(order) for other in orders)
        assert chance_of_order(order) == pytest.approx(as_steady / len(orders))


def test_quantiles_of_student_are_those_of_the_table() -> None:
    for freedom, expected in ((3, 3.182), (5, 2.571), (10, 2.228), (63, 1.998)):
        assert quantile(0.975, freedom) == pytest.approx(expected, rel=0.01)
