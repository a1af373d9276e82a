"""Standard output and standard error that may fail: a full disk, a reader that has gone, a stream
that was closed.

A command whose output is lost ends with one line. To a run its output is not worth the training:
metrics.jsonl has all of it. So it goes on, with a warning on stderr; if the reader of a pipe is
gone, it ends as if its terminal were closed. What cannot be written on stderr is dropped, for there
is no other place to tell it.
"""

import errno
import io
import os
import signal
import sys
from typing import Any, TextIO

from megaprec.durable import file_error


class _Error(io.FileIO):
    """Standard error, which never fails. before: the stream that it took over."""

    before: TextIO

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            self._failed(error)
        return memoryview(data).nbytes

    def _failed(self, error: OSError) -> None:
        """Answer a failed write."""


class _Output(_Error):
    """Standard output. Its first failure is an OSError, unless the output is spared."""

    spared = False
    _told = _left = False

    def _failed(self, error: OSError) -> None:
        first = not self._told
        self._told = True
        if first and not self.spared:
            error.filename = "standard output"
            raise error
        if not self.spared:
            return
        if error.errno == errno.EPIPE:
            self._leave()
        elif first:
            error.filename = "standard output"
            print(
                f"warning    {file_error(error)}; training goes on without it",
                file=sys.stderr,
                flush=True,
            )

    def _leave(self) -> None:
        """Stop the run as a closed terminal does, once it listens to that."""
        if not self._left and callable(signal.getsignal(signal.SIGHUP)):
            self._left = True
            print(
                "note: nobody reads standard output any more: training stops",
                file=sys.stderr,
                flush=True,
            )
            signal.raise_signal(signal.SIGHUP)


def guard_streams() -> None:
    """Take over standard output and standard error. What they cannot encode is escaped; a closed
    one is /dev/null."""
    for number in range(
        3
    ):  # else the next file that is opened would be a standard stream of child processes
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = _guarded(sys.stdout, 1, _Output)
    sys.stderr = _guarded(sys.stderr, 2, _Error)


def _guarded(stream: TextIO | None, number: int, kind: type[_Error]) -> TextIO:
    """Return the stream over a file of this kind; as it is if it is not the process's own stream of
    this number."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    raw = _raw(stream)
    if type(raw) is not io.FileIO or raw.fileno() != number:
        stream.reconfigure(errors="backslashreplace")
        return stream
    stream.flush()
    own = kind(number, "w", closefd=False)
    through = stream.write_through
    lines = stream.line_buffering
    own.before = stream  # which closes the file when it is no longer referred to
    below: Any = own if through else io.BufferedWriter(own)
    return io.TextIOWrapper(
        below, stream.encoding, "backslashreplace", line_buffering=lines, write_through=through
    )


def _raw(stream: Any) -> Any:
    """Return the file below a stream, which has no buffer in between if Python runs unbuffered."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def spare_output() -> None:
    """Let this command go on if its standard output fails from now on."""
    raw = _raw(sys.stdout)
    if isinstance(raw, _Output):
        raw.spared = True
