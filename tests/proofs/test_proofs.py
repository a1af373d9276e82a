"""A card says what was run and what came out, and is made of its record alone."""

from pathlib import Path

import pytest

from tests.proofs import pages, record
from tests.proofs.pages import PAGES, card, index, verdict
from tests.proofs.proofs import PROOFS, Proof
from tests.proofs.record import RECORDS, read, run_command, run_proof, save

ONE = Proof(
    "one", "One", "A promise.", "a number", ("echo said && exit 3", "echo more"), ("echo short",)
)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records are written to a folder of the test."""
    monkeypatch.setattr(record, "RECORDS", tmp_path)
    return tmp_path


def test_the_pages_are_made_of_the_records() -> None:
    found = {page.name: page.read_text() for page in PAGES.glob("*.md")}
    expected = {f"{proof.name}.md": card(proof) for proof in PROOFS} | {"README.md": index()}
    assert found == expected, "python -m tests.proofs --pages"


def test_every_record_is_of_a_proof() -> None:
    names = {proof.name for proof in PROOFS}
    assert {file.stem for file in RECORDS.glob("*.json")} <= names


def test_a_record_comes_back_as_it_was(elsewhere: Path) -> None:
    made = run_proof(ONE, sample=True)
    save(made)
    assert read("one") == made
    assert verdict(made) == "proven"
    assert made.seen[0].lines == ["short"]


def test_a_command_that_fails_is_a_wrong_proof_and_ends_it(elsewhere: Path) -> None:
    made = run_proof(ONE)
    save(made)
    assert verdict(made) == "wrong"
    assert [(printed.code, printed.lines) for printed in made.seen] == [(3, ["said"])]
    text = card(ONE)
    assert "**wrong**" in text and "Exit code 3." in text


def test_what_was_not_run_is_not_tried(elsewhere: Path) -> None:
    assert verdict(read("one")) == "not tried"
    assert "**not tried**" in pages.card(ONE)


def test_no_path_of_the_machine_and_no_colour_is_kept() -> None:
    printed = run_command(f"printf '\\033[31m{record.ROOT}/a\\033[0m\\n\\n'", 9)
    assert printed.lines == ["./a"]


@pytest.mark.slow
@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.name)
def test_the_short_form_of_a_proof_is_proven(proof: Proof) -> None:
    made = run_proof(proof, sample=True)
    assert made.proven, made.seen
