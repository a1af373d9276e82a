"""The bounds of requests to a server of `http://` and `https://`: bytes and time.

The package fsspec makes the requests, by a session of aiohttp that is set up here. A server may
send more than it was asked for, without an end, packed so that a megabyte becomes a gigabyte, or
nothing.
"""

import asyncio
import re
from typing import Any

from megaprec.tokens.bounds import MAX_ITEM

SILENCE = 20.0  # seconds without a byte
ANSWER = 20.0  # seconds until an answer begins, and for the first bytes of a body
LEAST_SPEED = 1 << 15  # bytes a second, of a body that is read whole
RANGE = re.compile(r"bytes=(\d+)-(\d+)")
CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
PARTIAL_CONTENT = 206


class HttpProblem(OSError):
    """An answer beyond the bounds. Its text is the reason."""


def client_options() -> dict[str, Any]:
    """Return the options of a session of aiohttp, those of FSSPEC_HTTP included."""
    import aiohttp  # noqa: PLC0415 (optional)
    from fsspec.config import conf  # noqa: PLC0415 (optional)

    options: dict[str, Any] = {
        # no limit in all: a text is read as fast as it is tokenized
        "timeout": aiohttp.ClientTimeout(total=None, sock_connect=ANSWER, sock_read=SILENCE),
        # what a server packs, though it was asked not to, is no text
        "auto_decompress": False,
        "middlewares": (_bounded,),
    }
    set_by_user = conf.get("http", {}).get("client_kwargs", {})
    return options | set_by_user


async def _bounded(request: Any, handler: Any) -> Any:
    """Return the answer to a request, whose body has bounds if it is read whole. A middleware of
    aiohttp."""
    try:
        response = await asyncio.wait_for(handler(request), ANSWER)
    except TimeoutError as problem:
        raise HttpProblem(f"the server has not answered within {ANSWER:.0f} s") from problem
    asked = RANGE.fullmatch(request.headers.get("Range", ""))
    most = MAX_ITEM
    if asked:
        first, last = map(int, asked.groups())
        most = last - first + 1
        if response.status == PARTIAL_CONTENT:
            _require_range(response, first, last)
    whole: bytes | None = None

    async def read() -> bytes:
        nonlocal whole
        if whole is None:
            whole = await _body(response, most)
            # where the methods that decode a body look for it
            response._body = whole
        return whole

    response.read = read
    return response


def _require_range(response: Any, first: int, last: int) -> None:
    """Raise HttpProblem unless an answer says that it has bytes from `first` on, up to `last` at
    most: others would be read in their place."""
    told = response.headers.get("Content-Range", "")
    sent = CONTENT_RANGE.fullmatch(told)
    if sent is None or int(sent[1]) != first or int(sent[2]) > last:
        response.close()
        instead = f"{told[:80]!r} as the range that it sends" if told else "no range that it sends"
        raise HttpProblem(f"the server tells {instead}, when asked for bytes {first}-{last}")


async def _body(response: Any, most: int) -> bytes:
    """Return the body of an answer. Raises HttpProblem for one of more than `most` bytes, and for
    one that comes too slowly."""
    seconds = ANSWER + most / LEAST_SPEED
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            while piece := await response.content.read(min(1 << 16, most + 1)):
                body += piece
                if len(body) > most:
                    response.close()
                    raise HttpProblem(f"the server sends more than the {most:,} bytes of an answer")
    except TimeoutError as problem:
        response.close()
        waited = f"no byte within {SILENCE:.0f} s, or not all within {seconds:.0f} s"
        raise HttpProblem(f"the server sends too slowly: {waited}") from problem
    response.release()
    return bytes(body)
