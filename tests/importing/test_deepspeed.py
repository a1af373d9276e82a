"""A configuration of DeepSpeed: every key is read, refused or without a meaning; the batch follows
DeepSpeed's rule."""

import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megaprec.errors import UserError
from tools.config.rules.derived import lr_schedule
from tools.config.run_file import RunConfig, load_run, read_run_settings
from tools.interop.arguments.deepspeed import READ, UNUSED, WHY
from tools.interop.importing.run import import_run

KEYS = ("model.preset=llama-demo", "train.steps=100", "train.seq_length=32")
FULL: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 10,
    "fp16": {
        "enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 3,
        "min_loss_scale": 2,
    },
    "zero_optimization": {"stage": 1, "overlap_comm": True, "allgather_bucket_size": 5e8, "reduce_bucket_size": 5e6},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 90, "warmup_num_steps": 9, "warmup_min_lr": 1e-5, "warmup_max_lr": 3e-4, "warmup_type": "linear"},
    },
    "wall_clock_breakdown": False,
    "flops_profiler": {"enabled": True, "profile_step": 5},
}  # fmt: skip


def made(
    tmp_path: Path,
    config: object,
    *items: str,
    ranks: int | None = None,
    keys: Sequence[str] = KEYS,
) -> RunConfig:
    path = tmp_path / "ds.json"
    run = tmp_path / "run.toml"
    path.write_text(json.dumps(config))
    given, _ = read_run_settings(None, keys)
    run.write_text(import_run([*items, str(path)], given, {}, ranks).text)
    return load_run(run)


def refused(
    tmp_path: Path,
    config: object,
    *items: str,
    ranks: int | None = None,
    keys: Sequence[str] = KEYS,
) -> list[str]:
    with pytest.raises(UserError) as caught:
        made(tmp_path, config, *items, ranks=ranks, keys=keys)
    return list(caught.value.problems)


def test_a_configuration_becomes_the_keys_of_a_run(tmp_path: Path) -> None:
    run = made(tmp_path, FULL)
    p = run.precision
    assert (run.train.global_batch, run.train.micro_batch, run.parallel.data) == (64, 4, 8)
    assert (p.compute, p.initial_scale, p.growth_interval, p.hysteresis, p.min_scale) == (
        "fp16",
        4096.0,
        500,
        3,
        2.0,
    )
    assert (p.hysteresis_refill, p.gradients, p.reduce, p.on_nonfinite) == (
        "growth",
        "fp16",
        "fp16",
        "skip",
    )
    assert (run.parallel.zero, run.parallel.overlap, run.parallel.bucket) == (True, True, 5_000_000)
    optimizer = run.optimizer
    assert (optimizer.name, optimizer.betas, optimizer.eps) == ("adamw", (0.9, 0.95), 1e-6)
    assert (optimizer.weight_decay, optimizer.clip) == (0.1, 1.0)
    assert (run.lr.schedule, run.lr.peak, run.lr.warmup, run.lr.length, run.lr.final) == (
        "linear",
        3e-4,
        9,
        90,
        1e-5,
    )
    assert run.lr.initial == 1e-5
    assert run.log.every == 10


@pytest.mark.parametrize("lowest", [0.0, 1e-5])
def test_each_step_has_the_rate_that_deepspeed_computes(lowest: float, tmp_path: Path) -> None:
    """Of the step after it, as the note says. WarmupDecayLR falls to warmup_min_lr, not to 0."""
    params = {
        "total_num_steps": 90,
        "warmup_num_steps": 9,
        "warmup_min_lr": lowest,
        "warmup_max_lr": 3e-4,
        "warmup_type": "linear",
    }
    run = made(tmp_path, FULL | {"scheduler": {"type": "WarmupDecayLR", "params": params}})
    schedule = lr_schedule(run.lr, run.train)
    for iteration in range(100):
        part = min(iteration / 9, max(0.0, (90 - iteration) / (90 - 9)))
        assert schedule.at(iteration) == pytest.approx(lowest + (3e-4 - lowest) * part, rel=1e-12)


@pytest.mark.parametrize(
    ("sizes", "ranks", "expected"),
    [
        ((64, 4, 2), None, (64, 4, 8)),
        ((64, 4, 2), 8, (64, 4, 8)),
        ((64, 4, None), 8, (64, 4, 8)),
        ((64, None, 2), 8, (64, 4, 8)),
        ((None, 4, 2), 8, (64, 4, 8)),
        ((64, None, None), 8, (64, 8, 8)),
        ((None, 4, None), 8, (32, 4, 8)),
        ((64, 4, None), None, (64, 4, 1)),
        ((64, 4, "auto"), 8, (64, 4, 8)),
    ],
)
def test_the_batch_is_that_of_deepspeeds_rule(
    sizes: tuple[Any, ...], ranks: int | None, expected: tuple[int, int, int], tmp_path: Path
) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
    keys = (*KEYS, "train.global_batch=64") if "auto" in sizes else KEYS
    run = made(tmp_path, config, ranks=ranks, keys=keys)
    assert (run.train.global_batch, run.train.micro_batch, run.parallel.data) == expected


@pytest.mark.parametrize(("stage", "zero"), [(0, False), (1, True), (2, 2), (3, 3)])
def test_stages_of_zero_keep_their_numbers(stage: int, zero: bool | int, tmp_path: Path) -> None:
    run = made(tmp_path, FULL | {"zero_optimization": {"stage": stage}})
    assert run.parallel.zero == zero
    assert run.parallel.shards_gradients == (stage >= 2)
    assert run.parallel.shards_weights == (stage == 3)


@pytest.mark.parametrize(
    ("zero", "offload"),
    [
        ({"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": True}}, "host"),
        ({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1.0}}, "host"),
        ({"stage": 2, "cpu_offload": True}, "host"),
        ({"stage": 2, "cpu_offload": False}, "none"),
        ({"stage": 2, "offload_optimizer": {"device": "none"}}, "none"),
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, "none"),
    ],
)
def test_an_optimizer_in_host_memory_lies_there(
    zero: dict[str, Any], offload: str, tmp_path: Path
) -> None:
    assert made(tmp_path, FULL | {"zero_optimization": zero}).optimizer.offload == offload


def test_the_groups_of_mics_are_those_that_share_state_at_stage_3_alone(tmp_path: Path) -> None:
    groups = {"mics_shard_size": 2, "reduce_bucket_size": 5e8}
    for stage, size, bucket in ((3, 2, 0), (2, 0, 5e8)):
        run = made(tmp_path, FULL | {"zero_optimization": {"stage": stage, **groups}})
        assert (run.parallel.zero_size, run.parallel.bucket) == (size, bucket), stage


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"train_batch_size": 60}, "60 is not 4 x 2 x"),
        ({"train_batch_size": "auto"}, "train_batch_size = 'auto' (ds.json): what it will be is not known"),
        ({"train_batch_size": True}, "must be a whole number"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4 (ds.json): the stages of ZeRO are"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}}, "offload_optimizer.device = 'nvme' (ds.json): masters and moments lie on the device or in host memory"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "weights stay on the device here"),
        ({"zero_optimization": {"stage": 3, "cpu_offload_param": True}}, "weights stay on the device here"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type = 'OneBitAdam' (ds.json): the update rules here"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type = 'OneCycle'"),
        ({"scheduler": {"type": "WarmupLR"}}, "warm-up is linear here"),
        ({"bf16": {"enabled": True}}, "bf16.enabled and fp16.enabled (ds.json): give one of them"),
        ({"gradient_cliping": 1}, "no such key of DeepSpeed is known here; did you mean gradient_clipping?"),
        ({"sparse_attention": {"mode": "fixed"}}, "attention is dense here"),
        ({"fp16": {"enabled": True, "initial_scale_power": 1000}}, "give a power of two from 0 to 127"),
        ({"fp16": {"enabled": "yes"}}, "fp16.enabled = 'yes' (ds.json): must be a bool"),
        ({"fp16": True}, "fp16 = True (ds.json): must be a table of keys in braces"),
        ({"zero_optimization": True}, "zero_optimization = True (ds.json): must be a table of keys in braces"),
        ({"zero_optimization": {"stge": 1}}, "no such key of DeepSpeed is known here; did you mean zero_opt"),
        ({"zero_optimization": {"reduce_bucket_size": float("inf")}}, "bucket_size = inf (ds.json): must be finite"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "all gradients of a step are applied in it"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping = nan (ds.json): must be finite"),
        ({"optimizer": "Adam"}, "optimizer = 'Adam' (ds.json): must be a table of keys in braces"),
        ({"optimizer": {"type": "Muon"}}, "optimizer.type = 'Muon' (ds.json): the update rules here"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}}, "warm-up is linear here"),
        ({"torch_autocast": {"enabled": True}}, "give precision.compute=bf16 beside the file"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_by_its_name(
    change: dict[str, Any], line: str, tmp_path: Path
) -> None:
    said = refused(tmp_path, FULL | change, ranks=8 if "60 is" in line else None)
    assert any(line in problem for problem in said), said


def test_a_configuration_and_a_command_line_are_one_run_and_may_not_contradict(
    tmp_path: Path,
) -> None:
    line = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
        "--max-position-embeddings 64 "
        "--micro-batch-size 4 --global-batch-size 64 --lr 3e-4 --train-iters 100 --data-path "
        "tokens/mine "
        "--vocab-size 500 --save runs/mine"
    )
    both = {
        key: FULL[key]
        for key in ("train_batch_size", "fp16", "zero_optimization", "gradient_clipping")
    }
    run = made(tmp_path, both, line, ranks=8, keys=())
    assert (
        run.precision.initial_scale,
        run.parallel.zero,
        run.parallel.data,
        run.model.layers,
    ) == (4096.0, True, 8, 4)
    (said,) = refused(
        tmp_path,
        both,
        line.replace("--global-batch-size 64", "--global-batch-size 32"),
        ranks=8,
        keys=(),
    )
    assert (
        "train.global_batch: --global-batch-size 32 says 32, but train_batch_size = 64 says "
        "64: keep one"
    ) in said


def test_a_configuration_alone_says_what_is_missing(tmp_path: Path) -> None:
    said = refused(tmp_path, FULL, keys=())
    assert any(problem.startswith("train.steps is missing") for problem in said)
    assert "model.preset" in said[-1]


def test_an_empty_configuration_decides_nothing(tmp_path: Path) -> None:
    assert made(tmp_path, {}, ranks=1, keys=[*KEYS, "train.global_batch=8"]).train.global_batch == 8
    assert made(tmp_path, FULL | {"optimizer": None, "bf16": None, "activation_checkpointing": {}})


def test_random_configurations_end_with_a_run_or_with_lines(tmp_path: Path) -> None:
    rng = random.Random(0)
    values = [0, 1, -1, 2.5, "auto", "x", True, None, [], [1], {}, {"a": 1}, 10**30, 1e308]
    for _ in range(150):
        config = json.loads(json.dumps(FULL))
        for path in rng.choices([*READ, *WHY, *UNUSED, "other.key"], k=3):
            *tables, leaf = path.split(".")
            place = config
            for table in tables:
                if isinstance(place.get(table, {}), dict):
                    place = place.setdefault(table, {})
                else:
                    place = {}
            place[leaf] = rng.choice(values)
        try:
            made(tmp_path, config, ranks=rng.choice([None, 8]))
        except UserError as error:
            assert all(line.isprintable() for line in error.problems)  # noqa: PT017


def notes_of(tmp_path: Path, config: object, *keys: str) -> tuple[str, ...]:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    given, _ = read_run_settings(None, [*KEYS, "data.source=tokens/mine", *keys])
    return import_run([str(path)], given, {}, None).notes


def test_a_default_that_stands_in_for_what_a_file_leaves_open_is_a_note(tmp_path: Path) -> None:
    bare = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "gradient_clipping": 1.0}
    (ours,) = [note for note in notes_of(tmp_path, bare) if "megaprec's default" in note]
    for key, value in {
        "lr.peak": "0.0003",
        "optimizer.weight_decay": "0.1",
        "lr.schedule": '"cosine"',
    }.items():
        assert f"{key} = {value}" in ours
    assert "optimizer.betas = [0.9, 0.95]" in ours and "optimizer.eps" in ours
    named = bare | {"optimizer": {"type": "AdamW"}}
    (theirs,) = [note for note in notes_of(tmp_path, named) if "DeepSpeed's default" in note]
    assert "lr.peak = 0.001" in theirs and "optimizer.betas = [0.9, 0.999]" in theirs
    assert not [note for note in notes_of(tmp_path, named) if "megaprec's default" in note]
    clip = {name: value for name, value in bare.items() if name != "gradient_clipping"}
    assert any(
        "gradient_clipping (ds.json) is left open: 1.0" in note for note in notes_of(tmp_path, clip)
    )


def test_what_is_given_beside_a_file_needs_no_note(tmp_path: Path) -> None:
    bare = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "gradient_clipping": 1.0}
    keys = [
        "optimizer.name=adamw",
        "optimizer.betas=[0.9, 0.95]",
        "optimizer.eps=1e-8",
        "lr.peak=3e-4",
    ]
    keys += ["optimizer.weight_decay=0.1", "lr.schedule=cosine", "precision.on_nonfinite=skip"]
    assert not notes_of(tmp_path, bare, *keys)


BESIDE = {
    "precision.masters": "none",
    "precision.moments": "bf16",
    "precision.on_nonfinite": "ignore",
    "precision.hysteresis_refill": "good_step",
    "precision.compute": "bf16",
    "precision.buffers": "bf16",
    "lr.schedule": "cosine",
}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "precision.moments"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "precision.masters"),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, "precision.on_nonfinite"),
        ({"fp16": {"consecutive_hysteresis": True}}, "precision.hysteresis_refill"),
        ({"data_types": {"param_dtype": "fp32"}}, "precision.compute"),
        ({"data_types": {"buffer_dtype": "bf16"}}, "precision.buffers"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "optimizer.name=Adam"),
        ({"scheduler": {"type": "WarmupCosineLR"}}, "of DeepSpeed's, WarmupLR, WarmupDecayLR"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_ratio": 0.1}}},
            "lr.initial is the rate",
        ),
        ({"gradient_allreduce_op": "sum"}, "gradients are averaged over replicas"),
        ({"managed_gradient_accumulation": False}, "an update follows all micro-batches"),
        ({"expert_parallel": {"enabled": True}}, "parallel.expert"),
        ({"weight_quantization": {"enabled": True}}, "there is no such quantization"),
    ],
)
def test_newer_keys_that_change_numbers_are_refused(
    change: dict[str, Any], line: str, tmp_path: Path
) -> None:
    config = (
        {key: value for key, value in FULL.items() if key != "fp16"}
        | {"bf16": {"enabled": True}}
        | change
    )
    said = refused(tmp_path, config)
    (told,) = [problem for problem in said if line in problem]
    # a way out names one thing, and taking it ends the problem
    asked = re.findall(r"give (\w+\.\w+)\S* beside", told)
    assert len(asked) <= 1 and len(re.findall(r"precision\.\w+", told)) <= 1, told
    if asked:
        made(tmp_path, config, keys=[*KEYS, f"{asked[0]}={BESIDE[asked[0]]}"])


def test_beside_a_schedule_of_the_users_the_rate_is_the_optimizers_and_the_rest_is_told(
    tmp_path: Path,
) -> None:
    params = {"total_num_steps": 90, "warmup_num_steps": 9}
    config = FULL | {"scheduler": {"type": "WarmupCosineLR", "params": params}}
    keys = [*KEYS, "lr.schedule=cosine"]
    run = made(tmp_path, config, keys=keys)
    assert (run.lr.schedule, run.lr.peak) == ("cosine", 3e-4)
    (told,) = [note for note in notes_of(tmp_path, config, *keys) if "WarmupCosineLR" in note]
    assert all(f"scheduler.params.{name} = {value}" in told for name, value in params.items())
    assert "lr.warmup" in told


WARMUP = {"warmup_num_steps": 9, "warmup_type": "linear", "total_num_steps": 90}


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
@pytest.mark.parametrize(
    ("optimizer", "params", "peak"),
    [
        ({"lr": 3e-4}, {}, 3e-4),
        ({"lr": 3e-4}, {"warmup_max_lr": 2e-3}, 2e-3),
        ({}, {"warmup_max_lr": 2e-3}, 2e-3),
        ({}, {}, 1e-3),
    ],
)
def test_a_warmup_without_a_rate_leads_to_that_of_the_optimizer(
    kind: str,
    optimizer: dict[str, Any],
    params: dict[str, Any],
    peak: float,
    tmp_path: Path,
) -> None:
    """As WarmupLR of DeepSpeed 0.19.6 takes it from the optimizer's groups."""
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": optimizer},
        "scheduler": {"type": kind, "params": WARMUP | params},
    }
    if kind == "WarmupLR":
        del config["scheduler"]["params"]["total_num_steps"]  # type: ignore[index]
    assert made(tmp_path, config).lr.peak == peak
    notes = notes_of(tmp_path, config)
    overruled = "optimizer.params.lr = 0.0003 (ds.json): scheduler.params.warmup_max_lr counts"
    assert any(overruled in note for note in notes) == (len(optimizer) == len(params) == 1)
    former = "scheduler.params.warmup_max_lr (ds.json) is left open"
    assert any(former in note for note in notes) == (not params and bool(optimizer))


@pytest.mark.parametrize("form", ["linear", "log"])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_shorter_warmup_than_deepspeed_knows_is_its_shortest(
    steps: int, form: str, tmp_path: Path
) -> None:
    """As WarmupLR of DeepSpeed 0.19.6: `max(2, warmup_num_steps)`, then `_get_gamma`."""
    params = {"warmup_num_steps": steps, "warmup_type": form, "warmup_max_lr": 1e-3}
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 8,
        "scheduler": {"type": "WarmupLR", "params": params},
    }
    run = made(tmp_path, config)
    schedule = lr_schedule(run.lr, run.train)
    warmup = max(2, steps)
    # the first step here has the rate of their second one
    for iteration in range(1, 6):
        part = 1.0
        if iteration < warmup:
            is_linear = form == "linear"
            part = iteration / warmup if is_linear else math.log(iteration + 1) / math.log(warmup)
        assert schedule.at(iteration) == pytest.approx(1e-3 * part, rel=1e-12)


@pytest.mark.parametrize(
    ("stage", "given", "hysteresis"), [(0, 3, 1), (0, None, 1), (1, 3, 3), (2, None, 2)]
)
def test_without_zero_the_first_overflow_lowers_the_scale(
    stage: int, given: int | None, hysteresis: int, tmp_path: Path
) -> None:
    """`FP16_Optimizer._update_scale` has no hysteresis; ZeRO's DynamicLossScaler has."""
    fp16: dict[str, Any] = {"enabled": True}
    if given is not None:
        fp16["hysteresis"] = given
    config = FULL | {"fp16": fp16, "zero_optimization": {"stage": stage}}
    assert made(tmp_path, config).precision.hysteresis == hysteresis
    said = "fp16.hysteresis = 3 (ds.json): no effect without ZeRO"
    assert any(said in note for note in notes_of(tmp_path, config)) == (not stage and given == 3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_gradients_are_accumulated_in_the_dtype_of_the_model(
    half: str, stage: int, tmp_path: Path
) -> None:
    """`get_data_types` of DeepSpeed 0.19.6, with ZeRO and without."""
    config = {name: value for name, value in FULL.items() if name != "fp16"}
    config |= {half: {"enabled": True}, "zero_optimization": {"stage": stage}}
    precision = made(tmp_path, config).precision
    assert (precision.gradients, precision.reduce) == (half, half)
    notes = notes_of(tmp_path, config)
    former = "data_types.grad_accum_dtype (ds.json) is left open"
    assert any(former in note for note in notes) == (half == "bf16" and stage == 0)
