"""A server of files that answers ranges of bytes, and fails as it is told to."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass
class Conduct:
    """The behaviour of a server, which a test changes while it runs.

    has_ranges: it answers ranges, and not always the whole file.
    has_tags: it tells a tag of each file, the digest of its content.
    fails: requests of ranges that are still to be answered by `status`.
    together: ranges are sent once so many of them were asked for at one time, or after a minute.
    cut: bytes that each range lacks at its end.
    forbidden: endings of names that may not be read.
    unavailable: requests of any kind that are still to be answered by `status`.
    tells_size: it says how long a whole file is.
    signed: it sends requests on to a URL with this query, which it then refuses.
    ranges: name and first byte of each range that was sent.
    at_once: the most ranges that were asked for at one time.
    """

    has_ranges: bool = True
    has_tags: bool = True
    fails: int = 0
    status: int = 503
    together: int = 1
    cut: int = 0
    forbidden: tuple[str, ...] = ()
    unavailable: int = 0
    tells_size: bool = True
    signed: str = ""
    ranges: list[tuple[str, int]] = field(default_factory=list)
    at_once: int = 0
    _asked: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a range that is asked for, and wait for others as `together` says."""
        with self._changed:
            self._asked += 1
            self.at_once = max(self.at_once, self._asked)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.at_once >= self.together, 60)
        try:
            yield
        finally:
            with self._changed:
                self._asked -= 1


class FileHandler(BaseHTTPRequestHandler):
    """Answers one request for a file of `folder`."""

    def __init__(self, folder: Path, conduct: Conduct, *connection: Any) -> None:
        self.folder = folder
        self.conduct = conduct
        # which answers
        super().__init__(*connection)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, has_body: bool) -> None:
        conduct = self.conduct
        file = self.folder / self.path.partition("?")[0].lstrip("/")
        if conduct.unavailable:
            conduct.unavailable -= 1
            self._status(conduct.status)
        elif conduct.signed:
            self._send_on()
        elif self.path.endswith(conduct.forbidden or ("//",)):
            self._status(403)
        elif not file.is_file():
            self._status(404)
        else:
            self._send(file, has_body)

    def _send(self, file: Path, has_body: bool) -> None:
        conduct = self.conduct
        content = file.read_bytes()
        asked = RANGE.fullmatch(self.headers.get("Range", ""))
        if asked and conduct.fails:
            conduct.fails -= 1
            self._status(conduct.status)
            return
        is_ranged = asked is not None and conduct.has_ranges
        self.send_response(206 if is_ranged else 200)
        if conduct.has_tags:
            self.send_header("ETag", f'"{hash(content)}"')
        if asked and is_ranged:
            start, last = int(asked[1]), int(asked[2])
            with conduct.answering():
                conduct.ranges.append((file.name, start))
            self.send_header("Content-Range", f"bytes {start}-{last}/{len(content)}")
            content = content[start : last + 1 - conduct.cut]
        if conduct.tells_size:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if has_body:
            self.wfile.write(content)

    def _send_on(self) -> None:
        if "?" in self.path:
            self._status(self.conduct.status)
            return
        self.send_response(302)
        self.send_header("Location", f"{self.path}?{self.conduct.signed}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _status(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def serving(folder: Path, conduct: Conduct) -> Iterator[str]:
    """Serve the files of a folder; yield the URL of the folder."""
    handler = partial(FileHandler, folder, conduct)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
