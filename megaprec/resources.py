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


def cores(system: Path = _SYSTEM) -> int:
    """Return the number of CPU cores that this process may use: a quota counts as whole cores,
    rounded up."""
    if hasattr(os, "sched_getaffinity"):
        there = len(os.sched_getaffinity(0))
    else:
        there = os.cpu_count() or 1
    return min([there, *(max(1, math.ceil(quota)) for quota in _quotas(system))])


def memory_bytes(system: Path = _SYSTEM) -> int:
    """Return the bytes of memory that this process may use."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    names = ("memory.max", "memory.limit_in_bytes")  # of cgroups of version 2 and 1
    limits = (_number(group / name) for group in _groups("memory", system) for name in names)
    return min([there, *(limit for limit in limits if limit is not None)])


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
        usable = [
            re.fullmatch(r"[0-9]{1,9}", one.strip()) and 0 < int(one) <= most for one in numbers
        ]
        if value and not all(usable):
            raise UserError(
                f"{name}={value!r}: give a number of threads from 1 to {most}, or unset it, "
                "which takes the cores "
                "that there are"
            )


def peak_memory() -> int:
    """Return the most bytes of memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, other systems kibibytes
    if sys.platform == "darwin":
        return peak
    return peak * 1024


def _quotas(system: Path) -> Iterator[float]:
    """Yield the quota of each group that has one, in cores."""
    for group in _groups("cpu", system):
        quota = _number(group / "cpu.cfs_quota_us")
        period = _number(group / "cpu.cfs_period_us")
        with suppress(OSError, ValueError):
            first, second = (group / "cpu.max").read_text().split()
            # "max" is no number: no limit
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
            _, controllers, place = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            # one folder for all that are mounted together
            root = system / "sys/fs/cgroup" / controllers
            if not root.is_dir():
                root = root.with_name(controller)
            within = PurePosixPath(place.lstrip("/"))
            yield from (
                root / group for group in (within, *within.parents) if ".." not in group.parts
            )


def _number(file: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return None
