"""JSON and TOML parse to a value or raise ValueError, whatever the text; a file is read only if it
can end."""

import json
import os
import re
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from megaprec.durable import file_error, read_whole, reading
from megaprec.errors import LONGEST_LINE, UserError
from megaprec.parsing import (
    NESTING,
    home_expanded,
    parse_json,
    parse_toml,
    path_problem,
    read_regular,
    read_text,
)
from megaprec.text import tokenizer
from megaprec.text.sources import open_source
from tests.refusals import raises, shows
from tools.cli import main
from tools.config.run_file import load_run

VALUES = some.recursive(
    some.none()
    | some.booleans()
    | some.integers(-(2**70), 2**70)
    | some.floats(allow_nan=False)
    | some.text(),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(), inner, max_size=3),
)


@pytest.mark.slow
@given(VALUES)
def test_json_gives_what_was_written(value: object) -> None:
    assert parse_json(json.dumps(value)) == value


@given(some.text() | some.binary())
def test_any_text_is_a_value_or_a_value_error(text: str | bytes) -> None:
    for parse in (parse_json, parse_toml):
        with suppress(ValueError):
            parse(text if isinstance(text, str) else text.decode("latin-1"))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[" * 5000 + "]" * 5000,
        "[" * (NESTING + 1) + "]" * (NESTING + 1),
        '{"a":' * 3000 + "1" + "}" * 3000,
        "9" * 5000,
        "9" * 400,
        '"\\ud800"',
        '{"\\udfff": 1}',
        "",
        "{",
    ],
    ids=lambda text: text[:5],
)
def test_what_later_code_would_fail_on_is_no_json(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (that it is one is the law)
        parse_json(text)


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 5000, "a = " + "9" * 5000, f"a = {'[' * 101}{']' * 101}"]
)
def test_what_later_code_would_fail_on_is_no_toml(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_toml(text)


def test_a_pipe_a_device_a_folder_and_a_huge_file_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    for path in (
        tmp_path / "pipe",
        Path("/dev/zero"),
        tmp_path,
        tmp_path / "nowhere",
        tmp_path / "huge",
    ):
        with pytest.raises(OSError) as caught:  # noqa: PT011
            read_regular(path, 1000)
        assert caught.value.filename == str(path)


def first_byte(path: Path) -> bytes:
    with reading(path) as file:
        return file.read(1)


@pytest.mark.parametrize("read", [read_whole, first_byte])
def test_what_is_read_in_one_piece_is_a_regular_file(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path, tmp_path / "nowhere"):
        with pytest.raises(OSError) as caught:  # noqa: PT011
            read(path)
        assert caught.value.filename == str(path)


@pytest.mark.skipif(
    sys.platform != "linux", reason="a file of Linux that cannot be read at its begin"
)
def test_an_error_while_a_file_is_read_names_it() -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011
        read_regular(Path("/proc/self/mem"))
    assert caught.value.filename == "/proc/self/mem"


def test_a_text_has_the_line_ends_that_python_reads(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("ä\r\nb\rc\n".encode())
    assert read_text(tmp_path / "text") == (tmp_path / "text").read_text("utf-8")


def test_paths_that_no_file_can_have_are_known() -> None:
    assert not any(map(path_problem, ("", ".", "a/b", "/", "é" * 127, "x" * 255)))
    assert all(map(path_problem, ("a\0b", "\udcff", "x" * 256, "é" * 128, "x/" * 3000)))


def test_a_home_folder_that_is_not_known_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [home_expanded(path) for path in ("~/a", "a/~", "~")] == [
        f"{tmp_path}/a",
        "a/~",
        str(tmp_path),
    ]
    for key in ("data.source", "train.init_from", "train.branch_from", "train.folder"):
        with pytest.raises(UserError) as caught:
            load_run(None, [f"{key}=~nosuch/a"])
        (problem,) = (line for line in caught.value.problems if "nosuch" in line)
        assert problem.startswith(key) and shows(
            problem,
            "config.wrong_value",
            requirement=re.compile(
                r"no home folder is known for ~nosuch; write the whole path, or \./~nosuch if that"
            ),
        )
    with raises(
        "megaprec.home_unknown", path="~nosuch", problem=re.compile(r"or \./~nosuch if that")
    ):
        open_source("~nosuch")


def test_a_path_below_home_is_refused_in_one_line_where_the_user_has_no_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # KeyError, as for the user of a container
    with raises(
        "megaprec.home_unknown",
        path="~/a",
        problem=re.compile("^no home folder is known for ~; write the whole path"),
    ):
        home_expanded("~/a")


@given(some.text(some.characters(exclude_categories=[])))
def test_a_problem_is_one_line_that_prints(text: str) -> None:
    (problem,) = UserError(text).problems
    assert problem.isprintable() and len(problem) <= LONGEST_LINE
    problem.encode()
    if text.isprintable() and len(text) <= LONGEST_LINE:
        assert problem == text


def test_a_file_that_is_too_large_is_told_before_any_of_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "x.json").open("wb") as file:
        file.truncate(1 << 40)  # without a block on the disk
    with pytest.raises(OSError, match="it is larger than 1,073,741,824 bytes") as error:
        read_regular(tmp_path / "x.json")
    said = file_error(error.value)
    assert said.startswith(f"{tmp_path}/x.json: it is larger") and said.endswith(
        "so large: give another one"
    )


def test_a_small_file_takes_little_memory_whatever_it_may_have(tmp_path: Path) -> None:
    file = tmp_path / "small"
    file.write_bytes(b"content")
    tracemalloc.start()
    try:
        content = read_regular(file)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert content == b"content"
    assert peak < 1 << 20


def test_a_file_that_tells_no_size_is_read_whole() -> None:
    status = Path("/proc/self/status")
    assert b"VmPeak" in read_regular(status)
    with pytest.raises(OSError, match="larger than 20 bytes"):
        read_regular(status, 20)


def test_a_command_without_memory_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_memory(path: Path) -> bytes:
        raise MemoryError

    monkeypatch.setattr(tokenizer, "read_regular", without_memory)
    model = tmp_path / "text.model"
    model.write_bytes(b"content")
    text = tmp_path / "text.txt"
    text.write_text("some text")
    build = ["data", "build", str(text), str(tmp_path / "new"), "--tokenizer", str(model)]
    assert main(build) == 2
    assert shows(capsys.readouterr().err, "command.no_memory")
