"""Stragglers: ranks that compute longer for a step than the other ranks of their pipeline stage.

All ranks of a run finish a step at the same time, because they wait for each other, so seconds of
whole steps do not show who is slow. Each rank counts the time of its steps in which its main thread
neither waits for another rank nor writes the records of rank 0 (`Position.computed`). Each
heartbeat carries that count. Rank 0 reads all of them once in a window and compares ranks that do
the same work: those of one stage. Where a stage has a single rank, that rank is compared with its
own first window.

On a GPU the main thread runs ahead of the device, so this finds hosts that are slow, and no
devices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

SLOW = 1.5  # factor from which on a rank is a straggler
MIN_STEPS = 3  # of a window: fewer say more about one step than about the rank
MIN_EXCESS = 0.02  # seconds of a step: a smaller difference is of no account


@dataclass(frozen=True)
class PaceOfWork:
    """Seconds that a rank has computed in training steps, and the number of steps it has begun."""

    seconds: float = 0.0
    steps: int = 0

    def since(self, before: "PaceOfWork") -> "PaceOfWork":
        """Return the work between two counts."""
        return PaceOfWork(self.seconds - before.seconds, self.steps - before.steps)


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow, or was until now.

    factor: its time over that of the others.
    since: the step from which on it has been slow, estimated (`_Suspicion`); 0: it no longer is.
    step: the step at which this was found.
    alone: no other rank has the same work, so it is compared with its own first window.
    """

    rank: int
    factor: float
    since: int
    step: int
    alone: bool

    def words(self, host: str) -> str:
        """Return one line about this rank, which runs on `host`."""
        who = f"rank {self.rank} on {host}"
        if not self.since:
            return f"{who} is no longer slow"
        usual = "as at the start of the run" if self.alone else "as the other ranks of its stage"
        return (
            f"{who} is slow: it computes {self.factor:.1f} times as long {usual}, since about step "
            f"{self.since}"
        )


@dataclass(frozen=True)
class _Suspicion:
    """The first window in which a rank was slow: its steps `begin` to `end`.

    excess: seconds that these steps took longer than usual, summed.
    """

    begin: int
    end: int
    excess: float

    def since(self, step_excess: float) -> int:
        """Return the step since when the rank has been slow.

        step_excess: seconds that one step of the next window takes longer than usual. A window of
            many short steps can be slow by its last steps alone, which cost as much as this one.
        """
        slow_steps = max(1, round(self.excess / step_excess))
        return max(self.begin, self.end + 1 - slow_steps)


class Stragglers:
    """Rank 0's comparison of all ranks. stages: the pipeline stage of each rank."""

    def __init__(self, stages: Sequence[int]) -> None:
        self._stages = stages
        self._before: Mapping[int, PaceOfWork] = {}  # work at the end of the last window
        self._first: dict[int, float] = {}  # seconds per step in the first window
        # ranks that are slow, and the first window in which they were
        self._suspicions: dict[int, _Suspicion] = {}
        self._reported: set[int] = set()

    def compare(self, step: int, works: Mapping[int, PaceOfWork]) -> list[Straggler]:
        """Return the ranks that have become slow or are so no longer; none while the window is too
        short. A rank is slow if it was so in two windows, one after the other.

        step: the present step of rank 0.
        works: what each rank has done since the start of the run, of all that could be read.
        """
        window: dict[int, PaceOfWork] = {}  # the work of each rank since the last window
        for rank, work in works.items():
            before = self._before.get(rank, PaceOfWork())
            window[rank] = work.since(before)
        if not window or min(work.steps for work in window.values()) < MIN_STEPS:
            return []
        step_seconds = {rank: work.seconds / work.steps for rank, work in window.items()}
        stragglers: list[Straggler] = []
        for rank, work in window.items():
            change = self._judge(rank, step_seconds, step, work.steps)
            if change is not None:
                stragglers.append(change)
        self._before = dict(works)
        return stragglers

    def _judge(
        self,
        rank: int,
        step_seconds: Mapping[int, float],
        step: int,
        steps: int,
    ) -> Straggler | None:
        """Return the rank if it has become slow or is so no longer, otherwise None.

        step_seconds: the seconds of work in a step of the window, by rank.
        step: the present step. steps: the number of steps of the window.
        """
        peers = [
            seconds
            for other, seconds in step_seconds.items()
            if other != rank and self._stages[other] == self._stages[rank]
        ]
        first = self._first.setdefault(rank, step_seconds[rank])
        # the lower of two middle ones: of two others, the slower must not be the measure
        usual = median_low(peers) if peers else first
        factor = step_seconds[rank] / max(usual, 1e-9)  # a step that computes nothing takes no time
        excess = step_seconds[rank] - usual
        alone = not peers
        was_reported = rank in self._reported
        if factor < SLOW or excess < MIN_EXCESS:
            self._suspicions.pop(rank, None)
            self._reported.discard(rank)
            if not was_reported:
                return None
            return Straggler(rank, factor, since=0, step=step, alone=alone)
        # a rank is reported once, until it is no longer slow
        if was_reported:
            return None
        if rank not in self._suspicions:  # a second slow window must confirm it
            self._suspicions[rank] = _Suspicion(step + 1 - steps, step, excess * steps)
            return None
        self._reported.add(rank)
        since = self._suspicions[rank].since(excess)
        return Straggler(rank, factor, since=since, step=step, alone=alone)
