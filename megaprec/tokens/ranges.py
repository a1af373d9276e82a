"""Files at URLs that are read by ranges of bytes, as samples need them.

A training set may be larger than the disk of a machine. So of `PREFIX.bin` at a URL only the blocks
around the tokens of the samples are read, and the newest of them are kept. All bytes are of one
version of the file: its size and what its server tells of it, a tag or a time, are compared with
each answer.
"""

import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from megaprec.errors import UserError
from megaprec.tokens.places import GONE, file_system, naming_url
from megaprec.url_secrets import masked, without_user_of

CACHE_BLOCK = 1 << 20  # bytes of a block
CACHE_BLOCKS = 128  # blocks that are kept of each file, in each process
READERS = 8  # requests at the same time
DELAYS = (0.5, 1.0, 2.0, 4.0)  # seconds before a request is repeated
# keys of fsspec's details of a file that change with its content; each kind of URL has its own
VERSION_KEYS = (
    "ETag",
    "etag",
    "Last-Modified",
    "LastModified",
    "last_modified",
    "last_commit",
    "updated",
    "mtime",
    "created",
    "generation",
    "md5Hash",
    "Content-MD5",
    "blob_id",
    "VersionId",
)
# answers of HTTP that are no fault of the request
TRY_AGAIN = (408, 425, 429)
FORBIDDEN = 403

Result = TypeVar("Result")


class RemoteFile:
    """A file at a URL in the version that it had when it was opened.

    Raises UserError if it is not there or cannot be read, after requests that fail were repeated a
    few times.
    Attributes: `path`; `size` in bytes; `version`, which changes when the file does; `has_version`:
    its server tells more than the size.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        details = details_of(path)
        if details is None:
            raise UserError.of("data.url_missing", url=path)
        if details.get("size") is None:
            raise UserError.of("data.url_without_size", url=path)
        self.size = int(details["size"])
        self.version = _version(details)
        self.has_version = any(key in details for key in VERSION_KEYS)

    def read(self, start: int, size: int) -> bytes:
        """Return `size` bytes from byte `start` on. Raises UserError if the file has changed."""
        return repeated(self.path, lambda: self._range(start, size))

    def require_ranges(self) -> None:
        """Raise UserError if the server sends whole files only."""
        if self.size:
            repeated(self.path, self._last_byte)

    def _range(self, start: int, size: int) -> bytes:
        """Return `size` bytes from byte `start` on by one request. Raises UserError if the file has
        changed, and an error of any library if the request fails."""
        name = cast(Any, self.path).path
        try:
            content = file_system(self.path).cat_file(name, start, start + size)
        except Exception:
            # of a file that changed other bytes may be asked for than it has
            self._require_unchanged()
            raise
        self._require_unchanged()
        if len(content) != size:
            raise _ShortAnswer(f"it gave {len(content):,} bytes of {size:,}")
        return content

    def _require_unchanged(self) -> None:
        details = _details(self.path)
        if details is None or _version(details) != self.version:
            raise UserError.of("data.url_changed", url=self.path)

    def _last_byte(self) -> None:
        """Read the last byte by a file of fsspec, which does not take a whole file in its place."""
        system = file_system(self.path)
        name = cast(Any, self.path).path
        try:
            with system.open(name, "rb", cache_type="none") as opened:
                opened.seek(self.size - 1)
                content = opened.read(1)
        except ValueError as problem:
            raise UserError.of("data.url_without_ranges", url=self.path) from problem
        if len(content) != 1:
            raise _ShortAnswer("it gave no byte of 1")


class RangeReader:
    """A remote file with a position, from which `read` goes on; nothing of it is kept."""

    def __init__(self, file: RemoteFile) -> None:
        self.file = file
        self._position = 0

    def seek(self, position: int) -> None:
        """Go on at byte `position`."""
        self._position = position

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, fewer at the end of the file."""
        available = max(0, self.file.size - self._position)
        wanted = min(size, available)
        if not wanted:
            return b""
        content = self.file.read(self._position, wanted)
        self._position += wanted
        return content


class RemoteTokens:
    """The token ids of a `.bin` at a URL: an array [n] that is read by slices.

    Blocks of CACHE_BLOCK bytes are read, and the CACHE_BLOCKS that were used last are kept.
    """

    def __init__(self, file: RemoteFile, dtype: np.dtype) -> None:
        self._file = file
        self._dtype = dtype
        self._blocks = OrderedDict[int, bytes]()
        # samples of the next step may be read while others are
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of ids."""
        return self._file.size // self._dtype.itemsize

    def __getitem__(self, span: slice) -> np.ndarray:
        """Return the ids of a slice, in the stored dtype, read-only."""
        start, stop, _ = span.indices(len(self))
        itemsize = self._dtype.itemsize
        content = self._content(start * itemsize, stop * itemsize)
        return np.frombuffer(content, self._dtype)

    def prepare(self, spans: Iterable[tuple[int, int]]) -> None:
        """Read the missing blocks of ids [start, stop) of each span, READERS of them at a time, as
        far as there is room to keep them."""
        itemsize = self._dtype.itemsize
        wanted: set[int] = set()
        for start, stop in spans:
            first_block = start * itemsize // CACHE_BLOCK
            end_block = -(-stop * itemsize // CACHE_BLOCK)  # rounded up
            wanted.update(range(first_block, end_block))
        with self._lock:
            missing = sorted(wanted - self._blocks.keys())[:CACHE_BLOCKS]
            if len(missing) < 2:
                return
            with ThreadPoolExecutor(READERS) as readers:
                for number, content in zip(missing, readers.map(self._read, missing), strict=True):
                    self._keep(number, [content])

    def _content(self, begin: int, end: int) -> bytes:
        """Return bytes [begin, end) of the file."""
        if end <= begin:
            return b""
        first_block = begin // CACHE_BLOCK
        last_block = (end - 1) // CACHE_BLOCK
        with self._lock:
            blocks = [*self._read_blocks(first_block, last_block)]
        skipped = begin - first_block * CACHE_BLOCK
        return b"".join(blocks)[skipped : skipped + end - begin]

    def _read_blocks(self, first: int, last: int) -> Iterator[bytes]:
        """Yield the blocks `first` to `last`. Missing ones that follow each other are read by one
        request."""
        number = first
        while number <= last:
            if number not in self._blocks:
                num_missing = 1  # from this one on
                while number + num_missing <= last and number + num_missing not in self._blocks:
                    num_missing += 1
                yield from self._fetch(number, num_missing)
                number += num_missing
                continue
            self._blocks.move_to_end(number)  # it was used last
            yield self._blocks[number]
            number += 1

    def _fetch(self, first: int, count: int) -> list[bytes]:
        """Return `count` blocks from `first` on, read by one request, and keep them."""
        content = self._read(first, count)
        starts = range(0, len(content), CACHE_BLOCK)
        blocks = [content[start : start + CACHE_BLOCK] for start in starts]
        self._keep(first, blocks)
        return blocks

    def _read(self, first: int, count: int = 1) -> bytes:
        """Return the bytes of `count` blocks from `first` on."""
        begin = first * CACHE_BLOCK
        end = min(begin + count * CACHE_BLOCK, self._file.size)
        return self._file.read(begin, end - begin)

    def _keep(self, first: int, blocks: Sequence[bytes]) -> None:
        """Keep the blocks from `first` on, and forget those that were used longest ago."""
        for number, block in enumerate(blocks, first):
            self._blocks[number] = block
        while len(self._blocks) > CACHE_BLOCKS:
            self._blocks.popitem(last=False)


def is_file_there(path: Path) -> bool:
    """Return True if a file is at a URL; False, and a note on stderr, if it may not be read.

    Raises UserError if its server does not say.
    """
    try:
        details = details_of(path)
    except UserError as error:
        if not _is_forbidden(error.__cause__):
            raise
        # a bucket that may not be listed forbids also the reading of a file that it does not have
        _note(f"{path}: may not be read; taken for absent")
        return False
    return details is not None and details.get("type", "file") == "file"


def details_of(path: Path) -> dict[str, Any] | None:
    """Return what fsspec tells of a remote file; None if there is none. Raises UserError if its
    server does not say."""
    return repeated(path, lambda: _details(path))


def _details(path: Path) -> dict[str, Any] | None:
    """Return what `details_of` does, by one request, which may raise an error of any library."""
    system = file_system(path)
    name = cast(Any, path).path
    # what an earlier listing told may be old
    system.invalidate_cache(name)
    try:
        return system.info(name)
    except FileNotFoundError as problem:
        # fsspec takes any failure of HTTP for a file that is missing; of others the cause says less
        cause = problem.__cause__ if "http" in system.protocol else None
        if cause is None or getattr(cause, "status", None) in GONE:
            return None
        raise cause from None


def version_of(path: Path) -> str:
    """Return what changes when a remote file does, as far as its server tells: its size, time or
    tag. Raises UserError if it is not there."""
    with naming_url(path):
        system = file_system(path)
        # fsspec takes files of HTTP for ones that never change
        if "http" not in system.protocol:
            return str(system.ukey(cast(Any, path).path))
    details = details_of(path)
    if details is None:
        raise UserError.of("data.url_missing", url=path)
    return _version(details)


def _version(details: dict[str, Any]) -> str:
    known = [f"{key}={details[key]}" for key in VERSION_KEYS if key in details]
    return " ".join([f"size={details.get('size')}", *known])


class _ShortAnswer(Exception):
    """An answer that has fewer bytes than were asked for, or more."""


def repeated(path: Path, request: Callable[[], Result]) -> Result:
    """Return the result of a request, which is repeated after each of DELAYS if it fails; each
    failure is told on stderr. Raises UserError after the last."""
    for delay in (*DELAYS, None):
        try:
            return request()
        except UserError:
            raise
        except ImportError as problem:
            raise UserError.of("data.url_package_missing", url=path, problem=problem) from problem
        except Exception as problem:
            reason = " ".join(str(problem).split()) or type(problem).__name__
            reason = without_user_of(path, reason)
            if delay is None or not _may_pass(problem):
                raise UserError.of("data.url_interrupted", url=path, reason=reason) from problem
            _note(f"{path}: {reason}; again in {delay} s")
            time.sleep(delay)
    raise AssertionError("the last request returns or raises")


def _note(line: str) -> None:
    print(f"note       {masked(line)}", file=sys.stderr, flush=True)


def _is_forbidden(problem: BaseException | None) -> bool:
    return isinstance(problem, PermissionError) or getattr(problem, "status", None) == FORBIDDEN


def _may_pass(problem: Exception) -> bool:
    """Return True for a failure that may not happen again."""
    # no library has a common class for credentials that are not there
    if _is_forbidden(problem) or "Credential" in type(problem).__name__:
        return False
    status = getattr(problem, "status", None)
    if not isinstance(status, int):
        return True
    return status >= 500 or status in TRY_AGAIN
