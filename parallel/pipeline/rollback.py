"""The warm-up of a program, the forward passes before its first backward pass, which a rank can
abandon and repeat.

Forward passes change nothing but the tensors that are held for the backward passes. If the warm-up
turns out to have used wrong weights, each rank discards these tensors, receives the messages that
other ranks have sent it but that it had not reached, so that no connection carries an old message,
and starts again.
"""

from collections.abc import Sequence
from itertools import chain, takewhile

from parallel.pipeline.instructions import Channel, Instruction, Message, Op, Program
from parallel.pipeline.schedules import Schedule
from parallel.pipeline.simulation import sends_under_way, simulate

_WARMUP_OPS = (Op.RECV_ACTIVATION, Op.FORWARD, Op.SEND_ACTIVATION)


def warmup(program: Sequence[Instruction]) -> Program:
    """Return the part of `program` before the first backward pass and before the receive that this
    pass needs."""
    return tuple(takewhile(lambda instruction: instruction.op in _WARMUP_OPS, program))


def unread(schedule: Schedule) -> tuple[Program, ...]:
    """Return, by rank, the receives of messages that are sent in a warm-up but not received in the
    rank's own warm-up.

    Raises UserError if these receives could deadlock, however far each rank had come in its
    warm-up.
    """
    warmups = [warmup(program) for program in schedule.programs]
    received = {
        Message.of(instruction)
        for instruction in chain(*warmups)
        if instruction.op is Op.RECV_ACTIVATION
    }
    # by rank
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
