"""A configuration of GPT-NeoX becomes the run that it meant, or is refused by name."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from megaprec.errors import UserError
from tools.commands.import_answers import can_be_dropped
from tools.config.run_file import RunConfig, load_run, read_run_settings
from tools.interop.importing.run import Imported, import_run

NEOX = """{
  "pipe-parallel-size": 2,
  "model-parallel-size": 2,
  "num-layers": 4,
  "hidden-size": 64,
  "num-attention-heads": 4,
  "seq-length": 32,
  "max-position-embeddings": 32,
  "pos-emb": "rotary",
  "rotary-pct": 0.25,
  "no-weight-tying": true,
  "gpt-j-residual": true,
  "bias-gelu-fusion": true,
  "init_method": "small_init",
  "output_layer_init_method": "wang_init",
  "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.95], "eps": 1.0e-8}},
  "min_lr": 0.0001,
  "zero_optimization": {"stage": 1, "overlap_comm": True},
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 4,
  "gradient_clipping": 0.5,
  "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 2},
  "checkpoint_activations": true,
  "train-iters": 200,
  "lr-decay-iters": 100,
  "lr-decay-style": "cosine",
  "warmup": 0.1,
  "data-path": "tokens/some_text_document",
  "save": "out",
  "checkpoint-factor": 50,
  "keep_last_n_checkpoints": 3,
  "padded_vocab_size": 320,
}
"""


def imported(folder: Path, changes: Mapping[str, object], *keys: str, ranks: int = 8) -> Imported:
    path = folder / "neox.yml"
    values = yaml.safe_load(NEOX) | dict(changes)
    path.write_text(yaml.safe_dump({name: v for name, v in values.items() if v is not None}))
    settled, _ = read_run_settings(None, keys)
    return import_run([str(path)], settled, {}, ranks)


def run_of(made: Imported, folder: Path) -> RunConfig:
    path = folder / "run.toml"
    path.write_text(made.text)
    return load_run(path)


def test_a_configuration_becomes_its_run(tmp_path: Path) -> None:
    config = run_of(imported(tmp_path, {}), tmp_path)
    model = config.model
    assert (model.family, model.layers, model.hidden, model.heads) == ("gpt_neox", 4, 64, 4)
    assert (model.mlp, model.ffn, model.norm, model.vocab) == ("gelu", 256, "layer", 320)
    assert (model.rotary_fraction, model.parallel_residual, model.tied) == (0.25, True, False)
    assert model.qkv_bias and model.output_bias and model.mlp_bias and model.norm_bias
    parallel = config.parallel
    assert (parallel.tensor, parallel.pipeline, parallel.data, parallel.zero) == (2, 2, 2, 1)
    assert parallel.recompute == "full"
    train = config.train
    assert (train.steps, train.micro_batch, train.global_batch, train.folder) == (200, 2, 16, "out")
    assert (config.precision.compute, config.precision.initial_scale) == ("fp16", 4096.0)
    optimizer = config.optimizer
    assert (optimizer.betas, optimizer.eps, optimizer.clip) == ((0.9, 0.95), 1e-8, 0.5)
    # what is not in the file is GPT-NeoX's default
    assert optimizer.weight_decay == 0.1
    assert (config.checkpoint.every, config.checkpoint.keep) == (50, 3)
    assert config.data.source == "tokens/some_text_document"


def test_initial_weights_have_the_published_deviations(tmp_path: Path) -> None:
    model = run_of(imported(tmp_path, {}), tmp_path).model
    assert model.init_std == pytest.approx(math.sqrt(2 / (5 * 64)))
    assert model.init.output == model.init.down == pytest.approx(2 / 4 / math.sqrt(64))
    assert model.init.shrink == "none"
    scaled = {"init_method": None, "output_layer_init_method": None}
    model = run_of(imported(tmp_path, scaled), tmp_path).model
    assert model.init_std == 0.02
    assert model.init.down == pytest.approx(0.02 / math.sqrt(8))


def test_a_gate_takes_a_third_of_the_width(tmp_path: Path) -> None:
    llama = {"norm": "rmsnorm", "rms_norm_epsilon": 1e-6, "activation": "swiglu"}
    llama |= {"hidden-size": 4096, "intermediate_size": 32768, "mlp_multiple_of": 256}
    llama |= {"use_bias_in_mlp": False, "use_bias_in_attn_linear": False, "gpt-j-residual": False}
    model = run_of(imported(tmp_path, llama), tmp_path).model
    # that of Llama 7B
    assert (model.mlp, model.ffn) == ("swiglu", 11008)
    assert (model.norm, model.norm_eps, model.parallel_residual) == ("rms", 1e-6, False)
    assert not (model.qkv_bias or model.output_bias or model.mlp_bias)


def test_rates_are_those_of_its_scheduler_but_for_the_first(tmp_path: Path) -> None:
    made = imported(tmp_path, {})
    schedule = run_of(made, tmp_path).lr_schedule
    for step in range(200):
        warmup = 10
        ratio = min(1.0, (step - warmup) / 90)
        expected = 0.0001 + 0.0009 / 2 * (math.cos(math.pi * ratio) + 1)
        if step <= warmup:
            expected = 0.001 * max(1, step) / warmup
        if step:
            assert schedule.at(step) == pytest.approx(expected), step
    assert any("takes the first step of the warm-up twice" in note for note in made.notes)


@pytest.mark.parametrize(("fraction", "steps"), [(0.25, 50), (1.5, 300)])
def test_a_decay_may_be_a_part_of_the_run_or_longer(
    fraction: float, steps: int, tmp_path: Path
) -> None:
    made = imported(tmp_path, {"lr-decay-iters": None, "lr_decay_fraction": fraction})
    assert run_of(made, tmp_path).lr.length == steps
    both = imported(tmp_path, {"lr_decay_fraction": fraction})
    assert run_of(both, tmp_path).lr.length == 100
    assert any("lr_decay_fraction" in note for note in both.notes)


def test_several_files_are_one_table_without_a_name_in_two(tmp_path: Path) -> None:
    first = tmp_path / "a.yml"
    second = tmp_path / "b.yml"
    first.write_text(NEOX)
    second.write_text("{'vocab_file': 'x.json', 'log-interval': 7}")
    for files in ((first, second), (second, first)):
        made = import_run([*map(str, files)], {}, {}, 8)
        assert "every = 7 " in made.text
    second.write_text("{'num_layers': 8}")
    with pytest.raises(UserError, match="num_layers"):
        import_run([str(first), str(second)], {}, {}, 8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpt_j_tied": True}, "gpt_j_tied"),
        ({"pos-emb": "alibi"}, "pos_emb"),
        ({"activation": "geglu"}, "activation"),
        ({"moe_num_experts": 8}, "moe_num_experts"),
        ({"attention_config": [[["mamba"], 4]]}, "attention_config"),
        ({"optimizer": {"type": "Lamb", "params": {"lr": 1e-4}}}, "lamb"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1e-4, "amsgrad": True}}}, "amsgrad"),
        ({"some_new_name": 3}, "some_new_name"),
        ({"lr-decay-style": "linear"}, "lr.final"),
        ({"finetune": True}, "train.init_from"),
        ({"padded_vocab_size": None}, "model.vocab=N"),
        ({"data-path": None}, "data.source=PREFIX"),
        ({"num-layers": "many"}, "num_layers"),
        ({"expansion_factor": -2}, "expansion_factor"),
        ({"lr-decay-iters": None, "lr_decay_fraction": -0.5}, "lr_decay_fraction"),
        ({"lr-decay-iters": None, "lr_decay_fraction": math.inf}, "lr_decay_fraction"),
    ],
)
def test_what_no_run_here_does_is_refused_by_name(
    change: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        imported(tmp_path, change)
    assert any(said in problem for problem in caught.value.problems)


def test_a_name_that_is_refused_can_be_left_out(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        imported(tmp_path, {"some_new_name": 3})
    (problem,) = caught.value.problems
    assert can_be_dropped(problem)
    values = yaml.safe_load(NEOX) | {"some_new_name": 3}
    (tmp_path / "neox.yml").write_text(yaml.safe_dump(values))
    made = import_run([str(tmp_path / "neox.yml")], {}, {}, 8, frozenset({"some_new_name"}))
    assert any("some_new_name = 3" in note for note in made.notes)


def test_what_is_off_needs_no_meaning(tmp_path: Path) -> None:
    made = imported(tmp_path, {"some_new_name": False, "another": None, "adlr_autoresume": False})
    assert "some_new_name" not in made.text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"fp16": {"enabled": True, "consecutive_hysteresis": True}},
            "fp16.consecutive_hysteresis",
        ),
        ({"fp16": {"enabled": True, "type": "bfloat16"}}, "fp16.type"),
        (
            {"bf16": {"enabled": True, "bf16_optimizer_states": True}, "fp16": None},
            "bf16.bf16_opti",
        ),
        ({"data_types": {"buffer_dtype": "bf16"}}, "data_types.buffer_dtype"),
        ({"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}}, "zero_optimiz"),
    ],
)
def test_tables_of_deepspeed_are_read_as_deepspeeds(
    changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        imported(tmp_path, changes)
    (line,) = caught.value.problems
    assert line.startswith(said)


@pytest.mark.parametrize("wide", [False, True])
def test_what_deepspeed_decides_is_as_it_does_it(wide: bool, tmp_path: Path) -> None:
    """Not as Megatron-LM, which ends a run at a gradient that is not finite."""
    zero = {"stage": 1, "overlap_comm": True, "cpu_offload": True, "reduce_bucket_size": 5e6}
    changes = {"fp16": None, "precision": "bfloat16", "zero_optimization": zero}
    if wide:
        changes["data_types"] = {"grad_accum_dtype": "fp32"}
    config = run_of(imported(tmp_path, changes), tmp_path)
    precision = config.precision
    assert (precision.compute, precision.on_nonfinite) == ("bf16", "skip")
    assert (precision.gradients, precision.reduce) == ("fp32" if wide else "bf16", "bf16")
    parallel = config.parallel
    assert (parallel.zero, parallel.overlap, parallel.bucket) == (True, True, 5_000_000)
    assert config.optimizer.offload == "host"


def test_the_tables_of_the_published_files_are_read(tmp_path: Path) -> None:
    """Pythia's have a word of their own in the table of FP16, which DeepSpeed passes by."""
    fp16 = {
        "fp16": True,
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "hysteresis": 3,
    }
    for stage, hysteresis in ((1, 3), (0, 1)):
        changes = {"fp16": fp16, "zero_optimization": {"stage": stage}}
        precision = run_of(imported(tmp_path, changes), tmp_path).precision
        assert (precision.compute, precision.gradients, precision.reduce) == ("fp16",) * 3
        assert (precision.growth_interval, precision.hysteresis) == (500, hysteresis)
