"""A gradient after the sum over the ranks has begun would be one rank's alone: it is refused where
it comes."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec import SGD, Axis, ParallelAMPOptimizer, attach_whole, plan
from parallel import Context, parallelize
from tests.ranks import run_ranks
from tests.refusals import raises, said_of, shows

PLAN = plan("fp32")


class Loop:
    """A model of torch's layers, or of parallel ones, and its optimizer; `backward` is a
    micro-batch's."""

    def __init__(self, mesh: DeviceMesh | None, parallel: bool, overlap: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        if parallel:
            parallelize(self.model, Context(PLAN, Axis("tp")), {"0": "column", "2": "row"})
        attach_whole(self.model)
        self.optimizer = ParallelAMPOptimizer(
            [self.model],
            PLAN,
            mesh,
            lr=0.1,
            rule=SGD(0.0),
            clip=0.0,
            weight_decay=0.0,
            average=True,
            overlap=overlap,
        )

    def backward(self) -> None:
        self.model(torch.ones(3, 1, 4)).square().mean().backward()


def expect_each_time(loop: Loop) -> None:
    for _ in range(2):
        loop.optimizer.expect()
        loop.backward()


def expect_too_soon(loop: Loop) -> None:
    loop.optimizer.expect()
    loop.backward()
    loop.backward()


def reduce_too_soon(loop: Loop) -> None:
    loop.backward()
    loop.optimizer.reduce()
    loop.backward()


WAYS: list[Callable[[Loop], None]] = [expect_each_time, expect_too_soon, reduce_too_soon]


def refusals(mesh: DeviceMesh | None) -> list[str]:
    said = []
    for way in WAYS:
        for parallel in (False, True):
            loop = Loop(mesh, parallel, overlap=way is not reduce_too_soon)
            said.append(said_of(lambda loop=loop, way=way: way(loop)))
            loop.optimizer.zero_grad()  # the loop may go on
            loop.backward()
            assert loop.optimizer.step().outcome == "applied"
            loop.backward()
            assert loop.optimizer.step().outcome == "applied"
            loop.optimizer.wait()
    return said


def test_a_gradient_after_its_sum_over_the_ranks_has_begun_is_refused_on_one_rank_and_on_several() -> (
    None
):
    every = [*run_ranks(refusals, {"dp": 2}), refusals(None)]
    for said in every:
        assert len(said) == 2 * len(WAYS)
        for line in said:
            assert shows(line, "optimizer.gradient_after_reduction")


def test_an_announced_pass_after_others_is_summed_whole() -> None:
    loop, twin = (Loop(None, parallel=False, overlap=overlap) for overlap in (True, False))
    loop.backward()
    loop.optimizer.expect()
    for one in (loop, twin):
        one.backward()
    twin.backward()
    loop.optimizer.reduce()
    assert loop.optimizer.step().grad_norm == pytest.approx(twin.optimizer.step().grad_norm)
    with raises("optimizer.gradient_after_reduction"):
        reduce_too_soon(loop)
