"""A separate program that does work for another process, with limits of memory and time.

    python -P confined_program.py MODULE MEMORY

MODULE is a file that has a class `Work`, whose method `answers(request, read_bytes)` yields values.
Libraries that read files of unknown origin crash, run without an end or take all memory; here they
take this process with them, and the other one says why.

Requests on standard input and answers on standard output are frames: u64 B, and B bytes of JSON.

    request    [seconds of processor time for each answer, value]
    answers    ["value", value] ..., then ["end"] or ["fault", reason]
    question   ["read", first byte, number of bytes]; the next frame is the bytes themselves

This module imports no other module of the project, so that it starts fast; it loads `limits.py` by
its path.
"""

import importlib.util
import json
import os
import runpy
import signal
import struct
import sys
from pathlib import Path
from typing import IO, Any

limit_process = runpy.run_path(str(Path(__file__).with_name("limits.py")))["limit_process"]
SIZE = struct.Struct("<Q")
OUT_OF_MEMORY = 78  # exit code


class FrameChannel:
    """The frames of a process. requests, answers: streams of bytes."""

    def __init__(self, requests: IO[bytes], answers: IO[bytes]) -> None:
        self._requests = requests
        self._answers = answers

    def receive(self) -> bytes:
        """Return the content of the next frame. Raises EOFError at the end."""
        (size,) = SIZE.unpack(self._read(SIZE.size))
        return self._read(size)

    def send(self, value: Any) -> None:
        """Send a value as JSON; it may have halves of surrogates."""
        content = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
        self._answers.write(SIZE.pack(len(content)) + content)
        self._answers.flush()

    def read_bytes(self, start: int, size: int) -> bytes:
        """Ask for `size` bytes from byte `start` of the other process's file on; return them."""
        self.send(["read", start, size])
        return self.receive()

    def _read(self, size: int) -> bytes:
        content = self._requests.read(size)
        if len(content) < size:
            raise EOFError
        return content


def set_seconds(seconds: float) -> None:
    """End this process by SIGPROF after so much more processor time, whatever it is doing then."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def load(module: str) -> Any:
    """Return the object that does the work of the module in a file."""
    spec = importlib.util.spec_from_file_location("confined_work", module)
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded.Work()


def serve(work: Any, channel: FrameChannel) -> None:
    """Answer requests until there are no more. Raises EOFError then.

    The limit of processor time runs while an answer is made, not while it is sent.
    """
    while True:
        seconds, request = json.loads(channel.receive().decode("utf-8", "surrogatepass"))
        set_seconds(seconds)
        try:
            for value in work.answers(request, channel.read_bytes):
                set_seconds(0)  # the other process may take its time
                channel.send(["value", value])
                set_seconds(seconds)
            last = ["end"]
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except (EOFError, BrokenPipeError):
            raise
        except Exception as problem:  # whatever a file can provoke is the file's fault
            reason = " ".join(str(problem).split())[:600]
            last = ["fault", reason or type(problem).__name__]
        set_seconds(0)
        channel.send(last)


def main(module: str, memory: str) -> None:
    """Do the work of the module in a file until there are no more requests."""
    # the main process handles it and closes this one's input
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    work = load(module)
    limit_process(int(memory))
    try:
        serve(work, FrameChannel(sys.stdin.buffer, answers))
    except (EOFError, BrokenPipeError):
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
