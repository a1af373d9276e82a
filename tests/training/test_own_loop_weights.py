"""Weights of one's own loop, and of a model of one's own, are evaluated and trained on."""

import json
from pathlib import Path

import pytest
import torch

import megaprec
from megaprec import plan
from megaprec.text.training import learn_characters
from models import EngineOptions, ModelConfig, build_stages, load_logical
from models.logical_shapes import logical_shapes
from parallel.pipeline.kinds import schedule
from tests.refusals import shows
from tests.runs import checkpoint, tensors, train, train_on, write_run
from tools import cli

CONFIG = ModelConfig(
    layers=2, hidden=16, heads=4, kv_heads=2, ffn=32, vocab=400, max_positions=16, dropout=0.1
)
FACTORY = """
from models.decoder.stages import Stage
from parallel.norms import vector

def build(config, context, cut, tied):
    return Stage(config, context, cut, tied)

class Wider(Stage):
    def __init__(self, config, context, cut, tied):
        super().__init__(config, context, cut, tied)
        self.own = vector(context, "own.weight", 8, 0.0)

def build_wider(config, context, cut, tied):
    return Wider(config, context, cut, tied)
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint that a loop of one's own has saved."""
    folder = tmp_path_factory.mktemp("own")
    options = EngineOptions(micro_batch=2, seq_length=16)
    stages = build_stages(CONFIG, plan("fp32"), None, schedule("1f1b", 1, 1), options)
    generator = torch.Generator().manual_seed(0)
    drawn = {
        name: torch.randn(shape, generator=generator) / 8
        for name, shape in logical_shapes(CONFIG).items()
    }
    load_logical(stages.by_number.values(), drawn)
    megaprec.save(
        folder / "loop", 1, stages.make_optimizer(), {"model": CONFIG.model_dump(mode="json")}
    )
    return folder


def test_a_tokenizer_is_given_to_a_checkpoint_without_one(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = own / "text.txt"
    text.write_text("to be or not to be")
    tokenizer = learn_characters([text.read_text()], own / "t.json", overwrite=True)
    command = ["evaluate", str(own / "loop"), "--data", str(text)]
    assert cli.main([*command, "--tokenizer", str(tokenizer), "--json"]) == 0
    (scores,) = json.loads(capsys.readouterr().out)["sets"]
    assert scores["tokens"] == len(text.read_text()) - 1
    assert cli.main(command) == 2
    assert shows(capsys.readouterr().err, "text.text_without_tokenizer")


@pytest.mark.parametrize("layout", [{}, pytest.param({"tensor": 2}, marks=pytest.mark.slow)])
def test_a_model_of_ones_own_begins_with_weights_by_their_names(
    own: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    file = write_run(tmp_path)
    (tmp_path / "mine.py").write_text(FACTORY)
    factory = f"model.factory={tmp_path}/mine.py:build"
    begin = [factory, f"train.init_from={own}/loop", "model.vocab=400", "lr.warmup=2"]
    # the first step of a warm-up has the rate 0
    folder = train_on(file, *begin, "train.steps=1", "lr.length=3", **layout)
    given = tensors(own / "loop" / "step_00000001")
    taken = tensors(checkpoint(folder, 1))
    for name in logical_shapes(CONFIG):
        key = f"weight/{name}"
        assert torch.equal(taken[key], given[key]), key


def test_weights_that_the_model_lacks_are_named(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path)
    (tmp_path / "mine.py").write_text(FACTORY)
    factory = f"model.factory={tmp_path}/mine.py:build_wider"
    begin = [factory, f"train.init_from={own}/loop", "model.vocab=400"]
    assert train(file, *begin, "train.steps=1") == 2
    assert "does not hold own.weight" in capsys.readouterr().err
