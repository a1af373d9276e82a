"""A text at a URL is the text that a folder of the same files is, byte for byte; what is wrong with
a URL is said in one line."""

import gzip
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from megaprec.text.build import build
from megaprec.text.readers import TextOptions
from megaprec.text.sources import open_source
from megaprec.text.tokenizer import load_tokenizer
from megaprec.text.training import train_sentencepiece
from tests.refusals import raises
from tests.text.test_text import documents
from tools.cli import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of files of all kinds, which is also at memory://texts."""
    root = tmp_path / "texts"
    (root / "deep").mkdir(parents=True)
    (root / ".hidden").mkdir()
    lines = "".join(json.dumps({"text": f"line {number} é"}) + "\n" for number in range(20))
    (root / "a.jsonl").write_text(lines)
    (root / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (root / "c.txt").write_text("plain\r\ntext é")
    (root / "deep" / "d.md").write_text("# deep")
    (root / "deep" / "e.csv").write_text("text,n\none,1\n")
    (root / "deep" / "f.html").write_text("<p>page</p>")
    (root / "list.json").write_text('["x", "y"]')
    (root / "settings.json").write_text("{}")
    (root / "g.pdf").write_bytes(b"%PDF-")
    (root / ".hidden" / "h.txt").write_text("hidden")
    zipped = pyarrow.output_stream(str(root / "z.txt.zst"), compression="zstd")
    with zipped as stream:
        stream.write(b"packed")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["p", "q"]}), root / "t.parquet")
    return root


@pytest.fixture
def in_memory(folder: Path) -> Iterator[str]:
    memory = fsspec.filesystem("memory")
    memory.put(f"{folder}/", "/texts/", recursive=True)
    yield "memory://texts"
    memory.rm("/texts", recursive=True)


@pytest.fixture
def served(folder: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_folder_at_a_url_is_the_text_of_the_folder(folder: Path, in_memory: str) -> None:
    here = open_source(str(folder))
    there = open_source(in_memory)
    assert documents(there) == documents(here)
    assert there.left_out == here.left_out
    options = TextOptions(exclude=("deep", "*.json*"))
    assert [*documents(open_source(in_memory, options))] == [
        *documents(open_source(str(folder), options))
    ]


def test_patterns_and_lists_of_urls_are_read_in_order(folder: Path, in_memory: str) -> None:
    found = documents(open_source(f"{in_memory}/**/*.md"))
    assert [*found.values()] == ["# deep"]
    listed = open_source([f"{in_memory}/c.txt", f"{in_memory}/deep"])
    assert [*documents(listed).values()][:2] == ["plain\r\ntext é", "# deep"]
    with raises("data.pattern_without_match"):
        open_source(f"{in_memory}/*.rst")
    with raises("data.url_beside_files"):
        open_source([f"{in_memory}/c.txt", str(folder / "c.txt")])


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.gz", "c.txt", "z.txt.zst", "t.parquet"])
def test_a_file_behind_a_server_is_the_file(folder: Path, served: str, name: str) -> None:
    assert documents(open_source(f"{served}/{name}")) == documents(open_source(str(folder / name)))


def test_a_data_set_of_a_url_has_the_bytes_of_one_of_the_folder(
    folder: Path, in_memory: str, tmp_path: Path
) -> None:
    texts = [text for _, text in open_source(str(folder))]
    tokenizer = load_tokenizer(train_sentencepiece(texts * 3, tmp_path / "small", 290, False))
    build(open_source(str(folder)), tokenizer, tmp_path / "here")
    build(open_source(in_memory), tokenizer, tmp_path / "there")
    for suffix in (".bin", ".idx"):
        here, there = (tmp_path / f"{name}{suffix}" for name in ("here", "there"))
        assert here.read_bytes() == there.read_bytes()
    first = open_source(in_memory).identity()
    assert first == open_source(in_memory).identity()
    fsspec.filesystem("memory").pipe("/texts/c.txt", b"other text")
    assert first != open_source(in_memory).identity()


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("{served}/none.txt", "data.url_missing"),
        ("memory://none", "data.url_missing"),
        ("nosuch://bucket/x", "data.url_unreadable"),
        ("zip://x.txt::memory://texts/x.zip", "data.url_chained"),
        ("simplecache::memory://texts/a.txt", "data.url_chained"),
        ("http://127.0.0.1:9/x.txt", "data.url_unreachable"),
        # a signature is no pattern, whatever its signs
        ("{served}/none.txt?sig=a", "data.url_missing"),
        ("{served}/none.txt?sig=[a]*", "data.url_missing"),
        ("http://127.0.0.1:9/x.txt?sig=a", "data.url_unreachable"),
    ],
)
def test_a_url_that_cannot_be_read_is_said_in_one_line(
    served: str, url: str, code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = url.format(served=served)
    with raises(code):
        open_source(name)
    assert main(["data", "build", name, f"{tmp_path}/set", "--vocab-size", "300"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_what_is_asked_of_a_web_page_is_no_pattern(folder: Path, served: str) -> None:
    pieces = list(open_source(f"{served}/c.txt?sig=[a]*"))
    assert [text for _, text in pieces] == ["plain\r\ntext é"]


def test_token_files_at_a_url_are_named(folder: Path, in_memory: str) -> None:
    fsspec.filesystem("memory").pipe("/texts/tokens.idx", b"x")
    with raises("data.url_tokens"):
        open_source(f"{in_memory}/tokens")
