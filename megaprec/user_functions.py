"""Functions of the user's own code that a run file names: `"my_model.py:build"` or `"my_package.module:build"`."""

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from megaprec.errors import UserError


def find_function(key: str, named: str) -> Any:
    """Return the function that the value `named` of `key` names. Runs the module. Raises UserError if there is none."""
    where, colon, name = named.rpartition(":")
    if not colon or not name:
        raise UserError(f'{key} = "{named}": give "file.py:function" or "package.module:function"')
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:
        raise UserError(f'{key} = "{named}": {where} cannot be imported: {type(error).__name__}: {error}') from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f'{key} = "{named}": {where} has no function "{name}"')
    return function


@cache
def _from_file(path: Path) -> ModuleType:
    """Return the module in a file, executed once per process."""
    spec = importlib.util.spec_from_file_location(f"own_model_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look the module up here
    spec.loader.exec_module(module)
    return module
