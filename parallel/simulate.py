"""Times a schedule and proves, before anything is launched, that it will finish.

Every rank runs its program in order. A send does not hold its rank up; a receive does, until its message is
there. How messages reach each other is the communicators' affair: in one communicator transfers happen
strictly in the order in which each end asks for them, and a send is over only when it is received, as in NCCL.
If every message had a communicator of its own nothing would ever queue: that gives the times. With the
communicators that `links.py` really uses, and its limit on sends under way, a schedule that still finishes
cannot hang; that is the proof in `check`.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from typing import NamedTuple

from megaprec.errors import UserError
from parallel.schedule import SENDS, SENDS_UNDER_WAY, Channel, Instruction, Message, Op, Schedule, complete, picture

Cost = Callable[[Instruction], float]
Communicator = Callable[[Message], Hashable]  # messages with the same value share one


class Span(NamedTuple):
    """When `rank` ran `instruction`, in the unit of the cost, or in seconds where it was measured."""

    rank: int
    instruction: Instruction
    start: float
    end: float


def textbook(i: Instruction) -> float:
    """A forward costs one, a backward two, all else nothing."""
    return {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}.get(i.op, 0.0)


def simulate(schedule: Schedule, cost: Cost = textbook, communicator: Communicator = lambda m: m) -> list[Span]:
    """When each instruction runs. The cost of a send is its message's time on the way; a receive costs nothing.

    Every message has a communicator of its own unless `communicator` says otherwise. Raises UserError with a
    picture of all ranks if some instruction can never run.
    """
    clockwork = _Clockwork(schedule, cost, communicator)
    while sum(clockwork.run(rank) for rank in range(len(schedule.programs))):  # not any(): every rank has its turn
        pass
    clockwork.require_finished()
    return clockwork.spans


def bubble(schedule: Schedule, cost: Cost = textbook) -> float:
    """The share of the step in which a rank computes nothing, averaged over ranks.

    (p - 1) / (m + p - 1) for GPipe and 1F1B on p ranks of equal cost with m micro-batches.
    """
    spans = simulate(schedule, cost)
    busy = sum(s.end - s.start for s in spans if Message.of(s.instruction) is None)
    return 1 - busy / (max(s.end for s in spans) * len(schedule.programs))


def in_flight(schedule: Schedule) -> list[int]:
    """By rank: the most forwards whose backward is still to come, that is, activations held at once."""
    step = {Op.FORWARD: 1, Op.BACKWARD: -1}
    most = []
    for program in schedule.programs:
        held = 0
        most.append(max((held := held + step.get(i.op, 0) for i in program), default=0))
    return most


def check(schedule: Schedule) -> None:
    """Raises UserError, with a picture of all ranks, unless the schedule does everything once and finishes.

    Each stage runs on its own rank; each forward and backward (no backward at all is a schedule for
    evaluation) with its transfers and REDUCE is there once, after what it needs; and the whole ends without
    a deadlock where messages of one channel are matched by order and sends wait for their receives.
    """
    faults = list(chain.from_iterable(_faults(schedule, rank) for rank in range(len(schedule.programs))))
    if faults:
        first = {fault.rank: fault for fault in reversed(faults)}
        programs = dict(enumerate(schedule.programs))
        at = {rank: first[rank].at if rank in first else 0 for rank in programs}
        notes = {rank: fault.note for rank, fault in first.items()}
        raise UserError(*(f"rank {fault.rank}: {fault.note}" for fault in faults), picture(programs, at, notes))
    simulate(schedule, communicator=lambda message: Channel.of(message, schedule.rank_of_stage))


class _Posted(NamedTuple):
    """A transfer that `rank` has asked for."""

    message: Message
    rank: int
    instruction: Instruction
    time: float


class _Clockwork:
    """All ranks of a schedule under way."""

    def __init__(self, schedule: Schedule, cost: Cost, communicator: Communicator) -> None:
        self.programs, self.cost, self.communicator = schedule.programs, cost, communicator
        self.rank_of_stage = schedule.rank_of_stage
        self.at = [0] * len(self.programs)
        self.clock = [0.0] * len(self.programs)
        self.receiving: set[int] = set()  # ranks that asked for a message and wait for it
        self.crowded: dict[int, Hashable] = {}  # ranks that wait until a communicator can take one more send
        self.queues: dict[Hashable, dict[int, deque[_Posted]]] = defaultdict(lambda: defaultdict(deque))
        self.free_at: dict[Hashable, float] = defaultdict(float)  # when a communicator's last transfer was over
        self.spans: list[Span] = []

    def run(self, rank: int) -> bool:
        """Runs `rank` until it must wait. Whether it moved at all."""
        start, program = self.at[rank], self.programs[rank]
        while rank not in self.receiving and self.at[rank] < len(program) and self._issue(rank, program[self.at[rank]]):
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
        elif len(queue) == SENDS_UNDER_WAY:
            self.crowded[new.rank] = communicator
            return False
        else:
            self.at[new.rank] += 1
        queue.append(new)
        self._transfer(communicator)
        return True

    def _transfer(self, communicator: Hashable) -> None:
        """Carries out what stands first in the queues of both ends."""
        while True:
            ends = [queue for queue in self.queues[communicator].values() if queue]
            if len(ends) < 2 or ends[0][0].message != ends[1][0].message:
                return
            send, receive = sorted((queue.popleft() for queue in ends), key=lambda p: p.instruction.op not in SENDS)
            end = max(send.time, receive.time, self.free_at[communicator]) + self.cost(send.instruction)
            self.free_at[communicator] = self.clock[receive.rank] = end
            self.spans += (Span(p.rank, p.instruction, p.time, end) for p in (send, receive))
            self.receiving.remove(receive.rank)
            self.at[receive.rank] += 1
            if self.crowded.get(send.rank) == communicator:
                self.clock[send.rank] = max(end, self.clock[send.rank])
                del self.crowded[send.rank]

    def require_finished(self) -> None:
        under_way = [p for queues in self.queues.values() for queue in queues.values() for p in queue]
        ended = all(at == len(program) for at, program in zip(self.at, self.programs, strict=True))
        if ended and not under_way:
            return
        notes = {r: self._waits_for(r) for r, p in enumerate(self.programs) if self.at[r] < len(p)}
        notes |= {p.rank: f"nobody receives {p.instruction}" for p in under_way if p.rank not in notes}
        at = dict(enumerate(self.at))
        raise UserError("this schedule cannot finish", picture(dict(enumerate(self.programs)), at, notes))

    def _waits_for(self, rank: int) -> str:
        i = self.programs[rank][self.at[rank]]
        message = Message.of(i)
        assert message is not None, f"{i} waits for nobody"
        channel, queues = Channel.of(message, self.rank_of_stage), self.queues[self.communicator(message)]
        if i.op in SENDS:
            return f"waits for rank {channel.destination} to receive {queues[rank][0].instruction}"
        ahead = queues.get(channel.source)
        behind = f", behind {ahead[0].instruction}" if ahead and ahead[0].message != message else ""
        return f"waits for {message.sender} of rank {channel.source}{behind}"


class _Fault(NamedTuple):
    """What is wrong with instruction number `at` of `rank`."""

    rank: int
    at: int
    note: str


def _faults(schedule: Schedule, rank: int) -> Iterator[_Fault]:
    program, due = schedule.programs[rank], _due(schedule, rank)
    seen: Counter[Instruction] = Counter()
    for at, i in enumerate(program):
        seen[i] += 1
        if not 0 <= i.stage < len(schedule.rank_of_stage):
            yield _Fault(rank, at, f"{i} is for a stage that does not exist")
        elif (home := schedule.rank_of_stage[i.stage]) != rank:
            yield _Fault(rank, at, f"{i} is for stage {i.stage}, which lives on rank {home}")
        elif i not in due:
            yield _Fault(rank, at, f"{i} has no purpose here")
        elif seen[i] > 1:
            yield _Fault(rank, at, f"{i} stands here for the second time")
        elif late := [need for need in _needs(i, due) if need not in seen]:
            yield _Fault(rank, at, f"{i} stands before {late[0]}")
    for i in due:
        if i not in seen:
            yield _Fault(rank, len(program), f"{i} is missing")


def _due(schedule: Schedule, rank: int) -> dict[Instruction, None]:
    """All instructions that `rank` must run, in no order that matters (a dict for its stable order)."""
    trains = any(i.op is Op.BACKWARD for i in chain(*schedule.programs))
    ops = (Op.FORWARD, Op.BACKWARD) if trains else (Op.FORWARD,)
    stages = [stage for stage, home in enumerate(schedule.rank_of_stage) if home == rank]
    computations = [Instruction(op, stage, m) for op in ops for stage in stages for m in range(schedule.microbatches)]
    return dict.fromkeys(complete([computations], schedule.rank_of_stage).programs[0])


def _needs(i: Instruction, due: dict[Instruction, None]) -> Iterator[Instruction]:
    """What must have run on this rank before `i`: of these candidates, those that this rank runs at all."""
    near = {
        Op.FORWARD: ((Op.RECV_ACTIVATION, 0), (Op.FORWARD, -1)),
        Op.SEND_ACTIVATION: ((Op.FORWARD, 0),),
        Op.BACKWARD: ((Op.FORWARD, 0), (Op.RECV_GRADIENT, 0), (Op.BACKWARD, +1)),
        Op.SEND_GRADIENT: ((Op.BACKWARD, 0),),
    }.get(i.op, ())
    yield from (need for op, step in near if (need := Instruction(op, i.stage + step, i.microbatch)) in due)
    if i.op is Op.REDUCE:
        yield from (b for b in due if b.op is Op.BACKWARD and b.stage == i.stage)
