"""Setting glibc's allocator to keep freed memory for the next allocation instead of returning it to
the system.

A training step allocates the same large blocks again and again. By default glibc returns them when
they are freed, and the system has to find, clear and map each page anew: a tenth of a step's time
on a CPU.
"""

import ctypes
import os
import sys

# names of mallopt's, from malloc.h
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
# bytes: free at the end of the heap; of one piece, the most that glibc allows
_KEPT = 1 << 30
_LARGEST = 1 << 25


def keep_freed_memory() -> None:
    """Set this process's glibc to keep freed memory, unless the environment configures the
    allocator."""
    spoken_for = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if sys.platform != "linux" or spoken_for:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _KEPT)
        mallopt(_MMAP_THRESHOLD, _LARGEST)
