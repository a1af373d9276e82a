"""Runs that keep a moving average of their weights: trained, resumed, evaluated, converted."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megaprec.checkpoint.reader import Store
from tests.refusals import shows
from tests.runs import checkpoint, rewind, steps, tensors, train, train_on, write_run
from tools import cli
from tools.analysis.plots.compare_plot import Curve
from tools.convert.formats import open_source
from tools.journal.records import read_metrics

DECAY = 0.5
EMA = f"optimizer.ema={DECAY}"
# the average in each step is that of two checkpoints
EVERY = ("checkpoint.every=1", 'checkpoint.keep="all"')
Refusal = Callable[..., str]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file whose run has been trained for six steps with an average, on two replicas."""
    file = write_run(tmp_path_factory.mktemp("ema"))
    train_on(file, EMA, "train.eval_every=3", *EVERY, data=2)
    return file


@pytest.fixture(scope="module")
def run(file: Path) -> Path:
    return file.parent / "run"


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    def call(*words: object) -> str:
        capsys.readouterr()
        assert cli.main([*map(str, words)]) == 2
        said = capsys.readouterr().err
        assert len(said.splitlines()) <= 2
        return said

    return call


@pytest.mark.slow
def test_each_checkpoint_has_the_average_that_follows_from_the_one_before(run: Path) -> None:
    for step in range(2, 7):
        before = tensors(checkpoint(run, step - 1))
        now = tensors(checkpoint(run, step))
        averages = [key for key in now if key.startswith("ema/")]
        assert len(averages) == sum(key.startswith("weight/") for key in now)
        for key in averages:
            weight = now[key.replace("ema/", "weight/", 1)].double().numpy()
            expected = DECAY * before[key].double().numpy() + (1 - DECAY) * weight
            assert abs(now[key].double().numpy() - expected).max() < 1e-7


@pytest.mark.slow
def test_a_run_with_an_average_trains_as_one_without(file: Path, run: Path, tmp_path: Path) -> None:
    folder = f"train.folder={tmp_path}/run"
    train_on(file, folder, "train.eval_every=3", *EVERY, data=2)
    without = tensors(checkpoint(tmp_path / "run", 6))
    ours = tensors(checkpoint(run, 6))
    assert all(torch.equal(values, ours[key]) for key, values in without.items())
    assert len(without) < len(ours)
    for record, other in zip(steps(run), steps(tmp_path / "run"), strict=True):
        average = record.pop("eval_loss_ema", None)
        assert record == other
        assert (average is None) == ("eval_loss" not in record)
        assert average != record.get("eval_loss") or average is None


@pytest.mark.slow
def test_an_average_is_resumed_in_another_layout(file: Path, run: Path, tmp_path: Path) -> None:
    """To the last bit what the checkpoint has, and then near the whole run's."""
    resumed = rewind(run, tmp_path / "run", 3)
    train_on(file, EMA, f"train.folder={resumed}", tensor=2)
    ours = tensors(checkpoint(resumed, 6))
    for key, values in tensors(checkpoint(run, 6)).items():
        if key.startswith("ema/"):
            torch.testing.assert_close(ours[key], values, rtol=1e-3, atol=1e-4)


def test_to_begin_or_to_give_up_an_average_on_a_resume_is_to_be_allowed(
    file: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resumed = rewind(run, tmp_path / "run", 5)
    folder = f"train.folder={resumed}"
    assert train(file, folder) == 2
    said = capsys.readouterr().err
    assert shows(said, "training.changes_on_resume", flags="--allow ema")
    assert f"optimizer.ema: {DECAY} -> 0.0" in said
    assert train(file, folder, "--allow", "ema") == 0
    assert f"optimizer.ema: {DECAY} -> 0.0" in capsys.readouterr().out
    assert not Store(checkpoint(resumed, 6)).shapes("ema")
    assert train(file, folder, EMA, "train.steps=7") == 2
    assert f"optimizer.ema: 0.0 -> {DECAY}" in capsys.readouterr().err
    assert train(file, folder, EMA, "train.steps=7", "--allow", "ema") == 0
    first = tensors(checkpoint(resumed, 6))
    last = tensors(checkpoint(resumed, 7))
    for key, average in last.items():
        if key.startswith("ema/"):
            name = key.replace("ema/", "weight/", 1)
            torch.testing.assert_close(average, (first[name] + last[name]) / 2)


def test_a_branch_takes_the_average_along(file: Path, run: Path, tmp_path: Path) -> None:
    origin = f"train.branch_from={checkpoint(run, 5)}"
    folder = f"train.folder={tmp_path}/branch"
    assert train(file, origin, folder) == 2
    train_on(file, origin, folder, EMA, data=2)
    ours = tensors(checkpoint(tmp_path / "branch", 6))
    theirs = tensors(checkpoint(run, 6))
    assert all(torch.equal(values, ours[key]) for key, values in theirs.items())


@pytest.mark.slow
def test_the_converted_average_is_the_checkpoints(run: Path, tmp_path: Path) -> None:
    expected = tensors(checkpoint(run, 6))
    for format_name in ("hf", "megaprec", "megatron"):
        out = tmp_path / format_name
        words = ["convert", str(run), str(out), "--ema", "--no-verify", "--to", format_name]
        assert cli.main(words) == 0
        written = open_source(out)
        assert written.kinds == ("weight",)
        for key in written.keys("weight"):
            average = expected[key.replace("weight/", "ema/", 1)]
            assert torch.equal(written.read(key), average), (format_name, key)
    kept = tmp_path / "kept"
    assert cli.main(["convert", str(run), str(kept), "--to", "megaprec"]) == 0
    both = open_source(kept)
    assert all(torch.equal(both.read(key), expected[key]) for key in both.keys("ema"))
    assert len([*both.keys("ema")]) == len([*both.keys("weight")])


def test_commands_with_ema_read_the_average(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = tmp_path / "hf"
    assert cli.main(["convert", str(run), str(exported), "--ema", "--no-verify"]) == 0
    text = str(run.parent / "text.txt")

    def loss(*words: str) -> float:
        capsys.readouterr()
        assert cli.main(["evaluate", *words, "--data", text, "--max-chars=300", "--json"]) == 0
        return json.loads(capsys.readouterr().out)["sets"][0]["loss"]

    average = loss(str(run), "--ema")
    assert average == loss(str(exported))
    assert average != loss(str(run))
    curve = Curve("run", read_metrics(run))
    assert curve.held_out_of_average == read_metrics(run)[-1]["eval_loss_ema"]


def test_an_average_that_is_not_there_is_refused_in_a_line(
    file: Path, run: Path, tmp_path: Path, refusal: Refusal
) -> None:
    folder = tmp_path / "plain"
    train_on(file, f"train.folder={folder}", "train.steps=1")
    said = [
        refusal("evaluate", folder, "--data", run.parent / "text.txt", "--ema"),
        refusal("generate", folder, "--prompt", "the", "--ema"),
        refusal("convert", folder, tmp_path / "out", "--ema"),
    ]
    assert all(shows(line, "convert.no_ema") for line in said)
    assert not (tmp_path / "out").exists()
    exports = ("--export-hf", tmp_path / "hf", "--export-ema")
    said_by_train = refusal("train", file, f"train.folder={tmp_path}/new", *exports)
    assert shows(said_by_train, "command.export_no_ema")
    said_by_train = refusal("train", file, f"train.folder={tmp_path}/new", EMA, "--export-ema")
    assert shows(said_by_train, "command.export_ema_alone")
    assert not (tmp_path / "new").exists()
