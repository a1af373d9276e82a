"""Semantics of the filesystem that checkpoints and data need, on one host.

Checkpoints and data sets are complete or absent because a rename replaces a name at once, fsync
outlasts a power cut, and a lock keeps a second run away. A filesystem without these works for
months and then loses the only copy. So each is tried: while one thread renames, another opens the
name all the time, and must find one of both contents each time.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

from megaprec.durable import file_error, sync, write_file
from tools.console.units import duration, size
from tools.doctor.finding import Finding, ok, wrong
from tools.doctor.place import Place

RENAMES = 200  # number of renames while a reader looks
CONTENT = 4096  # bytes of a file that is written
SYNCS = 5
LEAST = 2**30  # bytes that must be free if no run says more
LATE = 1.0  # seconds between the clock and the time of a new file
MEMORY = ("tmpfs", "ramfs")  # filesystems that a power cut empties


@dataclass(frozen=True)
class Disk:
    """The operations of a filesystem that are tried. A test replaces one by a faulty one."""

    rename: Callable[[Path, Path], Any] = os.replace
    sync: Callable[[Path], Any] = sync
    lock: Callable[[int, int], Any] = fcntl.flock
    free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free


def probe(place: Place) -> dict[str, Any]:
    """Try the folder's filesystem on the first rank of each host; the others return nothing."""
    if place.local:
        return {}
    return {
        "host": place.host,
        "folder": str(place.folder),
        **tried(place.folder, place.bytes_needed),
    }


def tried(folder: Path, needed: int, disk: Disk | None = None) -> dict[str, Any]:
    """Return {"problems": [said, remedy] pairs, ...numbers}. Creates a hidden folder, and removes
    it."""
    disk = disk or Disk()
    own = folder / f".megaprec_doctor_{os.uname().nodename}_{os.getpid()}"
    try:
        own.mkdir(parents=True)
    except OSError as error:
        return {
            "problems": [[file_error(error), "give another folder by --folder or train.folder"]]
        }
    try:
        found: dict[str, Any] = {"kind": filesystem_of(own), "free": disk.free(own)}
        found["problems"] = [*_room(found["free"], needed), *_problems(own, disk, found)]
        return found
    except OSError as error:
        return {
            "problems": [[file_error(error), "give another folder by --folder or train.folder"]]
        }
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _room(free: int, needed: int) -> Iterator[list[str]]:
    if free < max(needed, LEAST):
        if needed > LEAST:
            least = f"the run's checkpoints take {size(needed)}"
        else:
            least = f"at least {size(LEAST)} are needed"
        yield [
            f"{size(free)} free, but {least}",
            "free some room, lower checkpoint.keep, or give another folder",
        ]


def _problems(own: Path, disk: Disk, found: dict[str, Any]) -> Iterator[list[str]]:
    if seen := torn_renames(own, disk):
        yield [
            f"rename is not atomic: a reader found {seen}",
            "use a POSIX filesystem, not an object store's mount",
        ]
    if why := _folder_rename(own, disk):
        yield [
            f"a folder cannot be renamed ({why})",
            "use a POSIX filesystem, not an object store's mount",
        ]
    found["fsync_s"], why = _sync_seconds(own, disk)
    if why:
        yield [
            f"fsync fails ({why}): checkpoints would not outlast a power cut",
            "mount it so that fsync works",
        ]
    if why := _lock(own, disk):
        yield [f"locks do not hold: {why}", "mount it with locks (NFS: no nolock; Lustre: flock)"]
    found["clock_s"] = _file_time(own)
    if abs(found["clock_s"]) > LATE:
        said = f"new files are {found['clock_s']:+.1f} s from this host's clock"
        yield [said, "run an NTP client on this host and on the file server"]


def torn_renames(own: Path, disk: Disk) -> str:
    """Return what a reader saw that was neither the old nor the new content, "" if nothing."""
    target = own / "name"
    over = Event()
    seen = list[str]()
    contents = [bytes([letter]) * CONTENT for letter in b"ab"]
    target.write_bytes(contents[0])

    def look() -> None:
        while not over.is_set() and not seen:
            try:
                if (there := target.read_bytes()) not in contents:
                    seen.append(f"{len(there)} of {CONTENT} bytes, or both contents mixed")
            except FileNotFoundError:
                seen.append("no file")

    reader = Thread(target=look, daemon=True)
    reader.start()
    for number in range(RENAMES):
        (own / "new").write_bytes(contents[number % 2])
        disk.rename(own / "new", target)
        if seen:
            break
    over.set()
    reader.join()
    return seen[0] if seen else ""


def _folder_rename(own: Path, disk: Disk) -> str:
    """Return why a folder with a file in it cannot be given another name, "" if it can."""
    (own / ".partial").mkdir()
    (own / ".partial" / "file").write_bytes(b"a")
    try:
        disk.rename(own / ".partial", own / "whole")
    except OSError as error:
        return error.strerror or str(error)
    if (own / "whole" / "file").is_file() and not (own / ".partial").exists():
        return ""
    return "its files stay behind"


def _sync_seconds(own: Path, disk: Disk) -> tuple[float, str]:
    """Return the median seconds of a small file's fsync, and why the flush of a file or a folder
    failed."""
    seconds = []
    try:
        for number in range(SYNCS):
            start = time.perf_counter()
            write_file(own / f"synced{number}", b"a" * CONTENT)
            disk.sync(own / f"synced{number}")
            seconds.append(time.perf_counter() - start)
        disk.sync(own)
    except OSError as error:
        return 0.0, error.strerror or str(error)
    return sorted(seconds)[len(seconds) // 2], ""


def _lock(own: Path, disk: Disk) -> str:
    """Return what is wrong with locks, "" if a second one is refused."""
    with (own / "lock").open("wb") as first, (own / "lock").open("wb") as second:
        try:
            disk.lock(first.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.strerror or str(error)
        try:
            disk.lock(second.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""
        except OSError as error:
            return error.strerror or str(error)
    return "two processes can have the same one"


def _file_time(own: Path) -> float:
    """Return the seconds from this host's clock to the time that the filesystem gives a new
    file."""
    before = time.time()
    (own / "now").write_bytes(b"a")
    made = (own / "now").stat().st_mtime
    after = time.time()
    return min(0.0, made - before) + max(0.0, made - after)


def filesystem_of(folder: Path) -> str:
    """Return the type of the filesystem, such as ext4, nfs4 or tmpfs; "" where the system does not
    list mounts."""
    try:
        mounts = [
            line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
        ]
    except OSError:
        return ""
    here = str(folder.resolve())
    above = [m for m in mounts if m[1] == "/" or here == m[1] or here.startswith(m[1] + "/")]
    return max(above, key=lambda mount: len(mount[1]))[2] if above else ""


def judge(answers: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Yield the findings about the folder, by host."""
    hosts = [one for one in answers if one]
    for one in hosts:
        for said, remedy in one["problems"]:
            yield wrong("disk", f"{one['folder']} on {one['host']}: {said}", remedy)
    if not any(one["problems"] for one in hosts):
        one = max(hosts, key=lambda host: host["fsync_s"])
        lost = "; it is in memory, and a power cut empties it" if one["kind"] in MEMORY else ""
        said = (
            f"{one['folder']} ({one['kind'] or 'type not known'}{lost}): rename, fsync and locks "
            "hold, "
        )
        said += (
            f"fsync {duration(one['fsync_s'])}, {size(min(host['free'] for host in hosts))} free"
        )
        yield ok(
            "disk",
            said,
            **{key: one[key] for key in ("folder", "kind", "fsync_s", "free", "clock_s")},
        )
