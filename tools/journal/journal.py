"""The records of a run: metrics.jsonl, events.jsonl, log lines and trackers. Rank 0 alone writes
them."""

import math
import os
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import count
from pathlib import Path
from typing import Any

from megaprec.data.files import write_whole
from megaprec.optim.step_report import to_json
from tools.console.progress_bar import Steps
from tools.console.units import flops
from tools.journal.lines import Lines
from tools.journal.records import (
    DIGEST,
    DIGESTS,
    EVENTS,
    LASTING,
    METRICS,
    NAMED,
    TASKS,
    lost_steps,
    odd_lines,
    read_lines,
)
from tools.journal.trackers import Feed

PACE = 20  # number of newest steps whose mean time the ETA is estimated from


class Journal(AbstractContextManager["Journal"]):
    """Writer of a record per step. After a resume from `start`, records of later steps are removed:
    they are taken again.

    With start = 0 in the folder of a run that left no checkpoint, that run's records are kept as
    metrics.jsonl.old.
    """

    def __init__(
        self,
        folder: Path,
        start: int,
        total: int,
        every: int,
        progress: bool,
        trackers: Sequence[Feed] = (),
    ) -> None:
        if start == 0:
            _put_aside(folder / METRICS, folder / EVENTS, folder / DIGESTS)
        if note := _taken_again(folder / METRICS, start):
            print(f"note       {note}")
        self._metrics, self._events = (_reopen(folder / name, start) for name in (METRICS, EVENTS))
        self._digests = _Later(folder / DIGESTS, start)
        if note := lost_steps(folder / METRICS, start):
            print(f"note       {note}")
        self._trackers = trackers
        self._newest = start
        self._total = total
        self._every = every
        self._pace: deque[float] = deque(maxlen=PACE)
        self._bar = Steps(start, total) if progress and sys.stdout.isatty() else None

    def __exit__(self, *error: object) -> None:
        with ExitStack() as closing:  # whatever fails, the others are closed
            for tracker in self._trackers:
                closing.callback(tracker.finish, self._newest == self._total)
            if self._bar:
                closing.callback(self._bar.stop)
            closing.callback(self._metrics.close)
            closing.callback(self._events.close)
            closing.callback(self._digests.close)

    def write(self, record: dict[str, Any]) -> None:
        """Write the record of a step. record: the fields of metrics.jsonl."""
        self._metrics.write(to_json(record))
        self._newest = record["step"]
        for tracker in self._trackers:
            tracker.log(record)
        self._pace.append(record["seconds"])
        self._show(record, (self._total - record["step"]) * sum(self._pace) / len(self._pace))

    def write_event(self, event: dict[str, Any]) -> None:
        """Write an event of the step event["step"] to events.jsonl, or to digests.jsonl if it is
        one of the state."""
        (self._digests if event["event"] == DIGEST else self._events).write(to_json(event))

    def _show(self, record: dict[str, Any], eta: float) -> None:
        """Print the lines of the steps that have one; on a terminal above a bar, which shows the
        newest step."""
        step = record["step"]
        events = _events(record)
        line = "  ".join(
            (f"step {step}/{self._total}", *_numbers(record), f"ETA {_clock(eta)}", *events)
        )
        due = step % self._every == 0 or step == self._total or events
        if self._bar:
            self._bar.update(
                step, [_loss(record), _speed(record), *_mfu(record), f"ETA {_clock(eta)}"]
            )
            if due:
                self._bar.say(line)
        elif due:
            print(line, flush=True)


class _Later:
    """A file of lines that is created with its first line; one that is there loses the records of
    later steps."""

    def __init__(self, path: Path, start: int) -> None:
        self._path = path
        self._start = start
        self._lines = _reopen(path, start) if path.is_file() else None

    def write(self, line: str) -> None:
        self._lines = self._lines or _reopen(self._path, self._start)
        self._lines.write(line)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def rewind(folder: Path, step: int, event: dict[str, Any]) -> None:
    """Remove the records of steps after `step`, which are taken again, and add an event.

    No other process may write them.
    """
    _reopen(folder / METRICS, step).close()
    _Later(folder / DIGESTS, step).close()
    events = _reopen(folder / EVENTS, step)
    events.write(to_json(event))
    events.close()


def _put_aside(*paths: Path) -> None:
    """Rename files with records of steps, and those beside them, to the first free name of *.old,
    *.old2, ... and say so.

    Events of step 0 alone belong to the run that starts now: it was restarted before its first
    checkpoint.
    """
    if not any(
        line.record is None or line.record["step"] for path in paths for line in read_lines(path)
    ):
        return
    for path in paths:
        if path.is_file() and path.stat().st_size:
            names = (f"{path.name}.old{number if number > 1 else ''}" for number in count(1))
            free = next(aside for name in names if not (aside := path.with_name(name)).exists())
            path.rename(free)
            print(f"kept       {free}, of a run that left no checkpoint")


def _reopen(path: Path, start: int) -> Lines:
    """Open a file of records for appending, without the records of steps after `start`, which are
    taken again."""
    lines = read_lines(path)
    if path.is_symlink():
        kept_file = os.path.realpath(path)
        print(
            f"note       {path} was a link, and is a file of this run now; {kept_file} stays as "
            "it is"
        )
    kept = [line.content for line in lines if line.record is None or _stays(line.record, start)]
    write_whole(path, b"".join(content + b"\n" for content in kept))
    if note := odd_lines(path):
        print(f"note       {note}")
    return Lines(path)


def _taken_again(path: Path, start: int) -> str:
    """Return a line about the records that go, for their steps are taken again; empty if there are
    none."""
    going = [
        line.record["step"]
        for line in read_lines(path)
        if line.record and not _stays(line.record, start)
    ]
    if not going:
        return ""
    steps = f"step {going[0]} is" if len(going) == 1 else f"steps {min(going)} to {max(going)} are"
    what = "the line of this step goes" if len(going) == 1 else "the lines of these steps go"
    return f"{path}: {steps} taken again, so {what}"


def _stays(record: dict[str, Any], start: int) -> bool:
    return record["step"] <= start or record.get("event") in LASTING


def _numbers(record: dict[str, Any]) -> list[str]:
    """Return the parts of the log line that every step has."""
    rate = f"lr {record['lr']:.3g}"
    norm = f"grad norm {record['grad_norm']:.3g}"
    scale = f"scale {_scale(record['loss_scale'])}"
    return [
        _loss(record),
        *_mtp_loss(record),
        rate,
        norm,
        scale,
        _speed(record),
        *_flops(record),
        *_mfu(record),
    ]


def _loss(record: dict[str, Any]) -> str:
    return f"loss {record['loss']:.4f}"


def _mtp_loss(record: dict[str, Any]) -> list[str]:
    """Return the loss of the modules of multi-token prediction, if the model has any."""
    return [f"mtp loss {record['mtp_loss']:.4f}"] if "mtp_loss" in record else []


def _speed(record: dict[str, Any]) -> str:
    return f"{record['tokens_per_s']:,.0f} tokens/s"


def _flops(record: dict[str, Any]) -> list[str]:
    return [f"{flops(record['tflops'] * 1e12)}/s"] if "tflops" in record else []


def _mfu(record: dict[str, Any]) -> list[str]:
    return [f"MFU {record['mfu']:.1%}"] if "mfu" in record else []


def _events(record: dict[str, Any]) -> list[str]:
    """Return the parts of the log line that are not printed for every step."""
    events = [f"held-out loss {record['eval_loss']:.4f}"] if "eval_loss" in record else []
    named = (
        (key.removeprefix(NAMED), loss) for key, loss in record.items() if key.startswith(NAMED)
    )
    events += [f"{name} loss {loss:.4f}" for name, loss in named]
    tasks = (
        (key.removeprefix(TASKS), value) for key, value in record.items() if key.startswith(TASKS)
    )
    events += [f"{name.replace('/', ' ')} {value:.4f}" for name, value in tasks]
    if "shadow_loss_gap" in record:
        cosine = f"cosine {record['shadow_cosine']:.3f}"
        events.append(f"FP8 shadow: loss gap {record['shadow_loss_gap']:+.3%}, lowest {cosine}")
    if "shadow_alarm" in record:
        events.append(f"FP8 ALARM: {record['shadow_alarm']}")
    if "straggler" in record:
        events.append(f"warning: {record['straggler']}")
    if record["outcome"] != "applied":
        where = f" in {record['overflow_in']}" if "overflow_in" in record else ""
        events.append(f"{record['outcome']}{where} ({record['skipped_total']} so far)")
    return events


def _scale(scale: float) -> str:
    """Return a short form of the loss scale, a power of two as 2^32."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 and scale > 8 else f"{scale:g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
    return f"{minutes}:{rest:02}"
