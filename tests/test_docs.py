"""The commands on a page of docs/ work, in the order given, in an empty folder."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_readme import ROOT

PAGES = ["data.md"]  # those whose commands bring everything that they need


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One in which `megaprec` is the code of this checkout."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "megaprec"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tools.cli "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_works_in_the_order_given(
    page: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    shell = shutil.which("bash")
    assert shell and len(blocks) >= 5
    (tmp_path / "here").mkdir()
    for block in blocks:
        done = subprocess.run(
            [shell, "-euo", "pipefail", "-c", block],
            cwd=tmp_path / "here",
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip(), f"{block}\nsaid nothing"
