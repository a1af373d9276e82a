"""Whole matrices from slices: each is computed once, by one rank, and all elements arrive where
they belong."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.optim.rules.muon import matrix_updates
from megaprec.optim.rules.muon.matrix_exchange import HeldSpan, MatrixExchange, owners_of
from megaprec.optim.rules.muon.newton_schulz import orthogonalized
from tests.logical import SHAPES, Case, give, make_optimizer
from tests.ranks import run_ranks


def computed(mesh: DeviceMesh) -> tuple[list[tuple[int, int]], int]:
    """The shapes of the matrices that this rank orthogonalizes in a step, and the stage that it is
    in."""
    seen: list[tuple[int, int]] = []

    def noted(matrix: Tensor, *how: Any) -> Tensor:
        seen.append((matrix.shape[0], matrix.shape[1]))
        return orthogonalized(matrix, *how)

    matrix_updates.orthogonalized = noted
    optimizer = make_optimizer(mesh, Case("fp64", rule=("muon", {"by_adamw": []})))
    give(optimizer, 0)
    optimizer.step(1e-2)
    return seen, optimizer.pp.rank


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize(
    ("axes", "least"), [({"dp": 2, "tp": 2}, 1), ({"dp": 3}, 1), ({"pp": 2, "dp": 2}, 0)], ids=str
)
def test_each_matrix_is_computed_by_one_rank_of_its_stage(axes: dict[str, int], least: int) -> None:
    """A tied matrix by one rank of each stage that has it."""
    ranks = run_ranks(computed, axes)
    assert all(len(seen) >= least for seen, _ in ranks)
    of_first = sorted(shape for seen, stage in ranks for shape in seen if stage == 0)
    assert of_first == sorted(shape for shape in SHAPES.values() if len(shape) == 2)
    assert [shape for seen, stage in ranks for shape in seen if stage == 1] == [(23, 6)] * (
        axes.get("pp", 1) - 1
    )


def test_owners_have_equal_work_as_far_as_matrices_allow() -> None:
    costs = [1.0, 8.0, 3.0, 5.0, 2.0, 1.0]
    owners = owners_of(costs, 2)
    assert sorted(
        sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank) for rank in (0, 1)
    ) == [
        10,
        10,
    ]
    assert owners_of([1.0] * 3, 5) == [0, 1, 2] and owners_of([], 3) == []


# --- exchanges


def exchange(*runs: HeldSpan) -> MatrixExchange:
    return MatrixExchange(
        {"w": (4, 6)}, [1.0], runs, 1, Axis("stage"), torch.device("cpu"), torch.float64
    )


def test_several_slices_of_a_matrix_on_one_rank_are_put_together() -> None:
    """Cut by columns, each slice flat and in two runs."""
    whole = torch.randn(4, 6, dtype=torch.float64)
    cuts = [(0, 5), (5, 12)]
    runs = [HeldSpan(0, 0, 1, 2, shard, *cut, *cut) for shard in (0, 1) for cut in cuts]
    made = exchange(*runs)
    values = [half.reshape(-1)[a:b] for half in whole.chunk(2, 1) for a, b in cuts]
    assert torch.equal(made.assemble(made.start_collect(0, values)())[0], whole)
    assert all(map(torch.equal, made.start_return(0, {0: whole})(), values))


@pytest.mark.parametrize(
    "runs",
    [
        [HeldSpan(0, 0, -1, 1, 0, 0, 24, 0, 23)],
        [HeldSpan(0, 0, -1, 1, 0, 0, 24, 0, 24)] * 2,
        [],
    ],
    ids=["an element is missing", "all are given twice", "nothing is given"],
)
def test_elements_that_do_not_add_up_to_the_matrix_are_an_error(runs: list[HeldSpan]) -> None:
    with pytest.raises(
        RuntimeError, match=r"w: the ranks of its stage give \d+ elements of a matrix \[4, 6\]"
    ):
        exchange(*runs)


def other_matrices(mesh: DeviceMesh) -> str:
    stage = Axis.stage(mesh)
    with pytest.raises(RuntimeError) as raised:
        MatrixExchange(
            {"w": (4, 6 + stage.rank)}, [1.0], (), 1, stage, torch.device("cpu"), torch.float64
        )
    return str(raised.value)


@pytest.mark.slow
def test_ranks_with_other_matrices_are_an_error_on_every_rank() -> None:
    assert all("different matrices" in said for said in run_ranks(other_matrices, {"dp": 2}))
