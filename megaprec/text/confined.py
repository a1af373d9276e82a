"""Work that a process of its own does, with limits of memory and time (`confined_program`): reading
what may crash a library, or take it without an end."""

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Generator
from pathlib import Path
from typing import Any, BinaryIO, Self

from megaprec.text import confined_program
from megaprec.text.confined_program import OUT_OF_MEMORY, SIZE

PROGRAM = Path(confined_program.__file__)
MEMORY = 2 << 30  # bytes more than the process has after its start
LONGEST = 1 << 30  # bytes of an answer
# the usual allocator of Arrow reserves more than it needs; texts are to be the same in each build
SETTINGS = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
}


class ConfinedError(Exception):
    """Work that could not be done. Its text says why: the error that was raised, or how the process
    ended."""


class Confined:
    """The work of a module, in a process that is started when it is first asked, and again after it
    has ended.

    module: the file of the module.
    """

    def __init__(self, module: Path) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Any, seconds: float, file: BinaryIO | None = None) -> Generator[Any]:
        """Yield the answers to a request.

        seconds: of processor time for each answer.
        file: open, of which the process may ask for bytes.
        Raises ConfinedError.
        """
        process = self._started()
        is_whole = False
        try:
            _send(process, json.dumps([seconds, request], ensure_ascii=False))
            while True:
                match _receive(process):
                    case ["value", value]:
                        yield value
                    case ["read", start, size]:
                        assert file is not None  # else nothing is asked for
                        file.seek(start)
                        _send_bytes(process, file.read(size))
                    case ["end"]:
                        is_whole = True
                        return
                    case [_, reason]:  # "fault"
                        is_whole = True
                        raise ConfinedError(reason)
        except (EOFError, BrokenPipeError) as error:
            raise ConfinedError(_end_of(process, seconds)) from error
        finally:
            # what is left of the answers would be taken for those to the next request
            if not is_whole:
                self.close()

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            _end(self._process)
            self._process = None

    def _started(self) -> subprocess.Popen[bytes]:
        """Return the process, which is started if there is none."""
        if self._process is None:
            # -P: the folder of the program is not searched, whose modules would hide others
            command = [sys.executable, "-P", str(PROGRAM), str(self._module), str(MEMORY)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | SETTINGS,
            )
            weakref.finalize(self, _end, self._process)
        return self._process


class Helpers:
    """The processes that help to read files, each started when it is needed; they end with the
    context."""

    def __init__(self) -> None:
        self._by_module: dict[Path, Confined] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for helper in self._by_module.values():
            helper.close()

    def of(self, module: Path) -> Confined:
        """Return the helper that does the work of a module."""
        return self._by_module.setdefault(module, Confined(module))


def _send(process: subprocess.Popen[bytes], text: str) -> None:
    _send_bytes(process, text.encode("utf-8", "surrogatepass"))


def _send_bytes(process: subprocess.Popen[bytes], content: bytes) -> None:
    assert process.stdin
    process.stdin.write(SIZE.pack(len(content)) + content)
    process.stdin.flush()


def _receive(process: subprocess.Popen[bytes]) -> Any:
    """Return the next answer. Raises EOFError if there is none, or what is no answer."""
    assert process.stdout
    head = process.stdout.read(SIZE.size)
    if len(head) < SIZE.size:
        raise EOFError
    (size,) = SIZE.unpack(head)
    if size > LONGEST:
        raise EOFError
    content = process.stdout.read(size)
    if not content or len(content) < size:
        raise EOFError
    return json.loads(content.decode("utf-8", "surrogatepass"))


def _end_of(process: subprocess.Popen[bytes], seconds: float) -> str:
    """Return how a process came to its end."""
    code = process.wait()
    if code == -signal.SIGPROF:
        return f"it takes more than {seconds:.0f} s of processor time"
    if code == -signal.SIGKILL:
        return "the process that reads it was killed, perhaps by a system without memory"
    if code == OUT_OF_MEMORY:
        return f"it takes more than {MEMORY >> 20:,} MiB of memory"
    if code == -signal.SIGABRT:
        return f"its library aborts, perhaps for want of {MEMORY >> 20:,} MiB of memory"
    if code < 0:
        return f"its library crashes ({signal.Signals(-code).name})"
    return f"the process that reads it ended with code {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
