"""The parts of the tests that `--part 2/6` chooses among: each law is in one, with all its cases."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import leave_other_parts, part, part_of

LAWS = [f"tests/models/test_any.py::test_law_{number}" for number in range(600)]


def test_each_law_is_in_one_part_with_all_its_cases() -> None:
    for law in LAWS:
        assert {part_of(f"{law}{case}", 6) for case in ("", "[1]", "[tp2-llama]")} == {
            part_of(law, 6)
        }


def test_parts_are_alike_in_size() -> None:
    laws = Counter(part_of(law, 6) for law in LAWS)
    assert laws.keys() == {1, 2, 3, 4, 5, 6}
    assert min(laws.values()) > 80


class OneTest:
    """What the choice of parts asks of a test."""

    def __init__(self, law: str, is_slow: bool) -> None:
        self.nodeid = law
        self._is_slow = is_slow

    def get_closest_marker(self, name: str) -> bool:
        return self._is_slow and name == "slow"


def test_a_part_has_its_slow_laws_and_all_fast_ones() -> None:
    tests = [OneTest(law, slow) for law in LAWS for slow in (False, True)]
    slow_ones: list[str] = []
    for number in range(1, 7):
        deselected: list[OneTest] = []
        hook = SimpleNamespace(pytest_deselected=lambda items, told=deselected: told.extend(items))
        config: Any = SimpleNamespace(option=SimpleNamespace(part=(number, 6)), hook=hook)
        items: list[Any] = [*tests]
        leave_other_parts(config, items)
        assert [one.nodeid for one in items if not one.get_closest_marker("slow")] == LAWS
        assert len(items) + len(deselected) == len(tests)
        slow_ones += [one.nodeid for one in items if one.get_closest_marker("slow")]
    assert sorted(slow_ones) == sorted(LAWS)


@pytest.mark.parametrize("asked", ["0/3", "4/3", "3", "a/b", "1/2/3"])
def test_a_part_that_is_none_is_refused(asked: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 -- argparse tells it as a wrong value of --part
        part(asked)
