"""Every command that prints a table prints one JSON document instead if `--json` is given, and
nothing else."""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parallel.hangs.heartbeat import Beat
from tests.runs import checkpoint, train, write_run
from tools import cli
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


def leaves(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Every command that can be given, as "data verify"."""
    below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not below:
        yield " ".join(path)
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


def examples(room: Path) -> dict[str, list[str]]:
    """A small use of each command that prints a table."""
    run = str(room / "run")
    file = str(room / "my.toml")
    (tokens,) = {str(path.with_suffix("")) for path in (room / "data").glob("*.idx")}
    return {
        "inspect": [run],
        "diff": [run, str(checkpoint(room / "run", 2))],
        "compare": [run],
        "schedule": ["--kind", "1f1b", "--pipeline", "2", "--microbatches", "4"],
        "evaluate": [run, "--data", str(room / "text.txt"), "--max-chars", "500"],
        "fp8-advice": [file],
        "plan": [file, "--tflops", "1"],
        "precision show": [file],
        "keys": [],
        "data inspect": [tokens],
        "data verify": [tokens],
        "explain-overflow": [run],
        "explain-spike": [run],
        "diagnose": [run],
        "doctor": ["--no-parity"],
        "calibrate": ["--dtype", "fp32"],
        "parity": [file, "train.folder=p", "--layouts", "dp=2", "--steps", "1"],
        "prove": [file, "train.folder=p", "--layout", "dp=2", "--steps", "2"],
        "bisect": [run, str(room / "again")],
        "mup-check": [file, "--widths", "16,32,64", "--steps", "1"],
    }


def strict(text: str) -> Any:
    """The document, if it is one of strict JSON and is all there is."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_every_command_has_an_example_here_or_prints_no_table(room: Path) -> None:
    assert sorted(leaves(cli.parser_of_all())) == sorted({*examples(room), *WITHOUT})


SLOW = ("parity", "prove", "doctor", "calibrate")  # they start ranks
TABLES = [name for name in leaves(cli.parser_of_all()) if name not in WITHOUT]


@pytest.mark.cases(8, sample=3)
@pytest.mark.parametrize(
    "command", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in TABLES]
)
@pytest.mark.usefixtures("forked_python")
def test_stdout_is_one_document_with_json_and_none_without(
    command: str, room: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(room)
    words = [*command.split(), *examples(room)[command]]
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
