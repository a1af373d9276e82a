"""Rows that ranks send each other arrive in the order of ranks; on a GPU they travel as they lie."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from megaprec.comm.axis import Axis
from tests import pretend
from tests.ranks import run_ranks

COUNTS = ((1, 0, 3), (2, 2, 0), (0, 4, 1))  # from each rank to each
RANKS = range(len(COUNTS))


class Joins(TorchDispatchMode):
    """Counts the operators that put tensors together."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in ("aten::cat", "aten::stack")
        return func(*args, **(kwargs or {}))


def rows_of(rank: int) -> Tensor:
    """[rows, 4]: each with its rank, the rank it goes to, and its number."""
    rows = [[rank, to, n, 7] for to in RANKS for n in range(COUNTS[rank][to])]
    return torch.tensor(rows, dtype=torch.float32).view(-1, 4)


def exchange_rank(mesh: DeviceMesh, on_device: bool) -> tuple[Tensor, int]:
    """The rows that this rank receives, and how many tensors it put together."""
    if on_device:
        pretend.install()
        mesh = pretend.join(mesh)
    axis = Axis.of(mesh, "dp")
    rows = rows_of(axis.rank).to(pretend.NAME if on_device else "cpu")
    received = [sent[axis.rank] for sent in COUNTS]
    joins = Joins()
    with joins:
        arrived = axis.start_exchange_of_rows(rows, COUNTS[axis.rank], received)()
    return arrived.cpu(), joins.count


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "device"])
def test_rows_arrive_by_rank_and_are_not_packed_on_a_device(on_device: bool) -> None:
    for rank, (arrived, joins) in enumerate(
        run_ranks(exchange_rank, {"dp": len(COUNTS)}, on_device=on_device)
    ):
        by_source = [rows_of(source) for source in RANKS]
        wanted = [rows[rows[:, 1] == rank] for rows in by_source]
        assert torch.equal(arrived, torch.cat(wanted))
        assert joins == (0 if on_device else 1)
