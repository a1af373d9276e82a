"""A schedule that is really carried out takes the time that the simulator says it takes."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from parallel.pipeline.builders import schedule
from parallel.pipeline.executor import Executor
from parallel.pipeline.instructions import Message, Schedule
from parallel.pipeline.p2p import CPU, P2P
from parallel.pipeline.simulation import Span, idle, simulate
from parallel.pipeline.timeline import Recording
from parallel.weight_grad_queue import WeightGradQueue
from tests.ranks import run_ranks

FORWARD, INPUT, WEIGHT = 0.03, 0.04, 0.02
"""Seconds. Ranks sleep where they would compute, so that they need no core of a busy machine."""
SLOWEST = 2.0  # how many times as slow as the others the last stage is
MICROBATCHES, ROUNDS = 4, 5


class Sleep(torch.autograd.Function):
    """x, after a while, both ways. The second half of the way back can be put off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, deferred: WeightGradQueue, slower: float) -> Tensor:
        ctx.deferred, ctx.slower = deferred, slower
        time.sleep(FORWARD * slower)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        slower = ctx.slower
        time.sleep(INPUT * slower)
        ctx.deferred.run(lambda: time.sleep(WEIGHT * slower))
        return grad, None, None


def recorded(mesh: DeviceMesh, s: Schedule) -> list[list[Span]]:
    """Some steps, on all ranks."""
    return [_recorded(mesh, s) for _ in range(ROUNDS)]


def _recorded(mesh: DeviceMesh, s: Schedule) -> list[Span]:
    links, deferred = P2P.open(Axis.of(mesh, "pp"), s.rank_of_stage, (2,), torch.float32, CPU), WeightGradQueue()

    def forward(stage: int, microbatch: int, received: Tensor | None) -> Tensor:
        last = stage == links.stages - 1
        x = torch.ones(2, requires_grad=True) if received is None else received
        y = Sleep.apply(x, deferred, SLOWEST if last else 1.0)
        return y.sum() if last else y

    recording = Recording.start(links.axis)
    executor = Executor(
        s.programs[links.axis.rank], links, forward, lambda stage: None, recording.spans, deferred=deferred
    )
    executor.run()
    return recording.gather(s, CPU)


def length(spans: Sequence[Span]) -> float:
    """From the first computation of all ranks to the end of the last."""
    own = [span for span in spans if Message.of(span.instruction) is None]
    return max(span.end for span in own) - min(span.start for span in own)


def difference(s: Schedule, real: Sequence[Span]) -> float:
    """How far a recorded step is from a simulated one whose computations take as long as they really did: the larger
    one of what any rank's idle share and the length of the step, relatively, differ by."""
    took = {span.instruction: span.end - span.start for span in real if Message.of(span.instruction) is None}
    said = simulate(s, lambda i: took.get(i, 0.0))
    shares = [abs(a - b) for a, b in zip(idle(real), idle(said), strict=True)]
    return max(*shares, abs(length(real) / length(said) - 1))


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zb-v"])
def test_ranks_wait_as_long_as_simulated(kind: str) -> None:
    """In the best of some steps: a busy machine only ever makes a rank wait longer, and it does not always."""
    s = schedule(kind, 2, MICROBATCHES)
    steps, _ = run_ranks(recorded, {"pp": 2}, s=s)
    assert max(idle(steps[0])) > 0.2, "hardly anybody waits, so nothing would be shown"
    differences = [difference(s, real) for real in steps]
    assert min(differences) < 0.05, differences
