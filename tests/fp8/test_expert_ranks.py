"""FP8 products of experts on ranks of their own: one scale for each tensor, and the training of one
process."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.fp8.state import FP8State
from megaprec.precision.fp8_recipe import EIGHT_BIT_KINDS
from megaprec.precision.plan import plan
from models.estimate.storage import simulated_experts
from parallel.context import Context
from tests.dialects.test_modes import distance
from tests.fp8.test_training import EXPERTS, alone, fp8, run, states, whole
from tests.layouts import Run, make_engine, train_all
from tests.ranks import run_ranks
from tests.refusals import raises

Layout = tuple[dict[str, int], dict[str, Any]]
LAYOUTS: list[Layout] = [
    ({"dp": 2}, {"expert": 2}),
    ({"tp": 2, "dp": 2}, {"expert": 2, "expert_tensor": 1}),
    ({"tp": 2, "dp": 2}, {"expert": 2}),
    ({"pp": 2, "dp": 2, "tp": 2}, {"expert": 4, "expert_tensor": 1}),
    ({"dp": 4, "tp": 2}, {"expert": 4}),
]


def in_one(one: Run) -> Run:
    """Return the same run with all experts on each rank, so that one process can train it."""
    return replace(one, expert=1, expert_tensor=0)


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(("axes", "experts"), LAYOUTS, ids=str)
def test_scales_and_amaxes_of_all_ranks_are_those_of_one_process(
    axes: dict[str, int], experts: dict[str, Any]
) -> None:
    """Powers of two forgive the last bits of sums over ranks, of which the amaxes in the history
    are."""
    powers = run(fp8(power_2_scales=True), model=EXPERTS, steps=3, micro_batch=2, **experts)
    stored = run(
        fp8(power_2_scales=True, parameters=True), model=EXPERTS, steps=3, micro_batch=2, **experts
    )
    for one, of_run in zip((powers, stored), states([powers, stored], **axes), strict=True):
        right = alone(in_one(one))
        assert set().union(*(rank.scale for rank in of_run)) == right.scale.keys()
        for rank in of_run:
            assert any(".experts.0." in name for name in rank.scale) and any(
                ".experts.3." in n for n in rank.scale
            )
            for name, scale in rank.scale.items():
                assert torch.equal(scale, right.scale[name]), name
                torch.testing.assert_close(
                    rank.history[name], right.history[name], rtol=1e-5, atol=1e-7
                )


@pytest.mark.cases(0, slow=1)
@pytest.mark.parametrize(
    ("axes", "experts"), [({"tp": 2}, {"expert": 2, "expert_tensor": 1}), *LAYOUTS[1:]], ids=str
)  # fmt: skip
def test_every_recipe_trains_as_one_process_does(
    axes: dict[str, int], experts: dict[str, Any]
) -> None:
    """Whole experts of two tensor-parallel ranks get the rows of one process in its order. With
    several replicas their rows are those of several micro-batches, so current scales are others: by
    at most the error of FP8 itself."""
    runs = [
        run(fp8(kind, pad=True), model=EXPERTS, steps=2, micro_batch=2, **experts)
        for kind in EIGHT_BIT_KINDS
    ]
    runs += [
        run(
            fp8("current", pad=True, parameters=True),
            model=EXPERTS,
            steps=2,
            micro_batch=2,
            **experts,
        )
    ]
    for one, result in zip(runs, train_all(runs, **axes), strict=True):
        reference = whole(replace(in_one(one), changes={}))
        single = whole(in_one(one))
        error = [distance(a, b) for a, b in zip(single.grads, reference.grads, strict=True)]
        assert all(e > 0.01 for e in error), "the products are not in FP8"
        first, second = (distance(a, b) for a, b in zip(result.grads, single.grads, strict=True))
        kind = one.changes["fp8"].kind
        close = kind == "delayed" or (axes == {"tp": 2} and kind not in ("rowwise", "blockwise"))
        assert first <= (0.1 if close else 2) * error[0] and second <= 2 * error[1], kind


def test_scales_that_differ_between_replicas_are_refused() -> None:
    recipe = fp8(reduce_amax=False)
    axes = simulated_experts(2, 2, 1)
    with raises("parallel.fp8_reduce_amax_experts"):
        Context(
            plan("bf16", fp8=recipe),
            axes.tp if axes else Axis("tp"),
            fp8=FP8State(recipe, 2),
            experts=axes,
        )


def names_of_scales(mesh: DeviceMesh | None, one: Run) -> list[str]:
    """The names of the tensors of which a rank keeps FP8 scales."""
    state = make_engine(mesh, one).fp8
    assert state is not None
    return list(state.names)


def test_every_rank_has_scales_of_the_experts_that_there_are_and_of_no_other() -> None:
    one = run(fp8(), model=EXPERTS, micro_batch=2, expert=2)
    alone_names = names_of_scales(None, in_one(one))
    experts = {re.sub(r".*experts\.(\d+)\..*", r"\1", n) for n in alone_names if ".experts." in n}
    assert experts == {"0", "1", "2", "3"}
    for names in run_ranks(names_of_scales, {"dp": 2}, one=one):
        assert names == alone_names
