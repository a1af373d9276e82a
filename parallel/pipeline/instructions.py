"""The instructions of a pipeline, and the messages that they send and receive.

The model is cut into stages, the batch into micro-batches. A rank's program is a list of
instructions such as `F0.3`, the forward of stage 0 on micro-batch 3. Programs of all ranks are a
schedule (`schedules.py`). This module touches no tensor and no process.
"""

import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple, Self

from megaprec.errors import UserError


class Op(StrEnum):
    """The operation of an instruction; the value is its short name in text."""

    FORWARD = "F"
    BACKWARD = "B"  # the next two in one instruction
    BACKWARD_INPUT = "I"  # the gradient of the stage's input, which the stage before waits for
    BACKWARD_WEIGHT = "W"  # the gradients of the stage's weights, which can wait
    REDUCE = "R"
    SEND_ACTIVATION = "sA"
    RECV_ACTIVATION = "rA"
    SEND_GRADIENT = "sG"
    RECV_GRADIENT = "rG"


WORDS = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward of the input",
    Op.BACKWARD_WEIGHT: "backward of the weights",
    Op.REDUCE: "gradient reduction",
    Op.SEND_ACTIVATION: "send of the activation",
    Op.RECV_ACTIVATION: "receive of the activation",
    Op.SEND_GRADIENT: "send of the gradient",
    Op.RECV_GRADIENT: "receive of the gradient",
}


class MessageType(StrEnum):
    """The type of a message: an activation for the next stage, or its gradient for the stage
    before."""

    ACTIVATION = "A"
    GRADIENT = "G"


SENDS = frozenset({Op.SEND_ACTIVATION, Op.SEND_GRADIENT})
RECEIVES = frozenset({Op.RECV_ACTIVATION, Op.RECV_GRADIENT})
# the stage before can continue after one of these
INPUT_GRADIENTS = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT})
# a stage has finished a micro-batch after one of these
WEIGHT_GRADIENTS = frozenset({Op.BACKWARD, Op.BACKWARD_WEIGHT})
COMPUTATIONS = INPUT_GRADIENTS | WEIGHT_GRADIENTS | {Op.FORWARD}
NO_MICROBATCH = -1
SENDS_UNDER_WAY = (
    2  # per channel, or more if the schedule needs it: one travels while the next is computed
)


class Instruction(NamedTuple):
    """One instruction of a rank. `REDUCE` applies to a whole stage and has no micro-batch."""

    op: Op
    stage: int
    microbatch: int = NO_MICROBATCH

    def __str__(self) -> str:
        return f"{self.op}{self.stage}" + ("" if self.op is Op.REDUCE else f".{self.microbatch}")

    @property
    def words(self) -> str:
        """Return the instruction in words, such as "forward of micro-batch 3 in stage 0"."""
        of = "" if self.op is Op.REDUCE else f" of micro-batch {self.microbatch}"
        return f"{WORDS[self.op]}{of} in stage {self.stage}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the instruction with this text. Raises UserError if the text is no instruction."""
        # an operation, a stage, and perhaps a micro-batch; no schedule has numbers of more digits
        match = re.fullmatch(rf"({'|'.join(Op)})(\d{{1,9}})(?:\.(\d{{1,9}}))?", text)
        if match:
            op, stage, microbatch = match.groups()
            instruction = cls(Op(op), int(stage), int(microbatch or NO_MICROBATCH))
            # An instruction has one text: no number begins with 0, and only REDUCE has one number.
            if str(instruction) == text:
                return instruction
        raise UserError.of("pipeline.instruction", text=text, op=", ".join(Op))


Cost = Callable[[Instruction], float]  # the time that an instruction takes


class Message(NamedTuple):
    """A tensor that travels between two stages. The send and the receive refer to the same message.

    `stage` is the lower of the two stages: activations come from it, gradients go to it.
    """

    kind: MessageType
    stage: int
    microbatch: int

    @classmethod
    def of(cls, instruction: Instruction) -> Self | None:
        """Return the message that `instruction` transfers, or None if it transfers none."""
        match instruction.op:
            case Op.SEND_ACTIVATION:
                return cls(MessageType.ACTIVATION, instruction.stage, instruction.microbatch)
            case Op.RECV_ACTIVATION:
                return cls(MessageType.ACTIVATION, instruction.stage - 1, instruction.microbatch)
            case Op.SEND_GRADIENT:
                return cls(MessageType.GRADIENT, instruction.stage - 1, instruction.microbatch)
            case Op.RECV_GRADIENT:
                return cls(MessageType.GRADIENT, instruction.stage, instruction.microbatch)
        return None

    @property
    def sender(self) -> Instruction:
        """Return the instruction that sends this message."""
        if self.kind is MessageType.ACTIVATION:
            return Instruction(Op.SEND_ACTIVATION, self.stage, self.microbatch)
        return Instruction(Op.SEND_GRADIENT, self.stage + 1, self.microbatch)


class Channel(NamedTuple):
    """The ordered path of one type of message from one pipeline rank to another.

    If messages are matched by order (NCCL), each channel must be a communicator of its own: with
    one communicator for both types or both directions, two ranks may deadlock.
    """

    source: int
    destination: int
    kind: MessageType

    @classmethod
    def of(cls, message: Message, rank_of_stage: Sequence[int]) -> Self:
        """Return the channel of `message` if stage s lives on pipeline rank `rank_of_stage[s]`."""
        lower = rank_of_stage[message.stage]
        upper = rank_of_stage[message.stage + 1]
        if message.kind is MessageType.ACTIVATION:
            return cls(lower, upper, message.kind)
        return cls(upper, lower, message.kind)


Program = tuple[Instruction, ...]
