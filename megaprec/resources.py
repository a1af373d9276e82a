"""The CPU cores and the memory that this process may use: those of the machine, or less in a
container or a batch job.

Containers, Slurm and systemd limit a group of processes (cgroups(7)): a quota of CPU time per
period, and bytes of memory. The process still sees all cores, and torch starts a thread on each;
with more threads than the quota has cores for, the kernel stops all of them in the middle of a
product, again and again. A limit of any enclosing group counts.
"""

import math
import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

from megaprec.errors import UserError

_SYSTEM = Path("/")  # where proc and sys are; tests have them elsewhere
# processes that any machine, and each core, may be asked for
USUAL = 64
PER_CORE = 8
# Numbers of threads that torch's and numpy's libraries read when they are loaded.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# how libraries in C and C++ tell that there is no memory, or no thread
WANT = (
    "Resource temporarily unavailable",
    "can't start new thread",
    "Cannot allocate memory",
    "bad_alloc",
    "can't allocate memory",
)


def cores(system: Path = _SYSTEM) -> int:
    """Return the number of CPU cores that this process may use: a quota counts as whole cores,
    rounded up."""
    if hasattr(os, "sched_getaffinity"):
        available = len(os.sched_getaffinity(0))
    else:
        available = os.cpu_count() or 1
    quotas = [max(1, math.ceil(quota)) for quota in _quotas(system)]
    return min([available, *quotas])


def memory_bytes(system: Path = _SYSTEM) -> int:
    """Return the bytes of memory that this process may use."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for group in _groups("memory", system):
        for name in ("memory.max", "memory.limit_in_bytes"):  # of cgroups of version 2 and 1
            limit = _read_number(group / name)
            if limit is not None:
                limits.append(limit)
    return min(limits)


def is_for_want_of_resources(error: BaseException) -> bool:
    """Return True for an error of a library that has no memory or thread left, which says nothing
    of its input."""
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in WANT)


def most_processes() -> int:
    """Return the number of processes, or of threads, that this machine may be asked for: more is a
    slip."""
    return max(USUAL, PER_CORE * cores())


def require_threads(environ: Mapping[str, str]) -> None:
    """Raise UserError for a number of threads with which libraries crash, or which they do not
    understand.

    OMP_NUM_THREADS may list a number for each level of nesting, "4,1".
    """
    most = most_processes()
    for name in THREADS:
        value = environ.get(name, "").strip()
        numbers = value.split(",") if name == "OMP_NUM_THREADS" else [value]
        if value and not all(_is_count(number, most) for number in numbers):
            raise UserError.of("megaprec.thread_count", name=name, value=value, most=most)


def _is_count(text: str, most: int) -> bool:
    """Return True for the digits of a number from 1 to `most`."""
    has_digits = re.fullmatch(r"[0-9]{1,9}", text.strip()) is not None
    return has_digits and 0 < int(text) <= most


def peak_memory() -> int:
    """Return the most bytes of memory that this process has had."""
    if sys.platform == "linux":
        # not getrusage, which also knows the memory of the process that started this one
        return status_bytes("VmHWM:")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, others kibibytes


def status_bytes(field: str) -> int:
    """Return a field of this process's status in /proc, such as "VmRSS:", in bytes. Linux only."""
    status = Path("/proc/self/status").read_text()
    _, _, after = status.partition(field)
    kibibytes = after.split()[0]
    return int(kibibytes) * 1024


def _quotas(system: Path) -> Iterator[float]:
    """Yield the quota of each group that has one, in cores."""
    for group in _groups("cpu", system):
        # cgroups of version 1; a quota of -1 is no limit
        quota = _read_number(group / "cpu.cfs_quota_us")
        period = _read_number(group / "cpu.cfs_period_us")
        with suppress(OSError, ValueError):
            # of version 2; "max" is no number: no limit
            first, second = (group / "cpu.max").read_text().split()
            quota = int(first)
            period = int(second)
        if quota is not None and quota > 0 and period:
            yield quota / period


def _groups(controller: str, system: Path) -> Iterator[Path]:
    """Yield the folders of the groups that this process is in, from its own to the outermost one
    that is visible.

    In a container the file of its groups may give their place outside of it; the outermost folder
    then is its own.
    """
    with suppress(OSError):
        for line in os.fsdecode((system / "proc/self/cgroup").read_bytes()).splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            # one folder for all that are mounted together
            root = system / "sys/fs/cgroup" / controllers
            if not root.is_dir():
                root = root.with_name(controller)
            innermost = PurePosixPath(path.lstrip("/"))
            for group in (innermost, *innermost.parents):
                if ".." not in group.parts:
                    yield root / group


def _read_number(file: Path) -> int | None:
    """Return the number in a file, None if there is no such file or number."""
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return None
