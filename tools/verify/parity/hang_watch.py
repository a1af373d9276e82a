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
from collections import Counter
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
from megaprec.durable import put_text
from parallel.pipeline.instructions import Instruction
from tools.verify.parity.borders import shared_name

PATIENCE = 20.0  # seconds without any rank moving or computing after which all are stuck
EVERY = 0.5  # seconds between two looks
IDLE = 0.02  # share of one processor below which a rank does not compute


class Trail(Waits):
    """The way of a rank's main thread. The main thread notes it itself at each wait; of the time
    between, another thread knows what faulthandler says.

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
        self.where = whereabouts(sys._getframe(1)) | self._instruction()
        super().begin()

    def end(self) -> None:
        """Note that the wait is over."""
        super().end()
        self.where = None

    def now(self) -> dict[str, Any]:
        """Return the whereabouts of the main thread now, as far as another thread can tell."""
        return self.where or self._from_call_stack()

    def _from_call_stack(self) -> dict[str, Any]:
        """Return the whereabouts of the main thread while it has noted no wait. Another thread
        calls this; the main thread computes, or waits in a collective of the user's own code.

        The fields are those of `whereabouts`, but a collective has no axis here: it is the name of
        the torch function.
        """
        calls = main_calls()  # innermost first
        waits, lines = summarize_calls(calls)
        where: dict[str, Any] = {"at": lines, "waits": waits, **self._instruction()}
        collectives = [call.function for call in calls if _is_collective(call.file, call.function)]
        if waits and collectives:
            # of nested calls of collectives, the outermost names the kind
            where["collective"] = collectives[-1]
        if self.modules:
            where["module"] = self.modules[-1]
        return where

    def _instruction(self) -> dict[str, str]:
        """Return the instruction of the schedule under way, as a field; none outside of passes."""
        action = self.position.action
        return {"instruction": str(action)} if isinstance(action, Instruction) else {}


@contextmanager
def recorded_position(path: Path) -> Iterator[Trail]:
    """Within the context, keep the position of the main thread in the file `path`; yield the trail
    that it has to write."""
    is_over = Event()
    trail = Trail()
    writer = Thread(target=_write_positions, args=(path, is_over, trail), daemon=True)
    writer.start()
    try:
        with noted(trail):
            yield trail
    finally:
        is_over.set()
        writer.join()


def _write_positions(path: Path, is_over: Event, trail: Trail) -> None:
    """Write where this rank is whenever that changes, until the run is over."""
    last = ""
    while not is_over.wait(EVERY):
        process = {"pid": os.getpid(), "processor": round(time.process_time(), 2)}
        text = json.dumps({**process, **trail.now()})
        if text != last:
            # renamed when complete, for another process reads it at any time
            unfinished = path.with_suffix(".tmp")
            put_text(unfinished, text)
            os.replace(unfinished, path)
            last = text


def _is_collective(file: str, function: str) -> bool:
    return file.startswith("torch/distributed/") and not function.startswith(("wrap", "_"))


def whereabouts(frame: FrameType) -> dict[str, Any]:
    """Return the position of the calling thread, which stands still in this frame and those around
    it.

    module: by the common part of its parameters' logical names. collective: axis and kind. waits:
    whether it is in a transfer between ranks. at: the innermost lines of code outside of torch and
    Python.
    """
    lines: list[str] = []
    position: dict[str, Any] = {"at": lines, "waits": False}
    inner_frame: FrameType | None = frame
    while inner_frame is not None:
        file = short_path(inner_frame.f_code.co_filename)
        function = inner_frame.f_code.co_name
        variables = inner_frame.f_locals
        if not lines and file.startswith(WAITING):
            position["waits"] = True
        if not file.startswith(OUTSIDE) and len(lines) < LINES:
            lines.append(f"{file}:{inner_frame.f_lineno} {function}")
        # of nested calls of collectives, the outermost names the kind
        if _is_collective(file, function):
            position["collective"] = function
        instance = variables.get("self")
        if isinstance(instance, Axis):
            kind = function.removeprefix("start_").strip("_")
            position["collective"] = f"{kind} over {instance.name}"
        if "module" not in position:
            module = _module_name(instance, variables.get("ctx"))
            if module:
                position["module"] = module
        inner_frame = inner_frame.f_back
    return position


def _module_name(instance: object, ctx: Any) -> str:
    """Return the name of a module, or of the weight that an autograd function computes with."""
    weight = getattr(ctx, "weight", None)
    if isinstance(weight, nn.Parameter) and has_layout(weight):
        return layout_of(weight).parts[0].name
    return shared_name(instance) if isinstance(instance, nn.Module) else ""


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
        """Look at the ranks until the run is over; end them if none moves or computes for longer
        than `patience` seconds while one waits."""
        seconds = 0.0  # since a rank was last seen moving or computing
        last_positions: dict[int, dict[str, Any]] = {}
        last_used = 0.0
        while not self._over.wait(EVERY):
            reports = self._read_reports()
            positions = {rank: _position(report) for rank, report in reports.items()}
            used = sum(report["processor"] for report in reports.values())
            seconds += EVERY  # counted in looks: a machine that stood still is no hang
            has_moved = positions != last_positions or len(reports) < self.ranks
            # a single look is too short to measure by
            is_busy = seconds > 1 and used - last_used > IDLE * seconds * self.ranks
            if has_moved or is_busy:
                seconds = 0.0
                last_positions = positions
                last_used = used
            # ranks that only sleep are no finding
            elif seconds > self.patience and any(report["waits"] for report in reports.values()):
                self.stuck = positions
                # a handler of another signal would not run inside of a collective
                for report in reports.values():
                    with suppress(ProcessLookupError):
                        os.kill(report["pid"], signal.SIGKILL)
                return

    def _read_reports(self) -> dict[int, dict[str, Any]]:
        """Return what each rank has last written."""
        reports: dict[int, dict[str, Any]] = {}
        for rank in range(self.ranks):
            with suppress(FileNotFoundError):
                reports[rank] = json.loads(self._path(rank).read_text(encoding="utf-8"))
        return reports


def _position(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rank's report without the processor time, which grows though the rank stands
    still."""
    return {name: value for name, value in report.items() if name != "processor"}


def describe_position(rank: int, position: Mapping[str, Any]) -> str:
    """Return the position of a rank in a line."""
    if position["waits"]:
        state = f"waits in {position.get('collective', 'a transfer')}"
    else:
        state = "is"
    lines = f" at {' < '.join(position['at'])}" if position["at"] else ""
    context: list[str] = []
    if "instruction" in position:
        context.append(f"instruction {position['instruction']}")
    if "module" in position:
        context.append(position["module"])
    in_context = f" ({', '.join(context)})" if context else ""
    return f"rank {rank} {state}{lines}{in_context}"


def odd_ranks(stuck: Mapping[int, Mapping[str, Any]]) -> Sequence[int]:
    """Return the ranks that wait for something else than most ranks do, or do not wait; empty if
    none stands out."""
    waits_of = {
        rank: (position.get("collective"), position.get("instruction"), position["waits"])
        for rank, position in stuck.items()
    }
    # of two ranks that differ the first counts as the common one
    ((common, _),) = Counter(waits_of.values()).most_common(1)
    return [rank for rank, wait in waits_of.items() if wait != common]
