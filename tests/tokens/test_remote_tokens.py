"""Token files at a URL give the samples of a local copy, bit for bit; what goes wrong on the way is
said in one line."""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from megaprec.errors import UserError
from megaprec.text.build import build
from megaprec.text.sources import open_source
from megaprec.text.tokenizer import load_tokenizer
from megaprec.text.training import train_sentencepiece
from megaprec.tokens import intact, ranges
from megaprec.tokens.copies import RECORD, file_here
from megaprec.tokens.document_tokens import with_begin
from megaprec.tokens.files import file_digest, with_suffix
from megaprec.tokens.indexed import IndexedDataset, IndexedWriter
from megaprec.tokens.intact import contents_of
from megaprec.tokens.places import path_of
from megaprec.tokens.samples import Resets, Samples
from megaprec.url_secrets import masked
from tests.refusals import raises
from tests.tokens.ranged_server import Conduct, serving
from tools.cli import main
from tools.config.run_file import RunConfig, load_run
from tools.training import prepared_files
from tools.training.data_sources import check_sources, training_sources
from tools.training.prepare import prepare
from tools.training.prepared_files import open_prepared

LENGTH = 16
BLOCK = 256


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks that a small set has many of, no waiting, and a cache of its own."""
    monkeypatch.setattr(ranges, "CACHE_BLOCK", BLOCK)
    monkeypatch.setattr(ranges, "CACHE_BLOCKS", 2)
    monkeypatch.setattr(ranges, "DELAYS", (0.0, 0.0))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the data set `set`, which has a loss mask."""
    random = np.random.default_rng(0)
    with IndexedWriter(tmp_path / "files" / "set", 1000, has_mask=True) as writer:
        for length in random.integers(1, 60, 60):
            ids = random.integers(0, 1000, length)
            writer.extend(ids, np.array([length]), ids % 3 > 0)
    return tmp_path / "files"


@pytest.fixture
def conduct() -> Conduct:
    return Conduct()


@pytest.fixture
def served(folder: Path, conduct: Conduct) -> Iterator[str]:
    with serving(folder, conduct) as url:
        yield f"{url}/set"


def samples(prefix: Path, begin: int | None = None) -> Samples:
    resets = Resets(True, True, True, True)
    dataset = with_begin(IndexedDataset(prefix), begin)
    return Samples(dataset, LENGTH, seed=3, shuffle=True, resets=resets)


@pytest.mark.parametrize(("kind", "begin"), [("served", None), ("memory", None), ("memory", 7)])
def test_samples_of_a_url_are_those_of_a_local_copy(
    folder: Path, served: str, kind: str, begin: int | None
) -> None:
    url = served
    if kind == "memory":
        url = "memory://remote_tokens/set"
        fsspec.filesystem("memory").put(f"{folder}/", "/remote_tokens/", recursive=True)
    here = samples(folder / "set", begin)
    there = samples(path_of(url), begin)
    assert len(there) == len(here)
    expected = here.batch(5, len(here))  # across the end of an epoch
    actual = there.batch(5, len(here))
    for name, tensor in vars(expected).items():
        other = getattr(actual, name)
        # sources are those of a blend
        assert (tensor is other is None) if name == "sources" else tensor.equal(other), name
    assert contents_of(there.dataset) == contents_of(here.dataset)


def test_of_the_tokens_only_blocks_around_samples_are_read(served: str, conduct: Conduct) -> None:
    dataset = IndexedDataset(path_of(served))
    conduct.ranges.clear()
    itemsize = dataset.dtype.itemsize
    place = 3 * BLOCK // itemsize - 1  # the last token of block 2
    dataset.tokens(place, 2)
    assert conduct.ranges == [("set.bin", 2 * BLOCK)]  # both blocks by one request
    dataset.tokens(place, 2)
    assert len(conduct.ranges) == 1
    dataset.tokens(0, 1)  # the block that was used longest ago is forgotten
    dataset.tokens(place + 1, 1)
    assert conduct.ranges[1:] == [("set.bin", 0)]
    dataset.tokens(place, 1)
    assert conduct.ranges[2:] == [("set.bin", 2 * BLOCK)]


def test_the_blocks_of_a_batch_are_read_at_once(
    served: str, conduct: Conduct, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "CACHE_BLOCKS", 99)
    training = samples(path_of(served))
    conduct.ranges.clear()
    conduct.at_once = 0
    conduct.together = ranges.READERS
    training.batch(0, len(training))
    assert len(conduct.ranges) > ranges.READERS
    assert conduct.at_once == ranges.READERS


def test_a_second_start_reads_no_file_whole(served: str, conduct: Conduct) -> None:
    first = contents_of(IndexedDataset(path_of(served)))
    conduct.ranges.clear()
    assert contents_of(IndexedDataset(path_of(served))) == first
    assert [name for name, _ in conduct.ranges] == ["set.bin"]  # its last byte


def test_other_files_than_were_built_are_refused(folder: Path, served: str) -> None:
    record = {"bin_sha256": "0" * 64, "idx_sha256": "0" * 64}
    (folder / "set.json").write_text(json.dumps(record))
    with raises("data.digest_differs"):
        contents_of(IndexedDataset(path_of(served)))


@pytest.mark.parametrize("has_blocks", [False, True])
def test_a_large_file_is_compared_with_its_record_by_blocks_or_whole(
    folder: Path, served: str, monkeypatch: pytest.MonkeyPatch, has_blocks: bool
) -> None:
    for name, value in {"WHOLE_REMOTE": 1000, "BLOCK": 512}.items():
        monkeypatch.setattr(intact, name, value)
    file = folder / "set.bin"
    assert 1000 < file.stat().st_size < intact.WHOLE
    record: dict[str, Any] = {
        f"{suffix}_sha256": file_digest(folder / f"set.{suffix}")
        for suffix in ("bin", "idx", "loss_mask")
    }
    if has_blocks:
        record["blocks"] = {"bytes": 512, "sha256": intact.block_digests(file)}
    (folder / "set.json").write_text(json.dumps(record))
    contents = contents_of(IndexedDataset(path_of(served)))
    assert (contents.bin_sha256, contents.sampled) == (record["bin_sha256"], False)
    file.write_bytes(bytes(file.stat().st_size))
    with raises("data.block_digest_differs" if has_blocks else "data.digest_differs"):
        contents_of(IndexedDataset(path_of(served)))


def test_a_file_that_changes_under_way_is_said(folder: Path, served: str) -> None:
    dataset = IndexedDataset(path_of(served))
    dataset.tokens(0, 4)
    file = folder / "set.bin"
    file.write_bytes(file.read_bytes()[::-1])
    dataset.tokens(0, 4)  # kept
    with raises("data.url_changed", url=f"{served}.bin"):
        dataset.tokens(BLOCK, 4)


def test_an_index_that_changed_is_copied_again(folder: Path, served: str) -> None:
    assert IndexedDataset(path_of(served)).num_documents == 60
    with IndexedWriter(folder / "set", 1000) as writer:
        writer.add_document([1, 2, 3])
    dataset = IndexedDataset(path_of(served))
    assert (dataset.num_documents, dataset.has_mask) == (1, False)


def test_a_server_without_ranges_is_refused(served: str, conduct: Conduct) -> None:
    conduct.has_ranges = False
    with raises("data.url_without_ranges", url=f"{served}.bin"):
        IndexedDataset(path_of(served))


def test_failures_that_pass_are_noted_and_change_nothing(
    folder: Path, served: str, conduct: Conduct, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = IndexedDataset(path_of(served))
    conduct.fails = 2
    ids = dataset.tokens(0, 100)
    assert np.array_equal(ids, IndexedDataset(folder / "set").tokens(0, 100))
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize("change", [{"fails": 99}, {"fails": 99, "status": 416}, {"cut": 5}])
def test_failures_that_stay_are_said_in_one_line(
    served: str, conduct: Conduct, change: dict[str, int]
) -> None:
    dataset = IndexedDataset(path_of(served))
    vars(conduct).update(change)
    with raises("data.url_interrupted", url=f"{served}.bin"):
        dataset.tokens(0, 100)


def test_a_server_that_is_gone_is_said(folder: Path) -> None:
    with serving(folder, Conduct()) as url:
        dataset = IndexedDataset(path_of(f"{url}/set"))
    with raises("data.url_interrupted"):
        dataset.tokens(0, 100)
    with raises("data.url_interrupted"):
        IndexedDataset(path_of(f"{url}/set"))


def test_a_missing_pair_is_named_by_its_url(served: str) -> None:
    with raises("data.data_set_missing", path=f"{served}s.idx"):
        IndexedDataset(path_of(f"{served}s"))


def test_a_missing_file_is_missing_whatever_its_kind_of_url_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def info(system: object, name: str) -> None:
        raise FileNotFoundError(name) from KeyError("no such repository")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "info", info)
    with raises("data.data_set_missing"):
        IndexedDataset(path_of("memory://nowhere/set"))


def test_a_neighbour_that_may_not_be_read_is_noted(
    served: str, conduct: Conduct, capsys: pytest.CaptureFixture[str]
) -> None:
    conduct.forbidden = (".loss_mask",)
    assert not IndexedDataset(path_of(served)).has_mask
    assert f"{served}.loss_mask" in capsys.readouterr().err


def test_a_server_that_tells_no_version_is_noted(served: str, conduct: Conduct) -> None:
    conduct.has_tags = False
    dataset = IndexedDataset(path_of(served))
    assert len(dataset.notes) == 1
    assert contents_of(dataset) == contents_of(dataset)


@pytest.fixture
def words(served: str, folder: Path, tmp_path: Path) -> str:
    """The URL of a served set that has a tokenizer and a loss mask."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 30)
    source = open_source(str(tmp_path / "text.txt"))
    model = train_sentencepiece([text for _, text in source], folder / "words", 290, False)
    build(source, load_tokenizer(model), folder / "words")
    (folder / "words.json").unlink()
    counts = np.ones(IndexedDataset(folder / "words").num_tokens, bool)
    (folder / "words.loss_mask").write_bytes(np.packbits(counts, bitorder="little").tobytes())
    return served.replace("/set", "/words")


def run_of(source: str, *overrides: str) -> RunConfig:
    """A small run on a text or data set."""
    settings = {
        "data.source": source,
        "train.steps": "1",
        "train.global_batch": "1",
        "train.micro_batch": "1",
        "train.seq_length": "8",
        "model.layers": "1",
        "model.hidden": "8",
        "model.heads": "1",
    }
    return load_run(None, [*(f"{key}={value}" for key, value in settings.items()), *overrides])


@pytest.fixture
def machines(words: str, tmp_path: Path) -> RunConfig:
    """A run of the served set."""
    return run_of(words, f"train.folder={tmp_path}/run")


def prepared_by_rank_0(config: RunConfig) -> dict[str, Any]:
    with ExitStack() as held:
        return prepare(config, held)


def test_each_machine_has_its_own_copy_of_the_tokenizer_at_a_url(
    machines: RunConfig, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepared_by_rank_0(machines)
    assert prepared["tokenizer"] == f"{words}.model"
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    corpus, _ = open_prepared(machines, prepared)
    assert corpus.tokenizer is not None
    assert corpus.tokenizer.path.is_relative_to(tmp_path / "another")


@pytest.mark.parametrize(
    ("rank", "local_rank", "checks"), [(0, 0, False), (1, 1, False), (2, 0, True), (3, 1, False)]
)
def test_one_rank_of_each_other_machine_checks_the_files_that_are_there(
    rank: int,
    local_rank: int,
    checks: bool,
    machines: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared = prepared_by_rank_0(machines)
    checked: list[Any] = []
    monkeypatch.setattr(prepared_files, "identified", lambda *given: checked.append(given))
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    open_prepared(machines, prepared)
    assert len(checked) == checks


@pytest.mark.parametrize("reader", ["rank 0", "rank 1"])
def test_ranks_of_which_one_cannot_read_the_loss_mask_are_refused(
    machines: RunConfig, words: str, folder: Path, conduct: Conduct, reader: str
) -> None:
    prepared = prepared_by_rank_0(machines)
    assert prepared["masked"] == [words]
    if reader == "rank 0":
        conduct.forbidden = (".loss_mask",)
    else:
        prepared["masked"] = []
    with raises("training.loss_mask_differs", mask=f"{words}.loss_mask"):
        open_prepared(machines, prepared)


def test_a_run_file_is_read_without_its_urls() -> None:
    # neither its kind of URL nor its server is asked
    for url in ("nosuch://bucket/set", "http://127.0.0.1:9/set"):
        assert run_of(url, "model.vocab=99").data.source == url


def test_texts_at_urls_need_a_model_with_room_for_their_tokenizer(
    folder: Path, served: str
) -> None:
    (folder / "page.txt").write_text("the quick brown fox")
    config = run_of(served.replace("/set", "/page.txt"), "model.vocab=99")
    with raises("config.small_vocab", vocab=99):
        check_sources(config)


def test_a_set_is_found_after_failures_that_pass(
    machines: RunConfig, words: str, conduct: Conduct
) -> None:
    conduct.unavailable = 2  # by HEAD and by GET
    (source,) = training_sources(machines)
    assert source.is_tokenized
    conduct.unavailable = 2
    assert main(["data", "verify", words]) < 2


def test_a_server_that_does_not_tell_the_size_is_refused(served: str, conduct: Conduct) -> None:
    conduct.tells_size = False
    with raises("data.url_without_size", url=f"{served}.idx"):
        IndexedDataset(path_of(served))


@pytest.mark.parametrize("url", ["s3://", "memory:///", "hf://"])
def test_a_url_that_names_no_place_is_refused(url: str) -> None:
    with raises("data.url_without_place", url=url):
        path_of(url)


def test_a_url_without_folders_is_refused() -> None:
    with raises("data.url_without_folder", url="data://x/y"):
        path_of("data://x/y")


def test_secrets_of_urls_are_neither_shown_nor_kept(
    folder: Path,
    served: str,
    conduct: Conduct,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = served.replace("http://", "http://me:hidden@")
    dataset = IndexedDataset(path_of(url))
    contents_of(dataset)
    conduct.signed = "X-Amz-Signature=hidden"
    with pytest.raises(UserError) as caught:
        IndexedDataset(path_of(url))
    kept = [file.read_text() for file in (tmp_path / "cache").rglob("*.json")]
    assert kept
    said = [*caught.value.problems, capsys.readouterr().err, *kept]
    said += [json.dumps(problem.fields) for problem in caught.value.problems]
    assert "hidden" not in "".join(said)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('"https://u:p@ss@h:1/a?x=1": no', '"https://***@h:1/a?***": no'),
        ("url='https://h/a?b=c/d+(e)&f=', x", "url='https://h/a?***', x"),
        ("sftp://u:p@h/a", "sftp://u:***@h/a"),
        ("s3:/u:p@h/a is not there", "s3:/u:***@h/a is not there"),
        ("https:/u:p@h/a?b=c is not there", "https:/***@h/a?*** is not there"),
        (
            "git+ssh://u:p@h/a github://org:repo@main/a",
            "git+ssh://u:***@h/a github://org:repo@main/a",
        ),
        ("abfs://box@account/a s3://b/?.txt http://h:80/a@b", None),
        ("hf://datasets/a/b@main: mail me@home", None),
    ],
)
def test_secrets_of_urls_are_masked(text: str, shown: str | None) -> None:
    assert masked(text) == (shown or text)
    assert masked(masked(text)) == masked(text)


@pytest.mark.parametrize("suffix", [".idx", ".loss_mask"])
@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_damaged_copy_is_fetched_again(
    folder: Path, served: str, tmp_path: Path, suffix: str, is_noticed: bool
) -> None:
    url = path_of(served)
    copy = file_here(url, suffix)
    times = copy.stat()
    copy.write_bytes(bytes(times.st_size))
    if not is_noticed:
        record = with_suffix(copy, RECORD)
        checked = json.loads(record.read_text())
        found = copy.stat()
        checked["state"] = [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
        record.write_text(json.dumps(checked))
    # `data verify` looks at the bytes of a copy
    IndexedDataset(url, again=not is_noticed)
    assert copy.read_bytes() == (folder / f"set{suffix}").read_bytes()


def test_commands_take_a_url_for_a_prefix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 30)
    source = open_source(str(tmp_path / "text.txt"))
    texts = [text for _, text in source]
    model = train_sentencepiece(texts, tmp_path / "files" / "set", 290, False)
    build(source, load_tokenizer(model), tmp_path / "files" / "set")
    said = []
    with serving(tmp_path / "files", Conduct()) as url:
        for prefix in (f"{tmp_path}/files/set", f"{url}/set"):
            assert main(["data", "inspect", prefix]) == 0
            assert main(["data", "verify", prefix]) == 0
            said.append(capsys.readouterr().out.replace(str(model), "MODEL"))
    here, there = said
    assert here.splitlines()[:12] == there.splitlines()[:12]
    assert here.count("ok ") == there.count("ok ")


def test_a_damaged_index_is_named_by_its_url(tmp_path: Path) -> None:
    (tmp_path / "x.idx").write_bytes(b"no index")
    (tmp_path / "x.bin").write_bytes(b"1234")
    with pytest.raises(UserError) as raised:
        IndexedDataset(path_of(f"file://{tmp_path}/x"))
    assert str(raised.value).startswith(f"file://{tmp_path}/x.idx: ")
