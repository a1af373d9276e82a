"""Consoles of rich, which are terminals only where the stream is one."""

import sys

from rich.console import Console


def console_of(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return the console of stdout or stderr. FORCE_COLOR, which notebooks set for all that they
    start, makes no terminal of a pipe: bars that are drawn over themselves would fill it.

    width: in columns; None: the terminal's.
    """
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=width, force_terminal=stream.isatty())
