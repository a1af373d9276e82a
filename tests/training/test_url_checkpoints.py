"""The laws of runs whose checkpoints are at a URL: they are the runs that save to a folder; another
machine goes on with nothing but the run file; every command that reads a checkpoint reads it there;
no secret is kept."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megaprec.checkpoint import object_store
from megaprec.checkpoint.atomic import checkpoint_path, latest
from megaprec.checkpoint.reader import Store
from megaprec.tokens.places import path_of
from tests.checkpoint.s3_server import Conduct, s3_place
from tests.hosts import free_port
from tests.refusals import raises, shows
from tests.runs import checkpoint, losses, steps, tensors, train, write_run
from tools.cli import main
from tools.convert.formats import open_intact
from tools.training.kept_exports import EXPORTED, export_kept

KEYS = ("model.dropout=0.0", "train.eval_every=2", "checkpoint.every=2", "--no-verify")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("urls"))


@pytest.fixture(scope="module")
def local(file: Path) -> Path:
    """A run of four steps that saves to a folder."""
    folder = file.parent / "local"
    assert train(file, *KEYS, "train.steps=4", f"train.folder={folder}") == 0
    return folder


@pytest.fixture
def conduct() -> Conduct:
    return Conduct()


@pytest.fixture
def url(conduct: Conduct, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """An empty place at a server of S3, and a cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with s3_place(conduct, monkeypatch) as place:
        yield place


def same_tensors(one: Path, other: Path) -> None:
    ours = tensors(one)
    theirs = tensors(other)
    assert ours.keys() == theirs.keys()
    for key, values in ours.items():
        assert torch.equal(values, theirs[key]), key


def test_a_run_is_the_one_that_saves_to_a_folder_and_another_machine_goes_on_with_it(
    file: Path, local: Path, url: str, tmp_path: Path
) -> None:
    keys = (*KEYS, f"checkpoint.folder={url}", "lr.schedule=constant")
    assert train(file, *keys, "train.steps=2", f"train.folder={tmp_path / 'one'}") == 0
    # nothing is left of the first machine but what is at the URL
    assert train(file, *keys, "train.steps=4", f"train.folder={tmp_path / 'other'}") == 0
    assert losses(tmp_path / "one") + losses(tmp_path / "other") == losses(local)
    folder = path_of(url)
    same_tensors(checkpoint_path(folder, 4), checkpoint(local, 4))
    same_tensors(checkpoint_path(folder, 2), checkpoint(local, 2))
    assert not (tmp_path / "one" / "checkpoints").exists()
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in kept if b"hunter2" in path.read_bytes()]


def send(local: Path, url: str) -> None:
    """Copy a checkpoint to a URL, as a person does."""
    for path in (checkpoint(local, 2), checkpoint(local, 4)):
        for entry in path.iterdir():
            object_store.send(entry, path_of(url) / path.name / entry.name)


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main([*map(str, words)]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_commands_read_a_url_as_they_read_a_folder(
    file: Path, local: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    send(local, url)
    places = (local / "checkpoints", url)
    text = file.parent / "text.txt"
    numbers = [
        json.loads(said(capsys, "evaluate", place, "--data", text, "--max-chars=300", "--json"))
        for place in places
    ]
    assert numbers[0]["sets"] == numbers[1]["sets"]
    for name, place in zip(("a", "b"), places, strict=True):
        said(capsys, "convert", place, tmp_path / name, "--to=hf", "--no-verify")
        steps_of = [f"{place}/step_00000002", f"{place}/step_00000004"]
        said(capsys, "merge", *steps_of, "-o", tmp_path / f"merged {name}")
    for entry in (tmp_path / "a").iterdir():
        if entry.name != "README.md":  # which says bits per byte if it lies in its run
            assert entry.read_bytes() == (tmp_path / "b" / entry.name).read_bytes()
    same_tensors(tmp_path / "merged a", tmp_path / "merged b")
    digests = [
        [line for line in said(capsys, "inspect", place).splitlines() if "digest" in line]
        for place in places
    ]
    assert digests[0] == digests[1] != []
    samples = [said(capsys, "generate", place, "--prompt=the", "--tokens=3") for place in places]
    assert samples[0] == samples[1]
    assert " 0 differ" in said(capsys, "diff", url, checkpoint(local, 4))


@pytest.mark.slow
def test_a_run_begins_with_and_branches_from_a_url_as_from_a_folder(
    file: Path, local: Path, url: str, tmp_path: Path
) -> None:
    send(local, url)
    for key in ("train.init_from", "train.branch_from"):
        for name, place in (("a", local / "checkpoints"), ("b", url)):
            folder = tmp_path / key / name
            keys = (*KEYS, "train.steps=5", f"train.folder={folder}", f"{key}={place}")
            assert train(file, *keys) == 0
        assert losses(tmp_path / key / "a") == losses(tmp_path / key / "b")


@pytest.mark.slow
def test_the_exported_folder_of_a_checkpoint_at_a_url_is_whole_or_no_model_and_goes_with_it(
    file: Path, url: str, conduct: Conduct, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = (*KEYS, f"checkpoint.folder={url}", "checkpoint.export=hf", "checkpoint.keep=1")
    conduct.full = "step_00000002/hf/model.safetensors"
    assert train(file, *keys, "train.steps=2", f"train.folder={tmp_path / 'run'}") == 0
    assert "step_00000002 is saved, but has no folder hf" in capsys.readouterr().err
    first = checkpoint_path(path_of(url), 2)
    assert "config.json" not in object_store.sizes(first / EXPORTED)
    conduct.full = ""
    assert export_kept(path_of(url)) == []
    sent = [line for line in conduct.changes if "/hf/" in line]
    assert sent[-1].endswith("hf/config.json")
    assert train(file, *keys, "train.steps=4", f"train.folder={tmp_path / 'run'}") == 0
    assert object_store.entry_names(first) == []
    files = object_store.sizes(checkpoint_path(path_of(url), 4) / EXPORTED)
    assert {"config.json", "model.safetensors", "README.md", "tokenizer.json"} <= files.keys()


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("https://localhost/run", "checkpoint.url_not_saved_to"),
        ("hf://someone/model", "checkpoint.url_is_hub"),
        ("file:///nowhere/run", "checkpoint.url_is_path"),
        ("FILE:///nowhere/run", "checkpoint.url_is_path"),
        ("s3://", "data.url_without_place"),
        ("memory:///", "config.checkpoints_in_memory"),
        ("memory://bucket/run", "config.checkpoints_in_memory"),
        ("simplecache::s3://bucket/run", "checkpoint.url_not_saved_to"),
        ("s3://key:hunter2@bucket/run", "config.url_password"),
        ("s3://no-such-bucket-here/run", "checkpoint.url_failed"),
    ],
)
@pytest.mark.usefixtures("url")
def test_a_place_to_which_nothing_can_be_saved_is_refused_before_the_run(
    place: str, code: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    capsys.readouterr()
    assert train(file, *KEYS, f"checkpoint.folder={place}", f"train.folder={folder}") == 2
    said_by_train = capsys.readouterr().err
    assert shows(said_by_train, code)
    assert "hunter2" not in said_by_train
    assert not folder.exists()


@pytest.mark.parametrize("place", ["hf://someone/model", "ftp://localhost/run"])
def test_a_kind_of_url_to_which_nothing_is_saved_is_refused_before_its_server_is_asked(
    place: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(object_store, "file_system", asked.append)
    assert train(file, *KEYS, f"checkpoint.folder={place}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{place}: no checkpoint is saved to")
    assert not asked


@pytest.mark.slow
def test_a_bucket_that_is_full_in_the_middle_costs_a_warning_and_at_the_end_the_exit_code(
    file: Path, url: str, conduct: Conduct, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = (*KEYS, f"checkpoint.folder={url}", f"train.folder={tmp_path / 'run'}")
    conduct.full = "step_00000004/checkpoint.json"
    assert train(file, *keys, "train.steps=6") == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "not saved" in line]
    assert len(warnings) == 1 and "The bucket has no room for more" in warnings[0]
    assert [record["step"] for record in steps(tmp_path / "run")] == [*range(1, 7)]
    conduct.full = "step_00000008/checkpoint.json"
    assert train(file, *keys, "train.steps=8") == 2
    last = capsys.readouterr().err
    assert "the newest whole checkpoint is " in last and "step_00000006" in last
    newest = latest(path_of(url))
    assert newest is not None and newest.name == "step_00000006"


@pytest.mark.slow
def test_ranks_that_share_no_folder_save_and_resume(file: Path, url: str, tmp_path: Path) -> None:
    """Each rank is a machine of its own: a working directory, a home and temporary folders that no
    other one has; the text is copied to each."""
    command = [sys.executable, "-m", "megaprec", "train", str(file), *KEYS]
    command += [f"checkpoint.folder={url}", "train.folder=run", "parallel.data=2"]
    for last in (2, 4):
        ranks: list[subprocess.Popen[bytes]] = []
        port = free_port()
        for rank in range(2):
            home = tmp_path / f"machine {rank}"
            for name in ("tmp", "cache"):
                (home / name).mkdir(parents=True, exist_ok=True)
            environment = {
                **os.environ,
                "PYTHONPATH": os.getcwd(),
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TMPDIR": str(home / "tmp"),
                "XDG_CACHE_HOME": str(home / "cache"),
            }
            ranks.append(
                subprocess.Popen([*command, f"train.steps={last}"], cwd=home, env=environment)
            )
        assert [each.wait() for each in ranks] == [0, 0]
    newest = latest(path_of(url))
    assert newest is not None and newest.name == "step_00000004"
    assert {"model-00000.safetensors", "model-00001.safetensors"} <= Store(newest).index[
        "files"
    ].keys()
    assert not (tmp_path / "machine 1" / "run" / "checkpoints").exists()


def test_a_url_of_another_format_is_refused_by_name(url: str) -> None:
    object_store.write_object(path_of(url) / "config.json", [b"{}"])
    with raises("convert.url_without_checkpoint"):
        open_intact(path_of(url))
