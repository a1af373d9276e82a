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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
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
    """A note on instruction number `at` of a rank's program; `at` is the program's length for a
    note on its end."""

    at: int
    note: str


class Refused(UserError):
    """A schedule that cannot be run.

    spans: the instructions that would run before it deadlocks.
    marks: the place of the fault, by rank.
    """

    def __init__(
        self, *problems: str, schedule: Schedule, spans: Sequence[Span], marks: Mapping[int, Mark]
    ) -> None:
        programs = dict(enumerate(schedule.programs))
        at = {rank: marks[rank].at if rank in marks else 0 for rank in programs}
        notes = {rank: mark.note for rank, mark in marks.items()}
        super().__init__(*problems, *picture(programs, at, notes).splitlines())
        self.spans = spans
        self.marks = marks


def textbook(i: Instruction) -> float:
    """Return the textbook cost: 1 for a forward and for each half of a backward, 0 for all other
    instructions."""
    costs = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0, Op.BACKWARD_INPUT: 1.0, Op.BACKWARD_WEIGHT: 1.0}
    return costs.get(i.op, 0.0)


def simulate(
    schedule: Schedule,
    cost: Cost = textbook,
    communicator: Communicator = lambda m: m,
    sends: int = SENDS_UNDER_WAY,
) -> list[Span]:
    """Return the time span of each instruction.

    The cost of a send is the transfer time of its message; a receive costs nothing. Every message
    has its own communicator unless `communicator` says otherwise. A rank waits while one
    communicator has `sends` unfinished sends of it. Raises Refused with a picture of all ranks if
    some instruction can never run.
    """
    clockwork = _Clockwork(schedule, cost, communicator, sends)
    while sum(
        clockwork.run(rank) for rank in range(len(schedule.programs))
    ):  # not any(): every rank has its turn
        pass
    clockwork.require_finished()
    return clockwork.spans


def sends_under_way(schedule: Schedule) -> int:
    """Return the number of unfinished sends that a channel must allow so that no rank waits to
    send: two or more."""
    changes: dict[Channel, list[tuple[float, int]]] = defaultdict(list)
    for span in simulate(schedule):
        if span.instruction.op in SENDS and (message := Message.of(span.instruction)):
            changes[Channel.of(message, schedule.rank_of_stage)] += [
                (span.start, +1),
                (span.end, -1),
            ]
    depths = chain.from_iterable(
        accumulate(step for _, step in sorted(c)) for c in changes.values()
    )
    return max(chain((SENDS_UNDER_WAY,), depths))


def bubble(spans: Sequence[Span]) -> float:
    """Return the longest time that a rank waits between its first and its last computation, over
    the time it computes.

    (p - 1) / m for GPipe and 1F1B on p ranks of equal cost with m micro-batches. REDUCE counts as a
    computation.
    """
    waits = []
    for own in _by_rank(spans):
        busy = sum(s.end - s.start for s in own)
        waits.append(
            (max(s.end for s in own) - min(s.start for s in own) - busy) / busy if busy else 0.0
        )
    return max(waits, default=0.0)


def idle(spans: Sequence[Span]) -> list[float]:
    """Return, by rank, the idle fraction of the step, from the first computation of all ranks to
    the last."""
    ranks = _by_rank(spans)
    start = min(s.start for own in ranks for s in own)
    end = max(s.end for own in ranks for s in own)
    return [1 - sum(s.end - s.start for s in own) / (end - start) for own in ranks]


def _by_rank(spans: Sequence[Span]) -> list[list[Span]]:
    """Return the computations of each rank that has any."""
    found: dict[int, list[Span]] = {}
    for span in spans:
        if Message.of(span.instruction) is None:
            found.setdefault(span.rank, []).append(span)
    return [found[rank] for rank in sorted(found)]


def peak(
    schedule: Schedule, growth: Cost, within: Cost = lambda i: 0, message: float = 0
) -> list[float]:
    """Return, by rank, the peak memory of its activations.

    Instruction i adds growth(i) to the memory, and within(i) while it runs.
    message: size of one message between stages. Besides messages that are received and not used
        yet, a rank holds one for the posted receive and, on each channel, those of the unfinished
        sends.
    """
    sends = sends_under_way(schedule)
    return [
        max(
            _in_use(program, growth, within, _travelling(schedule, program, message, sends)),
            default=0,
        )
        for program in schedule.programs
    ]


def _in_use(
    program: Sequence[Instruction], growth: Cost, within: Cost, travelling: Iterable[float]
) -> Iterator[float]:
    held = 0
    for i, on_its_way in zip(program, travelling, strict=True):
        yield held + on_its_way + within(i)
        held += growth(i)
        yield held + on_its_way


def _travelling(
    schedule: Schedule, program: Sequence[Instruction], message: float, sends: int
) -> Iterator[float]:
    """Yield the memory that a rank holds for messages while it runs each instruction."""
    sent: Counter[Channel] = Counter()
    unused: set[Message] = set()
    to_come = sum(i.op in RECEIVES for i in program)
    for i in program:
        if i.op is Op.FORWARD:
            used = Message(MessageType.ACTIVATION, i.stage - 1, i.microbatch)
        else:
            used = None
        if i.op in INPUT_GRADIENTS:
            used = Message(MessageType.GRADIENT, i.stage, i.microbatch)
        else:
            used = used
        unused.discard(used)  # type: ignore[arg-type]
        yield message * (
            len(unused) + bool(to_come) + sum(min(count, sends) for count in sent.values())
        )
        moved = Message.of(i)
        if moved and i.op in RECEIVES:
            unused.add(moved)
            to_come -= 1
        elif moved:
            sent[Channel.of(moved, schedule.rank_of_stage)] += 1


def in_flight(schedule: Schedule) -> list[int]:
    """Return, by rank, the most activations held at once: forwards whose weight gradients are still
    to come."""
    return [
        int(most)
        for most in peak(schedule, lambda i: (i.op is Op.FORWARD) - (i.op in WEIGHT_GRADIENTS))
    ]


class _Posted(NamedTuple):
    """A transfer that `rank` has asked for."""

    message: Message
    rank: int
    instruction: Instruction
    time: float


class _Clockwork:
    """The state of the simulation of all ranks."""

    def __init__(
        self, schedule: Schedule, cost: Cost, communicator: Communicator, sends: int
    ) -> None:
        self.schedule = schedule
        self.cost = cost
        self.communicator = communicator
        self.sends = sends
        self.programs = schedule.programs
        self.at = [0] * len(self.programs)
        self.clock = [0.0] * len(self.programs)
        self.receiving: set[int] = set()  # ranks that asked for a message and wait for it
        self.crowded: dict[
            int, Hashable
        ] = {}  # ranks that wait until a communicator can take one more send
        self.queues: dict[Hashable, dict[int, deque[_Posted]]] = defaultdict(
            lambda: defaultdict(deque)
        )
        # end of a communicator's last transfer
        self.free_at: dict[Hashable, float] = defaultdict(float)
        self.spans: list[Span] = []

    def run(self, rank: int) -> bool:
        """Runs `rank` until it must wait. Whether it moved at all."""
        start = self.at[rank]
        program = self.programs[rank]
        while (
            rank not in self.receiving
            and self.at[rank] < len(program)
            and self._issue(rank, program[self.at[rank]])
        ):
            pass
        return self.at[rank] > start

    def _issue(self, rank: int, i: Instruction) -> bool:
        message = Message.of(i)
        if message is not None:
            return self._post(_Posted(message, rank, i, self.clock[rank]))
        end = self.clock[rank] + self.cost(i)
        self.spans.append(Span(rank, i, self.clock[rank], end))
        self.clock[rank] = end
        self.at[rank] += 1
        return True

    def _post(self, new: _Posted) -> bool:
        communicator = self.communicator(new.message)
        queue = self.queues[communicator][new.rank]
        if new.instruction.op not in SENDS:
            self.receiving.add(new.rank)
        elif len(queue) == self.sends:
            self.crowded[new.rank] = communicator
            return False
        else:
            self.at[new.rank] += 1
        queue.append(new)
        self._transfer(communicator)
        return True

    def _transfer(self, communicator: Hashable) -> None:
        """Run the transfers that are first in the queues of both ends."""
        while True:
            ends = [queue for queue in self.queues[communicator].values() if queue]
            if len(ends) < 2 or ends[0][0].message != ends[1][0].message:
                return
            send, receive = sorted(
                (queue.popleft() for queue in ends), key=lambda p: p.instruction.op not in SENDS
            )
            end = max(send.time, receive.time, self.free_at[communicator]) + self.cost(
                send.instruction
            )
            self.free_at[communicator] = self.clock[receive.rank] = end
            self.spans += (Span(p.rank, p.instruction, p.time, end) for p in (send, receive))
            self.receiving.remove(receive.rank)
            self.at[receive.rank] += 1
            if self.crowded.get(send.rank) == communicator:
                self.clock[send.rank] = max(end, self.clock[send.rank])
                del self.crowded[send.rank]

    def require_finished(self) -> None:
        under_way = [
            p for queues in self.queues.values() for queue in queues.values() for p in queue
        ]
        ended = all(at == len(program) for at, program in zip(self.at, self.programs, strict=True))
        if ended and not under_way:
            return
        notes = {r: self._waits_for(r) for r, p in enumerate(self.programs) if self.at[r] < len(p)}
        notes |= {
            p.rank: f"no rank receives {p.instruction}" for p in under_way if p.rank not in notes
        }
        marks = {rank: Mark(self.at[rank], note) for rank, note in sorted(notes.items())}
        raise Refused(
            "this schedule cannot finish", schedule=self.schedule, spans=self.spans, marks=marks
        )

    def _waits_for(self, rank: int) -> str:
        i = self.programs[rank][self.at[rank]]
        message = Message.of(i)
        assert message is not None, f"{i} waits for no rank"
        channel = Channel.of(message, self.schedule.rank_of_stage)
        queues = self.queues[self.communicator(message)]
        if i.op in SENDS:
            return f"waits for rank {channel.destination} to receive {queues[rank][0].instruction}"
        ahead = queues.get(channel.source)
        behind = f", behind {ahead[0].instruction}" if ahead and ahead[0].message != message else ""
        return f"waits for {message.sender} of rank {channel.source}{behind}"
