"""When a receive may be posted before its message is needed, on a backend whose receives may block
the host.

Over gloo a receive may be posted at any time. NCCL waits for a message in a kernel, and while that
kernel runs, CUDA may block the host in another call (`P2P.posts_early`). A receive is therefore
posted early only where even a host that blocks from there on, until the message has come, causes
no deadlock. That is a property of the schedule: with each receive moved to where it is posted, the
schedule must still run to its end (`verify.check`).

The places follow from one order of the instructions of all ranks, in which every receive follows
its send: the first ranks go on as far as they can. A receive moves ahead of all instructions of its
rank that come after its send in that order, but no further than behind the receive before it, so
that one message is under way at a time. The moved schedule can run in the same order.

A kernel that waits takes a part of the GPU from the products beside it: with all channels of
NVLink, 32 of the 132 processors of an H100. So a receive is posted no earlier than its message is
due by the simulated times of the schedule: before the computation within which it is sent, or
behind the last one that ends before. Activations then travel while the next computation runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from parallel.pipeline.instructions import RECEIVES, SENDS, Instruction, Message, Program
from parallel.pipeline.schedules import Schedule
from parallel.pipeline.simulation import simulate


def posts(schedule: Schedule) -> list[dict[Instruction, int]]:
    """Return, by rank, the index of the instruction of its program before which each receive is to
    be posted.

    The schedule must run to its end.
    """
    order = _global_order(schedule)
    # of each message, the place of its send in the global order
    send_places: dict[Message | None, int] = {}
    for (_, instruction), place in order.items():
        if instruction.op in SENDS:
            send_places[Message.of(instruction)] = place
    spans = simulate(schedule)
    # of each message, the simulated time of its send
    send_times: dict[Message | None, float] = {}
    for span in spans:
        if span.instruction.op in SENDS:
            send_times[Message.of(span.instruction)] = span.start
    end_times = {(span.rank, span.instruction): span.end for span in spans}
    posts_by_rank = []
    for rank, program in enumerate(schedule.programs):
        places = [order[rank, instruction] for instruction in program]
        safe = _safe_posts(program, places, send_places)
        ends = [end_times[rank, instruction] for instruction in program]
        posts_by_rank.append(_posts_when_due(program, safe, ends, send_times))
    return posts_by_rank


def _global_order(schedule: Schedule) -> dict[tuple[int, Instruction], int]:
    """Return the place of each rank's instructions in one order of the instructions of all ranks,
    in which every receive follows its send: the first ranks go on as far as they can."""
    next_index = [0] * len(schedule.programs)
    sent = set[Message | None]()
    order = dict[tuple[int, Instruction], int]()
    rank = 0
    while rank < len(next_index):
        start = next_index[rank]
        for instruction in schedule.programs[rank][start:]:
            message = Message.of(instruction)
            if instruction.op in RECEIVES and message not in sent:
                break
            if instruction.op in SENDS:
                sent.add(message)
            order[rank, instruction] = len(order)
            next_index[rank] += 1
        has_moved = next_index[rank] > start
        # what a rank sends may let the ranks before it go on
        if has_moved and rank > 0:
            rank = 0
        else:
            rank += 1
    return order


def _safe_posts(
    program: Program,
    places: Sequence[int],
    send_places: Mapping[Message | None, int],
) -> dict[Instruction, int]:
    """Return, for each receive, the least index in `program` before which it may be posted: that of
    the first instruction after its message's send in the global order.

    places: of each instruction of the program in the global order.
    send_places: of each message's send in it.
    """
    indices = dict[Instruction, int]()
    earliest = 0
    for index, instruction in enumerate(program):
        if instruction.op not in RECEIVES:
            continue
        send_place = send_places[Message.of(instruction)]
        post = index
        while post > earliest and places[post - 1] > send_place:
            post -= 1
        indices[instruction] = post
        # one message is under way at a time: the next receive stays behind this one
        earliest = index + 1
    return indices


def _posts_when_due(
    program: Program,
    safe: Mapping[Instruction, int],
    ends: Sequence[float],
    send_times: Mapping[Message | None, float],
) -> dict[Instruction, int]:
    """Return, for each receive, the index in `program` before which it is posted: behind all
    instructions that end before its message is sent.

    safe: the least index that each receive may have. ends: the simulated time at which each
    instruction of the program ends. send_times: that at which each message is sent.
    """
    indices = dict[Instruction, int]()
    for index, instruction in enumerate(program):
        post = safe.get(instruction)
        if post is None:
            continue
        send_time = send_times[Message.of(instruction)]
        while post < index and ends[post] <= send_time:
            post += 1
        indices[instruction] = post
    return indices


def moved(schedule: Schedule) -> Schedule:
    """Return the schedule with each receive where it is posted: as if it blocked its rank from
    there on."""
    programs = []
    for program, rank_posts in zip(schedule.programs, posts(schedule), strict=True):
        moved_program = _move_receives(program, rank_posts)
        programs.append(moved_program)
    return replace(schedule, programs=tuple(programs))


def _move_receives(program: Program, rank_posts: Mapping[Instruction, int]) -> Program:
    """Return `program` with each receive before the instruction whose index `rank_posts` has."""
    moved_program: list[Instruction] = []
    # one receive is posted before an instruction at most
    receives_by_index = {index: receive for receive, index in rank_posts.items()}
    for index, instruction in enumerate(program):
        receive = receives_by_index.get(index)
        if receive is not None:
            moved_program.append(receive)
        if instruction not in rank_posts:
            moved_program.append(instruction)
    return tuple(moved_program)
