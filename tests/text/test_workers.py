"""The tokens do not depend on who encodes them, how many do, or how often they were killed."""

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from megaprec.errors import UserError
from megaprec.text import build as module
from megaprec.text import encoding, workers
from megaprec.text.build import build
from megaprec.text.encoding import send_request
from megaprec.text.readers import TextOptions
from megaprec.text.sources import TextSource, open_source
from megaprec.text.tokenizer import Tokenizer, load_tokenizer
from megaprec.text.training import train_sentencepiece
from megaprec.tokens.indexed import IndexedDataset
from tests.refusals import raises, sentence
from tests.text.test_tokenizer import hugging_face

ROOT = Path(__file__).parents[2]
SMALL = 20_000  # characters to a chunk
KILLED = """
import os, signal, sys
from pathlib import Path
from megaprec.text import build, readers
from megaprec.text.sources import open_source
from megaprec.text.tokenizer import load_tokenizer

source, tokenizer, prefix, workers, chunks, chars = sys.argv[1:]
build.CHUNK_CHARS, build.RESUME_CHARS = int(chars), 3 * int(chars)
left = int(chunks)

def on_progress(*totals):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

build.build(open_source(source), load_tokenizer(Path(tokenizer)), Path(prefix), workers=int(workers),
            on_progress=on_progress)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TextSource:
    """Documents of all lengths: none, less than a chunk and many chunks."""
    path = tmp_path_factory.mktemp("text") / "x.jsonl"
    library = "".join(text for _, text in open_source("python", TextOptions(max_chars=900_000)))
    cuts = [
        0,
        10,
        10,
        5_000,
        30_000,
        30_000,
        30_001,
        200_000,
        *range(200_000, 900_000, 1777),
        900_000,
    ]
    texts = [library[a:b] for a, b in pairwise(cuts)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return open_source(str(path))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    texts = (text for _, text in open_source("python", TextOptions(max_chars=200_000)))
    return load_tokenizer(train_sentencepiece(texts, tmp_path_factory.mktemp("model") / "m", 500))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_CHARS", SMALL)
    monkeypatch.setattr(module, "RESUME_CHARS", 3 * SMALL)


def digests(prefix: Path) -> list[str]:
    return [
        hashlib.sha256(prefix.with_suffix(suffix).read_bytes()).hexdigest()
        for suffix in (".bin", ".idx", ".json")
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_the_bytes_do_not_depend_on_the_number_of_workers(
    tmp_path: Path, source: TextSource, model: Tokenizer
) -> None:
    for number in (1, 2, 5):
        build(source, model, tmp_path / f"{number}", workers=number)
    assert digests(tmp_path / "1") == digests(tmp_path / "2") == digests(tmp_path / "5")
    dataset = IndexedDataset(tmp_path / "5")
    texts = [text for _, text in source if text]
    assert dataset.num_documents == len(texts)
    for index in (0, 1, 4, len(texts) - 1):
        assert dataset.document(index).tolist() == [*model.encode(texts[index]), model.eos]


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_a_hugging_face_tokenizer_does_the_same_in_workers(
    tmp_path: Path, source: TextSource
) -> None:
    tokenizer = load_tokenizer(hugging_face(tmp_path / "tokenizer.json"))
    for number in (1, 2):
        build(source, tokenizer, tmp_path / f"{number}", workers=number)
    assert digests(tmp_path / "1") == digests(tmp_path / "2")


@pytest.mark.slow
def test_a_worker_whose_request_breaks_off_ends_without_a_word(model: Tokenizer) -> None:
    """For whoever asked was killed, in the middle of it."""
    request = io.BytesIO()
    send_request(request, ["some text", "and more"], [True, True])
    whole = request.getvalue()
    command = [sys.executable, "-m", encoding.__name__, str(model.path), str(model.eos)]
    for length in (3, 20, len(whole) - 1, len(whole)):
        ended = subprocess.run(
            command, input=whole[:length], capture_output=True, timeout=600, cwd=ROOT
        )
        assert (ended.returncode == 0, ended.stderr) == (length == len(whole), b"")


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("number", "chunks"), [(2, 17), (1, 2)])
@pytest.mark.usefixtures("small")
def test_a_killed_build_goes_on_to_the_same_bytes(
    tmp_path: Path,
    source: TextSource,
    model: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    chunks: int,
) -> None:
    words = [
        str(source.root / "x.jsonl"),
        str(model.path),
        str(tmp_path / "out"),
        str(number),
        str(chunks),
        str(SMALL),
    ]
    command = [sys.executable, "-c", KILLED, *words]
    # waits for all that hold the pipe
    killed = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, timeout=600)
    assert (killed.returncode, killed.stderr) == (-signal.SIGKILL, b"")
    with raises("data.data_set_missing"):
        IndexedDataset(tmp_path / "out")
    encoded: list[int] = []
    real = workers.encode_pieces
    monkeypatch.setattr(workers, "encode_pieces", lambda *args: encoded.append(1) or real(*args))
    build(source, model, tmp_path / "whole")
    whole = len(encoded)
    build(source, model, tmp_path / "out")
    kept = 2 * whole - len(encoded)
    assert chunks - 4 <= kept < chunks
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{n}.{s}" for n in ("out", "whole") for s in ("bin", "idx", "json")
    }


def interrupt(source: TextSource, model: Tokenizer, prefix: Path, chunks: int = 9) -> None:
    """Ends a build as Ctrl-C does, after so many chunks."""
    left = iter(range(1, chunks))

    def on_progress(*totals: int) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(source, model, prefix, on_progress=on_progress)
    assert prefix.with_suffix(".resume").exists()


@pytest.mark.usefixtures("small")
def test_what_another_text_left_is_not_taken_up(
    tmp_path: Path, source: TextSource, model: Tokenizer
) -> None:
    interrupt(source, model, tmp_path / "out")
    other = open_source("python", TextOptions(max_chars=100_000))
    build(other, model, tmp_path / "out")
    build(other, model, tmp_path / "fresh")
    assert digests(tmp_path / "out") == digests(tmp_path / "fresh")


@pytest.mark.usefixtures("small")
def test_a_build_can_be_interrupted_again_and_again(
    tmp_path: Path, source: TextSource, model: Tokenizer
) -> None:
    for _ in range(3):
        interrupt(source, model, tmp_path / "out", 8)
    build(source, model, tmp_path / "out")
    build(source, model, tmp_path / "fresh")
    assert digests(tmp_path / "out") == digests(tmp_path / "fresh")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("suffix", [".bin", ".lengths", ".documents"])
def test_parts_that_were_cut_off_are_not_gone_on_with(
    tmp_path: Path, source: TextSource, model: Tokenizer, suffix: str
) -> None:
    interrupt(source, model, tmp_path / "out")
    os.truncate(tmp_path / f"out{suffix}.part", 10)
    build(source, model, tmp_path / "out")
    build(source, model, tmp_path / "fresh")
    assert digests(tmp_path / "out") == digests(tmp_path / "fresh")


@pytest.mark.usefixtures("small")
def test_a_worker_that_dies_is_told_of_and_nothing_is_left(
    tmp_path: Path, source: TextSource, model: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = workers.send_request

    class Popen(subprocess.Popen):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]
            started.append(self)

    def send(*args: object) -> None:
        for process in started:
            process.kill()
        real(*args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(workers.subprocess, "Popen", Popen)
    monkeypatch.setattr(workers, "send_request", send)
    with pytest.raises(UserError, match=sentence("data.worker_died", exit_code=-9)):
        build(source, model, tmp_path / "out", workers=2)
    assert list(tmp_path.iterdir()) == []
    assert all(process.returncode is not None for process in started)


def test_a_short_text_is_not_worth_a_process(
    tmp_path: Path, model: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_start_workers", lambda *_: pytest.fail("a process was started"))
    assert build(
        open_source("python", TextOptions(max_chars=5_000)), model, tmp_path / "a", workers=1
    ).documents
    (tmp_path / "a.txt").write_text("short")
    assert (
        build(open_source(str(tmp_path / "a.txt")), model, tmp_path / "b", workers=8).documents == 1
    )
