"""`megaprec data plan` foretells what a run reads of each data set, and says what is repeated."""

import json
from pathlib import Path

import numpy as np
import pytest

from megaprec.tokens.indexed import IndexedWriter
from tests import runs
from tools import cli
from tools.config.run_file import load_run
from tools.journal.records import read_metrics
from tools.training.corpus import open_corpus
from tools.training.run_warnings import run_warnings

STEPS = 12
BATCH = 8
LENGTH = 4


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two data sets, the first of 9 samples."""
    folder = tmp_path_factory.mktemp("planned")
    path = runs.write_run(folder)
    for name, count in (("small", 40), ("large", 400)):
        with IndexedWriter(folder / name, 300) as writer:
            writer.add_document(np.arange(count) % 300)
    entries = (
        f'{{ source = "{folder}/small", weight = [[0, 1], [48, 0]], name = "few" }}, '
        f'{{ source = "{folder}/large", weight = 1 }}'
    )
    text = path.read_text().replace(f'source = "{folder}/text.txt"', f"blend = [{entries}]")
    text = text.replace("layers = 2", "layers = 2\nvocab = 300")
    text = text.replace("held_out = 0.1", "held_out = 0.0").replace(
        "seq_length = 16", "seq_length = 4"
    )
    path.write_text(text.replace("steps = 6", f"steps = {STEPS}"))
    return path


def warnings(file: Path, *overrides: str) -> list[str]:
    config = load_run(file, overrides)
    return [*run_warnings(config, open_corpus(config), 1, "cpu")]


def test_a_run_reads_what_was_foretold(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["data", "plan", str(file), "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)
    few, large = plan["sets"]
    assert (few["name"], few["samples"], few["available"]) == ("few", 24, 9)
    assert (large["name"], large["samples"], large["available"]) == ("large", 72, 99)
    assert few["epochs"] == 24 / 9 and few["tokens"] == 24 * LENGTH
    assert [(part["begin"], part["end"], part["samples"]) for part in plan["phases"]] == [
        (0, 48, [24, 24]),
        (48, 96, [0, 48]),
    ]
    assert runs.train(file, f"train.folder={tmp_path}/run") == 0
    last = read_metrics(tmp_path / "run")[-1]
    assert last["tokens/few"] == few["tokens"] and last["tokens/large"] == large["tokens"]


def test_shares_along_a_line_are_shown_from_its_beginning_to_its_end(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["data", "plan", str(file), "data.blend_phases=linear"]) == 0
    said = capfd.readouterr().out
    assert "0.5 to 0" in said and "0.5 to 1" in said and "49 to 96" in said


@pytest.mark.parametrize(("steps", "is_told"), [(STEPS, False), (STEPS * 2, True)])
def test_a_data_set_of_a_blend_that_is_repeated_often_is_told(
    steps: int, is_told: bool, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its 9 samples come 24 or 48 times."""
    weight = "[[0, 1], [48, 0]]" if not is_told else "[[0, 1], [96, 0]]"
    folder = file.parent
    sets = f'{{source="{folder}/small", weight={weight}}}, {{source="{folder}/large", weight=1}}'
    given = [str(file), f"data.blend=[{sets}]", f"train.steps={steps}"]
    assert cli.main(["data", "plan", *given]) == 0
    assert ("(above 4)" in capfd.readouterr().out) == is_told
    said = "\n".join(warnings(file, *given[1:]))
    assert (f"{folder}/small is repeated 5.3 times in train.steps = {steps}" in said) == is_told


def test_weights_that_change_after_the_end_are_told(file: Path) -> None:
    for phases, steps, is_told in (("steps", 6, True), ("linear", 6, False), ("steps", 7, False)):
        said = "\n".join(warnings(file, f"train.steps={steps}", f"data.blend_phases={phases}"))
        assert ("changes weights at 48 samples" in said) == is_told


def test_sets_of_two_tokenizers_are_told_as_train_refuses_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = runs.write_run(tmp_path)
    text = tmp_path / "text.txt"
    for name, size in (("first", "330"), ("second", "300")):
        words = ["data", "build", str(text), str(tmp_path / name), "--vocab-size", size]
        assert cli.main(words) == 0
    sets = [f'{{ source = "{tmp_path}/{name}", weight = 1 }}' for name in ("first", "second")]
    given = file.read_text().replace(f'source = "{text}"', f"blend = [{', '.join(sets)}]")
    file.write_text(given)
    keys = [f"data.tokenizer={tmp_path}/first.model", "model.vocab=330"]
    capfd.readouterr()
    assert runs.train(file, *keys) == 2
    refusal = capfd.readouterr().err.strip()
    assert "second" in refusal
    assert cli.main(["data", "plan", str(file), *keys]) == 0
    note = f"megaprec train refuses this run: {refusal}"
    assert f"note       {note}\n" in capfd.readouterr().out
    assert cli.main(["data", "plan", str(file), *keys, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["notes"] == [note]
