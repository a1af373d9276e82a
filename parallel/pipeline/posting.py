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
    order = _global_order(schedule)
    sends: dict[Message | None, int] = {}
    for (_, instruction), time in order.items():
        if instruction.op in SENDS:
            sends[Message.of(instruction)] = time
    posted = []
    for rank, program in enumerate(schedule.programs):
        times = [order[rank, instruction] for instruction in program]
        posted.append(_posts_of_rank(program, times, sends))
    return posted


def _global_order(schedule: Schedule) -> dict[tuple[int, Instruction], int]:
    """Return the position of each rank's instructions in an order of all of them."""
    next_index = [0] * len(schedule.programs)
    sent = set[Message | None]()
    order = dict[tuple[int, Instruction], int]()
    rank = 0
    while rank < len(next_index):
        start = next_index[rank]
        for instruction in schedule.programs[rank][start:]:
            if instruction.op in RECEIVES and Message.of(instruction) not in sent:
                break
            if instruction.op in SENDS:
                sent.add(Message.of(instruction))
            order[rank, instruction] = len(order)
            next_index[rank] += 1
        # what a rank sends may let the ranks before it go on
        moved = next_index[rank] > start
        rank = 0 if moved and rank > 0 else rank + 1
    return order


def _posts_of_rank(
    program: Program, times: Sequence[int], sends: Mapping[Message | None, int]
) -> dict[Instruction, int]:
    """Return the index in `program` before which each receive is posted.

    times: the position of each instruction in the global order. sends: that of each message's send.
    """
    indices = dict[Instruction, int]()
    earliest = 0
    for index, instruction in enumerate(program):
        if instruction.op in RECEIVES:
            sent_at = sends[Message.of(instruction)]
            post = index
            while post > earliest and times[post - 1] > sent_at:
                post -= 1
            indices[instruction] = post
            # one message is under way at a time: the next receive stays behind this one
            earliest = index + 1
    return indices


def moved(schedule: Schedule) -> Schedule:
    """Return the schedule with each receive where it is posted: as if it blocked its rank from
    there on."""
    programs = []
    for program, posted in zip(schedule.programs, posts(schedule), strict=True):
        programs.append(_move_receives(program, posted))
    return replace(schedule, programs=tuple(programs))


def _move_receives(program: Program, posted: Mapping[Instruction, int]) -> Program:
    """Return `program` with each receive before the instruction whose index `posted` has."""
    moved_program: list[Instruction] = []
    # receives by the instruction before which they are posted; at most one is posted at a place
    receives = {index: instruction for instruction, index in posted.items()}
    for index, instruction in enumerate(program):
        if index in receives:
            moved_program.append(receives[index])
        if instruction not in posted:
            moved_program.append(instruction)
    return tuple(moved_program)
