"""No two names in one folder differ by case alone, which are one file on many disks of macOS and
Windows."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.convert.test_convert import TARGETS, run
from tests.other_systems import FOR_MEGATRON, write_folder
from tests.project.test_readme import ROOT

FOLDERS = ("megaprec", "parallel", "models", "tools", "tests", "docs", "examples")


def alike(names: Iterable[str]) -> list[list[str]]:
    """The names that are one on such a disk."""
    by_name = dict[str, list[str]]()
    for name in names:
        by_name.setdefault(name.casefold(), []).append(name)
    return [same for same in by_name.values() if len(same) > 1]


def test_names_that_differ_by_case_are_found() -> None:
    assert alike(["a/B", "a/b", "c/b"]) == [["a/B", "a/b"]]


def test_files_of_the_project_do_not_differ_by_case_alone() -> None:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*")]
    assert len(files) > 1000
    assert not alike(str(file) for file in files)


@pytest.mark.slow
@pytest.mark.parametrize("to", TARGETS)
def test_files_that_a_conversion_writes_do_not_differ_by_case_alone(
    to: str, tmp_path: Path
) -> None:
    hf = write_folder(tmp_path / "hf", "mixtral", **FOR_MEGATRON.get("mixtral", {}))
    run(hf, tmp_path / "new", *TARGETS[to])
    files = [str(file.relative_to(tmp_path)) for file in (tmp_path / "new").rglob("*")]
    assert files and not alike(files)
