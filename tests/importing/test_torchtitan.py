"""A configuration of torchtitan becomes the run that it meant, or is refused by name.

`torchtitan_keys.txt` lists what its JobConfig has had from March 2025 to February 2026, each key
with its newest default.
"""

import ast
import math
from pathlib import Path
from typing import Any

import pytest

from megaprec.errors import UserError
from tools.config.run_file import RunConfig, known_keys, load_run, read_run_settings
from tools.console.toml import toml
from tools.interop.arguments.torchtitan import PERMITTED, READ, UNUSED, WHY, is_unused
from tools.interop.importing.run import Imported, import_run

FACTS = dict(
    line.split(" ", 1)
    for line in (Path(__file__).parent / "torchtitan_keys.txt").read_text().splitlines()
)
TITAN: dict[str, Any] = {
    "job.dump_folder": "out",
    "metrics.log_freq": 5,
    "metrics.enable_wandb": True,
    "model.name": "qwen3",
    "model.flavor": "0.6B",
    "model.hf_assets_path": "assets/hf",
    "optimizer.lr": 2e-3,
    "optimizer.beta2": 0.98,
    "lr_scheduler.warmup_steps": 10,
    "lr_scheduler.min_lr_factor": 0.1,
    "training.local_batch_size": 2,
    "training.seq_len": 64,
    "training.steps": 100,
    "training.dataset": "c4",
    "training.seed": 7,
    "parallelism.tensor_parallel_degree": 2,
    "checkpoint.enable": True,
    "checkpoint.interval": 50,
    "activation_checkpoint.mode": "full",
    "compile.enable": True,
}


def written(folder: Path, changes: dict[str, Any]) -> Path:
    tables = dict[str, dict[str, Any]]()
    for key, value in (TITAN | changes).items():
        table, _, name = key.rpartition(".")
        if value is not None:
            tables.setdefault(table, {})[name] = value
    lines = list[str]()
    for table, values in tables.items():
        lines += [f"[{table}]", *(f"{name} = {toml(value)}" for name, value in values.items())]
    path = folder / "titan.toml"
    path.write_text("\n".join(lines))
    return path


def imported(*items: str, keys: list[str] | None = None, ranks: int | None = 8) -> Imported:
    settled, problems = read_run_settings(None, keys or [])
    assert not problems
    return import_run([*items], settled, {}, ranks)


def run_of(
    folder: Path,
    changes: dict[str, Any],
    *words: str,
    keys: list[str] | None = None,
    ranks: int | None = 8,
) -> RunConfig:
    made = imported(str(written(folder, changes)), *words, keys=keys, ranks=ranks)
    path = folder / "run.toml"
    path.write_text(made.text)
    return load_run(path)


def test_every_key_is_read_refused_or_not_used() -> None:
    assert set(READ) | set(WHY) <= set(FACTS)
    for key in FACTS:
        assert (key in READ) + (key in WHY) + is_unused(key) == 1, key
    for key in UNUSED:
        assert any(fact == key or fact.startswith(f"{key}.") for fact in FACTS), key


def test_defaults_are_those_of_torchtitan() -> None:
    # names that newer ones replace
    former = ("training.batch_size", "model.norm_type")
    defaults = {key: row.default for key, row in READ.items()}
    for key, permitted in {**defaults, **PERMITTED}.items():
        if key not in former:
            assert permitted == ast.literal_eval(FACTS[key]) or (
                key == "checkpoint.initial_load_path" and permitted is None
            ), key


def test_keys_that_are_read_become_keys_of_a_run() -> None:
    for row in READ.values():
        assert set(row.keys) <= known_keys() | {"model.preset"}


def test_a_configuration_becomes_its_run(tmp_path: Path) -> None:
    config = run_of(tmp_path, {})
    assert (config.model.layers, config.model.hidden) == (28, 1024)
    parallel = config.parallel
    assert (parallel.tensor, parallel.sequence, parallel.pipeline, parallel.data) == (2, True, 1, 4)
    assert (parallel.zero, parallel.zero_size, parallel.recompute) == (3, 0, "full")
    train = config.train
    assert (train.steps, train.micro_batch, train.global_batch, train.seed) == (100, 2, 8, 7)
    assert (train.seq_length, train.folder) == (64, "out")
    assert (config.log.every, config.log.to) == (5, ("wandb",))
    assert (config.checkpoint.every, config.checkpoint.keep) == (50, 10)
    assert config.optimizer.betas == (0.9, 0.98)
    # its optimizer has one group of all parameters
    (group,) = config.optimizer.groups
    assert (group.pattern, group.all_dims) == ("*", True)
    assert (config.precision.compute, config.precision.reduce) == ("bf16", "fp32")


@pytest.mark.parametrize("shape", ["linear", "sqrt", "cosine"])
@pytest.mark.parametrize("ratio", [None, 0.25, 0.99])
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_rates_are_those_of_torchtitan(
    shape: str, ratio: float | None, warmup: int, tmp_path: Path
) -> None:
    changes = {
        "lr_scheduler.decay_type": shape,
        "lr_scheduler.decay_ratio": ratio,
        "lr_scheduler.warmup_steps": warmup,
    }
    config = run_of(tmp_path, changes)
    decay = 100 - warmup if ratio is None else min(100 - warmup, round(100 * ratio))
    # torchtitan adds a step before the decay, which the run does not reach
    stable = 101 - warmup - decay
    for step in range(100):
        if step < warmup:
            factor = (step + 1) / warmup
        elif step < warmup + stable:
            factor = 1.0
        else:
            done = (step + 1 - warmup - stable) / decay
            left = {
                "linear": 1 - done,
                "sqrt": 1 - math.sqrt(done),
                "cosine": 0.5 * (1 + math.cos(math.pi * done)),
            }[shape]
            factor = 0.1 + 0.9 * left
        assert config.lr_schedule.at(step) == pytest.approx(2e-3 * factor), step


@pytest.mark.parametrize(
    ("changes", "ranks", "expected"),
    [
        ({}, 8, {"data": 4, "zero": 3}),
        ({"fsdp_reshard_after_forward": "never"}, 8, {"data": 4, "zero": 2}),
        ({"data_parallel_shard_degree": 4}, None, {"data": 4, "zero": 3}),
        ({"data_parallel_replicate_degree": 2}, 8, {"data": 4, "zero": 3, "zero_size": 2}),
        (
            {"data_parallel_replicate_degree": 4, "data_parallel_shard_degree": 1},
            8,
            {"data": 4, "zero": False},
        ),
        # context ranks share weights too
        (
            {"data_parallel_replicate_degree": 2, "context_parallel_degree": 2},
            16,
            {"data": 4, "context": 2, "zero": 3, "zero_size": 4},
        ),
        # what a pipeline gathers stays until the backward pass, unless it is said
        (
            {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"},
            16,
            {"pipeline": 2, "schedule": "interleaved", "chunks": 2, "zero": 2},
        ),
        (
            {"pipeline_parallel_degree": 2, "fsdp_reshard_after_forward": "always"},
            16,
            {"pipeline": 2, "schedule": "1f1b", "zero": 3},
        ),
    ],
)
def test_axes_and_what_is_sharded(
    changes: dict[str, Any], ranks: int | None, expected: dict[str, Any], tmp_path: Path
) -> None:
    named = {f"parallelism.{name}": value for name, value in changes.items()}
    parallel = run_of(tmp_path, named, ranks=ranks).parallel
    assert {key: getattr(parallel, key) for key in expected} == expected


def test_a_pipeline_cuts_the_local_batch(tmp_path: Path) -> None:
    changes = {"parallelism.pipeline_parallel_degree": 2, "training.local_batch_size": 6}
    train = run_of(tmp_path, changes).train
    assert (train.micro_batch, train.global_batch) == (1, 12)
    changes["parallelism.pipeline_parallel_microbatch_size"] = 3
    assert run_of(tmp_path, changes).train.micro_batch == 3
    changes["training.global_batch_size"] = 24
    assert run_of(tmp_path, changes).train.global_batch == 24


def test_the_precision_is_that_of_the_layout(tmp_path: Path) -> None:
    held = run_of(
        tmp_path, {"training.dtype": "bfloat16", "training.mixed_precision_reduce": "bfloat16"}
    ).precision
    assert (held.compute, held.masters, held.moments, held.reduce) == (
        "bf16",
        "none",
        "bf16",
        "bf16",
    )
    # autocast is for replicas alone: without FSDP products of tensor ranks are in the weights' dtype
    assert run_of(tmp_path, {}, ranks=2).precision.compute == "fp32"
    alone = {"parallelism.tensor_parallel_degree": 1}
    assert run_of(tmp_path, alone, ranks=1).precision.compute == "bf16"


def test_options_of_a_command_line_count(tmp_path: Path) -> None:
    words = ("--training.steps", "30", "--checkpoint.no_enable", "--compile.enable")
    config = run_of(tmp_path, {}, *words, "--optimizer.lr=0.5", "--debug.deterministic")
    assert (config.train.steps, config.lr.peak, config.train.deterministic) == (30, 0.5, True)
    assert config.checkpoint.every == 0
    script = tmp_path / "run_train.sh"
    script.write_text(
        "torchrun --nproc_per_node=8 -m torchtitan.train --job.config_file titan.toml \\\n"
        "  --training.steps 40\n"
    )
    text = imported(str(script), ranks=None).text
    assert "\nsteps = 40 " in text and "\ndata = 4 " in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.flavor": "8B", "model.name": "llama3"}, "model.preset=llama-3-8b"),
        ({"model.converters": ["float8"]}, "model.converters = ['float8']"),
        ({"optimizer.name": "Muon"}, "optimizer.name = 'Muon'"),
        ({"optimizer.early_step_in_backward": True}, "optimizer.early_step_in_backward = True"),
        ({"training.enable_cpu_offload": True}, "training.enable_cpu_offload = True"),
        ({"training.steps": "many"}, "training.steps = 'many'"),
        ({"training.max_norm": 0}, "training.max_norm = 0"),
        ({"training.no_such": 1}, "training.no_such = 1"),
        ({"lr_scheduler.decay_type": "step"}, "lr_scheduler.decay_type = 'step'"),
        ({"checkpoint.initial_load_path": "a"}, "checkpoint.initial_load_path = 'a'"),
        ({"fault_tolerance.enable": True}, "fault_tolerance.enable = True"),
        ({"activation_checkpoint.mode": "memory_budget"}, "activation_checkpoint.mode"),
        ({"parallelism.data_parallel_shard_degree": 3}, "the axes are 6 ranks, and not 8"),
        ({"parallelism.tensor_parallel_degree": 3}, "8 ranks are no multiple of the 3"),
        (
            {
                "parallelism.pipeline_parallel_degree": 2,
                "parallelism.pipeline_parallel_schedule": "DualPipeV",
            },
            "parallelism.pipeline_parallel_schedule = 'DualPipeV'",
        ),
    ],
)
def test_what_is_not_known_or_changes_the_run_is_refused_by_name(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        imported(str(written(tmp_path, change)))
    assert any(said in problem for problem in caught.value.problems), caught.value.problems


def test_a_key_beside_answers_a_refusal(tmp_path: Path) -> None:
    path = str(written(tmp_path, {"checkpoint.initial_load_path": "a"}))
    made = imported(path, keys=["train.init_from=weights"])
    assert "\ninit_from = " in made.text
    without_ranks = str(written(tmp_path, {}))
    with pytest.raises(UserError, match="--ranks N"):
        imported(without_ranks, ranks=None)


def test_first_weights_of_another_size_are_a_note(tmp_path: Path) -> None:
    path = str(written(tmp_path, {}))
    for keys, is_told in (([], True), (["train.init_from=there"], False)):
        notes = imported(path, keys=keys).notes
        assert any(note.startswith("first weights: ") for note in notes) == is_told
