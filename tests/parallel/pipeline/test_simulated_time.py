"""A schedule that is really carried out takes the time that the simulator says it takes.

Time is counted, not measured: each rank has a clock that its own computations advance, each message
has the time at which it was sent, and who receives it goes on at that time at the earliest. So a
busy machine changes nothing.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from parallel.pipeline import timeline
from parallel.pipeline.executor import Executor, StageHooks
from parallel.pipeline.instructions import Instruction, Message
from parallel.pipeline.kinds import schedule
from parallel.pipeline.p2p import CPU, P2P
from parallel.pipeline.schedules import Schedule
from parallel.pipeline.simulation import Span, idle, simulate
from parallel.pipeline.timeline import Recording
from parallel.weight_grad_queue import WeightGradQueue
from tests.ranks import run_ranks

FORWARD = 3.0
INPUT = 4.0
WEIGHT = 2.0
SLOWEST = 2.0  # how many times as slow as the others the last stage is
MICROBATCHES = 4


class Clock:
    """The time of a rank."""

    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, time: float) -> None:
        self.now += time


class Counted(torch.autograd.Function):
    """x, later, both ways. The second half of the way back can be put off."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, clock: Clock, deferred: WeightGradQueue, slower: float
    ) -> Tensor:
        ctx.clock = clock
        ctx.deferred = deferred
        ctx.slower = slower
        clock.advance(FORWARD * slower)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        clock = ctx.clock
        slower = ctx.slower
        clock.advance(INPUT * slower)
        ctx.deferred.offer(lambda: clock.advance(WEIGHT * slower))
        return grad, None, None, None


def recorded(mesh: DeviceMesh, s: Schedule) -> list[Span]:
    """A step, on all ranks."""
    links = P2P.open(Axis.of(mesh, "pp"), s.rank_of_stage, (2,), torch.float32, CPU)
    clock = Clock()
    deferred = WeightGradQueue()
    send = P2P.send
    receive = P2P.receive

    def stamped(self: P2P, i: Instruction, tensor: Tensor) -> None:
        send(self, i, torch.full_like(tensor, clock.now))

    def awaited(self: P2P, i: Instruction) -> Tensor:
        message = receive(self, i)
        clock.now = max(clock.now, float(message[0]))
        return message

    class Timed(StageHooks):
        def forward(self, stage: int, microbatch: int, received: Tensor | None) -> Tensor:
            last = stage == links.stages - 1
            x = torch.ones(2, requires_grad=True) if received is None else received
            y = Counted.apply(x, clock, deferred, SLOWEST if last else 1.0)
            return y.sum() if last else y

        def reduce(self, stage: int) -> None:
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(P2P, "send", stamped)
        patch.setattr(P2P, "receive", awaited)
        patch.setattr(timeline, "perf_counter", lambda: clock.now)
        recording = Recording.start(links.axis)
        program = s.programs[links.axis.rank]
        Executor(program, links, Timed(), observers=[recording], deferred=deferred).run()
        return recording.gather(s, CPU)


def computations(spans: Sequence[Span]) -> set[Span]:
    return {span for span in spans if Message.of(span.instruction) is None}


@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zb-v"])
def test_ranks_wait_as_long_as_simulated(kind: str) -> None:
    s = schedule(kind, 2, MICROBATCHES)
    real, _ = run_ranks(recorded, {"pp": 2}, s=s)
    took = {span.instruction: span.end - span.start for span in computations(real)}
    assert computations(real) == computations(simulate(s, lambda i: took.get(i, 0.0)))
    assert max(idle(real)) > 0.2, "hardly anybody waits, so nothing would be shown"
