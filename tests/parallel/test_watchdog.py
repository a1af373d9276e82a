"""The watchdog and its verdicts: several ranks as threads of one process, over one store."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from threading import Event, Timer

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.groups import make_groups
from megaprec.diagnose.call_stack import main_calls
from megaprec.diagnose.position import Phase, Position, read_shared
from megaprec.torch_private import time_limit_of
from parallel.hangs.heartbeat import Beat, Clock, Heartbeat, newest, process_start, tier_of
from parallel.hangs.verdict import HangVerdict, judge_hung, judge_silent, ranks_in_words
from parallel.hangs.watchdog import LONG, Watchdog, kill_silent, longest_wait
from parallel.mesh import make_mesh
from parallel.pipeline.instructions import Instruction, Op
from tests.ranks import run_ranks
from tests.work import calls_of

TIMEOUT = 1.0


def beat(
    rank: int,
    host: str = "a",
    step: int = 5,
    doing: str = "update",
    count: int = 1,
    waits: bool = True,
) -> Beat:
    return Beat(rank, host, host, 100 + rank, "1", -1, 1, "step", step, doing, count, waits, ())


def store() -> dist.TCPStore:
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False
    )


class Ranks:
    """Watchdogs of ranks that all are in step 3, after a step of no time, without threads: time
    passes in `pass_by`.

    left: the verdicts with which they leave. silent: ranks whose heart beats no more.
    """

    def __init__(self, number: int) -> None:
        self._store = shared = store()  # lives as long as they do
        self.dogs = [
            in_step_3(Watchdog(shared, rank, number, Position(), TIMEOUT, unused))
            for rank in range(number)
        ]
        self.left = dict[int, HangVerdict]()
        self.silent = set[int]()

    def pass_by(self, seconds: float) -> None:
        """Let time pass on all ranks, each of which beats and looks ten times in a timeout."""
        for _ in range(round(10 * seconds / TIMEOUT)):
            for rank, dog in enumerate(self.dogs):
                if rank not in self.silent and rank not in self.left:
                    dog._clock.now += TIMEOUT / 10
                    dog._heart._beat()  # pyright: ignore[reportOptionalMemberAccess]
                    if verdict := dog._look():
                        self.left[rank] = verdict


def in_step_3(dog: Watchdog) -> Watchdog:
    dog.position.slowest = 0.001
    dog.position.enter(Phase.STEP, 3)
    return dog


def unused(verdict: HangVerdict) -> None:
    pytest.fail("no thread was started")


@contextmanager
def threads(number: int, timeout: float) -> Iterator[tuple[list[Watchdog], dict[int, HangVerdict]]]:
    """As `Ranks`, with the threads of a run; yields the watchdogs and the verdicts with which they
    leave."""
    left: dict[int, HangVerdict] = {}
    shared = store()
    dogs = [
        in_step_3(
            Watchdog(
                shared,
                rank,
                number,
                Position(),
                timeout,
                lambda one, rank=rank: left.update({rank: one}),
            )
        )
        for rank in range(number)
    ]
    for dog in dogs:
        dog.start()
    try:
        yield dogs, left
    finally:
        for dog in dogs:
            dog.stop()


def until(true: Callable[[], object], seconds: float = 240.0) -> None:
    """Wait until something is true, or for as long as no machine takes."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_rank_without_a_heartbeat_is_the_culprit_on_every_other_rank() -> None:
    ranks = Ranks(3)
    ranks.dogs[1].position.note_action(Instruction(Op.FORWARD, 0, 2))
    ranks.pass_by(TIMEOUT / 2)
    ranks.silent.add(1)
    ranks.pass_by(3 * TIMEOUT)
    require_rank_1_blamed(ranks.left)


def require_rank_1_blamed(left: Mapping[int, HangVerdict]) -> None:
    assert {rank: verdict.culprits for rank, verdict in left.items()} == {0: (1,), 2: (1,)}
    assert len({verdict.reason for verdict in left.values()}) == 1
    assert (
        "rank 1 on " in left[0].reason
        and "step 3, forward of micro-batch 2 in stage 0" in left[0].reason
    )


def test_all_ranks_leave_together_when_all_have_a_heartbeat_and_none_goes_on() -> None:
    ranks = Ranks(2)
    ranks.dogs[0].position.note_action("consensus")
    ranks.dogs[0].position.note_action("update")
    ranks.pass_by(3 * TIMEOUT)
    assert [ranks.left[rank].culprits for rank in range(2)] == [(1,), (1,)]  # has done less


def test_a_run_whose_steps_go_on_is_left_alone_however_long_it_takes() -> None:
    ranks = Ranks(2)
    for step in range(4, 4 + 12):
        ranks.pass_by(0.9 * TIMEOUT)
        for dog in ranks.dogs:
            dog.position.enter(Phase.STEP, step)
    assert not ranks.left


LOADING = 5 * TIMEOUT  # a phase that is long and in order


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each rank has read the beats of all."""
    counts = Counter[int]()
    read = Heartbeat._read_others

    def counted(heart: Heartbeat) -> dict[int, Beat | None]:
        counts[heart.rank] += 1
        return read(heart)

    monkeypatch.setattr(Heartbeat, "_read_others", counted)
    return counts


@pytest.mark.parametrize("number", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_in_a_long_phase_a_number_of_ranks_reads_all_beats_that_does_not_grow(
    number: int, readers: Counter[int]
) -> None:
    """Otherwise the store's work grows with the square of the ranks, until it does not answer and
    ends a run that loads."""
    ranks = Ranks(number)
    for dog in ranks.dogs:
        dog.position.enter(Phase.LOADING)
    ranks.pass_by(LOADING)
    assert not ranks.left
    assert {*readers} == {*range(8)}


@pytest.mark.parametrize(
    ("number", "silent"), [(12, 8), pytest.param(30, 24, marks=pytest.mark.slow)]
)
def test_ranks_of_the_next_tier_judge_if_those_before_are_silent(
    number: int, silent: int, readers: Counter[int]
) -> None:
    ranks = Ranks(number)
    for dog in ranks.dogs:
        dog.position.enter(Phase.LOADING)
    ranks.pass_by(TIMEOUT)
    readers.clear()
    ranks.silent.update(range(silent))
    ranks.pass_by(6 * TIMEOUT)
    assert {*ranks.left} == {*range(silent, number)}
    assert {verdict.silent for verdict in ranks.left.values()} == {tuple(range(silent))}
    assert {*readers} <= {rank for rank in range(number) if rank >= silent}


def test_tiers_double() -> None:
    tiers = [tier_of(rank) for rank in (0, 7, 8, 23, 24, 55, 56, 4095)]
    assert tiers == [0, 0, 1, 1, 2, 2, 3, 9]


@pytest.mark.slow
def test_the_threads_of_ranks_come_to_the_same_verdict() -> None:
    """Silence of two seconds is no delay even on a busy machine."""
    with threads(3, timeout=4.0) as (dogs, left):
        dogs[1].position.note_action(Instruction(Op.FORWARD, 0, 2))
        until(lambda: not any(dog._heart._beat_number < 3 for dog in dogs if dog._heart))
        dogs[1]._over.set()
        dogs[1]._heart.stop()  # pyright: ignore[reportOptionalMemberAccess]
        until(lambda: len(left) == 2)
    require_rank_1_blamed(left)


def test_a_step_may_take_the_timeout_longer_than_the_slowest_and_other_phases_ten_minutes() -> None:
    position = Position()
    dog = Watchdog(dist.HashStore(), 0, 1, position, 60.0, lambda verdict: None)
    position.enter(Phase.STEP, 1)
    assert dog.limit() == LONG == 600  # the first step
    position.slowest = 12.0
    assert dog.limit() == 72
    for phase in (Phase.LOADING, Phase.SAVE, Phase.EVALUATION, Phase.REPLAY, Phase.COMPARISON):
        position.enter(phase)
        assert dog.limit() == 600
    position.enter(Phase.WAITING)
    assert dog.limit() == float("inf")
    position.enter(Phase.STEP)
    position.slowest = 1e9  # a machine that was suspended
    assert dog.limit() == 660


@pytest.mark.parametrize(("timeout", "seconds"), [(0.5, 0.1), (5.0, 0.5), (20.0, 2.0), (60.0, 2.0)])
def test_a_heart_beats_ten_times_in_a_timeout_and_neither_all_the_time_nor_rarely(
    timeout: float, seconds: float
) -> None:
    dog = Watchdog(dist.HashStore(), 0, 1, Position(), timeout, unused)
    assert dog.every == pytest.approx(seconds)


def test_a_rank_that_is_alone_has_no_heartbeat() -> None:
    alone = dist.HashStore()
    dog = Watchdog(alone, 0, 1, Position(), TIMEOUT, unused)
    assert dog.first_beat is None
    assert alone.num_keys() == 0


def test_a_watchdog_that_has_been_stopped_looks_no_more() -> None:
    dog = Watchdog(dist.HashStore(), 0, 1, Position(), TIMEOUT, unused)
    looks, may_end = Event(), Event()

    def look() -> None:
        looks.set()
        may_end.wait()

    dog._look = look
    dog.start()
    looks.wait()
    Timer(0.2, may_end.set).start()
    dog.stop()
    assert not dog._thread.is_alive()


@pytest.mark.parametrize("timeout", [0.5, 60.0, 7200.0])
def test_no_group_gives_up_before_the_watchdog(timeout: float) -> None:
    dog = Watchdog(dist.HashStore(), 0, 1, Position(), timeout, lambda verdict: None)
    dog.position.slowest = 1e9
    for phase in Phase:
        dog.position.enter(phase)
        assert dog.limit() < longest_wait(timeout) or phase in (Phase.PREPARATION, Phase.WAITING)


def limits(mesh: DeviceMesh) -> set[timedelta]:
    """The time limits of all kinds of groups, in a world that has one of its own."""
    assert dist.group.WORLD is not None
    # its name before torch 2.14
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=1234), dist.group.WORLD)
    mesh = make_mesh(1, 2, 2)
    made = [
        Axis.stage(mesh, separate_group=True),
        Axis.of(mesh, "dp").subaxis(1, "zero"),
        *(Axis.of(mesh, name) for name in ("dp", "tp")),
    ]
    groups = [axis.group for axis in made if axis.group] + [
        make_groups(torch.tensor([[0, 1, 2, 3]]))
    ]
    return {time_limit_of(group) for group in groups}


def test_every_group_has_the_time_limit_of_the_world() -> None:
    assert run_ranks(limits, {"dp": 2, "tp": 2}) == [{timedelta(seconds=1234)}] * 4


@pytest.mark.slow
def test_a_silent_store_ends_a_rank_which_names_both_hosts() -> None:
    shared = store()
    left = list[HangVerdict]()
    Watchdog(shared, 0, 2, Position(), TIMEOUT, unused)  # its first beat is waited for
    dog = Watchdog(shared, 1, 2, Position(), TIMEOUT, left.append)
    dog.first_beat = replace(beat(0), host="elsewhere")
    dog.position.enter(Phase.WAITING)
    dog._heart._beat = lambda: time.sleep(60)  # pyright: ignore[reportOptionalMemberAccess]
    dog.start()
    until(lambda: left)
    dog._over.set()
    assert "elsewhere" in left[0].reason and f"rank 1 on {dog.own_beat().host}" in left[0].reason


def test_a_step_of_one_process_that_never_ends_is_judged_a_hang() -> None:
    left = list[HangVerdict]()
    dog = in_step_3(Watchdog(store(), 0, 1, Position(), 0.2, left.append))
    dog.start()
    until(lambda: left, seconds=30.0)
    dog.stop()
    assert left[0].culprits == (0,)


def test_a_pause_of_this_process_is_no_hang() -> None:
    clock = Clock(longest=0.1)
    time.sleep(0.5)
    clock.tick()
    assert clock.now == 0.1


@pytest.mark.parametrize("timeout", [1.0, 5.0, 60.0, 7200.0])
def test_a_machine_that_stood_still_while_a_hang_is_judged_does_not_accuse_the_store(
    timeout: float,
) -> None:
    shared = store()
    dog = in_step_3(Watchdog(shared, 0, 2, Position(), timeout, unused))
    assert dog._look() is None
    dog._clock.now += timeout + 1
    dog._heart._beat()  # pyright: ignore[reportOptionalMemberAccess]
    dog._clock._last -= 1000
    dog._clock.tick()
    assert dog._look() is None


def test_the_cause_is_a_rank_that_does_not_wait_and_the_least_far_of_several() -> None:
    busy = {0: beat(0, count=7, waits=False), 1: beat(1, count=3, waits=False), 2: beat(2, count=1)}
    verdict = judge_hung(beat(3), busy, 61.0)
    assert verdict.culprits == (1,)
    assert verdict.reason == (
        "rank 1 on a (process 101) hangs in step 5, update after 61 s; ranks 2 and 3 wait, "
        "rank 2 in step 5, update"
    )
    waiting = judge_hung(
        beat(0, count=4), {1: beat(1, step=4, doing="record of the step"), 2: beat(2)}, 61.0
    )
    assert waiting.culprits == (1,) and waiting.reason.startswith(
        "all ranks wait for each other after 61 s: rank 1 on"
    )


def test_a_host_that_is_silent_as_a_whole_is_named_with_the_one_that_hears_nothing() -> None:
    known = {1: beat(1), 2: beat(2, "b"), 3: beat(3, "b")}
    assert judge_silent(beat(0), known, {2: 7.0, 3: 6.0}).reason == (
        "b (ranks 2 and 3) has not been heard of for 7 s by a (ranks 0 and 1): the machine "
        "is down, or the link to it "
        "is cut; rank 2 on b (process 102) was last seen in step 5, update"
    )
    one = judge_silent(beat(0), known, {3: 6.0})
    assert one.reason.startswith(
        "rank 3 on b (process 103) was last seen in step 5, update: stopped or dead"
    )
    assert judge_silent(beat(0), {1: None}, {1: 6.0}).culprits == (1,)


def test_verdicts_survive_the_way_through_the_store() -> None:
    verdict = judge_silent(beat(0), {1: beat(1)}, {1: 5.0})
    assert HangVerdict.from_json(verdict.to_json()) == verdict


def test_ranks_are_named_in_words() -> None:
    assert [ranks_in_words(one) for one in ([3], [2, 0], [0, 1, 2], [7, 0, 1, 2, 5])] == [
        "rank 3", "ranks 0 and 2", "ranks 0 to 2", "ranks 0 to 2, 5 and 7",
    ]  # fmt: skip


STOPS = """
import os, signal
from megaprec.diagnose.position import Phase, Position
position = Position()
position.share()
position.enter(Phase.STEP, 7)
position.note_action("update")
print(position.shared, flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads another process's memory through /proc")
def test_a_stopped_process_can_be_asked_where_it_is_and_is_killed_only_if_it_is_the_one() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOPS], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        try:
            shared = int(process.stdout.readline())
            mine = Beat.of(1, 1, Position(), main_calls())
            stopped = replace(mine, pid=process.pid, born=process_start(process.pid), shared=shared)
            assert read_shared(process.pid, shared) == ("step", 7, "update")
            assert (newest(stopped).phase, newest(stopped).step, newest(stopped).doing) == (
                "step",
                7,
                "update",
            )
            for other in (replace(stopped, born="1"), replace(stopped, machine="elsewhere")):
                assert newest(other) == other
                kill_silent(HangVerdict("", (1,), 0, (1,), (other,)))
            assert process.poll() is None
            kill_silent(HangVerdict("", (1,), 0, (), (stopped,)))
            assert process.poll() is None
            kill_silent(HangVerdict("", (1,), 0, (1,), (stopped,)))
            assert process.wait(240) == -signal.SIGKILL
        finally:
            # a stopped process ends in no other way, and would be waited for
            process.kill()


def test_a_write_of_the_position_takes_few_calls() -> None:
    position = Position()
    position.share()
    instruction = Instruction(Op.FORWARD, 0, 1)
    assert calls_of(lambda: position.note_action(instruction)) < 30  # some microseconds
    os.close(position.shared)


def test_the_first_verdict_is_everyones() -> None:
    shared = store()
    clock = Clock(1.0)
    hearts = [
        Heartbeat(shared, rank, 2, Position(), main_calls, clock, 0.1, 1) for rank in range(2)
    ]
    for heart in hearts:
        heart.publish(f"rank {1 - heart.rank}")
        heart._beat()
    assert [heart.verdict for heart in hearts] == ["rank 1", "rank 1"]
