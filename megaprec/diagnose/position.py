"""The position of a rank in its run: written by its main thread, read by its watchdog.

A phase is a part of a run that has a time limit of its own, such as a step or a save. Within a
phase, `action` is the instruction or action under way. The executor writes before every
instruction, which takes a microsecond.

The time that a rank computes is counted here too, to find ranks that are slow: watchers read it,
and never look at a thread that runs.

Each write also goes to memory that other processes of this machine can read, because a process that
is stopped can no longer tell where it is.
"""

import mmap
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import NamedTuple

from torch import Tensor

from megaprec.comm.waiting import Waits
from megaprec.optim.decision.step_report import StepObserver, StepReport
from megaprec.optim.state.flat_buffer import Buffer


class Phase(StrEnum):
    """A part of a run."""

    LOADING = "loading"
    PREPARATION = "preparation of the data"
    WAITING = "wait for rank 0, which prepares the data"
    STEP = "step"
    REPLAY = "replay of a skipped step"
    COMPARISON = "FP8 comparison"
    EVALUATION = "evaluation"
    SAVE = "save"


# tokenizing a large text takes as long as it takes
UNLIMITED = frozenset({Phase.PREPARATION, Phase.WAITING})
RECORD = "record of the step"  # the action of rank 0 that the others do not share

SIZE = 256  # bytes of the shared memory


class _Account(NamedTuple):
    """The time that a rank has computed in training steps.

    before: seconds computed until `computing_since`.
    computing_since: the monotonic time from which on the rank computes; None where it does not:
        outside of steps, and while records are written.
    waited: seconds that the rank had waited in all at `computing_since`.
    """

    before: float = 0.0
    computing_since: float | None = None
    waited: float = 0.0


class Position:
    """The position of this rank.

    phase, step: the phase, and the number of the step that it belongs to; 0 before the first step.
    action: the instruction or action within the phase; its `str` is read by the watchdog.
    count: number of writes in this phase. entries: number of phases entered so far.
    slowest: seconds of the slowest step so far; 0 until the first step is done.
    waits: the waits of the main thread for other ranks, if they are `waiting.noted`.
    begun: number of training steps that this rank has begun.
    shared: file descriptor of the shared memory; -1 before `share`, and where the system has no
        such memory.
    """

    def __init__(self) -> None:
        self.phase = Phase.LOADING
        self.step = 0
        self.action = object()
        self.count = 0
        self.entries = 0
        self.slowest = 0.0
        self.shared = -1
        self.waits = Waits()
        self.begun = 0
        self._account = _Account()
        self._memory: mmap.mmap | None = None
        # what is written to shared memory: phase and step, then a line by action
        self._head = b""
        self._texts: dict[object, bytes] = {}
        self.note_action("start")
        self._since = time.monotonic()

    def note_action(self, action: object) -> None:
        """Note the instruction or action that begins now."""
        self.action = action
        self.count += 1
        if self._memory is not None:
            record = self._head + (self._texts.get(action) or self._encode(action))
            self._memory[: len(record)] = record

    def _encode(self, action: object) -> bytes:
        """Return the line of an action in shared memory. Kept, because the executor writes the same
        instructions in each step."""
        action_line = in_words(action).encode()[: SIZE // 2] + b"\n"
        self._texts[action] = action_line
        return action_line

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """Note the phase that begins now, and its step; None keeps the step's number."""
        current_time = time.monotonic()
        if self.phase is Phase.STEP:
            self.slowest = max(self.slowest, current_time - self._since)
        if step is not None and phase is Phase.STEP:
            # Phases of one step may take turns. A resumed run begins with a later step than 1.
            self.begun += max(0, step - self.step) if self.begun else 1
        if step is not None:
            self.step = step
        self.phase = phase
        self._since = current_time
        self.count = -1  # 0 after the write below
        self._keep_account(current_time, computes=phase is Phase.STEP)
        self.entries += 1
        self._head = f"{phase}\t{self.step}\t".encode()
        self.note_action("")

    def end_computation(self) -> None:
        """Note that the step's computation has ended, and that its record is written now."""
        self._keep_account(time.monotonic(), computes=False)
        self.note_action(RECORD)

    def computed(self) -> float:
        """Return the seconds that this rank has computed in training steps: not those in which it
        waited for others."""
        return self._computed_at(time.monotonic())

    def _computed_at(self, current_time: float) -> float:
        """Return what `computed` does, at a time."""
        account = self._account
        if account.computing_since is None:
            return account.before
        waited = self.waits.seconds(current_time) - account.waited
        return account.before + max(0.0, current_time - account.computing_since - waited)

    def _keep_account(self, current_time: float, computes: bool) -> None:
        """Close the account so far. computes: True if the rank computes from now on."""
        computing_since = current_time if computes else None
        before = self._computed_at(current_time)
        waited = self.waits.seconds(current_time)
        # replaced as a whole: a reader in another thread never sees a half of it
        self._account = _Account(before, computing_since, waited)

    def share(self) -> None:
        """Write to shared memory too, from now on."""
        if sys.platform == "linux":  # other processes read it through /proc
            self.shared = os.memfd_create("position")
            os.truncate(self.shared, SIZE)
            self._memory = mmap.mmap(self.shared, SIZE)
            self._head = f"{self.phase}\t{self.step}\t".encode()
            self.note_action(self.action)

    @contextmanager
    def in_phase(self, phase: Phase) -> Iterator[None]:
        """Within the context the rank is in `phase`; afterwards the phase before begins anew."""
        outer_phase = self.phase
        self.enter(phase)
        yield
        # not after an error: the rank then stays in the phase that failed
        self.enter(outer_phase)


def in_words(action: object) -> str:
    """Return an instruction or action in words."""
    return getattr(action, "words", None) or str(action)


def read_shared(pid: int, shared: int) -> tuple[str, int, str] | None:
    """Return phase, step and action of another process of this machine, from its shared memory;
    None if unreadable."""
    try:
        with open(f"/proc/{pid}/fd/{shared}", "rb") as memory:
            action_line = memory.read(SIZE).decode(errors="replace").partition("\n")[0]
        phase, step, action = action_line.split("\t")
    except (OSError, ValueError):
        return None
    return phase, int(step), action


class StepPosition(StepObserver):
    """Observer that notes the actions of the optimizer's step in `position`."""

    def __init__(self, position: Position) -> None:
        self.position = position

    def gradients_ready(self, buffers: Sequence[Buffer], scale: Tensor) -> None:
        self.position.note_action("consensus of all ranks")

    def decided(self, buffers: Sequence[Buffer], scale: Tensor, skip: Tensor) -> None:
        self.position.note_action("update")

    def updated(self, buffers: Sequence[Buffer]) -> None:
        self.position.note_action("report of the step")

    def outcome(self, report: StepReport) -> None:
        self.position.note_action("end of the step")
