"""Commands that repeat steps read the same packed samples, and name the documents that lie in them:
`prove` and `explain-spike`."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runs import train, write_run
from tests.spikes import BATCH, SEQ, garbage, write_spiky_run
from tools import cli
from tools.config.run_file import load_run
from tools.training.corpus import open_corpus

PACKED = ("data.pack=best_fit", "data.reset_attention_mask=true")
LENGTH = 2 * SEQ + 3  # two documents and padding
STEPS = 46
STEP = 44  # of which a sample holds garbage
PLACE = 4


def said_by(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = cli.main([*map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_run_of_packed_samples_is_proven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path)
    code, proof = said_by(capsys, "prove", file, *PACKED, "--steps", 2)
    rows = {row["row"]: row["verdict"] for row in proof["rows"]}
    assert (code, proof["verdict"]) == (0, "proven")
    for name in ("again", "resumed", "loaded elsewhere", "broken resume"):
        assert rows[name] == "proven"


@pytest.mark.slow
def test_a_spike_of_a_packed_sample_is_explained_by_its_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # samples in the order of the file hold two neighbouring documents each
    number = 2 * ((STEP - 1) * BATCH + PLACE)
    corrupt = number, number + 1
    planted = {number // BATCH + 1: (garbage, [each % BATCH for each in corrupt])}
    file = write_spiky_run(tmp_path, 2 * STEPS, planted)
    words = (*PACKED, f"train.seq_length={LENGTH}", f"train.steps={STEPS}")
    # both documents of one sample are garbage
    location = open_corpus(load_run(file, words)).train.location_of((STEP - 1) * BATCH + PLACE)
    assert [*dict.fromkeys(location.documents().tolist())] == [*corrupt]
    assert train(file, *words) == 0
    code, said = said_by(capsys, "explain-spike", tmp_path / "run", "--step", STEP)
    (explained,) = said["explained"]
    assert (code, explained["cause"]) == (0, "data"), explained
    outliers = {sample["position"]: sample for sample in explained["replay"]["outliers"]}
    named = outliers[PLACE]
    assert named["id"] == (STEP - 1) * BATCH + PLACE
    assert named["first_token"] == corrupt[0] * SEQ
    # padding is no document
    assert {document["number"] for document in named["documents"]} == {*corrupt}
