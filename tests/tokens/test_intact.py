"""Tokens are what was built, and ids are the vocabulary's, before anything is trained on them;
looked at once."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint.atomic import latest
from megaprec.comm.axis import Axis
from megaprec.comm.layout import Part
from megaprec.errors import Problem, UserError
from megaprec.precision.plan import plan
from megaprec.text import build as building
from megaprec.tokens import intact
from megaprec.tokens.indexed import IndexedDataset, IndexedWriter
from megaprec.tokens.intact import NUMBERS, check_vocabulary, contents_of, read_record
from parallel.context import Context
from parallel.layers import VocabParallelEmbedding
from parallel.loss import cross_entropy
from tests.commands.test_data_command import command
from tests.layouts import Run, batches, make_engine, share_of
from tests.models.test_parity import MODELS
from tests.ranks import run_ranks
from tests.refusals import raises, shows
from tests.runs import rewind, steps, train, write_run
from tools.cli import main
from tools.config.run_file import load_run
from tools.training.corpus import open_corpus
from tools.training.trainer import Trainer


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file whose run, with data of its own, has been trained for six steps, with checkpoints
    at 3 and 6."""
    file = write_run(tmp_path_factory.mktemp("intact"))
    assert train(file, "data.cache=") == 0
    return file


def until_time_moves(path: Path) -> None:
    """Waits until a change of the file gets a later time than its last one: a filesystem's clock
    ticks slowly."""
    other = path.with_name("tick")
    other.touch()
    while other.stat().st_ctime_ns <= path.stat().st_ctime_ns:
        os.utime(other)
    other.unlink()


def flip(path: Path) -> None:
    """One bit, and no time and no size tells."""
    until_time_moves(path)
    times = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2 & ~1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def scramble(path: Path) -> None:
    """Every 40th id is one that no vocabulary of 330 holds."""
    ids = np.fromfile(path, "<u2")
    ids[20::40] = 65_000
    ids.tofile(path)


def blank(path: Path) -> None:
    until_time_moves(path)
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.cases(2, sample=1)
@pytest.mark.parametrize("damage", [flip, scramble, blank])
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("resumes", [True, False], ids=["on", "anew"])
def test_a_damaged_token_file_is_never_trained_on_and_its_remedy_works(
    damage: Callable[[Path], None],
    tensor: int,
    resumes: bool,
    file: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = rewind(file.parent / "run", tmp_path / "run", 3)
    if not resumes:
        shutil.rmtree(run / "checkpoints")
    arguments = ["data.cache=", f"train.folder={run}", f"parallel.tensor={tensor}"]
    damage(run / "data" / "text.bin")
    capfd.readouterr()
    assert train(file, *arguments) == 2
    remedy = f"remove {run}/data/text.idx and the same command makes it anew"
    what = Problem.of("data.digest_differs", file=f"{run}/data/text.bin", remedy=remedy)
    assert capfd.readouterr().err == f'data.source = "{file.parent}/text.txt": {what}\n'
    assert main(["data", "verify", str(run / "data" / "text")]) == 2
    assert main(["data", "inspect", str(run / "data" / "text")]) == 2
    if tensor == 1:
        (run / "data" / "text.idx").unlink()
        assert train(file, *arguments) == 0
        assert steps(run) == steps(file.parent / "run")


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json", ".model"])
def test_train_and_verify_agree_about_what_is_damaged(
    suffix: str, file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = shutil.copytree(file.parent / "run" / "data", tmp_path / "data")
    asked = [f"data.source={data}/text", "train.steps=1", f"train.folder={tmp_path}/run"]
    assert (train(file, *asked), main(["data", "verify", f"{data}/text"])) == (0, 0)
    (data / f"text{suffix}").write_bytes(
        (data / f"text{suffix}").read_bytes()[:-4] + b"\x00\x01\x00\x00"
    )
    capfd.readouterr()
    assert (train(file, *asked), main(["data", "verify", f"{data}/text"])) == (2, 2)
    assert f"text{suffix}" in capfd.readouterr().err


def ids_of(prefix: Path, vocab: int, *documents: list[int]) -> Path:
    with IndexedWriter(prefix, vocab) as writer:
        for ids in documents:
            writer.add_document(ids)
    return prefix


@pytest.mark.parametrize("tensor", [1, 2])
def test_an_id_outside_of_the_vocabulary_is_found_before_a_step(
    tensor: int, file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ids_of(tmp_path / "ids", 60_000, [*range(300)], [5, 6, 400, 7, 350])
    asked = [
        f"data.source={tmp_path}/ids",
        "data.tokenizer=",
        "model.vocab=330",
        "data.vocab_size=330",
    ]
    assert train(file, *asked, f"train.folder={tmp_path}/run", f"parallel.tensor={tensor}") == 2
    (line,) = capfd.readouterr().err.splitlines()
    first = f"; the first is 400 in document 1 of {tmp_path}/ids.bin, token 302"
    assert shows(
        line,
        "data.vocabulary_too_small",
        prefix=tmp_path / "ids",
        low=0,
        high=400,
        vocab=330,
        first=first,
    )
    assert "data.source = " in line and "model.vocab = 330" in line
    assert not (tmp_path / "run").exists()


def look(prefix: Path) -> intact.DataSetContents:
    return contents_of(IndexedDataset(prefix))


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are read from end to end."""
    names = list[str]()
    scan = intact._scan

    def spy(opened: Any, dtype: Any) -> Any:
        names.append(Path(opened.name).name)
        return scan(opened, dtype)

    monkeypatch.setattr(intact, "_scan", spy)
    return names


def test_a_file_is_read_once_and_again_when_it_changes(
    tmp_path: Path, scans: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intact, "SETTLED", 10**18)
    first = look(ids_of(tmp_path / "x", 100, [1, 2, 3]))
    assert scans == ["x.idx", "x.bin"]
    look(tmp_path / "x")
    assert scans == ["x.idx", "x.bin"] * 2, (
        "what was written this moment may be written again in the same one"
    )
    monkeypatch.setattr(intact, "SETTLED", -(10**18))  # from now on it was written long ago
    assert look(tmp_path / "x") == first == look(tmp_path / "x")
    assert scans == ["x.idx", "x.bin"] * 3
    flip(tmp_path / "x.bin")  # size and time of modification are what they were
    assert look(tmp_path / "x").bin_sha256 != first.bin_sha256
    assert scans == ["x.idx", "x.bin"] * 3 + ["x.bin"]
    monkeypatch.setattr(intact.platform, "node", lambda: "another machine")
    look(tmp_path / "x")
    assert scans == ["x.idx", "x.bin"] * 3 + ["x.bin", "x.idx", "x.bin"]


def test_the_range_of_ids_is_that_of_all_pieces_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intact, "READ", 4)  # two ids at a time
    for number, ids in enumerate(([50, 900, 70, 3, 80], [3, 50, 70, 80, 900])):
        found = look(ids_of(tmp_path / str(number), 1000, ids))
        assert (found.low, found.high) == (3, 900)


def test_without_a_place_to_remember_every_start_reads(
    tmp_path: Path, scans: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intact, "SETTLED", -1)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    for _ in range(2):
        look(ids_of(tmp_path / "x", 100, [1, 2, 3]))
    assert scans == ["x.idx", "x.bin"] * 2


def test_of_a_large_file_blocks_are_compared_and_verify_reads_all(
    tmp_path: Path,
    scans: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in {"WHOLE": 1000, "BLOCK": 512, "SAMPLED": 4, "SETTLED": -1}.items():
        monkeypatch.setattr(intact, name, value)
    command("build", "python", tmp_path / "x", "--vocab-size", 400, "--max-chars", 40_000)
    record = json.loads((tmp_path / "x.json").read_text())
    size = (tmp_path / "x.bin").stat().st_size
    assert len(record["blocks"]["sha256"]) == -(-size // 512)
    good = look(tmp_path / "x")
    assert "x.bin" not in scans and good.bin_sha256 == record["bin_sha256"] and not good.sampled
    blank(tmp_path / "x.bin")
    with raises("data.block_digest_differs"):
        look(tmp_path / "x")
    command(
        "build", "python", tmp_path / "x", "--vocab-size", 400, "--max-chars", 40_000, "--overwrite"
    )
    flip(tmp_path / "x.bin")
    capsys.readouterr()
    assert command("verify", tmp_path / "x") == 2
    assert "x.bin is not what was built" in capsys.readouterr().out
    with raises("data.digest_differs"):  # whatever blocks a start would have read
        look(tmp_path / "x")


def test_of_a_large_file_of_others_the_same_blocks_are_its_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WHOLE": 1000, "BLOCK": 512, "SAMPLED": 4}.items():
        monkeypatch.setattr(intact, name, value)
    first = look(ids_of(tmp_path / "x", 60_000, [*range(5000)]))
    assert first.sampled and first == look(tmp_path / "x")
    blank(tmp_path / "x.bin")
    assert look(tmp_path / "x").bin_sha256 != first.bin_sha256
    with raises(
        "data.vocabulary_too_small",
        first=re.compile(r"the first is 100 in document 0 of .*/y\.bin, token 100$"),
        low=0,
        vocab=100,
    ):
        check_vocabulary(
            dataset := IndexedDataset(ids_of(tmp_path / "y", 999, [*range(900)])),
            contents_of(dataset),
            100,
        )


def test_a_build_never_writes_an_id_that_its_vocabulary_does_not_hold(tmp_path: Path) -> None:
    with raises(
        "data.ids_outside_vocabulary",
        smallest=3,
        largest=330,
        vocab_size=330,
        first_id=330,
        document=0,
    ):
        ids_of(tmp_path / "x", 330, [3, 330])
    assert not [*tmp_path.iterdir()] and building


# --- on the way


def change_and_train(mesh: DeviceMesh, file: Path, overrides: list[str], at: int) -> list[Any]:
    """What a rank says of a file that is changed after it was looked at, from sample `at` on; and
    the last whole checkpoint."""
    config = load_run(file, overrides)
    corpus = open_corpus(config)
    world = Axis.world(mesh)
    trainer = Trainer(config, corpus, mesh)
    world.barrier()
    if world.rank == 0:
        ids = np.memmap(f"{corpus.datasets[0].prefix}.bin", "<u2", "r+")
        ids[at * config.train.seq_length :] = 65_000
        ids.flush()
    world.barrier()
    before = [buffer.weights.clone() for buffer in trainer.engine.optimizer.all_buffers()]
    with pytest.raises(UserError) as said:
        trainer.run()
    same = all(
        torch.equal(a, b.weights)
        for a, b in zip(before, trainer.engine.optimizer.all_buffers(), strict=True)
    )
    return [str(said.value), same, latest(config.checkpoint_folder)]


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize(
    "axes", [{}, {"tp": 2}, {"dp": 2}, {"pp": 2}, {"pp": 2, "tp": 2}], ids=lambda axes: str(axes)
)
def test_an_id_that_appears_on_the_way_ends_the_run_on_all_ranks_with_its_place(
    axes: dict[str, int], file: Path, tmp_path: Path
) -> None:
    shutil.copytree(file.parent / "run" / "data", tmp_path / "data")
    names = {"tp": "tensor", "pp": "pipeline", "dp": "data"}
    layout = [f"parallel.{names[axis]}={size}" for axis, size in axes.items()]
    data = [
        "data.shuffle=false",
        f"data.source={tmp_path}/data/text",
        f"train.folder={tmp_path}/run",
    ]
    asked = [*layout, *data]
    ranks = run_ranks(change_and_train, axes, file=file, overrides=asked, at=5)
    for said, same, saved in ranks:
        assert shows(
            said,
            "data.sample_outside_vocabulary",
            sample=4,
            token_id=65000,
            place=f"in document 0 of {tmp_path}/data/text.bin, token 80",
            vocab=330,
        )
        assert same and saved is None


def test_an_id_in_what_is_held_out_is_found_too(file: Path, tmp_path: Path) -> None:
    shutil.copytree(file.parent / "run" / "data", tmp_path / "data")
    asked = [
        f"data.source={tmp_path}/data/text",
        f"train.folder={tmp_path}/run",
        "train.eval_every=1",
        "data.held_out_from=end",
    ]
    held_out = open_corpus(load_run(file, asked)).held_out
    assert held_out is not None
    first = held_out.location_of(0)[1]
    ((said, _, _),) = run_ranks(change_and_train, {}, file=file, overrides=asked, at=first + 3)
    assert shows(
        said,
        "data.sample_outside_vocabulary",
        sample=first + 2,
        token_id=65000,
        place=re.compile("^in document 0"),
    )


def strangers(mesh: DeviceMesh, vocab: int, strange: int) -> tuple[Tensor, Tensor, Tensor]:
    tp = Axis.of(mesh, "tp")
    ids = torch.tensor([[0, strange], [vocab - 1, 1]])
    table = VocabParallelEmbedding(Context(plan("fp32"), tp), vocab, 4, name="e", std=1.0)
    part = Part.cut("head.weight", (vocab, 4), 0, tp)
    logits = torch.zeros(2, 2, part.padded[0], requires_grad=True)
    losses = cross_entropy(logits, ids, part, tp)
    return table(ids).detach(), losses.detach(), table.weight.detach()


@pytest.mark.cases(7, sample=1)
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("strange", [7, 8, 9, 65_000, -1, -7, 2**40])
def test_no_layer_takes_a_strange_id_for_a_zero_row(tp: int, strange: int) -> None:
    """Vocabularies of 7 are padded to 8 and 9 rows over two and three ranks."""
    for x, losses, _ in run_ranks(strangers, {"tp": tp}, vocab=7, strange=strange):
        assert (
            x.isnan().any(-1).tolist() == losses.isnan().tolist() == [[False, True], [False, False]]
        )
        torch.testing.assert_close(losses[~losses.isnan()], torch.full((3,), 7.0).log())


def collectives_of_steps(mesh: DeviceMesh, layout: Run) -> list[str]:
    """Which collectives over the whole mesh two steps of an engine make."""
    engine = make_engine(mesh, layout)
    made = list[str]()
    shares = [share_of(mesh, batch) for batch in batches(layout)]
    for name in ("start_sum_", "sum_", "max_", "gather", "barrier"):
        inner = getattr(Axis, name)

        def spy(self: Axis, *args: Any, name: str = name, inner: Any = inner) -> Any:
            made.extend([name] if self.name == "world" else [])
            return inner(self, *args)

        setattr(Axis, name, spy)  # this process is this rank's alone
    for number, share in enumerate(shares):
        assert engine.step(share, layout.lr, number).outcome == "applied"
    return made


@pytest.mark.slow
def test_a_good_step_asks_the_whole_mesh_once_as_ever() -> None:
    layout = Run(MODELS["gpt2"], "bf16", steps=2)
    for made in run_ranks(collectives_of_steps, {"pp": 2, "tp": 2}, layout=layout):
        assert [name for name in made if name != "sum_"] == ["start_sum_"] * 2, made


@pytest.mark.parametrize("key", [*NUMBERS, "eos"])
@pytest.mark.parametrize("value", ["5", 0.5, True, [1]])
def test_a_record_whose_numbers_are_none_is_refused(
    key: str, value: object, tmp_path: Path
) -> None:
    record = {"bin_sha256": "", "idx_sha256": "", "eos": None}
    (tmp_path / "x.json").write_text(json.dumps(record))
    assert read_record(tmp_path / "x") == record
    (tmp_path / "x.json").write_text(json.dumps({**record, key: value}))
    with raises("data.record_damaged"):
        read_record(tmp_path / "x")
