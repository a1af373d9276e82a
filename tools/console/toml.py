"""Values of a run file: a value with its origin, and a value in TOML's grammar."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel


@dataclass(frozen=True)
class Setting:
    """A value and its origin."""

    value: Any
    origin: str


def toml(value: Any) -> str:
    """Return a value in TOML's grammar, or as Python shows it if TOML has no form for it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml(item) for item in value)}]"
    if isinstance(value, BaseModel):
        return toml(value.model_dump(exclude_defaults=True))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {toml(item)}' for key, item in value.items())}}}"
    return repr(value)
