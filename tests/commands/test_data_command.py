"""`megaprec data build` and `inspect`, through the parser."""

import argparse
import errno
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event

import pytest

from megaprec.errors import UserError
from megaprec.text import build as build_module
from megaprec.tokens.files import exclusive_lock
from megaprec.tokens.indexed import IndexedWriter
from tests.refusals import raises, shows
from tools.cli import main
from tools.commands.data import add_arguments


def command(*words: object) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args([*map(str, words)])
    return args.run(args)


def test_a_text_is_built_and_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "py"
    assert command("build", "python", out, "--vocab-size", 500, "--max-chars", 60_000) == 0
    assert "built from python" in capsys.readouterr().out
    assert command("build", "python", out, "--vocab-size", 500, "--max-chars", 60_000) == 0
    assert "already there" in capsys.readouterr().out
    assert command("inspect", out, "--samples", 2) == 0
    shown = capsys.readouterr().out
    for line in (
        "documents ",
        "dtype              uint16",
        "longest document",
        "mean document",
        "largest id",
    ):
        assert line in shown
    assert shown.count("--- document") == 2
    assert "import" in shown or "def " in shown or "#" in shown


def test_without_a_tokenizer_ids_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with IndexedWriter(tmp_path / "x", 1000) as writer:
        writer.add_document(list(range(100)))
        writer.add_document([7, 8])
    assert command("inspect", tmp_path / "x", "--samples", 5) == 0
    shown = capsys.readouterr().out
    assert "--- document 0: first 64 of 100 tokens\n0 1 2 3" in shown
    assert "--- document 1: 2 tokens\n7 8" in shown
    assert "mean document      51.0 tokens" in shown


def test_documents_that_samples_cut_are_counted_with_and_without_packing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with IndexedWriter(tmp_path / "x", 1000) as writer:
        for length in (6, 7, 4, 13, 3):
            writer.add_document([5] * length)
    asked = ("inspect", tmp_path / "x", "--samples", 0, "--seq-length", 10)
    # in order samples hold 6 4 | 3 4 3 | 10, and the last 3 tokens are in none
    expected = {
        "samples": ("3", "4"),
        "padding": ("0.00%", "17.50%"),
        "tokens in no sample": ("3", "0"),
        "documents of at most 10, whole": ("3", "4"),
        "documents of at most 10, cut": ("1", "0"),
        "documents of more than 10, cut": ("1", "1"),
        "cuts of all documents": ("2", "1"),
    }
    assert command(*asked) == 0
    alone = capsys.readouterr().out
    assert 'data.pack = "none"' in alone and "best_fit" not in alone
    assert command(*asked, "--pack", "best_fit") == 0
    rows = [line.strip("│").split("│") for line in capsys.readouterr().out.splitlines()]
    shown = {cells[0].strip(): (cells[1].strip(), cells[2].strip()) for cells in rows if cells[2:]}
    assert {name: shown[name] for name in expected} == expected


def test_a_length_of_samples_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", 1000) as writer:
        writer.add_document([5])
    with raises("command.pack_without_length", pack="best_fit"):
        command("inspect", tmp_path / "x", "--pack", "best_fit")
    for length in (0, -1, 2**70):
        with raises("command.inspected_length", length=length):
            command("inspect", tmp_path / "x", "--seq-length", length)


def test_an_empty_data_set_can_be_inspected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with IndexedWriter(tmp_path / "x", 1000):
        pass
    assert command("inspect", tmp_path / "x") == 0
    assert "documents          0" in capsys.readouterr().out


def test_a_tokenizer_too_small_for_the_data_is_refused(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", 1000) as writer:
        writer.add_document([999])
    command("build", "python", tmp_path / "py", "--vocab-size", 400, "--max-chars", 30_000)
    with raises("data.vocabulary_too_small", vocab=400):
        command("inspect", tmp_path / "x", "--tokenizer", tmp_path / "py.model")


@pytest.mark.parametrize(
    "words",
    [
        ("build", "nowhere", "x", "--vocab-size", 300),
        ("build", "python", "x", "--tokenizer", "nowhere"),
        ("build", "python", "x", "--vocab-size", 300, "--max-chars", 0),
        ("build", "python", "x.bin", "--vocab-size", 300),
        ("inspect", "x"),
    ],
)
def test_bad_input_is_the_users_error_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError):
        command(*words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tokenizer", [(), ("--vocab-size", 300, "--tokenizer", "x")])
def test_one_tokenizer_is_asked_for(tokenizer: tuple, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command("build", "python", "x", *tokenizer)
    assert stop.value.code == 2
    assert "--vocab-size" in capsys.readouterr().err


def test_a_build_waits_for_another_of_the_same_prefix_and_takes_what_it_made(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("build", "python", tmp_path / "py", "--vocab-size", 400, "--max-chars", 30_000)
    with ThreadPoolExecutor(1) as other:
        with exclusive_lock(tmp_path / ".py.lock", lambda: pytest.fail("nobody builds yet")):
            waiting = other.submit(command, *words)
            said = ""
            deadline = time.monotonic() + 600
            while "waiting for another process" not in said:
                assert time.monotonic() < deadline and not waiting.done()
                time.sleep(0.01)
                said += capfd.readouterr().err
            assert [path.name for path in tmp_path.iterdir()] == [".py.lock"]
            assert command(*words[:2], tmp_path / "another", *words[3:]) == 0, (
                "another prefix is free"
            )
            for path in tmp_path.glob("another.*"):
                path.rename(path.with_stem("py"))
        assert waiting.result() == 0
    assert "already there, unchanged" in capfd.readouterr().out


def test_a_build_on_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("a text that says what it says\n" * 40)
    words = ["data", "build", str(tmp_path / "text.txt"), str(tmp_path / "set" / "a")]

    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr(build_module, "_write", full)
        assert main([*words, "--vocab-size", "280"]) == 2
        assert shows(capsys.readouterr().err, "data.no_room")
        assert list((tmp_path / "set").iterdir()) == []
        # of what was there before nothing is lost
        assert (
            main(
                [
                    "data",
                    "tokenizer",
                    words[2],
                    str(tmp_path / "set" / "a.model"),
                    "--vocab-size",
                    "280",
                ]
            )
            == 0
        )
        before = sorted((tmp_path / "set").iterdir())
        assert main([*words, "--vocab-size", "280"]) == 2
        assert sorted((tmp_path / "set").iterdir()) == before
    assert main([*words, "--vocab-size", "280"]) == 0


def test_a_lock_whose_file_is_removed_while_it_is_waited_for_is_taken_anew(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    inside: list[str] = []

    def take(name: str) -> None:
        with exclusive_lock(lock, lambda: waits.set()):
            inside.append(name)
            assert lock.exists()

    waits = Event()

    def fail_while_another_waits(other: ThreadPoolExecutor) -> Future[None]:
        waiting = Future[None]()
        with suppress(ValueError), exclusive_lock(lock, lambda: None, leave_none=True):
            waiting = other.submit(take, "second")
            assert waits.wait(600)
            inside.append("first")
            raise ValueError
        return waiting

    with ThreadPoolExecutor(1) as other:
        fail_while_another_waits(other).result()
    assert inside == ["first", "second"]
