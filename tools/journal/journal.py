"""The records of a run: metrics.jsonl, events.jsonl, log lines and trackers. Rank 0 alone writes
them."""

import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaprec.durable import file_error, naming_file, reading
from megaprec.errors import UserError
from megaprec.tokens.files import write_whole
from megaprec.url_secrets import masked_inside
from tools.console.json_output import to_json
from tools.console.progress_bar import Steps
from tools.console.units import flops, loss_scale
from tools.journal.records import (
    AVERAGE_LOSS,
    AVERAGE_PREFIX,
    COLLAPSE,
    EVENTS,
    FILE_OF_EVENT,
    HELD_OUT_LOSS,
    INVARIANT,
    LASTING,
    METRICS,
    SPIKE_EVENT,
    STRAGGLER,
    TASK_PREFIX,
    VALIDATION_PREFIX,
    describe_cut_off,
    lost_evaluations,
    lost_steps,
    odd_lines,
    read_lines,
)

if TYPE_CHECKING:
    from tools.journal.trackers import Feed

PACE_STEPS = 20  # number of newest steps whose mean time the ETA is estimated from


class LinesLost(UserError):
    """Lines of a run's records that could not be written at its end."""


class Lines:
    """The file `path`, opened for appending on a disk that may be full for a while.

    Lines that cannot be written are kept in memory and written before the next ones, in order; a
    warning says so once, and a note says when the file is complete again. Only if they cannot be
    written at the end are they lost, which is an error. Raises OSError if the file cannot be
    opened.

    A file that was removed, or replaced as editors do it, would still take lines, and they would be
    lost: a warning says so, and the lines go to the file that has the name now.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten = b""
        self._descriptor = self._open()
        self._folder = _identity(path.parent)

    def _open(self) -> int:
        """Return a descriptor of the file, which is made if it is missing."""
        with naming_file(self._path):
            # os.write says how much of a line it has written.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            return os.open(self._path, flags, 0o666)

    def write(self, line: str) -> None:
        """Append a line, or keep it for later."""
        was_waiting = bool(self._unwritten)
        self._unwritten += f"{line}\n".encode()
        error = self._write_waiting()
        if error and not was_waiting:
            effect = "its lines are kept in memory until they can be written; training goes on"
            print(f"warning    {file_error(error)}; {effect}", file=sys.stderr, flush=True)
        if was_waiting and not error:
            print(
                f"note       {self._path}: all lines that were kept in memory are written",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        """Close the file. Raises LinesLost if lines could not be written."""
        error = self._write_waiting()
        os.close(self._descriptor)
        if error:
            lost = self._unwritten.count(b"\n")
            raise LinesLost(f"{file_error(error)}; the last {lost} lines of it are lost")

    def _write_waiting(self) -> OSError | None:
        """Write the lines that wait; return the error that stopped this, if one did."""
        try:
            if self._unwritten:
                self._follow_name()
            while self._unwritten:
                with naming_file(self._path):  # on a full disk a part of a line may be written
                    written = os.write(self._descriptor, self._unwritten)
                    self._unwritten = self._unwritten[written:]
        except OSError as error:
            return error
        return None

    def _follow_name(self) -> None:
        """Open the file that has the name now, if it is another one. Raises OSError."""
        status = os.fstat(self._descriptor)
        named = _identity(self._path)
        # if the run's folder was replaced too, the new one is another run's, and this run ends
        # (`RunFolder`): nothing is opened there
        if named == (status.st_dev, status.st_ino) or _identity(self._path.parent) != self._folder:
            return
        if named is not None:
            with reading(self._path):  # raises for what is no regular file
                pass
        descriptor = self._open()
        os.close(self._descriptor)
        self._descriptor = descriptor
        outcome = "replaced" if named else "removed"
        print(
            f"warning    {self._path} was {outcome} while the run writes it: lines that only the "
            "former file had are lost, and the next ones are in the file of this name",
            file=sys.stderr,
            flush=True,
        )


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of what has this name; None if there is nothing. Raises OSError."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


class Journal(AbstractContextManager["Journal"]):
    """Writer of a record per step.

    After a resume from `start_step`, records of later steps are removed: they are taken again.

    With start_step = 0, or if the run begins as a branch, in the folder of a run that left no
    checkpoint, that run's records are kept as metrics.jsonl.old.

    total_steps: of the run. print_every: steps from one printed line to the next. shows_bar: on a
    terminal, show progress and the newest step. branches: the steps until `start_step` are those of
    another run. total_tokens: that the run will have read at its end, by which the time left is
    told; None: by its steps.
    """

    def __init__(
        self,
        folder: Path,
        start_step: int,
        total_steps: int,
        print_every: int,
        shows_bar: bool,
        trackers: Sequence["Feed"] = (),
        branches: bool = False,
        total_tokens: int | None = None,
    ) -> None:
        metrics_path = folder / METRICS
        begins = branches or start_step == 0
        if begins:  # records of steps that are there belong to another run
            others = [folder / name for name in (EVENTS, *FILE_OF_EVENT.values())]
            _put_aside(start_step, metrics_path, *others)
        _print_note(_repeated_steps(metrics_path, start_step))
        self._metrics = _reopen(metrics_path, start_step)
        self._events = _reopen(folder / EVENTS, start_step)
        self._files = {
            kind: _LazyLines(folder / name, start_step) for kind, name in FILE_OF_EVENT.items()
        }
        if not begins:
            _print_note(lost_steps(metrics_path, start_step))
            _print_note(lost_evaluations(folder, start_step))
        self._trackers = trackers
        self._newest = start_step
        self._total_steps = total_steps
        self._total_tokens = total_tokens
        self._print_every = print_every
        self._recent: deque[dict[str, Any]] = deque(maxlen=PACE_STEPS)
        self._pauses = _Pauses()
        self._bar = None
        if shows_bar and sys.stdout.isatty():
            self._bar = Steps(start_step, total_steps)

    def __exit__(self, *error: object) -> None:
        is_complete = self._newest == self._total_steps
        # Called in the reverse order: whatever fails, the others are closed.
        with ExitStack() as closing:
            for tracker in self._trackers:
                closing.callback(tracker.finish, is_complete)
            if self._bar:
                closing.callback(self._bar.stop)
            closing.callback(self._metrics.close)
            closing.callback(self._events.close)
            for file in self._files.values():
                closing.callback(file.close)

    def write(self, step_record: dict[str, Any]) -> None:
        """Write the record of a step. step_record: the fields of metrics.jsonl."""
        step_number = step_record["step"]
        self._metrics.write(to_json(step_record))
        # for `__exit__`, which tells trackers if the run is complete
        self._newest = step_number
        for tracker in self._trackers:
            tracker.log(step_record)
        self._recent.append(step_record)
        self._pauses.note(step_record["seconds"])
        self._show(step_record, eta=self._seconds_left())

    def write_event(self, event: dict[str, Any]) -> None:
        """Write an event of the step event["step"] to events.jsonl.

        One of a kind that has a file of its own goes there.
        """
        file = self._files.get(event["event"], self._events)
        file.write(to_json(masked_inside(event)))

    def _seconds_left(self) -> float:
        """Return the seconds until the end of the run: its steps at the pace of the newest ones,
        and pauses as long as they were until now.
        """
        newest = self._recent[-1]
        seconds = sum(record["seconds"] for record in self._recent)
        steps_left = self._total_steps - newest["step"]
        pauses = steps_left * self._pauses.mean
        if self._total_tokens is None:
            return steps_left * seconds / len(self._recent) + pauses
        # Steps of different batches take different times, in proportion to their tokens.
        tokens = sum(record["tokens_per_s"] * record["seconds"] for record in self._recent)
        return (self._total_tokens - newest["tokens"]) * seconds / tokens + pauses

    def _show(self, step_record: dict[str, Any], eta: float) -> None:
        """Print the line of a step, if it has one; on a terminal above a bar, which shows the
        newest step.

        eta: seconds until the end of the run.
        """
        step_number = step_record["step"]
        remaining = f"ETA {_format_clock(eta)}"
        events = _format_events(step_record)
        columns = [
            f"step {step_number}/{self._total_steps}",
            *_format_numbers(step_record),
            remaining,
            *events,
        ]
        line = "  ".join(columns)
        # A step with an event has a line, whatever `log.every` is.
        is_regular = step_number % self._print_every == 0
        is_due = is_regular or step_number == self._total_steps or bool(events)
        if self._bar:
            bar = [
                _format_loss(step_record),
                _format_speed(step_record),
                *_format_mfu(step_record),
                remaining,
            ]
            self._bar.update(step_number, bar)
            if is_due:
                self._bar.say(line)
        elif is_due:
            print(line, flush=True)


class _Pauses:
    """The time between steps since the first one: evaluations, saves and whatever else a run does
    there."""

    def __init__(self) -> None:
        self._first: float | None = None  # when the first step ended
        self._steps = 0  # after the first
        self._in_steps = 0.0  # seconds of these steps
        self._passed = 0.0  # seconds from the end of the first step to that of the newest

    def note(self, seconds: float) -> None:
        """Note that a step of so many seconds has just ended."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            return
        self._steps += 1
        self._in_steps += seconds
        self._passed = now - self._first

    @property
    def mean(self) -> float:
        """Mean seconds between two steps."""
        if not self._steps:
            return 0.0
        return max(0.0, self._passed - self._in_steps) / self._steps


class _LazyLines:
    """A file of lines that is created with its first line. One that is there loses the records of
    steps after `start_step`.
    """

    def __init__(self, path: Path, start_step: int) -> None:
        self._path = path
        self._start = start_step
        self._lines = _reopen(path, start_step) if path.is_file() else None

    def write(self, line: str) -> None:
        if self._lines is None:
            self._lines = _reopen(self._path, self._start)
        self._lines.write(line)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def add_event(folder: Path, event: dict[str, Any]) -> None:
    """Add an event to a run that has ended. No other process may write its records. Raises OSError
    or LinesLost."""
    events = Lines(folder / EVENTS)
    events.write(to_json(masked_inside(event)))
    events.close()


def rewind(folder: Path, step_number: int, event: dict[str, Any]) -> None:
    """Remove the records of steps after `step_number`, which are taken again, and add an event.

    No other process may write them.
    """
    _reopen(folder / METRICS, step_number).close()
    for name in FILE_OF_EVENT.values():
        _LazyLines(folder / name, step_number).close()
    events = _reopen(folder / EVENTS, step_number)
    events.write(to_json(masked_inside(event)))
    events.close()


def _print_note(note: str) -> None:
    if note:
        print(f"note       {note}")


def _put_aside(start_step: int, *paths: Path) -> None:
    """If one of the files has a record of another step than `start_step`, rename all that are not
    empty to *.old (or *.old2, ..., the first name that is free), and say so.

    Events of `start_step` alone belong to the run that starts now: it was restarted before its
    first checkpoint.
    """
    if not any(_has_other_steps(path, start_step) for path in paths):
        return
    for path in paths:
        if path.is_file() and path.stat().st_size:
            old_path = _free_old_path(path)
            path.rename(old_path)
            print(f"kept       {old_path}, of a run that left no checkpoint")


def _has_other_steps(path: Path, start_step: int) -> bool:
    """Return True if a line is of another step than `start_step`, or is damaged and may be. One
    that is cut off is nothing to be kept."""
    whole_lines = [line for line in read_lines(path) if not line.cut_off]
    return any(line.record is None or line.record["step"] != start_step for line in whole_lines)


def _free_old_path(path: Path) -> Path:
    old_path = path.with_name(f"{path.name}.old")
    number = 1
    while old_path.exists():
        number += 1
        old_path = path.with_name(f"{path.name}.old{number}")
    return old_path


def _reopen(path: Path, start_step: int) -> Lines:
    """Open a file of records for appending, without the records of steps after `start_step`, which
    are taken again, and without a last line that is cut off.
    """
    lines = read_lines(path)
    # A link, as in a copied run, leads to a file that may belong to another run.
    if path.is_symlink():  # which `write_whole` replaces
        target = os.path.realpath(path)
        print(
            f"note       {path} was a link, and is a file of this run now; {target} stays as it is"
        )
    retained = list[bytes]()
    for line in lines:
        # What is no record stays as it is: nobody knows of which step it is.
        is_retained = line.record is None or _is_retained(line.record, start_step)
        if is_retained and not line.cut_off:
            retained.append(line.content + b"\n")
    if cut_off := describe_cut_off(lines):
        _print_note(f"{path}: {cut_off}: removed")
    write_whole(path, b"".join(retained))
    _print_note(odd_lines(path))
    return Lines(path)


def _repeated_steps(path: Path, start_step: int) -> str:
    """Return a line about the records that go, for their steps are taken again; empty if there are
    none.
    """
    steps = list[int]()
    for line in read_lines(path):
        if line.record and not _is_retained(line.record, start_step):
            steps.append(line.record["step"])
    if not steps:
        return ""
    if len(steps) == 1:
        return f"{path}: step {steps[0]} is taken again, so the line of this step goes"
    first_to_last = f"steps {min(steps)} to {max(steps)}"
    return f"{path}: {first_to_last} are taken again, so the lines of these steps go"


def _is_retained(step_record: dict[str, Any], start_step: int) -> bool:
    return step_record["step"] <= start_step or step_record.get("event") in LASTING


def _format_numbers(step_record: dict[str, Any]) -> list[str]:
    """Return the parts of the log line that every step has."""
    line_parts = [_format_loss(step_record)]
    if "mtp_loss" in step_record:  # of the modules of multi-token prediction
        line_parts.append(f"mtp loss {step_record['mtp_loss']:.4f}")
    if "z_loss" in step_record:  # of the head
        line_parts.append(f"z loss {step_record['z_loss']:.4g}")
    line_parts += [
        f"lr {step_record['lr']:.3g}",
        f"grad norm {step_record['grad_norm']:.3g}",
        f"scale {loss_scale(step_record['loss_scale'])}",
        _format_speed(step_record),
    ]
    if "tflops" in step_record:
        line_parts.append(f"{flops(step_record['tflops'] * 1e12)}/s")
    return [*line_parts, *_format_mfu(step_record)]


def _format_loss(step_record: dict[str, Any]) -> str:
    return f"loss {step_record['loss']:.4f}"


def _format_speed(step_record: dict[str, Any]) -> str:
    return f"{step_record['tokens_per_s']:,.0f} tokens/s"


def _format_mfu(step_record: dict[str, Any]) -> list[str]:
    return [f"MFU {step_record['mfu']:.1%}"] if "mfu" in step_record else []


def _format_events(step_record: dict[str, Any]) -> list[str]:
    """Return the parts of the log line that are not printed for every step."""
    events = format_evaluations(step_record)
    if "shadow_loss_gap" in step_record:
        gap = f"loss gap {step_record['shadow_loss_gap']:+.3%}"
        events.append(f"FP8 shadow: {gap}, lowest cosine {step_record['shadow_cosine']:.3f}")
    if "shadow_alarm" in step_record:
        events.append(f"FP8 ALARM: {step_record['shadow_alarm']}")
    if STRAGGLER in step_record:
        events.append(f"warning: {step_record[STRAGGLER]}")
    if COLLAPSE in step_record:
        events.append(f"warning: {step_record[COLLAPSE]}")
    if INVARIANT in step_record:
        events.append(f"WRONG: {step_record[INVARIANT]}")
    if SPIKE_EVENT in step_record:
        events.append(step_record[SPIKE_EVENT])
    if step_record["outcome"] != "applied":
        outcome = step_record["outcome"]
        if "overflow_in" in step_record:
            outcome += f" in {step_record['overflow_in']}"
        events.append(f"{outcome} ({step_record['skipped_total']} so far)")
    return events


def format_evaluations(step_record: dict[str, Any]) -> list[str]:
    """Return the losses of the held-out part and of the validation sets, then results of tasks."""
    losses = list[str]()
    tasks = list[str]()
    if HELD_OUT_LOSS in step_record:
        losses.append(f"held-out loss {step_record[HELD_OUT_LOSS]:.4f}")
    if AVERAGE_LOSS in step_record:
        losses.append(f"held-out loss of the average {step_record[AVERAGE_LOSS]:.4f}")
    for field_name, value in step_record.items():
        if field_name.startswith(VALIDATION_PREFIX):
            name = field_name.removeprefix(VALIDATION_PREFIX)
            losses.append(f"{name} loss {value:.4f}")
        elif field_name.startswith(AVERAGE_PREFIX):
            name = field_name.removeprefix(AVERAGE_PREFIX)
            losses.append(f"{name} loss of the average {value:.4f}")
        elif field_name.startswith(TASK_PREFIX):
            name = field_name.removeprefix(TASK_PREFIX).replace("/", " ")
            tasks.append(f"{name} {value:.4f}")
    return losses + tasks


def _format_clock(duration: float) -> str:
    minutes, seconds = divmod(round(duration), 60)
    if minutes >= 60:
        return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"
