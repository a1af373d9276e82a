"""The laws of a save: it may fail, and all ranks know; beside the training it saves the state that
was there when it began; no rank sends its state to another; what cannot be removed is never in the
way.
"""

import errno
import os
import re
import shutil
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Event, get_ident
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint import saving as module
from megaprec.checkpoint import shard_file
from megaprec.checkpoint.atomic import checkpoints, latest
from megaprec.checkpoint.keeping import Keep
from megaprec.checkpoint.save_load import load, save
from megaprec.checkpoint.saving import Saving
from megaprec.checkpoint.snapshot import Snapshot, take_snapshot
from megaprec.errors import Problem, UserError
from megaprec.optim.optimizer import ParallelAMPOptimizer
from tests.checkpoint.test_checkpoint import (
    MODEL,
    all_tensors,
    held,
    holds,
    names,
    saved,
    small,
    spoil,
)
from tests.layouts import Run, batches, make_engine, share_of
from tests.ranks import run_ranks
from tests.refusals import raises


def full(descriptor: int, content: memoryview) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save_beside(mesh: DeviceMesh, folder: Path, files: list[Path]) -> str:
    try:
        save(folder, 1, make_engine(mesh, Run(MODEL, "bf16")).optimizer, {}, files=files)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "name", ["checkpoint.json", "model-00000.safetensors", "index-00001.json", "words.txt"]
)
def test_a_file_that_is_copied_into_a_checkpoint_takes_the_name_of_no_other(
    name: str, tmp_path: Path
) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("x")
    files = [
        tmp_path / folder / name for folder in (("one", "two") if name == "words.txt" else ("one",))
    ]
    (said,) = run_ranks(save_beside, {}, folder=tmp_path / "saved", files=files)
    assert said == Problem.of("checkpoint.name_taken_in_checkpoint", file=files[0], name=name)
    assert not (tmp_path / "saved").exists()


def fail_on_one_rank(mesh: DeviceMesh, folder: Path, rank: int, background: bool) -> str:
    """The problem of a save whose disk is full on one rank, after which nothing is left of it and
    the next is whole."""
    optimizer = make_engine(mesh, Run(MODEL, "bf16")).optimizer
    before = save(folder, 1, optimizer, {})
    write = shard_file.write_all
    if optimizer.world.rank == rank:
        shard_file.write_all = full  # this process is this rank's alone
    outcome = Saving(folder, 2, optimizer, {}, background=background).finish()
    shard_file.write_all = write
    assert names(folder) == [before.name]
    optimizer.world.barrier()
    assert not Saving(folder, 3, optimizer, {}, background=background).finish().problem
    assert names(folder) == [before.name, "step_00000003"]
    optimizer.world.barrier()
    return outcome.problem


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(
    rank: int, background: bool, tmp_path: Path
) -> None:
    said = run_ranks(
        fail_on_one_rank, {"dp": 2, "tp": 2}, folder=tmp_path, rank=rank, background=background
    )
    file = tmp_path / ".step_00000002.partial" / f"model-{rank:05d}.safetensors"
    line = f"{file}: No space left on device (ENOSPC): free some room there"
    assert said == [line] * 4


def save_with_merging_ranks(mesh: DeviceMesh, folder: Path) -> tuple[list[int], str]:
    """The ranks whose lists this rank reads, of a save in which each second one merges two; then
    one that fails."""
    optimizer = make_engine(mesh, Run(MODEL, "bf16", zero_size=2)).optimizer
    merge = module._merge_lists
    read = list[int]()

    def noted(partial: Path, ranks: Iterable[int]) -> dict[str, Any]:
        read.extend(ranks)
        return merge(partial, ranks)

    def failing(partial: Path, ranks: Iterable[int]) -> dict[str, Any]:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(partial))

    assert not Saving(folder / "one", 1, optimizer, {}, background=True).finish().problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FAN", 2)
        patch.setattr(module, "_merge_lists", noted)
        assert not Saving(folder / "merged", 1, optimizer, {}, background=True).finish().problem
        if optimizer.world.rank == 2:
            patch.setattr(module, "_merge_lists", failing)
        problem = Saving(folder / "failed", 1, optimizer, {}, background=True).finish().problem
    return read[: len(read) if optimizer.world.rank else 4], problem


def test_with_many_ranks_some_merge_the_lists_of_others_and_rank_0_theirs(tmp_path: Path) -> None:
    found = run_ranks(save_with_merging_ranks, {"dp": 2, "tp": 2}, folder=tmp_path)
    assert [read for read, _ in found] == [[0, 1, 0, 2], [], [2, 3], []]
    one, merged = (tmp_path / name / "step_00000001" for name in ("one", "merged"))
    assert names(one) == names(merged)
    assert (one / "checkpoint.json").read_bytes() == (merged / "checkpoint.json").read_bytes()
    assert {problem for _, problem in found} == {found[0][1]} and "EIO" in found[0][1]
    assert not names(tmp_path / "failed")


def train_beside_a_save(mesh: DeviceMesh, folder: Path) -> None:
    run = Run(MODEL, "bf16", steps=4, zero_size=2)
    engine = make_engine(mesh, run)
    shares = [share_of(mesh, batch) for batch in batches(run)]
    write = shard_file.write_all
    two_steps = Event()

    def slowly(descriptor: int, content: memoryview) -> None:
        assert two_steps.wait(300), "steps wait for the save"
        write(descriptor, content)

    shard_file.write_all = slowly
    engine.step(shares[0], run.lr, 0)
    before = held(engine.optimizer)
    numbers = engine.optimizer.saved_numbers()
    saving = Saving(folder, 1, engine.optimizer, {}, background=True)
    taken = 1
    while saving.poll() is None and taken < len(shares):
        engine.step(shares[taken], run.lr, taken)
        taken += 1
        if taken > 2:
            two_steps.set()
    assert taken > 2, "the save was not beside the steps"
    outcome = saving.finish()
    assert not outcome.problem
    spoil(engine.optimizer)
    load(outcome.path, engine.optimizer)
    assert engine.optimizer.saved_numbers() == numbers
    for kind, ours in held(engine.optimizer).items():
        assert all(
            torch.equal(a.values, b.values) for a, b in zip(ours, before[kind], strict=True)
        ), kind


@pytest.mark.slow
def test_what_is_saved_beside_the_steps_is_the_state_before_them(tmp_path: Path) -> None:
    run_ranks(train_beside_a_save, {"pp": 2, "dp": 2}, folder=tmp_path)


def count_messages(mesh: DeviceMesh, folder: Path) -> list[tuple[int, int]]:
    """Messages that this rank sends in a save, and bytes of the longest, for two sizes of the
    model."""
    sent: list[int] = []
    isend = torch.distributed.isend

    def counted(tensor: torch.Tensor, **options: Any) -> Any:
        sent.append(tensor.nbytes)
        return isend(tensor, **options)

    found = []
    for width in (1, 4):
        model = {**MODEL, "hidden": MODEL["hidden"] * width}
        optimizer = make_engine(mesh, Run(model, "bf16", zero_size=2)).optimizer
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "isend", counted)
            for name in (
                "send",
                "broadcast",
                "all_reduce",
                "all_gather",
                "all_gather_into_tensor",
                "gather",
                "scatter",
            ):
                patch.setattr(
                    torch.distributed,
                    name,
                    lambda *_, **__: pytest.fail("a save communicates otherwise"),
                )
            save(folder / str(width), 1, optimizer, {})
        found.append((len(sent), max(sent)))
        sent.clear()
    return found


def test_a_save_sends_a_few_numbers_whatever_the_size_of_the_model(tmp_path: Path) -> None:
    for (few, short), (many, long) in run_ranks(
        count_messages, {"dp": 2, "tp": 2}, folder=tmp_path
    ):
        assert (few, short) == (many, long)
        assert 0 < few <= 5 * 3 and long <= 8


def touch_the_disk_beside_training(mesh: DeviceMesh, folder: Path) -> tuple[list[str], int]:
    """Operations on files in this thread during saves in the background, and how many there were in
    other threads."""
    optimizer = make_engine(mesh, Run(MODEL, "bf16", zero_size=2)).optimizer
    ours = list[str]()
    theirs = list[str]()
    training = get_ident()
    counting = True

    def note(what: str, *_: object) -> None:
        if counting and what.partition(".")[0] in ("open", "os", "shutil"):
            (ours if get_ident() == training else theirs).append(what)

    def noted(name: str) -> Callable[..., Any]:
        done = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            note(f"os.{name}")
            return done(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "stat",
            "lstat",
            "fsync",
            "write",
            "readlink",
            "access",
        ):  # of which no hook is told
            patch.setattr(os, name, noted(name))
        sys.addaudithook(note)
        for step in (1, 2):
            saving = Saving(
                folder, step, optimizer, {}, keep=Keep(1), files=[Path(__file__)], background=True
            )
            while (outcome := saving.poll()) is None:
                time.sleep(0.001)
            assert not outcome.problem
        counting = False
    return ours, len(theirs)


def test_training_touches_no_disk_for_a_save_in_the_background(tmp_path: Path) -> None:
    for ours, theirs in run_ranks(
        touch_the_disk_beside_training, {"dp": 2, "tp": 2}, folder=tmp_path
    ):
        assert ours == []
        assert theirs > 5, "nothing was counted"


def cannot(path: Any, *rest: Any, **options: Any) -> None:
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))


@pytest.mark.filterwarnings("ignore:.*cannot be removed")
def test_an_old_checkpoint_that_cannot_be_removed_is_never_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of an old one are in use through six saves; then they are not."""
    with monkeypatch.context() as busy:
        busy.setattr(shutil, "rmtree", cannot)
        for step in range(1, 7):
            optimizer = small()
            load(saved(tmp_path, step, value=step, keep=1), optimizer)
            assert holds(optimizer, step)
        outcome = Saving(tmp_path, 7, small(), {}, keep=Keep(1)).finish()
        assert not outcome.problem
        assert len(outcome.warnings) == 6
        assert all(
            "cannot be removed, and each later save tries again: " in line
            for line in outcome.warnings
        )
        assert [path.name for path in checkpoints(tmp_path)] == ["step_00000007"]
    assert not Saving(tmp_path, 8, small(), {}, keep=Keep(1)).finish().warnings
    assert names(tmp_path) == ["step_00000008"]


def test_an_old_checkpoint_that_cannot_be_renamed_stays_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)
    rename = Path.rename

    def immutable(self: Path, target: Path) -> Path:
        if self.name == "step_00000001":
            raise PermissionError(
                errno.EPERM, os.strerror(errno.EPERM), str(self), None, str(target)
            )
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", immutable)
    for step in (2, 3):
        with pytest.warns(
            UserWarning, match="step_00000001 cannot be removed, and each later save tries again: "
        ):
            saved(tmp_path, step, keep=1)
    assert names(tmp_path) == ["step_00000001", "step_00000003"]


def test_leftovers_with_every_name_of_the_save_do_not_prevent_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (".step_00000002.partial", ".step_00000002.2.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-00001.safetensors").write_text(
            "of a rank that there is no longer"
        )
    monkeypatch.setattr(shutil, "rmtree", cannot)
    with pytest.warns(UserWarning, match="cannot be removed"):
        path = saved(tmp_path, 2)
    assert names(path) == [
        "checkpoint.json",
        "model-00000.safetensors",
        "optimizer-00000.safetensors",
    ]


def test_a_failed_rename_brings_the_checkpoint_of_that_step_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 2, value=5.0)
    rename = Path.rename
    optimizer = small()

    def broken(self: Path, target: Path) -> Path:
        if target.name == "step_00000002" and "removed" not in self.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", broken)
    with raises(
        "checkpoint.not_saved",
        path=re.compile("step_00000002$"),
        problem=re.compile(r"Input/output error \(EIO\): look at the disk$"),
    ):
        saved(tmp_path, 2, value=6.0)
    assert names(tmp_path) == ["step_00000002"]
    path = latest(tmp_path)
    assert path is not None
    load(path, optimizer)
    assert holds(optimizer, 5.0)


def test_a_fault_of_the_program_in_the_thread_is_raised_and_not_taken_for_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*arguments: object) -> None:
        raise ValueError("a fault of the program")

    monkeypatch.setattr(module, "write_shard", wrong)
    for background in (True, False):
        with pytest.raises(ValueError, match="a fault of the program"):
            Saving(tmp_path, 1, small(), {}, background=background).finish()


def test_a_snapshot_holds_one_copy_of_what_this_rank_saves_and_none_without_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = small()
    places = {tensor.untyped_storage().data_ptr() for tensor in all_tensors(optimizer)}
    for background in (True, False):
        saving = Saving.__new__(Saving)
        monkeypatch.setattr(Saving, "_run", lambda self, job: None)
        saving.__init__(tmp_path / str(background), 1, optimizer, {}, background=background)
        written = [values for held in saving._snapshot.files.values() for values in held.values()]
        shares = [values.untyped_storage().data_ptr() in places for values in written]
        assert shares == [not background] * len(written)
        storages = {
            values.untyped_storage().data_ptr(): values.untyped_storage().nbytes()
            for values in written
        }
        own = sum(
            tensor.nbytes
            for buffer in optimizer.all_buffers()
            for tensor in buffer.saved().values()
        )
        assert not background or sum(storages.values()) <= own


def test_a_save_that_has_failed_holds_no_copy_of_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[weakref.ref[torch.Tensor]] = []

    def noted(optimizer: ParallelAMPOptimizer, copy: bool) -> Snapshot:
        snapshot = take_snapshot(optimizer, copy)
        for tensors in snapshot.files.values():
            copies.extend(map(weakref.ref, tensors.values()))
        return snapshot

    monkeypatch.setattr(module, "take_snapshot", noted)
    monkeypatch.setattr(shard_file, "write_all", full)
    saving = Saving(tmp_path, 1, small(), {}, background=True)
    assert "No space left" in saving.finish().problem
    assert len(copies) > 1
    assert not any(copy() is not None for copy in copies)


@pytest.mark.parametrize("background", [True, False])
def test_copies_from_a_device_are_waited_for_before_they_are_written(
    background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: what is copied has arrived when the wait is over, and not before."""

    def arriving_late(optimizer: ParallelAMPOptimizer, copy: bool) -> Snapshot:
        snapshot = take_snapshot(optimizer, copy=True)
        on_their_way = []
        for tensors in snapshot.files.values():
            for values in tensors.values():
                on_their_way.append((values, values.clone()))
                values.fill_(0)

        def arrive() -> None:
            for values, sent in on_their_way:
                values.copy_(sent)

        snapshot.wait = arrive
        return snapshot

    monkeypatch.setattr(module, "take_snapshot", arriving_late)
    optimizer = small()
    for tensor in all_tensors(optimizer):
        tensor.fill_(3.0)
    saving = Saving(tmp_path, 1, optimizer, {}, background=background)
    path = saving.finish().path
    loaded = small()
    load(path, loaded)
    assert holds(loaded, 3.0)
