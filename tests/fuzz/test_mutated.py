"""Changed texts of every form end with exit code 0, or 2 and plain lines, within 20 s of processor
time and 2 GiB of memory."""

import shutil
from pathlib import Path

import pytest

from tests.fuzz.mutated import GOOD, write_case
from tests.fuzz.server import Command, Server, faults

# seeds of each form; 23 forms
SAMPLE = 3
CAMPAIGN = 220
MEMORY = 2 << 30  # bytes, as docs/data.md says


def _tried(server: Server, material: Path, name: str, seed: int, folder: Path) -> list[str]:
    """One changed file; what is wrong with how the command ended."""
    here = folder / "case" / "room"
    here.mkdir(parents=True)
    shutil.copy(material / "data" / "text.model", here)
    write_case(here, name, seed)
    build = ["data", "build", name, "new", "--tokenizer", "text.model", "--workers", "1"]
    command = Command(build, str(here), memory=MEMORY)
    found = faults(command, server.run(command))
    shutil.rmtree(here.parent)
    return [f"{name} {seed}: {fault}" for fault in found]


def _wrong(server: Server, material: Path, name: str, seeds: range, folder: Path) -> list[str]:
    """What is wrong with the changed files of these seeds."""
    return [line for seed in seeds for line in _tried(server, material, name, seed, folder)]


@pytest.mark.cases(0, sample=4)
@pytest.mark.parametrize("name", GOOD)
def test_a_sample_of_changed_texts_ends_plainly(
    name: str, server: Server, material: Path, tmp_path: Path
) -> None:
    assert _wrong(server, material, name, range(SAMPLE), tmp_path) == []


@pytest.mark.campaign
@pytest.mark.parametrize("name", GOOD)
def test_thousands_of_changed_texts_end_plainly(
    name: str, server: Server, material: Path, tmp_path: Path
) -> None:
    assert _wrong(server, material, name, range(SAMPLE, CAMPAIGN), tmp_path) == []
