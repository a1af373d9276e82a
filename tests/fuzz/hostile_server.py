"""A server that answers as no server should: without an end, not at all, packed, byte by byte."""

import gzip
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

RANGE = re.compile(r"bytes=(\d+)-(\d+)")
SIZE = 5000  # bytes that the server says a file has
PIECE = b"some text of a file\n" * 50_000
PACKED = gzip.compress(bytes(1 << 26), 9) * 64  # 4 GiB
MUTE = 3600.0  # seconds


class Hostile(BaseHTTPRequestHandler):
    """Answers by the conduct that the first part of a path names."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        conduct = CONDUCTS[self.path.split("/")[1]]
        self.close_connection = True
        with suppress(OSError):
            conduct(self)

    def begin(self, status: int, headers: dict[str, str]) -> bool:
        """Send the beginning of an answer; return True if a body belongs to it."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        return self.command == "GET"

    def without_end(self) -> None:
        while True:
            self.wfile.write(PIECE)


def _endless_range(answer: Hostile) -> None:
    """More than was asked for, and the length of it is not told."""
    if answer.command == "HEAD":
        answer.begin(200, {"Content-Length": str(SIZE), "Accept-Ranges": "bytes"})
    elif answer.begin(206, {"Content-Range": f"bytes 0-999/{SIZE}"}):
        answer.without_end()


def _long_range(answer: Hostile) -> None:
    """A length of 2**60 bytes for a range."""
    if answer.command == "HEAD":
        answer.begin(200, {"Content-Length": str(SIZE), "Accept-Ranges": "bytes"})
    elif answer.begin(
        206, {"Content-Range": f"bytes 0-999/{SIZE}", "Content-Length": str(1 << 60)}
    ):
        answer.without_end()


def _endless_file(answer: Hostile) -> None:
    """A file of unknown size."""
    if answer.begin(200, {}):
        answer.without_end()


def _endless_stream(answer: Hostile) -> None:
    """A file that is longer than its size, of a server without ranges."""
    if answer.command == "HEAD":
        answer.begin(200, {"Content-Length": str(SIZE), "Accept-Ranges": "none"})
    elif answer.begin(200, {}):
        answer.without_end()


def _packed_range(answer: Hostile) -> None:
    """A body that unpacks to 4 GiB."""
    if answer.command == "HEAD":
        answer.begin(200, {"Content-Length": str(SIZE), "Accept-Ranges": "bytes"})
        return
    headers = {"Content-Encoding": "gzip", "Content-Length": str(len(PACKED))}
    status = 206 if "Range" in answer.headers else 200
    if answer.begin(status, headers | {"Content-Range": f"bytes 0-{SIZE - 1}/{SIZE}"}):
        answer.wfile.write(PACKED)


def _packed_file(answer: Hostile) -> None:
    headers = {"Content-Encoding": "gzip", "Content-Length": str(len(PACKED))}
    if answer.begin(200, headers | {"Accept-Ranges": "none"}):
        answer.wfile.write(PACKED)


def _mute(answer: Hostile) -> None:
    time.sleep(MUTE)


def _mute_body(answer: Hostile) -> None:
    if answer.begin(200, {"Content-Length": str(SIZE), "Accept-Ranges": "bytes"}):
        time.sleep(MUTE)


def _mute_in_range(answer: Hostile) -> None:
    if answer.command == "HEAD":
        answer.begin(200, {"Content-Length": str(SIZE), "Accept-Ranges": "bytes"})
    elif answer.begin(
        206, {"Content-Range": f"bytes 0-{SIZE - 1}/{SIZE}", "Content-Length": str(SIZE)}
    ):
        answer.wfile.write(b"a" * 100)
        time.sleep(MUTE)


def _trickle(answer: Hostile) -> None:
    """One byte now and then, for an hour."""
    if answer.command == "HEAD":
        answer.begin(200, {"Content-Length": str(SIZE), "Accept-Ranges": "bytes"})
    elif answer.begin(
        206, {"Content-Range": f"bytes 0-{SIZE - 1}/{SIZE}", "Content-Length": str(SIZE)}
    ):
        for _ in range(SIZE):
            answer.wfile.write(b"a")
            time.sleep(1.0)


def _trickling_head(answer: Hostile) -> None:
    answer.wfile.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        answer.wfile.write(b"X")
        time.sleep(1.0)


def _huge_head(answer: Hostile) -> None:
    answer.wfile.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        answer.wfile.write(b"X-Header: " + b"a" * 5000 + b"\r\n")


def _no_size(answer: Hostile) -> None:
    answer.begin(200, {"Content-Length": "many", "Accept-Ranges": "bytes"})


def _huge_size(answer: Hostile) -> None:
    if answer.command == "HEAD":
        answer.begin(200, {"Content-Length": str(1 << 50), "Accept-Ranges": "bytes"})
    elif answer.begin(206, {"Content-Range": "bytes 0-999/5000", "Content-Length": "1000"}):
        answer.wfile.write(b"a" * 1000)


def _other_range(answer: Hostile) -> None:
    """Bytes that lie behind those that were asked for."""
    if answer.command == "HEAD":
        answer.begin(200, {"Content-Length": str(SIZE), "Accept-Ranges": "bytes"})
    elif answer.begin(
        206, {"Content-Range": f"bytes 7-{SIZE - 1}/{SIZE}", "Content-Length": str(SIZE)}
    ):
        answer.wfile.write(b"a" * SIZE)


def _range_without_a_name(answer: Hostile) -> None:
    """A part of a file, perhaps in several parts, that does not say which."""
    if answer.command == "HEAD":
        answer.begin(200, {"Content-Length": str(SIZE), "Accept-Ranges": "bytes"})
    elif answer.begin(206, {"Content-Length": str(SIZE)}):
        answer.wfile.write(b"a" * SIZE)


def _no_http(answer: Hostile) -> None:
    answer.wfile.write(b"\0\xff\x15\x03 not a server of this kind\r\n\r\n" * 10)


def _redirects(answer: Hostile) -> None:
    answer.begin(302, {"Location": answer.path + "a", "Content-Length": "0"})


CONDUCTS: dict[str, Callable[[Hostile], None]] = {
    function.__name__[1:]: function
    for function in (
        _endless_range,
        _long_range,
        _endless_file,
        _endless_stream,
        _packed_range,
        _packed_file,
        _mute,
        _mute_body,
        _mute_in_range,
        _trickle,
        _trickling_head,
        _huge_head,
        _no_size,
        _huge_size,
        _other_range,
        _range_without_a_name,
        _no_http,
        _redirects,
    )
}


@contextmanager
def serving() -> Iterator[str]:
    """Serve all conducts; yield the URL of the server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    server.daemon_threads = True
    server.handle_error = lambda request, client_address: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
