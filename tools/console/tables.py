"""Tables as wide as the terminal, or of at most 120 columns in a pipe or a file."""

from rich.console import Console
from rich.table import Table

PIPE_COLUMNS = 120


def table_console() -> Console:
    """Return a console on stdout for tables."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_COLUMNS)


def print_table(table: Table) -> None:
    """Print a table on stdout. A word that is wider than its column goes on in the next line:
    nothing is cut off."""
    # rich would cut words off with an ellipsis
    for column in table.columns:
        column.overflow = "fold"
        column.no_wrap = False
    table_console().print(table)
