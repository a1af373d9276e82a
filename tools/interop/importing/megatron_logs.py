"""The arguments that Megatron-LM printed into a log."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaprec.errors import UserError

# As Megatron-LM's training.arguments._print_args prints them: names of 48 letters and more have no
# dots.
PRINTED = re.compile(r"-{5,} arguments -{5,}(.*?)-{5,} end of arguments -{5,}", re.DOTALL)
PRINTED_ROW = re.compile(r"(?:(\w+) \.+|(\w{48,}) ) (.*)")
FEWEST_PRINTED = 20  # rows from which a file is taken for a log without the lines around them


def has_printed(text: str) -> bool:
    """Return True if the arguments are in a text, with the lines around them."""
    return PRINTED.search(text) is not None


def printed_arguments(path: Path, text: str) -> dict[str, Any]:
    """Return the arguments in a log; empty if the text is none. Raises UserError for several that
    differ."""
    printed = PRINTED.findall(text)
    first, *others = [dict(_rows(part)) for part in printed or [text]]
    if not printed and len(first) < FEWEST_PRINTED:
        return {}
    if any(table != first for table in others):
        raise UserError.of("import.several_printed", path=path, count=1 + len(others))
    return first


def _rows(text: str) -> Iterator[tuple[str, Any]]:
    """Yield names and values; those that are none of Python's stay texts."""
    for name, long_name, value in PRINTED_ROW.findall(text):
        written = value.strip()
        try:
            yield name or long_name, ast.literal_eval(written)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            yield name or long_name, written
