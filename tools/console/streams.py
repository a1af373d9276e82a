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


class _GuardedError(io.FileIO):
    """Standard error, which never fails. before: the stream that it took over."""

    before: TextIO

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            self._on_failure(error)
        # as if all had been written: a buffer above would try the rest again
        return memoryview(data).nbytes

    def _on_failure(self, error: OSError) -> None:
        """Answer a failed write."""


class _GuardedOutput(_GuardedError):
    """Standard output. Its first failure is an OSError, unless the output is spared."""

    spared = False
    _has_failed = False
    _has_stopped = False

    def _on_failure(self, error: OSError) -> None:
        """Raise the first failure; of a spared output warn of it, or stop the run if the reader of
        a pipe has gone."""
        is_first = not self._has_failed
        self._has_failed = True
        if not self.spared:
            if is_first:
                error.filename = "standard output"
                raise error
            return
        if error.errno == errno.EPIPE:
            self._stop_run()
        elif is_first:
            error.filename = "standard output"
            print(
                f"warning    {file_error(error)}; training goes on without it",
                file=sys.stderr,
                flush=True,
            )

    def _stop_run(self) -> None:
        """Stop the run as a closed terminal does, once it listens to that."""
        if not self._has_stopped and callable(signal.getsignal(signal.SIGHUP)):
            self._has_stopped = True
            print(
                "note: nobody reads standard output any more: training stops",
                file=sys.stderr,
                flush=True,
            )
            signal.raise_signal(signal.SIGHUP)


def guard_streams() -> None:
    """Take over standard output and standard error. What they cannot encode is escaped; a closed
    one, of standard input too, is /dev/null."""
    # else the next file that is opened would be a standard stream of child processes
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # it takes the lowest free number, which is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    # Python has no object for one that was closed
    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  # for the process
    sys.stdout = _guard(sys.stdout, 1, _GuardedOutput)
    sys.stderr = _guard(sys.stderr, 2, _GuardedError)


def _guard(stream: TextIO | None, number: int, kind: type[_GuardedError]) -> TextIO:
    """Return the stream over a file of this kind; as it is if it is not the process's own stream of
    this number."""
    # the process was started with a closed stream
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    raw_file = _raw_file(stream)
    if type(raw_file) is not io.FileIO or raw_file.fileno() != number:
        stream.reconfigure(errors="backslashreplace")
        return stream
    # what was written so far goes out first
    stream.flush()
    guarded = kind(number, "w", closefd=False)
    guarded.before = stream  # which closes the file when it is no longer referred to
    unbuffered = stream.write_through
    binary: Any = guarded if unbuffered else io.BufferedWriter(guarded)
    return io.TextIOWrapper(
        binary,
        stream.encoding,
        "backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=unbuffered,
    )


def _raw_file(stream: Any) -> Any:
    """Return the file below a stream, which has no buffer in between if Python runs unbuffered."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def spare_output() -> None:
    """Let this command go on if its standard output fails from now on."""
    raw_file = _raw_file(sys.stdout)
    if isinstance(raw_file, _GuardedOutput):
        raw_file.spared = True
