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
    """Return, by rank, the number of the instruction before which each receive is posted.

    The schedule must run to its end.
    """
    order = _global_order(schedule)
    send_orders: dict[Message | None, int] = {}
    for (_, instruction), position in order.items():
        if instruction.op in SENDS:
            send_orders[Message.of(instruction)] = position
    spans = simulate(schedule)
    due: dict[Message | None, float] = {}
    for span in spans:
        if span.instruction.op in SENDS:
            due[Message.of(span.instruction)] = span.start
    ends = {(span.rank, span.instruction): span.end for span in spans}
    posts_by_rank = []
    for rank, program in enumerate(schedule.programs):
        orders = [order[rank, instruction] for instruction in program]
        safe = _safe_posts(program, orders, send_orders)
        end_times = [ends[rank, instruction] for instruction in program]
        posts_by_rank.append(_posts_when_due(program, safe, end_times, due))
    return posts_by_rank


def _global_order(schedule: Schedule) -> dict[tuple[int, Instruction], int]:
    """Return the position of each rank's instructions in an order of all of them."""
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
    orders: Sequence[int],
    send_orders: Mapping[Message | None, int],
) -> dict[Instruction, int]:
    """Return the least index in `program` before which each receive may be posted.

    orders: the position of each instruction in the global order.
    send_orders: that of each message's send.
    """
    indices = dict[Instruction, int]()
    earliest = 0
    for index, instruction in enumerate(program):
        if instruction.op not in RECEIVES:
            continue
        send_order = send_orders[Message.of(instruction)]
        post = index
        while post > earliest and orders[post - 1] > send_order:
            post -= 1
        indices[instruction] = post
        # one message is under way at a time: the next receive stays behind this one
        earliest = index + 1
    return indices


def _posts_when_due(
    program: Program,
    safe: Mapping[Instruction, int],
    ends: Sequence[float],
    due: Mapping[Message | None, float],
) -> dict[Instruction, int]:
    """Return the index before which each receive is posted: behind all that ends before its message
    is sent.

    safe: the least index that it may have. ends: the time at which each instruction ends.
    due: that at which each message is sent.
    """
    indices = dict[Instruction, int]()
    for index, instruction in enumerate(program):
        post = safe.get(instruction)
        if post is None:
            continue
        while post < index and ends[post] <= due[Message.of(instruction)]:
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
