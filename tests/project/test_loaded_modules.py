"""No program loads what it has no use for: the number of our own modules that an import loads has a
bound. Modules are counted in a fresh process, by `sys.modules`."""

import os
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from megaprec.front_door import exports_of
from models import optional_parts as parts_of_models
from tools.commands.table import COMMANDS, GROUPS
from tools.parts import optional_parts as parts_of_runs

ROOT = Path(__file__).parents[2]
COUNT = """
import importlib, sys
importlib.import_module({module!r})
ours = [name for name in sys.modules if name.split(".")[0] in {packages!r}]
print(*ours, *(["torch"] if "torch" in sys.modules else []))
"""
PACKAGES = ("megaprec", "parallel", "models", "tools")


@cache
def modules_of(module: str) -> tuple[str, ...]:
    """Our modules that the import of one loads, and torch if it is loaded too."""
    code = COUNT.format(module=module, packages=PACKAGES)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(done.stdout.split())


def test_the_command_line_loads_no_command_and_no_torch() -> None:
    assert len(modules_of("tools.cli")) < 60
    assert "torch" not in modules_of("tools.cli")


@pytest.mark.parametrize(
    ("module", "bound"),
    [
        ("megaprec", 5),
        ("megaprec.optim.optimizer", 97),
        ("models.engine.engine", 182),
        ("tools.commands.train", 334),
        ("tools.training.rank", 326),
    ],
)
def test_a_module_loads_few_others(module: str, bound: int) -> None:
    assert len(set(modules_of(module)) - {"torch"}) < bound


def test_every_command_of_the_table_is_there() -> None:
    for name, command in COMMANDS.items():
        assert callable(command.load().add_arguments), name
        assert command.group in GROUPS
        assert command.examples


def test_every_optional_part_is_there_and_is_called() -> None:
    for door, package in ((parts_of_runs, "tools"), (parts_of_models, "models")):
        text = "".join(file.read_text() for file in (ROOT / package).rglob("*.py"))
        for name, (module, name_there) in exports_of(Path(str(door.__file__))).items():
            assert getattr(door, name) is getattr(import_module(module), name_there)
            called = f"optional_parts.{name}" in text or f'_kind("{name}")' in text
            assert called, name


def test_a_plain_run_loads_no_part_that_it_does_not_ask_for() -> None:
    left_out = ("tools.analysis", "tools.convert", "tools.interop", "megaprec.dialects")
    left_out += ("models.recurrent.mamba_mixer", "models.feed_forward.moe", "megaprec.text.readers")
    assert not [name for name in modules_of("tools.commands.train") if name.startswith(left_out)]
