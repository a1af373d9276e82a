"""The records of a run: metrics.jsonl, events.jsonl, TensorBoard events and log lines. Rank 0 alone writes them."""

import math
import sys
from collections import deque
from contextlib import AbstractContextManager, ExitStack
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from megaprec.data.files import write_whole
from megaprec.durable import file_error
from megaprec.optim.step_report import to_json
from tools.console.progress_bar import Steps
from tools.console.units import flops
from tools.journal.lines import Lines
from tools.journal.records import EVENTS, LASTING, METRICS, lost_steps, odd_lines, read_lines

PACE = 20  # number of newest steps whose mean time the ETA is estimated from


class Scalars(Protocol):
    """The part of TensorBoard's writer that is used here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...
    def close(self) -> None: ...


class Journal(AbstractContextManager["Journal"]):
    """Writer of a record per step. After a resume from `start`, records of later steps are removed: they are taken
    again.

    With start = 0 in the folder of a run that left no checkpoint, that run's records are kept as metrics.jsonl.old.
    """

    def __init__(self, folder: Path, start: int, total: int, every: int, progress: bool, tensorboard: bool) -> None:
        if start == 0:
            _put_aside(folder / METRICS, folder / EVENTS)
        self._metrics, self._events = (_reopen(folder / name, start) for name in (METRICS, EVENTS))
        if note := lost_steps(folder / METRICS, start):
            print(f"note       {note}")
        self._scalars = _tensorboard(folder / "tensorboard", start) if tensorboard else None
        self._total, self._every = total, every
        self._pace: deque[float] = deque(maxlen=PACE)
        self._bar = Steps(start, total) if progress and sys.stdout.isatty() else None

    def __exit__(self, *error: object) -> None:
        with ExitStack() as closing:  # whatever fails, the others are closed
            if self._bar:
                closing.callback(self._bar.stop)
            closing.callback(self._metrics.close)
            closing.callback(self._events.close)
            if self._scalars:
                closing.callback(self._scalars.close)

    def write(self, record: dict[str, Any]) -> None:
        """Write the record of a step. record: the fields of metrics.jsonl."""
        self._metrics.write(to_json(record))
        self._scalars = _added(self._scalars, record)
        self._pace.append(record["seconds"])
        self._show(record, (self._total - record["step"]) * sum(self._pace) / len(self._pace))

    def write_event(self, event: dict[str, Any]) -> None:
        """Write an event of the step event["step"] to events.jsonl."""
        self._events.write(to_json(event))

    def _show(self, record: dict[str, Any], eta: float) -> None:
        """Print one line per step; on a terminal ordinary steps share one line that is redrawn."""
        step, events = record["step"], _events(record)
        if self._bar:
            self._bar.update(step, f"{_numbers(record)}{_mfu(record)}  ETA {_clock(eta)}")
            if events:
                self._bar.say(f"step {step}/{self._total}  {'  '.join(events)}")
        elif step % self._every == 0 or step == self._total or events:
            speed = f"  {flops(record['tflops'] * 1e12)}/s" if "tflops" in record else ""
            said = f"{_numbers(record)}{speed}{_mfu(record)}  ETA {_clock(eta)}"
            print("  ".join((f"step {step}/{self._total}", said, *events)), flush=True)


def rewind(folder: Path, step: int, event: dict[str, Any]) -> None:
    """Remove the records of steps after `step`, which are taken again, and add an event.

    No other process may write them.
    """
    _reopen(folder / METRICS, step).close()
    events = _reopen(folder / EVENTS, step)
    events.write(to_json(event))
    events.close()


def _put_aside(*paths: Path) -> None:
    """Rename files with records of steps, and those beside them, to the first free name of *.old, *.old2, ... and say
    so.

    Events of step 0 alone belong to the run that starts now: it was restarted before its first checkpoint.
    """
    if not any(line.record is None or line.record["step"] for path in paths for line in read_lines(path)):
        return
    for path in paths:
        if path.is_file() and path.stat().st_size:
            names = (f"{path.name}.old{number if number > 1 else ''}" for number in count(1))
            free = next(aside for name in names if not (aside := path.with_name(name)).exists())
            path.rename(free)
            print(f"kept       {free}, of a run that left no checkpoint")


def _reopen(path: Path, start: int) -> Lines:
    """Open a file of records for appending, without the records of steps after `start`, which are taken again."""
    lines = read_lines(path)
    kept = [line.content for line in lines if line.record is None or _stays(line.record, start)]
    write_whole(path, b"".join(content + b"\n" for content in kept))
    if note := odd_lines(path):
        print(f"note       {note}")
    return Lines(path)


def _stays(record: dict[str, Any], start: int) -> bool:
    return record["step"] <= start or record.get("event") in LASTING


def _numbers(record: dict[str, Any]) -> str:
    words = (
        f"loss {record['loss']:.4f}",
        f"grad norm {record['grad_norm']:.3g}",
        f"scale {_scale(record['loss_scale'])}",
        f"{record['tokens_per_s']:,.0f} tokens/s",
    )
    return "  ".join(words)


def _mfu(record: dict[str, Any]) -> str:
    return f"  MFU {record['mfu']:.1%}" if "mfu" in record else ""


def _events(record: dict[str, Any]) -> list[str]:
    """Return the parts of the log line that are not printed for every step."""
    events = [f"held-out loss {record['eval_loss']:.4f}"] if "eval_loss" in record else []
    if "shadow_loss_gap" in record:
        cosine = f"cosine {record['shadow_cosine']:.3f}"
        events.append(f"FP8 shadow: loss gap {record['shadow_loss_gap']:+.3%}, lowest {cosine}")
    if "shadow_alarm" in record:
        events.append(f"FP8 ALARM: {record['shadow_alarm']}")
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
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def _added(scalars: Scalars | None, record: dict[str, Any]) -> Scalars | None:
    """Add the numbers of a record. Return the writer, None with a warning if its disk fails."""
    if scalars is None:
        return None
    try:
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                scalars.add_scalar(name, value, record["step"])
    except OSError as error:
        print(f"warning    no more TensorBoard events: {file_error(error)}", file=sys.stderr, flush=True)
        return None
    return scalars


def _tensorboard(folder: Path, start: int) -> Scalars | None:
    """Return a writer if TensorBoard is installed. It hides events after `start` of an earlier, longer run."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  # optional, and slow to import
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=start + 1)
