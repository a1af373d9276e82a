"""Modules and rooms import each other without circles and docs/code.md and docs/modules.md show them
as they are; the README's commands work."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.modules_page import (
    ROOT,
    imports,
    in_reading_order,
    page,
    rooms_in_order,
    uses_of_rooms,
)


def test_no_module_imports_one_that_imports_it_in_turn() -> None:
    in_reading_order(imports())  # raises CycleError, naming the circle


def test_rooms_do_not_use_each_other_in_circles() -> None:
    in_reading_order(uses_of_rooms())


def test_the_page_of_the_modules_has_every_module_with_its_own_sentence() -> None:
    written = (ROOT / "docs" / "modules.md").read_text(encoding="utf-8")
    assert written == page(), "python -m tests.project.modules_page > docs/modules.md"


def test_the_map_names_every_room_in_reading_order() -> None:
    text = (ROOT / "docs" / "code.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `([\w/]+)`", text, re.MULTILINE)
    assert named == rooms_in_order()


def test_the_map_names_a_folder_of_laws_for_each_room() -> None:
    text = (ROOT / "docs" / "code.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/]+)` \| .* \| `(tests/[\w/]+)` \|$", text, re.MULTILINE)
    assert [room for room, _ in rows] == rooms_in_order()
    for _, laws in rows:
        assert list((ROOT / laws).glob("test_*.py")), laws


SMALLER = {
    'preset = "llama-demo" ': 'preset = "llama-demo"\nlayers = 2\nhidden = 64\n',
    "[data]\n": "[data]\nvocab_size = 512\nmax_chars = 60_000\n",
    "steps = 1000\n": "steps = 3\n",
    "global_batch = 32\n": "global_batch = 8\n",
    "seq_length = 256\n": "seq_length = 32\n",
}
"""What the README's run file says, and what is run in its place."""
SHORTER = {"train.steps=2000": "train.steps=2", "parity run.toml": "parity run.toml --steps 1"}
"""The same for its commands."""


def blocks(language: str) -> str:
    """All code of the README in one language."""
    return "\n".join(
        re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    )


def commands() -> list[str]:
    """Every command but `make`, whose targets are what runs this test."""
    lines = [line.partition("#")[0].strip() for line in blocks("sh").splitlines()]
    inline = re.findall(r"`(torchrun [^`]+)`", (ROOT / "README.md").read_text())
    return [line for line in lines if line and not line.startswith("make")] + inline


def smaller(run: str) -> str:
    """The README's run file with a smaller model, less text, and fewer and smaller steps."""
    for printed, tried in SMALLER.items():
        assert printed in run
        run = run.replace(printed, tried)
    return run


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 250


@pytest.mark.slow
def test_every_command_of_the_readme_works_in_the_order_given(forks: Path, tmp_path: Path) -> None:
    for package in ("parallel", "models"):
        shutil.copytree(
            ROOT / package,
            tmp_path / "my_text" / package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "run.toml").write_text(smaller(blocks("toml")))
    # of torchrun's ranks
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHON_EXEC": str(forks / "python"),
    }
    installed = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    assert len(commands()) >= 8
    for command in commands():
        short = command
        for printed, run in SHORTER.items():
            short = short.replace(printed, run)
        fresh = command.startswith(("torchrun", "megaprec keys"))  # in interpreters of their own
        environment["PATH"] = installed if fresh else f"{forks}{os.pathsep}{installed}"
        done = subprocess.run(
            short,
            shell=True,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert done.returncode == 0, f"{short}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip(), f"{short} said nothing"
