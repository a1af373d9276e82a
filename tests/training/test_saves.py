"""The laws of the saves of a run: a save that fails costs a warning, unless it is the last; the
steps beside a save are the steps without it; a run whose folder is gone stops.
"""

import errno
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint import saving, shard_file
from megaprec.checkpoint.atomic import checkpoints, latest
from megaprec.checkpoint.host_copies import PinnedAhead
from megaprec.checkpoint.saving import Outcome
from megaprec.durable import write_all
from megaprec.errors import Problem, UserError
from megaprec.optim.decision.step_report import StepObserver
from megaprec.optim.state.flat_buffer import Buffer
from tests.checkpoint.test_checkpoint import names
from tests.ranks import run_ranks
from tests.refusals import shows
from tests.runs import checkpoint, steps, tensors, train, train_on, write_run
from tools.config.run_file import load_run
from tools.journal.journal import Lines
from tools.training import run_folder, saves
from tools.training.corpus import open_corpus
from tools.training.ends import Stopped, TrainingDiverged
from tools.training.saves import Saves
from tools.training.trainer import Trainer


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


class During(StepObserver):
    """Calls `act` with the number of the step before the ranks agree on it."""

    def __init__(self, act: Callable[[int], None]) -> None:
        self.act = act
        self.step = 0

    def gradients_ready(self, buffers: Sequence[Buffer], scale: Tensor) -> None:
        self.step += 1
        self.act(self.step)


def train_with(
    mesh: DeviceMesh, file: Path, overrides: list[str], act: Callable[[int], None]
) -> list[str]:
    """Trains on this rank; returns the lines of the error that ended the run, if one did."""
    config = load_run(file, overrides)
    try:
        Trainer(
            config, open_corpus(config), mesh, latest(config.checkpoint_folder), [During(act)]
        ).run()
    except UserError as error:
        return list(error.problems)
    except (Stopped, TrainingDiverged) as error:
        return [str(error)]
    return []


def full(descriptor: int, content: memoryview) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def train_on_a_disk_that_fills(
    mesh: DeviceMesh, file: Path, overrides: list[str], rank: int, until: int, stop: int = 0
) -> list[str]:
    """The disk of one rank is full until a step; before the step `stop` this rank is told to
    stop."""
    if mesh.get_rank() == rank:
        shard_file.write_all = full

    def act(step: int) -> None:
        if step > until:
            shard_file.write_all = write_all
        if step == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    return train_with(mesh, file, overrides, act)


def told_on_a_disk_that_fills(mesh: DeviceMesh, **arguments: Any) -> list[str]:
    """The lines of stderr of this rank."""
    with redirect_stderr(StringIO()) as said:
        assert train_on_a_disk_that_fills(mesh, **arguments) == []
    return said.getvalue().splitlines()


LAYOUT = ["parallel.tensor=2", "parallel.data=2"]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_warns_of_a_save_that_failed_once_and_of_none_that_did_not(
    rank: int, run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = SimpleNamespace(rank=rank)
    engine = SimpleNamespace(
        optimizer=SimpleNamespace(world=world), fp8=None, leaves=SimpleNamespace(names=())
    )
    saves = Saves(load_run(run_file, [f"train.folder={tmp_path}"]), engine)  # type: ignore[arg-type]
    path = checkpoint(tmp_path, 3)
    said: list[str] = []
    ends = [("disk full", ()), ("", ("old",)), ("", ("old",)), ("", ()), ("", ("old",))]
    for problem, warnings in ends:
        outcome = Outcome(path, problem, warnings)
        saves._saving = SimpleNamespace(poll=partial(lambda end: end, outcome))  # type: ignore[assignment]
        saves.poll()
        said.append(capsys.readouterr().err)
        saves.poll()
        assert capsys.readouterr().err == ""
    failed = f"warning    {path} is not saved: disk full; training goes on, and the next save is a "
    assert said == [
        f"{failed}new attempt\n" if rank == 0 else "",
        "warning    old\n",
        "",
        "",
        "warning    old\n",
    ]
    saves.finish(3)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("background", ["true", "false"])
def test_a_save_that_fails_costs_a_line_and_the_run_ends_as_if_it_had_not(
    background: str, run_file: Path, tmp_path: Path
) -> None:
    given = [
        "parallel.data=2",
        "checkpoint.every=2",
        "checkpoint.keep=9",
        f"checkpoint.background={background}",
    ]
    said = run_ranks(
        told_on_a_disk_that_fills,
        {"dp": 2},
        file=run_file,
        overrides=[*given, f"train.folder={tmp_path / 'full'}"],
        rank=1,
        until=5,
    )
    assert said[1:] == [[]]
    for step, line in zip((2, 4), said[0], strict=True):
        file = (
            tmp_path
            / "full"
            / "checkpoints"
            / f".step_{step:08d}.partial"
            / "model-00001.safetensors"
        )
        assert line == (
            f"warning    {checkpoint(tmp_path / 'full', step)} is not saved: {file}: No space "
            "left on device (ENOSPC): "
            "free some room there; training goes on, and the next save is a new attempt"
        )
    assert names(tmp_path / "full" / "checkpoints") == ["step_00000006"]
    train_on(run_file, *given, f"train.folder={tmp_path / 'whole'}", data=2)
    assert steps(tmp_path / "full") == steps(tmp_path / "whole")
    same_bits(tmp_path / "full", tmp_path / "whole", 6)


def same_bits(one: Path, other: Path, step: int) -> None:
    ours, theirs = (tensors(checkpoint(folder, step)) for folder in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("stop", [0, 5], ids=["at the end", "by a signal"])
def test_a_run_whose_last_save_fails_says_where_the_same_command_goes_on(
    stop: int, run_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    given = [*LAYOUT, f"train.folder={folder}"]
    for newest, every in ((None, 9), (3, 3)):
        if newest:
            train_on(run_file, *given, "train.steps=3", tensor=2, data=2)
        ends = run_ranks(
            train_on_a_disk_that_fills,
            {"tp": 2, "dp": 2},
            file=run_file,
            overrides=[*given, f"checkpoint.every={every}"],
            rank=3,
            until=9,
            stop=stop and stop - (newest or 0),
        )
        (line,) = ends[0]
        assert ends == [[line]] * 4
        assert shows(
            line,
            "checkpoint.not_saved",
            path=checkpoint(folder, stop or 6),
            problem=re.compile(f"^{folder}/checkpoints/.step_"),
        )
        assert (
            "/model-00003.safetensors: No space left on device (ENOSPC): free some room there; "
            in line
        )
        again = f"and takes steps {(newest or 0) + 1} to {stop or 6} again"
        assert line.endswith(
            (
                f"the newest whole checkpoint is {checkpoint(folder, newest)}: the same command "
                f"goes on from it {again}"
            )
            if newest
            else (
                f"there is no whole checkpoint in {folder}/checkpoints: the same command starts "
                f"anew {again}"
            )
        )
        assert checkpoints(folder / "checkpoints") == (
            [checkpoint(folder, newest)] if newest else []
        )


def train_slowly_saving(
    mesh: DeviceMesh, file: Path, overrides: list[str], waits: bool
) -> list[int]:
    """The steps before which a save was under way. waits: the first one writes nothing before the
    next step is."""
    goes_on = Event()
    beside = list[int]()

    def slowly(descriptor: int, content: memoryview) -> None:
        assert not waits or goes_on.wait(120), "the next step waits for the save"
        write_all(descriptor, content)

    shard_file.write_all = slowly

    def under_way() -> bool:
        return any(
            (Path(load_run(file, overrides).train.folder) / "checkpoints").glob(".step_*.partial")
        )

    def act(step: int) -> None:
        end = time.monotonic() + 120
        while waits and step == 3 and not under_way() and time.monotonic() < end:
            time.sleep(0.01)  # its thread has yet to begin
        if under_way():
            beside.append(step)
            goes_on.set()

    assert train_with(mesh, file, overrides, act) == []
    return beside


@pytest.mark.cases(0, 1)
def test_steps_beside_a_save_are_the_steps_without_one_bit_for_bit(
    run_file: Path, tmp_path: Path
) -> None:
    given = [
        "parallel.pipeline=2",
        "checkpoint.keep=9",
        "checkpoint.every=2",
        "optimizer.clip=0",
    ]
    for background, name in (("true", "beside"), ("false", "between")):
        into = [f"checkpoint.background={background}", f"train.folder={tmp_path / name}"]
        waits = background == "true"
        beside = run_ranks(
            train_slowly_saving, {"pp": 2}, file=run_file, overrides=[*given, *into], waits=waits
        )
        assert bool(beside[0]) is waits
    assert steps(tmp_path / "beside") == steps(tmp_path / "between")
    for step in (2, 4, 6):
        same_bits(tmp_path / "beside", tmp_path / "between", step)


# --- the folder of a live run


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def replace(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.mkdir()


def remove_lock(folder: Path) -> None:
    (folder / run_folder.LOCK).unlink()


def replace_lock(folder: Path) -> None:
    remove_lock(folder)
    (folder / run_folder.LOCK).touch()


def train_and_lose(
    mesh: DeviceMesh, file: Path, folder: Path, lose: Callable[[Path], None], options: list[str]
) -> list[str]:
    folder.mkdir(exist_ok=True)
    held = (folder / run_folder.LOCK).open("a")  # as the command holds it
    torch.distributed.barrier()

    def act(step: int) -> None:
        if step == 2 and mesh.get_rank() == 1:
            lose(folder)

    with held:
        return train_with(
            mesh, file, [*options, f"train.folder={folder}", "checkpoint.every=0"], act
        )


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("lose", [remove, replace, remove_lock, replace_lock])
@pytest.mark.parametrize("options", [["parallel.tensor=2"], ["parallel.pipeline=2"]])
def test_a_run_whose_folder_is_gone_stops_on_all_ranks_and_saves_nothing(
    lose: Callable[[Path], None], options: list[str], run_file: Path, tmp_path: Path
) -> None:
    axes = {"tp": 2} if "tensor" in options[0] else {"pp": 2}
    ends = run_ranks(
        train_and_lose, axes, file=run_file, folder=tmp_path / "run", lose=lose, options=options
    )
    (line,) = ends[0]
    assert ends == [[line]] * 2
    assert any(
        line
        == Problem.of(
            "training.removed_while_training", folder=tmp_path / "run", lock=".lock", step=step
        )
        for step in (3, 4, 5)
    )
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_folder_that_cannot_be_looked_at_for_a_moment_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = run_folder.RunFolder(tmp_path, 0)

    def unknown(path: Path) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(run_folder.os, "stat", unknown)
    assert not watched.is_gone()


# --- records


def test_records_that_cannot_be_written_are_kept_and_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = Lines(path)
    write = os.write
    lines.write("one")

    def half(descriptor: int, content: bytes) -> int:
        if len(content) < 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content[: len(content) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        lines.write("two")
        lines.write("three, which is longer")
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"warning    {path}: No space left on device (ENOSPC): free some room there; its "
        "lines are kept in memory "
        "until they can be written; training goes on"
    ]
    lines.write("four")
    assert (
        capsys.readouterr().err
        == f"note       {path}: all lines that were kept in memory are written\n"
    )
    lines.close()
    assert path.read_text().splitlines() == ["one", "two", "three, which is longer", "four"]


def test_records_that_are_lost_in_the_end_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = Lines(tmp_path / "metrics.jsonl")

    def fail(descriptor: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", fail)
    lines.write("one")
    lines.write("two")
    with pytest.raises(
        UserError, match=r"metrics\.jsonl: No space left.*; the last 2 lines of it are lost"
    ):
        lines.close()


@pytest.mark.parametrize("is_replaced", [True, False])
def test_records_follow_the_name_of_a_file_that_was_removed_or_replaced(
    is_replaced: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is written to a file without a name is lost when the run ends, and nobody is told."""
    path = tmp_path / "metrics.jsonl"
    lines = Lines(path)
    lines.write("one")
    if is_replaced:  # as an editor does it
        edited = tmp_path / "edited"
        edited.write_text("ONE\n")
        edited.replace(path)
    else:
        path.unlink()
    lines.write("two")
    said = capsys.readouterr().err
    assert said.startswith(f"warning    {path} was ") and said.count("\n") == 1
    lines.write("three")
    lines.close()
    assert path.read_text().splitlines() == ["ONE"] * is_replaced + ["two", "three"]
    assert not capsys.readouterr().err


def test_records_are_kept_in_memory_while_something_else_has_the_name(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = Lines(path)
    path.unlink()
    path.mkdir()
    lines.write("one")
    path.rmdir()
    lines.write("two")
    lines.close()
    assert path.read_text().splitlines() == ["one", "two"]


def test_records_do_not_follow_into_a_folder_in_place_of_the_runs(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lines = Lines(folder / "metrics.jsonl")
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("of another run\n")
    lines.write("one")
    lines.close()
    assert (folder / "metrics.jsonl").read_text() == "of another run\n"
    assert (tmp_path / "moved" / "metrics.jsonl").read_text() == "one\n"


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize("what", ["all files", "metrics.jsonl", "digests.jsonl"])
def test_whatever_a_full_disk_loses_the_last_line_names_the_newest_whole_checkpoint_and_what_is_taken_again(
    what: str,
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write = os.write
    fsync = os.fsync
    metrics = tmp_path / "metrics.jsonl"

    def is_full(descriptor: int) -> bool:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        named = what == "all files" or what in name
        if not (named and name.startswith(str(tmp_path)) and metrics.exists()):
            return False
        return metrics.read_bytes().count(b"\n") > 2

    def no_room(descriptor: int, content: bytes) -> int:
        if is_full(descriptor):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content)

    def no_flush(descriptor: int) -> None:
        if is_full(descriptor):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "write", no_room)
    monkeypatch.setattr(os, "fsync", no_flush)
    keys = ["checkpoint.every=2", "checkpoint.background=false", f"train.folder={tmp_path}"]
    if what == "digests.jsonl":
        keys.append("log.digests=4")
    assert train(run_file, *keys) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    newest = {"all files": 2, "metrics.jsonl": 6, "digests.jsonl": 2}[what]
    again = {
        "all files": " and takes steps 3 to 6 again",
        "metrics.jsonl": "",
        "digests.jsonl": "",
    }[what]
    goes_on = "the same command goes on from it"
    wanted = f"the newest whole checkpoint is {checkpoint(tmp_path, newest)}: {goes_on}{again}"
    assert last.endswith(wanted) or (what == "digests.jsonl" and wanted in last), last


def test_a_disk_that_is_full_at_the_start_is_told_in_one_line(
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    inner = os.fsync

    def fail(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("run.toml.part"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        inner(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    assert train(run_file, f"train.folder={tmp_path}") == 2
    line = f"{tmp_path}/run.toml: No space left on device (ENOSPC): free some room there"
    assert capsys.readouterr().err.splitlines() == [line]


@pytest.mark.parametrize(
    ("every", "steps_done", "is_ahead"),
    [(0, 0, False), (2, 0, True), (2, 3, False), (2, 1, True), (4, 0, False), (9, 0, False)],
)
def test_memory_is_pinned_ahead_where_a_save_comes_before_the_end(
    every: int, steps_done: int, is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run of four steps. A save at the end keeps no step waiting."""
    config: Any = SimpleNamespace(
        checkpoint=SimpleNamespace(every=every), train=SimpleNamespace(steps=4)
    )
    engine: Any = SimpleNamespace(optimizer=None, fp8=None, leaves=SimpleNamespace(names=[]))
    monkeypatch.setattr(saves, "copied_bytes", lambda optimizer: [100])
    ahead = Saves(config, engine).pinned_ahead(steps_done)
    assert bool(ahead._sizes) == is_ahead


def test_the_memory_that_was_pinned_ahead_is_free_when_the_copies_begin(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is held until then, and the thread has ended."""
    order: list[str] = []

    class Ahead(PinnedAhead):
        def release(self) -> None:
            order.append("free")
            super().release()

    take = saving.take_snapshot

    def noted(optimizer: Any, copy: bool) -> Any:
        order.append("copy")
        return take(optimizer, copy)

    monkeypatch.setattr(saves, "PinnedAhead", Ahead)
    monkeypatch.setattr(saving, "take_snapshot", noted)
    train(run_file, f"train.folder={tmp_path}", "train.steps=4", "checkpoint.every=2")
    assert order == ["free", "copy"] * 2 + ["free"]


def lose_tokenizer(mesh: DeviceMesh, file: Path, overrides: list[str], other: bytes) -> list[str]:
    """Trains on this rank; in step 2 the tokenizer's file becomes another one, or is gone."""
    [tokenizer] = file.parent.glob("data/*.model")

    def act(step: int) -> None:
        if step == 2:
            tokenizer.unlink()
            if other:
                tokenizer.write_bytes(other)

    return train_with(mesh, file, overrides, act)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("other", [b"", b"another"])
def test_checkpoints_have_the_tokenizer_that_the_run_began_with(
    tmp_path: Path, other: bytes
) -> None:
    file = write_run(tmp_path)
    [tokenizer] = file.parent.glob("data/*.model")
    content = tokenizer.read_bytes()
    [problems] = run_ranks(
        lose_tokenizer, {"dp": 1}, file=file, overrides=["checkpoint.every=1"], other=other
    )
    assert problems == []
    saved = checkpoints(tmp_path / "run" / "checkpoints")
    assert [(path / tokenizer.name).read_bytes() for path in saved] == [content] * 2
