"""Every command that prints a table prints one JSON document instead if `--json` is given, and
nothing else."""

import argparse
import json
import shlex
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parallel.hangs.heartbeat import Beat
from tests.runs import checkpoint, train, write_run
from tools import cli
from tools.commands import keys
from tools.commands.table import COMMANDS
from tools.training.ends import RanksFailed, Stopped
from tools.training.hangs import EndRecord, write_record

# no tables
WITHOUT = {
    "train",
    "generate",
    "convert",
    "merge",
    "report",
    "import-args",
    "init",
    "completion",
    "data build",
    "data tokenizer",
    "precision translate",
}


def leaves(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command that can be given, as "data verify", and its parser."""
    below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not below:
        yield " ".join(path), parser
    for action in below:
        for name, one in action.choices.items():
            yield from leaves(one, (*path, name))


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has skipped its only steps, and the record of an abnormal end."""
    folder = tmp_path_factory.mktemp("json")
    file = write_run(folder)
    assert train(file, "train.steps=2", "precision.compute=fp16", "precision.loss_scale=1e30") == 3
    beat = Beat(0, "here", "", 1, "1", -1, 1, "step", 1, "", 1, False, ())
    shutil.copytree(folder / "run", folder / "again")
    write_record(
        folder / "run", EndRecord(rank=beat, ranks=1, ended="ended by SIGKILL", culprits=(0,))
    )
    return folder


def in_room(word: str, room: Path) -> list[str]:
    """A word of an example of the table, where it can be run: names of files of the room, and
    sizes of its small run."""
    data = {str(path.with_suffix("")) for path in (room / "data").glob("*.idx")}
    meant = {
        "run.toml": [str(room / "my.toml"), f"train.folder={room / 'new'}"],
        "runs/mine": [str(room / "run")],
        "runs/other": [str(room / "again")],
        "exported": [str(checkpoint(room / "run", 2))],
        "tokens/mine": list(data),
        "my_text/": [str(room / "text.txt")],
        "64,128,256": ["16,32,64", "--steps", "1"],
        "20000": ["500"],
        "bf16": ["fp32"],
    }
    return meant.get(word, [word])


def example_of(command: str) -> str:
    """The example of a command, such as "data verify", in the table of commands."""
    name, _, _ = command.partition(" ")
    examples = COMMANDS[name].examples
    found = [line for line in examples if f"{line} ".startswith(f"{command} ")]
    assert len(found) == 1, (
        f"`megaprec {command}` has {len(found)} examples in COMMANDS of tools/commands/table.py: "
        "give it one, which this test then tries with and without --json"
    )
    return found[0]


def strict(text: str) -> Any:
    """The document, if it is one of strict JSON and is all there is."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


PARSERS = dict(leaves(cli.parser_of_all()))


@pytest.mark.parametrize("command", PARSERS)
def test_every_command_has_an_example_that_its_parser_takes(command: str) -> None:
    args = cli._parse(shlex.split(example_of(command)))
    assert args.command == command.partition(" ")[0]


def test_every_command_prints_one_document_or_no_table() -> None:
    without = {
        name for name, parser in PARSERS.items() if "--json" not in parser._option_string_actions
    }
    assert without <= WITHOUT


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--json", "--ranks=many", "run.toml"],
        ["generate", "folder", "--prompt=x", "--seed", "9" * 30, "--json"],
        ["inspect", "--json", "--nothing", "folder"],
        ["inspect", "", "--json"],
        ["inspect", "--nothing", "folder", "--js"],
    ],
)
def test_a_wrong_argument_is_one_document_too(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["megaprec", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    printed = capsys.readouterr()
    (error,) = json.loads(printed.out)["errors"]
    assert printed.err.endswith(f"error: {error['message']}\n")


def one_error(text: str) -> str:
    """The message of the only error of a document that is all there is."""
    (error,) = strict(text)["errors"]
    return str(error["message"])


def test_a_wrong_environment_is_one_document_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    monkeypatch.setattr("sys.argv", ["megaprec", "keys", "--json"])
    assert cli.main() == 2
    assert "OMP_NUM_THREADS='many'" in one_error(capsys.readouterr().out)


ENDS = {
    "interrupted": (KeyboardInterrupt(), 130),
    "stopped by SIGTERM": (Stopped(signal.SIGTERM), 128 + signal.SIGTERM),
    "rank 1 was ended by SIGKILL": (RanksFailed("rank 1 was ended by SIGKILL", 137), 137),
    "TypeError: a fault": (TypeError("a fault"), None),
}


@pytest.mark.parametrize("message", ENDS)
def test_however_a_command_ends_it_prints_one_document(
    message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error, code = ENDS[message]

    def fails(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(keys, "main", fails)
    if code is None:  # a fault of megaprec has its traceback
        with pytest.raises(type(error)):
            cli.main(["keys", "--json"])
    else:
        assert cli.main(["keys", "--json"]) == code
    assert one_error(capsys.readouterr().out) == message


def test_a_document_says_why_the_ranks_of_a_command_failed(
    room: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damaged = shutil.copytree(checkpoint(room / "run", 2), tmp_path / "damaged")
    shard = damaged / "model-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    words = ["evaluate", str(damaged), "--data", str(room / "text.txt"), "--tensor", "2"]
    assert cli.main([*words, "--json"]) == 2
    printed = capfd.readouterr()
    message = one_error(printed.out)
    assert shard.name in message
    assert printed.err == f"{message}\n"


def test_a_picture_that_cannot_be_written_leaves_one_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    words = ["schedule", "--kind", "1f1b", "--pipeline", "2", "--microbatches", "4", "--json"]
    assert cli.main([*words, "-o", str(tmp_path / "file/picture.svg")]) == 2
    assert str(tmp_path / "file") in one_error(capsys.readouterr().out)


SLOW = ("parity", "prove", "doctor", "calibrate")  # they start ranks
TABLES = [name for name in PARSERS if name not in WITHOUT]


@pytest.mark.cases(8, sample=3)
@pytest.mark.parametrize(
    "command", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in TABLES]
)
@pytest.mark.usefixtures("forked_python")
def test_stdout_is_one_document_with_json_and_none_without(
    command: str, room: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(room)
    example = shlex.split(example_of(command))
    words = [given for word in example for given in in_room(word, room)]
    code = cli.main(words)
    plain = capsys.readouterr().out
    assert cli.main([*words, "--json"]) == code, "the exit code is the same"
    document = strict(capsys.readouterr().out)
    assert isinstance(document, dict) and document
    with pytest.raises(json.JSONDecodeError):
        strict(plain)


def test_a_document_has_the_numbers_of_the_table(
    room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def document(*words: str) -> Any:
        assert cli.main([*words, "--json"]) == 0
        return strict(capsys.readouterr().out)

    run = str(room / "run")
    (compared,) = document("compare", run)["runs"]
    assert compared == {
        "run": "run",
        "steps": 2,
        "skipped": 2,
        "loss": "nan",
        "eval_loss": None,
        "eval_loss_ema": None,
        "eval_step": None,
        "bits_per_byte": None,
    }
    assert [event["step"] for event in document("explain-overflow", run)["events"]] == [1, 2]
    assert document("inspect", run)["model"]["layers"] == 2
    assert document("diff", run, run)["differ"] == 0
    assert document("keys")["keys"]["train.steps"]["required"] is True
    assert document("diagnose", run)["ranks"][0]["ended"] == "ended by SIGKILL"
