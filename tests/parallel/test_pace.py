"""Stragglers: which rank computes longer than ranks with the same work."""

from collections.abc import Mapping, Sequence
from threading import Thread

import pytest

from megaprec.comm import waiting as waits
from megaprec.diagnose import position as at
from parallel.hangs.pace import PaceOfWork, Straggler, Stragglers


def windows(
    stages: Sequence[int], *seconds: Mapping[int, float], steps: int = 10
) -> list[list[Straggler]]:
    """What is found after each window, of `steps` steps. seconds: of each rank, per step."""
    compared = Stragglers(stages)
    work = {rank: PaceOfWork() for rank in range(len(stages))}
    found = []
    for number, one in enumerate(seconds, start=1):
        work = {
            rank: PaceOfWork(work[rank].seconds + one[rank] * steps, work[rank].steps + steps)
            for rank in one
        }
        found.append(compared.compare(number * steps, work))
    return found


EVEN = dict.fromkeys(range(4), 1.0)
ODD = {0: 1.0, 1: 1.0, 2: 2.0, 3: 1.0}


def test_a_rank_that_is_slow_in_two_windows_is_named_with_its_factor_and_the_step_since_when() -> (
    None
):
    found = windows([0, 0, 0, 0], EVEN, ODD, ODD, ODD)
    assert found == [[], [], [Straggler(2, 2.0, since=11, step=30, alone=False)], []]
    assert found[2][0].words("b") == (
        "rank 2 on b is slow: it computes 2.0 times as long as the other ranks of its stage, "
        "since about step 11"
    )


def test_a_window_that_is_slow_by_its_last_steps_does_not_blame_the_steps_before_them() -> None:
    slow = {**EVEN, 2: 11.0}
    late = {**EVEN, 2: (6 * 1.0 + 4 * 11.0) / 10}
    assert [one.since for one in windows([0] * 4, EVEN, late, slow)[2]] == [17]
    assert [one.since for one in windows([0] * 4, late, slow)[1]] == [7]
    assert [one.since for one in windows([0] * 4, slow, slow)[1]] == [1]


def test_the_steps_of_a_resumed_run_are_counted_from_its_checkpoint() -> None:
    compared, (first, then) = Stragglers([0, 0]), ((10, 30.0), (20, 60.0))
    works = [
        {0: PaceOfWork(float(steps), steps), 1: PaceOfWork(slow, steps)}
        for steps, slow in (first, then)
    ]
    assert compared.compare(1010, works[0]) == []
    assert [one.since for one in compared.compare(1020, works[1])] == [1001]


def test_that_it_is_slow_no_longer_is_said_once_and_one_slow_window_is_not_said_at_all() -> None:
    assert windows([0] * 4, EVEN, ODD, EVEN, EVEN) == [[], [], [], []]
    *_, ended, after = windows([0] * 4, ODD, ODD, EVEN, EVEN)
    assert [one.words("b") for one in ended] == ["rank 2 on b is no longer slow"]
    assert after == []


def test_stages_may_differ_in_their_work() -> None:
    uneven = {0: 1.0, 1: 1.0, 2: 3.0, 3: 3.0}
    assert windows([0, 0, 1, 1], uneven, uneven, uneven) == [[], [], []]
    slower = {**uneven, 3: 6.0}
    (found,) = windows([0, 0, 1, 1], slower, slower)[1]
    assert (found.rank, found.factor, found.alone) == (3, 2.0, False)


def test_a_rank_that_is_alone_in_its_stage_is_compared_with_its_start() -> None:
    (found,) = windows([0, 1], {0: 1.0, 1: 3.0}, {0: 1.0, 1: 6.0}, {0: 1.0, 1: 6.0})[2]
    assert (found.rank, found.factor, found.alone) == (1, 2.0, True)
    assert "as at the start of the run" in found.words("b")


def test_few_steps_tell_nothing_yet_and_all_ranks_as_slow_as_another_are_not_stragglers() -> None:
    assert windows([0] * 4, EVEN, ODD, ODD, steps=1) == [[], [], []]
    assert windows([0] * 4, dict.fromkeys(range(4), 5.0), dict.fromkeys(range(4), 5.0)) == [[], []]


def test_ranks_are_compared_once_each_has_steps_enough() -> None:
    compared = Stragglers([0, 0])
    assert compared.compare(10, {0: PaceOfWork(10.0, 10), 1: PaceOfWork(0.0, 0)}) == []
    even = PaceOfWork(20.0, 20)
    slow = PaceOfWork(40.0, 20)
    slower = PaceOfWork(80.0, 40)
    assert compared.compare(20, {0: even, 1: slow}) == []
    found = compared.compare(40, {0: PaceOfWork(40.0, 40), 1: slower})
    # the window that was too short is part of the next
    assert [(one.rank, one.since) for one in found] == [(1, 1)]


class Clock:
    """In place of the module time, of which the test is the hands."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(at, "time", made)
    monkeypatch.setattr(waits, "time", made)
    return made


def test_a_rank_counts_the_time_in_steps_in_which_it_neither_waits_nor_writes_records(
    clock: Clock,
) -> None:
    position = at.Position()
    clock.now += 100.0
    assert (position.computed(), position.begun) == (0.0, 0), "loading is no step"
    position.enter(at.Phase.STEP, 4)
    clock.now += 1.0
    assert (position.computed(), position.begun) == (1.0, 1), (
        "a resumed run begins with a later step"
    )
    with waits.noted(position.waits), waits.waiting():
        clock.now += 10.0
        assert position.computed() == 1.0, "in a wait"
    clock.now += 2.0
    assert position.computed() == 3.0
    with position.in_phase(at.Phase.EVALUATION):
        clock.now += 20.0
        with waits.noted(position.waits), waits.waiting():
            clock.now += 20.0
    clock.now += 4.0
    position.end_computation()
    clock.now += 50.0
    position.enter(at.Phase.STEP, 5)
    assert (position.computed(), position.begun) == (7.0, 2)


def test_the_waits_of_another_thread_are_not_the_main_threads(clock: Clock) -> None:
    mine = waits.Waits()

    def wait() -> None:
        with waits.waiting():
            clock.now += 5.0

    with waits.noted(mine):
        other = Thread(target=wait)
        other.start()
        other.join()
        assert mine.seconds(clock.now) == 0.0
        wait()
        assert mine.seconds(clock.now) == 5.0


def test_a_wait_that_fails_is_over(clock: Clock) -> None:
    mine = waits.Waits()
    with waits.noted(mine), pytest.raises(RuntimeError, match="lost"), waits.waiting():
        raise RuntimeError("the connection is lost")
    assert not mine.under_way
