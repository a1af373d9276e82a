"""docs/precision.md is what the command makes, and every test that it links to is there."""

import ast
from pathlib import Path

import pytest

from tools.cli import main
from tools.precision_table import FEATURES, PAGE, table

TESTS = Path(__file__).parent


def test_the_page_is_the_one_that_is_made() -> None:
    assert PAGE.read_text(encoding="utf-8") == table(), "run python -m tools.precision_table"


def test_the_command_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["precision", "table"]) == 0
    assert capsys.readouterr().out == table()


@pytest.mark.parametrize("proof", sorted({proof for feature in FEATURES for proof in feature.proofs}))
def test_every_linked_test_is_there(proof: str) -> None:
    file, _, function = proof.partition("::")
    tree = ast.parse((TESTS / f"{file}.py").read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_no_feature_is_listed_twice_or_without_proof() -> None:
    names = [feature.name for feature in FEATURES]
    assert len(set(names)) == len(names)
    assert all(feature.proofs for feature in FEATURES)
