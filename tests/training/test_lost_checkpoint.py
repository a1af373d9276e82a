"""A damaged checkpoint is never nothing: what has the name of one and is none is refused, and
nothing is changed."""

import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaprec.checkpoint import atomic as module
from megaprec.checkpoint.atomic import INDEX, checkpoint_at, checkpoints, damaged_beside, latest
from megaprec.checkpoint.digests import FILE_DIGESTS, INDEX_DIGEST
from megaprec.errors import Problem, UserError
from tests.checkpoint.test_checkpoint import names, saved
from tests.refusals import raises, shows
from tests.runs import checkpoint, edit_index, rewind, steps, train, write_run
from tools.cli import main


def unlink(path: Path) -> None:
    (path / INDEX).unlink()


def make_folder(path: Path) -> None:
    unlink(path)
    (path / INDEX).mkdir()


def make_fifo(path: Path) -> None:
    unlink(path)
    os.mkfifo(path / INDEX)


def make_link_to_nothing(path: Path) -> None:
    unlink(path)
    (path / INDEX).symlink_to("nowhere")


def make_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("a file")


def make_outer_link_to_nothing(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to("nowhere")


LOSSES: dict[Callable[[Path], None], str] = {
    unlink: "it has no checkpoint.json",
    make_folder: "its checkpoint.json is no file",
    make_fifo: "its checkpoint.json is no file",
    make_link_to_nothing: "its checkpoint.json is a link to nothing",
    make_file: "it is no folder",
    make_outer_link_to_nothing: "it has no checkpoint.json",
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file whose run has been trained for six steps, with checkpoints at 3 and 6."""
    file = write_run(tmp_path_factory.mktemp("lost"))
    assert train(file) == 0
    return file


def contents(folder: Path) -> dict[Path, object]:
    """All that lies there, with the content of files; without the lock of a run."""

    def of(path: Path) -> object:
        mode = path.lstat().st_mode
        return path.read_bytes() if stat.S_ISREG(mode) else stat.S_IFMT(mode)

    return {path: of(path) for path in folder.rglob("*") if path.name != ".lock"}


Refused = Callable[..., list[str]]


@pytest.fixture
def refused(file: Path, capfd: pytest.CaptureFixture[str]) -> Refused:
    def check(run: Path, *arguments: object) -> list[str]:
        """What the command says when it refuses, having changed nothing in `run`."""
        before = contents(run)
        _ = capfd.readouterr()
        assert main([*map(str, arguments)]) == 2
        assert contents(run) == before
        out, err = capfd.readouterr()
        assert out == ""
        return err.splitlines()

    return check


@pytest.mark.parametrize("lose", LOSSES)
@pytest.mark.parametrize("only", [True, False], ids=["only one", "of two"])
def test_a_checkpoint_without_its_index_is_refused_by_every_command_and_left_alone(
    lose: Callable[[Path], None], only: bool, file: Path, tmp_path: Path, refused: Refused
) -> None:
    run = rewind(file.parent / "run", tmp_path / "run", 6)
    if only:
        shutil.rmtree(checkpoint(run, 3))
    lose(checkpoint(run, 6))
    remedy = f"move it away to {'start anew' if only else 'go on from step_00000003'}"
    line = Problem.of(
        "checkpoint.damaged",
        path=checkpoint(run, 6),
        damage=LOSSES[lose],
        remedy=f"restore it, or {remedy}",
    )
    assert refused(run, "train", file, "train.steps=8", f"train.folder={run}") == [line]
    assert refused(run, "inspect", run) == [line]
    assert refused(run, "generate", run, "--prompt", "the") == [line]
    assert refused(run, "convert", run, tmp_path / "out") == [line]
    said = refused(run, "train", file, f"train.init_from={run}", f"train.folder={tmp_path}/new")
    assert said == [f"train.init_from (command line): {line}"]


def test_the_remedy_works(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = rewind(file.parent / "run", tmp_path / "run", 6)
    unlink(checkpoint(run, 6))
    assert train(file, f"train.folder={run}") == 2
    checkpoint(run, 6).rename(run / "checkpoints" / "step_00000006.damaged")
    assert train(file, f"train.folder={run}") == 0
    assert "resumed    from" in capsys.readouterr().out
    assert steps(run) == steps(file.parent / "run")
    assert len(names(run / "checkpoints" / "step_00000006.damaged")) == 3


def test_the_newest_is_taken_beside_an_older_one_that_is_damaged_and_that_one_is_named(
    tmp_path: Path,
) -> None:
    older = saved(tmp_path, 1)
    newer = saved(tmp_path, 2)
    assert damaged_beside(newer) == []
    unlink(older)
    assert latest(tmp_path) == newer
    why = "is damaged: it has no checkpoint.json: it is not used, and stays"
    assert damaged_beside(newer) == [f"{older} {why}"]
    unlink(newer)
    with raises(
        "checkpoint.damaged_newest",
        newest=re.compile("step_00000002$"),
        damage=re.compile("^it has no "),
        remedy=re.compile("move it away to start anew$"),
    ):
        latest(tmp_path)
    with pytest.raises(UserError) as said:
        checkpoints(tmp_path)
    assert len(said.value.problems) == 2


@pytest.mark.parametrize("put", ["empty folder", "lost index"])
def test_a_run_goes_on_from_the_newest_whatever_lies_there_of_older_ones(
    put: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = rewind(file.parent / "run", tmp_path / "run", 6)
    older = checkpoint(run, 0 if put == "empty folder" else 3)
    if put == "empty folder":
        older.mkdir()
    else:
        unlink(older)
    assert train(file, f"train.folder={run}", "train.steps=7") == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        f"note       {older} is damaged: it has no checkpoint.json: it is not used, and stays"
        in lines
    )
    assert older.is_dir()
    assert main(["inspect", str(run)]) == 0


def test_a_checkpoint_named_by_itself_is_refused_alike(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    assert checkpoint_at(path) == path
    unlink(path)
    with raises(
        "checkpoint.damaged_named",
        path=re.compile("step_00000001$"),
        damage="it has no checkpoint.json",
    ):
        checkpoint_at(path)


def test_one_that_is_damaged_in_mid_run_is_not_removed_by_a_save(tmp_path: Path) -> None:
    for step in (1, 2):
        unlink(saved(tmp_path, step))
    why = "was in the way of a save and is step_00000002.damaged now: it was damaged"
    with pytest.warns(UserWarning, match=f"step_00000002 {why}"):
        saved(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["step_00000001", "step_00000002", "step_00000002.damaged"]
    assert names(tmp_path / "step_00000001") == names(tmp_path / "step_00000002.damaged")
    saved(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["step_00000001", "step_00000002.damaged", "step_00000003"]


def put_file(folder: Path) -> None:
    folder.write_text("a file")


def put_link(folder: Path) -> None:
    folder.symlink_to("nowhere")


def put_fifo(folder: Path) -> None:
    os.mkfifo(folder)


def put_leftover(folder: Path) -> None:
    folder.mkdir()
    (folder / ".step_00000003.partial").write_text("a file")


def put_linked_leftover(folder: Path) -> None:
    folder.mkdir()
    (folder / ".step_00000003.partial").symlink_to(folder)


@pytest.mark.parametrize(
    ("put", "code"),
    [
        (put_file, "checkpoint.folder_is_file"),
        (put_fifo, "checkpoint.folder_is_file"),
        (put_link, "checkpoint.folder_link_broken"),
        (put_leftover, "checkpoint.unfinished_name_taken"),
        (put_linked_leftover, "checkpoint.unfinished_name_taken"),
    ],
)
def test_a_place_where_nothing_can_be_saved_is_found_at_the_start(
    put: Callable[[Path], None], code: str, file: Path, tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "run").mkdir()
    put(tmp_path / "run" / "checkpoints")
    (line,) = refused(tmp_path, "train", file, f"train.folder={tmp_path}/run")
    folder = tmp_path / "run" / "checkpoints"
    named = {
        "checkpoint.folder_is_file": {"folder": folder},
        "checkpoint.folder_link_broken": {"folder": folder, "target": "nowhere"},
        "checkpoint.unfinished_name_taken": {"left": folder / ".step_00000003.partial"},
    }
    assert line == Problem.of(code, **named[code])


@pytest.mark.parametrize("what", ["listdir", "lstat", "index"])
def test_what_may_not_be_read_is_not_nothing(
    what: str, file: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a user to whom a folder of mode 0333, one above it, or one in it of mode 0600, is
    closed."""
    run = rewind(file.parent / "run", tmp_path / "run", 6)
    inner = getattr(os, what, os.stat)
    closed = run / "checkpoints"

    def close(path: Any, *rest: Any, **options: Any) -> Any:
        if options.get("follow_symlinks", True) and Path(path) == (
            checkpoint(run, 6) / INDEX if what == "index" else closed
        ):
            raise PermissionError(13, "Permission denied")
        return inner(path, *rest, **options)

    monkeypatch.setattr(module.os, "stat" if what == "index" else what, close)
    (line,) = refused(tmp_path, "train", file, f"train.folder={run}")
    assert str(closed) in line and "(Permission denied)" in line
    codes = {
        "listdir": "checkpoint.folder_not_listable",
        "lstat": "checkpoint.folder_not_visible",
    }
    assert what == "index" or shows(line, codes[what], folder=closed)


# --- newer versions, and indices that were edited


def of_a_newer_version(index: dict[str, Any]) -> None:
    index["format"] = 3


def with_a_key(table: str) -> Callable[[dict[str, Any]], None]:
    return lambda index: index[table].update(newer=1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (of_a_newer_version, "has checkpoint format 3, and this one reads up to 2"),
        (with_a_key("model"), "says model.newer"),
        (with_a_key("progress"), "says progress.newer"),
        (with_a_key("watch"), "says watch.newer"),
    ],
    ids=["format", "model", "progress", "watch"],
)
def test_a_newer_version_is_told_from_damage(
    change: Callable[[dict[str, Any]], None], why: str, file: Path, tmp_path: Path, refused: Refused
) -> None:
    run = rewind(file.parent / "run", tmp_path / "run", 6)
    edit_index(checkpoint(run, 6), change)
    said = refused(run, "train", file, "train.steps=8", f"train.folder={run}")
    assert said[0] == Problem.of("checkpoint.newer_version", path=checkpoint(run, 6), why=why)


def test_an_index_that_lost_its_digests_is_damaged(
    file: Path, tmp_path: Path, refused: Refused
) -> None:
    run = rewind(file.parent / "run", tmp_path / "run", 6)
    index = json.loads((checkpoint(run, 6) / INDEX).read_bytes())
    (checkpoint(run, 6) / INDEX).write_text(
        json.dumps({k: v for k, v in index.items() if k not in (INDEX_DIGEST, FILE_DIGESTS)})
    )
    said = refused(run, "train", file, "train.steps=8", f"train.folder={run}")
    assert shows(said[0], "checkpoint.digests_lost")


def test_of_a_checkpoint_without_digests_a_run_says_that_nothing_was_checked(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = rewind(file.parent / "run", tmp_path / "run", 6)
    index = json.loads((checkpoint(run, 6) / INDEX).read_bytes())
    older = {k: v for k, v in index.items() if k not in (INDEX_DIGEST, FILE_DIGESTS, "data", "run")}
    (checkpoint(run, 6) / INDEX).write_text(json.dumps(older))
    assert train(file, "train.steps=7", f"train.folder={run}") == 0
    said = capsys.readouterr().out
    assert (
        f"note       {checkpoint(run, 6)} has no digests (an earlier version saved it), so "
        "nothing tells"
    ) in said
    assert "keeps no record of the data and the keys that it was trained with" in said


WRONG: tuple[Any, ...] = (None, [], {}, "x", -1, 1.5, True, [[]], {"x": -1}, 10**30)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in the index; of lists and of tensors, which are many and alike, the
    first."""
    found = [path] if path else []
    if isinstance(value, dict):
        keys = list(value)[:1] if path in (("tensors",), ("files",), ("sha256",)) else list(value)
        return found + [place for key in keys for place in places(value[key], (*path, key))]
    return found + ([*places(value[0], (*path, 0))] if isinstance(value, list) and value else [])


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(slice(0, None, 6), marks=pytest.mark.slow),
        pytest.param(slice(None), marks=pytest.mark.campaign),
    ],
    ids=["a sixth", "all"],
)
def test_no_edit_of_an_index_ends_in_a_traceback(part: slice, file: Path, tmp_path: Path) -> None:
    """Each value in turn is left out, or is another one; a run goes on with it or says what is
    wrong."""
    run = rewind(file.parent / "run", tmp_path / "run", 6)
    index_file = checkpoint(run, 6) / INDEX
    whole = json.loads(index_file.read_bytes())
    whole.pop(INDEX_DIGEST)
    found = [place for place in places(whole) if place[0] != "model" or len(place) == 1][part]
    for place in found:
        for wrong in (
            "lost",
            WRONG[len(str(place)) % len(WRONG)],
            WRONG[(len(str(place)) + 3) % len(WRONG)],
        ):

            def change(
                index: dict[str, Any], place: tuple[Any, ...] = place, wrong: Any = wrong
            ) -> None:
                inner: Any = index
                for key in place[:-1]:
                    inner = inner[key]
                if wrong == "lost":
                    del inner[place[-1]]
                else:
                    inner[place[-1]] = wrong

            edit_index(checkpoint(run, 6), change)
            assert train(file, f"train.folder={run}") in (0, 2), f"{place}: {wrong!r}"
            index_file.write_text(json.dumps(whole))
            edit_index(checkpoint(run, 6), lambda index: None)
