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
STEPS = 3  # of a window, at least
LEAST = 0.02  # seconds of a step: a smaller difference is of no account


@dataclass(frozen=True)
class Work:
    """Seconds that a rank has computed in training steps, and the number of steps it has begun."""

    seconds: float = 0.0
    steps: int = 0

    def since(self, before: "Work") -> "Work":
        """Return the work between two counts."""
        return Work(self.seconds - before.seconds, self.steps - before.steps)


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow, or was until now.

    factor: its time over that of the others. since: a step, estimated (`_Suspicion`); 0: it is
        over.
    """

    rank: int
    factor: float
    since: int
    step: int
    alone: bool

    def words(self, host: str) -> str:
        """Return one line."""
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
    """The first window in which a rank was slow. excess: seconds that its steps took longer than
    usual, summed."""

    begin: int
    end: int
    excess: float

    def since(self, excess: float) -> int:
        """Return the step since when the rank has been slow. excess: seconds of one step of the
        next window.

        A window of many short steps can be slow by its last steps alone. They cost as much as those
        of the next one.
        """
        slow = max(1, round(self.excess / excess))
        return max(self.begin, self.end + 1 - slow)


class Stragglers:
    """Rank 0's comparison of all ranks. stages: the pipeline stage of each rank."""

    def __init__(self, stages: Sequence[int]) -> None:
        self._stages = stages
        self._before: Mapping[int, Work] = {}
        self._first: dict[int, float] = {}  # seconds per step in the first window
        self._slow: dict[
            int, _Suspicion
        ] = {}  # ranks that are slow, and the first window in which they were
        self._told: set[int] = set()

    def compare(self, step: int, works: Mapping[int, Work]) -> list[Straggler]:
        """Return the ranks that have become slow or are so no longer; none while the window is too
        short.

        works: of all ranks that could be read. A rank is slow if it was so in two windows, one
            after the other.
        """
        window = {rank: work.since(self._before.get(rank, Work())) for rank, work in works.items()}
        if not window or min(work.steps for work in window.values()) < STEPS:
            return []
        seconds = {rank: work.seconds / work.steps for rank, work in window.items()}
        found = (self._judged(rank, seconds, step, window[rank].steps) for rank in seconds)
        self._before = dict(works)
        return [one for one in found if one is not None]

    def _judged(
        self, rank: int, seconds: Mapping[int, float], step: int, steps: int
    ) -> Straggler | None:
        stage = self._stages[rank]
        peers = [
            one for other, one in seconds.items() if other != rank and self._stages[other] == stage
        ]
        first = self._first.setdefault(rank, seconds[rank])
        usual = median_low(peers) if peers else first
        factor = seconds[rank] / max(usual, 1e-9)
        excess = seconds[rank] - usual
        if factor < SLOW or excess < LEAST:
            was = self._slow.pop(rank, None) and rank in self._told
            self._told.discard(rank)
            return Straggler(rank, factor, 0, step, not peers) if was else None
        if rank in self._told:
            return None
        if rank not in self._slow:
            self._slow[rank] = _Suspicion(step + 1 - steps, step, excess * steps)
            return None
        self._told.add(rank)
        return Straggler(rank, factor, self._slow[rank].since(excess), step, not peers)
