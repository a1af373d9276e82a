"""The temporary folder of a launcher, and the removal of those that killed launchers have left.

A launcher locks a file in its folder. The system releases the lock when the process ends, for
whatever reason, so a folder whose lock is free has no owner. A process id would not do: it may
belong to another process by now, or to one in another container that shares the folder for
temporary files.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "megaprec_"
OWNER = "owner"  # the locked file; it holds the owner's process id, for people
YOUNG = 60.0  # seconds in which a folder may not be locked yet


@contextmanager
def launcher_folder() -> Iterator[str]:
    """Make a temporary folder for this launcher and remove it afterwards.

    Those without an owner are removed before.
    """
    remove_leftovers(Path(tempfile.gettempdir()))
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX) as folder,
        Path(folder, OWNER).open("w") as owner,
    ):
        with suppress(OSError):  # a filesystem without locks
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owner.write(f"{os.getpid()}\n")
        owner.flush()
        yield folder


def remove_leftovers(folder: Path) -> None:
    """Remove the folders of this user's launchers that have ended.

    Others, and what cannot be removed, are left.
    """
    for leftover in folder.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if _is_abandoned(leftover):
                shutil.rmtree(leftover)


def _is_abandoned(folder: Path) -> bool:
    """Return True if a launcher of this user made the folder and has ended.

    Raises OSError without an owner file.
    """
    status = folder.lstat()
    # Whoever shares the folder for temporary files might put a link there.
    if folder.is_symlink() or status.st_uid != os.getuid():
        return False
    if time.time() - status.st_mtime < YOUNG:
        return False
    with (folder / OWNER).open() as owner:
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
