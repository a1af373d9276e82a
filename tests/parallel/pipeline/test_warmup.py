"""The laws of the warm-up: no message of it is lost, and it gives the agreement on a step time to
arrive."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import pytest

from parallel.pipeline.builders import KINDS, schedule
from parallel.pipeline.instructions import Message, Op
from parallel.pipeline.rollback import unread, warmup
from parallel.pipeline.schedules import Schedule
from parallel.pipeline.simulation import Span, simulate

STEPS = 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
def test_every_message_of_the_warm_ups_is_read_once_in_it_or_after_it(
    kind: str, ranks: int, microbatches: int
) -> None:
    whole = schedule(kind, ranks, microbatches)
    warmups = [warmup(program) for program in whole.programs]
    drains = unread(whole)
    sent = Counter(Message.of(i) for i in chain(*warmups) if i.op is Op.SEND_ACTIVATION)
    assert (
        Counter(Message.of(i) for i in chain(*warmups, *drains) if i.op is Op.RECV_ACTIVATION)
        == sent
    )
    for rank, (program, first) in enumerate(zip(whole.programs, warmups, strict=True)):
        assert program[: len(first)] == first
        assert program[len(first)].op in (Op.BACKWARD, Op.BACKWARD_INPUT, Op.RECV_GRADIENT)
        assert all(whole.rank_of_stage[i.stage] == rank for i in drains[rank])


def test_in_1f1b_each_rank_but_the_first_has_one_message_left_and_in_gpipe_none() -> None:
    assert [len(drain) for drain in unread(schedule("1f1b", 4, 8))] == [0, 1, 1, 1]
    assert [len(drain) for drain in unread(schedule("gpipe", 4, 8))] == [0, 0, 0, 0]


# --- what is gained


def one_after_the_other(step: Schedule, times: int) -> Schedule:
    """Several steps without a common end; micro-batches are numbered through."""
    programs = tuple(
        tuple(
            i if i.op is Op.REDUCE else i._replace(microbatch=i.microbatch + n * step.microbatches)
            for n in range(times)
            for i in program
        )
        for program in step.programs
    )
    return Schedule(programs, step.rank_of_stage)


def ends(spans: Sequence[Span], microbatches: int) -> list[float]:
    """When the last rank has done with each step."""
    last = [0.0] * STEPS
    for span in spans:
        if Message.of(span.instruction) is None and span.instruction.op is not Op.REDUCE:
            number = span.instruction.microbatch // microbatches
            last[number] = max(last[number], span.end)
    return last


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (8, 16)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_zero_bubble_pipeline_that_does_not_wait_takes_no_longer_than_its_work(
    kind: str, ranks: int, microbatches: int
) -> None:
    """The rest gains nothing. The agreement has the time of a forward to arrive, or more."""
    step = schedule(kind, ranks, microbatches)
    work = 3 * microbatches * len(step.rank_of_stage) / ranks
    before = max(span.end for span in simulate(step))
    spans = simulate(one_after_the_other(step, STEPS))
    ended = ends(spans, microbatches)
    after = ended[-1] - ended[-2]
    if kind in ("zb-h2", "zb-v"):
        assert (before, after) == (work + ranks - 1, work)
    else:
        assert before == after
    looked = [
        span.start - ended[span.instruction.microbatch // microbatches - 1]
        for span in spans
        if span.instruction.op in (Op.BACKWARD, Op.BACKWARD_INPUT)
        and span.instruction.microbatch >= microbatches
    ]
    assert min(looked) >= 1
