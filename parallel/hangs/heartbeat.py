"""Heartbeats: each rank keeps its position in the store that all ranks share, and can read those of
the others.

A thread writes the position every second or two over a connection of its own, because the
connection of the main thread may be waiting. It reads the other ranks' positions only while the
watchdog asks for it, when a phase takes long. So a run without a hang costs one small message a
beat. Only the ranks of the first tier (`tier_of`) read all positions then; those of a later tier do
so if no tier before it does, which they know by a key for each tier: the work of the store grows
with the number of ranks, not with its square. Clocks of different machines are never compared: a
rank is silent since this rank's clock last saw its beat change.

A rank looks at the call stack of its main thread only if its position is still that of the last
beat: while it goes on from one instruction to the next, its stack is left alone.

Rank 0 also reads, every `WINDOW` seconds, how much work each rank has done, to find stragglers
(`pace.py`).

The first rank to find out who hangs publishes its verdict; every other rank reads it with its next
beat.
"""

import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch.distributed as dist

from megaprec.diagnose.call_stack import RunningCall, summarize_calls
from megaprec.diagnose.position import Position, in_words, read_shared
from parallel.hangs.pace import PaceOfWork, Straggler, Stragglers

# keys of the store; the others are the numbers of ranks
VERDICT = "verdict"
LEFT = "left"  # the number of ranks that have announced that they leave
JUDGING = "judging"  # and a tier: by whom, and by which beat, all beats were last read
FIRST_TIER = 8  # ranks, the lowest; each further tier has twice as many as the one before
WINDOW = 20.0  # seconds after which rank 0 looks for stragglers again
# limit of one request to the store; the watchdog has a limit of its own
PATIENCE = timedelta(seconds=20)


def tier_of(rank: int) -> int:
    """Return the tier of a rank: 0 for ranks below 8, 1 below 24, 2 below 56, and so on."""
    return (rank // FIRST_TIER + 1).bit_length() - 1


@dataclass(frozen=True)
class Beat:
    """A rank's own account of itself; the files of `last_end/` have the same fields.

    machine: identifies machine and process namespace, in which `pid` is meaningful.
    born: start time of the process.
    shared: file descriptor of its `Position`.
    beat: number of this beat; 0: not what the rank has told, but what was looked up at once.
    phase, step, doing, count: as in `Position`.
    waits: the main thread waits for another rank.
    at: the call stack of the main thread, innermost first; empty while the rank goes on.
    computed, begun: as seconds and steps of `PaceOfWork`.
    """

    rank: int
    host: str
    machine: str
    pid: int
    born: str
    shared: int
    beat: int
    phase: str
    step: int
    doing: str
    count: int
    waits: bool
    at: tuple[str, ...]
    computed: float = 0.0
    begun: int = 0

    @staticmethod
    def of(
        rank: int,
        number: int,
        position: Position,
        calls: Sequence[RunningCall] = (),
    ) -> "Beat":
        """Return the beat of this process now.

        number: of the beat. position: of this process. calls: the running calls of its main thread,
        innermost first; empty if they were not looked at.
        """
        waits = position.waits.under_way
        doing = [in_words(position.action)]
        if awaited := position.waits.awaited:
            doing.append(f"waiting for {awaited}")
        at: list[str] = []
        if calls:
            in_transfer, at = summarize_calls(calls)
            # a transfer of the user's own code, which notes none in the position
            waits |= in_transfer
        return Beat(
            rank=rank,
            host=socket.gethostname(),
            machine=machine_id(),
            pid=os.getpid(),
            born=process_start(os.getpid()),
            shared=position.shared,
            beat=number,
            phase=position.phase.value,
            step=position.step,
            doing=", ".join(doing),
            count=position.count,
            waits=waits,
            at=tuple(at),
            computed=position.computed(),
            begun=position.begun,
        )

    @staticmethod
    def read(fields: Mapping[str, Any]) -> "Beat":
        """Return the beat with these fields, as `asdict` gives them and JSON keeps them."""
        return Beat(**{**fields, "at": tuple(fields["at"])})


def newest(beat: Beat) -> Beat:
    """Return the beat with the present position of its process, read from shared memory, if that
    runs on this machine; otherwise the beat as it is, whose position is a second or two old."""
    if beat.machine != machine_id() or not beat.born or process_start(beat.pid) != beat.born:
        return beat
    position = read_shared(beat.pid, beat.shared)
    if not position:
        return beat
    return replace(beat, beat=0, phase=position[0], step=position[1], doing=position[2])


def machine_id() -> str:
    """Return a name for this machine and its namespaces.

    Processes see each other's ids only if they have the same name.
    """
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    for space in ("pid", "net"):
        with suppress(OSError):
            parts.append(os.readlink(f"/proc/self/ns/{space}"))
    return " ".join(parts)


def process_start(pid: int) -> str:
    """Return the start time of a process, in ticks since the machine started; "" if it is gone or
    unknown.

    A process id alone may have been given to another process since.
    """
    with suppress(OSError):
        status = Path(f"/proc/{pid}/stat").read_text()
        # the name of the program, field 2, is in parentheses and may have spaces itself
        fields_from_third = status.rpartition(")")[2].split()
        return fields_from_third[22 - 3]  # field 22 is the start time
    return ""


class Clock:
    """A clock that stands still while this process is stopped, so that a pause is not taken for a
    hang.

    It advances by `tick`, by at most `longest` seconds at a time.
    """

    def __init__(self, longest: float) -> None:
        self.now = 0.0
        self._longest = longest
        self._last = time.monotonic()

    def tick(self) -> None:
        """Advance to the present."""
        now = time.monotonic()
        self.now += min(now - self._last, self._longest)
        self._last = now


class Heartbeat:
    """The heartbeat of this rank, in a thread, once it is started.

    store: the ranks' store; a connection of its own is opened to it.
    calls: returns the calls of the main thread, innermost first.
    every: seconds between beats.
    peers: the number of ranks of a pipeline stage, which are neighbours.
    heard: by rank, its last beat and this rank's time when it changed; filled while `listening`.
    following: True while this rank notes whether a tier before its own reads the beats.
    attended: this rank's time when that was last seen, or when it began to follow.
    noticed: stragglers that rank 0 has found, each with its line.
    answered: time of the last answer of the store.
    lost: why the connection ended, "" if it has not.
    verdict: the published verdict as JSON, "" if there is none.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        position: Position,
        calls: Callable[[], Sequence[RunningCall]],
        clock: Clock,
        every: float,
        peers: int,
    ) -> None:
        self.rank = rank
        self.size = size
        self._position = position
        self._calls = calls
        self._clock = clock
        self._every = every
        self._stragglers = Stragglers([rank // peers for rank in range(size)])
        self._last_progress = (-1, -1)  # entries and count of the position at the last beat
        self.noticed: deque[tuple[Straggler, str]] = deque()
        # a connection of its own: a request of the main thread may block that of the world
        self._connection = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
        # it holds the connection's C++ part alone, so the connection is kept above
        self._store = dist.PrefixStore("heartbeat", self._connection)
        self._store.set_timeout(PATIENCE)
        self.heard: dict[int, tuple[Beat | None, float]] = {}
        self.listening = False
        self.following = False
        self.attended = clock.now
        self._tier = tier_of(rank)
        self._judgements: list[bytes] = []  # of the tiers before, when last seen
        self.verdict = ""
        self.lost = ""
        self.answered = clock.now
        # the verdict that this rank wants to publish; the watchdog, which never uses the network,
        # leaves it here for the next beat
        self._proposal = ""
        self._beat_number = 0
        self._over = Event()
        self._last_comparison = clock.now
        self._thread = Thread(target=self._run, daemon=True, name="heartbeat")
        self._beat()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread with its current beat; a thread that waits for the store is left
        behind."""
        self._over.set()
        self._thread.join(2 * self._every)

    def publish(self, verdict: str) -> None:
        """Publish a verdict with the next beat, unless another rank has published one.

        `self.verdict` then becomes the published one.
        """
        self._proposal = self._proposal or verdict

    def publish_now(self, verdict: str) -> None:
        """Publish a verdict at once, unless another rank has, but wait at most a second for the
        store."""
        _within(1.0, lambda: self._store.compare_set(VERDICT, "", verdict))

    def first_beat(self) -> Beat | None:
        """Return the first beat of rank 0, which must have joined; None if it does not come."""
        with suppress(dist.DistError):
            return Beat.read(json.loads(self._store.get("0")))
        return None

    def read_verdict(self) -> bool:
        """Look for a verdict at once, for at most a second; return True if there is one or the
        store is gone."""

        def read() -> None:
            try:
                if self._store.check([VERDICT]):
                    self.verdict = self._store.get(VERDICT).decode()
            except dist.DistError as error:
                self.lost = str(error).splitlines()[0]

        _within(1.0, read)
        return bool(self.verdict or self.lost)

    def look_around(self, seconds: float) -> None:
        """Read the other ranks' positions once, for at most so many seconds."""
        _within(seconds, self._listen)

    def farewell(
        self,
        ranks: int,
        seconds: float,
        host: bool,
    ) -> None:
        """Announce that this rank leaves, for at most so many seconds.

        host: the store ends with this process. It then waits until `ranks` ranks have announced
            it: otherwise the verdict would be gone before all ranks have read it.
        """

        def leave() -> None:
            deadline = time.monotonic() + seconds
            num_left = self._store.add(LEFT, 1)
            while host and num_left < ranks and time.monotonic() < deadline:
                time.sleep(0.05)
                num_left = self._store.add(LEFT, 0)  # adding nothing reads it

        _within(seconds, leave)

    def _run(self) -> None:
        try:
            while not self._over.wait(self._every):
                self._beat()
        except dist.DistError as error:
            self.lost = str(error).splitlines()[0]

    def _beat(self) -> None:
        """Write this rank's position; read the verdict and, while listening, the other ranks'
        positions."""
        self._beat_number += 1
        # `entries` is the number of phases begun, `count` that of actions noted in the present one:
        # if both are as at the last beat, the main thread has not gone on
        progress = self._position.entries, self._position.count
        has_stopped = progress == self._last_progress
        calls = self._calls() if has_stopped else ()
        beat = Beat.of(self.rank, self._beat_number, self._position, calls)
        self._last_progress = progress
        self._store.set(str(self.rank), json.dumps(asdict(beat)))
        # compare_set: the first rank to propose decides for all
        if self._proposal:
            self.verdict = self._store.compare_set(VERDICT, "", self._proposal).decode()
        elif self._store.check([VERDICT]):
            self.verdict = self._store.get(VERDICT).decode()
        if self.following:
            self._follow()
        else:
            self.attended = self._clock.now
        if self.listening:
            self._store.set(f"{JUDGING} {self._tier}", f"{self.rank} {self._beat_number}")
            self._listen()
        else:
            # beats that are not read any more would seem silent when reading begins again
            self.heard = {}
        if self.rank == 0 and self._clock.now - self._last_comparison >= WINDOW:
            self._compare(beat)
        self.answered = self._clock.now

    def _follow(self) -> None:
        """Set `attended` to now if a rank of a tier before this one's has read the beats since last
        time."""
        keys = [f"{JUDGING} {tier}" for tier in range(self._tier)]
        keys_set = [key for key in keys if self._store.check([key])]
        judgements = self._store.multi_get(keys_set) if keys_set else []
        if judgements != self._judgements:
            self.attended = self._clock.now
        self._judgements = judgements

    def _compare(self, mine: Beat) -> None:
        """Look for stragglers among the ranks that have a heartbeat, and add them to `noticed`.

        mine: the beat of this rank, which is rank 0.
        """
        beats = {0: mine}
        for rank, beat in self._read_others().items():
            if beat is not None:
                beats[rank] = beat
        self._last_comparison = self._clock.now
        works = {rank: PaceOfWork(beat.computed, beat.begun) for rank, beat in beats.items()}
        stragglers = self._stragglers.compare(mine.step, works)
        for straggler in stragglers:
            line = straggler.words(beats[straggler.rank].host)
            self.noticed.append((straggler, line))

    def _read_others(self) -> dict[int, Beat | None]:
        """Return the last beat of each other rank; None for a rank that has ended before its
        first."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        beats: dict[int, Beat | None] = dict.fromkeys(others)
        keys = [str(rank) for rank in others]
        # one request for all; only if a rank has no beat, one for each
        if not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        texts = self._store.multi_get(keys) if keys else []
        for key, text in zip(keys, texts, strict=True):
            beats[int(key)] = Beat.read(json.loads(text))
        return beats

    def _listen(self) -> None:
        """Note the other ranks' beats that have changed, with the time."""
        for rank, beat in self._read_others().items():
            if rank in self.heard:
                last_beat, _ = self.heard[rank]
                if beat == last_beat:
                    continue
            self.heard[rank] = beat, self._clock.now


def _within(seconds: float, act: Callable[[], object]) -> None:
    """Call `act` in another thread and wait for it, but no longer than `seconds`.

    An error of the store is dropped: the caller is told neither of it nor whether `act` has ended.
    """

    def act_on_store() -> None:
        with suppress(dist.DistError):
            act()

    thread = Thread(target=act_on_store, daemon=True)
    thread.start()
    thread.join(seconds)
