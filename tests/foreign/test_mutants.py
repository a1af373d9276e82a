"""A changed file of another system is read rightly, refused or noted: never read as something else
in silence."""

import ast
import random
from pathlib import Path

import pytest

from megaprec.errors import UserError
from tests.foreign.expected import TABLE
from tests.foreign.mutants import MUTATIONS
from tools.commands.precision import PrecisionOfFile, read_precision

FOLDER = Path(__file__).parent / "files"
FILES = sorted(entry.file for entry in TABLE if entry.file.endswith(".py") and not entry.refused)
SAMPLE = 80
PROOF = 300
CAMPAIGN = 2000


def read(path: Path) -> PrecisionOfFile | UserError:
    try:
        return read_precision(path)
    except UserError as error:
        return error


def decided(found: PrecisionOfFile) -> tuple[object, dict[str, object]]:
    return found.plan, {key: entry.value for key, entry in found.settings.items()}


def without_place(notes: tuple[str, ...]) -> list[str]:
    return sorted(note.partition(": ")[2] for note in notes)


def check(seed: int, folder: Path) -> str:
    """Makes mutant number `seed`; a line about what is wrong with how it is read, empty if nothing
    is."""
    rng = random.Random(seed)
    file = rng.choice(FILES)
    mutate = rng.choice(MUTATIONS)
    before = read_precision(FOLDER / file)
    made = mutate(ast.parse((FOLDER / file).read_text()), rng)
    if made is None or any(
        "not handed on" in note for note in before.notes
    ):  # what changes may be left out already
        return ""
    path = folder / file
    path.write_text(made[0])
    after = read(path)
    label = f"seed {seed}, {mutate.__name__} of {file}"
    if made[1] in ("same", "kept"):
        if isinstance(after, UserError):
            return "" if made[1] == "kept" else f"{label}: refused: {after}"
        is_noted = without_place(after.notes) != without_place(before.notes)
        if decided(after) == decided(before) or (made[1] == "kept" and is_noted):
            return ""
        return f"{label}: read as another configuration"
    if isinstance(after, UserError) or without_place(after.notes) != without_place(before.notes):
        return ""
    return f"{label}: read in silence"


def test_a_sample_of_changed_files_is_read_rightly_refused_or_noted(tmp_path: Path) -> None:
    assert [line for seed in range(SAMPLE) if (line := check(seed, tmp_path))] == []


@pytest.mark.slow
def test_hundreds_of_changed_files_are_read_rightly_refused_or_noted(tmp_path: Path) -> None:
    assert [line for seed in range(SAMPLE, PROOF) if (line := check(seed, tmp_path))] == []


@pytest.mark.campaign
def test_two_thousand_changed_files_are_read_rightly_refused_or_noted(tmp_path: Path) -> None:
    assert [
        line for seed in range(PROOF, SAMPLE + CAMPAIGN) if (line := check(seed, tmp_path))
    ] == []
