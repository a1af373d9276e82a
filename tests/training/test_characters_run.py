"""A run on the characters of its text, from the run file to an exported model."""

import json
import math
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.refusals import shows
from tests.runs import checkpoint, steps, train
from tools import cli

RUN = """
[model]
layers = 2
hidden = 16
heads = 2
ffn = 32
tied = true
[data]
source = "{folder}/text.txt"
tokenizer = "characters"
held_out = 0.2
[train]
steps = 4
global_batch = 4
micro_batch = 2
seq_length = 16
eval_every = 2
threads = 1
folder = "{folder}/run"
[checkpoint]
every = 2
[log]
plot = false
"""
TEXT = "".join(f"On day {n} the fox counted {n * 7} stars; the Öl slept.\n" for n in range(80))


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("characters")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    path = folder / "run.toml"
    path.write_text(RUN.format(folder=folder))
    assert train(path) == 0
    return path


def command(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def test_the_model_has_a_row_for_each_character(run_file: Path) -> None:
    index = json.loads((checkpoint(run_file.parent / "run", 4) / "checkpoint.json").read_text())
    assert index["model"]["vocab"] == len(set(TEXT))


def test_a_run_resumes_as_if_it_had_not_stopped(run_file: Path, tmp_path: Path) -> None:
    folder = f"train.folder={tmp_path}/stopped"
    assert train(run_file, folder, "lr.schedule=constant", "train.steps=2") == 0
    assert train(run_file, folder, "lr.schedule=constant") == 0
    whole = f"train.folder={tmp_path}/whole"
    assert train(run_file, whole, "lr.schedule=constant") == 0
    assert steps(tmp_path / "stopped") == steps(tmp_path / "whole")


def test_a_run_does_not_change_to_another_kind_of_tokenizer(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = f"train.folder={tmp_path}"
    assert train(run_file, folder, "train.steps=2") == 0
    (tmp_path / "data" / "text.model").unlink()
    assert train(run_file, folder, "data.tokenizer=") == 2
    assert shows(capsys.readouterr().err, "training.characters_differ", value='""')


def test_bits_per_byte_count_the_bytes_of_what_is_predicted(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run_file.parent / "other.txt"
    text.write_text("Öl slept.", encoding="utf-8")
    assert command("evaluate", run_file.parent / "run", "--data", text, "--json") == 0
    (scores,) = json.loads(capsys.readouterr().out)["sets"]
    # all but the first character, which takes two bytes
    assert scores["tokens"] == scores["bytes"] == 8
    assert scores["bits_per_byte"] == pytest.approx(scores["loss"] / math.log(2))


@pytest.mark.parametrize("where", ["prompt", "evaluated", "validation"])
def test_a_character_that_the_run_does_not_know_is_one_line(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    run = run_file.parent / "run"
    text = tmp_path / "other.txt"
    text.write_text("On day €", encoding="utf-8")
    if where == "prompt":
        code = command("generate", run, "--prompt", "On €", "--tokens", 2)
    elif where == "evaluated":
        code = command("evaluate", run, "--data", text)
    else:
        sets = f'data.validation=[{{name = "other", source = "{text}"}}]'
        code = train(run_file, sets, f"train.folder={tmp_path}/run")
    error = capsys.readouterr().err
    assert code == 2
    assert shows(error, "data.text_not_encodable") and "'€'" in error
    assert "Traceback" not in error


def test_the_exported_folder_splits_texts_alike(run_file: Path, tmp_path: Path) -> None:
    assert command("convert", run_file.parent / "run", tmp_path / "hf", "--to", "hf") == 0
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    places = {character: place for place, character in enumerate(sorted(set(TEXT)))}
    assert theirs.encode(TEXT, add_special_tokens=False) == [places[each] for each in TEXT]
    assert command("generate", tmp_path / "hf", "--prompt", "On day", "--tokens", 2) == 0


def test_a_plan_counts_the_characters_before_the_run(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("plan", run_file, f"train.folder={tmp_path}/none") == 0
    assert f"the text has {len(set(TEXT))} characters" in capsys.readouterr().out


def test_tokens_without_their_characters_are_refused(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run_file.parent / "text.txt"
    pieces = tmp_path / "pieces"
    assert command("data", "build", text, pieces, "--vocab-size", 290) == 0
    overrides = [f"data.source={pieces}", f"train.folder={tmp_path}/run"]
    assert train(run_file, *overrides) == 2
    assert shows(capsys.readouterr().err, "training.not_of_characters")
    (tmp_path / "pieces.model").unlink()
    assert train(run_file, *overrides) == 2
    assert shows(capsys.readouterr().err, "training.characters_of_tokens", key="data.source")
