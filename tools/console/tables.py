"""Tables as wide as the terminal, or as wide as their contents in a pipe or a file."""

from rich.console import Console

UNBOUNDED = 1000  # columns


def table_console() -> Console:
    """Return a console on stdout for tables and lines."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, UNBOUNDED))
