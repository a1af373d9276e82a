"""Notes: remarks on how a configuration was understood that the user should know. `--strict` refuses them."""

import sys
from collections.abc import Iterable
from typing import Any

from megaprec.errors import UserError
from tools.training.launch import must_tell


def add_strict(parser: Any) -> None:
    """Add `--strict` to a command."""
    parser.add_argument("--strict", action="store_true", help="refuse a configuration that produces notes")


def tell_notes(notes: Iterable[str], strict: bool) -> None:
    """Print the notes on stderr, on one rank. Raises UserError instead if `strict`."""
    lines = [f"note: {note}" for note in notes]
    if strict and lines:
        raise UserError(*(f"{line} (--strict)" for line in lines))
    if must_tell():
        for line in lines:
            print(line, file=sys.stderr)
