"""Few layers have every kind of many."""

from itertools import product

from models.spread_layers import spread


def test_every_kind_of_a_pattern_is_among_four_layers() -> None:
    for length in (4, 5, 6, 7, 8):
        for pattern in product("M*-", repeat=length):
            few = spread(pattern, 4)
            assert len(few) == 4
            assert set(few) == set(pattern), pattern


def test_kinds_are_spread_and_those_that_are_missing_come_last() -> None:
    assert spread("", 4) == []
    assert spread("MMMM*M-M", 4) == ["M", "M", "*", "-"]
    assert spread([True, False, False, False, False, False], 2) == [True, False]
    assert spread([False, False, False, True], 2) == [False, True]
