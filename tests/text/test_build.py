"""A build streams, is whole or absent, and is reused only while text and tokenizer are the same."""

import json
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from megaprec.errors import UserError
from megaprec.text import build as module
from megaprec.text import pieces, readers
from megaprec.text.build import build, prepare, reusable
from megaprec.text.encoding import EncodeRendered
from megaprec.text.readers import TextOptions
from megaprec.text.sources import open_source
from megaprec.text.tokenizer import load_tokenizer
from megaprec.tokens.indexed import IndexedDataset, IndexedWriter
from tests.refusals import raises


@dataclass
class Bytes:
    """Ids are UTF-8 bytes; 256 ends a document."""

    path: Path
    vocab_size: int = 257
    eos: int | None = 256
    bos: int | None = None
    pad: int | None = None
    unk: int | None = None
    holes: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()
    special: frozenset[str] = frozenset()
    encode_rendered: EncodeRendered | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode()

    def vocabulary(self) -> dict[str, int]:
        return {chr(id): id for id in range(self.vocab_size)}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Bytes:
    path = tmp_path / "bytes.tok"
    path.write_text("bytes")
    return Bytes(path)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("abé", "", "d")))
    return path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_documents_are_encoded_one_by_one_each_with_its_end(
    tmp_path: Path, tokenizer: Bytes, lines: Path
) -> None:
    result = build(open_source(str(lines)), tokenizer, tmp_path / "out")
    dataset = IndexedDataset(tmp_path / "out")
    assert [dataset.document(i).tolist() for i in range(2)] == [
        [*"abé".encode(), 256],
        [*b"d", 256],
    ]
    # no document is written for an empty text
    assert dataset.num_sequences == dataset.num_documents == 2
    assert (result.documents, result.tokens, result.chars, result.vocab_size) == (2, 7, 4, 257)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "content", ['["a text", "of mine"]', '{"text": "of mine"}', "a text, no JSON"]
)
def test_a_build_replaces_no_file_that_no_build_has_made(
    content: str, overwrite: bool, tmp_path: Path, tokenizer: Bytes
) -> None:
    """A list of texts may be called as the data set that is made of it, and so may the
    tokenizer.json."""
    text = tmp_path / "diary.json"
    text.write_text(content)
    source = tmp_path / "diary.txt"
    source.write_text("some text")
    with raises("data.build_would_replace"):
        build(open_source(str(source)), tokenizer, tmp_path / "diary", overwrite=overwrite)
    assert text.read_text() == content
    assert names(tmp_path) == {"bytes.tok", "diary.json", "diary.txt"}
    build(open_source(str(source)), tokenizer, tmp_path / "another")


def test_a_damaged_record_is_replaced_if_asked_for(
    tmp_path: Path, tokenizer: Bytes, lines: Path
) -> None:
    source = open_source(str(lines))
    build(source, tokenizer, tmp_path / "out")
    record = tmp_path / "out.json"
    whole = record.read_text()
    record.write_text(whole[:99])
    build(source, tokenizer, tmp_path / "out", overwrite=True)
    assert record.read_text() == whole


def test_a_tokenizer_without_an_end_adds_none(
    tmp_path: Path, tokenizer: Bytes, lines: Path
) -> None:
    tokenizer.eos = None
    assert build(open_source(str(lines)), tokenizer, tmp_path / "out").tokens == 5


def test_a_document_in_many_pieces_is_one_document(
    tmp_path: Path, tokenizer: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "PIECE_CHARS", 10)
    (tmp_path / "a.txt").write_text("one line\n" * 50)
    build(open_source(str(tmp_path / "a.txt")), tokenizer, tmp_path / "out")
    dataset = IndexedDataset(tmp_path / "out")
    assert dataset.num_documents == dataset.num_sequences == 1
    assert dataset.document(0).tolist() == [*b"one line\n" * 50, 256]


def test_memory_does_not_grow_with_the_text(
    tmp_path: Path, tokenizer: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "PIECE_CHARS", 1 << 14)
    monkeypatch.setattr(pieces, "PIECE_CHARS", 1 << 14)
    monkeypatch.setattr(module, "CHUNK_CHARS", 1 << 14)

    def peak(lines: int, suffix: str, line: str) -> int:
        path = tmp_path / f"x{suffix}"
        path.write_text(line * lines)
        tracemalloc.start()
        build(open_source(str(path)), tokenizer, tmp_path / "out", overwrite=True)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    peak(100, ".txt", "warm up\n")
    for suffix, line in ((".txt", "x" * 99 + "\n"), (".jsonl", '{"text": "%s"}\n' % ("x" * 999))):
        count = 2_000_000 // len(line)
        growth = peak(2 * count, suffix, line) - peak(count // 4, suffix, line)
        assert growth < 60_000, f"{suffix}: {growth} bytes more for 3.5 MB more text"


def test_progress_tells_totals_that_grow_to_the_result(
    tmp_path: Path, tokenizer: Bytes, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_CHARS", 1)
    seen: list[tuple[int, int, int]] = []
    result = build(
        open_source(str(lines)),
        tokenizer,
        tmp_path / "out",
        on_progress=lambda *totals: seen.append(totals),
    )
    assert seen == sorted(seen)
    assert len(seen) == 2
    assert seen[-1] == (result.documents, result.chars, result.tokens)


@pytest.mark.parametrize("older", [False, True])
def test_a_build_that_fails_leaves_what_was_there(
    tmp_path: Path, tokenizer: Bytes, lines: Path, older: bool
) -> None:
    if older:
        build(open_source(str(lines)), tokenizer, tmp_path / "out")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\nbroken\n')
    with raises("data.row_not_json_object"):
        build(open_source(str(bad)), tokenizer, tmp_path / "out", overwrite=True)
    bad.unlink()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("limit", [100_000, 300_000])
def test_a_full_disk_is_told_of_and_leaves_nothing(
    tmp_path: Path, tokenizer: Bytes, limit: int
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n' * 40_000)  # 160 kB of tokens, then an index of 960 kB
    before = names(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        with raises("data.no_room", prefix=tmp_path / "out"):
            build(open_source(str(path)), tokenizer, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == before


def test_a_text_of_empty_documents_is_refused(tmp_path: Path, tokenizer: Bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": ""}\n')
    with raises("data.text_empty"):
        build(open_source(str(path)), tokenizer, tmp_path / "out")
    assert names(tmp_path) == {"x.jsonl", "bytes.tok"}


@pytest.mark.slow
def test_a_killed_build_is_never_readable_and_can_be_repeated(
    tmp_path: Path, tokenizer: Bytes, lines: Path
) -> None:
    program = """
import os, sys
from pathlib import Path
from megaprec.tokens.indexed import IndexedWriter
writer = IndexedWriter(Path(sys.argv[1]), 257)
for _ in range(10_000):
    writer.add_document([1, 2, 3])
os._exit(9)  # as SIGKILL would
"""
    killed = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "out")], cwd=Path(__file__).parents[2]
    )
    assert killed.returncode == 9
    assert "out.bin.part" in names(tmp_path)
    with raises("data.data_set_missing"):
        IndexedDataset(tmp_path / "out")
    build(open_source(str(lines)), tokenizer, tmp_path / "out")
    assert IndexedDataset(tmp_path / "out").num_tokens == 7
    assert names(tmp_path) == {"x.jsonl", "bytes.tok", "out.bin", "out.idx", "out.json"}


def test_another_data_set_is_not_overwritten_unless_told(
    tmp_path: Path, tokenizer: Bytes, lines: Path
) -> None:
    source = open_source(str(lines))
    build(source, tokenizer, tmp_path / "out")
    with raises("data.build_exists"):
        build(source, tokenizer, tmp_path / "out")
    build(source, tokenizer, tmp_path / "out", overwrite=True)


def test_a_data_set_is_reused_only_for_the_same_text_and_tokenizer(
    tmp_path: Path, tokenizer: Bytes, lines: Path
) -> None:
    out = tmp_path / "out"
    result = build(open_source(str(lines)), tokenizer, out)
    again = reusable(out, open_source(str(lines)), tokenizer)
    assert again is not None and again.reused
    assert (again.documents, again.tokens, again.chars) == (
        result.documents,
        result.tokens,
        result.chars,
    )
    assert (again.vocab_size, again.eos, again.tokenizer) == (257, 256, tokenizer.path)
    assert reusable(out, open_source(str(lines), TextOptions(max_chars=3)), tokenizer) is None
    assert reusable(out, open_source(str(lines)), tokenizer, vocab_size=300) is None
    tokenizer.path.write_text("other")
    assert reusable(out, open_source(str(lines)), tokenizer) is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("out.json", b"{"),
        ("out.json", b"[]"),
        ("out.json", b"{}"),
        ("out.idx", b""),
        ("out.bin", b""),
    ],
)
def test_a_damaged_data_set_is_refused_and_its_remedy_works(
    tmp_path: Path, tokenizer: Bytes, lines: Path, name: str, content: bytes
) -> None:
    build(open_source(str(lines)), tokenizer, tmp_path / "out")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=r"; remove .*out\.idx and the same command makes it anew"):
        reusable(tmp_path / "out", open_source(str(lines)), tokenizer)
    (tmp_path / "out.idx").unlink()
    assert reusable(tmp_path / "out", open_source(str(lines)), tokenizer) is None
    build(open_source(str(lines)), tokenizer, tmp_path / "out")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_pair_that_others_put_there_is_not_reused(
    tmp_path: Path, tokenizer: Bytes, lines: Path
) -> None:
    build(open_source(str(lines)), tokenizer, tmp_path / "out")
    with IndexedWriter(tmp_path / "out", 257) as writer:
        writer.add_document([1, 2])
    with raises("data.token_count_differs", token_count=2, name="out", tokens=7):
        reusable(tmp_path / "out", open_source(str(lines)), tokenizer)


def test_a_record_never_vouches_for_a_data_set_made_later(
    tmp_path: Path, tokenizer: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text(name)  # as many tokens in both
    one, two = (open_source(str(tmp_path / name)) for name in ("one.txt", "two.txt"))
    build(one, tokenizer, tmp_path / "out")

    def crash(path: Path, content: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_whole", crash)
    with pytest.raises(KeyboardInterrupt):
        build(two, tokenizer, tmp_path / "out", overwrite=True)
    assert IndexedDataset(tmp_path / "out").document(0).tolist() == [*b"two.txt", 256]
    assert reusable(tmp_path / "out", one, tokenizer) is None


def test_prepare_trains_builds_and_then_reuses(tmp_path: Path) -> None:
    source = open_source("python", TextOptions(max_chars=100_000))
    out = tmp_path / "data" / "py"
    made = prepare(source, out, vocab_size=400)
    assert names(out.parent) == {"py.model", "py.bin", "py.idx", "py.json"}
    assert (made.vocab_size, made.chars, made.reused) == (400, 100_000, False)
    stamps = {path: path.stat().st_mtime_ns for path in out.parent.iterdir()}
    assert prepare(source, out, vocab_size=400).reused
    assert prepare(source, out, tokenizer=made.tokenizer).reused
    assert {path: path.stat().st_mtime_ns for path in out.parent.iterdir()} == stamps
    with raises("data.build_exists"):
        prepare(source, out, vocab_size=401)
    tokenizer = load_tokenizer(made.tokenizer)
    dataset = IndexedDataset(out)
    texts = [
        tokenizer.decode(dataset.document(i)[:-1].tolist()) for i in range(dataset.num_documents)
    ]
    assert texts == [text for _, text in source]


def test_prepare_takes_up_after_an_interrupted_build(tmp_path: Path) -> None:
    source = open_source("python", TextOptions(max_chars=50_000))
    prepare(source, tmp_path / "py", vocab_size=400)
    (tmp_path / "py.idx").unlink()
    assert not prepare(source, tmp_path / "py", vocab_size=400).reused
    assert IndexedDataset(tmp_path / "py").num_documents > 0


@pytest.mark.parametrize("given", [{}, {"tokenizer": Path("x"), "vocab_size": 3}])
def test_prepare_needs_a_tokenizer_or_a_size(tmp_path: Path, given: dict) -> None:
    with raises("data.tokenizer_or_vocabulary"):
        prepare(open_source("python", TextOptions(max_chars=10)), tmp_path / "x", **given)
