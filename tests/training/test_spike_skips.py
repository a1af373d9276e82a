"""A run notes spikes or skips them: what a skip leaves as it is, in every layout, over a resume, and
when there are too many."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaprec.diagnose.spike_monitor import SpikeMonitor
from megaprec.optim.decision.step_limits import NO_LIMITS, StepLimits
from tests.refusals import shows
from tests.runs import checkpoint, edit_index, steps, tensors, train, train_on, write_run
from tests.spikes import BATCH, copied, garbage, write_spiky_run
from tools.journal.records import read_events
from tools.training.trainer import Trainer

SAVED = 40
SKIPPED = [44, 49, 50, 51]
PLANTED = {
    44: (garbage, (2, 5)),
    **dict.fromkeys((49, 50, 51), (garbage, (0, 3))),
}
SKIP = "train.on_spike=skip"


def outcomes(folder: Path) -> dict[int, str]:
    return {record["step"]: record["outcome"] for record in steps(folder)}


def skipped(folder: Path) -> list[int]:
    return [step for step, outcome in outcomes(folder).items() if outcome == "skipped_spike"]


def same_state(one: Path, other: Path) -> bool:
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[key], theirs[key]) for key in ours)


def fifth_is_a_spike(self: SpikeMonitor, tokens: int) -> StepLimits:
    """In the place of the rule: the step after four applied ones is above its limit."""
    is_fifth = len(self.state_dict()["losses"]) == 4 and not self.in_a_row
    return StepLimits(loss=0.5) if is_fifth else NO_LIMITS


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(SpikeMonitor, "limits", fifth_is_a_spike)
    return write_run(tmp_path)


def test_a_spike_that_is_skipped_uses_up_its_samples_and_changes_nothing_else(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ("train.steps=5", "lr.schedule=linear", "checkpoint.every=1", "checkpoint.keep=9")
    assert train(file, SKIP, *keys) == 0
    said = capsys.readouterr().out
    folder = tmp_path / "run"
    *_, before, spike = steps(folder)
    assert (spike["step"], spike["outcome"], spike["skipped_total"]) == (5, "skipped_spike", 1)
    assert spike["learned_tokens"] == before["learned_tokens"] < spike["tokens"]
    assert same_state(checkpoint(folder, 4), checkpoint(folder, 5))
    (event,) = read_events(folder, "spike")
    assert (event["step"], event["first_sample"], event["num_samples"]) == (5, 32, 8)
    assert (event["outcome"], event["loss_limit"], event["in_a_row"]) == ("skipped_spike", 0.5, 1)
    assert event["said"] == spike["spike"]
    assert "not applied  skipped_spike (1 so far)" in said
    assert "skipped    1 of 5 steps" in said
    assert read_events(folder) == [], "a spike is no overflow"


@pytest.mark.slow
def test_a_spike_that_is_noted_is_applied_as_if_nobody_had_looked(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for on_spike in ("note", "ignore"):
        run = f"train.folder={tmp_path / on_spike}"
        assert train(file, f"train.on_spike={on_spike}", run) == 0
        line = "spike: loss" in capsys.readouterr().out
        assert line == (on_spike == "note")
    noted, ignored = (steps(tmp_path / name) for name in ("note", "ignore"))
    assert [{**record, "spike": ""} for record in noted] == [
        {**record, "spike": ""} for record in ignored
    ]
    assert same_state(checkpoint(tmp_path / "note", 6), checkpoint(tmp_path / "ignore", 6))
    assert [event["outcome"] for event in read_events(tmp_path / "note", "spike")] == ["applied"]
    assert not read_events(tmp_path / "ignore", "spike")


@pytest.mark.parametrize(("on_spike", "told"), [("note", [5]), ("skip", [5, 6, 7])])
def test_of_spikes_in_a_row_that_are_applied_the_first_is_told_and_of_skipped_ones_each(
    on_spike: str, told: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spikes_from_the_fifth_on(self: SpikeMonitor, tokens: int) -> StepLimits:
        has_four = len(self.state_dict()["losses"]) >= 4
        return StepLimits(loss=0.5) if has_four else NO_LIMITS

    monkeypatch.setattr(SpikeMonitor, "limits", spikes_from_the_fifth_on)
    file = write_run(tmp_path)
    assert train(file, f"train.on_spike={on_spike}", "train.steps=7", "model.layers=1") == 0
    assert [event["step"] for event in read_events(tmp_path / "run", "spike")] == told


def test_a_checkpoint_without_the_rules_state_begins_with_an_empty_one_and_a_damaged_one_is_refused(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(file, "train.steps=3") == 0
    folder = tmp_path / "run"
    newest = checkpoint(folder, 3)
    saved = json.loads((newest / "checkpoint.json").read_text())["spikes"]
    assert saved["losses"] == [record["loss"] for record in steps(folder)]
    assert saved["norms"] == [record["grad_norm"] for record in steps(folder)]
    assert saved["tokens"] == [128] * 3
    damages: list[dict[str, Any]] = [
        {"losses": [1.0]},
        {"norms": ["a", 1.0, 1.0]},
        {"in_a_row": -1},
    ]
    for damage in damages:
        edit_index(newest, lambda index, change=damage: index["spikes"].update(saved | change))
        capsys.readouterr()
        assert train(file) == 2
        assert shows(capsys.readouterr().err, "convert.record_damaged", key="spikes")
    edit_index(newest, lambda index: index.pop("spikes"))
    assert train(file) == 0
    saved = json.loads((checkpoint(folder, 6) / "checkpoint.json").read_text())["spikes"]
    assert len(saved["losses"]) == 3


@pytest.fixture(scope="module")
def spiky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with planted spikes and canonical numerics, which has taken the steps until SAVED."""
    file = write_spiky_run(tmp_path_factory.mktemp("spiky"), 60, PLANTED)
    text = file.read_text().replace("[train]", '[train]\non_spike = "skip"\nnumerics = "canonical"')
    file.write_text(text)
    assert train(file, f"train.steps={SAVED}") == 0
    return file


@pytest.mark.cases(0, sample=2)
@pytest.mark.parametrize(
    "layout",
    [
        {"data": 2},
        {"tensor": 2},
        {"pipeline": 2},
        {"data": 2, "pipeline": 2},
        {"data": 2, "zero": "false"},
    ],
    ids=str,
)
def test_the_same_steps_are_skipped_with_the_same_bits_in_every_layout_and_over_a_resume(
    layout: dict[str, Any], spiky: Path, tmp_path: Path
) -> None:
    """Skips are decided before the resume and after it, from a window that was saved."""
    clean = spiky.parent / "run"
    whole = copied(clean, tmp_path / "whole", SAVED)
    assert train(spiky, f"train.folder={whole}", "train.steps=51") == 0
    assert skipped(whole) == SKIPPED
    more = {f"parallel.zero={layout['zero']}"} if "zero" in layout else set()
    ranks = {axis: size for axis, size in layout.items() if axis != "zero"}
    parts = copied(clean, tmp_path / "parts", SAVED)
    train_on(spiky, f"train.folder={parts}", "train.steps=46", *more, **ranks)
    assert train(spiky, f"train.folder={parts}", "train.steps=51") == 0
    assert skipped(parts) == SKIPPED
    assert [r | {"stage_zeros": 0} for r in steps(parts)] == [
        r | {"stage_zeros": 0} for r in steps(whole)
    ]
    assert same_state(checkpoint(whole, 51), checkpoint(parts, 51))


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    "layout", [{"data": 2}, {"tensor": 2, "pipeline": 2}, {"data": 2, "tensor": 2}], ids=str
)
def test_the_same_steps_are_skipped_with_fast_numerics(
    layout: dict[str, int], spiky: Path, tmp_path: Path
) -> None:
    file = tmp_path / "fast.toml"
    file.write_text(spiky.read_text().replace('numerics = "canonical"', ""))
    folder = copied(spiky.parent / "run", tmp_path / "run", SAVED)
    train_on(file, f"train.folder={folder}", "train.steps=51", **layout)
    assert skipped(folder) == SKIPPED


@pytest.mark.slow
def test_too_many_spikes_in_a_row_stop_the_run_which_goes_on_when_they_are_noted(
    spiky: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(spiky.parent / "run", tmp_path / "run", SAVED)
    keys = (f"train.folder={folder}", "train.spike_patience=3")
    capsys.readouterr()
    assert train(spiky, *keys) == 3
    assert "stopped after step 51, state saved: 3 spikes in a row" in capsys.readouterr().err
    assert skipped(folder) == SKIPPED
    assert [event["in_a_row"] for event in read_events(folder, "spike")] == [1, 1, 2, 3]
    assert train(spiky, *keys, "train.on_spike=note", "train.steps=54") == 0
    assert outcomes(folder)[54] == "applied"
    assert len(steps(folder)) * BATCH == 54 * BATCH


@pytest.mark.parametrize("on_spike", ["skip", "warn"])
@pytest.mark.parametrize("spikes", [True, False])
@pytest.mark.parametrize("scales", [True, False])
def test_spikes_end_a_run_that_skips_them_and_a_hopeless_loss_scale_any(
    on_spike: str, spikes: bool, scales: bool
) -> None:
    run: Any = SimpleNamespace(
        _nonfinite_step=None,
        config=SimpleNamespace(train=SimpleNamespace(on_spike=on_spike)),
        spike_monitor=SimpleNamespace(hopeless=spikes, advice=lambda: "of spikes"),
        monitor=SimpleNamespace(hopeless=scales, advice=lambda: "of scales"),
    )
    wanted = "of scales" if scales else ""
    if on_spike == "skip" and spikes:
        wanted = "of spikes"
    assert Trainer._describe_divergence(run) == wanted
