"""The fast laws that a mutant is tried by, in the order in which they are tried."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

PARITY = "tests/models/test_parity.py"
# laws of training as a whole, whatever was changed
OF_ALL = ("tests/optim", "tests/training")
MAP = "docs/code.md"


@cache
def laws_of(root: Path, path: str) -> tuple[list[str], list[str]]:
    """Return the files of laws that are the first to try for a change of the file `path`, and those
    that come after them.

    First come those that are named like its module, those that import it, and parity of layouts;
    then the folder of its room's laws, and those of the optimizer and of runs.
    """
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    near = [law for law in _files(root, ["tests"]) if _imports(root / law, module)]
    of_room = _files(root, [folder_of(root, path)])
    named = [law for law in of_room if Path(path).stem in Path(law).stem]
    first = list(dict.fromkeys([*named, *near, *_files(root, [PARITY])]))
    others = list(dict.fromkeys([*of_room, *_files(root, OF_ALL)]))
    return first, [law for law in others if law not in first]


def folder_of(root: Path, path: str) -> str:
    """Return the folder of the laws of the room that the file `path` is in, as the map of the code
    says."""
    rows = re.findall(r"^\| `([^`]+)` \|.*\| `(tests/[^`]+)` \|$", (root / MAP).read_text(), re.M)
    rooms = dict(rows)
    here = Path(path).parent
    while here.as_posix() not in rooms:
        if here == here.parent:
            raise KeyError(f"{MAP} has no row of {path}")
        here = here.parent
    return rooms[here.as_posix()]


def _files(root: Path, places: Sequence[str]) -> list[str]:
    """Return the files of laws in some folders, or that are named themselves, in order."""
    found: list[str] = []
    for place in places:
        there = root / place
        files = sorted(there.rglob("test_*.py")) if there.is_dir() else [there]
        found += [file.relative_to(root).as_posix() for file in files if file.exists()]
    return list(dict.fromkeys(found))


def _imports(law: Path, module: str) -> bool:
    """Return True if a file of laws imports a module by its full name."""
    package, _, name = module.rpartition(".")
    text = law.read_text()
    whole = rf"^(from {re.escape(module)} import|import {re.escape(module)}\b)"
    part = rf"^from {re.escape(package)} import [^\n]*\b{re.escape(name)}\b"
    return bool(re.search(whole, text, re.M) or re.search(part, text, re.M))
