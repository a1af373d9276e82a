"""A proof, before anything is launched, that a schedule runs everything once, in a correct order,
and finishes.

The first two are properties of each program by itself: the stages that live on a rank determine the
instructions that its program must have. The last one is shown by a simulation of all programs
together (`simulation.py`) over the communicators that `p2p.py` uses.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from parallel.pipeline.instructions import (
    COMPUTATIONS,
    INPUT_GRADIENTS,
    WEIGHT_GRADIENTS,
    Channel,
    Instruction,
    Op,
)
from parallel.pipeline.posting import moved
from parallel.pipeline.schedules import Schedule, complete
from parallel.pipeline.simulation import Mark, Refused, Span, sends_under_way, simulate

HALVES = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


def check(schedule: Schedule) -> None:
    """Raise Refused, with a picture of all ranks, unless the schedule runs everything once and
    finishes.

    Each stage must run on its own rank. Each forward and each backward, whole or in two halves,
    must occur once, after the instructions that it needs, with its transfers and REDUCE; a schedule
    without any backward is one for evaluation. The schedule must finish without a deadlock if
    messages of one channel are matched by order and sends wait for their receives, even if each
    receive blocks its rank from where it is posted on (`posting.py`).
    """
    faults = list(
        chain.from_iterable(_faults(schedule, rank) for rank in range(len(schedule.programs)))
    )
    if faults:
        marks = {fault.rank: Mark(fault.at, fault.note) for fault in reversed(faults)}
        problems = (f"rank {fault.rank}: {fault.note}" for fault in faults)
        raise Refused(
            *problems,
            schedule=schedule,
            spans=_before(schedule, marks),
            marks=dict(sorted(marks.items())),
        )
    sends = sends_under_way(schedule)
    for placed in (lambda made: made, moved):
        simulate(
            placed(schedule),
            communicator=lambda m: Channel.of(m, schedule.rank_of_stage),
            sends=sends,
        )


def _before(schedule: Schedule, marks: Mapping[int, Mark]) -> Sequence[Span]:
    """Return the spans of the instructions that would run if each rank stopped at its mark."""
    programs = (
        p[: marks[rank].at] if rank in marks else p for rank, p in enumerate(schedule.programs)
    )
    try:
        return simulate(replace(schedule, programs=tuple(programs)))
    except Refused as stopped:
        return stopped.spans


class _Fault(NamedTuple):
    """The fault of instruction number `at` of `rank`."""

    rank: int
    at: int
    note: str


def _faults(schedule: Schedule, rank: int) -> Iterator[_Fault]:
    program = schedule.programs[rank]
    there = {*schedule.programs[rank]}
    due = _due(schedule, rank)
    seen: Counter[Instruction] = Counter()
    for at, i in enumerate(program):
        seen[i] += 1
        if not 0 <= i.stage < len(schedule.rank_of_stage):
            yield _Fault(rank, at, f"{i} is for a stage that does not exist")
        elif (home := schedule.rank_of_stage[i.stage]) != rank:
            yield _Fault(rank, at, f"{i} is for stage {i.stage}, which lives on rank {home}")
        elif i not in due:
            yield _Fault(rank, at, f"{i} has no purpose here")
        elif seen[i] > 1:
            yield _Fault(rank, at, f"{i} occurs here for the second time")
        elif late := [need for need in _needs(i, due) if need not in seen and need in there]:
            yield _Fault(rank, at, f"{i} comes before {late[0]}")
    for i in sorted(due, key=lambda i: i.op not in COMPUTATIONS):  # stable
        if i not in there:
            yield _Fault(rank, len(program), f"{i} is missing")


def _due(schedule: Schedule, rank: int) -> dict[Instruction, None]:
    """Return all instructions that `rank` must run; the order is stable but has no meaning."""
    trains = any(i.op in INPUT_GRADIENTS | WEIGHT_GRADIENTS for i in chain(*schedule.programs))
    split = {(i.stage, i.microbatch) for i in schedule.programs[rank] if i.op in HALVES}
    stages = [stage for stage, home in enumerate(schedule.rank_of_stage) if home == rank]
    computations: list[Instruction] = []
    for stage in stages:
        for m in range(schedule.microbatches):
            backward = HALVES if (stage, m) in split else (Op.BACKWARD,)
            computations += (
                Instruction(op, stage, m) for op in (Op.FORWARD, *(backward if trains else ()))
            )
    return dict.fromkeys(complete([computations], schedule.rank_of_stage).programs[0])


def _needs(i: Instruction, due: dict[Instruction, None]) -> Iterator[Instruction]:
    """Yield the instructions of this rank that must run before `i`, among those that the rank runs
    at all."""
    backward = ((Op.FORWARD, 0), (Op.RECV_GRADIENT, 0), (Op.BACKWARD, +1), (Op.BACKWARD_INPUT, +1))
    near = {
        Op.FORWARD: ((Op.RECV_ACTIVATION, 0), (Op.FORWARD, -1)),
        Op.SEND_ACTIVATION: ((Op.FORWARD, 0),),
        Op.BACKWARD: backward,
        Op.BACKWARD_INPUT: backward,
        Op.BACKWARD_WEIGHT: ((Op.BACKWARD_INPUT, 0),),
        Op.SEND_GRADIENT: ((Op.BACKWARD, 0), (Op.BACKWARD_INPUT, 0)),
    }.get(i.op, ())
    yield from (
        need for op, step in near if (need := Instruction(op, i.stage + step, i.microbatch)) in due
    )
    if i.op is Op.REDUCE:
        yield from (b for b in due if b.op in WEIGHT_GRADIENTS and b.stage == i.stage)
