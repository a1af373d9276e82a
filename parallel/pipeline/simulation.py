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
    """A schedule that cannot be run. Its lines are the problems, and a picture of all ranks.

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
    """Return the time span of each instruction, in the order in which they are simulated.

    cost: the time of an instruction: of a send the transfer time of its message, of a receive 0.
    communicator: messages for which it returns the same value share a communicator; by default each
        message has its own.
    sends: a rank waits while one communicator has so many unfinished sends of it.
    Raises RefusedSchedule with a picture of all ranks if some instruction can never run.
    """
    simulation = _Simulation(schedule, cost, communicator, sends)
    some_rank_moves = True
    while some_rank_moves:
        # a list: every rank has its turn before the question is asked
        moves = [simulation.run(rank) for rank in range(len(schedule.programs))]
        some_rank_moves = any(moves)
    simulation.require_finished()
    return simulation.spans


# a search for layouts asks for each rank of a schedule, and many layouts have the same schedule
@lru_cache(maxsize=64)
def sends_under_way(schedule: Schedule) -> int:
    """Return the number of unfinished sends that a channel must allow so that no rank waits to
    send: two or more."""
    # by channel: the times at which the number of unfinished sends changes, and by how much
    changes: dict[Channel, list[tuple[float, int]]] = defaultdict(list)
    for span in simulate(schedule):
        message = Message.of(span.instruction)
        if span.instruction.op in SENDS and message is not None:
            channel = Channel.of(message, schedule.rank_of_stage)
            changes[channel] += [(span.start, +1), (span.end, -1)]
    most_unfinished = SENDS_UNDER_WAY
    for changes_of_channel in changes.values():
        # sorted by time; at equal times -1 comes before +1
        in_order = [change for _, change in sorted(changes_of_channel)]
        unfinished = accumulate(in_order)
        most_unfinished = max(most_unfinished, *unfinished)
    return most_unfinished


def bubble(spans: Sequence[Span]) -> float:
    """Return the bubble of the rank that waits longest: the time that it waits between its first
    and its last computation, over the time that it computes; 0 if no rank computes.

    It is (p - 1) / m for GPipe and 1F1B on p ranks of equal cost with m micro-batches. REDUCE
    counts as a computation.
    """
    bubbles = [0.0]
    for computations in _computations_by_rank(spans):
        busy = _total(computations)
        if busy:
            start = min(span.start for span in computations)
            end = max(span.end for span in computations)
            waiting = end - start - busy
            bubbles.append(waiting / busy)
    return max(bubbles)


def idle(spans: Sequence[Span]) -> list[float]:
    """Return, by rank, the fraction of the step in which the rank does not compute. The step lasts
    from the first computation of any rank to the last."""
    by_rank = _computations_by_rank(spans)
    all_computations = [*chain(*by_rank)]
    start = min(span.start for span in all_computations)
    end = max(span.end for span in all_computations)
    step_time = end - start
    return [1 - _total(computations) / step_time for computations in by_rank]


def _total(spans: Sequence[Span]) -> float:
    return sum(span.end - span.start for span in spans)


def _computations_by_rank(spans: Sequence[Span]) -> list[list[Span]]:
    """Return the spans of the computations of each rank that has any, by rank in ascending
    order."""
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
    """Return, by rank, the peak memory of its activations, in the unit of the arguments (bytes, or
    micro-batches).

    growth: what an instruction adds to the memory; negative if it frees some.
    within: what an instruction takes besides, while it runs.
    message: size of one message between stages. Besides messages that are received and not used
        yet, a rank holds one for the posted receive and, on each channel, those of the unfinished
        sends.
    """
    peaks: list[float] = []
    for rank in range(len(schedule.programs)):
        highest: float = 0
        for memory in memory_in_use(schedule, rank, growth, within, message):
            highest = max(highest, memory.during, memory.after)
        peaks.append(highest)
    return peaks


class MemoryInUse(NamedTuple):
    """The memory of a rank's activations and messages while it runs an instruction, and after
    it."""

    instruction: Instruction
    during: float
    after: float


def memory_in_use(
    schedule: Schedule, rank: int, growth: Cost, within: Cost, message: float
) -> Iterator[MemoryInUse]:
    """Yield the memory of a rank for each instruction of its program, in the program's order.

    growth, within, message: as in `peak`.
    """
    program = schedule.programs[rank]
    memory_of_messages = _message_memory(schedule, program, message, sends_under_way(schedule))
    activations = 0
    for instruction, messages in zip(program, memory_of_messages, strict=True):
        during = activations + messages + within(instruction)
        activations += growth(instruction)
        yield MemoryInUse(instruction, during, after=activations + messages)


def _message_memory(
    schedule: Schedule,
    program: Sequence[Instruction],
    message: float,
    sends: int,
) -> Iterator[float]:
    """Yield the memory that a rank holds for messages while it runs each instruction of `program`.

    message: size of one message. sends: the most unfinished sends of a channel.
    """
    sent: Counter[Channel] = Counter()
    # When a send finishes is not known here: the first `sends` of a channel are taken to remain
    # unfinished, as later ones replace them.
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
    """Return, by rank, how many activations it holds at once, at most: one for each micro-batch in
    each of its stages, from the forward to the weight gradient."""

    def growth(instruction: Instruction) -> int:
        if instruction.op is Op.FORWARD:
            return 1
        if instruction.op in WEIGHT_GRADIENTS:
            return -1
        return 0

    return [int(count) for count in peak(schedule, growth)]


class _Posted(NamedTuple):
    """A transfer that `rank` has asked for by `instruction`, at `time`."""

    message: Message
    rank: int
    instruction: Instruction
    time: float


class _Simulation:
    """The state of the simulation of all ranks; the arguments are those of `simulate`."""

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
        # by rank that waits to send: the communicator that can take no more of its sends now
        self.crowded: dict[int, Hashable] = {}
        # by communicator and rank: the transfers that were asked for and are not finished, in order
        self.queues: dict[Hashable, dict[int, deque[_Posted]]] = defaultdict(
            lambda: defaultdict(deque)
        )
        # by communicator: the end of its last transfer
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
        """Run a computation of `rank`, or ask for a transfer. Return False if the transfer must be
        asked for again later."""
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
        """Run the transfers of a communicator for which both ends have asked, as long as they are
        the first ones in the queues of both."""
        while True:
            # one queue for each rank that has posted, of at most two
            queues = [queue for queue in self.queues[communicator].values() if queue]
            if len(queues) < 2:
                return
            one_queue, other_queue = queues[:2]
            if one_queue[0].message != other_queue[0].message:
                return
            one_end = one_queue.popleft()
            other_end = other_queue.popleft()
            if one_end.instruction.op in SENDS:
                send = one_end
                receive = other_end
            else:
                send = other_end
                receive = one_end
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
        message is not received. To be called when no rank can move any more."""
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
        """Return in words what `rank`, whose next instruction is a transfer, waits for."""
        instruction = self.programs[rank][self.next_index[rank]]
        message = Message.of(instruction)
        assert message is not None, f"{instruction} waits for no rank"
        channel = Channel.of(message, self.schedule.rank_of_stage)
        queues = self.queues[self.communicator(message)]
        if instruction.op in SENDS:
            oldest_send = queues[rank][0].instruction
            return f"waits for rank {channel.destination} to receive {oldest_send}"
        wait = f"waits for {message.sender} of rank {channel.source}"
        queue_of_sender = queues.get(channel.source)
        # the sender has asked for another message of the communicator first
        if queue_of_sender and queue_of_sender[0].message != message:
            wait += f", behind {queue_of_sender[0].instruction}"
        return wait
