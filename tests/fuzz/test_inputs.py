"""Any input ends with exit code 0, or 2 and plain lines: no traceback, no signal, no silence without end."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.groups import GROUPS, Group
from tests.fuzz.material import make
from tests.fuzz.server import Command, Server, faults


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as one:
        yield one


@pytest.fixture(scope="module")
def material(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The good files, which no case changes: each has a copy."""
    folder = tmp_path_factory.mktemp("material") / "room"
    folder.mkdir()
    make(server, folder)
    return folder


def tried(server: Server, material: Path, group: Group, seed: int, folder: Path) -> list[str]:
    """One case of a group; what is wrong with how it ended."""
    here = folder / "case" / "room"
    here.parent.mkdir()
    shutil.copytree(material, here)
    command = Command(group(Random(f"{group.__name__} {seed}"), here), str(here))
    found = faults(command, server.run(command))
    shutil.rmtree(here.parent)
    return [f"{group.__name__} {seed}: {' '.join(command.argv)[:300]!r}: {fault}" for fault in found]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_a_sample(group: Group, server: Server, material: Path, tmp_path: Path) -> None:
    assert [line for seed in range(3) for line in tried(server, material, group, seed, tmp_path)] == []
