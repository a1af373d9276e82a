"""The laws of checkpoints at URLs: they are those of a folder, bit for bit; a checkpoint is whole or
not there, whatever ends a save; nothing whole is ever replaced; of tensors only the bytes that are
asked for are read, and errors are one line without secrets."""

import os
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.device_mesh import DeviceMesh

from megaprec import load, save
from megaprec.checkpoint import object_store
from megaprec.checkpoint.atomic import INDEX, checkpoint_path, latest
from megaprec.checkpoint.integrity import require_intact
from megaprec.checkpoint.keeping import RECORD, Keep, best_made_here, damage_of_record
from megaprec.checkpoint.reader import Store
from megaprec.checkpoint.saving import Saving
from megaprec.errors import UserError
from megaprec.tokens import ranges
from megaprec.tokens.places import path_of
from tests.checkpoint.s3_server import SETTINGS, Conduct, s3_place
from tests.checkpoint.test_checkpoint import MODEL, all_tensors, holds, saved, small, spoil
from tests.layouts import Run, make_engine
from tests.ranks import run_ranks
from tests.refusals import raises


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "DELAYS", (0.0,))


@pytest.fixture
def memory() -> Iterator[Path]:
    """An empty place in memory."""
    name = f"/{uuid.uuid4().hex}"
    yield path_of(f"memory://{name}/run")
    fsspec.filesystem("memory").rm(name, recursive=True)


@pytest.fixture
def conduct() -> Conduct:
    return Conduct()


@pytest.fixture
def s3(conduct: Conduct, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty place at a server of S3."""
    with s3_place(conduct, monkeypatch) as url:
        yield path_of(url)


def names_at(folder: Path) -> list[str]:
    """All names below a URL, without the record of saves."""
    system = folder.fs  # type: ignore[attr-defined]
    system.invalidate_cache()
    root = folder.path  # type: ignore[attr-defined]
    found = [name.removeprefix(root).strip("/") for name in system.find(root)]
    return sorted(name for name in found if name != RECORD)


def whole(step: int) -> list[str]:
    files = (INDEX, "model-00000.safetensors", "optimizer-00000.safetensors")
    return [f"step_{step:08d}/{file}" for file in files]


@pytest.mark.parametrize("place", ["memory", pytest.param("s3", marks=pytest.mark.slow)])
def test_saves_keep_remove_and_load_as_in_a_folder(
    place: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(place)
    assert latest(folder) is None
    for step in range(1, 5):
        keep = Keep(1, best={"eval_loss": 1.0})
        losses = {"eval_loss": abs(step - 2.5)}
        for where in (folder, tmp_path):
            optimizer = small()
            for tensor in all_tensors(optimizer):
                tensor.fill_(step)
            outcome = Saving(where, step, optimizer, {}, keep, losses=losses).finish()
            assert (outcome.problem, outcome.warnings) == ("", ())
    assert names_at(folder) == whole(2) + whole(4)
    best = best_made_here(folder, {"eval_loss": 1.0})
    assert best is not None and best.path.name == "step_00000002"
    newest = latest(folder)
    assert newest is not None and newest.name == "step_00000004"
    # the index says the same, and so do the bytes of each file
    assert Store(newest).index == Store(tmp_path / newest.name).index
    require_intact(Store(newest), Store(newest).digests)
    optimizer = small()
    load(newest, optimizer)
    assert holds(optimizer, 4.0)
    load(str(checkpoint_path(folder, 2)), optimizer)
    assert holds(optimizer, 2.0)


def save_and_load(
    mesh: DeviceMesh, folder: str, settings: dict[str, str], save_here: bool
) -> list[torch.Tensor]:
    """Save at a URL, or load what is there, each rank with a home of its own."""
    os.environ.update(settings)
    optimizer = make_engine(mesh, Run(MODEL, "bf16")).optimizer
    if save_here:
        for number, tensor in enumerate(all_tensors(optimizer)):
            tensor.uniform_(-1, 1, generator=torch.Generator().manual_seed(number))
        save(folder, 1, optimizer, {})
    else:
        spoil(optimizer)
        newest = latest(path_of(folder))
        assert newest is not None
        load(newest, optimizer)
    store = Store(latest(path_of(folder)))  # type: ignore[arg-type]
    return [store.read(*key.split("/", 1)) for key in sorted(store.index["tensors"])]


@pytest.mark.slow
def test_ranks_save_each_its_own_and_any_layout_loads_them_from_s3(
    s3: Path,
) -> None:
    settings = {**SETTINGS, "AWS_ENDPOINT_URL": os.environ["AWS_ENDPOINT_URL"]}
    given = {"folder": str(s3), "settings": settings}
    saved_by_four = run_ranks(save_and_load, {"tp": 2, "dp": 2}, save_here=True, **given)
    files = [name for name in names_at(s3) if name.endswith(".safetensors")]
    assert len(files) == 8
    loaded_by_two = run_ranks(save_and_load, {"tp": 2}, save_here=False, **given)
    for one, other in zip(saved_by_four[0], loaded_by_two[1], strict=True):
        assert torch.equal(one, other)


class Killed(BaseException):
    """Stands for a signal that leaves no time to clean up."""


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, bool], None]:
    """Ends the process, as it were, at a change of a place in memory."""

    def arm(change: int, after: bool) -> None:
        left = change

        def counted(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0 and not after:
                    raise Killed
                result = original(*arguments, **named)
                if left == 0:
                    raise Killed
                return result

            return call

        monkeypatch.setattr(object_store, "file_system", lambda path: Changing(path.fs, counted))

    return arm


class Changing:
    """A file system whose changes are counted: an object that is written, and one that is
    removed."""

    def __init__(self, system: MemoryFileSystem, counted: Callable[..., Any]) -> None:
        self._system = system
        self._counted = counted

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._system, name)
        return self._counted(value) if name == "rm_file" else value

    def open(self, name: str, mode: str) -> Any:
        assert mode == "wb"
        return Written(self._counted(partial(self._system.pipe_file, name)))


class Written(BytesIO):
    """An object that is there when it is closed."""

    def __init__(self, put: Callable[[bytes], None]) -> None:
        super().__init__()
        self._put = put

    def close(self) -> None:
        if not self.closed:
            content = self.getvalue()
            super().close()
            self._put(content)


@pytest.mark.parametrize("after", [False, True])
def test_a_kill_at_any_change_leaves_the_last_whole_checkpoint_and_the_next_save_tidies_up(
    after: bool, memory: Path, kill_at: Callable[[int, bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each object that is written or removed is a change; the step before the killed one, or it
    itself, is there afterwards."""
    change = 1
    step = 0
    done = False
    while not done:
        previous = saved(memory, step=step, keep=1)
        kill_at(change, after)
        try:
            saved(memory, step=step + 1, keep=1)
            done = True
        except Killed:
            pass
        monkeypatch.setattr(object_store, "file_system", lambda path: path.fs)
        newest = latest(memory)
        assert newest is not None
        assert newest in (previous, checkpoint_path(memory, step + 1))
        require_intact(Store(newest), Store(newest).digests)
        # the same run, on another machine
        saved(memory, step=step + 2, keep=1)
        assert names_at(memory) == whole(step + 2)
        change += 1
        step += 3
    # of a save: the mark, two files of tensors, the list twice, the record, the index, the mark;
    # of a removal: the mark twice, the index and two files
    assert change > 12


def test_a_checkpoint_at_a_url_is_never_replaced(memory: Path) -> None:
    saved(memory, step=1, value=1.0)
    with pytest.raises(UserError) as said:
        saved(memory, step=1, value=2.0)
    assert "it is there already, and is not replaced: move it away" in str(said.value)
    optimizer = small()
    load(latest(memory) or "", optimizer)
    assert holds(optimizer, 1.0)


def test_one_without_an_index_that_no_save_has_left_is_damaged_and_stays(memory: Path) -> None:
    saved(memory, step=1)
    path = saved(memory, step=2)
    object_store.remove_object(path / INDEX)
    left = names_at(path)
    with raises("checkpoint.damaged_newest"):
        latest(memory)
    saved(memory, step=3)
    assert names_at(path) == left
    assert latest(memory) == checkpoint_path(memory, 3)


def test_a_changed_byte_is_named(memory: Path) -> None:
    path = saved(memory)
    file = path / "model-00000.safetensors"
    content = bytearray(object_store.read_object(file, 1 << 20))
    content[-1] ^= 1
    object_store.write_object(file, [bytes(content)])
    with raises("checkpoint.digest_differs_newest"):
        load(path, small())


def test_a_line_that_is_torn_at_a_url_costs_the_record_of_no_other_save(memory: Path) -> None:
    saved(memory, step=1)
    record = memory / RECORD
    torn = object_store.read_object(record, 1 << 20)[:-30]
    object_store.write_object(record, [torn])
    for step in (2, 3):
        saved(memory, step=step, keep=1)
    assert damage_of_record(memory) == ("", [1])
    assert names_at(memory) == sorted([*whole(1), *whole(3)])


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xff" * 8,
        (2).to_bytes(8, "little") + b"[]",
        (1 << 40).to_bytes(8, "little") + b"{}",
    ],
)
def test_a_file_that_is_none_of_tensors_is_refused(header: bytes, memory: Path) -> None:
    path = saved(memory)
    file = path / "model-00000.safetensors"
    size = object_store.size_of_object(file)
    object_store.write_object(file, [header.ljust(size, b"\0")])
    store = Store(path)
    key = next(key for key in store.index["tensors"] if key.startswith("weight/"))
    with pytest.raises(UserError):
        store.read(*key.split("/", 1))


@pytest.mark.slow
def test_of_tensors_the_rows_that_are_asked_for_are_read_and_no_others(
    s3: Path, conduct: Conduct
) -> None:
    path = saved(s3)
    here = Store(path)
    key, entry = next(
        (key, entry) for key, entry in here.index["tensors"].items() if len(entry["shape"]) == 2
    )
    here.rectangle(key, [0, 0], [1, 1])
    conduct.ranges.clear()
    width = entry["shape"][1]
    here.rectangle(key, [1, 0], [1, width])
    ((_, asked),) = conduct.ranges
    first, last = map(int, asked.removeprefix("bytes=").split("-"))
    itemsize = getattr(torch, entry["dtype"]).itemsize
    assert last - first + 1 == width * itemsize


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("optimizer-00000.safetensors", marks=pytest.mark.slow),
        INDEX,
        pytest.param(".unfinished", marks=pytest.mark.slow),
    ],
)
def test_a_full_bucket_is_a_line_and_leaves_the_last_whole_checkpoint(
    name: str, s3: Path, conduct: Conduct
) -> None:
    whole_one = saved(s3, step=1)
    conduct.full = f"step_00000002/{name}"
    outcome = Saving(s3, 2, small(), {}).finish()
    assert "The bucket has no room for more" in outcome.problem
    assert "\n" not in outcome.problem
    assert "hunter2" not in outcome.problem
    conduct.full = ""
    assert latest(s3) == whole_one
    saved(s3, step=3)
    assert names_at(s3) == whole(1) + whole(3)


def test_wrong_credentials_are_a_line(s3: Path, conduct: Conduct) -> None:
    saved(s3)
    conduct.forbids = True
    with pytest.raises(UserError) as said:
        latest(s3)
    (line,) = said.value.problems
    assert "look at the credentials" in line
    assert "hunter2" not in line
    assert Saving(s3, 2, small(), {}).finish().problem.count("\n") == 0


@pytest.mark.slow
def test_a_slow_server_delays_no_step(s3: Path, conduct: Conduct) -> None:
    """The save is under way while the ranks ask each other."""
    conduct.seconds = 0.02
    saving = Saving(s3, 1, small(), {}, background=True)
    polls = 0
    while saving.poll() is None:
        polls += 1
    assert polls > 1
    conduct.seconds = 0
    assert names_at(s3) == whole(1)


@pytest.mark.usefixtures("s3")
def test_a_password_in_a_url_is_in_no_error_and_no_note(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError) as said:
        latest(path_of("s3://name:hunter2@bucket/run"))
    assert "***" in str(said.value)
    assert "hunter2" not in str(said.value)
    assert "hunter2" not in "".join(str(problem.fields) for problem in said.value.problems)
    notes = capsys.readouterr().err
    assert "***" in notes
    assert "hunter2" not in notes


@pytest.mark.parametrize("kind", ["memory", "s3", "https", "file"])
def test_the_kind_of_a_url_may_be_in_capitals(kind: str) -> None:
    place = "bucket/Run/x.jsonl"
    assert path_of(f"{kind.upper()}://{place}") == path_of(f"{kind}://{place}")
