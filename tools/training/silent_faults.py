"""Hardware that computes wrongly: the sentinel's checks in a run, and the end of a run that has
failed one."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from models.engine.engine import Engine
from models.engine.microbatch_trace import TRACED_MICROBATCH
from models.engine.passes import Share
from models.engine.sentinel import Sentinel, SilentFault
from tools.config.run_file import RunConfig


class FaultyHardware(Exception):
    """Training stopped itself because a rank holds or computes wrong numbers.

    The command exits with code 3.

    hosts: names of the machines to leave out of the next start, each once.
    """

    def __init__(self, message: str, hosts: tuple[str, ...]) -> None:
        super().__init__(message)
        self.hosts = hosts


class SentinelChecks:
    """The steps of a run that the sentinel checks, and their outcome.

    Without train.sentinel no step is checked.
    """

    def __init__(self, engine: Engine, config: RunConfig) -> None:
        # On a CPU the project's own models compute the same bits each time; others may not.
        exact = engine.device.type == "cpu" and not config.model.factory
        self._every = config.train.sentinel
        self._sentinel = Sentinel(engine, exact) if self._every else None
        self._last_clean = 0

    def due(self, step: int) -> bool:
        """Return True if step `step`, counted from 1, is checked."""
        return bool(self._every) and step % self._every == 0

    def checking(
        self, number: int, share_of: Callable[[int], Share]
    ) -> AbstractContextManager[None]:
        """Return the context in which step `number`, counted from 0, is taken.

        share_of: returns the share of a data-parallel rank in this step. Raises SilentFault inside;
            see `Sentinel`.
        """
        if self._sentinel is None or not self.due(number + 1):
            return nullcontext()
        return self._sentinel.checking(number, share_of)

    def fields(self, step: int) -> dict[str, str]:
        """Return the field of metrics.jsonl of a step that was taken; empty if it was not checked.

        step: counted from 1.
        """
        if self._sentinel is None or not self.due(step):
            return {}
        self._last_clean = step
        return {"sentinel": "clean" if self._sentinel.recomputes else "not recomputed"}

    def outcome(
        self, silent_fault: SilentFault, done: int, saved: int
    ) -> tuple[dict[str, Any], FaultyHardware]:
        """Return the event of a fault, for events.jsonl, and the exception that ends the run.

        done: number of steps before the checked one, which was taken back. saved: step of the
        newest checkpoint, 0 if there is none.
        """
        fault = silent_fault.fault
        event = {
            "event": "silent_fault",
            "step": done,
            "checked_step": done + 1,
            "microbatch": TRACED_MICROBATCH,
            **fault.fields(),
            "last_clean": self._last_clean,
            "saved": saved,
        }
        hosts = tuple(dict.fromkeys(fault.hosts))  # several ranks may share a host
        checkpoint = f"step {saved}" if saved else "none"
        if self._last_clean:
            last_clean = f"the last clean check was of step {self._last_clean}"
        else:
            last_clean = "no check of this run was clean"
        message = (
            f"stopped in step {done + 1}, which was taken back: {silent_fault}; newest "
            f"checkpoint: {checkpoint}; {last_clean}; start again without host "
            f"{' or '.join(hosts)}"
        )
        return event, FaultyHardware(message, hosts)
