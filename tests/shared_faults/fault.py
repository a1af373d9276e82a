"""A fault that all layouts share, and how it is put into a process.

It is in the one process that layouts are compared with as well as in the layouts, so that only what
knows better finds it: a law of a test, another program, mathematics.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.planting import put

Make = Callable[[Any], Any]
OURS = ("megaprec.", "parallel.", "models.", "tools.", "tests.")


@dataclass(frozen=True)
class Fault:
    """A fault.

    what: is wrong, in a line.
    plant: puts the fault into this process.
    family: of `tests.families.CASES`, whose model shows it.
    words: of a run file, besides the model's, which it takes to show.
    tests: files of fast tests that are there for it.
    """

    what: str
    plant: Callable[[], None]
    family: str
    tests: tuple[str, ...]
    words: tuple[str, ...] = field(default=())


def change(owner: Any, name: str, make: Make) -> Callable[[], None]:
    """Return what puts make(what was there) in the place of an attribute, and of a function of a
    module wherever it has been imported."""
    assert name in vars(owner), f"{owner} has no {name}"

    def plant() -> None:
        inner = vars(owner)[name]
        is_static = isinstance(inner, staticmethod)
        made = make(inner.__func__ if is_static else inner)
        put(owner, name, staticmethod(made) if is_static else made)
        if isinstance(owner, type(sys)):
            _put_into_importers(name, inner, made)

    return plant


def _put_into_importers(name: str, before: Any, after: Any) -> None:
    """Put a function into the modules of ours that have imported it by its name."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(OURS) and vars(module).get(name) is before:
            setattr(module, name, after)


def both(*plants: Callable[[], None]) -> Callable[[], None]:
    """Return what plants several changes."""

    def plant() -> None:
        for one in plants:
            one()

    return plant
