"""Files that are either whole or not there.

A data set is a handful of files beside one prefix: `PREFIX.bin`, `PREFIX.idx`, `PREFIX.model`, `PREFIX.json`.
Each is written under a temporary name (`….part`), flushed to the disk and only then renamed, so that whoever
finds the final name finds a finished file, also after a kill or a power cut.

The temporary name is the same for everyone, so of several processes one at a time may write (`alone`).
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def beside(prefix: Path, suffix: str) -> Path:
    """The path `PREFIX` + `suffix`; a dot in the prefix's own name stays (`v1.2` gives `v1.2.bin`)."""
    return prefix.parent / (prefix.name + suffix)


def open_part(path: Path, size: int = 0) -> BinaryIO:
    """Open the temporary file that `publish` will turn into `path`; makes the folder.

    Of what is there already, from an earlier attempt, the first `size` bytes are kept, and writing goes on there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = beside(path, ".part").open("r+b" if size else "wb")
    file.truncate(size)
    file.seek(size)
    return file


def publish(part: BinaryIO, path: Path) -> None:
    """Flush `part` to the disk, close it and give it its final name `path`, replacing what was there."""
    part.flush()
    os.fsync(part.fileno())
    part.close()
    os.replace(part.name, path)


def discard(part: BinaryIO) -> None:
    """Close and remove a temporary file that will not be published."""
    with suppress(OSError):  # of a full disk: what is not written yet has no place now either
        part.close()
    Path(part.name).unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that no reader ever sees part of it."""
    part = open_part(path)
    try:
        part.write(content)
        publish(part, path)
    except BaseException:
        discard(part)
        raise


@contextmanager
def alone(lock: Path, busy: Callable[[], None]) -> Iterator[None]:
    """Within, no other process on any machine holds the file `lock`, which is made if it is not there, and its folder.

    busy: called if another does. It may raise; else the other is waited for. However a process ends, the system lets go
    of what it held. A filesystem without locks lets everyone in.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield
