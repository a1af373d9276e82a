"""Folders for the time of a command, in the folder of temporary files.

A command removes its folder however it ends, unless it is killed. What such a command has left, and
it may be as large as several checkpoints, is removed by the next one of the same user on the same
machine: a folder has a file that is locked as long as its command lives.
"""

import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megaprec.durable import put_text

PREFIX = "megaprec_"  # begins the name of each folder
LOCK = ".in_use"  # the file that is locked; it has the name of the machine


@contextmanager
def scratch_folder(subject: str, place: str | None = None) -> Iterator[str]:
    """Yield a new folder that only this user enters, and remove it at the end of the context.

    subject: a part of its name. place: where it is made instead of the folder of temporary files.
    Folders there that killed commands have left are removed.
    """
    parent = Path(place or tempfile.gettempdir())
    for folder in _left_over(parent):
        shutil.rmtree(folder, ignore_errors=True)
    temporary = tempfile.TemporaryDirectory(prefix=f"{PREFIX}{subject}_", dir=parent)
    with temporary as name:
        lock = _lock(Path(name))
        try:
            yield name
        finally:
            # while it is locked: no other command removes it
            temporary.cleanup()
            if lock is not None:
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock a new folder until the descriptor that is returned is closed. None where there are no
    locks: then no other command removes the folder."""
    path = folder / LOCK
    unfinished = path.with_name(LOCK + ".part")
    with suppress(OSError):
        put_text(unfinished, socket.gethostname())
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # under its name it is locked: the removal looks at no other
            unfinished.rename(path)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor
    return None


def _left_over(parent: Path) -> Iterator[Path]:
    """Yield the folders in `parent` of commands of this user and machine that live no more."""
    with suppress(OSError):
        for lock in [*parent.glob(f"{PREFIX}*/{LOCK}")]:
            if _is_ours(lock.parent) and _is_left(lock):
                yield lock.parent


def _is_ours(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _is_left(path: Path) -> bool:
    """Return True if the lock of a folder is of this machine, and no process holds it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # it was removed meanwhile
        return False
    try:
        # machines that share the place may not see each other's locks
        machine = os.read(descriptor, 1024).decode(errors="replace")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return machine == socket.gethostname()
