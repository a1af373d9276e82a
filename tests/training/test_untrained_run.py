"""What a model of one's own holds beside its trained parameters is in its checkpoints, or refused
after one step."""

from pathlib import Path

import pytest
import torch

from megaprec.checkpoint.atomic import latest
from tests.refusals import raises
from tests.runs import rewind, steps, tensors, train_on, write_run
from tools.config.run_file import load_run
from tools.training.corpus import open_corpus
from tools.training.trainer import Trainer

OWN = Path(__file__).parents[2] / "examples" / "own_model.py"
FACTORY = """
import importlib.util
import torch

spec = importlib.util.spec_from_file_location("own_model", {own!r})
own_model = importlib.util.module_from_spec(spec)
spec.loader.exec_module(own_model)

def build(config, context, cut, tied):
    stage = own_model.build(config, context, cut, tied)
    {change}
    return stage
"""
FREEZE = """
    for layer in stage.layers:
        layer.up.weight.requires_grad_(False)
        layer.scale.requires_grad_(False)
"""
COUNT = """
    def count(module, args):
        module.seen += 1
    stage.register_buffer("seen", torch.zeros(()), persistent={persistent})
    stage.register_forward_pre_hook(count)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def newest(folder: Path) -> Path:
    found = latest(folder / "checkpoints")
    assert found
    return found


def own(tmp_path: Path, change: str) -> str:
    module = tmp_path / f"mine_{len([*tmp_path.iterdir()])}.py"  # a module is imported once
    module.write_text(FACTORY.format(own=str(OWN), change=change))
    return f"model.factory={module}:build"


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("tensor", "pipeline", "data"), [(1, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_frozen_weights_are_in_the_checkpoint_and_resume_in_any_layout(
    file: Path, tmp_path: Path, tensor: int, pipeline: int, data: int
) -> None:
    keys = [own(tmp_path, FREEZE), "precision.compute=fp64"]
    folder = train_on(file, *keys)
    held = tensors(newest(folder))
    frozen = {
        name: values for name, values in held.items() if name.endswith(("up.weight", ".scale"))
    }
    assert {name.partition("/")[0] for name in frozen} == {"weight"}, "no moments"
    assert len(frozen) == 4
    assert all(values.any() for values in frozen.values())
    again = rewind(folder, tmp_path / "again", 3)
    train_on(file, *keys, f"train.folder={again}", tensor=tensor, pipeline=pipeline, data=data)
    ours = tensors(newest(again))
    theirs = held
    assert ours.keys() == theirs.keys()
    for name in frozen:
        assert torch.equal(ours[name], theirs[name]), name
    for name, values in ours.items():
        torch.testing.assert_close(values, theirs[name], rtol=1e-9, atol=1e-12)
    assert [r["step"] for r in steps(again)] == [1, 2, 3, 4, 5, 6]


def test_weights_frozen_in_a_checkpoint_and_trained_now_are_named(
    file: Path, tmp_path: Path
) -> None:
    folder = train_on(file, own(tmp_path, FREEZE), "train.steps=3")
    config = load_run(file, [own(tmp_path, ""), f"train.folder={folder}"])
    with raises("checkpoint.state_of_frozen_missing"):
        Trainer(config, open_corpus(config), None, newest(folder))


def test_a_buffer_that_training_changes_ends_the_run_after_one_step(
    file: Path, tmp_path: Path
) -> None:
    config = load_run(file, [own(tmp_path, COUNT.format(persistent=True))])
    trainer = Trainer(config, open_corpus(config), None, None)
    with raises("training.buffer_changes", unsaved="seen"):
        trainer.run()
    assert trainer.progress.step == 1
    config = load_run(file, [own(tmp_path, COUNT.format(persistent=False)), "train.steps=2"])
    Trainer(config, open_corpus(config), None, None).run()
