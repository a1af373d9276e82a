"""A run file in the making: its keys with where each value comes from, notes, problems, and its
text."""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.config.run_file import tables_of_a_run
from tools.console.toml import Setting, toml

MEGATRON = "Megatron-LM's default"
DEEPSPEED = "DeepSpeed's default"
NO_RANKS = "the number of ranks is not in the arguments"
NO_HALF = "neither --bf16 nor --fp16"
ASSUMED = frozenset({MEGATRON, DEEPSPEED, NO_RANKS, NO_HALF})
"""Origins of values that the user has not given, which another source may replace."""
WIDTH = 100
WIDEST = 40  # letters before the comment of a key


@dataclass
class Draft:
    """A run file in the making.

    settled: keys that the user gives, which end problems.
    keys: dotted keys in the order in which they are written.
    notes: what differs, or is left to know.
    problems: lines for the user; with one there is no run file.
    missing: what is not there, which counts if there are no other problems.
    fills_auto: a program fills in what DeepSpeed's configuration leaves "auto".
    has_fsdp: FSDP shards what is trained, as accelerate sets it up.
    """

    settled: Mapping[str, Setting] = field(default_factory=dict)
    keys: dict[str, Setting] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    fills_auto: bool = False
    has_fsdp: bool = False

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

    def text(self, notes: list[str], unused: list[str], source: str) -> str:
        """Return the run file: every key with the argument that it comes from, and what was left
        out. unused: arguments that are not used here, as they were given."""
        lines = [
            f"# Made by `megaprec import-args` from {source}. A comment says where a value comes "
            "from."
        ]
        for table in tables_of_a_run():
            rows = dict[str, str]()
            for key, entry in self.keys.items():
                of_table, _, name = key.partition(".")
                if of_table == table:
                    rows[f"{name} = {toml(entry.value)}"] = _printable(entry.origin)
            if rows:
                lines += ["", f"[{table}]"]
            width = min(WIDEST, max(map(len, rows), default=0))
            for row, origin in rows.items():
                lines.append(f"{row:{width}}  # {origin}")
        if notes:
            lines += ["", "# To know:"]
        for note in notes:
            lines += _wrapped(f"- {note}")
        if unused:
            lines += ["", *_wrapped(f"Not used here: {', '.join(unused)}")]
        return "\n".join(lines) + "\n"


def _wrapped(text: str) -> list[str]:
    """Return the lines of a comment; the words of one argument may stand on two."""
    return textwrap.wrap(
        _printable(text),
        WIDTH,
        initial_indent="# ",
        subsequent_indent="#   ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _printable(text: str) -> str:
    """Return a text in which signs that do not print are escaped."""
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text
    )
