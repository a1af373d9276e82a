"""A file of lines that is only appended to, on a disk that may be full for a while.

Lines that cannot be written are kept in memory and written before the next ones, in order; a
warning says so once, and a note says when the file is whole again. Only if they cannot be written
at the end are they lost, which is an error.
"""

import os
import sys
from pathlib import Path

from megaprec.durable import file_error, named
from megaprec.errors import UserError


class LinesLost(UserError):
    """Lines of a run's records that could not be written at its end."""


class Lines:
    """The file `path`, opened for appending. Raises OSError if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept = b""
        with named(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def write(self, line: str) -> None:
        """Append a line, or keep it for later."""
        waiting = bool(self._kept)
        self._kept += f"{line}\n".encode()
        error = self._write_kept()
        if error and not waiting:
            later = "its lines are kept in memory until they can be written; training goes on"
            print(f"warning    {file_error(error)}; {later}", file=sys.stderr, flush=True)
        if waiting and not error:
            print(
                f"note       {self._path}: all lines that were kept in memory are written",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        """Close the file. Raises LinesLost if lines could not be written."""
        error = self._write_kept()
        os.close(self._descriptor)
        if error:
            lost = self._kept.count(b"\n")
            raise LinesLost(f"{file_error(error)}; the last {lost} lines of it are lost")

    def _write_kept(self) -> OSError | None:
        try:
            while self._kept:
                with named(self._path):
                    self._kept = self._kept[os.write(self._descriptor, self._kept) :]
        except OSError as error:
            return error
        return None
