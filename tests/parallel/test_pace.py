"""Stragglers: which rank computes longer than ranks with the same work."""

import time
from collections.abc import Mapping, Sequence

import pytest

from megaprec.diagnose import position as at
from parallel.hangs import pace
from parallel.hangs.pace import Pace, Straggler, Stragglers, Work


def windows(stages: Sequence[int], *seconds: Mapping[int, float], steps: int = 10) -> list[list[Straggler]]:
    """What is found after each window, of `steps` steps. seconds: of each rank, per step."""
    compared, work, found = Stragglers(stages), {rank: Work() for rank in range(len(stages))}, []
    for number, one in enumerate(seconds, start=1):
        work = {rank: Work(work[rank].seconds + one[rank] * steps, work[rank].steps + steps) for rank in one}
        found.append(compared.compare(number * steps, work))
    return found


EVEN, ODD = dict.fromkeys(range(4), 1.0), {0: 1.0, 1: 1.0, 2: 2.0, 3: 1.0}


def test_a_rank_that_is_slow_in_two_windows_is_named_with_its_factor_and_the_step_since_when() -> None:
    found = windows([0, 0, 0, 0], EVEN, ODD, ODD, ODD)
    assert found == [[], [], [Straggler(2, 2.0, since=11, step=30, alone=False)], []]
    assert found[2][0].words("b") == (
        "rank 2 on b is slow: it computes 2.0 times as long as the other ranks of its stage, since step 11"
    )


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


def test_the_thread_counts_the_time_in_steps_that_is_not_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    position, waits = at.Position(), False
    monkeypatch.setattr(pace, "main_stack", lambda: (waits, []))
    counted = Pace(position)
    counted.start()
    time.sleep(0.3)
    assert counted.work == Work(), "loading is no step"
    position.enter(at.Phase.STEP, 4)
    time.sleep(0.6)
    position.enter(at.Phase.STEP, 5)
    time.sleep(0.6)
    before, waits = counted.work, True
    time.sleep(0.6)
    counted.stop()
    assert before.steps == 2
    assert before.seconds > 0.8
    assert counted.work.seconds - before.seconds < 0.3
