"""The call stack of a rank's main thread, for a thread that watches it: where it is, and if it
waits for other ranks.

Python's `faulthandler` writes the stack down: C code that makes no object, holds none, and keeps
the interpreter's lock. To walk the frames of another thread is not safe. In Python 3.11
`frame.f_back` makes a frame object, which may start the collector of garbage. A finalizer that it
runs may release the lock, as those of tensors do; the other thread goes on and leaves the frame
that is being made an object of. The process then dies of SIGSEGV, or reads what is there instead.
"""

import faulthandler
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from threading import main_thread
from typing import BinaryIO, NamedTuple

OURS = f"{Path(__file__).resolve().parents[2]}/"
WAITING = (
    "megaprec/comm/waiting.py",
    "megaprec/comm/gloo.py",
    "megaprec/comm/axis.py",
    "parallel/pipeline/p2p.py",
    "torch/distributed/",
)
OUTSIDE = ("torch/", "lib/", "<", *WAITING)  # no code of the model or of the run
LINES = 3  # of a summary

THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')
# as faulthandler writes what is not ASCII: \x, \u or \U, and the digits of the code point
ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


class RunningCall(NamedTuple):
    """A call under way. file: its `short_path`. line: the line that runs now."""

    file: str
    line: int
    function: str


def short_path(path: str) -> str:
    """Return a short path: relative to the repository, or from the name of the library on."""
    if path.startswith(OURS) and ".venv" not in path:
        return path[len(OURS) :]
    # a library's own path says more than where it is installed
    _, folder, library = path.rpartition("site-packages/")
    if folder:
        return library
    if path.startswith((sys.base_prefix, "<frozen")):
        return f"lib/{Path(path).name}"
    return path


def main_calls() -> list[RunningCall]:
    """Return the calls of the main thread, innermost first, a hundred at most; none if the system
    has no memory."""
    try:
        with _in_memory() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            dump = file.read().decode(errors="replace")
            return calls_of(dump, main_thread().ident or 0)
    except OSError:
        return []


def failed_calls(error: BaseException) -> list[RunningCall]:
    """Return the calls in which an exception was raised, innermost first. The calls of an exception
    that it was raised from come before its own."""
    raised: list[RunningCall] = []
    cause: BaseException | None = error
    while cause is not None:
        frames = traceback.extract_tb(cause.__traceback__)
        calls = [
            RunningCall(short_path(frame.filename), frame.lineno or 0, frame.name)
            for frame in frames
        ]
        raised = [*reversed(calls), *raised]
        cause = cause.__cause__
    return raised


def _in_memory() -> BinaryIO:
    """Open a file without a name. On Linux it is memory: a write never waits for a disk."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("call stack"), "w+b")
    return tempfile.TemporaryFile()


def calls_of(dump: str, thread: int) -> list[RunningCall]:
    """Return the calls of a thread, by its ident, from what faulthandler has written about all
    threads."""
    stack_calls: list[RunningCall] = []
    of_thread = False  # True while the lines are about this thread
    for text_line in dump.splitlines():
        if heading := THREAD.match(text_line):
            of_thread = int(heading[1], 16) == thread
        match = CALL.fullmatch(text_line)
        if match and of_thread:
            file_path, number, function = match.groups()
            file = short_path(_unescape(file_path))
            stack_calls.append(RunningCall(file, int(number), _unescape(function)))
    return stack_calls


def _unescape(text: str) -> str:
    """Return a text in which faulthandler escaped what is not ASCII."""

    def character(escape: re.Match[str]) -> str:
        of_two, of_four, of_eight = escape.groups()  # digits, in one of the three forms
        digits = of_two or of_four or of_eight
        return chr(int(digits, 16))

    return ESCAPED.sub(character, text)


def summarize_calls(stack_calls: Sequence[RunningCall]) -> tuple[bool, list[str]]:
    """Return True if a thread with these calls waits for a transfer between ranks, and up to LINES
    of its innermost lines outside of libraries.

    stack_calls: innermost first.
    """
    waits = False
    lines: list[str] = []
    for stack_call in stack_calls:
        # what is further in than the first line is what that line waits for
        if not lines and stack_call.file.startswith(WAITING):
            waits = True
        if not stack_call.file.startswith(OUTSIDE):
            lines.append(f"{stack_call.file}:{stack_call.line} {stack_call.function}")
        if len(lines) == LINES:
            break
    return waits, lines
