"""Precision in a run file: natively, or in one other system's words, which come to native keys with
their origins."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.errors import UserError
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.plan import LossScaling, plan
from tests.ranks import run_ranks
from tests.refusals import sentence
from tests.runs import steps, train_each_on, train_on, write_run
from tools.config.rules.all_rules import CHECKS
from tools.config.run_file import RunConfig, load_run
from tools.config.tables.native_keys import KEYS
from tools.training.corpus import open_corpus
from tools.training.trainer import Trainer

MINIMAL = [
    "model.preset=llama-demo",
    "train.steps=10",
    "train.global_batch=8",
    "train.micro_batch=2",
]
MINIMAL += ["train.seq_length=64"]
BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32


def load(*overrides: str) -> RunConfig:
    return load_run(None, [*MINIMAL, *overrides])


def problems(*overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(*overrides)
    return list(caught.value.problems)


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16", "fp64"])
def test_compute_alone_is_the_plan_of_that_name(compute: str) -> None:
    assert load(f"precision.compute={compute}").plan == plan(compute)


@pytest.mark.parametrize(
    ("keys", "field", "value"),
    [
        (["parameters=fp32"], "parameters", FP32),
        (['keep_fp32=["head.weight"]'], "keep_fp32", ("head.weight",)),
        (["gradients=bf16"], "gradients", BF16),
        (["gradients=bf16"], "reduce", BF16),
        (["reduce=bf16"], "reduce", BF16),
        (["masters=split"], "remainders", True),
        (["masters=none"], "masters", BF16),
        (["masters_in_checkpoint=false"], "masters_in_checkpoint", False),
        (["moments=bf16"], "moments", BF16),
        (["masters=none", "rounding=stochastic"], "rounding", "stochastic"),
        (["pipeline=fp32"], "pipeline", FP32),
        (["buffers=bf16"], "buffers", BF16),
        (["output=bf16"], "output", BF16),
        (["tf32=true"], "tf32", True),
        (["on_nonfinite=ignore"], "on_nonfinite", "ignore"),
        (["loss_scale=128"], "scaling", LossScaling("constant", 128.0)),
        (["scaling=dynamic"], "scaling", LossScaling("dynamic")),
    ],
)
def test_a_native_key_decides_its_field(keys: list[str], field: str, value: Any) -> None:
    keys = [f"precision.{key}" for key in keys]
    assert getattr(load("precision.compute=bf16").plan, field) != value
    decided = load("precision.compute=bf16", *keys).plan
    assert getattr(decided, field) == value
    assert decided.origin[field].partition(" ")[0] in [key.partition("=")[0] for key in keys]


def test_the_fp8_table_is_the_recipe() -> None:
    assert load("precision.compute=bf16").plan.fp8 is None
    made = load(
        "precision.compute=bf16", "fp8.kind=current", "fp8.format=e4m3", "fp8.last_layers=1"
    ).plan
    assert made.fp8 == FP8Recipe("current", "e4m3", last_layers=1)
    assert made.origin["fp8"].startswith("fp8.kind (command line), fp8.format")


def test_every_field_of_a_plan_has_native_keys_that_exist() -> None:
    config = load()
    assert all(config.get(key) is not None for keys in KEYS.values() for key in keys)


def test_a_dialect_is_read_from_a_file_and_changed_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text('[precision.nemo]\nrecipe = "bf16_with_fp8_mixed"\nfp8_margin = 1\n')
    config = load_run(
        file, [*MINIMAL, "precision.nemo.fp8_margin=3", "precision.nemo.grad_reduce_in_fp32=false"]
    )
    assert config.plan.fp8 == FP8Recipe(margin=3, reduce_over="stage", parameters=True)
    assert config.plan.reduce == BF16
    recipe = f"precision.nemo.recipe (file {file})"
    assert (
        config.plan.origin["reduce"]
        == f"precision.nemo.grad_reduce_in_fp32 (command line), {recipe}"
    )
    assert config.plan.origin["fp8"] == f"{recipe}, precision.nemo.fp8_margin (command line)"
    assert config.origin("precision.compute") == config.plan.origin["compute"] == recipe


@pytest.mark.parametrize(
    "overrides",
    [
        ["precision.nxd.use_master_weights=true", "precision.nxd.use_master_weights_in_ckpt=true"],
        ["precision.nxd.use_fp32_grad_acc=false", "parallel.zero=true"],
        ["precision.nxd={}", "parallel.zero=false"],
        [
            'precision.smp.mixed_precision={param_dtype="bfloat16"}',
            "precision.smp.fp8_autocast.enabled=true",
        ],
        ["precision.colossalai.fp16.mode=TORCH", "precision.patience=3"],
        ["precision.colossalai.fp16.mode=AMP_TYPE.APEX", "precision.colossalai.fp16.opt_level=O2"],
        ["precision.colossalai.fp16.mode=PARALLEL", "precision.on_nonfinite=raise"],
        ["precision.internevo.dtype=torch.tf32", "precision.internevo.embed_grad_scale=0.1"],
        ["precision.nemo.precision=16"],
    ],
)
def test_a_saved_dialect_run_is_the_same_run(overrides: list[str], tmp_path: Path) -> None:
    config = load(*overrides)
    again = load_run(config.save_resolved(tmp_path))
    assert dict(again) == dict(config)
    assert again.plan == config.plan


def test_the_saved_run_says_which_key_of_the_dialect_decided_what(tmp_path: Path) -> None:
    text = load("precision.nxd.use_master_weights=true").save_resolved(tmp_path).read_text()
    assert 'masters = "fp32"  # precision.nxd.use_master_weights (command line)' in text
    assert "clip = 1.0  # precision.nxd.optimizer_config.max_grad_norm (NxD's default)" in text


def test_zero_of_the_run_is_zero_of_nxd() -> None:
    on = load("precision.nxd={}")
    off = load("precision.nxd={}", "parallel.zero=false")
    assert (on.plan.masters, on.plan.rounding, on.parallel.zero) == (FP32, "nearest", True)
    assert (off.plan.masters, off.plan.rounding, off.parallel.zero) == (BF16, "stochastic", False)
    config = load("precision.nxd.optimizer_config.zero_one_enabled=false")
    assert not config.parallel.zero
    assert (
        config.origin("parallel.zero")
        == "precision.nxd.optimizer_config.zero_one_enabled (command line)"
    )


def test_a_dialects_default_gives_way_to_a_key_of_the_run_and_its_own_keys_to_nothing() -> None:
    assert load("precision.nxd={}", "optimizer.clip=2.0").optimizer.clip == 2.0
    asked = load("precision.nxd.optimizer_config.max_grad_norm=3.0")
    assert (asked.optimizer.clip, asked.origin("optimizer.clip").partition(" ")[0]) == (
        3.0,
        "precision.nxd.optimizer_config.max_grad_norm",
    )


def test_a_model_in_internevos_words_is_the_model() -> None:
    words = [
        "dtype=torch.bfloat16",
        "num_layers=2",
        "hidden_size=64",
        "num_attention_heads=4",
        "mlp_ratio=2.0",
    ]
    words += [
        "norm_type=layernorm",
        "layer_norm_epsilon=1e-6",
        "hybrid_zero_optimizer.clip_grad_norm=0.5",
    ]
    config = load_run(None, [*MINIMAL[1:], *(f"precision.internevo.{word}" for word in words)])
    m = config.model
    assert (m.layers, m.hidden, m.heads, m.ffn, m.norm, m.norm_eps) == (
        2,
        64,
        4,
        256,
        "layer",
        1e-6,
    )
    assert config.optimizer.clip == 0.5


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (
            ["precision.nemo.recipe=fp16_mixed", "precision.nxd={}"],
            [sentence("config.several_dialects", tables="[precision.nxd] and [precision.nemo]")],
        ),
        (
            ["precision.nemo.recipe=fp16_mixed", "precision.compute=bf16", "fp8.kind=mx"],
            [
                sentence(
                    "config.native_beside_dialect",
                    key="precision.compute",
                    value='"bf16"',
                    origin="command line",
                    table="[precision.nemo]",
                ),
                sentence(
                    "config.native_beside_dialect",
                    key="fp8.kind",
                    value='"mx"',
                    origin="command line",
                    table="[precision.nemo]",
                ),
            ],
        ),
        (
            ["precision.nemoo.recipe=fp16_mixed"],
            [
                r'precision.nemoo.recipe = "fp16_mixed" \(command line\): no such key; did you mean precision.nemo\?'
            ],
        ),
        (["precision.nxd=3"], [r"precision.nxd = 3.*: must be a table of keys \(NxD\)"]),
        (
            ["precision.nxd.use_master_weights=true", "parallel.zero=false"],
            [r"precision.nxd.use_master_weights = true \(command line\): needs ZeRO-1: set .*"],
        ),
        (
            ["precision.nxd.optimizer_config.max_grad_norm=3.0", "optimizer.clip=2.0"],
            [
                sentence(
                    "config.dialect_contradicted",
                    key="optimizer.clip",
                    value="2.0",
                    origin="command line",
                    decider=re.compile(r" \(command line\)"),
                    decided="3.0",
                )
            ],
        ),
        (
            ["precision.nemo.precision=bf17", "precision.nemo.fp8=e5m2", "train.stps=4"],
            [
                'precision.nemo.precision = "bf17" .*',
                'precision.nemo.fp8 = "e5m2" .*',
                "train.stps .*",
            ],
        ),
        (
            ["precision.scaling=constant"],
            [r'precision.scaling = "constant", precision.loss_scale = 0: .*'],
        ),
        (
            ["precision.scaling=none", "precision.loss_scale=2"],
            [r'precision.scaling = "none", .*scale = 2: .*'],
        ),
        (
            ["precision.masters=split"],
            ["precision." + sentence("precision.split_masters")],
        ),
        (
            ["precision.rounding=stochastic"],
            ["precision." + sentence("precision.stochastic_weights")],
        ),
        (
            ["precision.residual=bf16"],
            ["precision." + sentence("precision.narrow_residual", residual="bf16", compute="fp32")],
        ),
        (
            ["precision.compute=bf16", "precision.gradients=fp16"],
            ["precision." + sentence("precision.gradients", gradients="fp16")],
        ),
        (["precision.compute=bf17"], [r'precision.compute = "bf17" .*; did you mean bf16\?']),
        (
            ["precision.keep_fp32=head"],
            [
                r'precision.keep_fp32 = "head" \(command line\): must be a list in brackets, like \[.*'
            ],
        ),
        (
            ["fp8.kind=delay"],
            [r'fp8.kind = "delay" \(command line\): must be .*; did you mean delayed\?'],
        ),
        (
            ["fp8.history_length=0"],
            [r"fp8.history_length = 0 \(command line\): must be greater than 0"],
        ),
    ],
    ids=lambda v: v[0] if "=" in v[0] else "",
)
def test_what_contradicts_is_refused(overrides: list[str], lines: list[str]) -> None:
    said = problems(*overrides)
    assert len(said) == len(lines), said
    for line, expected in zip(said, lines, strict=True):
        assert re.fullmatch(expected, line), line


def test_all_laws_about_precision_are_checked() -> None:
    assert {"_plan", "_kind_of_scale", "_scale"} <= {check.__name__ for check in CHECKS}


@pytest.mark.slow
def test_a_run_in_a_dialect_trains_as_the_same_run_in_native_keys(tmp_path: Path) -> None:
    """Same steps, bit for bit."""
    file = write_run(tmp_path)
    theirs = ["precision.nemo.recipe=fp16_mixed", "precision.nemo.grad_reduce_in_fp32=true"]
    theirs += ["precision.nemo.fp16_initial_loss_scale=1024.0"]
    ours = ["precision.compute=fp16", "precision.initial_scale=1024"]
    records = [
        steps(train_on(file, *keys, f"train.folder={tmp_path}/{name}", tensor=2))
        for name, keys in (("theirs", theirs), ("ours", ours))
    ]
    assert records[0] == records[1]
    assert records[0][0]["loss_scale"] == 1024


@pytest.mark.slow
def test_a_run_in_internevos_words_trains_as_the_same_run_in_native_keys(tmp_path: Path) -> None:
    """The first has no [model]; the second is what the first one came to, as its folder says."""
    file = write_run(tmp_path)
    head, _, rest = file.read_text().partition("[model]")
    bare = tmp_path / "bare.toml"
    bare.write_text(head + rest[rest.index("[", 1) :])
    words = [
        "dtype=torch.bfloat16",
        "num_layers=2",
        "hidden_size=32",
        "num_attention_heads=2",
        "mlp_ratio=2.0",
    ]
    keys = [f"precision.internevo.{word}" for word in words]
    theirs = train_on(bare, *keys, f"train.folder={tmp_path}/theirs", tensor=2)
    native = theirs / "run.toml"
    assert "[precision.internevo" not in native.read_text()
    assert steps(theirs) == steps(train_on(native, f"train.folder={tmp_path}/ours", tensor=2))
    assert steps(theirs)[-1]["loss"] < steps(theirs)[0]["loss"]


MODES = {
    "nxd": "nxd={}",
    "nxd_legacy": "nxd.optimizer_config.zero_one_enabled=false",
    "smp": 'smp.mixed_precision={param_dtype="bfloat16"}',
    "smp_policy": 'smp={mp_policy={param_dtype="half"},grad_scaler={init_scale=1024.0}}',
    "torch": 'colossalai.fp16={mode="TORCH",init_scale=1024.0}',
    "parallel": 'colossalai.fp16={mode="PARALLEL",initial_scale=1024}',
    **{
        level: f'colossalai.fp16={{mode="APEX",opt_level="{level}"}}'
        for level in ("O0", "O1", "O2", "O3")
    },
    "internevo": 'internevo={dtype="torch.bfloat16",use_fp32_norm=true}',
    "tf32": 'internevo={dtype="torch.tf32"}',
    "nemo_bf16": 'nemo={recipe="bf16_mixed"}',
    "nemo_fp16": 'nemo={recipe="fp16_mixed",fp16_initial_loss_scale=1024.0}',
}


@pytest.mark.slow
def test_every_mode_takes_steps_on_two_tensor_ranks(tmp_path: Path) -> None:
    """That the numbers of a mode are right is for other tests; here that its plan is one which
    runs."""
    file = write_run(tmp_path)
    runs = [
        [f"precision.{mode}", "train.steps=3", f"train.folder={tmp_path}/{name}"]
        for name, mode in MODES.items()
    ]
    train_each_on(file, runs, tensor=2)
    for name in MODES:
        taken = steps(tmp_path / name)
        loss = [record["loss"] for record in taken]
        assert [record["outcome"] for record in taken] == ["applied"] * 3, name
        assert loss[-1] < loss[0], name


def _switches_of_a_run(
    mesh: DeviceMesh, file: Path, keys: list[str]
) -> tuple[set[tuple[bool, ...]], bool]:
    """The switches at every step, and whether they are afterwards what they were before."""
    config = load_run(file, keys)
    trainer = Trainer(config, open_corpus(config), mesh)
    seen = set()
    before = gpu_switches()
    step = trainer.step
    trainer.step = lambda: (seen.add(gpu_switches()), step())[1]  # type: ignore[method-assign]
    trainer.run()
    return seen, gpu_switches() == before


def gpu_switches() -> tuple[bool, ...]:
    """Whether TF32 is on, for products and for cuDNN, and whether sums of 16-bit products may be
    rounded to 16 bits."""
    matmul = torch.backends.cuda.matmul
    narrow = (
        matmul.allow_bf16_reduced_precision_reduction
        or matmul.allow_fp16_reduced_precision_reduction
    )
    return bool(matmul.allow_tf32), torch.backends.cudnn.allow_tf32, bool(narrow)


@pytest.mark.parametrize(("dtype", "on"), [("torch.tf32", True), ("torch.float32", False)])
def test_tf32_is_on_for_the_time_of_a_run_that_asks_for_it(
    dtype: str, on: bool, tmp_path: Path
) -> None:
    keys = [f"precision.internevo.dtype={dtype}", "train.steps=2"]
    file = write_run(tmp_path)
    for seen, restored in run_ranks(
        _switches_of_a_run, {"pp": 1, "dp": 1, "tp": 1}, file=file, keys=keys
    ):
        assert seen == {(on, on, False)}
        assert restored
