"""The server of commands and the good files, which the modules of this folder share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.material import make
from tests.fuzz.server import Server


@pytest.fixture(scope="session")
def server(forks: Path) -> Iterator[Server]:
    with Server(forks / "python") as one:
        yield one


@pytest.fixture(scope="session")
def material(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The good files, which no case changes: each has a copy."""
    folder = tmp_path_factory.mktemp("material") / "room"
    folder.mkdir()
    make(server, folder)
    return folder
