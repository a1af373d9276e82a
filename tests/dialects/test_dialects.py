"""Five systems' configurations: their defaults, which key decided what, and what is refused in
which words."""

import re
from enum import Enum
from typing import Any

import pytest
import torch

from megaprec.dialects import colossalai, colossalai_plugins, nemo, smp
from megaprec.dialects.reading import Resolved
from megaprec.dialects.translate import DIALECTS
from megaprec.errors import UserError
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.plan import LossScaling, PrecisionPlan
from tests.refusals import sentence

FP32 = torch.float32
BF16 = torch.bfloat16
FP16 = torch.float16
NORMS = ("*norm.weight", "*norm.bias")
ZERO = {"optimizer_config": {"zero_one_enabled": True}}
LOWEST = 2.0**-126


def resolve(system: str, config: Any) -> Resolved:
    return DIALECTS[system].resolve(config)


def said(resolved: Resolved) -> dict[str, Any]:
    return {key: decision.value for key, decision in resolved.settings.items()}


def dtypes(plan: PrecisionPlan) -> tuple[torch.dtype, ...]:
    return (
        plan.compute,
        plan.parameters,
        plan.gradients,
        plan.reduce,
        plan.masters,
        plan.moments,
        plan.pipeline,
    )


# Numbers of the systems themselves, by the class or file that has them.


def test_nxd_defaults_follow_zero_one_enabled_which_is_off() -> None:
    """neuronx_distributed/trainer: optimizer_config zero_one_enabled False, grad_clipping True,
    max_grad_norm 1.0."""
    legacy = resolve("nxd", None)
    standard = resolve("nxd", ZERO)
    assert dtypes(legacy.plan) == (BF16, BF16, BF16, BF16, BF16, BF16, BF16)
    assert (legacy.plan.rounding, legacy.plan.masters_in_checkpoint) == ("stochastic", False)
    assert said(legacy) == {"parallel.zero": False, "optimizer.clip": 1.0}
    assert dtypes(standard.plan) == (BF16, BF16, FP32, FP32, FP32, FP32, BF16)
    assert (standard.plan.rounding, standard.plan.masters_in_checkpoint) == ("nearest", False)
    assert said(standard) == {"parallel.zero": True, "optimizer.clip": 1.0}


def test_smp_defaults_are_fsdps_and_transformer_engines() -> None:
    """torch.distributed.fsdp.MixedPrecision, .MixedPrecisionPolicy; transformer_engine
    recipe.DelayedScaling."""
    first = resolve("smp", {"mixed_precision": {}}).plan
    assert dtypes(first) == (FP32,) * 7
    assert (first.buffers, first.output, first.cast_inputs, first.fp8) == (FP32, FP32, "root", None)
    second = resolve("smp", {"mp_policy": {}}).plan
    assert dtypes(second) == (FP32,) * 7 and second.cast_inputs == "all"
    recipe = resolve("smp", {"fp8_autocast": {}}).plan.fp8
    assert recipe == FP8Recipe(
        "delayed", "hybrid", margin=0, history_length=1024, amax_algo="max", reduce_over="world"
    )


def test_fsdp1_reduces_in_the_dtype_of_parameters_unless_told_otherwise() -> None:
    plan = resolve("smp", {"mixed_precision": smp.MixedPrecision(param_dtype=torch.bfloat16)}).plan
    assert dtypes(plan) == (BF16, BF16, FP32, BF16, FP32, FP32, BF16)


def test_colossalai_torch_defaults_are_those_of_torchs_gradient_scaler() -> None:
    """torch.amp.GradScaler: init_scale 2**16, growth_factor 2.0, backoff_factor 0.5,
    growth_interval 2000."""
    plan = resolve("colossalai", {"fp16": {"mode": colossalai.AMP_TYPE.TORCH}}).plan
    assert dtypes(plan) == (FP16, FP32, FP32, FP32, FP32, FP32, FP32)
    assert plan.scaling == LossScaling("dynamic", 65536.0, LOWEST, 2.0, 0.5, 2000, 1, None)


def test_colossalai_parallel_defaults_are_those_of_v0_0_1_beta() -> None:
    """Scale 2**32 at first and at most, 1 at least; factors 2 and 0.5, interval 1000, hysteresis 2;
    clip_grad 0."""
    resolved = resolve("colossalai", {"fp16": {"mode": colossalai.AMP_TYPE.PARALLEL}})
    assert dtypes(resolved.plan) == (FP16, FP16, FP16, FP16, FP32, FP32, FP16)
    assert resolved.plan.scaling == LossScaling("dynamic", 2.0**32, 1.0, 2.0, 0.5, 1000, 2, 2.0**32)
    assert said(resolved) == {"optimizer.clip": 0}


APEX = LossScaling("dynamic", 65536.0, LOWEST, 2.0, 0.5, 2000, 1, 2.0**24)


@pytest.mark.parametrize(
    ("level", "held", "scaling", "kept"),
    [
        ("O0", (FP32, FP32, FP32, FP32, FP32, FP32, FP32), LossScaling(), ()),
        ("O1", (FP16, FP32, FP32, FP32, FP32, FP32, FP32), APEX, ()),
        ("O2", (FP16, FP16, FP32, FP16, FP32, FP32, FP16), APEX, NORMS),
        ("O3", (FP16, FP16, FP16, FP16, FP16, FP32, FP16), LossScaling(), ()),
    ],
)
def test_apex_levels(
    level: str, held: tuple[torch.dtype, ...], scaling: LossScaling, kept: tuple[str, ...]
) -> None:
    """apex.amp.frontend O0 to O3; LossScaler: init 2**16, window 2000, max 2**24, no floor."""
    plan = resolve("colossalai", {"fp16": {"mode": "APEX", "opt_level": level}}).plan
    assert (dtypes(plan), plan.scaling, plan.keep_fp32) == (held, scaling, kept)


def test_apex_without_a_level_is_o1() -> None:
    plans = [
        resolve("colossalai", {"fp16": {"mode": "APEX", **level}}).plan
        for level in ({}, {"opt_level": "O1"})
    ]
    assert plans[0] == plans[1]


def test_internevo_defaults_are_those_of_its_dynamic_scaler() -> None:
    """No dtype: float16. grad_scaler: 2**16, 1, 1000; factors 2 and 0.5, max 2**24, hysteresis 2;
    clip_grad_norm 1."""
    resolved = resolve("internevo", {"hybrid_zero_optimizer": {}, "parallel": {}})
    assert dtypes(resolved.plan) == (FP16, FP16, FP16, FP16, FP32, FP32, FP16)
    assert resolved.plan.scaling == LossScaling("dynamic", 65536.0, 1.0, 2.0, 0.5, 1000, 2, 2.0**24)
    assert said(resolved) == {"optimizer.clip": 1.0, "parallel.zero": True}
    assert "float16" in resolved.notes[0]


@pytest.mark.parametrize("dtype", ["float16", "half", "bfloat16"])
def test_internevo_scales_the_loss_of_both_half_precisions(dtype: str) -> None:
    assert resolve("internevo", {"dtype": f"torch.{dtype}"}).plan.scaling.kind == "dynamic"


@pytest.mark.parametrize("kind", colossalai_plugins.PLUGINS)
def test_colossalai_with_a_plugin_clips_nothing_unless_it_is_told_to(kind: str) -> None:
    for precision in ("fp16", None):
        resolved = colossalai.resolve(
            {"plugin": {"kind": kind}, "mixed_precision": precision, "clip_grad_norm": 1.0}
        )
        assert resolved.settings["optimizer.clip"].value == 0
        assert any("clip_grad_norm" in note for note in resolved.notes)


def test_nemo_defaults_of_the_plugin() -> None:
    """MegatronMixedPrecision: grad_reduce_in_fp32 True, scale 2**32, 1.0, window 1000, hysteresis
    2; pipeline FP32 for 16-mixed; FP8 fields margin 0, history 1, most_recent."""
    half = resolve("nemo", {"precision": "16-mixed"}).plan
    assert dtypes(half) == (FP16, FP16, FP32, FP32, FP32, FP32, FP32)
    assert half.scaling == LossScaling("dynamic", 2.0**32, 1.0, 2.0, 0.5, 1000, 2, None)
    brain = resolve("nemo", {"precision": "bf16-mixed", "fp8": "hybrid"}).plan
    assert dtypes(brain) == (BF16, BF16, FP32, FP32, FP32, FP32, BF16)
    assert brain.scaling == LossScaling()
    assert brain.fp8 == FP8Recipe(history_length=1, amax_algo="most_recent", reduce_over="stage")


RECIPES = {
    "bf16_mixed": (BF16, FP32, None),
    "fp16_mixed": (FP16, FP16, None),
    "bf16_with_fp8_mixed": (BF16, FP32, FP8Recipe(reduce_over="stage", parameters=True)),
    "fp16_with_fp8_mixed": (FP16, FP16, FP8Recipe(reduce_over="stage", parameters=True)),
}


@pytest.mark.parametrize("name", RECIPES)
def test_nemo_recipes(name: str) -> None:
    """nemo/collections/llm/recipes/precision: grad_reduce_in_fp32 True for BF16, False for FP16;
    FP8 1024 and max."""
    half, reduced, fp8 = RECIPES[name]
    plan = resolve("nemo", getattr(nemo, name)()).plan
    assert dtypes(plan) == (half, half, reduced, reduced, FP32, FP32, half)
    assert plan.fp8 == fp8
    assert plan == resolve("nemo", {"recipe": name}).plan


@pytest.mark.parametrize(
    ("name", "kind", "wide_layers", "kept_in_fp8"),
    [
        ("bf16_with_mxfp8_mixed", "mx", 0, True),
        ("fp16_with_fp8_current_scaling_mixed", "current", 1, True),
        ("bf16_with_fp8_subchannel_scaling_mixed", "blockwise", 0, False),
    ],
)
def test_nemos_other_fp8_recipes(name: str, kind: str, wide_layers: int, kept_in_fp8: bool) -> None:
    recipe = resolve("nemo", {"recipe": name}).plan.fp8
    assert recipe is not None
    assert (recipe.kind, recipe.first_layers, recipe.last_layers) == (
        kind,
        wide_layers,
        wide_layers,
    )
    assert recipe.parameters == kept_in_fp8


O2 = {"mode": "APEX", "opt_level": "O2"}


@pytest.mark.parametrize(
    ("name", "last_layers"),
    [("bf16_with_nvfp4_mixed", 0), ("nemotron_3_super_bf16_with_nvfp4_mixed", 14)],
)
def test_megatron_bridges_nvfp4_recipes_but_for_weights_in_fp4(name: str, last_layers: int) -> None:
    """megatron/bridge/training/mixed_precision.py."""
    recipe = resolve("nemo", {"recipe": name, "fp4_param_gather": False}).plan.fp8
    assert recipe == FP8Recipe("nvfp4", reduce_over="stage", last_layers=last_layers)


FP8 = {"precision": "bf16", "fp8": "hybrid"}
FP4 = {"precision": "bf16", "fp4": "e2m1"}


@pytest.mark.parametrize(
    ("system", "config", "field", "origin"),
    [
        (
            "nxd",
            {"use_master_weights": True, **ZERO},
            "masters",
            "precision.nxd.use_master_weights",
        ),
        ("nxd", ZERO, "masters", "precision.nxd.use_master_weights (NxD's default)"),
        ("nxd", ZERO, "compute", "NxD, always"),
        ("nxd", ZERO, "fp8", "megaprec's own: NxD has no key for it"),
        (
            "smp",
            {"mixed_precision": {"param_dtype": "half"}},
            "reduce",
            "precision.smp.mixed_precision.param_dtype",
        ),
        ("nemo", {"recipe": "fp16_mixed"}, "reduce", "precision.nemo.recipe"),
        (
            "nemo",
            {"recipe": "fp16_mixed", "grad_reduce_in_fp32": True},
            "reduce",
            "precision.nemo.grad_reduce_in_fp32, precision.nemo.recipe",
        ),
        ("internevo", {"dtype": "torch.tf32"}, "tf32", "precision.internevo.dtype"),
        ("colossalai", {"fp16": O2}, "masters", "precision.colossalai.fp16.opt_level"),
    ],
)
def test_each_field_knows_the_key_that_decided_it(
    system: str, config: Any, field: str, origin: str
) -> None:
    assert resolve(system, config).plan.origin[field] == origin


@pytest.mark.parametrize("system", DIALECTS)
def test_every_field_has_an_origin(system: str) -> None:
    config: Any = {"nemo": {"precision": "32"}, "colossalai": {"fp16": {"mode": "TORCH"}}}.get(
        system
    )
    plan = resolve(system, config).plan
    assert set(plan.origin) == {
        name for name in PrecisionPlan.__dataclass_fields__ if name != "origin"
    }


@pytest.mark.parametrize(
    ("system", "config", "lines"),
    [
        (
            "nxd",
            {"use_master_weigths": True, **ZERO},
            [r"precision.nxd.use_master_weigths = true: .*did you mean use_m.*"],
        ),
        (
            "nxd",
            {"use_master_weights": 1, **ZERO},
            [r"precision.nxd.use_master_weights = 1: must be true or false \(NxD\)"],
        ),
        (
            "nxd",
            {"use_master_weights": True},
            [r".*use_master_weights = true: needs ZeRO-1: set precision.nxd.opt.* \(NxD\)"],
        ),
        (
            "nxd",
            {
                "use_master_weights": True,
                "use_fp32_grad_acc": True,
                "use_master_weights_in_ckpt": True,
            },
            [
                ".*use_master_weights = true: needs .*",
                ".*use_fp32_grad_acc = true.*",
                ".*_in_ckpt = true: needs .*",
            ],
        ),
        (
            "nxd",
            {"use_master_weights": False, "use_master_weights_in_ckpt": True, **ZERO},
            [
                (
                    ".*_in_ckpt = true: there are no master weights to save: set "
                    "use_master_weights = true .*"
                )
            ],
        ),
        (
            "nxd",
            {"optimizer_config": {"zero": True}},
            [r".*optimizer_config.zero = true: no such key.*"],
        ),
        (
            "nxd",
            {"optimizer_config": 3},
            [r"precision.nxd.optimizer_config = 3: must be a table of keys \(NxD\)"],
        ),
        (
            "smp",
            {"mixed_precision": {"param_dtype": "bfloat"}},
            [r'.*param_dtype = "bfloat": no such dtype: .*; did .*'],
        ),
        (
            "smp",
            {"mixed_precision": {"param_dtype": 16}},
            [r".*param_dtype = 16: must be a dtype, one of float16, .*"],
        ),
        (
            "smp",
            {"mixed_precision": {}, "mp_policy": {}},
            [r".*mp_policy = .*: mixed_precision is there too.*"],
        ),
        (
            "smp",
            {"mixed_precision": {"keep_low_precision_grads": True, "reduce_dtype": "half"}},
            [r".*keep_low_precision_grads = true: needs reduce_dtype to be param_dtype .*"],
        ),
        (
            "smp",
            {"fp8_autocast": {"fp8_recipe": {"recipe": "DelayedScale", "margin": 1}}},
            [
                r'.*fp8_recipe.recipe = "DelayedScale": no such recipe; there are .*; did you mean DelayedScaling\? .*'
            ],
        ),
        *[
            (
                "smp",
                {"fp8_autocast": {"fp8_recipe": value}},
                [rf".*fp8_recipe = {said}: must be a table .*"],
            )
            for value, said in ((3, "3"), ([], r"\[\]"), (False, "false"))
        ],
        *[
            (
                "smp",
                {"fp8_autocast": {"fp8_recipe": {"override_linear_precision": value}}},
                [rf".*override_linear_precision = {said} .*"],
            )
            for value, said in (
                (
                    [True, False, True],
                    r"\[true, false, true\]: only the last, of weight gradients,",
                ),
                ([False, True], r"\[false, true\]: must be three of true and false:"),
                (True, "true: must be three of true and false:"),
            )
        ],
        *[
            (system, config, [r".*margin = -?33: must be .*-?32 .*"])
            for system, config in (
                ("smp", {"fp8_autocast": {"fp8_recipe": {"margin": 33}}}),
                ("nemo", {**FP8, "fp8_margin": -33}),
                ("nemo", {"v1": {"precision": "bf16", "fp8_margin": 33}}),
            )
        ],
        (
            "smp",
            {"fp8_autocast": {"fp8_recipe": {"fp8_format": "E5M2", "amax_history_len": 0}}},
            [
                r'.*fp8_format = "E5M2": use one of E4M3, HYBRID.*',
                ".*amax_history_len = 0: must be greater than or .*",
            ],
        ),
        (
            "colossalai",
            {"fp16": {}},
            [
                sentence(
                    "dialect.mode_missing",
                    key="precision.colossalai.fp16.mode",
                    modes="APEX, TORCH, PARALLEL, NAIVE",
                    system="Colossal-AI",
                )
            ],
        ),
        (
            "colossalai",
            None,
            [r"precision.colossalai.fp16 = None: must be a table of keys with a mode .*"],
        ),
        (
            "colossalai",
            {"fp16": {"mode": "TROCH"}},
            [r'.*mode = "TROCH": no such mode; there .*; did you mean TORCH\? .*'],
        ),
        (
            "colossalai",
            {"fp16": {"mode": "TORCH", "initial_scale": 2.0}},
            [r".*fp16.initial_scale = 2.0: no such key; did you mean init_scale\? \(Colossal-AI\)"],
        ),
        (
            "colossalai",
            {"fp16": {"mode": "APEX", "cast_model_type": "half", "master_weights": True}},
            [
                ".*cast_model_type = .*: O1 casts functions, not the model: leave it out, or .*",
                ".*master_weights = true.*",
            ],
        ),
        (
            "colossalai",
            {"fp16": {**O2, "patch_torch_functions": True}},
            [".*patch_torch_functions = true: belongs to .* O1.*"],
        ),
        (
            "colossalai",
            {"fp16": {**O2, "opt_level": "o2"}},
            [".*opt_level = .o2.: must be 'O0', 'O1', .*"],
        ),
        (
            "colossalai",
            {"fp16": {**O2, "loss_scale": "dynamik"}},
            [r'.*loss_scale = "dynamik": must be a number or "dyn.*'],
        ),
        (
            "colossalai",
            {"fp16": {**O2, "min_loss_scale": 2.0**20}},
            [r".*min_loss_scale = .*: is more than the scale st.*"],
        ),
        (
            "colossalai",
            {"fp16": {"mode": "PARALLEL", "min_scale": 8, "initial_scale": 4}},
            [".*initial_scale = 4.*: must lie .*"],
        ),
        (
            "internevo",
            {"dtype": "torch.float8"},
            [r'.*dtype = "torch.float8": no such dtype: .*"torch.tf32"; did .*'],
        ),
        (
            "internevo",
            {"mlp_ratio": 2.0},
            [r".*mlp_ratio = 2.0: describes a model, but none of num_layers, .*"],
        ),
        (
            "internevo",
            {"norm_type": "rms"},
            [r".*norm_type = \"rms\": must be 'rmsnorm' or 'layernorm'; did you mean .*"],
        ),
        (
            "internevo",
            {"checkpoint": 1.5},
            [r".*checkpoint = 1.5: must be less than or equal to 1 .*"],
        ),
        (
            "internevo",
            {"parallel": {"zero1": "all"}},
            [r'.*parallel.zero1 = "all": must be a number of ranks, or .*'],
        ),
        (
            "internevo",
            {"parallel": {"tensor": {"size": 2, "mode": "isp"}}},
            [r'.*tensor.mode = "isp": not supported.*'],
        ),
        (
            "internevo",
            {
                "parallel": {
                    "pipeline": {"sise": 2},
                    "tensor": {"size": 2, "mod": "msp"},
                    "weight": {"overlop": True},
                }
            },
            [
                r".*parallel.tensor.mod = \"msp\": no such key; did you mean mode\? .*",
                r".*parallel.pipeline.sise = 2: no such key; did you mean size\? .*",
                r".*parallel.weight.overlop = true: no such key; did you mean overlap\? .*",
            ],
        ),
        (
            "nemo",
            {},
            [
                r"precision.nemo.precision = None: must be given, one of .*, or a recipe instead \(NeMo\)"
            ],
        ),
        (
            "nemo",
            {"precision": "bf17"},
            [r'.*precision = "bf17": no such precision: use one .*; did you mean bf16\? .*'],
        ),
        (
            "nemo",
            {"recipe": "bf16_mixd"},
            [r'.*recipe = "bf16_mixd": no such recipe; there .*; did you mean bf16_mixed\? .*'],
        ),
        (
            "nemo",
            {"precision": "bf16", "params_dtype": "half"},
            [r'.*contradicts precision = "bf16": use float32 or bf.*'],
        ),
        (
            "nemo",
            {"precision": "bf16", "fp8": "hybrid", "fp4": "e2m1"},
            [".*fp4 = .*fp8 is given too: at most .*"],
        ),
        ("nemo", {"precision": "32", "fp4": "e2m1"}, [".*fp4 = .*BF16 alone, not float32: use .*"]),
        (
            "nemo",
            {"precision": "16-mixed", "fp4": "e2m1"},
            [".*fp4 = .*BF16 alone, not float16: use .*"],
        ),
        ("nemo", {"precision": "bf16", "fp4": "e3m0"}, ['.*fp4 = "e3m0": .*"e2m1".*']),
        ("nemo", {**FP4, "fp4_recipe": "custom"}, ['.*fp4_recipe = "custom": .*"nvfp4".*']),
        ("nemo", {**FP4, "fp4_param_gather": True}, [".*fp4_param_gather = true: .*use false.*"]),
        ("nemo", {**FP4, "fp8_dot_product_attention": True}, [".*dot_product.*beside fp4.*"]),
        (
            "nemo",
            {"recipe": "bf16_with_nvfp4_mixed"},
            ['.*recipe = "bf16_with_nvfp4_mixed": .*set fp4_param_gather = false.*'],
        ),
        (
            "nemo",
            {**FP8, "fp8_params": True, "fp8_param_gather": False},
            [".*fp8_params = true: fp8_param_gather, .*"],
        ),
        ("nemo", {**FP8, "fp8_recipe": "rowwise"}, [".*fp8_recipe = .*: must be 'delayed', .*"]),
        (
            "nemo",
            {**FP8, "first_last_layers_bf16": True},
            ['.*first_last_layers_bf16 = true: not with fp8_recipe = "del.*'],
        ),
        (
            "nemo",
            {"precision": "bf16", "fp8": "e5m2", "fp8_margin": 1.5, "fp8_hist": 2},
            [".*fp8 = .*", ".*fp8_margin = 1.5.*", ".*fp8_hist = 2: no such key.*"],
        ),
        (
            "colossalai",
            {
                "plugin": {
                    "kind": "HybridParallelPlugin",
                    "zero_stage": 2,
                    "pp_size": 2,
                    "precision": "bf16",
                }
            },
            [
                r"precision\.colossalai\.plugin\.zero_stage = 2: .* with pipeline parallelism.*: use 1 .*"
            ],
        ),
    ],
    ids=lambda v: str(v)[:40] if isinstance(v, dict) else "",
)
def test_what_cannot_be_is_refused_with_key_value_remedy_and_whose_rule_it_is(
    system: str, config: Any, lines: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        resolve(system, config)
    assert len(caught.value.problems) == len(lines), caught.value
    for problem, expected in zip(caught.value.problems, lines, strict=True):
        assert re.fullmatch(expected, problem), problem
        assert problem.endswith(f"({DIALECTS[system].SYSTEM})")


def test_functions_of_the_systems_take_the_arguments_that_users_give_them() -> None:
    recipe = smp.DelayedScaling(
        fp8_format=smp.Format.HYBRID, amax_history_len=32, amax_compute_algo="max"
    )
    old = smp.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group="world")
    new = smp.autocast(True, False, recipe, "world")
    plans = [resolve("smp", {"fp8_autocast": asked}).plan for asked in (old, new)]
    assert plans[0].fp8 == plans[1].fp8 == FP8Recipe(history_length=32)
    assert resolve(
        "nemo", nemo.bf16_with_fp8_mixed(fp8_margin=2, fp8_params=False)
    ).plan.fp8 == FP8Recipe(margin=2, reduce_over="stage")


@pytest.mark.parametrize("wrong", [[], "", False, 0])
@pytest.mark.parametrize(
    ("system", "key"),
    [
        *[(system, "") for system in DIALECTS],
        ("smp", "mixed_precision"),
        ("smp", "mp_policy"),
        ("smp", "grad_scaler"),
        ("smp", "fp8_autocast"),
        ("nxd", "optimizer_config"),
        ("nxd", "environment"),
        ("internevo", "grad_scaler"),
        ("internevo", "grad_scaler.fp16"),
        ("internevo", "parallel"),
        ("colossalai", "fp16"),
    ],
)
def test_what_stands_in_place_of_a_table_is_refused_though_it_is_empty(
    system: str, key: str, wrong: Any
) -> None:
    config = wrong
    for name in reversed(key.split(".") if key else []):
        config = {name: config}
    with pytest.raises(UserError) as caught:
        resolve(system, config)
    place = f"{DIALECTS[system].PREFIX}.{key}".rstrip(".")
    assert f"{place} = " in caught.value.problems[0]
    assert "must be a table of keys" in caught.value.problems[0]


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "mxfp8", "blockwise"])
def test_members_of_megatrons_enumeration_of_recipes_are_its_names(name: str) -> None:
    by_name = resolve("nemo", {"precision": "bf16", "fp8": "hybrid", "fp8_recipe": name})
    for written in (
        f"Fp8Recipe.{name}",
        f"megatron.core.enums.Fp8Recipe.{name}",
        getattr(Enum("Fp8Recipe", {name: name}), name),
    ):
        said = resolve("nemo", {"precision": "bf16", "fp8": "hybrid", "fp8_recipe": written})
        assert said.plan == by_name.plan
