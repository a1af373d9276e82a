"""Work of a backward pass that can wait: the gradients of weights, for which no other stage waits.

Layers say what could be done later, `deferred.run(work)`, and whoever runs the backward pass decides: unless he
collects it, it is done at once. What a layer puts off must hold all that it needs, for the graph is gone by then.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Work = deque[Callable[[], object]]


class WeightGradQueue:
    """What the layers of a rank and its executor share: where work goes that can wait."""

    def __init__(self) -> None:
        self._collected: Work | None = None

    def run(self, work: Callable[[], object]) -> None:
        """Does `work` now, or leaves it to whoever collects."""
        if self._collected is None:
            work()
        else:
            self._collected.append(work)

    @property
    def is_collecting(self) -> bool:
        """Whether `run` leaves work to someone."""
        return self._collected is not None

    @contextmanager
    def collect(self) -> Iterator[Work]:
        """Inside, `run` puts off; the work gathers, in order, in the deque that is given."""
        self._collected = work = deque()
        try:
            yield work
        finally:
            self._collected = None
