"""Whatever the schedule, the same model is trained: bit for bit where gradients are summed in the
same order."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from parallel.pipeline.kinds import KINDS, schedule
from tests import oracle
from tests.layouts import Result, Run, batches, train, train_all
from tests.models.test_parity import differing

MODEL: dict[str, Any] = {
    "family": "llama",
    "layers": 8,
    "hidden": 16,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 24,
    "vocab": 101,
    "max_positions": 10,
}
# with smaller weights AdamW magnifies rounding
TIED = {
    **MODEL,
    "tied": True,
    "bias": True,
    "init_std": 0.1,
}


def require_same_bits(result: Result, expected: Result, what: str) -> None:
    """In the first step: the norm by which it is clipped is summed over ranks, in another order if
    stages move."""
    (ours,), (theirs,) = result.grads, expected.grads
    assert not (
        different := [name for name, grad in theirs.items() if not torch.equal(ours[name], grad)]
    ), f"{what}: gradients of {different} differ"


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("pp", "compute"), [(1, "bf16"), (2, "fp32"), (4, "bf16")])
def test_gradients_are_bitwise_those_of_one_rank_in_every_schedule(pp: int, compute: str) -> None:
    runs = [Run(MODEL, compute, kind=kind, micro_batch=1, steps=1) for kind in KINDS]
    expected = train(Run(MODEL, compute, micro_batch=1, steps=1))
    for run, result in zip(runs, train_all(runs, pp=pp), strict=True):
        require_same_bits(result, expected, run.kind)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("sequence", [False, True], ids=["whole sequence", "cut sequence"])
def test_tensor_parallel_products_may_be_put_off_too(sequence: bool) -> None:
    kinds = ("interleaved", "zb-h1", "zb-v", "dualpipe-v")
    runs = [
        Run(MODEL, "fp32", kind=kind, micro_batch=1, sequence=sequence, steps=1) for kind in kinds
    ]
    expected = train(Run(MODEL, "fp32", sequence=sequence, micro_batch=1, steps=1), tp=2)
    for run, result in zip(runs, train_all(runs, tp=2, pp=2), strict=True):
        require_same_bits(result, expected, run.kind)


@cache
def plain() -> list[dict[str, Any]]:
    run = Run(TIED, micro_batch=1, steps=2)
    return oracle.train(
        run.config, train(Run(TIED, micro_batch=1, steps=1)).before, batches(run), run.lr, run.clip
    )


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "layout", [(1, 2, 1), (2, 2, 1), (1, 2, 2)], ids=lambda x: "tp{} pp{} dp{}".format(*x)
)
def test_tied_weights_count_once_though_first_and_last_stage_share_a_rank(
    layout: tuple[int, int, int],
) -> None:
    runs = [
        Run(TIED, kind=kind, micro_batch=1, sequence=layout[0] > 1, steps=2)
        for kind in ("zb-h1", "zb-v", "dualpipe-v")
    ]
    runs.append(Run(TIED, kind="interleaved", chunks=3, micro_batch=1, steps=2))
    for run, result in zip(runs, train_all(runs, *layout), strict=True):
        for report, grads, record in zip(result.reports, result.grads, plain(), strict=True):
            assert report.loss == pytest.approx(record["loss"], rel=1e-12)
            assert report.grad_norm == pytest.approx(record["norm"], rel=1e-12)
            assert not (wrong := differing(grads, record["grads"])), f"{run.kind}: ratios {wrong}"
        assert not (wrong := differing(result.after, plain()[-1]["weights"])), (
            f"{run.kind}: ratios {wrong}"
        )


def in_a_v(microbatches: int) -> str:
    """Four stages on two ranks, of which the first one has both ends, and computes the weight
    gradients of the last stage at the very end."""
    first, second = str(schedule("zb-v", 2, microbatches)).splitlines()
    words = sorted(first.split(), key=lambda word: word.startswith(("W3", "R3")))
    return " ".join(words) + "\n" + second


@pytest.mark.parametrize("pp", [1, 2])
def test_a_tied_head_may_come_after_the_first_stage_is_reduced(pp: int) -> None:
    """Both on one rank: had the first stage been summed over dp when it was done, the head's share
    would be lost."""
    first = [f"F0.{m} F1.{m} I1.{m} I0.{m} W0.{m}" for m in range(4)]
    on_one_rank = " ".join([*first, *(f"W1.{m}" for m in range(4))])
    own = on_one_rank if pp == 1 else in_a_v(4)
    run = Run(TIED, own=own, micro_batch=1, steps=1)
    runs = [run, replace(run, options={"shard_gradients": True})]
    for result in train_all(runs, pp=pp, dp=2):
        (grads,) = result.grads
        assert not (wrong := differing(grads, plain()[0]["grads"])), f"ratios {wrong}"


@pytest.mark.parametrize("kind", ["zb-v", "dualpipe-v"])
def test_one_rank_may_hold_both_ends_of_a_v(kind: str) -> None:
    result = train(Run(TIED, kind=kind, micro_batch=1, steps=2))
    for grads, record in zip(result.grads, plain(), strict=True):
        assert not (wrong := differing(grads, record["grads"])), f"ratios {wrong}"
