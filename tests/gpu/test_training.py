"""A GPU trains what a CPU trains: in float64 to its last digits, in other precisions as far as they
can."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprec.precision.fp8_recipe import FP8Recipe
from parallel.mesh import make_mesh, world
from tests.layouts import Fragment, Run, Trained, train_rank
from tests.models.test_other_device import FAMILIES, LLAMA, LOWERED, WHOLE, run
from tests.runs import checkpoint, steps, train, write_run
from tools.cli import main

PRECISIONS = {
    "fp32": (run("fp32"), 1e-3),
    "bf16": (run("bf16"), 2e-2),
    "fp16": (run("fp16", scaling=LOWERED), 1e-2),
    "split masters": (run(changes={"masters": "split"}), 2e-2),
    "FP8": (run(model={**LLAMA, **WHOLE}, changes={"fp8": FP8Recipe("current")}), 5e-2),
}


def trained(device: str, one: Run) -> Trained:
    """The run on this device, by one process."""
    with world(device):
        return train_rank(make_mesh(device=device), [one])[0]


def flat(parts: list[Fragment]) -> torch.Tensor:
    return torch.cat([part.values.double().cpu() for part in parts])


def near(ours: Trained, expected: Trained, tolerance: float) -> None:
    """Outcomes are the same; losses, gradients of the first step and weights differ by no more than
    `tolerance`."""
    assert [one.outcome for one in ours.reports] == [one.outcome for one in expected.reports]
    for one, other in zip(ours.reports, expected.reports, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=tolerance)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=tolerance)
    for a, b in ((ours.grads[0], expected.grads[0]), (ours.after, expected.after)):
        assert float((flat(a) - flat(b)).norm()) <= tolerance * float(flat(b).norm())
    assert [part.name for part in ours.before] == [part.name for part in expected.before]
    assert torch.equal(flat(ours.before), flat(expected.before)), (
        "initial weights depend on the device"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_trains_in_float64_as_on_a_cpu(family: str, device: str) -> None:
    one = run("fp64", FAMILIES[family])
    near(trained(device, one), trained("cpu", one), 1e-9)


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_precision_trains_as_on_a_cpu_as_far_as_it_can(name: str, device: str) -> None:
    one, tolerance = PRECISIONS[name]
    one = replace(one, model={**one.model, "dropout": 0.0, "attention_dropout": 0.0})
    near(trained(device, one), trained("cpu", one), tolerance)


def test_an_overflow_is_skipped_and_named_as_on_a_cpu(device: str) -> None:
    one = run("fp16", plant=(0, 1, float("nan")), scaling=LOWERED)
    ours = trained(device, one)
    expected = trained("cpu", one)
    outcomes = [report.outcome for report in ours.reports]
    assert (
        outcomes
        == [report.outcome for report in expected.reports]
        == ["applied", "skipped_overflow", "applied"]
    )
    assert ours.reports[1].offenders[0].name == expected.reports[1].offenders[0].name
    assert ours.scaler == expected.scaler


@pytest.mark.slow
def test_a_checkpoint_goes_from_one_device_to_the_other_and_a_text_is_made_of_it(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path)
    others: list[Any] = ["model.dropout=0.0", "train.steps=6", "precision.compute=fp32"]
    losses = {}
    for name, first, then in (
        ("whole", "cpu", "cpu"),
        ("moved", device, "cpu"),
        ("back", "cpu", device),
    ):
        folder = tmp_path / name
        assert (
            train(file, *others, "train.steps=3", f"train.folder={folder}", f"train.device={first}")
            == 0
        )
        assert train(file, *others, f"train.folder={folder}", f"train.device={then}") == 0
        losses[name] = [step["loss"] for step in steps(folder)]
        assert checkpoint(folder, 6).is_dir()
    assert len(losses["whole"]) == 6
    assert losses["moved"] == pytest.approx(losses["whole"], rel=1e-4)
    assert losses["back"] == pytest.approx(losses["whole"], rel=1e-4)
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "moved"), "--prompt", "the", "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("the")
