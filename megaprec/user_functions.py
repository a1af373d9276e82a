"""Functions of the user's own code that a run file names: `"my_model.py:build"` or
`"my_package.module:build"`."""

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from megaprec.errors import UserError

# packages that come before folders of the user's of the same name
OURS = (
    "megaprec",
    "models",
    "parallel",
    "tools",
)


def find_function(key: str, named: str) -> Any:
    """Return the function that the value `named` of `key` names. Runs the module. Raises UserError
    if there is none."""
    location, colon, name = named.rpartition(":")
    if not colon or not name:
        raise UserError.of("megaprec.function_form", key=key, named=named)
    try:
        if location.endswith(".py"):
            module = _load_file(Path(location))
        else:
            module = importlib.import_module(location)
    except Exception as error:
        hint = _hint_of_taken_name(location, name) if isinstance(error, ModuleNotFoundError) else ""
        kind = type(error).__name__
        raise UserError.of(
            "megaprec.function_not_imported",
            key=key,
            named=named,
            location=location,
            kind=kind,
            error=error,
            hint=hint,
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError.of(
            "megaprec.function_missing", key=key, named=named, location=location, name=name
        )
    return function


def _hint_of_taken_name(module: str, function: str) -> str:
    """Return a hint to append to a message if the module's package has the name of one of
    megaprec's own."""
    package = module.partition(".")[0]
    if module.endswith(".py") or package not in OURS:
        return ""
    file = f"{module.replace('.', '/')}.py:{function}"
    return (
        f'; megaprec has a package "{package}" itself, which hides yours: give the file, "{file}"'
    )


@cache
def _load_file(path: Path) -> ModuleType:
    """Return the module in a file, executed once per process."""
    spec = importlib.util.spec_from_file_location(f"own_model_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look the module up here
    spec.loader.exec_module(module)
    return module
