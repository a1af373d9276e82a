"""Commands that repeat steps draw the same random windows, and name each by its own tokens: `prove`,
`bisect`, `explain-spike` and `explain-overflow`."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runs import train, write_run
from tests.spikes import BATCH, SEQ, garbage, write_spiky_run
from tools import cli
from tools.config.run_file import RunConfig, load_run
from tools.journal.records import read_events
from tools.training.corpus import open_corpus

RANDOM = "data.windows=random"
SPIKY = (RANDOM, "data.shuffle=true")
SPIKY_STEPS = 46
STEP = 44  # whose window is garbage
PLACE = 4  # of a window that lies in documents that no step before has drawn


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def said_by(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = cli.main([*map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def drawn(config: RunConfig, step: int) -> list[int]:
    """The first token of each window of a step."""
    batch = open_corpus(config).train.batch((step - 1) * BATCH, BATCH)
    return batch.ids.tolist()


@pytest.mark.slow
def test_a_run_of_random_windows_is_proven(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, proof = said_by(capsys, "prove", file, RANDOM, "--steps", 2)
    rows = {row["row"]: row["verdict"] for row in proof["rows"]}
    assert (code, proof["verdict"]) == (0, "proven")
    for name in ("again", "resumed", "loaded elsewhere", "broken resume"):
        assert rows[name] == "proven"


@pytest.mark.slow
def test_runs_of_random_windows_agree_in_steps_taken_again_and_part_where_one_draws_others(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {"a": [RANDOM], "b": [RANDOM], "seed": [RANDOM, "train.seed=5"], "tiled": []}
    for name, words in runs.items():
        assert train(file, f"train.folder={tmp_path / name}", "log.digests=1", *words) == 0
    code, said = said_by(capsys, "bisect", tmp_path / "a", tmp_path / "b", "--replay")
    assert (code, said["verdict"]) == (0, "they agree")
    assert said["replay"]["verdict"] == "proven"
    # windows that are cut otherwise are other samples, of the same weights
    code, said = said_by(capsys, "bisect", tmp_path / "a", tmp_path / "tiled")
    assert (code, said["verdict"]) == (1, "they part")
    assert said["replay"]["first"]["phase"] == "data"
    code, said = said_by(capsys, "bisect", tmp_path / "a", tmp_path / "seed")
    assert (code, said["verdict"]) == (1, "they part")


@pytest.mark.slow
def test_a_spike_of_a_random_window_is_explained_by_the_documents_that_it_lies_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_spiky_run(tmp_path, SPIKY_STEPS, {})
    # what is drawn depends on how many tokens there are, not on which
    first = drawn(load_run(file, SPIKY), STEP)[PLACE]
    corrupt = {first // SEQ, (first + SEQ) // SEQ}
    planted = {
        number // BATCH + 1: (garbage, [each % BATCH for each in corrupt]) for number in corrupt
    }
    assert len(planted) == 1, "both documents are of one step in the file"
    file = write_spiky_run(tmp_path, SPIKY_STEPS, planted)
    assert train(file, *SPIKY) == 0
    code, said = said_by(capsys, "explain-spike", tmp_path / "run", "--step", STEP)
    (explained,) = said["explained"]
    assert (code, explained["cause"]) == (0, "data"), explained
    outliers = {sample["position"]: sample for sample in explained["replay"]["outliers"]}
    named = outliers[PLACE]
    assert named["id"] == named["first_token"] == first
    assert {document["number"] for document in named["documents"]} <= corrupt


@pytest.mark.slow
def test_an_overflow_in_random_windows_names_them_by_their_first_token_and_text(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    words = (RANDOM, "precision.compute=fp16", "precision.initial_scale=1e9", "train.steps=4")
    _ = train(file, *words)
    step = read_events(folder)[-1]["step"]
    capsys.readouterr()
    assert cli.main(["explain-overflow", str(folder), "--replay"]) == 0
    shown = capsys.readouterr().out
    samples = re.findall(r"^│ +(\d+)  (.+?) *│$", shown, re.M)
    assert samples
    config = load_run(file, words)
    corpus = open_corpus(config)
    assert corpus.tokenizer is not None
    (dataset,) = corpus.datasets
    stream = np.fromfile(f"{dataset.prefix}.bin", "<u2")
    ids = drawn(config, step)
    for number, text in samples:
        assert int(number) in ids
        window = stream[int(number) : int(number) + SEQ].tolist()
        beginning = " ".join(corpus.tokenizer.decode(window).split())
        assert beginning.startswith(text.removesuffix("…").strip())
