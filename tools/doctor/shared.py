"""The filesystem that all hosts share: is a file of one host seen by the others, whole, soon, and
once locked, locked?

Rank 0 writes a file, replaces it, and locks it. After each of these the first rank of every host
says what it sees.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megaprec.durable import sync, write_file
from tools.console.units import duration
from tools.doctor.finding import Finding, not_tried, ok, wrong
from tools.doctor.place import Place

SEEN = 8.0  # seconds in which a change must be seen; attribute caches of NFS last 3 to 60
LATE = 3.0  # seconds after which a change is late
SHARE = "mount the same filesystem on all hosts at this path, or give another folder"


def probe(place: Place) -> dict[str, Any]:
    """Take part as the first rank of a host; other ranks return nothing."""
    firsts = place.firsts()
    if place.rank == 0:
        return _writer(place, firsts[1:])
    return _reader(place) if place.rank in firsts else {}


def _writer(place: Place, readers: Sequence[int]) -> dict[str, Any]:
    own = place.folder.absolute() / f".megaprec_doctor_shared_{os.getpid()}_{time.time_ns()}"
    own.mkdir(parents=True)
    try:
        _publish(own, b"one")
        place.tell("shared/one", str(own))
        _wait(place, "one", readers)
        _publish(own, b"two")
        place.tell("shared/two", "")
        _wait(place, "two", readers)
        with (own / "file").open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            place.tell("shared/locked", "")
            _wait(place, "locked", readers)
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return {"host": place.host, "folder": str(place.folder), "writer": True}


def _publish(own: Path, content: bytes) -> None:
    write_file(own / "new", content)
    os.replace(own / "new", own / "file")
    sync(own)


def _wait(place: Place, what: str, readers: Sequence[int]) -> None:
    for rank in readers:
        place.told(f"shared/{what}/{rank}", SEEN + 2)


def _reader(place: Place) -> dict[str, Any]:
    file = Path(place.told("shared/one", 10.0)) / "file"
    found: dict[str, Any] = {"host": place.host, "folder": str(place.folder)}
    found["written_s"] = _until(file, b"one")
    place.tell(f"shared/one/{place.rank}", 1)
    place.told("shared/two", SEEN + 4)
    found["replaced_s"] = _until(file, b"two") if found["written_s"] is not None else None
    place.tell(f"shared/two/{place.rank}", 1)
    place.told("shared/locked", SEEN + 4)
    found["locked"] = _is_locked(file)
    place.tell(f"shared/locked/{place.rank}", 1)
    return found


def _until(file: Path, content: bytes) -> float | None:
    """Return the seconds until the file has this content, None if it has not in time."""
    start = time.monotonic()
    while (waited := time.monotonic() - start) < SEEN:
        try:
            if file.read_bytes() == content:
                return waited
        except OSError:
            pass
        time.sleep(0.02)
    return None


def _is_locked(file: Path) -> bool | None:
    """Return True if another process holds the file's lock, None if the file is not there."""
    try:
        with file.open("rb+") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def judge(answers: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Yield the findings about each host's view."""
    writer = answers[0]
    readers = [one for one in answers[1:] if one]
    if not readers:
        yield not_tried("shared disk", "one host only: there is nothing to share")
        return
    problems = [finding for one in readers for finding in _of(one, writer)]
    yield from problems
    if not problems:
        worst = max(max(one["written_s"], one["replaced_s"]) for one in readers)
        said = (
            f"{writer['folder']}: {len(readers) + 1} hosts see each other's files and locks, at "
            "the latest after "
        )
        yield ok("shared disk", said + duration(worst), latest_s=worst)


def _of(one: dict[str, Any], writer: dict[str, Any]) -> Iterator[Finding]:
    place = f"{one['folder']} on {one['host']}"
    if one["written_s"] is None:
        yield wrong(
            "shared disk", f"{place}: a file that {writer['host']} wrote there is not seen", SHARE
        )
        return
    if one["replaced_s"] is None:
        said = (
            f"{place}: the old content is seen after {SEEN:g} s, although {writer['host']} has "
            "replaced the file"
        )
        yield wrong("shared disk", said, "mount it with shorter caches (NFS: actimeo=1)")
    elif one["replaced_s"] > LATE:
        said = f"{place}: a replaced file is seen after {one['replaced_s']:.1f} s"
        yield wrong("shared disk", said, "mount it with shorter caches (NFS: actimeo=1)")
    if one["locked"] is False:
        said = f"{place}: a file that {writer['host']} has locked can be locked again"
        yield wrong(
            "shared disk", said, "mount it with locks across hosts (NFS: no nolock, Lustre: flock)"
        )
