"""What rounding is, and what is no rounding: by magnitude, not by being exactly zero."""

from pathlib import Path

import pytest
import torch

from tests.parity.campaign import accused
from tests.parity.runs import ready, references
from tools.verify.parity.compare import StepComparison
from tools.verify.parity.noise import (
    FLOAT64_SLACK,
    FLOAT64_TOLERANCE,
    LOW_PRECISION_SLACK,
    WIDEST_FLOAT64_BOUND,
    Noise,
    ReferenceValues,
    count_rounding_elements,
    count_zeros,
    rounding_mask,
)


@pytest.mark.slow
def test_a_bias_of_keys_is_rounding_and_rows_of_tokens_that_never_occur_are_not() -> None:
    truth, shaken = references("gpt2")
    found = count_rounding_elements(truth, shaken)
    keys = {name for name in truth.names if name.endswith("key.bias")}
    assert keys <= found.keys()
    assert all(found[name] == truth.tensors["before/weight"][name].numel() for name in keys), (
        "every element of it"
    )
    rest = {name: count for name, count in found.items() if name not in keys}
    assert sum(rest.values()) < 0.01 * sum(
        t.numel() for t in truth.tensors["before/weight"].values()
    ), rest
    assert (truth.tensors["gradient/0"]["embedding.weight"] == 0).any() or ready("gpt2").model.tied


def test_an_element_of_rounding_is_not_a_zero_though_it_may_be_one() -> None:
    theirs = {
        "noise": torch.tensor([0.0, 1e-18, -2e-18]),
        "rows": torch.tensor([[0.0, 0.0], [1.0, 2.0]]),
    }
    shaken = {"noise": torch.tensor([2e-18, 0.0, 1e-18]), "rows": theirs["rows"] * (1 + 1e-15)}
    assert rounding_mask(theirs["noise"], shaken["noise"]).all()
    assert not rounding_mask(theirs["rows"], shaken["rows"]).any()
    other = {"noise": torch.tensor([1e-18, 0.0, 0.0]), "rows": theirs["rows"]}
    assert count_zeros(other, theirs, shaken) == count_zeros(theirs, theirs, shaken) == 2
    lost = {**other, "rows": torch.tensor([[0.0, 1e-20], [1.0, 2.0]])}
    assert count_zeros(lost, theirs, shaken) == 1, "an element that ought to be zero and is not"


def test_the_bound_is_what_rounding_does_there_and_nothing_is_told_where_that_is_much() -> None:
    theirs = {"a": torch.ones(4).double(), "b": torch.ones(4).double()}
    scale = {"a": 2.0, "b": 2.0}
    shaken = {"a": theirs["a"] + 1e-16, "b": theirs["b"] + 1e-7}
    bounds = Noise().tensor_bounds(ReferenceValues(theirs, shaken), scale)
    assert bounds["a"] == FLOAT64_TOLERANCE
    assert bounds["b"] == pytest.approx(FLOAT64_SLACK * 1e-7)
    assert bounds["b"] > WIDEST_FLOAT64_BOUND


def test_a_bound_in_the_runs_own_precision_is_what_rounding_does_in_any_layer_and_any_draw() -> (
    None
):
    truth = {f"layers.{n}.bias": torch.ones(4).double() for n in range(2)} | {
        "norm": torch.ones(4).double()
    }
    scale = dict.fromkeys(truth, 2.0)
    own = {name: t + 0.01 for name, t in truth.items()}
    moved = {**own, "layers.1.bias": truth["layers.1.bias"] + 0.09}
    values = ReferenceValues(own, float64=truth, draws=[own, moved])
    bounds = Noise(epsilon=0.001).tensor_bounds(values, scale)
    assert (
        bounds["layers.0.bias"]
        == bounds["layers.1.bias"]
        == pytest.approx(LOW_PRECISION_SLACK * 0.09)
    )
    assert LOW_PRECISION_SLACK * 0.01 < bounds["norm"] < LOW_PRECISION_SLACK * 0.06, (
        "as far as all tensors of a run on average"
    )


def test_bounds_of_a_plain_run_are_hardly_wider_than_without_the_measure() -> None:
    truth, shaken = references("gpt2")
    for step in (0, 2):
        found = list(
            StepComparison(truth, truth, Noise(shaken), step).tensors(
                "gradient", f"gradient/{step}", truth.names
            )
        )
        real = [d for d in found if not d.name.endswith("key.bias")]
        assert max(d.bound for d in real) < 20 * FLOAT64_TOLERANCE
        assert not any(d.inconclusive for d in found)


# Rounding moves biases of keys by whole updates (35), small gradients by much (42), and signs of
# gradients that Adam makes whole updates of, in the run's own precision (76).
@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("seed", [35, 42, pytest.param(76, marks=pytest.mark.slow)])
def test_a_drawn_run_without_a_fault_is_not_accused(seed: int, tmp_path: Path) -> None:
    compared, wrong = accused(seed, tmp_path, most=3 if seed == 76 else 1)
    assert compared
    assert not wrong
