"""`megaprec data verify` finds every kind of damage, says it in a line, and has an exit code for
it."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megaprec.errors import UserError
from megaprec.tokens.indexed import IndexedWriter
from tests.commands.test_data_command import command
from tests.refusals import raises, sentence, shows


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a good data set."""
    folder = tmp_path_factory.mktemp("good")
    command("build", "python", folder / "x", "--vocab-size", 400, "--max-chars", 40_000)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def good(tmp_path: Path, made: dict[str, bytes]) -> Path:
    for name, content in made.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path / "x"


def changed(path: Path, change: Callable[[bytearray], None]) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def flip_last_bit(content: bytearray) -> None:
    content[-2] ^= 1


def test_a_data_set_as_it_was_built_is_ok(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("verify", good) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["ok", what] for what in ("index", "ids", "documents", "ends", "hash", "hash", "tokenizer")
    ]
    assert command("verify", f"{good}.bin") == 0


@pytest.mark.parametrize(
    ("suffix", "change", "why"),
    [
        (
            ".bin",
            flip_last_bit,
            "bad   hash       x.bin is not what was built",
        ),
        (".bin", lambda content: content.extend(b"\0\0"), "bad   index .* where x.bin has"),
        (".bin", bytearray.clear, "bad   index .* where x.bin has 0"),
        (".idx", lambda content: content.__delitem__(slice(-1, None)), "bad   index .*truncated"),
        (".idx", lambda content: content.__setitem__(34, 255), "bad   index "),
        (".json", bytearray.clear, "bad   record "),
        (".json", lambda content: content.__setitem__(slice(None), b"{}"), "bad   record "),
        (".model", bytearray.clear, "bad   tokenizer  " + sentence("data.not_a_tokenizer")),
    ],
)
def test_damage_is_bad(
    good: Path,
    suffix: str,
    change: Callable[[bytearray], None],
    why: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    changed(good.with_suffix(suffix), change)
    assert command("verify", good) == 2
    assert re.search(why, capsys.readouterr().out)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_half_a_pair_is_bad(good: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    good.with_suffix(suffix).unlink()
    assert command("verify", good) == 2
    assert shows(capsys.readouterr().out, "data.data_set_missing")


def test_another_tokenizer_is_bad(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command(
        "tokenizer", "python", tmp_path / "small.model", "--vocab-size", 350, "--max-chars", 30_000
    )
    assert command("verify", good, "--tokenizer", tmp_path / "small.model") == 2
    said = capsys.readouterr().out
    assert (
        "it is another one's data" in said
        and "is not the one that the data set was built with" in said
    )


def test_a_pair_of_others_is_ok_but_for_what_cannot_be_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with IndexedWriter(tmp_path / "x", 1000) as writer:
        writer.add_document([1, 2, 3])
        writer.add_document([])
    assert command("verify", tmp_path / "x") == 1
    said = capsys.readouterr().out
    for line in (
        "note  ids        1 to 3; no tokenizer",
        "note  documents  1 of 2 are empty",
        "note  record ",
    ):
        assert line in said


def test_documents_without_an_end_are_noted(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good.with_suffix(".json").unlink()
    with IndexedWriter(good, 400) as writer:
        writer.add_document([5, 2])
        writer.add_document([5, 6])
    assert command("verify", good) == 1
    assert (
        "note  ends       1 document without the end-of-document token" in capsys.readouterr().out
    )


def test_negative_ids_and_numbers_that_are_none_are_bad(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with IndexedWriter(tmp_path / "x", 70_000) as writer:
        writer.add_document([1, 2, 3])
    (tmp_path / "x.bin").write_bytes(np.array([1, -2, 3], "<i4").tobytes())
    assert command("verify", tmp_path / "x") == 2
    assert "-2 to 3: token ids cannot be negative" in capsys.readouterr().out
    changed(tmp_path / "x.idx", lambda content: content.__setitem__(17, 7))
    assert command("verify", tmp_path / "x") == 2
    assert shows(capsys.readouterr().out, "data.not_token_ids", name="float32")


def test_a_data_set_without_a_token_is_bad(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", 1000):
        pass
    assert command("verify", tmp_path / "x") == 2


def test_texts_are_read_to_their_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "ab"}\n{"text": "c"}\n')
    assert command("verify", path) == 0
    assert "ok    text       2 documents in 1 file, 3 characters" in capsys.readouterr().out
    path.write_text('{"text": "ab"}\n{"text": ""}\n')
    assert command("verify", path) == 1
    assert "1 empty one left out" in capsys.readouterr().out
    path.write_text('{"text": ""}\n')
    assert command("verify", path) == 2
    path.write_text('{"text": "ab"}\n{"text": "c"\n')
    assert command("verify", path) == 2
    said = capsys.readouterr().out
    bad = sentence("data.row_not_json_object", where=f"{path}:2")
    assert re.search(f"bad   text       {bad}", said)
    path.write_text(json.dumps({"body": "x"}) + "\n")
    assert command("verify", path, "--text-field", "body") == 0


def test_nothing_at_all_is_the_users_error(tmp_path: Path) -> None:
    with raises("data.source_missing"):
        command("verify", tmp_path / "nothing")


def test_an_option_of_texts_is_refused_beside_tokens_and_one_of_tokens_beside_texts(
    good: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=sentence("command.text_options_of_tokens", path=good)):
        command("verify", good, "--text-field", "body")
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(
        UserError,
        match=sentence(
            "command.tokenizer_of_text",
            tokenizer=f"{good}.model",
            path=tmp_path / "x.txt",
        ),
    ):
        command("verify", tmp_path / "x.txt", "--tokenizer", f"{good}.model")
