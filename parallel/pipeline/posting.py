"""When a receive may be posted before its message is needed, on a backend whose receives may block
the host.

Over gloo a receive may be posted at any time. NCCL waits for a message in a kernel, and while that
kernel runs, CUDA may block the host in another call (`P2P.early`). A receive is therefore posted
early only where even a host that blocks from there on, until the message has come, causes no
deadlock. That is a property of the schedule: with each receive moved to where it is posted, the
schedule must still run to its end (`verify.check`).

The places follow from one order of the instructions of all ranks, in which every receive follows
its send: the first ranks go on as far as they can. A receive moves ahead of all instructions of its
rank that come after its send in that order, but no further than behind the receive before it, so
that one message is under way at a time. The moved schedule can run in the same order. Activations
then travel while the backward pass before them computes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from parallel.pipeline.instructions import RECEIVES, SENDS, Instruction, Message, Program
from parallel.pipeline.schedules import Schedule


def posts(schedule: Schedule) -> list[dict[Instruction, int]]:
    """Return, by rank, the number of the instruction before which each receive is posted.

    The schedule must run to its end.
    """
    times = _order(schedule)
    sent = {
        Message.of(i): times[rank, i]
        for rank, p in enumerate(schedule.programs)
        for i in p
        if i.op in SENDS
    }
    return [
        _posts_of(p, [times[rank, i] for i in p], sent) for rank, p in enumerate(schedule.programs)
    ]


def _order(schedule: Schedule) -> dict[tuple[int, Instruction], int]:
    """Return the place of each rank's instructions in an order of all of them."""
    at = [0] * len(schedule.programs)
    sent = set[Message | None]()
    times = dict[tuple[int, Instruction], int]()
    rank = 0
    while rank < len(at):
        program = schedule.programs[rank]
        begun = at[rank]
        while at[rank] < len(program) and not (
            _receives(i := program[at[rank]]) and Message.of(i) not in sent
        ):
            if i.op in SENDS:
                sent.add(Message.of(i))
            times[rank, i] = len(times)
            at[rank] += 1
        rank = 0 if at[rank] > begun and rank else rank + 1
    return times


def _receives(i: Instruction) -> bool:
    return i.op in RECEIVES


def _posts_of(
    program: Program, times: Sequence[int], sent: Mapping[Message | None, int]
) -> dict[Instruction, int]:
    found = dict[Instruction, int]()
    least = 0
    for at, i in enumerate(program):
        if _receives(i):
            place = at
            while place > least and times[place - 1] > sent[Message.of(i)]:
                place -= 1
            found[i], least = place, at + 1
    return found


def moved(schedule: Schedule) -> Schedule:
    """Return the schedule with each receive where it is posted: as if it blocked its rank from
    there on."""
    programs = zip(schedule.programs, posts(schedule), strict=True)
    return replace(
        schedule, programs=tuple(_moved(program, places) for program, places in programs)
    )


def _moved(program: Program, places: Mapping[Instruction, int]) -> Program:
    return tuple(
        i
        for _, _, i in sorted(
            (places.get(i, at), i not in places, i) for at, i in enumerate(program)
        )
    )
