"""Places that a command cannot take: one line names each and says what to do, and nothing is
written."""

import errno
import os
from pathlib import Path

import pytest

from megaprec.errors import Problem
from tests.refusals import shows
from tests.runs import write_run
from tools import cli
from tools.journal.records import no_run

ARGUMENTS = "--num-layers 2 --hidden-size 64 --num-attention-heads 4"
# {} stands for the place
READ = (
    "compare {}",
    "report {} -o page.html",
    "explain-spike {}",
    "explain-overflow {}",
    "diagnose {}",
    "fp8-advice {}",
    "precision show {}",
    "plan run.toml --calibrated {}",
    "plan run.toml --measured {}",
    "generate run --prompts {}",
)
READ_ALSO_AT_URLS = (
    "inspect {}",
    "evaluate {}",
    "evaluate run --data {}",
    "data verify {}",
    "train {}",
)
WRITTEN = (
    "init text.txt -o {}",
    f"import-args '{ARGUMENTS}' -o {{}}",
    "plan run.toml -o {}",
    "schedule run.toml -o {}",
    "calibrate -o {}",
    "merge a b -o {}",
    "convert a {}",
    "train run.toml --export-hf {}",
    "doctor --folder {}",
    "data tokenizer text.txt {} --vocab-size 330",
    "data build text.txt {} --vocab-size 330",
)


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line of a command that ends with code 2."""
    try:
        code = cli.main(words)
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr().err
    assert code == 2, said
    assert "Errno" not in said and "Traceback" not in said
    return said.splitlines()[-1]


def words_of(command: str, place: str) -> list[str]:
    """A command line with a place in it; the quoted arguments of import-args are one word."""
    before, quote, rest = command.partition("'")
    arguments, _, after = rest.partition("'")
    words = [*before.split(), *([arguments] if quote else []), *after.split()]
    return [word.replace("{}", place) for word in words]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("places")
    write_run(folder).rename(folder / "run.toml")
    (folder / "run").mkdir()
    return folder


@pytest.mark.parametrize("command", [*READ, *READ_ALSO_AT_URLS, *WRITTEN])
def test_a_dash_is_no_file(
    command: str, room: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(room)
    before = sorted(room.iterdir())
    assert shows(refused(words_of(command, "-"), capsys), "command.path_is_dash")
    assert sorted(room.iterdir()) == before


@pytest.mark.parametrize("command", [*READ, *WRITTEN[:-1]])
def test_a_url_is_refused_where_a_place_of_this_machine_is_needed(
    command: str, room: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(room)
    line = refused(words_of(command, "s3://me:secret@bucket/name"), capsys)
    is_told = shows(line, "command.path_is_url", scheme="s3:")
    of_a_model = "s3://me:***@bucket/name: a model is written to a folder of this machine"
    assert is_told or of_a_model in line
    assert "secret" not in line
    assert not (room / "s3:").exists()


def test_a_run_folder_that_is_none_is_told_as_by_other_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "missing"):
        line = refused(["evaluate", str(tmp_path / name)], capsys)
        assert line == no_run(tmp_path / name)


def test_a_folder_of_a_run_below_a_file_is_refused_before_ranks_start(
    room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = room / "text.txt"
    line = refused(["doctor", "--no-parity", "--folder", str(file)], capsys)
    assert shows(line, "command.doctor_folder", key="--folder", folder=file, file=file)
    key = f"train.folder={file}/run"
    line = refused(["doctor", str(room / "run.toml"), "--no-parity", key], capsys)
    assert shows(line, "command.doctor_folder", key="train.folder =", file=file)


def test_an_error_of_the_system_is_told_without_pythons_form(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        (tmp_path / "missing").read_bytes()
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    with pytest.raises(UnicodeDecodeError) as undecoded:
        (tmp_path / "bytes").read_text("utf-8")
    told = Problem.of("planning.calibration_form", path="a", problem=missing.value)
    assert told.endswith(": No such file or directory")
    assert told.fields["problem"] == "No such file or directory"
    told = Problem.of("command.prompts_unreadable", option="a", error=undecoded.value)
    assert told == "a: not utf-8 text at byte 2: invalid start byte; give UTF-8 text"


@pytest.mark.parametrize("words", [["text.txt"], ["--recipe", "shakespeare"]])
def test_a_run_file_that_finds_no_room_is_named_and_not_left_behind(
    words: list[str],
    room: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if "new.toml" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.chdir(room)
    monkeypatch.setattr(os, "fsync", full)
    line = refused(["init", *words, "-o", "new.toml"], capsys)
    assert line.startswith("new.toml: No space left on device")
    assert not list(room.glob("*new.toml*"))
