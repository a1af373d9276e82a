"""Watching where each rank is, to detect that all ranks wait for ever.

A rank that waits in a collective which other ranks never enter would wait until gloo's timeout,
half an hour, and then report only that. So the main thread of each rank notes at the begin of each
wait where it is: instruction of the schedule, module and collective. Another thread writes that to
a file twice a second, and what Python's faulthandler says of a rank that does not wait. The process
that started the ranks watches these files: if no rank has moved and none has used its processor for
a while, all wait, and their positions are the finding. A slow or crowded machine does not cause
this: ranks do use the processor there.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from typing import Any

from torch import nn

from megaprec.comm.axis import Axis
from megaprec.comm.layout import has_layout, layout_of
from megaprec.comm.waiting import Waits, noted
from megaprec.diagnose.call_stack import (
    LINES,
    OUTSIDE,
    WAITING,
    main_calls,
    short_path,
    summarize_calls,
)
from megaprec.diagnose.position import Position
from parallel.pipeline.executor import Executor
from parallel.pipeline.instructions import Instruction
from tools.parity.borders import shared_name

PATIENCE = 20.0  # seconds without any rank moving or computing after which all are stuck
EVERY = 0.5
IDLE = 0.02  # share of one processor below which a rank does not compute


class Trail(Waits):
    """The way of a rank's main thread, which writes it itself: no other thread looks at what it
    runs.

    position: with the instruction of the schedule. modules: those whose forward pass is under way,
    by the common part of their parameters' logical names, innermost last. where: whereabouts in the
    present wait; None between waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.position = Position()
        self.modules: list[str] = []
        self.where: dict[str, Any] | None = None

    def begin(self) -> None:
        """Note that a wait begins, and where."""
        self.where = whereabouts(sys._getframe(1))
        super().begin()

    def end(self) -> None:
        """Note that the wait is over."""
        super().end()
        self.where = None

    def now(self) -> dict[str, Any]:
        """Return the whereabouts of the main thread now, as far as another thread can tell."""
        return self.where or self._from_outside()

    def _from_outside(self) -> dict[str, Any]:
        """Return the whereabouts outside of waits that are noted; a wait of the user's own code may
        be there."""
        calls = main_calls()
        waits, lines = summarize_calls(calls)
        where: dict[str, Any] = {"at": lines, "waits": waits}
        collectives = [call.function for call in calls if _is_collective(call.file, call.function)]
        if waits and collectives:
            where["collective"] = collectives[-1]
        if isinstance(self.position.doing, Instruction):
            where["instruction"] = str(self.position.doing)
        if self.modules:
            where["module"] = self.modules[-1]
        return where


@contextmanager
def noting(path: Path) -> Iterator[Trail]:
    """Within the context, keep the position of the main thread in the file `path`; yields what it
    has to write."""
    over = Event()
    trail = Trail()
    watcher = Thread(target=_note, args=(path, over, trail), daemon=True)
    watcher.start()
    try:
        with noted(trail):
            yield trail
    finally:
        over.set()
        watcher.join()


def _note(path: Path, over: Event, trail: Trail) -> None:
    last = ""
    while not over.wait(EVERY):
        where = {"pid": os.getpid(), "processor": round(time.process_time(), 2)}
        text = json.dumps({**where, **trail.now()})
        if text != last:
            unfinished = path.with_suffix(".tmp")
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, path)
            last = text


def _is_collective(file: str, function: str) -> bool:
    return file.startswith("torch/distributed/") and not function.startswith(("wrap", "_"))


def whereabouts(frame: FrameType) -> dict[str, Any]:
    """Return the position of the calling thread, which stands still in this frame and those around
    it.

    instruction: of the schedule. module: by the common part of its parameters' logical names.
    collective: axis and kind. waits: whether it is in a transfer between ranks. at: the innermost
    lines of code outside of torch and Python.
    """
    found: dict[str, Any] = {"at": [], "waits": False}
    inner: FrameType | None = frame
    while inner is not None:
        file = short_path(inner.f_code.co_filename)
        local = inner.f_locals
        found["waits"] |= not found["at"] and file.startswith(WAITING)
        if not file.startswith(OUTSIDE) and len(found["at"]) < LINES:
            found["at"].append(f"{file}:{inner.f_lineno} {inner.f_code.co_name}")
        if _is_collective(file, inner.f_code.co_name):
            found["collective"] = inner.f_code.co_name
        own = local.get("self")
        if isinstance(own, Axis):
            found["collective"] = (
                f"{inner.f_code.co_name.removeprefix('start_').strip('_')} over {own.name}"
            )
        if isinstance(own, Executor) and inner.f_code.co_name == "carry_out" and "i" in local:
            found["instruction"] = str(local["i"])
        if "module" not in found and (name := _module(own, local.get("ctx"))):
            found["module"] = name
        inner = inner.f_back
    return found


def _module(own: object, ctx: Any) -> str:
    weight = getattr(ctx, "weight", None)
    if isinstance(weight, nn.Parameter) and has_layout(weight):
        return layout_of(weight).parts[0].name
    return shared_name(own) if isinstance(own, nn.Module) else ""


class Watch:
    """Watcher of ranks that record their position in folder/RANK.at; it ends them if all of them
    wait.

    stuck: the last position of each rank in that case; empty until then.
    """

    def __init__(self, folder: Path, ranks: int, patience: float = PATIENCE) -> None:
        self.folder = folder
        self.ranks = ranks
        self.patience = patience
        self.stuck: dict[int, dict[str, Any]] = {}
        self._over = Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watch":
        for rank in range(self.ranks):
            self._path(rank).unlink(missing_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _path(self, rank: int) -> Path:
        return self.folder / f"{rank}.at"

    def _watch(self) -> None:
        seconds = 0.0
        before = dict[int, dict[str, Any]]()
        used = 0.0
        while not self._over.wait(EVERY):
            now = self._said()
            places = {rank: _without_processor(one) for rank, one in now.items()}
            seconds += EVERY  # counted in looks: a machine that stood still is no hang
            busy = _processor(now) - used > IDLE * seconds * self.ranks
            if places != before or len(now) < self.ranks or (busy and seconds > 1):
                seconds = 0.0
                before = places
                used = _processor(now)
            elif seconds > self.patience and any(one["waits"] for one in now.values()):
                self.stuck = places
                for one in now.values():
                    with suppress(ProcessLookupError):
                        os.kill(one["pid"], signal.SIGKILL)
                return

    def _said(self) -> dict[int, dict[str, Any]]:
        said = {}
        for rank in range(self.ranks):
            with suppress(FileNotFoundError):
                said[rank] = json.loads(self._path(rank).read_text(encoding="utf-8"))
        return said


def _processor(said: Mapping[int, Mapping[str, Any]]) -> float:
    """Return the processor seconds of all ranks together, as they tell them."""
    return sum(one["processor"] for one in said.values())


def _without_processor(one: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in one.items() if name != "processor"}


def told(rank: int, one: Mapping[str, Any]) -> str:
    """Return the position of a rank in a line."""
    where = [f"instruction {one['instruction']}"] if "instruction" in one else []
    where += [one["module"]] if "module" in one else []
    how = f"waits in {one.get('collective', 'a transfer')}" if one["waits"] else "is"
    at = f" at {' < '.join(one['at'])}" if one["at"] else ""
    return f"rank {rank} {how}{at}" + (f" ({', '.join(where)})" if where else "")


def odd(stuck: Mapping[int, Mapping[str, Any]]) -> Sequence[int]:
    """Return the ranks that wait for something else than most ranks do, or do not wait; empty if
    none stands out."""
    kinds = {
        rank: (one.get("collective"), one.get("instruction"), one["waits"])
        for rank, one in stuck.items()
    }
    common = max(kinds.values(), key=lambda kind: sum(other == kind for other in kinds.values()))
    return [rank for rank, kind in kinds.items() if kind != common]
