"""A configuration of accelerate becomes what it says of ranks, sharding and precision, alone or
beside arguments of Hugging Face's Trainer."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaprec.errors import UserError
from tools.config.run_file import RunConfig, known_keys, load_run, read_run_settings
from tools.interop.arguments.accelerate import READ, UNUSED, WHY, class_of
from tools.interop.importing import trainer_fsdp
from tools.interop.importing.run import Imported, import_run

FSDP2: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "use_cpu": False,
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_offload_params": False,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    },
}
DEEPSPEED = {
    "distributed_type": "DEEPSPEED",
    "num_processes": 4,
    "deepspeed_config": {
        "zero_stage": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "zero3_init_flag": False,
    },
}
KEYS = [
    "model.preset=llama-demo",
    "train.steps=10",
    "train.seq_length=64",
    "train.micro_batch=1",
]
BATCH = "train.global_batch=16"
AXIS = "parallelism_config_{}_size"


def written(folder: Path, content: dict[str, Any], name: str = "accelerate.yaml") -> str:
    path = folder / name
    path.write_text(yaml.safe_dump(content))
    return str(path)


def imported(*items: str, keys: list[str], ranks: int | None = None) -> Imported:
    settled, problems = read_run_settings(None, keys)
    assert not problems
    return import_run([*items], settled, {}, ranks)


def run_of(folder: Path, content: dict[str, Any], *keys: str) -> RunConfig:
    made = imported(written(folder, content), keys=[*KEYS, *(keys or (BATCH,))])
    path = folder / "run.toml"
    path.write_text(made.text)
    return load_run(path)


def with_fsdp(**changes: Any) -> dict[str, Any]:
    settings = {f"fsdp_{name}": value for name, value in changes.items()}
    return FSDP2 | {"fsdp_config": settings}


def test_every_key_that_accelerate_has_is_of_one_class() -> None:
    reason = "needs accelerate: make oracles"
    config_args = pytest.importorskip("accelerate.commands.config.config_args", reason=reason)
    launch = pytest.importorskip("accelerate.commands.launch", reason=reason)
    tables = ("fsdp_config", "deepspeed_config", "parallelism_config")
    names = {field.name for field in fields(config_args.ClusterConfig)} - {*tables}
    options = vars(launch.launch_command_parser().parse_args(["program.py"]))
    # --zero_stage and the like, which its questions keep in deepspeed_config
    of_deepspeed = [
        option
        for option in options
        if option.startswith(("deepspeed_", "zero", "offload_", "grad"))
    ]
    names |= {f"deepspeed_config.{option}" for option in of_deepspeed}
    names |= {
        f"parallelism_config.{option}"
        for option in options
        if option.startswith("parallelism_config_")
    }
    for name in names:
        assert class_of(name), name
        assert (name in READ) + (name in WHY) + (name in UNUSED) == 1, name
    known_of_fsdp = {
        *trainer_fsdp.UNUSED,
        *trainer_fsdp.RESHARDS,
        *trainer_fsdp.OFFLOADS,
        trainer_fsdp.OFFLOADS_ACTIVATIONS,
        trainer_fsdp.RECOMPUTES,
    }
    for option in options:
        if option.startswith("fsdp_"):
            assert option.removeprefix("fsdp_") in known_of_fsdp, option


def test_keys_that_are_read_become_keys_of_a_run() -> None:
    for ours in READ.values():
        assert set(ours) <= known_keys()


def test_a_configuration_becomes_its_run(tmp_path: Path) -> None:
    config = run_of(tmp_path, FSDP2)
    assert (config.parallel.data, config.parallel.zero) == (8, 3)
    assert config.precision.compute == "bf16"
    made = imported(written(tmp_path, FSDP2), keys=[*KEYS, BATCH])
    assert "fsdp_config: cpu_ram_efficient_loading = True" in made.text.replace("\n#   ", " ")


@pytest.mark.parametrize(
    ("changes", "zero", "recompute"),
    [
        ({"version": 2, "reshard_after_forward": True}, 3, "none"),
        ({"version": 2, "reshard_after_forward": False}, 2, "none"),
        ({"version": 1, "sharding_strategy": "FULL_SHARD"}, 3, "none"),
        ({"version": 1, "reshard_after_forward": "SHARD_GRAD_OP"}, 2, "none"),
        ({"sharding_strategy": 3}, False, "none"),
        ({"activation_checkpointing": True}, 3, "full"),
    ],
)
def test_what_fsdp_shards_is_a_stage_of_zero(
    changes: dict[str, Any], zero: bool | int, recompute: str, tmp_path: Path
) -> None:
    parallel = run_of(tmp_path, with_fsdp(**changes)).parallel
    assert (parallel.zero, parallel.recompute) == (zero, recompute)


def test_axes_are_those_of_the_layout(tmp_path: Path) -> None:
    sizes = {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "cp": 2}
    axes = {AXIS.format(name): size for name, size in sizes.items()}
    content = FSDP2 | {"num_processes": 16, "parallelism_config": axes}
    parallel = run_of(tmp_path, content).parallel
    assert (parallel.tensor, parallel.context, parallel.data) == (2, 2, 4)
    # context ranks share weights too
    assert (parallel.zero, parallel.zero_size) == (3, 4)


def test_replicas_without_a_plugin_hold_all(tmp_path: Path) -> None:
    config = run_of(tmp_path, {"distributed_type": "MULTI_GPU", "num_processes": 2})
    assert (config.parallel.data, config.parallel.zero) == (2, False)
    # accelerate's "no" is YAML's false
    config = run_of(tmp_path, {"distributed_type": "NO", "num_processes": 1, "use_cpu": False})
    assert (config.parallel.data, config.parallel.zero) == (1, True)


def test_deepspeed_is_that_of_accelerates_own_keys_or_of_a_file(tmp_path: Path) -> None:
    config = run_of(tmp_path, DEEPSPEED, "train.global_batch=8")
    assert (config.parallel.data, config.parallel.zero, config.optimizer.clip) == (4, 2, 0.5)
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    named = {"deepspeed_config": {"deepspeed_config_file": "ds.json", "zero3_init_flag": False}}
    assert run_of(tmp_path, DEEPSPEED | named).parallel.zero is True


def test_beside_arguments_of_the_trainer_it_says_ranks_and_precision(tmp_path: Path) -> None:
    arguments = {
        "model_name_or_path": "some/model",
        "output_dir": "out",
        "per_device_train_batch_size": 2,
        "max_steps": 10,
        "max_length": 64,
    }
    trainer = written(tmp_path, arguments, "trainer.yaml")
    made = imported(trainer, written(tmp_path, FSDP2), keys=[])
    for row in ("global_batch = 16 ", "data = 8 ", "zero = 3 ", 'compute = "bf16" '):
        assert f"\n{row}" in made.text, row
    sizes = {AXIS.format(name): 2 for name in ("dp_shard", "tp", "cp")}
    axes = FSDP2 | {"parallelism_config": sizes}
    made = imported(trainer, written(tmp_path, axes), keys=[])
    for row in ("global_batch = 4 ", "data = 2 ", "tensor = 2 ", "context = 2 "):
        assert f"\n{row}" in made.text, row


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (with_fsdp(offload_params=True), "offload_params = True"),
        (with_fsdp(activation_checkpointing_offload=True), "activation_checkpointing_offload"),
        (with_fsdp(no_such=1), "no_such = 1"),
        (FSDP2 | {"no_such": 1}, "no_such = 1"),
        (FSDP2 | {"fsdp_config": [1, 2]}, "fsdp_config = [1, 2] ("),
        (FSDP2 | {"parallelism_config": 4}, "parallelism_config = 4 ("),
        (FSDP2 | {"mixed_precision": "fp8"}, "mixed_precision = fp8"),
        (FSDP2 | {"fp8_config": {"backend": "TE"}}, "fp8_config"),
        (FSDP2 | {"distributed_type": "MEGATRON_LM"}, "distributed_type = MEGATRON_LM"),
        (FSDP2 | {"num_processes": "eight"}, "num_processes = eight"),
        (FSDP2 | {"parallelism_config": {AXIS.format("dp_shard"): 4}}, "are 4 ranks"),
        (FSDP2 | {"parallelism_config": {AXIS.format("sp"): 2}}, "parallel.context"),
        (
            DEEPSPEED | {"deepspeed_config": {"deepspeed_config_file": "none.json"}},
            "deepspeed_config.deepspeed_config_file = none.json",
        ),
        (
            DEEPSPEED | {"deepspeed_config": {"zero_stage": 3, "offload_param_device": "cpu"}},
            "offload_param",
        ),
    ],
)
def test_what_is_not_known_or_changes_the_run_is_refused_by_name(
    content: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        imported(written(tmp_path, content), keys=[*KEYS, BATCH])
    assert any(said in problem for problem in caught.value.problems), caught.value.problems


def test_tables_of_a_type_that_is_not_chosen_count_for_nothing(tmp_path: Path) -> None:
    content = DEEPSPEED | {"fsdp_config": {"fsdp_offload_params": True}}
    assert run_of(tmp_path, content, "train.global_batch=8").parallel.zero == 2


@pytest.mark.parametrize("half", ["bf16", "fp16"])
@pytest.mark.parametrize("version", [1, 2])
def test_fsdp_reduces_gradients_in_the_dtype_of_products(
    version: int, half: str, tmp_path: Path
) -> None:
    """accelerate's FSDP plugin has one dtype for param_dtype and reduce_dtype."""
    run = run_of(tmp_path, with_fsdp(version=version) | {"mixed_precision": half})
    assert (run.precision.reduce, run.precision.gradients) == (half, "fp32")


@pytest.mark.parametrize("kind", ["MULTI_GPU", "FSDP"])
def test_the_scale_of_fp16_is_that_of_torchs_scaler(kind: str, tmp_path: Path) -> None:
    """GradScalerKwargs of accelerate: the first overflow lowers the scale, 2000 steps raise it."""
    content = {"distributed_type": kind, "num_processes": 4, "mixed_precision": "fp16"}
    precision = run_of(tmp_path, content).precision
    assert (precision.initial_scale, precision.growth_interval) == (2.0**16, 2000)
    assert (precision.hysteresis, precision.min_scale) == (1, 2.0**-126)
    assert (precision.growth_factor, precision.backoff_factor) == (2.0, 0.5)
    assert precision.reduce == ("fp16" if kind == "FSDP" else "fp32")


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_deepspeed_has_gradients_in_the_precision_of_accelerate(half: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2})
    )
    named = DEEPSPEED | {"deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    for content in (DEEPSPEED, named):
        precision = run_of(
            tmp_path, content | {"mixed_precision": half}, "train.global_batch=8"
        ).precision
        assert (precision.compute, precision.gradients, precision.reduce) == (half, half, half)
        assert (precision.growth_interval, precision.hysteresis) == (1000, 2)


def test_a_clipping_that_no_file_names_is_a_note(tmp_path: Path) -> None:
    made = imported(written(tmp_path, FSDP2), keys=[*KEYS, BATCH])
    assert any("optimizer.clip = 1.0" in note for note in made.notes)
