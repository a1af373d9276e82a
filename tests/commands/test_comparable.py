"""`megaprec compare` names by what runs differ that makes their numbers mean something else, and
nothing else."""

import json
from pathlib import Path

import pytest

from tests.runs import train, write_run
from tools import cli


def notes(capsys: pytest.CaptureFixture[str], *folders: Path) -> list[str]:
    capsys.readouterr()
    assert cli.main(["compare", *map(str, folders), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["notes"]


def without_last_evaluation(run: Path) -> None:
    """As a run that has not come to its end: its newest step is not evaluated."""
    metrics = run / "metrics.jsonl"
    *earlier, last = [json.loads(line) for line in metrics.read_text().splitlines()]
    last = {key: value for key, value in last.items() if not key.startswith("eval_")}
    metrics.write_text("".join(f"{json.dumps(record)}\n" for record in (*earlier, last)))


@pytest.mark.slow
def test_numbers_of_different_text_tokens_samples_or_steps_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    far = write_run(other)
    text = (other / "text.txt").read_text(encoding="utf-8")
    (other / "text.txt").write_text(text.replace("model", "nodule"), encoding="utf-8")
    base, alike, shorter, part, foreign = (
        tmp_path / name for name in ("base", "alike", "shorter", "part", "foreign")
    )
    common = ("train.steps=2", "train.eval_every=2")
    assert train(file, *common, f"train.folder={base}") == 0
    assert (
        train(file, *common, f"train.folder={alike}", "lr.peak=2e-2", "precision.compute=bf16") == 0
    )
    assert train(file, *common, f"train.folder={shorter}", "train.seq_length=8") == 0
    assert (
        train(
            file,
            "train.steps=3",
            "train.eval_every=2",
            f"train.folder={part}",
            "train.eval_batches=1",
        )
        == 0
    )
    without_last_evaluation(part)
    assert train(far, *common, f"train.folder={foreign}", f"data.cache={foreign}/data") == 0
    assert notes(capsys, base, alike) == []
    assert notes(capsys, base) == []
    samples, held_out = notes(capsys, base, shorter)
    assert (
        samples
        == "losses are of samples of another kind: train.seq_length is 16 in base; 8 in shorter"
    )
    assert held_out.startswith(
        "held-out losses are of different text: the evaluated part is 31 of 31 "
    )
    said = notes(capsys, base, part)
    evaluated = "the evaluated part is 31 of 31 samples in base; 8 of 31 samples in part"
    assert said[0] == f"held-out losses are of different text: {evaluated}"
    assert said[1] == "the runs are at different steps: step is 2 in base; 3 in part"
    assert said[2] == "held-out losses are older than the newest step: after step 2 of 3 in part"
    said = notes(capsys, base, foreign)
    assert said[0].startswith(
        "losses are per token of different tokenizers; bits per byte of `megaprec evaluate`"
    )
    assert said[1].startswith("losses are of different text: data is ")
