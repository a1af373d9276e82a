"""Planted spikes are explained by their cause: a corrupt document, a learning rate that was raised,
a bad batch, memory that is overwritten; and a run without a spike says so."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import shows
from tests.runs import train
from tests.spikes import (
    BATCH,
    SEQ,
    Planted,
    backwards,
    copied,
    garbage,
    repeated,
    train_with_fault,
    train_with_rate,
    write_spiky_run,
)
from tools import cli
from tools.verify.replay import spike_replay

SAVED = 40  # the step of the clean checkpoint from which planted runs go on
STEPS = 51
ALL = tuple(range(BATCH))
# what is planted in each step -> the cause, and the places of the samples that are named
PLANTED: dict[str, tuple[Planted, dict[int, tuple[str, list[int]]]]] = {
    "documents": (
        {44: (garbage, (2, 5)), 49: (repeated, (2,))},
        {44: ("data", [2, 5]), 49: ("data", [2])},
    ),
    "batches": (
        {44: (garbage, (0, 1, 3, 4, 6, 7)), 49: (backwards, ALL)},
        {44: ("batch", []), 49: ("batch", [])},
    ),
}
Train = Callable[..., int]
# how a run goes on after SAVED -> the cause of its first spike
FAULTS: dict[str, tuple[Train, str]] = {
    "a rate 30 times as high": (
        lambda file, *keys: train_with_rate(file, 30.0, range(42, 45), *keys),
        "learning rate",
    ),
    "a rate 60 times as high": (
        lambda file, *keys: train_with_rate(file, 60.0, range(41, 44), *keys),
        "learning rate",
    ),
    "a word of a weight": (
        lambda file, *keys: train_with_fault(file, "weight", 43, *keys),
        "hardware",
    ),
    "a word of a weight, one step before": (
        lambda file, *keys: train_with_fault(file, "weight", 42, *keys),
        "hardware",
    ),
    "a word of a gradient": (
        lambda file, *keys: train_with_fault(file, "gradient", 43, *keys),
        "hardware",
    ),
}


def explain(
    capsys: pytest.CaptureFixture[str], folder: Path, *more: str
) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = cli.main(["explain-spike", str(folder), "--json", *more])
    return code, json.loads(capsys.readouterr().out)


def verdicts(explained: dict[str, Any]) -> dict[str, str]:
    return {cause["name"]: cause["verdict"] for cause in explained["causes"]}


def write_clean_run(folder: Path, name: str) -> Path:
    """A run with planted data, which has taken the steps until SAVED."""
    file = write_spiky_run(folder, STEPS, PLANTED[name][0])
    assert train(file, f"train.steps={SAVED}") == 0
    return file


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clean_run(tmp_path_factory.mktemp("spikes"), "documents")


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("name", PLANTED)
def test_planted_documents_and_batches_are_the_causes_and_are_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, expected = PLANTED[name]
    file = write_clean_run(tmp_path, name)
    assert train(file) == 0
    folder = tmp_path / "run"
    code, document = explain(capsys, folder, "--last", "9")
    assert code == 0
    assert [spike["step"] for spike in document["spikes"]] == [*expected]
    assert document["judged"] == STEPS - 32
    for explained, (cause, places) in zip(document["explained"], expected.values(), strict=True):
        assert explained["cause"] == cause, explained
        assert sum(verdict == "proven" for verdict in verdicts(explained).values()) == 1
        replay = explained["replay"]
        assert replay["loss"] == explained["loss"]
        assert replay["norm"] == explained["grad_norm"]
        if cause == "data":
            named = replay["outliers"]
            assert sorted(sample["position"] for sample in named) == places
            first = BATCH * (explained["step"] - 1)
            assert {sample["id"] - first for sample in named} == {*places}
            # documents are as long as samples; a target is one token later
            assert all(sample["documents"][0]["number"] == sample["id"] for sample in named)
            assert replay["without_outliers"]["loss"] < explained["loss_limit"]
    # the run itself has noted the same steps
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "spike" in record] == [*expected]


@pytest.mark.cases(0, sample=2)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_the_cause(
    name: str, run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go_on, cause = FAULTS[name]
    folder = copied(run_file.parent / "run", tmp_path / "run", SAVED)
    # before the first spike that is planted in the data
    assert go_on(run_file, f"train.folder={folder}", "train.steps=43") == 0
    code, document = explain(capsys, folder)
    assert code == 0
    assert document["spikes"], "the fault makes no spike"
    explained = document["explained"][0]
    assert explained["cause"] == cause, explained
    assert list(verdicts(explained).values()).count("proven") == 1
    # of what was not computed from these weights nothing is left to see
    assert bool(explained["replay"]["gradients"]) == (cause != "hardware")


@pytest.mark.slow
def test_the_words_name_the_cause_and_the_sample(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(run_file.parent / "run", tmp_path / "run", SAVED)
    assert train(run_file, f"train.folder={folder}", "train.steps=44") == 0
    capsys.readouterr()
    assert cli.main(["explain-spike", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "step 44: the data, 2 samples" in said
    assert f"{43 * BATCH + 2}" in said
    assert f"{43 * BATCH + 5}" in said
    assert "1 spike in 12 steps judged" in said
    # repeated on the same device, the numbers are the recorded ones
    assert "repeated from step_00000040, 3 steps before it" in said
    # without checkpoints all steps must be repeated, which is said and not done
    shutil.rmtree(folder / "checkpoints")
    _, document = explain(capsys, folder, "--repeat", "10")
    (explained,) = document["explained"]
    assert set(verdicts(explained).values()) == {"not tried"}
    assert explained["cause"] == "not known"
    assert "--repeat 43" in explained["causes"][0]["evidence"]


def write_records(folder: Path, losses: list[float], **fields: Any) -> Path:
    lines = [
        {
            "step": step,
            "outcome": "applied" if loss < float("inf") else "skipped_overflow",
            "loss": loss if loss < float("inf") else "inf",
            "grad_norm": 1.0 if loss < float("inf") else "inf",
            "loss_scale": 1.0,
            "lr": 0.1,
            "tokens_per_s": 100.0,
            "seconds": 1.0,
            **fields,
        }
        for step, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def test_spikes_are_found_in_the_records_alone_and_causes_are_not_tried_without_a_run_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = [2.0] * 40
    losses[35] = losses[36] = 3.0
    losses[20] = float("inf")
    folder = write_records(tmp_path, losses)
    code, document = explain(capsys, folder)
    assert code == 0
    (spike,) = document["spikes"]
    assert (spike["step"], spike["steps"], spike["loss"]) == (36, 2, 3.0)
    assert 2.0 < spike["loss_limit"] < 3.0
    (explained,) = document["explained"]
    assert set(verdicts(explained).values()) == {"not tried"}
    assert explained["cause"] == "not known"
    evidence = explained["causes"][0]["evidence"]
    assert shows(evidence, "command.replay_no_run_file", folder=folder)
    assert "explain-overflow" in document["notes"][0], "steps that are not finite are not here"
    assert explain(capsys, folder, "--list")[1]["explained"] == []
    (ordinary,) = explain(capsys, folder, "--step", "38")[1]["explained"]
    assert set(verdicts(ordinary).values()) == {"not tried"}


@pytest.mark.parametrize(
    ("options", "code", "fields"),
    [
        (["--step", "21"], "command.spike_not_finite", {"step": 21}),
        (["--step", "99"], "command.spike_no_record", {"step": 99}),
        (["--last", "0"], "command.last", {"last": 0}),
        (["--repeat", "0"], "command.repeat", {"repeat": 0}),
    ],
)
def test_what_cannot_be_explained_is_refused(
    options: list[str],
    code: str,
    fields: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    losses = [2.0] * 40
    losses[20] = float("inf")
    folder = write_records(tmp_path, losses)
    assert cli.main(["explain-spike", str(folder), *options]) == 2
    fields = fields if "step" not in fields else {**fields, "folder": folder}
    assert shows(capsys.readouterr().err, code, **fields)


def test_a_run_without_a_spike_and_one_that_is_too_short_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain-spike", str(write_records(tmp_path, [2.0] * 40))]) == 0
    assert "no spike in 8 steps judged" in capsys.readouterr().out
    assert cli.main(["explain-spike", str(write_records(tmp_path, [2.0] * 9))]) == 0
    assert "no step is judged" in capsys.readouterr().out


@pytest.mark.slow
def test_of_a_step_whose_samples_are_in_pieces_the_samples_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each sample is two sequences, of which either may stand out."""
    planted, expected = PLANTED["documents"]
    file = write_spiky_run(tmp_path, STEPS, planted)
    assert train(file, f"train.seq_schedule=[[0,{SEQ // 2}],[1000000,{SEQ}]]") == 0
    code, document = explain(capsys, tmp_path / "run", "--last", "9")
    assert code == 0
    assert [spike["step"] for spike in document["spikes"]] == [*expected]
    for explained, (cause, places) in zip(document["explained"], expected.values(), strict=True):
        assert explained["cause"] == cause, explained
        named = explained["replay"]["outliers"]
        assert named and {sample["position"] // 2 for sample in named} <= {*places}
        first = BATCH * (explained["step"] - 1)
        for sample in named:
            assert sample["id"] - first == sample["position"] // 2
            assert sample["documents"][0]["number"] == sample["id"]


@pytest.mark.parametrize(
    ("repeated", "recorded", "is_other"),
    [
        (1.001, 1.0, False),
        (1.2, 1.0, True),
        (math.nan, 1.0, True),
        (1.0, math.inf, True),
        (math.nan, math.nan, False),  # as the loss of a step without a token that counts
        (math.inf, math.nan, False),
    ],
)
def test_a_step_departs_from_its_record_where_only_one_is_finite_or_both_are_apart(
    repeated: float, recorded: float, is_other: bool
) -> None:
    assert spike_replay._is_other(repeated, recorded, 0.02) == is_other
