"""Files and folders that outlast a power cut, and errors of the filesystem that name their file.

A file is on the disk after fsync, but its name is only there after fsync of its folder. So whoever
creates a folder, or renames a file, flushes the folder above it as well.

The system does not say which file a failed write or fsync belongs to; `naming_file` adds it, so
that every error of the filesystem can be told in one line.
"""

import errno
import io
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from megaprec.url_secrets import masked

TRIED = 1 << 16  # bytes that a file is made longer by to see if there is room
PART = ".part"  # ends the name of a file until it is whole
# errors of a disk or folder, whatever the name of the file there
OF_THE_PLACE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EROFS,
    errno.EACCES,
    errno.ENOENT,
)
# those of a disk, whoever wrote the file
OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
REMEDIES = {
    errno.ENOSPC: "free some room there",
    errno.EDQUOT: "free some room there, or raise the quota",
    errno.EFBIG: "raise the limit of a file's size",
    errno.EOVERFLOW: "no file of its kind is so large: give another one",
    errno.EIO: "look at the disk",
    errno.EROFS: "mount it for writing",
    errno.EACCES: "let this user read or write it, and enter the folders above it",
    errno.EPERM: "allow it to be changed (lsattr shows whether it is immutable)",
    errno.ENOENT: "it, or a folder above it, was removed in the meantime",
    errno.EEXIST: "something else has this name: move it away, or give another place",
    errno.ENOTDIR: "a folder above it is a file: move that away, or give another place",
    errno.EMFILE: "raise the number of open files (ulimit -n)",
}


class PlaceError(OSError):
    """An error at a URL, without secrets. Its text is the reason and what to do; `filename` is the
    URL."""

    def __init__(self, url: object, reason: str) -> None:
        super().__init__()
        self.filename = masked(str(url))
        self.reason = masked(reason)

    def __str__(self) -> str:
        return self.reason


def file_error(error: OSError) -> str:
    """Return one line about an error of the filesystem: the file, the system's reason, and what to
    do. A temporary file, whose name ends in PART, is called by the name that it was to have."""
    if isinstance(error, PlaceError):
        return f"{error.filename}: {error.reason}"
    number = error.errno or 0
    name = errno.errorcode.get(number, "no number")
    # a renaming has two names
    paths = [os.fsdecode(path) for path in (error.filename, error.filename2) if path]
    if number in OF_THE_PLACE or len(paths) > 1:
        paths = list(dict.fromkeys(path.removesuffix(PART) for path in paths))
    files = " and ".join(paths) or "a file"
    remedy = REMEDIES.get(number, "look at that place")
    missing = _missing_folder(paths) if number == errno.ENOENT else None
    if missing:
        remedy = f"there is no folder {missing}: make it, or give another place"
    return f"{files}: {error.strerror or error} ({name}): {remedy}"


def _missing_folder(paths: Sequence[str]) -> Path | None:
    """Return the topmost folder above one of these places that is not there; None if all are."""
    folders = [folder for path in paths for folder in reversed(Path(path).parents)]
    return next((folder for folder in folders if not os.path.exists(folder)), None)


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Add `path` to an OSError that names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def read_whole(path: Path) -> bytes:
    """Return the bytes of a regular file. Raises OSError with the path, also for a fault of the
    disk in the middle of it."""
    with reading(path) as file:
        return file.read()


@contextmanager
def reading(path: Path | str, buffering: int = -1) -> Iterator[io.BufferedReader]:
    """Open a regular file for reading. Raises OSError with the path for anything else there; an
    OSError while the file is read names it."""
    # asked before it is opened: to open a pipe without a writer waits for one
    _require_regular(path)
    with naming_file(Path(path)), open(path, "rb", buffering=buffering) as file:
        yield cast(io.BufferedReader, file)


def _require_regular(path: Path | str) -> None:
    """Raise OSError with the path unless a regular file is there: a pipe or a device may never
    end."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is {_kind(mode)}, not a regular file", str(path))


def why_no_file(path: Path) -> str:
    """Return what is in the place of a regular file, to be said behind its path: ": no such file",
    " is a folder"."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return ": no such file"
    return " is a folder" if stat.S_ISDIR(mode) else f" is {_kind(mode)}, not a regular file"


def _kind(mode: int) -> str:
    """Return what neither a folder nor a regular file is. mode: of its status."""
    return "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"


def sync(path: Path) -> None:
    """Wait until the file, or the list of files of the folder, is on the disk. Raises OSError with
    the path."""
    with naming_file(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create the folder and those above it, as far as they are missing, and flush each new name to
    the disk."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


def write_file(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk; its name may not be. Raises OSError with the
    path."""
    with naming_file(path), path.open("wb", buffering=0) as file:
        write_all(file.fileno(), memoryview(content))
        os.fsync(file.fileno())


def put_text(path: Path, text: str) -> None:
    """Write a file of UTF-8, which may not be on the disk yet. Raises OSError with the path."""
    put_bytes(path, text.encode())


def put_bytes(path: Path, content: bytes) -> None:
    """Write a file, which may not be on the disk yet. Raises OSError with the path."""
    with naming_file(path):
        path.write_bytes(content)


def require_room(path: Path) -> None:
    """Raise OSError with the path if its file cannot become longer, as on a full disk. For what is
    written by a library that does not say why it failed; the file may be longer afterwards."""
    with naming_file(path), path.open("ab", buffering=0) as file:
        write_all(file.fileno(), memoryview(bytes(TRIED)))


def append_line(path: Path, line: str) -> None:
    """Append a line to a regular file, which is made if it is missing, and wait until it is on the
    disk.

    A line that an earlier attempt left unfinished is ended first. Raises OSError with the path.
    """
    # a pipe would block
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        with naming_file(path):
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            size = status.st_size
            is_unfinished = size and os.pread(descriptor, 1, size - 1) != b"\n"
            content = f"\n{line}\n" if is_unfinished else f"{line}\n"
            write_all(descriptor, memoryview(content.encode()))
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if not size:  # the file may be new, and its name too
        sync(path.parent)


def write_all(descriptor: int, content: memoryview) -> None:
    """Write all bytes: the system may take only some of them at a time, as before a disk is
    full."""
    while content:
        written = os.write(descriptor, content)
        content = content[written:]
