"""Row factors multiply the rows of a logical tensor, however ranks have cut it."""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.optim.rules.row_factors import RowFactors
from tests.layouts import Fragment, assemble
from tests.logical import SHAPES, Case, give, held, initial, make_optimizer
from tests.ranks import run_ranks

# "query.weight" is cut along its rows over tp, "output.weight" along the other dim
FACTORED = ("query.weight", "key.weight", "output.weight", "norm.weight")


def factors() -> dict[str, Tensor]:
    """A factor for each row, exact in FP32."""
    return {name: 2.0 ** -torch.arange(SHAPES[name][0]).remainder(5) for name in FACTORED}


def multiplied(mesh: DeviceMesh | None) -> list[Fragment]:
    """The weights of a rank after a step whose rate is zero."""
    optimizer = make_optimizer(mesh, Case("fp32"))
    give(optimizer, 0)
    optimizer.step(0.0, row_factors=RowFactors(factors()))
    return held(optimizer)["held"]


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2}, {"tp": 2, "dp": 2}], ids=str)
def test_rows_are_multiplied_whichever_dim_is_cut(axes: dict[str, int]) -> None:
    weights = assemble(run_ranks(multiplied, axes))
    for name in SHAPES:
        expected = initial(name)
        if name in FACTORED:
            rows = factors()[name].view(-1, *[1] * (expected.dim() - 1))
            expected = expected * rows
        assert torch.equal(weights[name], expected), name
