"""A tokenizer that a library cannot bear is refused in one line; one that it can is tried once."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megaprec.text import tried_tokenizers
from megaprec.text.tokenizer import load_tokenizer
from megaprec.text.training import train_hugging_face, train_sentencepiece
from tests.refusals import raises, shows
from tools.cli import main

pytest.importorskip("tokenizers", reason="needs tokenizers: the extra hf")
TEXTS = ["the model learns to say what it has seen\n" * 30]
GROW = {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 100_000}
HARMFUL: dict[str, dict[str, Any]] = {
    "a panic": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "a panic on a text": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "memory without end": {"normalizer": {"type": "Sequence", "normalizers": [GROW] * 5}},
}


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch, own_cache: None) -> list[Any]:
    """The commands that are started to try tokenizers."""
    run = subprocess.run
    started = list[Any]()

    def noted(command: Any, **options: Any) -> Any:
        started.append(command)
        return run(command, **options)

    monkeypatch.setattr(tried_tokenizers.subprocess, "run", noted)
    return started


@pytest.mark.cases(2, sample=1)
@pytest.mark.parametrize("name", HARMFUL)
@pytest.mark.usefixtures("own_cache")
def test_a_tokenizer_that_the_library_cannot_bear_is_refused_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = train_hugging_face(TEXTS, tmp_path / "tokenizer.json", 270)
    path.write_text(json.dumps(json.loads(path.read_text()) | HARMFUL[name]))
    (tmp_path / "text.txt").write_text(TEXTS[0])
    command = [
        "data",
        "build",
        str(tmp_path / "text.txt"),
        str(tmp_path / "tokens"),
        "--tokenizer",
        str(path),
    ]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert shows(
        said, "data.tokenizer_harmful", path=path, why=re.compile("^the package tokenizers ")
    )


def test_a_tokenizer_is_tried_once_and_one_that_was_made_here_never(
    tmp_path: Path, tries: list[Any]
) -> None:
    load_tokenizer(train_sentencepiece(TEXTS, tmp_path / "own", 300))
    own = train_hugging_face(TEXTS, tmp_path / "tokenizer.json", 270)
    load_tokenizer(own)
    assert not tries
    own.write_text(own.read_text() + "\n")
    for _ in range(2):
        load_tokenizer(own)
    assert len(tries) == 1


def test_a_file_that_the_library_refuses_is_refused_by_the_reason(
    tmp_path: Path, tries: list[Any]
) -> None:
    file = tmp_path / "x.model"
    file.write_bytes(b"\x0a\x05abcde" * 30)
    with raises("data.not_a_tokenizer"):
        load_tokenizer(file)
    assert len(tries) == 1
