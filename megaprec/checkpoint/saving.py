"""One save of all ranks, beside the training: what may fail, and how all ranks learn of it.

    start      rank 0 makes the hidden folder; each rank copies its part of the state to host memory
    writing    each rank writes its own files in a thread: no communication, and no value of another rank
    closing    when all ranks have written, rank 0 merges their lists into checkpoint.json and renames the folder in a
               thread; if a rank has failed, it removes the folder
    outcome    the same on every rank

The ranks agree on the next state in `poll`, one all-reduce of two numbers, which the training loop calls between steps.
Threads never communicate. An error of the filesystem on any rank makes the save fail on all; other errors are raised.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from megaprec.checkpoint.atomic import begin, checkpoint_path, commit, partial_path, remove_leftovers, remove_old
from megaprec.checkpoint.digests import OTHERS, file_digest, sealed
from megaprec.checkpoint.fp8_scales import add_fp8
from megaprec.checkpoint.ranges import stored_shape
from megaprec.checkpoint.reader import FORMAT, INDEX
from megaprec.checkpoint.shard_file import write_shard
from megaprec.checkpoint.snapshot import take_snapshot
from megaprec.comm.everyones import everyones
from megaprec.durable import file_error, named, sync, write_file
from megaprec.fp8.state import FP8State
from megaprec.optim.optimizer import ParallelAMPOptimizer

PAUSE = 0.05  # seconds for which `finish` waits for this rank's thread before the ranks compare notes


@dataclass(frozen=True)
class Outcome:
    """The end of a save, the same on every rank. path: the checkpoint. problem: why it is not there; "" if it is.

    warnings: about what could not be removed; on rank 0 only.
    """

    path: Path
    problem: str
    warnings: tuple[str, ...] = ()


class Saving:
    """A save of `step` into `folder` that is under way. Everything but the threads is collective over the world.

    extra, keep, files, fp8: see `megaprec.checkpoint.save_load.save`. background: False writes in this thread, without
    a copy of the state.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        optimizer: ParallelAMPOptimizer,
        extra: dict[str, Any],
        keep: int = 2,
        files: Sequence[Path] = (),
        fp8: FP8State | None = None,
        background: bool = False,
    ) -> None:
        self.folder, self.step, self._keep, self._background = folder, step, keep, background
        self._world, self._device, self._files = optimizer.world, optimizer.device, tuple(files)
        self._warnings: list[str] = []
        self._error: BaseException | None = None  # of this rank
        self._thread: Thread | None = None
        self._closing = False
        self._outcome: Outcome | None = None
        first = self._world.rank == 0
        number = self._agree(self._begin() if first else 0.0)
        self._partial = partial_path(folder, step, max(1, int(number)))
        if not number:
            self._outcome = self._end(failed=True)
            return
        self._snapshot = take_snapshot(optimizer, copy=background)
        if fp8 is not None:
            add_fp8(self._snapshot, fp8, self._world.rank, optimizer.dp.rank == optimizer.tp.rank == 0)
        numbers = {"optimizer": optimizer.numbers(), "fp8": {"rolls": fp8.rolls if fp8 else 0}}
        self._index = {**extra, "step": step, **numbers}
        self._run(self._write)

    def poll(self) -> Outcome | None:
        """Return the outcome if there is one yet. Collective; to be called when no other collective is in flight."""
        if self._outcome is None and not self._agree(float(self._thread is not None and self._thread.is_alive())):
            if self._error is not None and not isinstance(self._error, OSError):
                raise self._error
            failed = bool(self._agree(float(self._error is not None)))
            if self._closing:
                self._outcome = self._end(failed)
            else:
                self._close(failed)
        return self._outcome

    def finish(self) -> Outcome:
        """Wait for the outcome. Collective. In the background, no rank waits long in one collective, however slow the
        disk of another is; between steps, all wait for the slowest in the first.
        """
        while (outcome := self.poll()) is None:
            if self._thread is not None:
                self._thread.join(PAUSE)
        return outcome

    def _agree(self, number: float) -> float:
        """Return the largest of the ranks' numbers."""
        return self._world.max_(torch.tensor(float(number), device=self._device)).item()

    def _begin(self) -> float:
        """Make the hidden folder; return its number, 0 if that failed."""
        try:
            self._warnings += remove_leftovers(self.folder)
            return begin(self.folder, self.step)
        except OSError as error:
            self._error = error
            return 0.0

    def _run(self, job: Callable[[], None]) -> None:
        if not self._background:
            self._try(job)
            return
        self._thread = Thread(target=self._try, args=(job,), daemon=True, name=f"save of step {self.step}")
        self._thread.start()

    def _try(self, job: Callable[[], None]) -> None:
        try:
            job()
        except OSError as error:
            self._error = error.with_traceback(None)  # which would keep the copy of the state
        except Exception as error:
            if not self._background:
                raise
            self._error = error

    def _write(self) -> None:
        """Write this rank's files, and the list of them that rank 0 will read."""
        digests = {name: write_shard(self._partial / name, held) for name, held in self._snapshot.files.items()}
        if self._world.rank == 0:
            digests |= {file.name: _copy(file, self._partial) for file in self._files}
        part = {"tensors": self._snapshot.entries, OTHERS: digests}
        write_file(self._partial / _list_of(self._world.rank), json.dumps(part).encode())

    def _close(self, failed: bool) -> None:
        """Go on to the last state: rank 0 makes the checkpoint, or removes what there is of one."""
        self._closing, self._thread = True, None
        self._snapshot.files.clear()  # frees the copy
        if self._world.rank == 0:
            self._run(self._abandon if failed else self._commit)

    def _commit(self) -> None:
        try:
            _write_index(self._partial, self._world.size, self._index)
            final = commit(self.folder, self.step, self._partial)
        except OSError:
            self._abandon()
            raise
        self._warnings += remove_old(self.folder, self._keep, final)

    def _abandon(self) -> None:
        self._warnings += remove_leftovers(self.folder)

    def _end(self, failed: bool) -> Outcome:
        """Return the outcome, with the error of the first rank that has one."""
        problem = ""
        if failed:
            own = {str(self._world.rank): file_error(self._error)} if isinstance(self._error, OSError) else {}
            problem = next(iter(everyones(own, self._world, self._device).values()))
        return Outcome(checkpoint_path(self.folder, self.step), problem, tuple(dict.fromkeys(self._warnings)))


def _copy(file: Path, folder: Path) -> str:
    with named(folder / file.name):
        copy = Path(shutil.copy(file, folder))
    sync(copy)
    return file_digest(copy)


def _list_of(rank: int) -> str:
    return f"index-{rank:05d}.json"


def _write_index(partial: Path, ranks: int, index: dict[str, Any]) -> None:
    """Merge the ranks' lists of tensors into checkpoint.json."""
    tensors: dict[str, Any] = {}
    digests: dict[str, str] = {}
    for file in (partial / _list_of(rank) for rank in range(ranks)):
        part = json.loads(file.read_text())
        for key, value in part["tensors"].items():
            tensors.setdefault(key, {**value, "chunks": []})["chunks"] += value["chunks"]
        digests |= part[OTHERS]
        file.unlink()
    for key, value in tensors.items():
        if sum(map(_elements, value["chunks"])) != prod(value["shape"]):
            raise ValueError(f"{key} was written in part or twice: do parameters of two stages have the same name?")
    files = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
    whole = {**index, "format": FORMAT, "files": files, OTHERS: digests, "tensors": tensors}
    write_file(partial / INDEX, sealed(whole))


def _elements(chunk: dict[str, Any]) -> int:
    return prod(stored_shape(chunk))
