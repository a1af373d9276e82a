"""The limits of the first loss are those of the formulas in tools/training/first_loss.py, computed
here a second time, and losses at a limit are within it."""

import math
from dataclasses import replace

import pytest
import torch

from models.config import ModelConfig
from models.engine.passes import Share
from tools.training.first_loss import FirstLoss, expected_first_loss

VOCAB, HIDDEN = 64, 16


def model(**changes: object) -> ModelConfig:
    fields: dict[str, object] = {
        "vocab": VOCAB,
        "hidden": HIDDEN,
        "layers": 1,
        "heads": 2,
        "ffn": 32,
        "max_positions": 8,
        "init_std": 0.05,
    }
    return ModelConfig.model_validate(fields | changes)


def share(repeats: bool = False) -> Share:
    """Targets 1 to 8, once each; of which each repeats its own token, or none."""
    targets = torch.arange(1, 9).view(1, 8)
    return Share(targets.clone() if repeats else targets - 1, targets)


def margin(variance: float) -> float:
    """Six deviations of chance: of eight targets, each as frequent, and of a sum of V terms."""
    of_targets = math.sqrt(variance) * math.sqrt(8 * (1 / 8) ** 2)
    of_sum = math.sqrt((math.exp(variance) - 1) / VOCAB)
    return 6 * (of_targets + of_sum) + 1e-6


@pytest.mark.parametrize(("std", "variance"), [(0.05, 0.05**2 * HIDDEN), (1.0, 16.0), (10.0, 50.0)])
def test_a_head_of_its_own_adds_half_the_variance_of_its_logits_which_is_bounded(
    std: float, variance: float
) -> None:
    found = expected_first_loss(model(init_std=std, tied=False), share())
    assert found.uniform == pytest.approx(math.log(VOCAB))
    assert found.low == pytest.approx(math.log(VOCAB) - margin(variance))
    assert found.high == pytest.approx(math.log(VOCAB) + variance / 2 + margin(variance))
    assert found.sigma == pytest.approx(math.sqrt(variance))


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("cap", [0.0, 0.5, 30.0])
def test_a_tied_head_knows_its_own_token(repeats: bool, cap: float) -> None:
    variance = 1.0**2 * HIDDEN
    own = math.sqrt(variance) * math.sqrt(HIDDEN)
    own = min(own, cap) if cap else own
    found = expected_first_loss(model(init_std=1.0, tied=True, final_softcap=cap), share(repeats))
    lowest = math.log(VOCAB) - (own if repeats else 0.0)
    highest = math.log(math.exp(math.log(VOCAB) + variance / 2) + math.exp(own))
    assert found.low == pytest.approx(lowest - margin(variance))
    assert found.high == pytest.approx(highest + margin(variance))


def test_targets_that_a_mask_leaves_out_do_not_count() -> None:
    tokens = torch.tensor([[1, 2, 3, 4]])
    targets = torch.tensor([[1, 5, 5, 6]])
    mask = torch.tensor([[0.0, 1.0, 1.0, 0.0]])
    found = expected_first_loss(model(init_std=1.0, tied=True), Share(tokens, targets, mask))
    one_target = math.sqrt(HIDDEN) * 1.0
    of_sum = math.sqrt((math.exp(HIDDEN) - 1) / VOCAB)
    assert found.low == pytest.approx(math.log(VOCAB) - 6 * (one_target + of_sum))


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_mask_of_one_target_is_one_and_a_mask_of_none_counts_as_no_mask(weight: float) -> None:
    mask = torch.zeros(1, 8)
    mask[0, 0] = weight
    of_one = replace(share(), mask=mask)
    one_target = math.sqrt(HIDDEN)
    of_eight = one_target * math.sqrt(8 * (1 / 8) ** 2)
    of_sum = math.sqrt((math.exp(HIDDEN) - 1) / VOCAB)
    found = expected_first_loss(model(init_std=1.0, tied=False), of_one)
    of_targets = one_target if weight else of_eight
    assert found.low == pytest.approx(math.log(VOCAB) - 6 * (of_targets + of_sum))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("changes", "std"),
    [
        ({"logit_divisor": 4.0}, 0.2),
        ({"mup_base_hidden": 4}, 0.2),
        ({"init": {"head": 0.4, "embedding": 0.1}}, None),
    ],
    ids=str,
)
def test_the_logits_are_as_large_as_the_head_that_is_drawn(
    tied: bool, changes: dict[str, object], std: float | None
) -> None:
    if std is None:
        std = 0.1 if tied else 0.4
    found = expected_first_loss(model(init_std=0.8, tied=tied, **changes), share())
    assert found.sigma == pytest.approx(std * math.sqrt(HIDDEN))


def test_logits_of_no_size_leave_room_for_rounding_alone() -> None:
    found = expected_first_loss(model(init_std=1e-12, tied=False), share())
    assert found.high - found.uniform == pytest.approx(1e-6, rel=1e-3)
    assert found.uniform - found.low == pytest.approx(1e-6, rel=1e-3)


def test_a_loss_at_a_limit_is_within_and_one_beyond_is_told() -> None:
    limits = FirstLoss(uniform=4.0, low=3.0, high=5.0, sigma=1.0)
    assert limits.problem(3.0) == limits.problem(5.0) == limits.problem(4.5) == ""
    for loss in (2.999, 5.001, math.nan, math.inf):
        assert "lies between 3.0000 and 5.0000" in limits.problem(loss)


def test_a_loss_of_equal_logits_is_told_unless_logits_are_nearly_equal_anyway() -> None:
    limits = FirstLoss(uniform=4.0, low=3.0, high=5.0, sigma=0.03)
    for loss in (4.0, 4.0 + 0.9e-6, 4.0 - 0.9e-6):
        assert "all logits are equal" in limits.problem(loss)
    assert limits.problem(4.0 + 1.1e-6) == ""
    exact = FirstLoss(uniform=0.0, low=-1.0, high=1.0, sigma=0.03)
    assert "all logits are equal" in exact.problem(1e-6)
    assert FirstLoss(0.0, -1.0, 1.0, sigma=0.029).problem(0.0) == ""
