"""Batches that are read a step ahead: the same ones, and their errors at the same step."""

from threading import Event, current_thread, main_thread

import pytest

from tools.training.batches import Prefetch


class Reader:
    """Remembers what was read, and in which thread."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad
        self.read = list[int]()
        self.elsewhere = set[int]()

    def __call__(self, position: int) -> str:
        self.read.append(position)
        if current_thread() is not main_thread():
            self.elsewhere.add(position)
        if position == self.bad:
            raise ValueError(f"position {position}")
        return f"batch {position}"


def test_every_batch_but_the_first_is_read_ahead_and_each_once() -> None:
    reader = Reader()
    ahead = Prefetch(reader)
    taken = [ahead.take(n, n + 1 if n < 3 else None) for n in range(4)]
    assert taken == [f"batch {n}" for n in range(4)]
    assert reader.read == [0, 1, 2, 3] and reader.elsewhere == {1, 2, 3}


def test_a_batch_that_is_not_the_one_read_ahead_is_read_now() -> None:
    ahead = Prefetch(Reader())
    ahead.take(0, 1)
    assert ahead.take(5, 6) == "batch 5" and ahead.take(6) == "batch 6"


def test_an_error_is_raised_at_the_step_that_it_belongs_to() -> None:
    ahead = Prefetch(Reader(bad=2))
    assert ahead.take(0, 1) == "batch 0" and ahead.take(1, 2) == "batch 1"
    with pytest.raises(ValueError, match="position 2"):
        ahead.take(2, 3)
    assert ahead.take(3) == "batch 3"


def test_the_next_batch_is_read_while_this_one_is_used() -> None:
    begun = Event()
    go = Event()

    def read(position: int) -> int:
        if position:
            begun.set()
            assert go.wait(300)
        return position

    ahead = Prefetch(read)
    ahead.take(0, 1)
    assert begun.wait(300), "nothing is read before it is asked for"
    go.set()
    assert ahead.take(1) == 1
