"""Runs with optimizer.frozen: frozen weights stay as they are in any layout, have no state, and go
where others go."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megaprec.checkpoint.reader import Store
from models.decoder.cutting import cuts
from models.estimate.state import state_bytes
from models.parameter_counts import layer_parameters
from tests.refusals import shows
from tests.runs import checkpoint, tensors, train, train_on, write_run
from tools import cli
from tools.config.rules.derived import make_rule
from tools.config.run_file import load_run
from tools.config.sharding import sharding_of

FROZEN = 'optimizer.frozen=["embedding.*", "layers.0.*"]'
EXACT = ["precision.compute=fp64", "model.dropout=0", "optimizer.ema=0.5"]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("frozen"))


@pytest.fixture(scope="module")
def whole(run_file: Path) -> Path:
    """The folder of a run of one process."""
    folder = run_file.parent / "whole"
    assert train(run_file, *EXACT, FROZEN, f"train.folder={folder}") == 0
    return folder


def is_frozen(name: str) -> bool:
    return name.startswith(("embedding.", "layers.0."))


def command(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def test_frozen_weights_stay_and_have_no_state(whole: Path) -> None:
    first = tensors(checkpoint(whole, 3))
    last = tensors(checkpoint(whole, 6))
    for key, values in last.items():
        kind, _, name = key.partition("/")
        if is_frozen(name):
            assert kind == "weight"
            assert torch.equal(first[key], values)
        elif kind == "weight":
            assert not torch.equal(first[key], values)
            assert {f"exp_avg/{name}", f"exp_avg_sq/{name}", f"ema/{name}"} <= last.keys()


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"tensor": 2}, {"pipeline": 2}, {"data": 2}])
def test_a_checkpoint_goes_on_in_another_layout(
    run_file: Path, whole: Path, tmp_path: Path, other: dict[str, int]
) -> None:
    parts = [*EXACT, FROZEN, f"train.folder={tmp_path}/parts"]
    train_on(run_file, *parts, "train.steps=3", "parallel.zero=2", data=2)
    folder = train_on(run_file, *parts, **other)
    ours, theirs = tensors(checkpoint(folder, 6)), tensors(checkpoint(whole, 6))
    assert ours.keys() == theirs.keys()
    for key, values in theirs.items():
        torch.testing.assert_close(ours[key], values, rtol=1e-8, atol=1e-11, msg=key)


@pytest.mark.parametrize(
    ("frozen", "code"),
    [
        ('["layer.0.*"]', "precision.pattern_unmatched"),
        ('["*"]', "config.nothing_trained"),
        ('["*.query.weight"]', "model.frozen_in_part"),
    ],
)
def test_patterns_that_cannot_be_are_refused_by_name(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], frozen: str, code: str
) -> None:
    assert train(run_file, f"optimizer.frozen={frozen}", f"train.folder={tmp_path}") == 2
    assert shows(capsys.readouterr().err, code)


def test_what_was_frozen_cannot_be_trained_later_but_what_was_trained_can_be_frozen(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = f"train.folder={tmp_path}"
    assert train(run_file, FROZEN, folder, "train.steps=2", "checkpoint.keep=all") == 0
    assert train(run_file, folder, "train.steps=3") == 2
    assert shows(capsys.readouterr().err, "checkpoint.state_of_frozen_missing")
    more = 'optimizer.frozen=["embedding.*", "layers.*"]'
    assert train(run_file, more, folder, "train.steps=4", "checkpoint.keep=all") == 0
    assert "optimizer.frozen" in capsys.readouterr().out
    before, after = (tensors(checkpoint(tmp_path, step)) for step in (2, 4))
    name = "weight/layers.1.attention.output.weight"
    assert torch.equal(before[name], after[name])


def test_exports_have_all_weights(whole: Path, tmp_path: Path) -> None:
    weights = tensors(checkpoint(whole, 6))
    assert command("convert", whole, tmp_path / "hf", "--to", "hf", "--no-verify") == 0
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    embedding = exported["model.embed_tokens.weight"]
    assert torch.equal(embedding, weights["weight/embedding.weight"])
    assert command("convert", whole, tmp_path / "ours", "--to", "megaprec") == 0
    index = Store(tmp_path / "ours").index["tensors"]
    for key, entry in index.items():
        if key.startswith("weight/"):
            assert entry.get("frozen", False) == is_frozen(key.partition("/")[2]), key
    assert command("convert", whole, tmp_path / "average", "--ema", "--no-verify") == 0


def test_a_plan_counts_frozen_parameters_as_weights_alone(run_file: Path) -> None:
    config = load_run(run_file, [FROZEN, "model.vocab=330"])
    free = load_run(run_file, ["model.vocab=330"])
    all_cuts = cuts(config.model, 1, 16)
    (ours,), (theirs,) = (
        state_bytes(
            each.model, each.plan, all_cuts, [0], sharding_of(each), make_rule(each.optimizer)
        )
        for each in (config, free)
    )
    model = config.model
    frozen = model.vocab * model.hidden + layer_parameters(model)
    padding = 2048  # bytes, of buffers
    assert ours.weights == pytest.approx(theirs.weights, abs=padding)
    assert theirs.gradients - ours.gradients == pytest.approx(4 * frozen, abs=padding)
    assert theirs.moments - ours.moments == pytest.approx(8 * frozen, abs=2 * padding)


@pytest.mark.slow
def test_parity_holds_for_what_is_left(run_file: Path, tmp_path: Path) -> None:
    made = [
        run_file,
        'optimizer.frozen=["layers.0.*", "layers.5.*"]',
        "model.layers=6",
        f"train.folder={tmp_path}",
    ]
    assert command("parity", *made, "parallel.tensor=2") == 0
