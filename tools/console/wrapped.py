"""Lines broken at spaces, so that a terminal breaks no number. In a pipe they stay as they are."""

import sys
import textwrap
from shutil import get_terminal_size
from typing import TextIO

from megaprec.url_secrets import masked

INDENT = 11  # columns of the words that begin the lines of a run, such as "memory     "
NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"


def say(text: str, file: TextIO | None = None) -> None:
    """Print lines on `file` (default: stdout), without secrets of URLs, each broken to the width of
    the terminal if it is one."""
    stream = file or sys.stdout
    text = masked(text)
    if stream.isatty():
        columns = get_terminal_size().columns
        lines = [wrapped(text_line, columns) for text_line in text.split("\n")]
        text = "\n".join(lines)
    print(text, file=stream, flush=True)


def wrapped(text_line: str, max_width: int, indent: int = INDENT) -> str:
    """Return a line broken at spaces; what follows is indented. Longer words, such as paths, stay
    whole."""
    if len(text_line) <= max_width:
        return text_line
    lines = textwrap.wrap(
        text_line,
        max_width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)


def wrapped_parts(text_line: str, max_width: int) -> str:
    """Return a line whose parts are separated by two spaces, broken between parts only as long as
    they fit."""
    if len(text_line) <= max_width:
        return text_line
    line_parts: list[str] = []
    for part in text_line.split("  "):
        fits = len(part) <= max_width - INDENT
        # held together until the line is broken
        line_parts.append(part.replace(" ", NO_BREAK_SPACE) if fits else part)
    broken = wrapped("  ".join(line_parts), max_width)
    return broken.replace(NO_BREAK_SPACE, " ")


def last_parts_that_fit(line_parts: list[str], max_width: int) -> str:
    """Return the last of the `line_parts` that fit into `max_width` columns, separated by two
    spaces."""
    shown = list(line_parts)
    while shown and len("  ".join(shown)) > max_width:
        shown.pop(0)
    return "  ".join(shown)
