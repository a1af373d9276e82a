"""The moving average of the weights: the plain formula over each applied step, in any layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.logical import (
    LAYOUTS,
    SHAPES,
    Case,
    Tensors,
    differing,
    give,
    initial,
    make_optimizer,
    results,
)

DECAY = 0.75
EMA = {"ema": DECAY}
EXACT = Case("fp64", steps=5, bad=(2,), options=EMA)
SHARDED: dict[str, dict[str, Any]] = {
    "zero-0": {"zero_size": 1},
    "zero-1": {"zero_size": 0},
    "zero-2": {"shard_gradients": True},
}
PLANS: dict[str, Case] = {
    "fp32": Case("fp32", options=EMA),
    "bf16": Case("bf16", options=EMA),
    "fp16": Case("fp16", options=EMA, bad=(1,), fine=8),
    "split masters": Case("bf16", {"masters": "split"}, EMA),
    "no masters": Case("bf16", {"masters": "none"}, EMA),
    "stochastic": Case("bf16", {"rounding": "stochastic"}, EMA),
    "muon": Case("bf16", options=EMA, rule=("muon", {"by_adamw": ["embedding.*"]})),
    "sgd": Case("fp32", options=EMA, rule=("sgd", {})),
    "torch's rule": Case("fp32", options=EMA, rule=("RAdam", {})),
}


def plain_averages(case: Case) -> tuple[dict[str, np.ndarray], int]:
    """Return the averages that a loop over the whole weights of one process has, in float64, and the
    number of applied steps."""
    optimizer = make_optimizer(None, replace(case, options={}))
    averages = {name: initial(name, torch.float64).numpy() for name in SHAPES}
    applied = 0
    for step in range(case.steps):
        give(optimizer, step, case.fine)
        if step in case.bad:
            optimizer.all_buffers()[0].grads[0] = float("inf")
        if optimizer.step(case.lr).outcome != "applied":
            continue
        applied += 1
        for key, weights in optimizer.state_dict()["tensors"].items():
            kind, _, name = key.partition("/")
            if kind == "weight":
                averages[name] = DECAY * averages[name] + (1 - DECAY) * weights.double().numpy()
    return averages, applied


def require_close(ours: Tensors, theirs: dict[str, np.ndarray], tolerance: float) -> None:
    assert ours.keys() == theirs.keys() == SHAPES.keys()
    for name, average in theirs.items():
        np.testing.assert_allclose(ours[name].double().numpy(), average, tolerance, tolerance)


@pytest.mark.parametrize("axes", [{}, *LAYOUTS], ids=str)
def test_the_average_is_that_of_a_plain_loop_in_every_layout_and_sharding(
    axes: dict[str, int], tmp_path: Path
) -> None:
    expected, applied = plain_averages(EXACT)
    assert applied == EXACT.steps - 1, "a step is skipped"
    cases = [replace(EXACT, options={**EMA, **sharding}) for sharding in SHARDED.values()]
    cases.append(replace(EXACT, restart=3))
    cases.append(replace(EXACT, restart=3, folder=tmp_path))
    for found in results(cases if axes else cases[-2:], axes):
        require_close(found.kinds["ema"], expected, 1e-12)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return dict(zip(PLANS, results([*PLANS.values()], {}), strict=True))


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_averages_have_the_same_bits_in_every_layout_and_change_no_other_bit(
    axes: dict[str, int], alone: dict[str, Any]
) -> None:
    for (name, case), found in zip(PLANS.items(), results([*PLANS.values()], axes), strict=True):
        assert differing(found, alone[name]) == [], name
        dtype = {values.dtype for values in found.kinds["ema"].values()}
        assert dtype == {torch.float32}
        assert found.kinds["ema"].keys() == SHAPES.keys()
