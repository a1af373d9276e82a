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
from parallel.pipeline.simulation import Mark, RefusedSchedule, Span, sends_under_way, simulate

HALVES = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


def check(schedule: Schedule) -> None:
    """Raise RefusedSchedule, with a picture of all ranks, unless the schedule runs everything once
    and finishes.

    Each stage must run on its own rank. Each forward and each backward, whole or in two halves,
    must occur once, after the instructions that it needs, with its transfers and REDUCE; a schedule
    without any backward is one for evaluation. The schedule must finish without a deadlock if
    messages of one channel are matched by order and sends wait for their receives, even if each
    receive blocks its rank from where it is posted on (`posting.py`).
    """
    faults: list[_Fault] = []
    for rank in range(len(schedule.programs)):
        faults += _find_faults(schedule, rank)
    if faults:
        # reversed, so that the first fault of a rank is the one that is kept
        marks = {fault.rank: Mark(fault.index, fault.note) for fault in reversed(faults)}
        lines = [f"rank {fault.rank}: {fault.note}" for fault in faults]
        raise RefusedSchedule(
            *lines,
            schedule=schedule,
            spans=_spans_before(schedule, marks),
            marks=dict(sorted(marks.items())),
        )
    sends = sends_under_way(schedule)
    # as it stands, and as if each receive blocked its rank from where it is posted
    for blocking in (schedule, moved(schedule)):
        simulate(
            blocking,
            communicator=lambda message: Channel.of(message, schedule.rank_of_stage),
            sends=sends,
        )


def _spans_before(schedule: Schedule, marks: Mapping[int, Mark]) -> Sequence[Span]:
    """Return the spans of the instructions that would run if each rank stopped at its mark, or at
    an earlier deadlock."""
    programs = []
    for rank, program in enumerate(schedule.programs):
        stop = marks[rank].at if rank in marks else len(program)
        programs.append(program[:stop])
    try:
        return simulate(replace(schedule, programs=tuple(programs)))
    except RefusedSchedule as deadlock:
        return deadlock.spans


class _Fault(NamedTuple):
    """The fault of the instruction at `index` of the program of `rank`."""

    rank: int
    index: int
    note: str


def _find_faults(schedule: Schedule, rank: int) -> Iterator[_Fault]:
    """Yield the faults of one rank's program."""
    program = schedule.programs[rank]
    present = {*program}
    required = _required(schedule, rank)
    counts: Counter[Instruction] = Counter()  # how often each instruction has come so far
    for index, instruction in enumerate(program):
        counts[instruction] += 1
        # prerequisites that come later; one that never comes is told once, as missing
        late = [
            other
            for other in _prerequisites(instruction, required)
            if other in present and other not in counts
        ]
        if note := _describe_misplaced(instruction, schedule.rank_of_stage, rank):
            yield _Fault(rank, index, note)
        elif instruction not in required:
            yield _Fault(rank, index, f"{instruction} has no purpose here")
        elif counts[instruction] > 1:
            yield _Fault(rank, index, f"{instruction} occurs here for the second time")
        elif late:
            yield _Fault(rank, index, f"{instruction} comes before {late[0]}")
    missing = [instruction for instruction in required if instruction not in present]
    # computations first, because transfers follow from them; the sort is stable
    missing.sort(key=lambda instruction: instruction.op not in COMPUTATIONS)
    for instruction in missing:
        yield _Fault(rank, len(program), f"{instruction} is missing")


def _describe_misplaced(
    instruction: Instruction,
    rank_of_stage: Sequence[int],
    rank: int,
) -> str:
    """Return in words why an instruction is not for `rank`: its stage lives on another rank, or
    does not exist; "" if it is for this rank."""
    if not 0 <= instruction.stage < len(rank_of_stage):
        return f"{instruction} is for a stage that does not exist"
    home = rank_of_stage[instruction.stage]
    if home != rank:
        return f"{instruction} is for stage {instruction.stage}, which lives on rank {home}"
    return ""


def _required(schedule: Schedule, rank: int) -> dict[Instruction, None]:
    """Return all instructions that `rank` must run, as keys; their order is stable but has no
    meaning."""
    backward_ops = INPUT_GRADIENTS | WEIGHT_GRADIENTS
    trains = any(instruction.op in backward_ops for instruction in chain(*schedule.programs))
    # the stages and micro-batches whose backward is in two halves
    split = {
        (instruction.stage, instruction.microbatch)
        for instruction in schedule.programs[rank]
        if instruction.op in HALVES
    }
    computations: list[Instruction] = []
    for stage, home in enumerate(schedule.rank_of_stage):
        if home != rank:
            continue
        for microbatch in range(schedule.microbatches):
            ops = [Op.FORWARD]
            if trains and (stage, microbatch) in split:
                ops += HALVES
            elif trains:
                ops.append(Op.BACKWARD)
            computations += [Instruction(op, stage, microbatch) for op in ops]
    # with the transfers and reductions that these computations imply
    return dict.fromkeys(complete([computations], schedule.rank_of_stage).programs[0])


# For an operation: those that must come before it for the same micro-batch, each with the distance
# of its stage from the operation's own stage.
BEFORE_BACKWARD = (
    (Op.FORWARD, 0),
    (Op.RECV_GRADIENT, 0),
    (Op.BACKWARD, +1),
    (Op.BACKWARD_INPUT, +1),
)
PREREQUISITES: Mapping[Op, Sequence[tuple[Op, int]]] = {
    Op.FORWARD: ((Op.RECV_ACTIVATION, 0), (Op.FORWARD, -1)),
    Op.SEND_ACTIVATION: ((Op.FORWARD, 0),),
    Op.BACKWARD: BEFORE_BACKWARD,
    Op.BACKWARD_INPUT: BEFORE_BACKWARD,
    Op.BACKWARD_WEIGHT: ((Op.BACKWARD_INPUT, 0),),
    Op.SEND_GRADIENT: ((Op.BACKWARD, 0), (Op.BACKWARD_INPUT, 0)),
}


def _prerequisites(
    instruction: Instruction, required: Mapping[Instruction, None]
) -> Iterator[Instruction]:
    """Yield the instructions of this rank that must run before `instruction`, among those that the
    rank runs at all."""
    for op, distance in PREREQUISITES.get(instruction.op, ()):
        prerequisite = Instruction(op, instruction.stage + distance, instruction.microbatch)
        if prerequisite in required:
            yield prerequisite
    if instruction.op is Op.REDUCE:
        for other in required:
            if other.op in WEIGHT_GRADIENTS and other.stage == instruction.stage:
                yield other
