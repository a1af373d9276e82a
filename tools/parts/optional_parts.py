"""The table of parts that few uses need: a part's module is imported when the part is called.

A module that offers such a part imports it by name from here. So a plain run loads neither the
planner nor converters, and knows both.
"""

from importlib import import_module
from typing import Any

PARTS = {
    "note_failure": "tools.training.stopping",
}
"""The modules in which functions are defined, by the function's name."""


def part(name: str) -> Any:
    """Return the function of a name in PARTS; import its module if that has not been done."""
    return getattr(import_module(PARTS[name]), name)
