"""A key of a run file that changes nothing beside its other keys is told, and no other; no key can
be forgotten."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaprec.optim.rules.lr import SCHEDULES
from megaprec.optim.rules.rule_table import RULES, rule_kind
from models.presets import PRESETS
from tools.config.key_help import key_tables
from tools.config.rules.effectless import EFFECT_RULES, Tables, effectless
from tools.config.run_file import load_run

RUN = (
    "model.layers=4 model.hidden=32 model.heads=4 train.steps=9 train.global_batch=8 "
    "train.micro_batch=2"
)
BASE = f"{RUN} train.seq_length=16".split()
EXPERTS = "model.experts=4"
FP8 = "fp8.kind=delayed"
SCALED = "precision.compute=fp16"
HALVED = "parallel.pipeline=2"
CANONICAL = "train.numerics=canonical train.threads=1"
DELTA = (
    "model.delta_net={key_heads=2,value_heads=4,key_dim=8,value_dim=8} model.delta_layers=[0,1,2,3]"
)
MAMBA = "model.mamba={heads=4,head_dim=8,state_dim=8,groups=2}"
MIXERS, BRANCHES = (f'{MAMBA} model.hybrid_pattern="{pattern}"' for pattern in ("MMMM", "M*M-"))
LATENT = "{kv_rank=8,rope_dim=4,nope_dim=4,value_dim=8}"
# keys that attention alone reads, and those of them that a pattern without attention refuses
OF_ATTENTION = {
    "kv_heads": "2",
    "head_dim": "16",
    "attention_scalar": "3.0",
    "rotary_fraction": "0.5",
    "rope_base": "5000.0",
    "rope_scaling": '{kind="linear",factor=2.0}',
    "positions": '"none"',
}
REFUSED_OF_ATTENTION = {
    "qk_norm": "true",
    "value_norm": "true",
    "attention_sinks": "true",
    "attention_gate": "true",
    "attention_softcap": "5.0",
    "qkv_bias": "true",
    "output_bias": "true",
    "attention_dropout": "0.5",
}
WINDOW = "model.window=4 model.window_rope_base=500.0"
# key, a value of it, keys beside which it has no effect, keys beside which it has one
CASES = [
    *((f"model.{key}", value, MIXERS, BRANCHES) for key, value in OF_ATTENTION.items()),
    *(
        (f"model.{key}", value, DELTA, DELTA.replace("[0,1,2,3]", "[0,1,2]"))
        for key, value in (OF_ATTENTION | REFUSED_OF_ATTENTION).items()
    ),
    ("model.latent", LATENT, DELTA, DELTA.replace("[0,1,2,3]", "[0,1,2]")),
    ("model.mlp", '"geglu"', MIXERS, BRANCHES),
    ("model.ffn", "64", MIXERS, BRANCHES),
    ("model.ffn", "64", MIXERS, f"{EXPERTS} {MAMBA} model.hybrid_pattern=ME*M"),
    ("model.mlp_bias", "true", MIXERS, BRANCHES),
    ("model.qk_norm_over", '"all"', "", "model.qk_norm=true"),
    ("optimizer.qk_clip_alpha", "0.3", "", "optimizer.qk_clip=100"),
    ("model.rope_base", "5000.0", "model.family=gpt2", ""),
    ("model.rope_base", "5000.0", WINDOW, f"{WINDOW} model.window_layers=[0]"),
    ("model.rope_scaling", '{kind="linear",factor=2.0}', WINDOW, ""),
    *(
        (f"model.{key}", value, "", EXPERTS)
        for key, value in {"experts_per_token": "1", "norm_topk": "false"}.items()
    ),
    *((f"model.router_{key}_loss", "0.5", "", EXPERTS) for key in ("aux", "z")),
    ("model.router", '{score="sigmoid",correction=true}', "", EXPERTS),
    (
        "model.router_correction_speed",
        "0.5",
        "",
        f'{EXPERTS} model.router={{score="sigmoid",correction=true}}',
    ),
    (
        "model.router_correction_speed",
        "0.5",
        EXPERTS,
        f'{EXPERTS} model.router={{score="sigmoid",correction=true}}',
    ),
    ("model.dropout_at", '"stream"', "", "model.dropout=0.1"),
    ("model.embedding_dropout", "0.3", 'model.dropout_at="stream"', ""),
    ("model.init", "{head=0.5}", "model.tied=true", "model.tied=false"),
    ("model.window", "64", "model.max_positions=64", "model.max_positions=65"),
    ("model.mtp_loss_weight", "0.5", "", "model.mtp_layers=1"),
    ("parallel.context_by", '"gather"', "", "parallel.context=2"),
    ("parallel.sequence", "true", "", "parallel.tensor=2"),
    ("parallel.sequence", "true", f"{CANONICAL} parallel.tensor=2", "parallel.tensor=2"),
    ("parallel.overlap", "true", "", "parallel.data=2"),
    ("parallel.zero", "2", "", "parallel.data=2"),
    ("parallel.zero", "3", "parallel.data=2 parallel.zero_size=1", "parallel.context=2"),
    ("parallel.zero_keep", "1", "parallel.zero=3", "parallel.zero=3 parallel.data=2"),
    ("parallel.zero_keep", "2MB", "parallel.zero=3", "parallel.zero=3 parallel.data=2"),
    ("log.profile", "[11,12]", "", "train.steps=11"),
    ("log.profile_ranks", "[0,0]", "", "log.profile=[1,2]"),
    ("parallel.overlap", "true", "", "parallel.context=2"),
    ("parallel.recompute", '"full"', "parallel.recompute_fraction=0.0", ""),
    (
        "parallel.recompute",
        '"full"',
        "parallel.recompute_fraction=0.2",
        "parallel.recompute_fraction=0.25",
    ),
    (
        "parallel.recompute",
        '"full"',
        f"{HALVED} parallel.recompute_fraction=0.3",
        f"{HALVED} parallel.recompute_layers=1",
    ),
    ("precision.reduce", '"bf16"', "", "parallel.data=2"),
    ("precision.pipeline", '"bf16"', "", "parallel.pipeline=2"),
    ("precision.pipeline", '"bf16"', "", "parallel.schedule=zb-v"),
    ("precision.buffers", '"bf16"', "model.family=gpt2", ""),
    *((f"precision.{key}_scale", "1e10", "", SCALED) for key in ("initial", "max")),
    ("precision.min_scale", "2.0", "", SCALED),
    ("precision.initial_scale", "2.0", f"{SCALED} precision.loss_scale=8.0", SCALED),
    *((f"precision.{key}", "4", "", SCALED) for key in ("growth_interval", "hysteresis")),
    *(
        (f"precision.{key}_factor", value, "", SCALED)
        for key, value in (("growth", "4.0"), ("backoff", "0.25"))
    ),
    ("precision.hysteresis_refill", '"good_step"', f"{SCALED} precision.hysteresis=1", SCALED),
    ("precision.patience", "3", "precision.on_nonfinite=raise", ""),
    *(
        (f"fp8.{key}", "1", "", FP8)
        for key in ("margin", "first_layers", "last_layers", "calibrate")
    ),
    *(
        (f"fp8.{key}", "true", "", FP8)
        for key in ("power_2_scales", "parameters", "pad", "calibrating")
    ),
    *((f"fp8.{key}", "false", "", FP8) for key in ("weight_gradients", "reduce_amax")),
    ("fp8.format", '"e4m3"', "", FP8),
    ("fp8.format", '"e4m3"', "fp8.kind=nvfp4", FP8),
    ("fp8.wide", '["*down*"]', "", FP8),
    ("fp8.history", '"te"', "", FP8),
    ("fp8.backend", '"transformer_engine"', "", FP8),
    ("fp8.history_length", "4", "fp8.kind=rowwise", FP8),
    ("fp8.history_length", "4", f"{FP8} fp8.amax_algo=most_recent", FP8),
    ("fp8.amax_algo", '"most_recent"', "fp8.kind=current", FP8),
    ("fp8.reduce_amax", "false", "fp8.kind=current", FP8),
    ("fp8.power_2_scales", "true", "fp8.kind=mx", "fp8.kind=current"),
    ("fp8.calibrate", "1", f"{FP8} fp8.calibrating=true", FP8),
    *(
        (f"fp8.shadow_{key}", "0.5", FP8, f"{FP8} fp8.shadow_every=2")
        for key in ("loss_gap", "cosine")
    ),
    ("optimizer.betas", "[0.8,0.9]", "optimizer.name=RAdam", "optimizer.name=muon"),
    ("optimizer.eps", "0.1", "optimizer.name=sgd", ""),
    ("optimizer.weight_decay", "0.3", "optimizer.name=Rprop", "optimizer.name=RAdam"),
    *(
        (f"lr.{key}", value, "lr.schedule=constant", "")
        for key, value in (("final", "1e-05"), ("length", "7"))
    ),
    ("lr.initial", "1e-6", "", "lr.warmup=3"),
    ("lr.decay", "2", "", "lr.schedule=wsd"),
    ("lr.wsd_decay", "sqrt", "", "lr.schedule=wsd lr.decay=2"),
    ("train.canonical_shards", "4", "", CANONICAL),
    ("train.spike_patience", "3", "", "train.on_spike=skip"),
    ("train.eval_batches", "9", "", "train.eval_every=3"),
    ("train.eval_samples", "9", "", "train.eval_every=3"),
    ("train.eval_batches", "9", "train.eval_every=3 train.eval_samples=5", "train.eval_every=3"),
    ("data.held_out_from", '"end"', "data.held_out=0", ""),
    (
        "data.blend_phases",
        '"linear"',
        'data.blend=[{source="a.txt",weight=1}]',
        'data.blend=[{source="a.txt",weight=[[0,1],[2,2]]},{source="b.txt",weight=1}]',
    ),
    *(
        (f"{key}", "10", "", "train.steps=10")
        for key in ("train.sentinel", "log.timeline", "log.digests", "log.statistics")
    ),
    ("fp8.shadow_every", "10", FP8, f"{FP8} train.steps=10"),
    ("checkpoint.keep_every", "2", "checkpoint.keep=all", ""),
    (
        "checkpoint.keep_best",
        '"eval_loss"',
        "checkpoint.keep=all train.eval_every=3",
        "train.eval_every=3",
    ),
    (
        "checkpoint.export_ema",
        "true",
        "optimizer.ema=0.9",
        "checkpoint.export=hf optimizer.ema=0.9",
    ),
    *(
        (f"data.{key}", value, "", "data.source=mine.txt")
        for key, value in (("encoding", '"latin-1"'), ("exclude", '["*.log"]'), ("skip_bad", "3"))
    ),
]
# Keys that have files beside them: see the test below.
BESIDE_FILES = {
    "parallel.schedule": {"schedule": "gpipe"},
    "parallel.chunks": {"chunks": 1},
    "model.init_std": {"init_std": 0.5},
    "train.grow_vocabulary": {"init_from": "there", "grow_vocabulary": "mean"},
    "model.init": {"init": load_run(None, [*BASE, "model.init={qkv=0.5}"]).model.init},
}
# Keys that are refused, or told elsewhere, where they have no effect. The last two lines: their
# values claim nothing there (true of one process too), or they wait for an event.
OTHERS = """
model: family layers hidden heads vocab max_positions norm norm_eps norm_at
model: preset parallel_residual final_softcap bias
model: tied experts dropout embedding_scale embedding_grad_scale head_grad_scale
model: mtp_layers factory mup_base_hidden mup_base_head_dim z_loss
model: delta_net delta_layers mamba hybrid_pattern
model: swiglu_alpha swiglu_limit norm_unit_offset
model: window_rope_base window_layers nope_layers branch_scale logit_divisor expert_bias
model: router_bias dense_layers dense_ffn shared_experts shared_gate norm_bias norm_weight embedding_norm shared_norm
model: global_head_dim global_kv_heads global_key_as_value layer_scalar
data: source blend tokenizer begin held_out shuffle windows pack reset_attention_mask reset_position_ids eod_mask_loss
data: text_field vocab_size max_chars validation lm_eval lm_eval_folder lm_eval_limit
data: workers cache chat_template loss_on
parallel: tensor pipeline data context schedule_file cuts bucket
parallel: expert expert_tensor recompute_modules recompute_layers recompute_fraction zero_size
parallel: elastic timeout async_tensor
precision: compute parameters gradients moments residual attention scores output rounding loss_scale scaling
precision: keep_fp32 masters masters_in_checkpoint tf32 on_nonfinite trace_overflows
fp8: kind
optimizer: name options groups clip norm ema frozen offload qk_clip
lr: peak schedule warmup unit
train: steps global_batch batch_schedule seq_schedule micro_batch seq_length init_from seed numerics compile deterministic folder device threads eval_every
train: branch_from restarts on_spike eval_first
checkpoint: every keep background resume export folder
log: every to plot plot_over progress peak_tflops sample attention_logits memory_history
"""


def notes(*overrides: str) -> tuple[str, ...]:
    return load_run(None, [*BASE, *overrides]).notes


def test_every_key_needs_others_or_is_known_not_to() -> None:
    lines = (line.split(": ") for line in OTHERS.strip().splitlines())
    others = [f"{table}.{name}" for table, names in lines for name in names.split()]
    needing = {key for need in EFFECT_RULES for key in need.keys.split()}
    assert needing == {key for key, *_ in CASES} | BESIDE_FILES.keys()
    assert sorted([*needing, *others]) == sorted(
        key.name for table in key_tables() for key in table.keys
    )


@pytest.mark.parametrize(
    ("key", "value", "idle", "used"), CASES, ids=lambda given: given.replace('"', "")
)
def test_a_key_is_told_where_it_has_no_effect_and_nowhere_else(
    key: str, value: str, idle: str, used: str
) -> None:
    mine = [note for note in notes(f"{key}={value}", *idle.split()) if note.startswith(f"{key} = ")]
    assert [
        " has no effect with " in note and "leave it out, or change " in note for note in mine
    ] == [True]
    assert not [note for note in notes(f"{key}={value}", *used.split()) if key in note]


@pytest.mark.parametrize("name", [*RULES, "RAdam", "Rprop"])
def test_of_every_rule_it_is_told_which_keys_it_has_no_use_of(name: str) -> None:
    values = {"betas": "[0.8, 0.9]", "eps": "1e-5", "weight_decay": "0.3"}
    given = [f"optimizer.{key}={value}" for key, value in values.items()]
    told = "\n".join(notes(f"optimizer.name={name}", *given))
    kind = rule_kind(name)
    used = {*kind.own_keys, *(["weight_decay"] if kind.decays else [])}
    assert {key for key in values if f"optimizer.{key} = " in told} == values.keys() - used


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_of_every_schedule_of_the_rate_it_is_told_which_keys_it_has_no_use_of(
    schedule: str,
) -> None:
    values = {"final": "1e-5", "length": "8", "decay": "3", "wsd_decay": "sqrt"}
    given = [f"lr.{key}={value}" for key, value in values.items()]
    told = "\n".join(notes(f"lr.schedule={schedule}", *given))
    kind = SCHEDULES[schedule]  # type: ignore[index]  # a name of the table
    used = {*kind.keys, *(["final", "length"] if kind.ends else [])}
    assert {key for key in values if f"lr.{key} = " in told} == values.keys() - used


def test_every_need_is_tried() -> None:
    runs = [
        (key, Tables.of(dict(load_run(None, [*BASE, f"{key}={v}", *idle.split()]))))
        for key, v, idle, _ in CASES
    ]
    failing = {
        need
        for need in EFFECT_RULES
        for key, run in runs
        if key in need.keys.split() and not need.has_effect(run)
    }
    assert {need.deciders for need in set(EFFECT_RULES) - failing} == {
        "parallel.schedule_file",
        "train.init_from train.grow_vocabulary",
        "train.init_from",
    }


@pytest.mark.parametrize("key", BESIDE_FILES)
def test_a_key_that_a_file_replaces_is_told(key: str) -> None:
    run = Tables.of(dict(load_run(None, BASE)))
    table = key.partition(".")[0]
    given = {**dict(getattr(run, table)), **BESIDE_FILES[key]}
    own = replace(run, **{table: type(getattr(run, table)).model_validate(given)})
    assert not [*effectless(own, {key})]
    parallel = own.parallel.model_copy(update={"schedule_file": "mine.txt"})
    train = own.train.model_copy(update={"init_from": "there"})
    # rows for new tokens are those of such weights, and need them
    without = own.train.model_copy(update={"init_from": ""})
    changes: dict[str, Any] = {
        "model": {"train": train},
        "parallel": {"parallel": parallel},
        "train": {"train": without},
    }
    replaced = replace(own, **changes[table])
    (told,) = effectless(replaced, {key})
    assert told.startswith(f"{key} = ") and " has no effect with " in told


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            '{pattern="*",lr=1.0},{pattern="embedding.*",lr=0.5}',
            'pattern "embedding.*" has no effect: ',
        ),
        ('{pattern="embedding.*"},{pattern="*",lr=0.5}', ""),
        (
            '{pattern="*.weight",lr=2.0},{pattern="*norm*",lr=3.0}',
            'pattern "*norm*" has no effect: ',
        ),
        ('{pattern="*norm*",lr=2.0},{pattern="*.weight",lr=3.0}', ""),
        ('{pattern="*norm.weight",lr=2.0},{pattern="*norm.bias",lr=2.0}', ""),
    ],
)
def test_a_group_that_no_parameter_is_left_for_is_told(groups: str, said: str) -> None:
    assert [said in note for note in notes(f"optimizer.groups=[{groups}]")] == [True] * bool(said)


@pytest.mark.parametrize(
    ("group", "is_told"),
    [
        ('{pattern="*norm*",weight_decay=0.5}', True),
        ('{pattern="*norm*",weight_decay=0.5,all_dims=true}', False),
        ('{pattern="layers.*",weight_decay=0.5}', False),
        ('{pattern="*norm*",lr=0.5}', False),
    ],
)
def test_a_factor_of_a_weight_decay_that_vectors_do_not_have_is_told(
    group: str, is_told: bool
) -> None:
    said = "\n".join(notes(f"optimizer.groups=[{group}]"))
    assert ("set all_dims = true" in said) == is_told


@pytest.mark.parametrize("beside", ["optimizer.weight_decay=0.0", "optimizer.name=Rprop"])
def test_a_factor_of_a_weight_decay_that_is_not_there_is_told(beside: str) -> None:
    group = 'optimizer.groups=[{pattern="embedding.*",lr=0.5,weight_decay=0.1}]'
    (told,) = notes(group, beside)
    assert 'pattern "embedding.*": weight_decay = 0.1 has no effect with optimizer.' in told
    assert not notes(group)
    assert not notes(group.replace("0.1", "0.0"), beside)


LATENTS = (
    "model.latent={kv_rank=8,rope_dim=4,nope_dim=4,value_dim=8}",
    "model.kv_heads=4",
)


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        ((), ""),
        (("precision.keep_fp32=['layers.0.mlp.*']",), ""),
        (("precision.keep_fp32=['*norm*']", "precision.compute=bf16"), ""),
        (
            ("precision.keep_fp32=['layers.0.mlp.*']", "precision.compute=bf16"),
            "products in FP32 by precision.keep_fp32 (layers.0.mlp.gate.weight and 2 more)",
        ),
        ((EXPERTS,), "experts, whose tokens are gathered for the router"),
        (LATENTS, "latents, which are gathered for several products"),
        (("model.factory=mine.py:build",), "layers of model.factory but ColumnParallelLinear"),
    ],
)
def test_transfers_that_are_not_fused_with_products_are_told(
    beside: tuple[str, ...], said: str
) -> None:
    keys = ("parallel.tensor=2", "parallel.sequence=true", "parallel.async_tensor=true")
    told = notes(*keys, *beside)
    begin = f"parallel.async_tensor = true has no effect on {said}"
    assert [note.startswith(begin) for note in told] == [True] * bool(said)


def test_keys_without_effect_for_one_reason_are_told_in_one_line() -> None:
    (told,) = notes("fp8.margin=2", "fp8.pad=true", "fp8.kind=none")
    assert told == (
        'fp8.margin = 2, fp8.pad = true have no effect with fp8.kind = "none": leave them '
        "out, or change fp8.kind"
    )


def test_a_default_that_is_written_down_is_not_told() -> None:
    config = load_run(None, BASE)
    assert not [
        *effectless(
            Tables.of(dict(config)), {key.name for table in key_tables() for key in table.keys}
        )
    ]
    assert not notes(
        "fp8.margin=0", "optimizer.name=sgd", "optimizer.betas=[0.9,0.95]", "parallel.overlap=false"
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_has_keys_without_effect(preset: str) -> None:
    run = Tables.of(dict(load_run(None, [*BASE[3:], f"model.preset={preset}"])))
    assert not [*effectless(run, {f"model.{name}" for name in PRESETS[preset]})]


def test_a_custom_model_may_read_any_key_of_its_table() -> None:
    assert not notes("model.factory=mine.py:build", "model.router_z_loss=0.5")
    assert notes("model.factory=mine.py:build", "fp8.margin=2")


def test_what_a_resolved_run_repeats_is_not_told_again_and_what_changes_it_is(
    tmp_path: Path,
) -> None:
    first = load_run(None, [*BASE, "fp8.margin=2"])
    assert len(first.notes) == 1
    saved = first.save_resolved(tmp_path)
    assert not load_run(saved).notes
    (told,) = load_run(saved, ["fp8.pad=true"]).notes
    assert told.startswith("fp8.pad = true has no effect")


def test_a_run_file_is_told_as_the_command_line_is(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text('[optimizer]\nname = "sgd"\neps = 0.1\n')
    (told,) = load_run(tmp_path / "my.toml", BASE).notes
    assert told.startswith(
        'optimizer.eps = 0.1 has no effect with optimizer.name = "sgd": leave it out'
    )


def test_a_trial_that_the_command_line_shortens_is_not_told_of_steps_that_its_file_names(
    tmp_path: Path,
) -> None:
    (tmp_path / "my.toml").write_text("[train]\nsteps = 90\nsentinel = 30\n")
    shortened = [*BASE, "train.steps=9"]
    assert not load_run(tmp_path / "my.toml", shortened).notes
    (told,) = load_run(tmp_path / "my.toml", [*shortened, "train.sentinel=20"]).notes
    assert told.startswith("train.sentinel = 20 has no effect with train.steps = 9: ")
    (tmp_path / "my.toml").write_text("[train]\nsteps = 9\nsentinel = 30\n")
    (told,) = load_run(
        tmp_path / "my.toml", [one for one in BASE if not one.startswith("train.steps")]
    ).notes
    assert told.startswith("train.sentinel = 30 has no effect with train.steps = 9: ")
