"""The watchdog: a thread of each rank that ends the run when a phase takes too long, and names the
rank that hangs.

A step may take `timeout` seconds longer than the slowest step so far. Every other phase, and the
first step, may take `LONG` seconds, or `timeout` if that is longer. The preparation of the data may
take as long as it needs. In every phase the run also ends if a rank has had no heartbeat, or the
ranks' store has not answered, for `timeout` seconds.

This thread never uses the network, so it cannot hang itself: `heartbeat.py` does, and its silence
is noticed here.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from signal import SIGKILL
from threading import Event, Thread

import torch.distributed as dist

from megaprec.diagnose.call_stack import RunningCall, failed_calls, main_calls
from megaprec.diagnose.position import UNLIMITED, Phase, Position
from parallel.hangs.heartbeat import (
    Beat,
    Clock,
    Heartbeat,
    machine_id,
    newest,
    process_start,
    tier_of,
)
from parallel.hangs.pace import Straggler
from parallel.hangs.verdict import (
    HangVerdict,
    judge_hung,
    judge_silent,
    judge_store,
    verdict_of_own_failure,
)

LONG = 600.0  # seconds that loading, the first step, a save or an evaluation may take
FAREWELL = 2.0  # seconds that the host of the store waits for the others to read the verdict

Leave = Callable[[HangVerdict], None]


def longest_wait(timeout: float) -> float:
    """Return a time limit in seconds for communication, so long that the watchdog always acts
    first: no phase of a run takes as long."""
    # `Watchdog.limit` is at most twice the larger of both; a minute more for the verdict to arrive
    return 2 * max(LONG, timeout) + 60


class Watchdog:
    """Watches this rank, and through heartbeats all ranks, from `start` to `stop`.

    store: the ranks' store; not used by a single rank.
    timeout: seconds that a step may take longer than the slowest so far.
    leave(verdict): called in the watchdog's thread; it must end the process.
    peers: number of ranks of a pipeline stage, which are neighbours.
    first_beat: that of rank 0; None if this rank is alone, or it does not come.
    error: that ended the work of the main thread, if one has.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        position: Position,
        timeout: float,
        leave: Leave,
        peers: int = 1,
    ) -> None:
        self.rank = rank
        self.size = size
        self.position = position
        self.timeout = timeout
        self._leave = leave
        self.error: BaseException | None = None
        self.every = min(2.0, max(0.1, timeout / 10))  # seconds between two beats
        # Seconds of silence that are no mere delay: two beats in a row are missing.
        self._window = max(2.5 * self.every, min(2.0, timeout / 2))
        # A pause of all processes is no silence: it counts as less than the window.
        self._clock = Clock(self._window / 2)
        self._heart = None
        if size > 1:
            self._heart = Heartbeat(
                store=store,
                rank=rank,
                size=size,
                position=position,
                calls=self._calls,
                clock=self._clock,
                every=self.every,
                peers=peers,
            )
        self.first_beat = self._heart.first_beat() if self._heart else None
        self._phase_number = -1  # of the present phase, by `Position.entries`
        self._phase_start = 0.0
        self._connection_lost = float("inf")  # the time at which it was
        self._searches = False  # for a rank that is silent, to explain the loss
        self._over = Event()
        self._thread = Thread(target=self._run, daemon=True, name="watchdog")

    def start(self) -> None:
        """Start the threads."""
        if self._heart:
            self._heart.start()
        self._thread.start()

    def stop(self) -> None:
        """Stop the threads; the run has ended in order."""
        self._over.set()
        self._thread.join()
        if self._heart:
            self._heart.stop()

    def lost_connection(self, search: bool) -> None:
        """Wait for a verdict that explains why this rank lost a connection: with one the watchdog's
        thread ends this process. Returns if there is none.

        search: also look for a rank that has no heartbeat any longer, for some seconds.
        """
        if self._heart and (self._heart.read_verdict() or search):
            self._connection_lost = self._clock.now
            self._searches = search
            search_seconds = 2 * self._window if search else 0.0
            self._thread.join(2 * self.every + 1 + search_seconds)

    def failed(self, reason: str) -> None:
        """Tell the other ranks, which will lose their connections, why this rank fails."""
        if self._heart:
            self._heart.publish_now(verdict_of_own_failure(self.own_beat(), reason).to_json())
            self._farewell(self._heart, self.size)

    def others(self) -> tuple[Beat, ...]:
        """Return the last positions of the other ranks that have told one. The store is read for a
        second at most; ranks on this machine are asked for their present position."""
        if self._heart and not self._heart.lost:
            self._heart.look_around(1.0)
        heard = self._heart.heard if self._heart else {}
        return tuple(newest(beat) for beat, _ in heard.values() if beat is not None)

    def noticed(self) -> list[tuple[Straggler, str]]:
        """Return the stragglers found since the last call, each with its line: on rank 0, on others
        none."""
        if self._heart is None:
            return []
        queue = self._heart.noticed  # the other thread may append meanwhile
        return [queue.popleft() for _ in range(len(queue))]

    def own_beat(self) -> Beat:
        """Return this rank's position now."""
        return Beat.of(self.rank, 0, self.position, self._calls())

    def _calls(self) -> Sequence[RunningCall]:
        """Return the calls of the main thread: those that failed, if it is on its way out since."""
        return main_calls() if self.error is None else failed_calls(self.error)

    def limit(self) -> float:
        """Return the seconds that the present phase may take."""
        position = self.position
        longest = max(LONG, self.timeout)
        if position.phase in UNLIMITED:
            return float("inf")
        if position.phase is Phase.STEP and position.slowest:
            return min(position.slowest, longest) + self.timeout
        return longest

    def _run(self) -> None:
        """Look for a verdict until the watchdog is stopped; with one, let the other ranks read it
        and leave."""
        while not self._over.wait(self.every / 2):
            self._clock.tick()
            verdict = self._look()
            if verdict and not self._over.is_set():
                if self._heart:
                    self._farewell(self._heart, self.size - len(verdict.silent))
                self._leave(verdict)
                return

    def _farewell(self, heart: Heartbeat, ranks: int) -> None:
        if not heart.lost:
            heart.farewell(ranks, FAREWELL, self.rank == 0 and _in_rank_0())

    def _look(self) -> HangVerdict | None:
        """Return the verdict of the run, if there is one: the published one, which is the same on
        all ranks, or that of a single rank, or that the store is lost. Otherwise see to it that the
        other ranks' beats are read in time, and publish a verdict if the phase takes too long."""
        heart = self._heart
        now = self._clock.now
        if self.position.entries != self._phase_number:
            self._phase_number = self.position.entries
            self._phase_start = now
        elapsed = now - self._phase_start
        limit = self.limit()
        # a single rank
        if heart is None:
            if elapsed <= limit:
                return None
            return judge_hung(self.own_beat(), {}, elapsed)
        if heart.verdict:
            return HangVerdict.from_json(heart.verdict)
        if now >= self._connection_lost:
            return self._explain_loss(heart, now - self._connection_lost)
        delay = self._listen_in_turn(heart, elapsed, limit)
        if elapsed > limit + delay:
            return self._judge(heart, self._window, elapsed)
        if elapsed > self.timeout + delay:
            return self._judge(heart, self.timeout)
        return None

    def _listen_in_turn(self, heart: Heartbeat, elapsed: float, limit: float) -> float:
        """Decide whether this rank reads the other ranks' beats now, and return the seconds by
        which it judges them later than the ranks of the first tier do.

        elapsed: seconds of the phase. limit: those that it may take.
        """
        # Silence counts from when a beat was first read, so beats are read before they are judged.
        # The lowest ranks begin early. A later tier begins if no tier before it reads the beats, or
        # has come to a verdict: in a long phase of thousands of ranks, few read those of all.
        tier = tier_of(self.rank)
        if tier == 0:
            heart.listening = elapsed > self.timeout / 6
            return 0.0
        turn = (tier - 1) * self._window
        heart.following = elapsed > self.timeout / 3
        is_unattended = self._clock.now - heart.attended > tier * self._window
        is_long = elapsed > min(limit, self.timeout)
        heart.listening = elapsed > limit + turn or (is_long and is_unattended)
        # the window in which silence shows once this tier listens, and half a second to be sure
        return turn + self._window + 0.5

    def _explain_loss(self, heart: Heartbeat, elapsed: float) -> HangVerdict | None:
        """Explain why this rank lost a connection: return the verdict if the store is lost, and
        publish one if a rank has fallen silent.

        elapsed: seconds since the connection was lost.
        """
        heart.listening = self._searches
        if heart.lost or (self._searches and elapsed > self._window + self.every):
            return self._judge(heart, self._window)
        return None

    def _judge(
        self,
        heart: Heartbeat,
        patience: float,
        elapsed: float = 0.0,
    ) -> HangVerdict | None:
        """Return a verdict about the store, if it does not answer: no rank can publish that.
        Otherwise return None, and publish a verdict about silent ranks, or about the rank that
        hangs.

        patience: seconds of silence that are allowed.
        elapsed: seconds of the phase if it has exceeded its limit, else 0.
        """
        now = self._clock.now
        if heart.lost or now - heart.answered > patience:
            return self._judge_store(now - heart.answered, bool(heart.lost))
        beats: dict[int, Beat | None] = {}
        silent: dict[int, float] = {}  # seconds of silence
        # a copy: the heartbeat's thread writes to it meanwhile
        for rank, (beat, changed) in dict(heart.heard).items():
            beats[rank] = beat
            if now - changed > patience:
                silent[rank] = now - changed
                beats[rank] = newest(beat) if beat else None
        if silent:
            heart.publish(judge_silent(self.own_beat(), beats, silent).to_json())
        elif elapsed and len(beats) == self.size - 1:
            heart.publish(judge_hung(self.own_beat(), beats, elapsed).to_json())
        return None

    def _judge_store(self, seconds: float, closed: bool) -> HangVerdict:
        """Return the verdict that the host of the store does not answer; if rank 0 hosts it on this
        machine, that rank 0 is silent.

        seconds: since its last answer. closed: it has closed the connection.
        """
        first = self.first_beat
        if first and first.machine == machine_id() and _in_rank_0() and not closed:
            return judge_silent(self.own_beat(), {0: newest(first)}, {0: seconds})
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        host = first.host if first else "the host of rank 0"
        return judge_store(self.own_beat(), host, address, seconds, closed)


def _in_rank_0() -> bool:
    """Return True if rank 0 hosts the store, False if a launcher does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def kill_silent(verdict: HangVerdict) -> None:
    """Kill the silent ranks on this machine: a stopped process takes no other signal, and launchers
    wait for it."""
    this_machine = machine_id()
    for beat in verdict.beats:
        if beat.rank not in verdict.silent or beat.machine != this_machine:
            continue
        if beat.born and process_start(beat.pid) == beat.born:  # still the same process
            with suppress(ProcessLookupError, PermissionError):
                os.kill(beat.pid, SIGKILL)
