"""Front doors of packages: what they export is loaded when it is asked for.

Importing any module of a package imports its front door first. A door that loaded all that it
exports would load the optimizer, checkpoints and pipelines for whoever wants one small module.
"""

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

HOME = Path(__file__).resolve().parents[1]
PACKAGES = ("megaprec", "parallel", "models", "tools")


def front_door(door: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of the module `door`, which imports what it exports
    under `if TYPE_CHECKING:`, where type checkers, editors and this function read it.

    Only a package's `__init__.py` and the `optional_parts.py` of tools and models are doors.
    """

    @cache
    def places() -> dict[str, tuple[str, str]]:
        """Return the module and the name there of each exported name; the file is read once."""
        file = Path(str(sys.modules[door].__file__))
        return exports_of(file)

    def load(name: str) -> Any:
        """Return what the door exports under a name. Raises AttributeError as any module does."""
        # Python itself asks modules for names such as __path__: no door is read for them
        if name.startswith("__") or name not in places():
            raise AttributeError(f"module {door!r} has no attribute {name!r}")
        module_name, name_there = places()[name]
        module = _imported(module_name)
        return getattr(module, name_there)

    def names() -> list[str]:
        """Return all names of the door, loaded or not."""
        loaded_names = vars(sys.modules[door])
        return sorted({*loaded_names, *places()})

    return load, names


def _imported(module: str) -> ModuleType:
    """Import a module of ours.

    Raises ImportError, with the file, if another package has the name of one of ours: folders of a
    user's program are called `parallel` and `models` too, and they come first.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing_module = error.name or ""
        package, _, _ = missing_module.partition(".")
        package_file = getattr(sys.modules.get(package), "__file__", None)
        if package not in PACKAGES or not package_file:
            raise
        # it is our own package, which lacks the module
        if Path(package_file).resolve().parent == HOME / package:
            raise
        problem = (
            f"{package_file} stands in the place of megaprec's own package {package}: rename it"
        )
        raise ImportError(problem) from error


def exports_of(file: Path) -> dict[str, tuple[str, str]]:
    """Return what the door `file` exports: module and name there, by exported name."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    exports = dict[str, tuple[str, str]]()
    for block in tree.body:
        if not isinstance(block, ast.If) or ast.unparse(block.test) != "TYPE_CHECKING":
            continue
        for statement in block.body:
            assert isinstance(statement, ast.ImportFrom) and statement.module
            for alias in statement.names:
                exported_name = alias.asname or alias.name
                exports[exported_name] = (statement.module, alias.name)
    return exports
