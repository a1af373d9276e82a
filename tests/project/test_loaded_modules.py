"""No program loads what it has no use for: the number of our own modules that an import loads has a
bound. Modules are counted in a fresh process, by `sys.modules`."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tools.commands.table import COMMANDS, GROUPS
from tools.parts.optional_parts import PARTS, part

ROOT = Path(__file__).parents[2]
COUNT = """
import importlib, sys
importlib.import_module({module!r})
ours = [name for name in sys.modules if name.split(".")[0] in {packages!r}]
print(len(ours), "torch" in sys.modules)
"""
PACKAGES = ("megaprec", "parallel", "models", "tools")


def loaded_by(module: str) -> tuple[int, bool]:
    """The number of our modules that the import of one loads, and whether torch is loaded too."""
    code = COUNT.format(module=module, packages=PACKAGES)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    count, torch = done.stdout.split()
    return int(count), torch == "True"


def test_the_command_line_loads_no_command_and_no_torch() -> None:
    assert loaded_by("tools.cli") < (60, True)
    assert not loaded_by("tools.cli")[1]


@pytest.mark.parametrize(
    ("module", "bound"),
    [
        ("megaprec", 5),
        ("megaprec.optim.optimizer", 95),
        ("models.engine.engine", 180),
        ("tools.commands.train", 330),
    ],
)
def test_a_module_loads_few_others(module: str, bound: int) -> None:
    assert loaded_by(module)[0] < bound


def test_every_command_of_the_table_is_there() -> None:
    for name, command in COMMANDS.items():
        assert callable(command.load().add_arguments), name
        assert command.group in GROUPS
        assert command.examples


def test_every_optional_part_is_there_and_is_not_loaded_from_elsewhere() -> None:
    for name, module in PARTS.items():
        assert part(name) is getattr(import_module(module), name)
