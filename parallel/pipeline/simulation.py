"""A simulation that times a schedule before anything is launched.

Every rank runs its program in order. A send does not block its rank; a receive blocks its rank
until the message arrives. The communicators determine how messages are matched: within one
communicator, transfers happen strictly in the order in which each end asks for them, and a send
finishes only when it is received, as in NCCL. If every message has its own communicator, no message
queues behind another: this gives the times. If a schedule finishes with the communicators that
`p2p.py` really uses, and its limit on unfinished sends, it cannot deadlock; this is the proof in
`verify.py`.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

from megaprec.errors import UserError
from parallel.pipeline.instructions import (
    INPUT_GRADIENTS,
    RECEIVES,
    SENDS,
    SENDS_UNDER_WAY,
    WEIGHT_GRADIENTS,
    Channel,
    Cost,
    Instruction,
    Message,
    MessageType,
    Op,
)
from parallel.pipeline.schedules import Schedule, picture

Communicator = Callable[[Message], Hashable]  # messages with the same value share one


class Span(NamedTuple):
    """The time span in which `rank` ran `instruction`, in the unit of the cost, or in seconds if it
    was measured."""

    rank: int
    instruction: Instruction
    start: float
    end: float


class Mark(NamedTuple):
    """A note on a rank's program. at: index of the instruction; the program's length for a note on
    its end."""

    at: int
    note: str


class RefusedSchedule(UserError):
    """A schedule that cannot be run.

    spans: the instructions that would run before it deadlocks.
    marks: the place of the fault, by rank.
    """

    def __init__(
        self,
        *problems: str,
        schedule: Schedule,
        spans: Sequence[Span],
        marks: Mapping[int, Mark],
    ) -> None:
        programs = dict(enumerate(schedule.programs))
        # ranks without a mark are shown from their beginning
        indices = {rank: marks[rank].at if rank in marks else 0 for rank in programs}
        notes = {rank: mark.note for rank, mark in marks.items()}
        super().__init__(*problems, *picture(programs, indices, notes).splitlines())
        self.spans = spans
        self.marks = marks


def textbook(instruction: Instruction) -> float:
    """Return the textbook cost: 1 for a forward and for each half of a backward, 0 for all other
    instructions."""
    costs = {
        Op.FORWARD: 1.0,
        Op.BACKWARD: 2.0,
        Op.BACKWARD_INPUT: 1.0,
        Op.BACKWARD_WEIGHT: 1.0,
    }
    return costs.get(instruction.op, 0.0)


def simulate(
    schedule: Schedule,
    cost: Cost = textbook,
    communicator: Communicator = lambda message: message,
    sends: int = SENDS_UNDER_WAY,
) -> list[Span]:
    """Return the time span of each instruction.

    The cost of a send is the transfer time of its message; a receive costs nothing. Every message
    has its own communicator unless `communicator` says otherwise. A rank waits while one
    communicator has `sends` unfinished sends of it.
    Raises RefusedSchedule with a picture of all ranks if some instruction can never run.
    """
    simulation = _Simulation(schedule, cost, communicator, sends)
    progress = True
    while progress:
        # every rank has its turn before the question is asked
        moved = [simulation.run(rank) for rank in range(len(schedule.programs))]
        progress = any(moved)
    simulation.require_finished()
    return simulation.spans


# a search for layouts asks for each rank of a schedule, and many layouts have the same schedule
@lru_cache(maxsize=64)
def sends_under_way(schedule: Schedule) -> int:
    """Return the number of unfinished sends that a channel must allow so that no rank waits to
    send: two or more."""
    changes: dict[Channel, list[tuple[float, int]]] = defaultdict(list)
    for span in simulate(schedule):
        message = Message.of(span.instruction)
        if span.instruction.op in SENDS and message is not None:
            channel = Channel.of(message, schedule.rank_of_stage)
            changes[channel] += [(span.start, +1), (span.end, -1)]
    most_unfinished = SENDS_UNDER_WAY
    for of_channel in changes.values():
        # at equal times the ends come before the starts
        under_way = accumulate(step for _, step in sorted(of_channel))
        most_unfinished = max(most_unfinished, *under_way)
    return most_unfinished


def bubble(spans: Sequence[Span]) -> float:
    """Return the longest time that a rank waits between its first and its last computation, over
    the time it computes.

    (p - 1) / m for GPipe and 1F1B on p ranks of equal cost with m micro-batches. REDUCE counts as a
    computation.
    """
    bubbles = [0.0]
    for computations in _computations_by_rank(spans):
        busy = _total(computations)
        if busy:
            start = min(span.start for span in computations)
            end = max(span.end for span in computations)
            bubbles.append((end - start - busy) / busy)
    return max(bubbles)


def idle(spans: Sequence[Span]) -> list[float]:
    """Return, by rank, the idle fraction of the step, from the first computation of all ranks to
    the last."""
    ranks = _computations_by_rank(spans)
    all_spans = [*chain(*ranks)]
    start = min(span.start for span in all_spans)
    end = max(span.end for span in all_spans)
    step_time = end - start
    return [1 - _total(computations) / step_time for computations in ranks]


def _total(spans: Sequence[Span]) -> float:
    return sum(span.end - span.start for span in spans)


def _computations_by_rank(spans: Sequence[Span]) -> list[list[Span]]:
    """Return the computations of each rank that has any."""
    by_rank: dict[int, list[Span]] = {}
    for span in spans:
        if Message.of(span.instruction) is None:
            by_rank.setdefault(span.rank, []).append(span)
    return [by_rank[rank] for rank in sorted(by_rank)]


def peak(
    schedule: Schedule,
    growth: Cost,
    within: Cost = lambda instruction: 0,
    message: float = 0,
) -> list[float]:
    """Return, by rank, the peak memory of its activations.

    growth: what an instruction adds to the memory. within: what it takes besides, while it runs.
    message: size of one message between stages. Besides messages that are received and not used
        yet, a rank holds one for the posted receive and, on each channel, those of the unfinished
        sends.
    """
    peaks: list[float] = []
    for rank in range(len(schedule.programs)):
        in_use = memory_in_use(schedule, rank, growth, within, message)
        peaks.append(max((max(during, after) for _, during, after in in_use), default=0))
    return peaks


class MemoryInUse(NamedTuple):
    """The memory of a rank's activations while it runs an instruction, and after it."""

    instruction: Instruction
    during: float
    after: float


def memory_in_use(
    schedule: Schedule, rank: int, growth: Cost, within: Cost, message: float
) -> Iterator[MemoryInUse]:
    """Yield the memory of a rank for each instruction of its program, in the program's order, in
    which spans need not be.

    growth: what an instruction adds to the memory. within: what it takes besides, while it runs.
    message: size of one message between stages.
    """
    program = schedule.programs[rank]
    messages = _message_memory(schedule, program, message, sends_under_way(schedule))
    activations = 0
    for instruction, of_messages in zip(program, messages, strict=True):
        during = activations + of_messages + within(instruction)
        activations += growth(instruction)
        yield MemoryInUse(instruction, during, activations + of_messages)


def _message_memory(
    schedule: Schedule,
    program: Sequence[Instruction],
    message: float,
    sends: int,
) -> Iterator[float]:
    """Yield the memory that a rank holds for messages while it runs each instruction."""
    sent: Counter[Channel] = Counter()
    # sends may be unfinished up to the limit of each channel: no time says when they finish
    unfinished = 0
    unused: set[Message] = set()  # received, and not yet taken by a computation
    receives_to_come = sum(instruction.op in RECEIVES for instruction in program)
    for instruction in program:
        _, stage, microbatch = instruction
        # a computation takes the message that it was sent
        if instruction.op is Op.FORWARD:
            unused.discard(Message(MessageType.ACTIVATION, stage - 1, microbatch))
        if instruction.op in INPUT_GRADIENTS:
            unused.discard(Message(MessageType.GRADIENT, stage, microbatch))
        # the next receive is posted as soon as the one before has finished
        posted = 1 if receives_to_come else 0
        yield message * (len(unused) + posted + unfinished)

        transferred = Message.of(instruction)
        if transferred and instruction.op in RECEIVES:
            unused.add(transferred)
            receives_to_come -= 1
        elif transferred:
            channel = Channel.of(transferred, schedule.rank_of_stage)
            sent[channel] += 1
            if sent[channel] <= sends:
                unfinished += 1


def in_flight(schedule: Schedule) -> list[int]:
    """Return, by rank, the most activations held at once: forwards whose weight gradients are still
    to come."""

    def growth(instruction: Instruction) -> int:
        if instruction.op is Op.FORWARD:
            return 1
        return -1 if instruction.op in WEIGHT_GRADIENTS else 0

    return [int(count) for count in peak(schedule, growth)]


class _Posted(NamedTuple):
    """A transfer that `rank` has asked for."""

    message: Message
    rank: int
    instruction: Instruction
    time: float


class _Simulation:
    """The state of the simulation of all ranks."""

    def __init__(
        self,
        schedule: Schedule,
        cost: Cost,
        communicator: Communicator,
        sends: int,
    ) -> None:
        self.schedule = schedule
        self.cost = cost
        self.communicator = communicator
        self.sends = sends
        self.programs = schedule.programs
        # by rank: the index of the next instruction, and the time
        self.next_index = [0] * len(self.programs)
        self.clock = [0.0] * len(self.programs)
        # ranks that asked for a message and wait for it
        self.receiving: set[int] = set()
        # ranks that wait until a communicator can take one more send
        self.crowded: dict[int, Hashable] = {}
        # by communicator and rank
        self.queues: dict[Hashable, dict[int, deque[_Posted]]] = defaultdict(
            lambda: defaultdict(deque)
        )
        # end of a communicator's last transfer
        self.free_at: dict[Hashable, float] = defaultdict(float)
        self.spans: list[Span] = []

    def run(self, rank: int) -> bool:
        """Run `rank` until it must wait. Return True if it moved at all."""
        start = self.next_index[rank]
        program = self.programs[rank]
        moves = True
        while moves and rank not in self.receiving and self.next_index[rank] < len(program):
            moves = self._issue(rank, program[self.next_index[rank]])
        return self.next_index[rank] > start

    def _issue(self, rank: int, instruction: Instruction) -> bool:
        """Run a computation or ask for a transfer. Return False if the transfer must be asked for
        again later."""
        message = Message.of(instruction)
        if message is not None:
            return self._post(_Posted(message, rank, instruction, self.clock[rank]))
        end = self.clock[rank] + self.cost(instruction)
        self.spans.append(Span(rank, instruction, self.clock[rank], end))
        self.clock[rank] = end
        self.next_index[rank] += 1
        return True

    def _post(self, transfer: _Posted) -> bool:
        """Ask for a transfer. Return False if its communicator can take no more sends now."""
        communicator = self.communicator(transfer.message)
        queue = self.queues[communicator][transfer.rank]
        if transfer.instruction.op not in SENDS:
            # a receive blocks its rank: `_transfer` moves the rank on
            self.receiving.add(transfer.rank)
        elif len(queue) == self.sends:
            # the queue of this rank has sends alone: a receive would have blocked the rank
            self.crowded[transfer.rank] = communicator
            return False
        else:
            # a send does not block its rank
            self.next_index[transfer.rank] += 1
        queue.append(transfer)
        # the other end may wait for this one
        self._transfer(communicator)
        return True

    def _transfer(self, communicator: Hashable) -> None:
        """Run the transfers that are first in the queues of both ends."""
        while True:
            # one queue for each rank that has posted, of at most two
            queues = [queue for queue in self.queues[communicator].values() if queue]
            if len(queues) < 2 or queues[0][0].message != queues[1][0].message:
                return
            first, second = (queue.popleft() for queue in queues)
            if first.instruction.op in SENDS:
                send = first
                receive = second
            else:
                send = second
                receive = first
            # both ends must have asked, and transfers of a communicator do not overlap
            start = max(send.time, receive.time, self.free_at[communicator])
            end = start + self.cost(send.instruction)
            self.free_at[communicator] = end
            self.clock[receive.rank] = end
            for posted in (send, receive):
                self.spans.append(Span(posted.rank, posted.instruction, posted.time, end))
            self.receiving.remove(receive.rank)
            self.next_index[receive.rank] += 1
            # the sender may wait for room for one more
            if self.crowded.get(send.rank) == communicator:
                self.clock[send.rank] = max(end, self.clock[send.rank])
                del self.crowded[send.rank]

    def require_finished(self) -> None:
        """Raise RefusedSchedule, with the reason at each rank, if an instruction has not run or a
        message is not received."""
        notes: dict[int, str] = {}
        for rank, program in enumerate(self.programs):
            if self.next_index[rank] < len(program):
                notes[rank] = self._describe_wait(rank)
        for queues in self.queues.values():
            for posted in chain(*queues.values()):
                # of a rank that waits itself, that is the better reason
                if self._has_ended(posted.rank):
                    notes[posted.rank] = f"no rank receives {posted.instruction}"
        if not notes:
            return
        marks = {rank: Mark(self.next_index[rank], note) for rank, note in sorted(notes.items())}
        raise RefusedSchedule(
            "this schedule cannot finish", schedule=self.schedule, spans=self.spans, marks=marks
        )

    def _has_ended(self, rank: int) -> bool:
        return self.next_index[rank] == len(self.programs[rank])

    def _describe_wait(self, rank: int) -> str:
        """Return what `rank` waits for."""
        instruction = self.programs[rank][self.next_index[rank]]
        message = Message.of(instruction)
        assert message is not None, f"{instruction} waits for no rank"
        channel = Channel.of(message, self.schedule.rank_of_stage)
        queues = self.queues[self.communicator(message)]
        if instruction.op in SENDS:
            return f"waits for rank {channel.destination} to receive {queues[rank][0].instruction}"
        ahead = queues.get(channel.source)
        wait = f"waits for {message.sender} of rank {channel.source}"
        # the sender has asked for another message of the communicator first
        if ahead and ahead[0].message != message:
            wait += f", behind {ahead[0].instruction}"
        return wait
