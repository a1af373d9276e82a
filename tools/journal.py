"""What a run leaves to be read: metrics.jsonl, TensorBoard events, a progress line. Rank 0 alone keeps it."""

import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from megaprec.events import to_json

METRICS = "metrics.jsonl"


class Scalars(Protocol):
    """TensorBoard's writer, as far as it is used here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...
    def close(self) -> None: ...


class Journal(AbstractContextManager["Journal"]):
    """Writes a record per step. After a resume from `start`, records of later steps are first removed: they happen again."""

    def __init__(self, folder: Path, start: int, total: int, every: int, progress: bool, tensorboard: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        kept = [record for record in read_metrics(folder) if record["step"] <= start]
        self._file = (folder / METRICS).open("w", encoding="utf-8")
        self._file.writelines(to_json(record) + "\n" for record in kept)
        self._file.flush()
        self._scalars = _tensorboard(folder / "tensorboard", start) if tensorboard else None
        self._total, self._every, self._last = total, every, start
        self._bar = _bar() if progress and sys.stdout.isatty() else None
        self._task = self._bar.add_task("", total=total, completed=start, said="") if self._bar else None

    def __enter__(self) -> "Journal":
        (self._bar or nullcontext()).__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.stop()
        self._file.close()
        if self._scalars:
            self._scalars.close()

    def write(self, record: dict[str, Any], eta: float) -> None:
        """record: the fields of metrics.jsonl. eta: seconds that the rest of the run will take."""
        self._file.write(to_json(record) + "\n")
        self._file.flush()
        step = record["step"]
        for name, value in record.items() if self._scalars else ():
            if isinstance(value, int | float) and name != "step":
                self._scalars.add_scalar(name, value, step)
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=step, said=_said(record))
        elif step % self._every == 0 or step == self._total or record["outcome"] != "applied":
            print(f"step {step}/{self._total}  {_said(record)}  ETA {_clock(eta)}", flush=True)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All whole records of a run; "inf", "-inf" and "nan" become numbers again. A last line cut off by a kill is left out."""
    return list(_records(folder / METRICS))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        yield {k: float(v) if isinstance(v, str) and v in ("inf", "-inf", "nan") else v for k, v in record.items()}


def _said(record: dict[str, Any]) -> str:
    """The record in one line of text."""
    words = [
        f"loss {record['loss']:.4f}",
        f"grad norm {record['grad_norm']:.3g}",
        f"loss scale {record['loss_scale']:g}",
        f"{record['tokens_per_s']:,.0f} tokens/s",
    ]
    if "eval_loss" in record:
        words.insert(1, f"held-out {record['eval_loss']:.4f}")
    if record["outcome"] != "applied":
        words.append(f"{record['outcome']} ({record['skipped_total']} so far)")
    return "  ".join(words)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def _bar() -> Progress:
    columns = (
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[said]}"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console())


def _tensorboard(folder: Path, start: int) -> Scalars | None:
    """A writer if TensorBoard is installed; events after `start` of an earlier, longer run are hidden by it."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=start + 1)
