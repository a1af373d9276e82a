"""The switch between the code and its mutants, in a tree that has all of them.

A session of pytest chooses a mutant for a test. The processes that the test starts find the choice
in the folder that `MUTANTS_SWITCH` names, and note there which switches they reach while none is
on.
"""

import os
from pathlib import Path

FOLDER = "MUTANTS_SWITCH"
CHOSEN = "chosen"
REACHED = "reached"
NONE = -1

_process = 0
# kept, because a law may replace the environment
_folder = ""
_chosen = NONE
_noted = set[int]()


def on(number: int) -> bool:
    """Return True if this mutant is the chosen one."""
    if _process != os.getpid():
        _read()
    if _chosen == NONE and number not in _noted:
        _note(number)
    return number == _chosen


def choose(number: int) -> None:
    """Switch one mutant on, or `NONE`, in this process and in those that are started from now
    on."""
    folder = Path(os.environ[FOLDER])
    written = folder / f"{CHOSEN}.new"
    written.write_text(str(number))
    written.replace(folder / CHOSEN)
    (folder / REACHED).write_text("")
    _read()


def reached() -> frozenset[int]:
    """Return the switches that were reached since the last choice, which was `NONE`, or since the
    session began."""
    file = Path(os.environ[FOLDER]) / REACHED
    lines = file.read_text().splitlines() if file.exists() else []
    return frozenset(map(int, lines))


def _read() -> None:
    global _process, _folder, _chosen
    _process = os.getpid()
    _folder = os.environ.get(FOLDER, _folder)
    _noted.clear()
    file = Path(_folder) / CHOSEN
    _chosen = int(file.read_text()) if _folder and file.exists() else NONE


def _note(number: int) -> None:
    _noted.add(number)
    if _folder:
        with (Path(_folder) / REACHED).open("a") as file:
            file.write(f"{number}\n")
