"""Damage that no size and no shape tells: a flipped bit anywhere in a checkpoint is refused, and
nothing is changed."""

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint import integrity, reader, shard_file
from megaprec.checkpoint.atomic import INDEX, checkpoints
from megaprec.checkpoint.digests import file_digest, tensor_bytes
from megaprec.checkpoint.integrity import require_intact
from megaprec.checkpoint.reader import Store
from megaprec.checkpoint.save_load import load, save
from megaprec.checkpoint.shard_file import write_shard
from megaprec.comm.axis import Axis
from megaprec.errors import UserError
from tests.checkpoint.test_checkpoint import (
    MODEL,
    change_index,
    holds,
    require_refused,
    saved,
    small,
)
from tests.layouts import Run, make_engine
from tests.ranks import run_ranks
from tests.refusals import sentence, shows
from tests.runs import checkpoint, rewind, train, write_run
from tools.cli import main

FILES = ("model-00000.safetensors", "optimizer-00000.safetensors", "extra.txt", INDEX)


def flip(file: Path, place: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << bit
    file.write_bytes(content)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of a few numbers, and one from before it."""
    saved(tmp_path, 1)
    (tmp_path / "extra.txt").write_text("kept beside")
    return save(
        tmp_path,
        2,
        small(),
        {"progress": {"step": 2, "loss": 0.25}},
        files=[tmp_path / "extra.txt"],
    )


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize("name", FILES)
def test_every_flipped_byte_is_found(name: str, path: Path) -> None:
    dice = random.Random(0)
    whole = (path / name).read_bytes()
    for place in range(len(whole)):
        flip(path / name, place, dice.randrange(8))
        with pytest.raises(UserError) as refused:
            require_intact(store := Store(path), store.digests)
        assert name == INDEX or name in str(refused.value)
        assert all(code.startswith("checkpoint.") for code in refused.value.codes)
        (path / name).write_bytes(whole)
    require_intact(store := Store(path), store.digests)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_refused_before_anything_is_changed(name: str, path: Path) -> None:
    dice = random.Random(1)
    whole = (path / name).read_bytes()
    for place in dice.sample(range(len(whole)), 8):
        flip(path / name, place, dice.randrange(8))
        require_refused(
            path,
            small(),
            "checkpoint"
            if name == INDEX
            else sentence("checkpoint.digest_differs_newest", path=path, wrong=name, verb="is"),
        )
        (path / name).write_bytes(whole)
    load(path, small())


def test_what_is_not_a_byte_of_the_index_is_not_taken_for_one(path: Path) -> None:
    """Other bytes that JSON reads as the same."""
    content = (path / INDEX).read_bytes()
    for other in (
        content.replace(b"\n", b"\r\n"),
        content + b"\n",
        content.replace(b'"step": 2', b'"step":2', 1),
    ):
        (path / INDEX).write_bytes(other)
        with pytest.raises(
            UserError, match=sentence("checkpoint.digest_differs", path=path, index=INDEX)
        ):
            Store(path)


def test_the_checkpoint_before_it_is_named(path: Path) -> None:
    for name in FILES[:2]:
        flip(path / name, 300)
    said = sentence(
        "checkpoint.digest_differs_newest",
        path=path,
        wrong=", ".join(FILES[1::-1]),
        verb="are",
        remedy="restore it, or move it away to go on from step_00000001",
    )
    require_refused(path, small(), f"{said}$")
    shutil.rmtree(checkpoints(path.parent)[0])
    require_refused(path, small(), "restore it, or move it away to start anew$")


@pytest.mark.parametrize("name", ["merged", "step_2_copy", "step_"])
def test_a_damaged_checkpoint_of_a_name_of_its_own_is_to_be_restored(name: str, path: Path) -> None:
    """A copy, or a mean of several checkpoints: no run goes on from it."""
    copy = path.rename(path.with_name(name))
    flip(copy / FILES[0], -1)
    with pytest.raises(UserError) as caught:
        require_intact(Store(copy), FILES[:1])
    (problem,) = caught.value.problems
    assert problem.fields["remedy"] == "restore it"


def test_a_byte_that_goes_wrong_on_the_way_to_the_disk_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = shard_file.write_all

    def badly(descriptor: int, content: memoryview) -> None:
        write(descriptor, memoryview(bytes([*content[:-1], content[-1] ^ 1])))

    monkeypatch.setattr(shard_file, "write_all", badly)
    require_refused(
        saved(tmp_path), small(), sentence("checkpoint.digest_differs_newest", verb="are")
    )


def test_a_file_that_cannot_be_read_is_damaged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bad_disk(file: Path) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(integrity, "file_digest", bad_disk)
    require_refused(
        path,
        small(),
        sentence("checkpoint.digest_differs_newest", wrong=re.compile(r"extra\.txt$"), verb="are"),
    )


def test_a_file_that_may_not_be_read_is_not_called_damaged(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_another_user(file: Path) -> str:
        if file.name == FILES[1]:
            raise PermissionError(13, "Permission denied")
        return file_digest(file)

    monkeypatch.setattr(integrity, "file_digest", of_another_user)
    require_refused(path, small(), sentence("checkpoint.forbidden", files=FILES[1]))


def test_a_checkpoint_of_an_earlier_version_is_taken_as_it_is(tmp_path: Path) -> None:
    path = saved(tmp_path, value=7.0)
    optimizer = small()
    change_index(lambda index: None, path)
    assert not Store(path).digests
    load(path, optimizer)
    assert holds(optimizer, 7.0)


def test_what_is_hashed_in_memory_is_what_is_in_the_file(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(3, 5).bfloat16(),
        "a": torch.randn(7, 3, dtype=torch.float64).t().contiguous(),
        "scalar": torch.tensor(2.0),
        "one": torch.randn(1, 24)[:, 3],
        "none": torch.empty(0, 4),
        "codes": torch.randn(11).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False, True]),
        "long": torch.arange(3),
    }
    digest = write_shard(tmp_path / "x", tensors)
    assert digest == file_digest(tmp_path / "x")
    with safe_open(tmp_path / "x", "pt") as read:
        assert read.metadata() == {"format": "pt"} and set(read.keys()) == tensors.keys()
        for name, values in tensors.items():
            assert (
                read.get_tensor(name).dtype == values.dtype
                and read.get_tensor(name).shape == values.shape
            )
            assert bytes(tensor_bytes(read.get_tensor(name))) == bytes(tensor_bytes(values))
    tensors["flags"][1] = True
    assert write_shard(tmp_path / "x", tensors) != digest


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_no_rank_reads_much_more_than_another(ranks: int) -> None:
    sizes = sorted((random.Random(ranks).randrange(1000) for _ in range(20)), reverse=True)
    loads = [0] * ranks
    for size, owner in zip(sizes, integrity._assign_files(sizes, ranks), strict=True):
        loads[owner] += size
    assert max(loads) - min(loads) <= sizes[0]


def load_damaged(mesh: DeviceMesh, folder: Path) -> tuple[list[str], list[str], list[str]]:
    """The files of a checkpoint, those that this rank hashed when all were whole, and what it said
    of each damaged."""
    optimizer = make_engine(mesh, Run(MODEL, "bf16")).optimizer
    path = save(folder, 1, optimizer, {})
    read = list[str]()
    said = list[str]()

    def counted(file: Path) -> str:
        read.append(file.name)
        return file_digest(file)

    integrity.file_digest = counted  # this process is this rank's alone
    load(path, optimizer)
    once = list(read)
    names = sorted(Store(path).digests)
    for name in names:
        optimizer.world.barrier()
        if optimizer.world.rank == 0:
            flip(path / name, -1)
        optimizer.world.barrier()
        with pytest.raises(UserError) as refused:
            load(path, optimizer)
        said.append(str(refused.value))
        optimizer.world.barrier()
        if optimizer.world.rank == 0:
            flip(path / name, -1)
    return names, once, said


def test_ranks_that_open_a_checkpoint_together_look_at_each_file_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = list[tuple[int, str]]()
    size = reader._size
    files = Store(path).index["files"]
    for rank in range(2):
        monkeypatch.setattr(
            reader,
            "_size",
            lambda file, rank=rank: (looked.append((rank, file.name)), size(file))[1],
        )
        Store(path, Axis("world", rank, 2))
    assert sorted(name for _, name in looked) == sorted(files)
    assert {rank for rank, _ in looked} == {0, 1}
    rank, victim = looked[-1]
    (path / victim).unlink()
    with pytest.raises(UserError, match=sentence("checkpoint.file_size", file=victim)):
        Store(path, Axis("world", rank, 2))
    Store(path, Axis("world", 1 - rank, 2))


@pytest.mark.slow
def test_each_file_is_hashed_by_one_rank_and_all_ranks_refuse(tmp_path: Path) -> None:
    ranks = run_ranks(load_damaged, {"dp": 2, "tp": 2}, folder=tmp_path)
    names = ranks[0][0]
    assert len(names) == 8
    assert sorted(name for _, once, _ in ranks for name in once) == names
    for _, once, said in ranks:
        assert once
        assert all(
            shows(line, "checkpoint.digest_differs_newest", wrong=name, verb="is")
            for name, line in zip(names, said, strict=True)
        )


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file whose run has been trained for six steps, with checkpoints at 3 and 6."""
    file = write_run(tmp_path_factory.mktemp("damage"))
    assert train(file) == 0
    return file


Refused = Callable[..., None]


@pytest.fixture
def refused(file: Path, capfd: pytest.CaptureFixture[str]) -> Refused:
    def check(*arguments: object) -> None:
        """The command says one line, of the damaged checkpoint, and changes nothing."""
        before = {path: path.read_bytes() for path in file.parent.rglob("*") if path.is_file()}
        capfd.readouterr()
        assert main([*map(str, arguments)]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert shows(line, "checkpoint.digest_differs_newest") and line.endswith(
            "restore it, or move it away to go on from step_00000003"
        )
        after = {path: path.read_bytes() for path in file.parent.rglob("*") if path.is_file()}
        made = [
            p for p in after.keys() - before.keys() if p.name != ".lock" and "fresh" not in p.parts
        ]
        assert not made and all(after[path] == before[path] for path in before)

    return check


@pytest.mark.parametrize(
    "name", ["model-00000.safetensors", "optimizer-00000.safetensors", "text.model"]
)
def test_no_command_takes_a_damaged_checkpoint(name: str, file: Path, refused: Refused) -> None:
    copy = rewind(file.parent / "run", file.parent / name, 6)
    damaged = checkpoint(copy, 6)
    flip(damaged / name, (damaged / name).stat().st_size // 2)
    refused("train", file, "train.steps=8", f"train.folder={copy}")
    refused("inspect", copy)
    refused("convert", copy, file.parent / "out")
    refused("diff", file.parent / "run", copy)
    if not name.startswith("optimizer"):  # of which neither reads anything
        refused("generate", copy, "--prompt", "the")
        refused(
            "train", file, f"train.init_from={copy}", f"train.folder={file.parent}/fresh/{name}"
        )


@pytest.mark.slow
def test_inspect_says_whether_the_files_were_checked(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["convert", str(file.parent / "run"), str(tmp_path / "hf")]) == 0
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    for path in (file.parent / "run", tmp_path / "ours"):
        assert main(["inspect", str(path)]) == 0
        assert "with the bytes that were saved (SHA-256)" in capsys.readouterr().out
    change_index(lambda index: None, tmp_path / "ours")
    assert main(["inspect", str(tmp_path / "ours")]) == 0
    assert "not checked" in capsys.readouterr().out
