"""Tables on a terminal are as wide as it; in a pipe or a file as wide as what is in them."""

from rich.console import Console

UNBOUNDED = 1000  # columns


def table_console() -> Console:
    """Stdout for tables and lines."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, UNBOUNDED))
