"""The laws of the lockstep: one virtual rank at a time, in order, and no collective without all of
them."""

import gc
import threading
import traceback
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.virtual import VirtualAxis
from parallel import collectives
from parallel.lockstep import LaneAxis, Lockstep
from parallel.recomputation import recomputed


def lockstep_of(size: int) -> Lockstep:
    return Lockstep(VirtualAxis(Axis("tp"), size))


def on_each(lockstep: Lockstep, body: Callable[[LaneAxis], object]) -> list[object]:
    return lockstep.run([lambda axis=axis: body(axis) for axis in lockstep.axes])


def test_virtual_ranks_run_one_at_a_time_from_collective_to_collective() -> None:
    seen: list[tuple[int, str]] = []

    def body(axis: LaneAxis) -> int:
        for moment in ("first", "second"):
            seen.append((axis.rank, moment))
            axis.sum_(torch.ones(2))
        seen.append((axis.rank, "end"))
        return 10 * axis.rank

    assert on_each(lockstep_of(3), body) == [0, 10, 20]
    assert seen == [(rank, moment) for moment in ("first", "second", "end") for rank in range(3)]


def test_every_collective_gives_each_virtual_rank_its_result() -> None:
    def body(axis: LaneAxis) -> tuple[list[float], ...]:
        own = torch.arange(4.0) + 10 * axis.rank
        return (
            axis.sum_(own.clone()).tolist(),
            axis.max_(-own).tolist(),
            axis.gather(own[:1]).tolist(),
            axis.scatter_sum(own).tolist(),
            axis.chunk(torch.arange(4.0)).tolist(),
        )

    zero, one = on_each(lockstep_of(2), body)
    assert zero == ([10, 12, 14, 16], [0, -1, -2, -3], [0, 10], [10, 12], [0, 1])
    assert one == ([10, 12, 14, 16], [0, -1, -2, -3], [0, 10], [14, 16], [2, 3])


def test_a_virtual_rank_that_fails_ends_the_others_and_keeps_its_traceback() -> None:
    lockstep = lockstep_of(3)
    ended = list[int]()

    def fails_on_the_second(axis: LaneAxis) -> None:
        try:
            axis.sum_(torch.zeros(1))
            if axis.rank == 1:
                raise KeyError("planted")
            axis.sum_(torch.zeros(1))
        finally:
            ended.append(axis.rank)

    with pytest.raises(KeyError, match="planted") as caught:
        on_each(lockstep, fails_on_the_second)
    assert "fails_on_the_second" in "".join(traceback.format_tb(caught.tb))
    assert sorted(ended) == [0, 1, 2]
    assert on_each(lockstep, lambda axis: axis.sum_(torch.ones(1)).item()) == [3, 3, 3], (
        "it works after a failure"
    )


@pytest.mark.parametrize("names", [("sum_", "max_"), ("sum_", "")])
def test_virtual_ranks_that_part_are_named(names: tuple[str, str]) -> None:
    def body(axis: LaneAxis) -> None:
        if name := names[axis.rank]:
            getattr(axis, name)(torch.zeros(1))

    with pytest.raises(RuntimeError, match="must call the same collectives in the same order"):
        on_each(lockstep_of(2), body)


def test_gradients_are_enabled_as_in_the_caller() -> None:
    lockstep = lockstep_of(2)
    assert on_each(lockstep, lambda axis: torch.is_grad_enabled()) == [True, True]
    with torch.no_grad():
        assert on_each(lockstep, lambda axis: torch.is_grad_enabled()) == [False, False]


def test_a_recomputation_inside_a_recomputation_keeps_the_lockstep() -> None:
    """A recomputation ends as soon as it has what it needs, in the same place on all virtual
    ranks."""

    def body(axis: LaneAxis) -> Tensor:
        x = (torch.arange(4.0) + axis.rank).requires_grad_()
        inner = lambda y: collectives.gather(y.sin(), axis)  # noqa: E731
        outer = lambda y: collectives.reduce_scatter(recomputed(inner, y).exp(), axis)  # noqa: E731
        y = recomputed(outer, x) if recomputes else collectives.reduce_scatter(inner(x).exp(), axis)
        y.square().sum().backward()
        assert x.grad is not None
        return x.grad

    recomputes = True
    once = on_each(lockstep_of(2), body)
    recomputes = False
    plain = on_each(lockstep_of(2), body)
    assert all(torch.equal(a, b) for a, b in zip(once, plain, strict=True))  # type: ignore[arg-type]


def test_one_virtual_rank_needs_no_thread() -> None:
    before = set(threading.enumerate())
    assert on_each(lockstep_of(1), lambda axis: axis.sum_(torch.ones(1)).item()) == [1]
    assert not set(threading.enumerate()) - before


def test_the_threads_end_with_the_lockstep() -> None:
    before = set(threading.enumerate())
    lockstep = lockstep_of(4)
    on_each(lockstep, lambda axis: None)
    lanes = set(threading.enumerate()) - before
    assert len(lanes) == 4
    del lockstep
    gc.collect()
    for thread in lanes:
        thread.join(300)
        assert not thread.is_alive()
