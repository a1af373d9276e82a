"""A data set knows the readers of its text, and content that has changed behind the same name, size
and time."""

import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from megaprec.text import readers
from megaprec.text import sources as text
from megaprec.text.build import prepare, reusable
from megaprec.text.readers import FORMS
from megaprec.text.sources import TextDigest, open_source
from megaprec.text.tokenizer import Tokenizer, load_tokenizer
from megaprec.text.training import train_sentencepiece
from tests import runs
from tests.refusals import shows

ROWS = [{"text": "one\ttwo\r\nthree  é"}, {"text": "<b>four</b> & five"}, {"text": "\U0001f600"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
PAGE = (
    "<html><body><h1>Title</h1><p>one <b>two</b></p><ul><li>a<li>b</ul><pre>x  y</pre>"
    "<table><tr><td>1<td>2</table></body></html>"
)
NOTEBOOK = {
    "nbformat": 4,
    "cells": [
        {"cell_type": "markdown", "source": ["# head\n", "text"]},
        {"cell_type": "code", "source": "x = 1\ny = 2", "outputs": []},
    ],
}


def _tar() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for number, row in enumerate(ROWS):
            content = row["text"].encode()
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


SAMPLES: dict[str, bytes] = {
    "plain": "one\r\ntwo \u00e9\n\nthree".encode(),
    ".jsonl": LINES.encode(),
    ".json": json.dumps(ROWS).encode(),
    ".csv": b'text,other\n"one, ""two""",x\nthree,y\n',
    ".tsv": b"text\tother\none two\tx\nthree\ty\n",
    ".html": PAGE.encode(),
    ".htm": PAGE.encode(),
    ".xhtml": PAGE.encode(),
    ".ipynb": json.dumps(NOTEBOOK).encode(),
    ".tar": _tar(),
}
# Of the version of each reader that is known, the digest of what it makes of its sample. A reader
# that gives other text gets another version in `FORMS`, and its digest here follows.
KNOWN: dict[str, tuple[int, str]] = {
    "plain": (1, "8d95f5edb4db654f"),
    ".jsonl": (1, "62cb4290e42edfa5"),
    ".json": (1, "62cb4290e42edfa5"),
    ".csv": (1, "7458c95c84f01772"),
    ".tsv": (1, "cfb17507fbd0e455"),
    ".html": (1, "fedc1ae22197cc85"),
    ".htm": (1, "fedc1ae22197cc85"),
    ".xhtml": (1, "fedc1ae22197cc85"),
    ".ipynb": (1, "833f74ddef84e999"),
    ".tar": (1, "62cb4290e42edfa5"),
}


def digest_of(path: Path) -> str:
    digest = TextDigest()
    for _ in digest.reading(open_source(str(path)).marked(lambda problem: None)):
        pass
    return digest.hexdigest()[:16]


def named(folder: Path, form: str) -> Path:
    return folder / f"text{'.txt' if form == 'plain' else form}"


@pytest.mark.parametrize("form", SAMPLES)
def test_a_reader_that_gives_other_text_has_another_version(form: str, tmp_path: Path) -> None:
    path = named(tmp_path, form)
    path.write_bytes(SAMPLES[form])
    assert (FORMS[form].version, digest_of(path)) == KNOWN[form], "raise its version"


def test_the_text_of_every_form_is_known() -> None:
    packed = {".parquet", ".arrow", ".mds"}  # of which a sample's bytes vary with the package
    assert FORMS.keys() == SAMPLES.keys() | packed


def with_version(monkeypatch: pytest.MonkeyPatch, form: str, version: int) -> None:
    monkeypatch.setitem(readers.FORMS, form, FORMS[form]._replace(version=version))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    texts = [f"good text number {number}, of some length" for number in range(200)]
    folder = tmp_path_factory.mktemp("tokenizer")
    return load_tokenizer(train_sentencepiece(texts, folder / "small", 300, False))


@pytest.mark.parametrize("form", SAMPLES)
def test_tokens_of_another_version_of_the_reader_are_not_taken(
    form: str, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = named(tmp_path, form)
    path.write_bytes(SAMPLES[form])
    prefix = tmp_path / "tokens"
    prepare(open_source(str(path)), prefix, tokenizer=tokenizer.path)
    assert reusable(prefix, open_source(str(path)), tokenizer)
    with_version(monkeypatch, form, 99)
    assert reusable(prefix, open_source(str(path)), tokenizer) is None
    # by its content: the new reader gives the same text
    assert reusable(prefix, open_source(str(path)), tokenizer, by_content=True)
    assert reusable(prefix, open_source(str(path)), tokenizer)


def test_pages_know_the_version_of_the_package_that_lays_them_out(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = named(tmp_path, ".html")
    path.write_bytes(SAMPLES[".html"])
    prefix = tmp_path / "tokens"
    prepare(open_source(str(path)), prefix, tokenizer=tokenizer.path)
    monkeypatch.setattr(readers, "version", lambda package: "0.0")
    assert reusable(prefix, open_source(str(path)), tokenizer) is None


def test_a_changed_reader_of_a_cached_set_is_noticed_by_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = runs.write_run(tmp_path)
    cache = f"data.cache={tmp_path}/cache"
    assert runs.train(file, cache, f"train.folder={tmp_path}/one") == 0
    plain = FORMS["plain"].version
    with_version(monkeypatch, "plain", plain + 1)
    capsys.readouterr()
    assert runs.train(file, cache, f"train.folder={tmp_path}/two") == 0
    assert "is the same text" in capsys.readouterr().err

    def shouted(read: Callable[..., object]) -> Callable[..., object]:
        def pieces(*arguments: object, **options: object) -> object:
            for piece in read(*arguments, **options):  # type: ignore[attr-defined]
                yield piece._replace(text=piece.text.upper())

        return pieces

    with_version(monkeypatch, "plain", plain + 2)
    monkeypatch.setattr(text, "marked_pieces", shouted(text.marked_pieces))
    assert runs.train(file, cache, f"train.folder={tmp_path}/three") == 2
    assert shows(capsys.readouterr().err, "training.cache_of_others")


@pytest.mark.parametrize("way", ["written over", "moved there", "packed", "in a folder"])
def test_other_content_of_the_same_size_and_time_is_noticed(
    way: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    path = folder / ("text.txt.gz" if way == "packed" else "text.txt")
    pack = (lambda text: gzip.compress(text, 0, mtime=0)) if way == "packed" else bytes
    content = b"good text number one\n" * 4000
    path.write_bytes(pack(content))
    name = str(folder if way == "in a folder" else path)
    prefix = tmp_path / "tokens"
    prepare(open_source(name), prefix, tokenizer=tokenizer.path)
    before = path.stat()
    other = bytearray(content)
    other[40_000:40_004] = b"evil"
    if way == "moved there":
        beside = tmp_path / "beside"
        beside.write_bytes(other)
        os.utime(beside, ns=(before.st_atime_ns, before.st_mtime_ns))
        os.replace(beside, path)
    else:
        path.write_bytes(pack(bytes(other)))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    for by_content in (False, True):
        assert reusable(prefix, open_source(name), tokenizer, by_content=by_content) is None


def test_a_text_that_was_only_touched_is_the_same_after_one_reading(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("good text number one\n" * 100)
    prefix = tmp_path / "tokens"
    prepare(open_source(str(path)), prefix, tokenizer=tokenizer.path)
    path.chmod(0o600)
    assert reusable(prefix, open_source(str(path)), tokenizer) is None
    assert reusable(prefix, open_source(str(path)), tokenizer, by_content=True)
    assert reusable(prefix, open_source(str(path)), tokenizer)
