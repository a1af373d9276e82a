"""Pipeline schedules as data: what every pipeline rank does, in order.

The model is cut into stages, the batch into micro-batches. A rank's program is a list of instructions such as
`F0.3`, the forward of stage 0 on micro-batch 3; a schedule is one program per rank and the place of each stage.
Nothing here touches a tensor or a process. The same value is what `simulate.py` times and proves, what
`executor.py` carries out and what a picture draws, so they cannot disagree.

A kind of schedule decides only the order of forwards and backwards. `complete` adds what that order implies:
the transfers between ranks, and `REDUCE` where a stage's gradients have become final.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import NamedTuple, Self

from megaprec.errors import UserError


class Op(StrEnum):
    """What an instruction does; the value is its short name in text."""

    FORWARD = "F"
    BACKWARD = "B"
    REDUCE = "R"
    SEND_ACTIVATION = "sA"
    RECV_ACTIVATION = "rA"
    SEND_GRADIENT = "sG"
    RECV_GRADIENT = "rG"


class Kind(StrEnum):
    """What travels: activations to the next stage, their gradients back."""

    ACTIVATION = "A"
    GRADIENT = "G"


SENDS = frozenset({Op.SEND_ACTIVATION, Op.SEND_GRADIENT})
NO_MICROBATCH = -1
SENDS_UNDER_WAY = 2  # on one channel: one travels while the next is made; more would only hold memory


class Instruction(NamedTuple):
    """One thing a rank does. `REDUCE` is about a whole stage and has no micro-batch."""

    op: Op
    stage: int
    microbatch: int = NO_MICROBATCH

    def __str__(self) -> str:
        return f"{self.op}{self.stage}" + ("" if self.op is Op.REDUCE else f".{self.microbatch}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The instruction whose text is `text`; UserError if there is none."""
        match = re.fullmatch(rf"({'|'.join(Op)})(\d+)(?:\.(\d+))?", text)
        if match:
            op, stage, microbatch = match.groups()
            instruction = cls(Op(op), int(stage), int(microbatch or NO_MICROBATCH))
            if str(instruction) == text:
                return instruction
        raise UserError(f"{text!r} is no instruction: one of {', '.join(Op)}, then stage.micro-batch, as in F0.3 or R0")


class Message(NamedTuple):
    """A tensor between two stages. Both ends of its transfer speak of the same message.

    `stage` is the lower of the two stages: activations come from it, gradients go to it.
    """

    kind: Kind
    stage: int
    microbatch: int

    @classmethod
    def of(cls, i: Instruction) -> Self | None:
        """What instruction `i` transfers, if it transfers at all."""
        match i.op:
            case Op.SEND_ACTIVATION:
                return cls(Kind.ACTIVATION, i.stage, i.microbatch)
            case Op.RECV_ACTIVATION:
                return cls(Kind.ACTIVATION, i.stage - 1, i.microbatch)
            case Op.SEND_GRADIENT:
                return cls(Kind.GRADIENT, i.stage - 1, i.microbatch)
            case Op.RECV_GRADIENT:
                return cls(Kind.GRADIENT, i.stage, i.microbatch)
        return None

    @property
    def sender(self) -> Instruction:
        """The instruction that sends it."""
        if self.kind is Kind.ACTIVATION:
            return Instruction(Op.SEND_ACTIVATION, self.stage, self.microbatch)
        return Instruction(Op.SEND_GRADIENT, self.stage + 1, self.microbatch)


class Channel(NamedTuple):
    """The way of one kind of message from one pipeline rank to another, in order.

    Where messages are matched by order (NCCL) each channel must be a communicator of its own: with one for
    both kinds or both directions, the two ranks may wait for each other for ever.
    """

    source: int
    destination: int
    kind: Kind

    @classmethod
    def of(cls, message: Message, rank_of_stage: Sequence[int]) -> Self:
        """The channel that `message` takes when stage s lives on pipeline rank `rank_of_stage[s]`."""
        lower, upper = rank_of_stage[message.stage], rank_of_stage[message.stage + 1]
        return cls(lower, upper, message.kind) if message.kind is Kind.ACTIVATION else cls(upper, lower, message.kind)


Program = tuple[Instruction, ...]


@dataclass(frozen=True)
class Schedule:
    """programs: by pipeline rank; rank_of_stage: the pipeline rank on which each stage lives."""

    programs: tuple[Program, ...]
    rank_of_stage: tuple[int, ...]

    @property
    def microbatches(self) -> int:
        return 1 + max((i.microbatch for i in chain(*self.programs)), default=NO_MICROBATCH)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, program)) for program in self.programs)


def schedule(kind: str, ranks: int, microbatches: int) -> Schedule:
    """The schedule named `kind` ("gpipe" or "1f1b") for `ranks` stages, one a rank; UserError if there is none."""
    counts = {"pipeline ranks": ranks, "micro-batches": microbatches}
    problems = [f"{name} must be at least 1, got {count}" for name, count in counts.items() if count < 1]
    if kind not in KINDS:
        problems.append(f"no schedule is called {kind!r}: choose one of {', '.join(KINDS)}")
    if problems:
        raise UserError(*problems)
    return KINDS[kind](ranks, microbatches)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Every forward, then every backward. All micro-batches' activations are held at once."""
    return _stage_a_rank([_alternate(rank, microbatches, warmup=microbatches) for rank in range(ranks)])


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Forwards until the pipe is full, then one forward for one backward, then the remaining backwards.

    As fast as GPipe, but rank r holds the activations of only min(microbatches, ranks - r) micro-batches.
    """
    return _stage_a_rank([_alternate(rank, microbatches, warmup=ranks - rank - 1) for rank in range(ranks)])


KINDS: Mapping[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of `schedule` and their transfers, for evaluation."""
    forward = {Op.RECV_ACTIVATION, Op.FORWARD, Op.SEND_ACTIVATION}
    return Schedule(tuple(tuple(i for i in p if i.op in forward) for p in schedule.programs), schedule.rank_of_stage)


def complete(computations: Sequence[Sequence[Instruction]], rank_of_stage: Sequence[int]) -> Schedule:
    """Adds to each rank's forwards and backwards the transfers and reductions that they imply.

    A receive stands directly before its use and a send directly after its making. REDUCE follows the last
    backward of a stage, but after the send of its gradient: the neighbour waits for that.
    """
    programs = []
    for program in computations:
        last_backward = {i.stage: i for i in program if i.op is Op.BACKWARD}
        out: list[Instruction] = []
        for i in program:
            out += _with_transfers(i, rank_of_stage)
            if i == last_backward.get(i.stage):
                out.append(Instruction(Op.REDUCE, i.stage))
        programs.append(tuple(out))
    return Schedule(tuple(programs), tuple(rank_of_stage))


def _with_transfers(i: Instruction, rank_of_stage: Sequence[int]) -> Iterator[Instruction]:
    here = rank_of_stage[i.stage]
    below = i.stage > 0 and rank_of_stage[i.stage - 1] != here
    above = i.stage < len(rank_of_stage) - 1 and rank_of_stage[i.stage + 1] != here
    is_forward = i.op is Op.FORWARD
    if below if is_forward else above:
        yield i._replace(op=Op.RECV_ACTIVATION if is_forward else Op.RECV_GRADIENT)
    yield i
    if above if is_forward else below:
        yield i._replace(op=Op.SEND_ACTIVATION if is_forward else Op.SEND_GRADIENT)


def _stage_a_rank(computations: Sequence[Sequence[Instruction]]) -> Schedule:
    return complete(computations, range(len(computations)))


def _alternate(stage: int, microbatches: int, warmup: int) -> list[Instruction]:
    forwards = [Instruction(Op.FORWARD, stage, m) for m in range(microbatches)]
    backwards = [Instruction(Op.BACKWARD, stage, m) for m in range(microbatches)]
    warmup = min(warmup, microbatches)
    steady = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
    return [*forwards[:warmup], *steady, *backwards[microbatches - warmup :]]


def picture(programs: Mapping[int, Sequence[Instruction]], at: Mapping[int, int], notes: Mapping[int, str]) -> str:
    """One line a rank: its instruction number `at[rank]` in brackets, what stands around it, and its note."""
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
