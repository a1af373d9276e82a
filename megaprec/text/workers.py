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
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from signal import SIGKILL

from megaprec.errors import UserError
from megaprec.text import encoding
from megaprec.text.encoding import Encoded, Marks, encode_pieces, read_answer, send_request
from megaprec.text.tokenizer import Tokenizer

PROGRAM = Path(encoding.__file__)


@dataclass(frozen=True)
class Chunk:
    """Pieces of text that are encoded together.

    ends: True for each text after which a document ends.
    marks: of each text; empty: all of all texts counts in the loss.
    """

    texts: list[str]
    ends: list[bool]
    marks: list[Marks] = field(default_factory=list)


def encode_chunks(
    chunks: Iterable[Chunk],
    tokenizer: Tokenizer,
    workers: int,
) -> Iterator[tuple[Chunk, Encoded]]:
    """Yield each chunk and its ids, in order.

    With one worker, this process encodes; more workers are new processes.
    Raises UserError if a worker is killed, and for a text that has what no token is for.
    """
    if workers == 1:
        for chunk in chunks:
            encoded = encode_pieces(
                tokenizer.encode,
                chunk.texts,
                chunk.ends,
                tokenizer.eos,
                chunk.marks,
                tokenizer.encode_rendered if chunk.marks else None,
            )
            yield chunk, encoded
        return
    # a thread for each worker, which waits for the answer: the work is done in the other process
    with _start_workers(tokenizer, workers) as idle, ThreadPoolExecutor(workers) as threads:

        def encode(chunk: Chunk) -> Encoded:
            """Return the ids of a chunk, from the next worker that is idle."""
            process = idle.get()
            try:
                return _exchange(process, chunk)
            except ValueError as problem:
                raise UserError.of(
                    "data.text_not_encodable", path=tokenizer.path, problem=problem
                ) from problem
            finally:
                idle.put(process)

        waiting: deque[tuple[Chunk, Future[Encoded]]] = deque()
        for chunk in chunks:
            waiting.append((chunk, threads.submit(encode, chunk)))
            # at most two chunks a worker, so that memory is bounded
            if len(waiting) >= 2 * workers:
                first_chunk, answer = waiting.popleft()
                yield first_chunk, answer.result()
        for chunk, answer in waiting:
            yield chunk, answer.result()


def _exchange(process: subprocess.Popen[bytes], chunk: Chunk) -> Encoded:
    """Return the ids of a chunk, encoded by a worker."""
    assert process.stdin and process.stdout
    try:
        send_request(process.stdin, chunk.texts, chunk.ends, chunk.marks)
        return read_answer(process.stdout)
    except (BrokenPipeError, EOFError) as error:
        # it has closed its ends of both pipes, so it has ended
        code = process.wait()
        killed = " (killed, perhaps because memory ran out)" if code == -SIGKILL else ""
        raise UserError.of("data.worker_died", exit_code=code, killed=killed) from error


@contextmanager
def _start_workers(
    tokenizer: Tokenizer, workers: int
) -> Iterator["SimpleQueue[subprocess.Popen[bytes]]"]:
    """Yield a queue of started workers.

    They end with the block, or with this process, however it ends.
    """
    eos = "" if tokenizer.eos is None else str(tokenizer.eos)
    # -P: the folder of the program is not searched, whose modules would hide others of their names
    command = [sys.executable, "-P", str(PROGRAM), str(tokenizer.path), eos]
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
