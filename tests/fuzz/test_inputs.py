"""Any input ends with exit code 0, or 2 and plain lines: no traceback, no signal, no silence
without end."""

import os
import shutil
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.groups import GROUPS as RUN_GROUPS
from tests.fuzz.groups import Group, megatron, pickles
from tests.fuzz.known import DEEP, DIGITS, REFUSED
from tests.fuzz.server import Command, Server, faults
from tests.fuzz.side_files import SIDE_GROUPS

GROUPS = (*RUN_GROUPS, *SIDE_GROUPS)
# seeds of each group
SAMPLE = 5
CAMPAIGN = 500


def tried(server: Server, material: Path, group: Group, seed: int, folder: Path) -> list[str]:
    """One case of a group; what is wrong with how it ended."""
    here = folder / "case" / "room"
    here.parent.mkdir()
    shutil.copytree(material, here)
    command = Command(group(Random(f"{group.__name__} {seed}"), here), str(here))
    found = faults(command, server.run(command))
    shutil.rmtree(here.parent)
    return [
        f"{group.__name__} {seed}: {' '.join(command.argv)[:300]!r}: {fault}" for fault in found
    ]


def bad(server: Server, material: Path, group: Group, seeds: range, folder: Path) -> list[str]:
    """What is wrong with the cases of these seeds; of groups that start a process for each file, a
    tenth of them."""
    some = seeds[::10] if group in (pickles, megatron) else seeds
    return [line for seed in some for line in tried(server, material, group, seed, folder)]


@pytest.fixture(scope="module")
def odd_room(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the good files with a pipe and files that parsers of TOML and JSON do not
    survive."""
    room = tmp_path_factory.mktemp("odd") / "room"
    shutil.copytree(material, room)
    os.mkfifo(room / "fifo")
    (room / "nested.toml").write_text(f"a = {DEEP}")
    (room / "digits.toml").write_text(f"[train]\nsteps = {DIGITS}")
    (room / "nul.toml").write_text((room / "my.toml").read_text().replace('"./run"', '"a\\u0000b"'))
    with (room / "long.jsonl").open("wb") as file:
        file.write(b'{"text": "' + b"a" * (1 << 27) + b'"}')
    return room


@pytest.mark.slow
def test_what_once_went_wrong_is_refused_in_plain_lines(server: Server, odd_room: Path) -> None:
    found = list[str]()
    for argv in REFUSED:
        command = Command(argv, str(odd_room))
        ended = server.run(command)
        wrong = faults(command, ended) or ([] if ended.code == 2 else [f"exit code {ended.code}"])
        found += [f"{' '.join(argv)[:200]!r}: {fault}" for fault in wrong]
    assert found == []


@pytest.mark.cases(0, sample=5)
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_a_sample_of_odd_inputs_ends_plainly(
    group: Group, server: Server, material: Path, tmp_path: Path
) -> None:
    assert bad(server, material, group, range(SAMPLE), tmp_path) == []


@pytest.mark.campaign
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_thousands_of_odd_inputs_end_plainly(
    group: Group, server: Server, material: Path, tmp_path: Path
) -> None:
    assert bad(server, material, group, range(SAMPLE, CAMPAIGN), tmp_path) == []
