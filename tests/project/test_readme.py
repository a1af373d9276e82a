"""docs/code.md lists all modules in reading order, each importing only those above it; the README's
commands work."""

import ast
import os
import re
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("megaprec", "parallel", "models", "tools")


def listed() -> list[str]:
    return re.findall(
        rf"^\| `((?:{'|'.join(PACKAGES)})/[\w/]+\.py)`",
        (ROOT / "docs" / "code.md").read_text(),
        re.MULTILINE,
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
    present = [
        str(f.relative_to(ROOT))
        for p in PACKAGES
        for f in (ROOT / p).rglob("*.py")
        if f.name != "__init__.py"
    ]
    assert sorted(listed()) == sorted(present)


def test_every_module_imports_only_modules_listed_above_it() -> None:
    place = {
        path.removesuffix(".py").replace("/", "."): number for number, path in enumerate(listed())
    }
    wrong = [
        f"{path} imports {name}, which is listed below it"
        for number, path in enumerate(listed())
        for name in imports(path)
        if place.get(name, -1) >= number
    ]
    assert not wrong, "\n".join(wrong)


def rooms() -> dict[str, set[str]]:
    """The rooms of docs/code.md, and which others each says that it uses."""
    page = (ROOT / "docs" / "code.md").read_text()
    sections = re.findall(r"^## `([\w/]+)`\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return {
        room: set(re.findall(r"`([\w/]+)`", re.search(r"^Uses: (.*)$", text, re.MULTILINE)[1]))  # type: ignore[index]
        for room, text in sections
    }


def room_of(path: str) -> str:
    """The folder of a module. `python -m megaprec` is the command line, wherever Python wants its
    file to lie."""
    return "tools" if path == "megaprec/__main__.py" else str(Path(path).parent)


def test_every_room_uses_exactly_the_rooms_that_the_map_names() -> None:
    present = set(listed())
    used: dict[str, set[str]] = {room: set() for room in rooms()}
    for path in present:
        room = room_of(path)
        files = {name.replace(".", "/") + ".py" for name in imports(path)} & present
        used[room] |= {room_of(file) for file in files} - {room}
    assert used == rooms()


def test_rooms_do_not_use_each_other_in_circles() -> None:
    TopologicalSorter(rooms()).prepare()  # raises CycleError, naming the circle


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
