"""The parts of the tests that `--part 2/6` chooses among: each law is in one, with all its cases."""

from collections import Counter

import pytest

from tests.conftest import part, part_of

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


@pytest.mark.parametrize("asked", ["0/3", "4/3", "3", "a/b", "1/2/3"])
def test_a_part_that_is_none_is_refused(asked: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 -- argparse tells it as a wrong value of --part
        part(asked)
