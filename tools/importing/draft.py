"""A run file in the making: its keys with where each value comes from, notes, and problems."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.console.toml import Setting

MEGATRON = "Megatron-LM's default"
DEEPSPEED = "DeepSpeed's default"
NO_RANKS = "the number of ranks is not in the arguments"
NO_HALF = "neither --bf16 nor --fp16"
ASSUMED = frozenset({MEGATRON, DEEPSPEED, NO_RANKS, NO_HALF})
"""Origins of values that the user has not given, which another source may replace."""


@dataclass
class Draft:
    """keys: dotted keys in the order in which they are written. settled: keys that the user gives,
    which end problems.

    notes: what differs, or is left to know. problems: lines for the user; with one there is no run
    file. missing: problems with what is not there, which count unless it may stand in a word that
    is not known.
    """

    settled: Mapping[str, Setting]
    keys: dict[str, Setting] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def put(self, key: str, value: Any, origin: str) -> None:
        """Set a key."""
        self.keys[key] = Setting(value, origin)

    def given(self, key: str) -> bool:
        """Return True if the arguments give a value to a key."""
        return key in self.keys and self.keys[key].origin not in ASSUMED

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value that the user or the arguments give to a key."""
        entry = self.settled.get(key) or self.keys.get(key)
        return entry.value if entry is not None else default

    def needs(self, key: str) -> bool:
        """Return True if the user has not given a key, so that a problem with its value counts."""
        return key not in self.settled
