"""The limits of a process that reads files of unknown origin.

The programs that are started for such files load this file by its path, and import nothing else of
the project, so that they start fast:

    limit_process = runpy.run_path(PATH)["limit_process"]
"""

import resource
from contextlib import suppress
from pathlib import Path


def limit_process(memory: int, seconds: int | None = None, may_start_others: bool = True) -> None:
    """Limit this process: `memory` bytes more than it has, processor time, and no file to write.

    seconds: of processor time since its start; None: no limit of it.
    may_start_others: it may start threads and processes.
    Memory is limited on Linux only: other systems do not say how much of it this process has, or do
    not keep to it.
    """
    limits = {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    with suppress(FileNotFoundError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + memory
    if seconds is not None:
        limits[resource.RLIMIT_CPU] = seconds
    if not may_start_others:
        limits[resource.RLIMIT_NPROC] = 0
    for kind, maximum in limits.items():
        _, allowed = resource.getrlimit(kind)  # the user's own limit, which may only be lowered
        if allowed != resource.RLIM_INFINITY:
            maximum = min(maximum, allowed)
        resource.setrlimit(kind, (maximum, maximum))
