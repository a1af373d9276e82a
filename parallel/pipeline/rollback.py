"""The forward passes that a rank makes before its first backward pass: what can be done again.

They change nothing but what is held for the backward passes. If they turn out to have been made with wrong weights,
each rank drops what it holds, receives what others have sent it meanwhile but it had not come to, so that no link
carries anything old, and begins anew.
"""

from collections.abc import Sequence
from itertools import chain, takewhile

from parallel.pipeline.instructions import Channel, Instruction, Message, Op, Program, Schedule
from parallel.pipeline.simulation import sends_under_way, simulate

_OPS = (Op.RECV_ACTIVATION, Op.FORWARD, Op.SEND_ACTIVATION)


def warmup(program: Sequence[Instruction]) -> Program:
    """The part of `program` before the first backward pass and what it waits for."""
    return tuple(takewhile(lambda i: i.op in _OPS, program))


def unread(schedule: Schedule) -> tuple[Program, ...]:
    """By rank, the receives of what other ranks send in their warm-up but the rank does not receive in its own.

    Raises UserError if these receives could hang, whatever of its warm-up each rank had come to.
    """
    warmups = [warmup(program) for program in schedule.programs]
    received = {Message.of(i) for i in chain(*warmups) if i.op is Op.RECV_ACTIVATION}
    drains: list[list[Instruction]] = [[] for _ in warmups]
    for message in map(Message.of, chain(*warmups)):
        if message is not None and message not in received:
            receive = Instruction(Op.RECV_ACTIVATION, message.stage + 1, message.microbatch)
            drains[schedule.rank_of_stage[receive.stage]].append(receive)
    programs = tuple((*first, *drain) for first, drain in zip(warmups, drains, strict=True))
    simulate(
        Schedule(programs, schedule.rank_of_stage),
        communicator=lambda message: Channel.of(message, schedule.rank_of_stage),
        sends=sends_under_way(schedule),
    )
    return tuple(map(tuple, drains))
