"""Files of five systems' users come to the plan that the system's own source gives them, or are
refused by name."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaprec.errors import UserError
from megaprec.precision.plan import plan
from tests.foreign.expected import TABLE, Expected
from tools.commands.precision import read_precision
from tools.config.run_file import known_keys

FOLDER = Path(__file__).parent / "files"
USUAL: dict[str, Any] = {"optimizer.clip": 1.0, "parallel.zero": True, "parallel.zero_size": 0}
"""What a run file says of the keys that belong to mixed precision, if it does not name them."""


def entries(which: list[Expected]) -> list[Any]:
    return [pytest.param(entry, id=entry.file) for entry in which]


READ = entries([entry for entry in TABLE if not entry.refused])
QUIET = entries([entry for entry in TABLE if entry.quiet])
REFUSED = entries([entry for entry in TABLE if entry.refused])


def test_every_file_is_in_the_table_once_and_every_entry_has_its_file() -> None:
    assert sorted(entry.file for entry in TABLE) == sorted(
        path.name for path in FOLDER.iterdir() if path.is_file()
    )


def test_no_entry_expects_a_file_to_be_read_and_refused_or_to_be_quiet_and_noted() -> None:
    for entry in TABLE:
        assert bool(entry.plan) != bool(entry.refused), entry.file
        assert not (entry.quiet and entry.notes), entry.file


@pytest.mark.parametrize("entry", READ)
def test_what_the_table_expects_is_a_plan_and_run_file_keys_that_there_can_be(
    entry: Expected,
) -> None:
    assert replace(plan("fp32"), **entry.plan).compute == entry.plan["compute"]
    assert set(entry.settings) <= known_keys()


@pytest.mark.parametrize("entry", REFUSED)
def test_of_the_lines_that_the_table_names_one_holds_what_is_refused(entry: Expected) -> None:
    lines = (FOLDER / entry.file).read_text().splitlines()
    named = [lines[number - 1] for number in entry.at]
    assert not named or any(word in line for line in named for word in entry.refused)


@pytest.mark.parametrize("entry", READ)
def test_a_file_comes_to_the_plan_that_its_system_makes_of_it(entry: Expected) -> None:
    plan = read_precision(FOLDER / entry.file).plan
    assert {name: getattr(plan, name) for name in entry.plan} == dict(entry.plan)


@pytest.mark.parametrize("entry", READ)
def test_a_file_decides_the_run_file_keys_that_its_system_reads_there(entry: Expected) -> None:
    found = {
        key: given.value for key, given in read_precision(FOLDER / entry.file).settings.items()
    }
    assert {key: found.get(key) for key in entry.settings} == dict(entry.settings)
    more = {
        key: value for key, value in found.items() if key in USUAL and key not in entry.settings
    }
    assert more == {key: USUAL[key] for key in more}


@pytest.mark.parametrize("entry", entries([entry for entry in TABLE if entry.notes]))
def test_what_is_read_but_not_used_is_named_in_a_note(entry: Expected) -> None:
    notes = read_precision(FOLDER / entry.file).notes
    assert [word for word in entry.notes if not any(word in note for note in notes)] == []


@pytest.mark.parametrize("entry", QUIET)
def test_a_file_whose_every_word_of_precision_is_used_makes_no_noise(entry: Expected) -> None:
    assert read_precision(FOLDER / entry.file).notes == ()


@pytest.mark.parametrize("entry", entries([entry for entry in TABLE if entry.unsaid]))
def test_a_note_says_nothing_of_what_has_no_bearing_on_precision(entry: Expected) -> None:
    notes = read_precision(FOLDER / entry.file).notes
    assert [
        (word, note)
        for word in entry.unsaid
        for note in notes
        if word in note.replace(str(FOLDER), "")
    ] == []


@pytest.mark.parametrize("entry", REFUSED)
def test_a_file_that_leaves_something_open_is_refused_with_its_name_and_line(
    entry: Expected,
) -> None:
    with pytest.raises(UserError) as caught:
        read_precision(FOLDER / entry.file)
    said = str(caught.value)
    assert [word for word in entry.refused if word not in said] == []
    assert not entry.at or any(re.search(rf"\bline {number}\b", said) for number in entry.at), said
