"""The threads of gloo, which wait for their turn instead of interrupting the thread that they
serve.

Each process group of gloo has a thread that reads its sockets. A message wakes this thread up, and
Linux lets a thread that wakes up interrupt another one. If that one holds the lock of the
connection, because it is sending, gloo's thread tries to take the lock over and over
(`Pair::handleEvents` of gloo's tcp transport) until its time slice has ended, some milliseconds
later. Where there are as many ranks as cores, most small messages meet this.

Linux's scheduling policy SCHED_BATCH ("man 7 sched") is that of all other threads, but for one
thing: whoever wakes up waits until a core is free or a time slice ends. A small sum over two ranks
then takes a fifth of the time (docs/performance.md).
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def waiting_their_turn() -> Iterator[None]:
    """Let threads that this thread starts inside have the policy SCHED_BATCH.

    Where the system has no such policy or refuses it, or where this process was started with a
    policy of its own, threads are as they would be without.
    """
    changed = _set_policy("SCHED_OTHER", "SCHED_BATCH")
    try:
        yield
    finally:
        if changed:
            _set_policy("SCHED_BATCH", "SCHED_OTHER")


def _set_policy(before: str, after: str) -> bool:
    """Change this thread's scheduling policy from `before` to `after`; threads inherit it.

    Return True if it was changed: not if the thread has a third policy, or the system refuses.
    """
    try:
        if sys.platform != "linux" or os.sched_getscheduler(0) != getattr(os, before):
            return False
        os.sched_setscheduler(0, getattr(os, after), os.sched_param(0))
    except OSError:  # a sandbox refuses it
        return False
    return True
