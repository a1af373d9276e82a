"""Values of a run file: a value with its origin, and a value in TOML's grammar."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


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
        pairs = [f"{_key(key)} = {toml(item)}" for key, item in value.items()]
        return f"{{{', '.join(pairs)}}}"
    return repr(value)


def _key(name: Any) -> str:
    """Return the name of a key, in quotes unless TOML takes it bare."""
    is_bare = isinstance(name, str) and BARE_KEY.fullmatch(name)
    return name if is_bare else toml(str(name))
