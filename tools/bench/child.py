"""A measurement as a process of its own: its lines are known as it prints them, it has a time
limit, and when it ends nothing of it is left.

Ranks are processes of their own, in sessions of their own, and would keep the memory of a GPU after
whoever started them was killed. So each process that descends from a measurement carries a mark in
its environment, and all that carry it are ended together (/proc, on Linux).
"""

import os
import select
import signal
import subprocess
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO
from uuid import uuid4

MARK = "MEGAPREC_MEASUREMENT"
PROCESSES = Path("/proc")
READ = 1 << 16  # bytes at a time
MOST_ERRORS = 1 << 18  # bytes of stderr that are kept, the last ones
LOOK = 0.2  # seconds between two looks at a process that prints nothing
ROUNDS = 50  # of ending what is left: who is being ended may be starting another


class Child:
    """A command and the lines that it prints.

    log: takes what it has written to stderr when it has ended.
    code: its exit code; None until it has ended, and if it was ended.
    last_words: the last line of stderr.
    """

    def __init__(self, command: Sequence[str], folder: Path, log: IO[bytes]) -> None:
        self.code: int | None = None
        self.last_words = ""
        self._command = command
        self._folder = folder
        self._log = log

    def lines(self, seconds: float, silence: float = float("inf")) -> Generator[str, None, None]:
        """Yield the lines of stdout. The process is ended after so many seconds, after so many
        without a line, and when the caller wants no more lines."""
        mark = uuid4().hex
        with TemporaryFile() as errors:
            process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, MARK: mark},
                start_new_session=True,  # a Ctrl-C reaches the caller alone, who ends it
            )
            assert process.stdout is not None
            try:
                yield from _read_lines(process, process.stdout.fileno(), seconds, silence)
                self.code = process.poll()
            finally:
                end_all(mark)
                process.wait()
                process.stdout.close()
                self._keep(errors)

    def _keep(self, errors: IO[bytes]) -> None:
        """Copy the end of stderr to the log."""
        length = errors.seek(0, os.SEEK_END)
        errors.seek(max(0, length - MOST_ERRORS))
        written = errors.read()
        self._log.write(written)
        self._log.flush()
        self.last_words = _last_line(written)

    def reason(self, seconds: float) -> str:
        """Return why the process gives no more lines, in one line. It has ended, or was ended after
        `seconds`."""
        if self.code is None:
            return f"not done after {seconds:.0f} s"
        if self.code < 0:
            name = signal.Signals(-self.code).name
            return f"{name} ended it: {self.last_words}".removesuffix(": ")
        return self.last_words or "it printed no record"


def _read_lines(
    process: subprocess.Popen[bytes], pipe: int, seconds: float, silence: float
) -> Iterator[str]:
    """Yield the lines that a process writes to `pipe` until it has ended, or the time is over:
    `seconds` in all, or `silence` seconds without a line."""
    now = time.monotonic()
    end = now + seconds
    heard = now
    rest = b""
    while now < min(end, heard + silence):
        # what it has started may keep the pipe open for ever
        has_ended = process.poll() is not None
        readable, _, _ = select.select([pipe], [], [], 0.0 if has_ended else LOOK)
        now = time.monotonic()
        if not readable:
            if has_ended:
                return
            continue
        read = os.read(pipe, READ)
        if not read:
            # stdout is closed, the process goes on or is about to end
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, min(end, heard + silence) - now))
            return
        heard = now
        *lines, rest = (rest + read).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")


def end_all(mark: str) -> None:
    """End every process with this mark."""
    for _ in range(ROUNDS):
        marked = list(_pids_with(f"{MARK}={mark}".encode()))
        if not marked:
            return
        for pid in marked:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK / 4)


def _pids_with(entry: bytes) -> Iterator[int]:
    """Yield the ids of the processes whose environment has this entry, NAME=value. One that has
    ended has no environment."""
    for folder in PROCESSES.iterdir():
        if not folder.name.isdecimal():
            continue
        # of another user, or gone meanwhile
        with suppress(OSError):
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def _last_line(text: bytes) -> str:
    lines = [line for line in text.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
