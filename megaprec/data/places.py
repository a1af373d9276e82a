"""Places of text and token files: paths of this machine, and URLs (`s3://`, `gs://`, `hf://`,
`https://`, ...), which the package fsspec lists and reads with the credentials that it finds.

A file at a URL is a `UPath` of universal_pathlib. It has the methods of `Path` that the readers
use, and stands under its type.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from megaprec.errors import UserError

WEB = ("http://", "https://")  # kinds of URLs in which what stands behind a ? names no file
URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def is_url(name: str) -> bool:
    """Return True if a name is that of a place that is not on this machine."""
    return URL.match(name) is not None


def remote_path(url: str) -> Path:
    """Return the file or folder at a URL.

    Raises UserError if the package that reads this kind of URL is missing, or the URL is none.
    """
    try:
        from upath import UPath  # noqa: PLC0415 (optional)
    except ImportError as problem:
        raise UserError.of("data.url_reader_missing", url=url) from problem
    if "::" in url:
        raise UserError.of("data.url_chained", url=url)
    with naming_url(url):
        path = UPath(url)
        # the package of the kind of URL is imported here
        _ = path.fs
        # the files of a data set have names made of one prefix
        try:
            _ = path.parent / "name"
        except NotImplementedError as problem:
            raise UserError.of("data.url_without_folder", url=url) from problem
        return cast(Path, path)


def path_of(name: str) -> Path:
    """Return the path of a name: of a URL, or of this machine. Raises UserError as `remote_path`
    does."""
    return remote_path(name) if is_url(name) else Path(name)


def require_there(path: Path, url: str) -> None:
    """Raise UserError unless a file or folder is at a URL: one that names the server if it cannot
    be reached, and token files, which are no text."""
    if path.exists():
        return
    try:
        file_system(path).info(cast(Any, path).path)
    except FileNotFoundError as problem:
        # fsspec takes a server that does not answer for a file that is missing
        reason = problem.__cause__
        if isinstance(reason, OSError):
            raise UserError.of("data.url_unreachable", url=url, reason=reason) from problem
    if beside(path, ".idx").exists():
        raise UserError.of("data.url_tokens", url=url)
    raise UserError.of("data.url_missing", url=url)


def beside(path: Path, suffix: str) -> Path:
    """Return the path with a suffix behind its name; in the URL of a web page, before what is asked
    of it (`https://host/x.idx?token=...`).
    """
    if is_remote(path):
        url = str(path)
        page = without_query(url)
        if page != url:
            return remote_path(f"{page}{suffix}{url.removeprefix(page)}")
    return path.parent / f"{path.name}{suffix}"


def name_in_url(path: Path) -> str:
    """Return the name of a file: at the URL of a web page without what is asked of it, which may be
    a secret.
    """
    return without_query(str(path)).rpartition("/")[2] if is_remote(path) else path.name


def without_query(url: str) -> str:
    """Return the URL of a web page without what is asked of it, and any other one itself."""
    before, _, _ = url.partition("?")
    return before if before.lower().startswith(WEB) else url


def is_remote(path: Path) -> bool:
    """Return True if a path is of a URL."""
    return not isinstance(path, Path)


def file_system(path: Path) -> Any:
    """Return the fsspec file system of a remote path."""
    return cast(Any, path).fs


class WholeRemoteFile(io.RawIOBase):
    """A file of fsspec that is read to its size, or raises UserError.

    fsspec takes an answer without bytes for the end of a file: also that of a server whose file is
    shorter by now than it said.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._path = file
        self._opened: Any = file.open("rb")
        self._size: int | None = getattr(self._opened, "size", None)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._opened.seekable()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._opened.seek(offset, whence)

    def tell(self) -> int:
        return self._opened.tell()

    def readinto(self, buffer: Any) -> int:
        content = self._opened.read(len(buffer))
        buffer[: len(content)] = content
        position = self._opened.tell()
        if not content and len(buffer) and self._size is not None and position < self._size:
            raise UserError.of(
                "data.url_ends_early", url=self._path, given=position, size=self._size
            )
        return len(content)

    def close(self) -> None:
        self._opened.close()
        super().close()


def openable(file: Path) -> Any:
    """Return what libraries open: the path of a file of this machine, an open file of another."""
    return WholeRemoteFile(file) if is_remote(file) else str(file)


@contextmanager
def naming_url(url: object) -> Iterator[None]:
    """Raise UserError, which names the URL, for what goes wrong with it inside the context.

    The libraries of the many kinds of URLs raise errors of their own, without a common class.
    """
    try:
        yield
    except UserError:
        raise
    except ImportError as problem:
        raise UserError.of("data.url_package_missing", url=url, problem=problem) from problem
    except Exception as problem:
        reason = " ".join(str(problem).split()) or type(problem).__name__
        raise UserError.of("data.url_unreadable", url=url, reason=reason) from problem
