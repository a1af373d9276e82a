"""Batches are read one step ahead, by a thread, while the step before is computed.

What is read depends on the position only, so a batch is the same whether it was read ahead or not.
An error of the reading is raised where the batch is asked for, so it ends the step that it belongs
to and no other; the state before that step is what a checkpoint holds. Nothing is read ahead that
is not asked for next: a run that resumes, repeats a step or ends leaves what was read ahead unused.
"""

from collections.abc import Callable
from threading import Thread
from typing import Generic, TypeVar

Read = TypeVar("Read")


class Prefetch(Generic[Read]):
    """Reads one position ahead.

    read: a function of the position alone, which may run in another thread.
    """

    def __init__(self, read: Callable[[int], Read]) -> None:
        self._read = read
        self._ahead: _Ahead[Read] | None = None

    def take(self, position: int, following: int | None = None) -> Read:
        """Return what is read at `position`, and begin to read at `following`.

        Raises what `read` raises there.
        """
        ahead = self._ahead
        self._ahead = None
        if ahead is not None and ahead.position == position:
            batch = ahead.result()
        else:
            batch = self._read(position)
        if following is not None:
            self._ahead = _Ahead(self._read, following)
        return batch


class _Ahead(Generic[Read]):
    """A reading in a thread, which does not keep the process alive: it is a daemon."""

    def __init__(self, read: Callable[[int], Read], position: int) -> None:
        self.position = position
        self._results: list[Read] = []
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, args=(read,), name="prefetch", daemon=True)
        self._thread.start()

    def _run(self, read: Callable[[int], Read]) -> None:
        try:
            self._results.append(read(self.position))
        except BaseException as error:  # raised by `result`, in the thread that asks for it
            self._error = error

    def result(self) -> Read:
        """Wait for the reading; return what it read or raise what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results[0]
