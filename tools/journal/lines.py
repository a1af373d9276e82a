"""A file of lines that is only appended to, on a disk that may be full for a while.

Lines that cannot be written are kept in memory and written before the next ones, in order; a
warning says so once, and a note says when the file is whole again. Only if they cannot be written
at the end are they lost, which is an error.
"""

import os
import sys
from pathlib import Path

from megaprec.durable import file_error, naming_file
from megaprec.errors import UserError


class LinesLost(UserError):
    """Lines of a run's records that could not be written at its end."""


class Lines:
    """The file `path`, opened for appending. Raises OSError if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten = b""
        with naming_file(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def write(self, line: str) -> None:
        """Append a line, or keep it for later."""
        was_waiting = bool(self._unwritten)
        self._unwritten += f"{line}\n".encode()
        error = self._write_waiting()
        if error and not was_waiting:
            effect = "its lines are kept in memory until they can be written; training goes on"
            print(f"warning    {file_error(error)}; {effect}", file=sys.stderr, flush=True)
        if was_waiting and not error:
            print(
                f"note       {self._path}: all lines that were kept in memory are written",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        """Close the file. Raises LinesLost if lines could not be written."""
        error = self._write_waiting()
        os.close(self._descriptor)
        if error:
            lost = self._unwritten.count(b"\n")
            raise LinesLost(f"{file_error(error)}; the last {lost} lines of it are lost")

    def _write_waiting(self) -> OSError | None:
        """Write the lines that wait; return the error that stopped this, if one did."""
        try:
            while self._unwritten:
                with naming_file(self._path):  # on a full disk a part of a line may be written
                    written = os.write(self._descriptor, self._unwritten)
                    self._unwritten = self._unwritten[written:]
        except OSError as error:
            return error
        return None
