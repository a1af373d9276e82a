"""Tables as wide as the terminal, or of at most 120 columns in a pipe or a file."""

from rich.console import Console
from rich.table import Table

from tools.console.progress_bar import console_of

PIPE_COLUMNS = 120


def table_console() -> Console:
    """Return a console on stdout for tables."""
    console = console_of()
    return console if console.is_terminal else console_of(width=PIPE_COLUMNS)


def print_table(table: Table) -> None:
    """Print a table on stdout. A word that is wider than its column goes on in the next line:
    nothing is cut off."""
    # rich would cut words off with an ellipsis
    for column in table.columns:
        column.overflow = "fold"
        column.no_wrap = False
    table_console().print(table)
