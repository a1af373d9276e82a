"""Checkpoints at a URL: in an object store, which has no folders and no renaming.

    s3://bucket/run/step_00000100/
        .unfinished          written before anything else, removed after everything else
        model-00003...       as in a folder
        checkpoint.json      written last: with it the checkpoint is there

An object is written whole or not at all. A prefix with `.unfinished` and without checkpoint.json is
what an interrupted save or removal has left: no checkpoint, and removed by the next save. One with
neither was damaged, as a folder without checkpoint.json is.

The package fsspec speaks with the server, with the credentials that it finds. Its errors have no
common class: each becomes a `PlaceError`, one line that names the URL.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from megaprec.durable import PlaceError, naming_file, reading
from megaprec.errors import UserError
from megaprec.parsing import MOST_BYTES, read_regular
from megaprec.tokens.places import file_system, is_remote
from megaprec.tokens.ranges import repeated
from megaprec.url_secrets import without_user_of

UNFINISHED = ".unfinished"
PROBE = ".writable"  # an object that is written and removed to see whether that is allowed
SAVED_TO = ("s3", "s3a", "gs", "gcs", "memory")  # kinds of URLs
HUB = "hf"
OF_THIS_MACHINE = ("file", "local")
READ_FROM = (*SAVED_TO, HUB)
PIECE = 16 << 20  # bytes of one request
READERS = 8  # requests of one read at the same time
MOST_SHOWN = 300  # characters of what a library says
Answer = TypeVar("Answer")


def require_saved_to(url: str) -> None:
    """Raise UserError for a kind of URL to which no checkpoint is saved."""
    _require_no_file(url)
    kind = _kind(url)
    # its file system in huggingface_hub commits each file as it is closed, and has no transactions
    if kind == HUB:
        raise UserError.of("checkpoint.url_is_hub", url=url, kinds=_in_words(SAVED_TO))
    if kind not in SAVED_TO:
        raise UserError.of("checkpoint.url_not_saved_to", url=url, kinds=_in_words(SAVED_TO))


def require_read_from(folder: Path) -> None:
    """Raise UserError for a kind of URL from which no checkpoint is read."""
    _require_no_file(str(folder))
    if _kind(str(folder)) not in READ_FROM:
        raise UserError.of("checkpoint.url_not_read", url=folder, kinds=_in_words(READ_FROM))


def _require_no_file(url: str) -> None:
    """Raise UserError for a URL of a folder of this machine, whose files are locked and put in
    place as no object of a bucket is."""
    if _kind(url) in OF_THIS_MACHINE:
        raise UserError.of("checkpoint.url_is_path", url=url, path=url.partition("://")[2])


def _kind(url: str) -> str:
    return url.partition("://")[0].lower()


def _in_words(kinds: Iterable[str]) -> str:
    return ", ".join(f"{kind}://" for kind in kinds if kind != "memory")


@contextmanager
def at_url(path: Path) -> Iterator[None]:
    """Raise PlaceError for what goes wrong at a URL inside the context."""
    try:
        yield
    except (UserError, PlaceError):
        raise
    except Exception as error:
        raise _place_error(path, error) from error


def _place_error(path: Path, error: Exception) -> PlaceError:
    """Return an error of any library as one line, without a password that the URL has."""
    reason = " ".join(str(error).split()) or type(error).__name__
    reason = without_user_of(path, reason)[:MOST_SHOWN]
    return PlaceError(path, f"{reason}{_remedy(error)}")


def _remedy(error: Exception) -> str:
    if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
        return ": look at the credentials, and at what they allow"
    if isinstance(error, FileNotFoundError):
        return ": it, or its bucket, is not there"
    return ""


def entry_names(folder: Path) -> list[str]:
    """Return the names right below a URL; none if nothing is there. Raises PlaceError."""
    return [entry["name"].rstrip("/").rpartition("/")[2] for entry in _entries(folder)]


def sizes(folder: Path) -> dict[str, int]:
    """Return the sizes in bytes of the objects right below a URL, by name. Raises PlaceError."""
    found: dict[str, int] = {}
    for entry in _entries(folder):
        if entry.get("type", "file") == "file":
            found[entry["name"].rpartition("/")[2]] = int(entry.get("size") or 0)
    return found


def _entries(folder: Path) -> list[dict[str, Any]]:
    """Return what the file system tells of the entries right below a URL; nothing if nothing is
    there."""
    system = file_system(folder)

    def ask() -> list[dict[str, Any]]:
        # what an earlier listing told may be old
        system.invalidate_cache()
        try:
            return system.ls(_name(folder), detail=True)
        except FileNotFoundError:
            return []

    return _asked(folder, ask)


def _asked(path: Path, ask: Callable[[], Answer]) -> Answer:
    """Return the answer of `ask`, a request that changes nothing and is repeated if it fails.
    Raises PlaceError."""
    try:
        return repeated(path, ask)
    except UserError as error:
        # of the last attempt
        cause = error.__cause__
        if isinstance(cause, Exception):
            raise _place_error(path, cause) from cause
        raise


def is_object(path: Path) -> bool:
    """Return True if an object is at a URL."""
    system = file_system(path)
    with at_url(path):
        system.invalidate_cache()
        try:
            return system.info(_name(path)).get("type", "file") == "file"
        except FileNotFoundError:
            return False


def write_object(path: Path, pieces: Iterable[memoryview | bytes]) -> None:
    """Write an object, which is there when this returns. Raises PlaceError."""
    with at_url(path):
        opened = file_system(path).open(_name(path), "wb")
        try:
            for piece in pieces:
                opened.write(piece)
        except BaseException:
            # closing would make an object of the part that was written
            opened.discard()
            opened.closed = True
            raise
        opened.close()


def read_object(path: Path, most: int) -> bytes:
    """Return the bytes of an object of at most `most` bytes. Raises PlaceError."""
    size = size_of_object(path)
    if size > most:
        raise PlaceError(path, f"it is larger than {most:,} bytes")
    return b"".join(pieces_of(path, 0, size))


def read_file(path: Path) -> bytes:
    """Return the bytes of a regular file or an object, of at most MOST_BYTES. Raises OSError."""
    return read_object(path, MOST_BYTES) if is_remote(path) else read_regular(path)


def size_of_object(path: Path) -> int:
    """Return the bytes of an object. Raises PlaceError, also for none."""
    system = file_system(path)
    with at_url(path):
        system.invalidate_cache()
        size = system.info(_name(path)).get("size")
    if not isinstance(size, int):
        raise PlaceError(path, "its server does not tell its size")
    return size


def pieces_of(path: Path, start: int, stop: int) -> Iterator[bytes]:
    """Yield bytes [start, stop) of an object in pieces, READERS of which are asked for at a time.
    Raises PlaceError."""
    piece_starts = range(start, stop, PIECE)

    def read_piece(piece_start: int) -> bytes:
        return _read_range(path, piece_start, min(piece_start + PIECE, stop))

    if len(piece_starts) < 2:
        yield from map(read_piece, piece_starts)
        return
    with ThreadPoolExecutor(READERS) as readers:
        # READERS at a time, so that no more pieces are in memory
        for first in range(0, len(piece_starts), READERS):
            yield from readers.map(read_piece, piece_starts[first : first + READERS])


def _read_range(path: Path, start: int, stop: int) -> bytes:
    """Return bytes [start, stop) of an object by one request, which is repeated if it fails. Raises
    PlaceError."""
    system = file_system(path)

    def ask() -> bytes:
        content = system.cat_file(_name(path), start=start, end=stop)
        if len(content) != stop - start:
            raise OSError(f"it gave {len(content):,} bytes of {stop - start:,}")
        return content

    return _asked(path, ask)


def object_digest(path: Path) -> str:
    """Return the SHA-256 of an object, in hex. Raises PlaceError."""
    digest = hashlib.sha256()
    for piece in pieces_of(path, 0, size_of_object(path)):
        digest.update(piece)
    return digest.hexdigest()


def remove_object(path: Path) -> None:
    """Remove an object, if it is there. Raises PlaceError."""
    with at_url(path):
        try:
            file_system(path).rm_file(_name(path))
        except FileNotFoundError:
            return


def fetch_folder(url: Path, folder: Path) -> None:
    """Copy the objects right below a URL to a new folder of this machine. Raises PlaceError and
    OSError."""
    folder.mkdir()
    for name, size in sizes(url).items():
        local_path = folder / name
        with naming_file(local_path), local_path.open("wb") as file:
            for piece in pieces_of(url / name, 0, size):
                file.write(piece)


def send(here: Path, path: Path) -> None:
    """Copy a file of this machine to an object. Raises PlaceError and OSError."""
    with reading(here) as file:
        write_object(path, iter(lambda: file.read(PIECE), b""))


def append_object_line(path: Path, line: str, most: int) -> None:
    """Append a line to an object, which is written anew; an unfinished line of it is ended first.
    Raises PlaceError."""
    content = read_object(path, most) if is_object(path) else b""
    if content and not content.endswith(b"\n"):
        content += b"\n"
    write_object(path, [content, f"{line}\n".encode()])


def require_writable(folder: Path) -> None:
    """Raise PlaceError unless objects below a URL can be written, listed and removed."""
    probe = folder / PROBE
    write_object(probe, [b"megaprec"])
    entry_names(folder)
    remove_object(probe)


def is_unfinished(names: Iterable[str], index: str) -> bool:
    """Return True for what an interrupted save or removal has left, by the names in it."""
    found = set(names)
    return UNFINISHED in found and index not in found


def begin_prefix(path: Path) -> None:
    """Begin a checkpoint at a URL at which nothing is. Raises PlaceError."""
    write_object(path / UNFINISHED, [b""])


def commit_prefix(path: Path, index: str, content: bytes) -> None:
    """Complete a checkpoint by its index. Raises PlaceError; then it is not there."""
    write_object(path / index, [content])
    # beside an index it says nothing, and each later save tries again
    with suppress(PlaceError):
        remove_object(path / UNFINISHED)


def hide_prefix(path: Path, index: str) -> None:
    """Make a checkpoint one that is no more, before its objects are removed. Raises PlaceError."""
    write_object(path / UNFINISHED, [b""])
    remove_object(path / index)


def remove_prefix(path: Path) -> None:
    """Remove what an interrupted save or removal has left. Raises PlaceError."""
    system = file_system(path)
    with at_url(path):
        system.invalidate_cache()
        names = [str(name) for name in system.find(_name(path))]
    mark = _name(path / UNFINISHED)
    for name in names:
        if name != mark:
            with at_url(path):
                system.rm_file(name)
    # last: what is left by a kill is still known for what it is
    remove_object(path / UNFINISHED)


def _name(path: Path) -> str:
    """Return the name by which a file system of fsspec knows a path."""
    return cast(Any, path).path


def listed_sizes(path: Path, expected: Mapping[str, object]) -> dict[str, int]:
    """Return the sizes of the objects that a save has written. Raises PlaceError if one of them is
    not there."""
    found = sizes(path)
    missing = [name for name in expected if name not in found]
    if missing:
        raise PlaceError(path, f"{missing[0]} was written and is not there")
    return {name: found[name] for name in sorted(expected)}
