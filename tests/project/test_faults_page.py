"""docs/faults.md: every fault of the table has a test that runs it."""

import re

from tests.project.test_readme import ROOT


def rows() -> list[list[str]]:
    """The cells of each row of the table, without its head."""
    lines = [
        line
        for line in (ROOT / "docs" / "faults.md").read_text().splitlines()
        if line.startswith("|")
    ]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_fault_names_what_happens_how_long_it_takes_what_is_lost_and_its_test() -> None:
    assert len(rows()) >= 8
    for row in rows():
        assert len(row) == 5 and all(row), row
        tests = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", row[-1])
        assert tests and all(
            f"def {name or 'test_'}" in (ROOT / file).read_text() for file, name in tests
        ), row
