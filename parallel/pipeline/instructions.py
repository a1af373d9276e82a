"""Pipeline schedules as data: the instructions of every pipeline rank, in order.

The model is cut into stages, the batch into micro-batches. A rank's program is a list of instructions such as `F0.3`,
the forward of stage 0 on micro-batch 3. A schedule is one program per rank and the rank of each stage. This module
touches no tensor and no process. The simulation (`simulation.py`), the proof (`verify.py`), the executor
(`executor.py`) and the pictures all read the same schedule, so they cannot disagree.

A kind of schedule (`builders.py`) decides only the order of forwards and backwards. `complete` adds the instructions
that this order implies: the transfers between ranks, and `REDUCE` where the gradients of a stage are final.

As text, a schedule is one line per rank, which parses to the same schedule; blank lines and text after a `#` are
ignored. A text with computations alone is completed, so this is a whole custom schedule:

    F0.0 F0.1 B0.0 B0.1     # rank 0
    F1.0 B1.0 F1.1 B1.1     # rank 1
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
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
    """The type of a message: an activation for the next stage, or its gradient for the stage before."""

    ACTIVATION = "A"
    GRADIENT = "G"


SENDS = frozenset({Op.SEND_ACTIVATION, Op.SEND_GRADIENT})
RECEIVES = frozenset({Op.RECV_ACTIVATION, Op.RECV_GRADIENT})
INPUT_GRADIENTS = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT})  # the stage before can continue after one of these
WEIGHT_GRADIENTS = frozenset({Op.BACKWARD, Op.BACKWARD_WEIGHT})  # a stage has finished a micro-batch after one of these
COMPUTATIONS = INPUT_GRADIENTS | WEIGHT_GRADIENTS | {Op.FORWARD}
NO_MICROBATCH = -1
SENDS_UNDER_WAY = 2  # per channel, or more if the schedule needs it: one travels while the next is computed


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
        match = re.fullmatch(rf"({'|'.join(Op)})(\d+)(?:\.(\d+))?", text)
        if match:
            op, stage, microbatch = match.groups()
            instruction = cls(Op(op), int(stage), int(microbatch or NO_MICROBATCH))
            if str(instruction) == text:
                return instruction
        raise UserError(f"{text!r} is no instruction: one of {', '.join(Op)}, then stage.micro-batch, as in F0.3 or R0")


Cost = Callable[[Instruction], float]  # the time that an instruction takes


class Message(NamedTuple):
    """A tensor that travels between two stages. The send and the receive refer to the same message.

    `stage` is the lower of the two stages: activations come from it, gradients go to it.
    """

    kind: MessageType
    stage: int
    microbatch: int

    @classmethod
    def of(cls, i: Instruction) -> Self | None:
        """Return the message that instruction `i` transfers, or None if it transfers none."""
        match i.op:
            case Op.SEND_ACTIVATION:
                return cls(MessageType.ACTIVATION, i.stage, i.microbatch)
            case Op.RECV_ACTIVATION:
                return cls(MessageType.ACTIVATION, i.stage - 1, i.microbatch)
            case Op.SEND_GRADIENT:
                return cls(MessageType.GRADIENT, i.stage - 1, i.microbatch)
            case Op.RECV_GRADIENT:
                return cls(MessageType.GRADIENT, i.stage, i.microbatch)
        return None

    @property
    def sender(self) -> Instruction:
        """Return the instruction that sends this message."""
        if self.kind is MessageType.ACTIVATION:
            return Instruction(Op.SEND_ACTIVATION, self.stage, self.microbatch)
        return Instruction(Op.SEND_GRADIENT, self.stage + 1, self.microbatch)


class Channel(NamedTuple):
    """The ordered path of one type of message from one pipeline rank to another.

    If messages are matched by order (NCCL), each channel must be a communicator of its own: with one communicator for
    both types or both directions, two ranks may deadlock.
    """

    source: int
    destination: int
    kind: MessageType

    @classmethod
    def of(cls, message: Message, rank_of_stage: Sequence[int]) -> Self:
        """Return the channel of `message` if stage s lives on pipeline rank `rank_of_stage[s]`."""
        lower, upper = rank_of_stage[message.stage], rank_of_stage[message.stage + 1]
        return (
            cls(lower, upper, message.kind)
            if message.kind is MessageType.ACTIVATION
            else cls(upper, lower, message.kind)
        )


Program = tuple[Instruction, ...]


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule. programs: by pipeline rank. rank_of_stage: the pipeline rank on which each stage lives."""

    programs: tuple[Program, ...]
    rank_of_stage: tuple[int, ...]

    @property
    def microbatches(self) -> int:
        return 1 + max((i.microbatch for i in chain(*self.programs)), default=NO_MICROBATCH)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, program)) for program in self.programs)

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Return the schedule with this text. Each stage lives on the first rank whose line names it.

        Raises UserError that lists, line by line, words that are no instruction, and stages that no line names.
        """
        programs: list[Program] = []
        problems: list[str] = []
        for number, line in enumerate(text.splitlines(), 1):
            words = line.partition("#")[0].split()
            try:
                programs += [tuple(map(Instruction.parse, words))] if words else []
            except UserError as error:
                problems += (f"line {number}: {problem}" for problem in error.problems)
        homes = {i.stage: rank for rank, program in reversed([*enumerate(programs)]) for i in program}
        stages = range(1 + max(homes, default=0))
        if not problems:
            problems += (f"no line has an instruction of stage {stage}" for stage in stages if stage not in homes)
        if problems:
            raise UserError(*problems)
        rank_of_stage = tuple(homes[stage] for stage in stages)
        if all(i.op in COMPUTATIONS for i in chain(*programs)):
            return complete(programs, rank_of_stage)
        return cls(tuple(programs), rank_of_stage)


def forward_only(schedule: Schedule) -> Schedule:
    """Return the forwards of `schedule` and their transfers, for evaluation."""
    forward = {Op.RECV_ACTIVATION, Op.FORWARD, Op.SEND_ACTIVATION}
    return Schedule(tuple(tuple(i for i in p if i.op in forward) for p in schedule.programs), schedule.rank_of_stage)


def complete(computations: Sequence[Sequence[Instruction]], rank_of_stage: Sequence[int]) -> Schedule:
    """Return a schedule of these forwards and backwards with the transfers and reductions that they imply.

    A receive stands directly before its use, and a send directly after the computation of its tensor. REDUCE follows
    the last weight gradient of a stage, but after the send of its input gradient, because the neighbour waits for that.
    """
    programs = []
    for program in computations:
        last = {i.stage: i for i in program if i.op in WEIGHT_GRADIENTS}
        out: list[Instruction] = []
        for i in program:
            out += _with_transfers(i, rank_of_stage)
            if i == last.get(i.stage):
                out.append(Instruction(Op.REDUCE, i.stage))
        programs.append(tuple(out))
    return Schedule(tuple(programs), tuple(rank_of_stage))


def _with_transfers(i: Instruction, rank_of_stage: Sequence[int]) -> Iterator[Instruction]:
    here = rank_of_stage[i.stage]
    below = i.stage > 0 and rank_of_stage[i.stage - 1] != here
    above = i.stage < len(rank_of_stage) - 1 and rank_of_stage[i.stage + 1] != here
    if below and i.op is Op.FORWARD:
        yield i._replace(op=Op.RECV_ACTIVATION)
    if above and i.op in INPUT_GRADIENTS:
        yield i._replace(op=Op.RECV_GRADIENT)
    yield i
    if above and i.op is Op.FORWARD:
        yield i._replace(op=Op.SEND_ACTIVATION)
    if below and i.op in INPUT_GRADIENTS:
        yield i._replace(op=Op.SEND_GRADIENT)


def picture(programs: Mapping[int, Sequence[Instruction]], at: Mapping[int, int], notes: Mapping[int, str]) -> str:
    """Return a line per rank: its instruction number `at[rank]` in brackets, those around it, and the rank's note."""
    around = 4
    rows = []
    for rank, program in programs.items():
        here = at[rank]
        words = [*map(str, program)]
        left = ["..."] * (here > around) + words[max(0, here - around) : here]
        right = words[here + 1 : here + 1 + around] + ["..."] * (here + 1 + around < len(words))
        current = f"[{words[here] if here < len(words) else 'end'}]"
        rows.append((f"rank {rank}:", " ".join(left), " ".join([current, *right]), notes.get(rank, "")))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = (
        f"{rank:<{widths[0]}}  {left:>{widths[1]}} {right:<{widths[2]}}  {note and '<-- ' + note}"
        for rank, left, right, note in rows
    )
    return "\n".join(line.rstrip() for line in lines)
