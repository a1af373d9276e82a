"""Places of text and token files: paths of this machine, and URLs (`s3://`, `gs://`, `hf://`,
`https://`, ...), which the package fsspec lists and reads with the credentials that it finds.

A file at a URL is a `UPath` of universal_pathlib. It has the methods of `Path` that the readers
use, and stands under its type.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from megaprec.errors import UserError
from megaprec.tokens.http_bounds import HttpProblem, client_options
from megaprec.url_secrets import without_user_of

STANDARD_LIBRARY = "python"  # the source of Python's own library, which every machine has
WEB = ("http://", "https://")  # kinds of URLs in which what stands behind a ? names no file
# also a chain of them, such as simplecache::s3://bucket/x
URL = re.compile(r"([a-z][a-z0-9+.-]*::)*[a-z][a-z0-9+.-]*://", re.IGNORECASE)


MOST_SHOWN = 200  # characters of what a library says
GONE = (404, 410)  # answers of HTTP
HTTP = re.compile(r"https?://", re.IGNORECASE)


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
    if not url.partition("://")[2].strip("/"):
        raise UserError.of("data.url_without_place", url=url)
    if "::" in url:
        raise UserError.of("data.url_chained", url=url)
    with naming_url(url):
        options: dict[str, Any] = {}
        if HTTP.match(url):
            options["client_kwargs"] = client_options()
        kind, mark, place = url.partition("://")
        # fsspec knows its kinds in small letters alone
        path = UPath(f"{kind.lower()}{mark}{place}", **options)
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
    """Raise UserError unless a text file or folder is at a URL. The error says whether the server
    cannot be reached, token files are there, or nothing is.

    path: of the URL.
    url: as the user wrote it, for the error.
    """
    try:
        file_system(path).info(cast(Any, path).path)
        return
    except FileNotFoundError as problem:
        # fsspec takes a server that does not answer for a file that is missing
        cause = problem.__cause__
        if cause is not None and getattr(cause, "status", None) not in GONE:
            reason = " ".join(str(cause).split())[:MOST_SHOWN] or type(cause).__name__
            raise UserError.of("data.url_unreachable", url=url, reason=reason) from problem
    # of some kinds of URLs a folder is no entry
    if path.exists():
        return
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


def openable(file: Path) -> Any:
    """Return what libraries open: the path of a file of this machine, an open file of another."""
    return file.open("rb") if is_remote(file) else str(file)


def size_of(file: Path) -> int:
    """Return the size of a file in bytes. Raises UserError for one at a URL whose server does not
    tell it: a text that never ends could not be told from one that does."""
    if not is_remote(file):
        return file.stat().st_size
    with naming_url(file):
        size = file_system(file).info(cast(Any, file).path).get("size")
    if not isinstance(size, int):
        raise UserError.of("data.url_text_without_size", url=file)
    return size


def is_folder(path: Path) -> bool:
    """Return True for a folder. A file at a URL that is too large for a page of links is none."""
    try:
        return path.is_dir()
    except HttpProblem:
        return False


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
        reason = without_user_of(url, reason)
        raise UserError.of("data.url_unreadable", url=url, reason=reason) from problem
