"""A configuration of NeMo 1 becomes the run that it meant, or is refused by name."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaprec.errors import UserError
from tools.commands.precision import read_precision
from tools.config.run_file import RunConfig, load_run, read_run_settings
from tools.interop.importing.run import Imported, import_run

NEMO = """
defaults:
  - _self_
name: some_gpt
trainer:
  devices: 4
  num_nodes: 2
  accelerator: gpu
  precision: bf16
  max_steps: 200
  val_check_interval: 20
  limit_val_batches: 5
  log_every_n_steps: 10
  gradient_clip_val: 1.0
exp_manager:
  explicit_log_dir: out
model:
  mcore_gpt: true
  micro_batch_size: 2
  global_batch_size: 16
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 1
  encoder_seq_length: 32
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 4
  hidden_size: 64
  ffn_hidden_size: ${multiply:4, ${.hidden_size}}
  num_attention_heads: 4
  num_query_groups: 2
  init_method_std: 0.01
  hidden_dropout: 0.0
  attention_dropout: 0.1
  normalization: layernorm1p
  bias: false
  activation: fast-swiglu
  position_embedding_type: rope
  rotary_percentage: 0.5
  share_embeddings_and_output_weights: false
  megatron_amp_O2: true
  sequence_parallel: true
  activations_checkpoint_granularity: selective
  seed: 99
  optim:
    name: distributed_fused_adam
    lr: 1e-3
    weight_decay: 0.1
    betas: [0.9, 0.98]
    sched:
      name: CosineAnnealing
      warmup_steps: 10
      constant_steps: 50
      min_lr: 1e-4
  data:
    data_impl: mmap
    splits_string: 900,50,50
    seq_length: ${model.encoder_seq_length}
    data_prefix: [0.25, tokens/a, 0.75, tokens/b]
"""
VOCAB = "model.vocab=320"


def written(folder: Path, changes: dict[str, Any]) -> Path:
    values = yaml.safe_load(NEMO)
    for name, value in changes.items():
        *tables, last = name.split(".")
        table = values
        for one in tables:
            table = table[one]
        table[last] = value
    path = folder / "nemo.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def imported(path: Path, *keys: str) -> Imported:
    settled, _ = read_run_settings(None, keys)
    return import_run([str(path)], settled, {}, None)


def run_of(folder: Path, changes: dict[str, Any]) -> RunConfig:
    path = folder / "run.toml"
    path.write_text(imported(written(folder, changes), VOCAB).text)
    return load_run(path)


def test_a_configuration_becomes_its_run(tmp_path: Path) -> None:
    config = run_of(tmp_path, {})
    model = config.model
    assert (model.layers, model.hidden, model.heads, model.kv_heads) == (4, 64, 4, 2)
    assert (model.mlp, model.ffn, model.norm, model.bias) == ("swiglu", 256, "layer", False)
    assert (model.rotary_fraction, model.tied, model.init_std) == (0.5, False, 0.01)
    assert (model.dropout, model.attention_dropout, model.max_positions) == (0.0, 0.1, 32)
    parallel = config.parallel
    assert (parallel.tensor, parallel.pipeline, parallel.data) == (2, 1, 4)
    assert (parallel.sequence, parallel.recompute, parallel.zero) == (True, "selective", True)
    train = config.train
    assert (train.steps, train.micro_batch, train.global_batch, train.seed) == (200, 2, 16, 99)
    assert (train.eval_every, train.eval_batches, train.folder) == (20, 5, "out")
    assert config.optimizer.betas == (0.9, 0.98)
    assert config.optimizer.weight_decay == 0.1
    assert [(part.source, part.weight) for part in config.data.blend] == [
        ("tokens/a", 0.25),
        ("tokens/b", 0.75),
    ]
    # all that is not in the first part
    assert config.data.held_out == 0.1


@pytest.mark.parametrize("amp", [True, False])
@pytest.mark.parametrize("precision", ["bf16", 16, 32, "bf16-mixed"])
def test_the_precision_is_that_of_precision_show(
    precision: object, amp: bool, tmp_path: Path
) -> None:
    changes = {"trainer.precision": precision, "model.megatron_amp_O2": amp}
    shown = read_precision(written(tmp_path, changes)).plan
    plan = run_of(tmp_path, changes).plan
    names = {field.name for field in fields(shown)} - {"origin"}
    assert len(names) > 10
    assert {name: getattr(plan, name) for name in names} == {
        name: getattr(shown, name) for name in names
    }


@pytest.mark.parametrize("constant", [0, 50])
def test_rates_are_those_of_cosine_annealing(constant: int, tmp_path: Path) -> None:
    config = run_of(tmp_path, {"model.optim.sched.constant_steps": constant})
    warmup = 10
    decay = 200 - constant - warmup
    for step in range(200):
        ratio = min(1.0, (step - warmup) / decay)
        expected = 1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * ratio))
        if step <= warmup:
            expected = 1e-3 * step / warmup if constant else 1e-3 * (step + 1) / (warmup + 1)
        assert config.lr_schedule.at(step) == pytest.approx(expected), step


def test_a_ratio_of_the_run_is_its_warm_up(tmp_path: Path) -> None:
    changes = {"model.optim.sched.warmup_steps": None, "model.optim.sched.warmup_ratio": 0.013}
    # NeMo rounds down
    assert run_of(tmp_path, changes).lr.warmup == 2


# 1e6 is a text in YAML
@pytest.mark.parametrize("base", [500000.0, "5e5", 500000])
def test_a_whole_number_may_be_written_as_any_number(base: object, tmp_path: Path) -> None:
    changes = {"model.rotary_base": base, "trainer.max_steps": 2e2}
    run = run_of(tmp_path, changes)
    assert run.model.rope_base == 500000.0 and run.train.steps == 200


@pytest.mark.parametrize(
    ("optimizer", "decay"), [("adamw", 0.01), ("fused_adam", 0.0), ("distributed_fused_adam", 0.0)]
)
def test_a_decay_that_no_file_says_is_that_of_the_optimizer(
    optimizer: str, decay: float, tmp_path: Path
) -> None:
    changes = {"model.optim.name": optimizer, "model.optim.weight_decay": None}
    assert run_of(tmp_path, changes).optimizer.weight_decay == decay


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.optim.sched.warmup_ratio": 0.1}, "model.optim.sched.warmup_ratio"),
        (
            {"model.optim.sched.warmup_steps": None, "model.optim.sched.warmup_ratio": 1.5},
            "model.optim.sched.warmup_ratio",
        ),
        (
            {"model.optim.sched.warmup_steps": None, "model.optim.sched.warmup_ratio": -0.1},
            "model.optim.sched.warmup_ratio",
        ),
        ({"model.transformer_block_type": "post_ln"}, "model.transformer_block_type"),
        ({"model.position_embedding_type": "alibi"}, "model.position_embedding_type"),
        ({"model.optim.name": "adafactor"}, "model.optim.name"),
        ({"model.optim.sched.name": "NoamAnnealing"}, "model.optim.sched.name"),
        ({"model.optim.sched.constant_steps": 500}, "model.optim.sched.constant_steps"),
        ({"model.data.data_prefix": "???"}, "data.source=PREFIX"),
        ({"model.data.seq_length": 64}, "model.data.seq_length"),
        ({"model.some_new_name": 3}, "model.some_new_name"),
        ({"restore_from_path": "a.nemo"}, "restore_from_path"),
        ({"model.num_layers": "${oc.env:LAYERS}"}, "model.num_layers"),
    ],
)
def test_what_no_run_here_does_is_refused_by_name(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        imported(written(tmp_path, change), VOCAB)
    assert any(said in problem for problem in caught.value.problems)


def test_the_vocabulary_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        imported(written(tmp_path, {}))
    (problem,) = caught.value.problems
    assert "model.vocab=N" in problem


def test_without_a_schedule_the_rate_is_constant(tmp_path: Path) -> None:
    """NeMo makes no scheduler without `sched`, and so no warm-up."""
    values = yaml.safe_load(NEMO)
    del values["model"]["optim"]["sched"]
    path = tmp_path / "nemo.yaml"
    run = tmp_path / "run.toml"
    for sched in ({}, {"sched": None}):
        values["model"]["optim"] |= sched
        path.write_text(yaml.safe_dump(values))
        run.write_text(imported(path, VOCAB).text)
        config = load_run(run)
        rates = {config.lr_schedule.at(step) for step in range(200)}
        assert rates == {1e-3}
