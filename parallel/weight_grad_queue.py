"""The queue of deferred weight gradients, the part of a backward pass that no other stage waits
for.

Layers offer deferrable work by `deferred.offer(work)`. The caller of the backward pass decides when
the work runs: at once, unless the caller collects it. Deferred work must hold every tensor that it
needs, because the graph is freed by then.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Work = deque[Callable[[], object]]


def carry_out(work: Work) -> None:
    """Run deferred work, in order."""
    # one by one, so that each product's operands are released as it is done
    while work:
        run = work.popleft()
        run()
        del run


class WeightGradQueue:
    """The queue that a rank's layers and its executor share for deferred weight gradients."""

    def __init__(self) -> None:
        self._collected: Work | None = None

    def offer(self, work: Callable[[], object]) -> None:
        """Run `work` now, or append it to the collected work."""
        if self._collected is None:
            work()
        else:
            self._collected.append(work)

    @property
    def is_collecting(self) -> bool:
        """Return True if `offer` defers work."""
        return self._collected is not None

    @contextmanager
    def collect(self) -> Iterator[Work]:
        """Collect work within the context instead of running it.

        Yields the deque to which `offer` appends, in order.
        """
        work: Work = deque()
        self._collected = work
        try:
            yield work
        finally:
            # also after a failed backward pass: later ones must not add to this work
            self._collected = None
