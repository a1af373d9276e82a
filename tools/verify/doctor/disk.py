"""Semantics of the filesystem that checkpoints and data need, on one host.

Checkpoints and data sets are complete or absent because a rename replaces a name at once, fsync
outlasts a power cut, and a lock keeps a second run away. A filesystem without these works for
months and then loses the only copy. So each is tried: while one thread renames, another opens the
name all the time, and must find one of both contents each time.
"""

import fcntl
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

from megaprec.durable import file_error, put_bytes, sync, write_file
from tools.console.units import duration, size
from tools.verify.doctor.finding import Finding, ok, wrong
from tools.verify.doctor.questions import Answer, RankContext

RENAMES = 200  # number of renames while a reader looks
CONTENT_BYTES = 4096  # of a file that is written
SYNCS = 5
LEAST_FREE = 2**30  # bytes that must be free if no run needs more
CLOCK_TOLERANCE = 1.0  # seconds between the clock and the time of a new file
MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")  # that a power cut empties
OTHER_FOLDER = "give another folder by --folder or train.folder"
POSIX_REMEDY = "use a POSIX filesystem, not an object store's mount"


class DiskProblem(NamedTuple):
    """A fault of a filesystem and its remedy. A list of two strings in JSON."""

    message: str
    remedy: str


@dataclass(frozen=True)
class Disk:
    """The operations of a filesystem that are tried. A test replaces one by a faulty one."""

    rename: Callable[[Path, Path], Any] = os.replace
    sync: Callable[[Path], Any] = sync
    lock: Callable[[int, int], Any] = fcntl.flock
    free: Callable[[Path], int] = lambda tried_folder: shutil.disk_usage(tried_folder).free


def probe(context: RankContext) -> Answer:
    """Try the folder's filesystem on the first rank of each host; the others return nothing."""
    if context.local:
        return {}
    return {
        "host": context.host,
        "folder": str(context.folder),
        **try_filesystem(context.folder, context.bytes_needed),
    }


def try_filesystem(tried_folder: Path, needed: int, disk: Disk | None = None) -> Answer:
    """Return the problems of the folder's filesystem and its numbers.

    Creates a hidden folder, and removes it.

    needed: bytes that the run will write.
    """
    disk = disk or Disk()
    hidden = tried_folder / f".megaprec_doctor_{os.uname().nodename}_{os.getpid()}"
    try:
        hidden.mkdir(parents=True)
        return _try_operations(hidden, needed, disk)
    except OSError as error:
        return {"problems": [DiskProblem(file_error(error), OTHER_FOLDER)]}
    finally:
        # On a faulty filesystem the removal may fail, too, and is not what was asked.
        shutil.rmtree(hidden, ignore_errors=True)


def _try_operations(tried_folder: Path, needed: int, disk: Disk) -> Answer:
    """Return what a checkpoint's operations do in a folder, with what is wrong. needed: bytes."""
    free_bytes = disk.free(tried_folder)
    problems = [
        *_free_problems(free_bytes, needed),
        *_rename_problems(tried_folder, disk),
    ]

    fsync_s, fault_reason = _sync_seconds(tried_folder, disk)
    if fault_reason:
        message = f"fsync fails ({fault_reason}): checkpoints would not outlast a power cut"
        problems.append(DiskProblem(message, "mount it so that fsync works"))

    if fault_reason := _lock_fault(tried_folder, disk):
        remedy = "mount it with locks (NFS: no nolock; Lustre: flock)"
        problems.append(DiskProblem(f"locks do not hold: {fault_reason}", remedy))

    clock_s = _file_time(tried_folder)
    if abs(clock_s) > CLOCK_TOLERANCE:
        message = f"new files are {clock_s:+.1f} s from this host's clock"
        remedy = "run an NTP client on this host and on the file server"
        problems.append(DiskProblem(message, remedy))

    return {
        "kind": filesystem_of(tried_folder),
        "free": free_bytes,
        "fsync_s": fsync_s,
        "clock_s": clock_s,
        "problems": problems,
    }


def _free_problems(free_bytes: int, needed: int) -> Iterator[DiskProblem]:
    """Yield what is wrong if too little is free."""
    if free_bytes >= max(needed, LEAST_FREE):
        return
    if needed > LEAST_FREE:
        least_text = f"the run's checkpoints take {size(needed)}"
    else:
        least_text = f"at least {size(LEAST_FREE)} are needed"
    remedy = "free some room, lower checkpoint.keep, or give another folder"
    yield DiskProblem(f"{size(free_bytes)} free, but {least_text}", remedy)


def _rename_problems(tried_folder: Path, disk: Disk) -> Iterator[DiskProblem]:
    if seen_fault := torn_renames(tried_folder, disk):
        yield DiskProblem(f"rename is not atomic: a reader found {seen_fault}", POSIX_REMEDY)
    if fault_reason := _folder_rename_fault(tried_folder, disk):
        yield DiskProblem(f"a folder cannot be renamed ({fault_reason})", POSIX_REMEDY)


def torn_renames(tried_folder: Path, disk: Disk) -> str:
    """Return what a reader saw that was neither the old nor the new content, "" if nothing."""
    target = tried_folder / "name"
    over = Event()
    seen_faults = list[str]()
    contents = [b"a" * CONTENT_BYTES, b"b" * CONTENT_BYTES]
    put_bytes(target, contents[0])

    def read_repeatedly() -> None:
        """Read the file until writing is over, and keep the first content that is neither of the
        two."""
        while not over.is_set() and not seen_faults:
            try:
                content = target.read_bytes()
            except FileNotFoundError:
                seen_faults.append("no file")
                return
            if content not in contents:
                fault = f"{len(content)} of {CONTENT_BYTES} bytes, or both contents mixed"
                seen_faults.append(fault)

    reader = Thread(target=read_repeatedly, daemon=True)
    reader.start()
    # the two contents in turn: a reader must see one of them whole
    for number in range(RENAMES):
        put_bytes(tried_folder / "new", contents[number % 2])
        disk.rename(tried_folder / "new", target)
        if seen_faults:
            break
    over.set()
    reader.join()
    return seen_faults[0] if seen_faults else ""


def _folder_rename_fault(tried_folder: Path, disk: Disk) -> str:
    """Return why a folder with a file in it cannot be given another name, "" if it can."""
    old_folder = tried_folder / ".partial"
    new_folder = tried_folder / "whole"
    old_folder.mkdir()
    put_bytes(old_folder / "file", b"a")
    try:
        disk.rename(old_folder, new_folder)
    except OSError as error:
        return error.strerror or str(error)
    if (new_folder / "file").is_file() and not old_folder.exists():
        return ""
    return "its files stay behind"


def _sync_seconds(tried_folder: Path, disk: Disk) -> tuple[float, str]:
    """Return the median seconds of a small file's fsync, and why one failed.

    The reason is "" if none did, of a file or of the folder.
    """
    seconds = list[float]()
    try:
        for number in range(SYNCS):
            probe_file = tried_folder / f"synced{number}"
            start = time.perf_counter()
            write_file(probe_file, b"a" * CONTENT_BYTES)
            disk.sync(probe_file)
            seconds.append(time.perf_counter() - start)
        disk.sync(tried_folder)
    except OSError as error:
        return 0.0, error.strerror or str(error)
    return statistics.median(seconds), ""


def _lock_fault(tried_folder: Path, disk: Disk) -> str:
    """Return what is wrong with locks, "" if a second one is refused."""
    path = tried_folder / "lock"
    with path.open("wb") as first, path.open("wb") as second:
        try:
            disk.lock(first.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.strerror or str(error)
        try:
            # flock belongs to an opened file, so a second opening stands for another process.
            disk.lock(second.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""
        except OSError as error:
            return error.strerror or str(error)
    return "two processes can have the same one"


def _file_time(tried_folder: Path) -> float:
    """Return the seconds from this host's clock to the time that a new file is given."""
    probe_file = tried_folder / "now"
    before = time.time()
    put_bytes(probe_file, b"a")
    modified = probe_file.stat().st_mtime
    after = time.time()
    # 0 anywhere between both looks at the clock
    return min(0.0, modified - before) + max(0.0, modified - after)


def filesystem_of(tried_folder: Path) -> str:
    """Return the type of the filesystem, such as ext4, nfs4 or tmpfs.

    "" where the system does not list mounts.
    """
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    # Of the mounts above the folder the deepest holds it.
    path = str(tried_folder.resolve())
    deepest = ""
    filesystem_kind = ""
    for line in lines:
        # device, mount point, type, options
        _, mount_point, mount_kind, *_ = line.split()
        above = mount_point == "/" or path == mount_point or path.startswith(mount_point + "/")
        if above and len(mount_point) > len(deepest):
            deepest = mount_point
            filesystem_kind = mount_kind
    return filesystem_kind


def judge(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield the findings about the folder, by host."""
    hosts = [answer for answer in answers if answer]
    for host in hosts:
        for message, remedy in host["problems"]:
            location = f"{host['folder']} on {host['host']}"
            yield wrong("disk", f"{location}: {message}", remedy)
    if not any(host["problems"] for host in hosts):
        yield _summarize(hosts)


def _summarize(hosts: Sequence[Answer]) -> Finding:
    """Return the finding of a filesystem without problems, with the figures of the slowest host."""
    slowest = max(hosts, key=lambda host: host["fsync_s"])
    filesystem_kind = slowest["kind"] or "type not known"
    if slowest["kind"] in MEMORY_FILESYSTEMS:
        filesystem_kind += "; it is in memory, and a power cut empties it"
    least_free = min(host["free"] for host in hosts)
    message = (
        f"{slowest['folder']} ({filesystem_kind}): rename, fsync and locks hold, fsync "
        f"{duration(slowest['fsync_s'])}, {size(least_free)} free"
    )
    numbers = {name: slowest[name] for name in ("folder", "kind", "fsync_s", "free", "clock_s")}
    return ok("disk", message, **numbers)
