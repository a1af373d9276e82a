"""Worker processes that tokenize chunks of text in parallel, with the results in the order of the
chunks.

Chunks depend only on the text, so the tokens do not depend on the number of workers. At most two
chunks per worker are in flight, which bounds the memory.
"""

import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from megaprec.data import encoding
from megaprec.data.encoding import Encoded, encode_pieces, read_answer, send_request
from megaprec.data.tokenizer import Tokenizer
from megaprec.errors import UserError

PROGRAM = Path(encoding.__file__)


@dataclass(frozen=True)
class Chunk:
    """Pieces of text that are encoded together. ends[i]: True if a document ends after texts[i]."""

    texts: list[str]
    ends: list[bool]


def encode_chunks(
    chunks: Iterable[Chunk], tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[Chunk, Encoded]]:
    """Yield each chunk and its ids, in order. With one worker, this process encodes; more workers
    are new processes.

    Raises UserError if a worker is killed, and for a text that has what no token is for.
    """
    if workers == 1:
        yield from (
            (chunk, encode_pieces(tokenizer.encode, chunk.texts, chunk.ends, tokenizer.eos))
            for chunk in chunks
        )
        return
    with _processes(tokenizer, workers) as idle, ThreadPoolExecutor(workers) as threads:

        def ask(chunk: Chunk) -> Encoded:
            process = idle.get()
            try:
                return _exchange(process, chunk)
            except ValueError as problem:
                raise UserError(f"{tokenizer.path} cannot encode the text: {problem}") from problem
            finally:
                idle.put(process)

        waiting: deque[tuple[Chunk, Future[Encoded]]] = deque()
        for chunk in chunks:
            waiting.append((chunk, threads.submit(ask, chunk)))
            if len(waiting) >= 2 * workers:
                first, answer = waiting.popleft()
                yield first, answer.result()
        yield from ((chunk, answer.result()) for chunk, answer in waiting)


def _exchange(process: subprocess.Popen[bytes], chunk: Chunk) -> Encoded:
    assert process.stdin and process.stdout
    try:
        send_request(process.stdin, chunk.texts, chunk.ends)
        return read_answer(process.stdout)
    except (BrokenPipeError, EOFError) as error:
        code = process.wait()
        raise UserError(
            "a process that turns text into tokens ended with code "
            f"{code}{' (killed, perhaps because memory ran out)' if code == -9 else ''}: try fewer "
            "workers"
        ) from error


@contextmanager
def _processes(
    tokenizer: Tokenizer, workers: int
) -> Iterator["SimpleQueue[subprocess.Popen[bytes]]"]:
    """Context manager: a queue of started workers. They end with the block, or with this process,
    however it ends."""
    command = [
        sys.executable,
        "-P",
        str(PROGRAM),
        str(tokenizer.path),
        "" if tokenizer.eos is None else str(tokenizer.eos),
    ]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(workers)
    ]
    idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
    try:
        for process in started:
            idle.put(process)
        yield idle
    finally:
        for process in started:
            process.kill()
            process.communicate()
