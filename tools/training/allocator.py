"""Setting glibc's allocator to keep freed memory for the next allocation instead of returning it to
the system.

A training step allocates the same large blocks again and again. By default glibc returns them when
they are freed, and the system has to find, clear and map each page anew: a tenth of a step's time
on a CPU.
"""

import ctypes
import os
import sys

# options of mallopt, from malloc.h
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_FREE_BYTES = 1 << 30  # that may stay free at the end of the heap
_HEAP_BLOCK_BYTES = 1 << 25  # largest block that comes from the heap: the most that glibc allows


def keep_freed_memory() -> None:
    """Set this process's glibc to keep freed memory.

    Nothing is set if the environment configures the allocator.
    """
    configured = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if sys.platform != "linux" or configured:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries, such as musl, have none
        mallopt(_TRIM_THRESHOLD, _FREE_BYTES)
        mallopt(_MMAP_THRESHOLD, _HEAP_BLOCK_BYTES)
