"""A run with muP: refused before launch where it cannot be right, exported as a usual model, and
with the learning rate of a narrower one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megaprec.errors import UserError
from models.config import ModelConfig
from models.estimate.flops import training_flops
from models.parameter_counts import num_parameters
from tests.models.mup_transfer import sweep
from tests.refusals import shows
from tools.cli import main
from tools.config.run_file import load_run

MINIMAL = [
    *("model.layers=2", "model.hidden=64", "model.heads=4", "model.ffn=192", "model.vocab=300"),
    *("model.mup_base_hidden=16", "train.steps=2", "train.global_batch=4", "train.micro_batch=2"),
    *("train.seq_length=16", "data.vocab_size=300", "log.plot=false"),
]


def problems(*overrides: str) -> str:
    with pytest.raises(UserError) as refused:
        load_run(None, [*MINIMAL, *overrides])
    return str(refused.value)


@pytest.mark.parametrize(
    ("override", "code", "fields"),
    [
        ("optimizer.name=sgd", "optimizer.mup_rule", {"rule": "SGD"}),
        ("optimizer.name=RAdam", "optimizer.mup_rule", {}),
        ("model.ffn=190", "model.mup_width", {"key": "ffn", "nearest": "188 or 192"}),
        ("model.factory=a.py:b", "model.mup_factory", {"base": 16}),
    ],
)
def test_what_has_no_factors_is_refused_before_launch(
    override: str, code: str, fields: dict[str, Any]
) -> None:
    assert shows(problems(override), code, **fields)


def test_muon_may_not_take_the_embedding() -> None:
    said = problems("optimizer.name=muon", "optimizer.options={by_adamw=[]}")
    assert shows(said, "optimizer.mup_muon_embedding", name="embedding.weight")
    assert load_run(None, [*MINIMAL, "optimizer.name=muon"]).model.mup.growth == 4


def test_muon_may_not_take_heads_by_themselves() -> None:
    said = problems("optimizer.name=muon", "optimizer.options={per_head=true}")
    assert shows(said, "optimizer.mup_muon_per_head")


def test_mup_changes_neither_parameters_nor_flops() -> None:
    sizes: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 192, "vocab": 300}
    plain = ModelConfig(**sizes)
    mup = ModelConfig(**sizes, mup_base_hidden=16, mup_base_head_dim=8)
    assert num_parameters(mup) == num_parameters(plain)
    assert training_flops(mup, 32) == training_flops(plain, 32)


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; " * 400)
    return path


@pytest.mark.slow
def test_an_export_has_the_logits_of_the_checkpoint_and_begins_no_other_mup(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Transformers computes what megaprec does, with a growth that is no power of two."""
    transformers = pytest.importorskip("transformers")
    run = [*MINIMAL, f"data.source={text}", "train.folder=run", "train.device=cpu"]
    run += ["model.hidden=48", "model.ffn=144", "train.numerics=fast", "model.tied=true"]
    Path("run.toml").write_text("")
    assert main(["train", "run.toml", *run, "--export-hf", "exported"]) == 0
    assert "3 times as wide as the base model: hidden 16, ffn 48" in capsys.readouterr().out
    assert main(["convert", "exported", "back", "--to", "megaprec"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained("exported", dtype=torch.float32)
    assert theirs.config.tie_word_embeddings
    norm = theirs.model.norm.weight
    # a tied head is scaled by the norm before it
    assert norm.mean().item() == pytest.approx(1 / 3, abs=0.01)
    capsys.readouterr()
    again = [*run, "train.init_from=exported", "train.folder=other", "model.mup_base_hidden=16"]
    assert main(["train", "run.toml", *again]) == 2
    said = capsys.readouterr().err
    assert shows(said, "config.not_of_weights", key="model.mup_base_hidden", value="16")


@pytest.mark.slow
def test_a_resume_with_another_base_is_refused(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = [*MINIMAL, f"data.source={text}", "train.folder=run", "train.device=cpu"]
    Path("run.toml").write_text("")
    assert main(["train", "run.toml", *run]) == 0
    assert main(["train", "run.toml", *run, "model.mup_base_hidden=32", "train.steps=3"]) == 2
    said = capsys.readouterr().err
    assert shows(said, "training.other_model", key="mup_base_hidden", value="32", saved="16")


@pytest.mark.slow
def test_the_best_rate_of_a_small_width_is_the_best_at_four_times_that_width() -> None:
    """And without muP it is not."""
    torch.set_num_threads(1)
    assert 0.5 <= sweep(mup=True).ratio() <= 2
    assert sweep(mup=False).ratio() > 2
