"""The store of local ranks: the launcher serves it at a socket in a folder of this user alone.

torch's own store listens on all interfaces of the machine, and takes what anyone writes into it.
Here the system refuses other users, and what is sent is JSON. Values are texts; everything lies in
memory, and a key that is set again takes no more of it. A rank may have several connections, each
with a thread of the launcher that may wait for a key.

torch's process groups write into a file of the same folder (`file_of_groups`): their threads, which
may outlive Python, must not call it.
"""

import json
import os
import socket
import socketserver
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Condition, Lock, Thread
from typing import Any, BinaryIO

import torch.distributed as dist

from megaprec.scratch import scratch_folder

STORE = "MEGAPREC_STORE"  # the path of the socket, set for ranks
LONGEST_LINE = 1 << 26  # bytes of a request or an answer
LONGEST_PATH = 90  # of a socket; Linux takes 107 bytes, macOS 103
SHORT_FOLDER = "/tmp"  # where the folder of temporary files has a longer path
# beyond the time limit of a request: the server, which knows that nothing has come, answers first
GRACE = 5.0


@contextmanager
def served_store() -> Iterator[Path]:
    """Serve a store to processes of this user within the context; yield the path of its socket."""
    # only this user can enter the folder
    with scratch_folder("store", _parent()) as folder:
        path = Path(folder) / "store"
        with _Server(str(path), _Table()) as server:
            poll = 0.05  # seconds until `server.shutdown` is noticed
            thread = Thread(target=server.serve_forever, args=(poll,), daemon=True, name="store")
            thread.start()
            try:
                yield path
            finally:
                server.shutdown()
                thread.join()


def _parent() -> str:
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= LONGEST_PATH - 30 else SHORT_FOLDER


def file_of_groups(store: dist.Store) -> dist.Store:
    """Return the store by which torch's process groups find each other: a file beside the socket
    of a `LocalStore`; any other store itself.
    """
    if not isinstance(store, LocalStore):
        return store
    # -1: the file is removed with its folder, not by the last rank
    return dist.FileStore(str(store.path.with_name("groups")), -1)


class LocalStore(dist.Store):
    """A connection to the store that `served_store` serves at `path`.

    It has the methods of torch's stores that ranks use. They raise DistNetworkError if the launcher
    is gone, and DistStoreError after the time limit.
    """

    def __init__(self, path: Path, timeout: timedelta = timedelta(minutes=5)) -> None:
        super().__init__()
        self.path = path
        self.set_timeout(timeout)
        self._lock = Lock()  # an answer belongs to the request before it
        self._connection: BinaryIO | None = None
        with self._lock:
            self._open()

    def clone(self) -> "LocalStore":
        """Return a connection of its own to the same store."""
        return LocalStore(self.path, self.timeout)  # pyright: ignore[reportAttributeAccessIssue]

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._ask("set", key, _text(value))

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is set."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys, once all are set."""
        return [value.encode() for value in self._read(keys, self._seconds())]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        self._read(keys, self._seconds() if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys are set."""
        return self._ask("check", keys)

    def add(self, key: str, amount: int) -> int:
        """Add to the number of a key, 0 before the first time; return the sum."""
        return self._ask("add", key, amount)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if its value is the expected one, "" for a key that is not set; return its
        value then.
        """
        return self._ask("compare_set", key, _text(expected), _text(desired)).encode()

    def _read(self, keys: Sequence[str], seconds: float) -> list[str]:
        """Return the values of keys once all are set. Raises DistStoreError if they are not within
        so many seconds."""
        values = self._ask("read", list(keys), seconds, seconds=seconds)
        if values is None:
            raise dist.DistStoreError(f"wait for {', '.join(keys)} timed out after {seconds:.0f} s")
        return values

    def _seconds(self) -> float:
        limit: timedelta = self.timeout  # pyright: ignore[reportAttributeAccessIssue]
        return limit.total_seconds()

    def _ask(self, *request: Any, seconds: float | None = None) -> Any:
        """Send a request, the name of a method of `_Table` and its arguments, and return the
        answer.

        seconds: the time limit; None: that of this connection. Raises DistNetworkError if the
        launcher is gone or does not answer in time.
        """
        limit = self._seconds() if seconds is None else seconds
        with self._lock:
            connection = self._connection or self._open()
            try:
                self._socket.settimeout(limit + GRACE)
                connection.write(_line(request))
                connection.flush()
                answer = connection.readline(LONGEST_LINE)
            except OSError as error:
                self.close()
                raise dist.DistNetworkError(f"store of local ranks: socket: {error}") from error
            except BaseException:
                # a signal came between request and answer, which the next request must not read
                self.close()
                raise
            if not answer:
                self.close()
                raise dist.DistNetworkError("store of local ranks: connection closed")
        return json.loads(answer)

    def _open(self) -> BinaryIO:
        """Connect to the launcher's socket, and return the connection as a file of lines. Raises
        DistNetworkError if nothing answers there."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(self._seconds())
            self._socket.connect(str(self.path))
        except OSError as error:
            self._socket.close()
            raise dist.DistNetworkError(f"store of local ranks: socket: {error}") from error
        self._connection = self._socket.makefile("rwb")  # pyright: ignore[reportAttributeAccessIssue]
        return self._connection  # pyright: ignore[reportReturnType]

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection:
            self._connection.close()
        self._connection = None
        self._socket.close()


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()


def _line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


class _Table:
    """Keys and their values, for which threads may wait."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def read(self, keys: Sequence[str], seconds: float) -> list[str] | None:
        """Return the values once all are there, None if they are not in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.check(keys), seconds):
                return None
            return [self._values[key] for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, "0")) + amount
            self.set(key, str(total))
            return total

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Set a key to `desired` if its value is `expected`, "" for a key that is not set; return
        its value then."""
        with self._changed:
            present = self._values.get(key)
            # as torch's store: of a key that is not set, the answer is what was expected
            if present is None and expected:
                return expected
            if present is None or present == expected:
                self.set(key, desired)
            return self._values[key]


class _Answers(socketserver.StreamRequestHandler):
    """One connection of a rank."""

    def handle(self) -> None:
        """Answer the requests of the connection in turn, each a line of JSON, until it is closed:
        the name of a method of the table and its arguments; the answer is what it returns."""
        server = self.server
        assert isinstance(server, _Server)
        table = server.table
        methods: Mapping[str, Any] = {
            "set": table.set,
            "read": table.read,
            "check": table.check,
            "add": table.add,
            "compare_set": table.compare_set,
        }
        while request := self.rfile.readline(LONGEST_LINE):
            name, *arguments = json.loads(request)
            answer = methods[name](*arguments)
            self.wfile.write(_line(answer))


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 1024  # ranks that connect at the same moment

    def __init__(self, path: str, table: _Table) -> None:
        super().__init__(path, _Answers)
        self.table = table

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a rank that ended has lost its connection, and its end is told."""
