"""One save of all ranks, beside the training: what may fail, and how all ranks learn of it.

    start      each rank copies its part of the state to host memory, or on a GPU begins to; rank 0
               makes the hidden folder in a thread
    writing    each rank writes its own files in a thread: no communication, and no value of another
               rank
    merging    with many ranks: each FAN-th rank merges the lists of the FAN ranks from itself on,
               in a thread
    closing    when all ranks are done, rank 0 merges the lists into checkpoint.json and renames the
               folder in a thread; if a rank has failed, it removes the folder
    outcome    the same on every rank

The ranks agree on the next state in `poll`, one all-reduce of one number, which the training loop
calls between steps. Threads never communicate, and what touches the disk is done in them, so that
training never waits for it. An error of the filesystem on any rank makes the save fail on all;
other errors are raised.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from megaprec.checkpoint.atomic import (
    INDEX,
    begin,
    checkpoint_path,
    commit,
    partial_path,
    remove_leftovers,
    stage_index,
)
from megaprec.checkpoint.digests import FILE_DIGESTS, file_digest, seal_index
from megaprec.checkpoint.fp8_scales import add_fp8
from megaprec.checkpoint.keeping import USUAL, Keep, make_way, record_save, remove_expired
from megaprec.checkpoint.object_store import (
    listed_sizes,
    read_object,
    remove_object,
    send,
    write_object,
)
from megaprec.checkpoint.ranges import stored_shape
from megaprec.checkpoint.reader import FORMAT
from megaprec.checkpoint.shard_file import write_shard
from megaprec.checkpoint.snapshot import take_snapshot
from megaprec.comm.gathered_texts import gather_entries
from megaprec.durable import file_error, naming_file, read_whole, sync, write_file
from megaprec.errors import Problem, UserError
from megaprec.fp8.state import FP8State
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.tokens.places import is_remote

LONGEST_LIST = 1 << 32  # bytes of a list at a URL
FAN = 128  # lists that one rank merges into one; with fewer ranks, rank 0 merges all of them
# The status of a rank that is busy or has failed, of which `poll` takes the maximum over ranks. The
# status of any other rank is the number of the hidden folder, 0 if it knows none. A failure is only
# acted on when no rank is busy, so BUSY is the larger one.
BUSY = 2e9
FAILED = 1e9
UNSAVED = (
    "changes in training and is in no checkpoint, because it is a buffer and no parameter: save "
    "it yourself"
)
# seconds for which `finish` waits for this rank's thread before the ranks ask each other again
PAUSE = 0.05


@dataclass(frozen=True)
class Outcome:
    """The end of a save, the same on every rank. path: the checkpoint. problem: why it is not
    there; "" if it is.

    warnings: about what could not be removed; on rank 0 only.
    """

    path: Path
    problem: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeldFile:
    """A file for checkpoints as it was when it was read, whatever becomes of it later."""

    name: str
    content: bytes


class Saving:
    """A save of `step` into `folder` that is under way. Everything but the threads is collective
    over the world.

    extra, fp8: see `megaprec.checkpoint.save_load.save`. files: to copy into the checkpoint, each
        from its place or from memory. keep: what the save does not remove.
    background: False writes in this thread, without a copy of the state. losses: of an evaluation
        after this step, by name.
    leave_beside: called by rank 0, in its thread, with the folder when the checkpoint is there and
        older ones are removed; returns warnings. The save is under way until it returns.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        optimizer: ParallelAMPOptimizer,
        extra: dict[str, Any],
        keep: Keep = USUAL,
        files: Sequence[Path | HeldFile] = (),
        fp8: FP8State | None = None,
        background: bool = False,
        losses: Mapping[str, float] | None = None,
        leave_beside: Callable[[Path], Sequence[str]] | None = None,
    ) -> None:
        require_own_names(files)
        self.folder = folder
        self.step = step
        self._keep = keep
        self._losses = losses or {}
        self._leave_beside = leave_beside
        self._background = background
        self._world = optimizer.world
        self._device = optimizer.device
        self._files = tuple(files)
        self._warnings: list[str] = []
        self._error: BaseException | None = None  # of this rank
        self._thread: Thread | None = None
        self._merged = self._world.size <= FAN
        self._closing = False
        self._outcome: Outcome | None = None
        self._number = 0  # of the hidden folder; rank 0 knows it when it has made the folder
        self._partial: Path | None = None  # the hidden folder, once all ranks know it
        unsaved = changed_module_buffers(optimizer)
        # one rank tells what all have gathered
        if self._world.rank == 0:
            self._warnings += [f"{name} {UNSAVED}" for name in unsaved]
        self._snapshot = take_snapshot(optimizer, copy=background)
        if fp8 is not None:
            add_fp8(self._snapshot, fp8, optimizer.dp.rank == optimizer.tp.rank == 0)
        self._index = {
            **extra,
            "step": step,
            "optimizer": optimizer.saved_numbers(),
            "fp8": {"rolls": fp8.rolls if fp8 else 0},
        }
        if self._world.rank == 0:
            self._run(self._open)

    def poll(self) -> Outcome | None:
        """Return the outcome if there is one yet. Collective; to be called when no other collective
        is in flight."""
        if self._outcome is not None:
            return self._outcome
        status = self._agree_on_status()
        if status < BUSY:
            if self._error is not None and not isinstance(self._error, OSError):
                raise self._error
            self._advance(failed=status == FAILED, number=int(status))
        return self._outcome

    def finish(self) -> Outcome:
        """Wait for the outcome. Collective.

        If the save is in the background, no rank waits long in one collective, however slow the
        disk of another is: they ask each other again after each PAUSE. If it is not, all wait for
        the slowest rank in the first collective.
        """
        while (outcome := self.poll()) is None:
            if self._thread is not None:
                self._thread.join(PAUSE)
        return outcome

    def _agree_on_status(self) -> float:
        """Return the largest status of all ranks: BUSY, FAILED or a number. Collective."""
        # The thread is looked at before the error: it may fail until it ends.
        if self._thread is not None and self._thread.is_alive():
            status = BUSY
        elif self._error is not None:
            status = FAILED
        else:
            status = float(self._number)
        return self._world.max_(torch.tensor(status, device=self._device)).item()

    def _advance(self, failed: bool, number: int) -> None:
        """Go on to the next state, when no rank is busy. number: of the hidden folder."""
        if self._closing:
            self._outcome = self._end(failed)
        elif failed:
            self._close(self._abandon)
        elif self._partial is None:
            partial = partial_path(self.folder, self.step, number)
            self._partial = partial
            self._run(lambda: self._write(partial))
        elif self._merged:
            partial = self._partial
            self._close(lambda: self._commit(partial))
        else:
            self._merge(self._partial)

    def _open(self) -> None:
        """Make the hidden folder."""
        self._warnings += remove_leftovers(self.folder)
        self._number = begin(self.folder, self.step)

    def _run(self, job: Callable[[], None]) -> None:
        """Run a job in a thread, or in this one if the save is not in the background."""
        if not self._background:
            self._try(job)
            return
        self._thread = Thread(
            target=self._try,
            args=(job,),
            daemon=True,
            name=f"save of step {self.step}",
        )
        self._thread.start()

    def _try(self, job: Callable[[], None]) -> None:
        """Run a job, and keep its error for the next `poll`."""
        try:
            job()
        except OSError as error:
            self._error = error.with_traceback(None)  # which would keep the copy of the state
        except Exception as error:
            if not self._background:
                raise
            self._error = error

    def _write(self, partial: Path) -> None:
        """Write this rank's files, and the list of them that rank 0 will read. Each tensor's copy
        is freed when it is written.

        Freeing takes a fifth of the time of copying. Later, the thread that trains would wait for
        it.
        """
        digests = dict[str, str]()
        self._snapshot.wait()
        files = self._snapshot.files
        while files:
            name = next(iter(files))
            digests[name] = write_shard(partial / name, files[name])
            del files[name]
        if self._world.rank == 0:
            digests |= {file.name: _copy(file, partial) for file in self._files}
        written = {"tensors": self._snapshot.entries, FILE_DIGESTS: digests}
        _write_list(partial, self._world.rank, written)

    def _merge(self, partial: Path) -> None:
        """Let each FAN-th rank write one list instead of those of the FAN ranks from itself on."""
        self._merged = True
        self._thread = None
        first = self._world.rank
        if first % FAN == 0:
            ranks = range(first, min(first + FAN, self._world.size))
            self._run(lambda: _write_list(partial, first, _merge_lists(partial, ranks)))

    def _close(self, job: Callable[[], None]) -> None:
        """Go on to the last state: with this job rank 0 makes the checkpoint, or removes what there
        is of one."""
        self._closing = True
        self._thread = None
        self._snapshot.files.clear()  # what is left of the copy after an error
        if self._world.rank == 0:
            self._run(job)

    def _commit(self, partial: Path) -> None:
        """Make the checkpoint of what the ranks have written, then remove older ones."""
        try:
            # the ranks that have a list: all, or each FAN-th one, which has merged those of FAN
            distance = FAN if self._world.size > FAN else 1
            ranks_with_list = range(0, self._world.size, distance)
            index = _make_index(partial, ranks_with_list, self._index)
            stage_index(partial, index)
            self._warnings += make_way(self.folder, self.step)
            self._warnings += record_save(self.folder, self.step, index, self._losses)
            final = commit(self.folder, self.step, partial, index)
        except OSError:
            self._abandon()
            raise
        self._warnings += remove_expired(self.folder, self._keep, final)
        if self._leave_beside is not None:
            self._warnings += self._leave_beside(self.folder)

    def _abandon(self) -> None:
        self._warnings += remove_leftovers(self.folder)

    def _end(self, failed: bool) -> Outcome:
        """Return the outcome, with the error of the first rank that has one."""
        problem = ""
        if failed:
            local_problems: dict[str, str] = {}
            if isinstance(self._error, OSError):
                local_problems[str(self._world.rank)] = file_error(self._error)
            problems = gather_entries(local_problems, self._world, self._device)
            problem, *_ = problems.values()
        warnings = tuple(dict.fromkeys(self._warnings))  # each once
        path = checkpoint_path(self.folder, self.step)
        return Outcome(path, problem, warnings)


def require_own_names(files: Sequence[Path | HeldFile]) -> None:
    """Raise UserError for files to copy into a checkpoint that have one name, or the name of a file
    of its own."""
    names = [file.name for file in files]
    for file in files:
        name = file.name
        is_list = name.startswith("index-") and name.endswith(".json")  # see `_list_name`
        is_reserved = name == INDEX or is_list or name.endswith(".safetensors")
        if is_reserved or names.count(name) > 1:
            place = file if isinstance(file, Path) else name
            raise UserError.of("checkpoint.name_taken_in_checkpoint", file=place, name=name)


def changed_module_buffers(optimizer: ParallelAMPOptimizer) -> list[str]:
    """Return the paths of all ranks' buffers of modules that changed in training and that no
    checkpoint holds. Collective.

    Raises UserError on every rank if one of them has a frozen parameter that cannot be saved.
    """
    # What this rank tells the others: the paths of buffers, each with None. If a parameter cannot
    # be saved, the sentences of problems instead, each with its code and fields.
    local: dict[str, Any] = dict.fromkeys(optimizer.frozen.changed_buffers())
    try:
        optimizer.frozen.require_savable()
    except UserError as error:
        local = {str(problem): [problem.code, problem.fields] for problem in error.problems}
    has_entries = torch.tensor(float(bool(local)), device=optimizer.device)
    if not optimizer.world.max_(has_entries):
        return []  # as nearly always: the texts cost more messages
    entries = gather_entries(local, optimizer.world, optimizer.device)
    problems = [Problem(text, *entry) for text, entry in entries.items() if entry]
    if problems:
        raise UserError(*problems)
    return list(entries)


def _copy(file: Path | HeldFile, folder: Path) -> str:
    """Copy a file into the folder, and return its SHA-256."""
    if isinstance(file, HeldFile):
        _write_content(folder / file.name, file.content)
        return hashlib.sha256(file.content).hexdigest()
    if is_remote(folder):
        send(file, folder / file.name)
        return file_digest(file)
    with naming_file(folder / file.name):
        copy = Path(shutil.copy(file, folder))
    sync(copy)
    return file_digest(copy)


def _list_name(rank: int) -> str:
    """Return the name of the file in which a rank lists what it has written."""
    return f"index-{rank:05d}.json"


def _write_list(partial: Path, rank: int, written: dict[str, Any]) -> None:
    """Write the list of what a rank has written into the hidden folder. Raises OSError."""
    _write_content(partial / _list_name(rank), json.dumps(written).encode())


def _write_content(file: Path, content: bytes) -> None:
    """Write a file or an object. Raises OSError."""
    if is_remote(file):
        write_object(file, [content])
    else:
        write_file(file, content)


def _merge_lists(partial: Path, ranks: Iterable[int]) -> dict[str, Any]:
    """Read the lists of these ranks, remove them, and return them as one."""
    tensors: dict[str, Any] = {}
    digests: dict[str, str] = {}
    at_url = is_remote(partial)
    for rank in ranks:
        file = partial / _list_name(rank)
        written = json.loads(read_object(file, LONGEST_LIST) if at_url else read_whole(file))
        for key, entry in written["tensors"].items():
            # several ranks have written chunks of one tensor
            merged = tensors.setdefault(key, {**entry, "chunks": []})
            merged["chunks"] += entry["chunks"]
        digests |= written[FILE_DIGESTS]
        # whatever is left in the folder would be listed as a file of the checkpoint
        if at_url:
            remove_object(file)
        else:
            file.unlink()
    return {"tensors": tensors, FILE_DIGESTS: digests}


def _make_index(partial: Path, ranks: Iterable[int], index: dict[str, Any]) -> bytes:
    """Merge the lists of these ranks into checkpoint.json; return its bytes."""
    written = _merge_lists(partial, ranks)
    tensors: dict[str, Any] = written["tensors"]
    for key, entry in tensors.items():
        num_written = sum(map(_count_elements, entry["chunks"]))
        if num_written != prod(entry["shape"]):
            raise ValueError(
                f"{key} was written in part or twice: do parameters of two stages have the "
                "same name?"
            )
    if is_remote(partial):
        files = listed_sizes(partial, written[FILE_DIGESTS])
    else:
        files = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
    return seal_index({**index, "format": FORMAT, "files": files, **written})


def _count_elements(chunk: dict[str, Any]) -> int:
    return prod(stored_shape(chunk))
