"""docs/code.md lists all modules in reading order, each importing only those above it; the README's commands work."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("megaprec", "parallel", "models", "tools")


def listed() -> list[str]:
    return re.findall(
        rf"^\| `((?:{'|'.join(PACKAGES)})/[\w/]+\.py)`", (ROOT / "docs" / "code.md").read_text(), re.MULTILINE
    )


def imports(path: str) -> set[str]:
    """Modules that the file imports: for `from a import b`, both a and a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_page_of_the_code_lists_every_module_once() -> None:
    present = [str(f.relative_to(ROOT)) for p in PACKAGES for f in (ROOT / p).rglob("*.py") if f.name != "__init__.py"]
    assert sorted(listed()) == sorted(present)


def test_every_module_imports_only_modules_listed_above_it() -> None:
    place = {path.removesuffix(".py").replace("/", "."): number for number, path in enumerate(listed())}
    wrong = [
        f"{path} imports {name}, which is listed below it"
        for number, path in enumerate(listed())
        for name in imports(path)
        if place.get(name, -1) >= number
    ]
    assert not wrong, "\n".join(wrong)


def blocks(language: str) -> str:
    """All code of the README in one language."""
    return "\n".join(re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))


def commands() -> list[str]:
    """Every command but `make`, whose targets are what runs this test."""
    lines = [line.partition("#")[0].strip() for line in blocks("sh").splitlines()]
    inline = re.findall(r"`(torchrun [^`]+)`", (ROOT / "README.md").read_text())
    return [line for line in lines if line and not line.startswith("make")] + inline


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 250


@pytest.mark.slow
def test_every_command_of_the_readme_works_in_the_order_given(tmp_path: Path) -> None:
    for package in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / package, tmp_path / "my_text" / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "run.toml").write_text(blocks("toml").replace("steps = 1000", "steps = 3"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    assert len(commands()) >= 8
    for command in commands():
        short = command.replace("train.steps=2000", "train.steps=2")
        done = subprocess.run(
            short, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{short}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip(), f"{short} said nothing"
