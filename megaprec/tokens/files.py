"""Atomic files: each is either complete or absent.

A data set is a handful of files with one prefix: `PREFIX.bin`, `PREFIX.idx`, `PREFIX.model`,
`PREFIX.json`. Each is written under a temporary name (`….part`), flushed to the disk and only then
renamed, so that a file with the final name is always complete, even after a kill or a power cut;
the folder is flushed too, so that the name lasts.

All processes use the same temporary name, so only one process at a time may write (`alone`).
"""

import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from megaprec.durable import make_folder, naming_file, reading, sync
from megaprec.tokens.places import beside


def with_suffix(prefix: Path, suffix: str) -> Path:
    """Return the path `PREFIX` + `suffix`; a dot in the prefix's name stays (`v1.2.bin`)."""
    return beside(prefix, suffix)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex."""
    with reading(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path | None:
    """Return the folder of what this user's machine remembers; None without a home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megaprec"
    except RuntimeError:  # there is no home folder
        return None


def open_part(path: Path, size: int = 0) -> BinaryIO:
    """Open the temporary file that `publish` will rename to `path`, and create the folder.

    size: bytes of a temporary file of an earlier attempt that are kept; writing continues after
        them.
    """
    make_folder(path.parent)
    file = with_suffix(path, ".part").open("r+b" if size else "wb")
    with naming_file(Path(file.name)):
        file.truncate(size)
    file.seek(size)
    return file


def publish(part: BinaryIO, path: Path) -> None:
    """Flush `part` to the disk, close it and give it its final name `path`, replacing what was
    there.

    Raises OSError with the path.
    """
    with naming_file(Path(part.name)):
        part.flush()
        os.fsync(part.fileno())
        part.close()
    # atomic: a reader sees the old file or the new one
    os.replace(part.name, path)
    sync(path.parent)


def discard(part: BinaryIO) -> None:
    """Close and remove a temporary file that will not be published.

    If it cannot be removed, the next attempt overwrites it.
    """
    with suppress(OSError):  # on a full disk, closing flushes the buffer and fails
        part.close()
    with suppress(OSError):
        Path(part.name).unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically, so that no reader ever sees part of it."""
    unfinished_file = open_part(path)
    try:
        with naming_file(Path(unfinished_file.name)):
            unfinished_file.write(content)
        publish(unfinished_file, path)
    except BaseException:
        discard(unfinished_file)
        raise


@contextmanager
def exclusive_lock(
    lock: Path, busy: Callable[[], None], leave_none: bool = False
) -> Iterator[None]:
    """Context manager that locks the file `lock` against all other processes, on any machine.

    The file and its folder are created if they are missing. busy: called if another process has the
    lock; it may raise, otherwise this process waits for the lock. The system releases a lock when
    its process ends, for whatever reason. On a filesystem without locks there is no protection.
    leave_none: after an error within the context, remove the file.
    """
    make_folder(lock.parent)
    while True:
        descriptor = _locked(lock, busy)
        # who had it may have removed the file meanwhile, and another one may be locked since
        if _is_at(descriptor, lock):
            break
        os.close(descriptor)
    try:
        yield
    except BaseException:
        if leave_none:
            with suppress(OSError):
                lock.unlink()
        raise
    finally:
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return True if an open file is the one at this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _locked(lock: Path, busy: Callable[[], None]) -> int:
    """Open the file `lock`, lock it and return its descriptor. busy: see `exclusive_lock`."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would block
    descriptor = os.open(lock, flags, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(
                errno.EINVAL,
                "it is no regular file, but the lock of this folder belongs there",
                str(lock),
            )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # the filesystem has no locks
            pass
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
