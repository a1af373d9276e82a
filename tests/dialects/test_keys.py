"""Every key of the five systems: with a value that is not its default it changes what it decides,
and nothing else.

A row is a key, its value, and the fields of the plan (`scaling.initial`: a field of one), the
run-file keys or the number of notes that are then different from what the configuration around it
gives.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megaprec.dialects import colossalai, internevo, nemo, nemo_v1, nxd, smp
from megaprec.dialects import colossalai_plugins as plugins
from megaprec.dialects.internevo_model import STDS
from megaprec.dialects.reading import Keys, Resolved
from megaprec.dialects.scaling import FLOOR, TorchGradScaler
from megaprec.dialects.translate import DIALECTS, differences
from megaprec.errors import UserError
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.patterns import NORMS
from megaprec.precision.plan import LossScaling

FP32 = torch.float32
BF16 = torch.bfloat16
FP16 = torch.float16
Row = tuple[str, Any, dict[str, Any]]
Case = tuple[str, type[Keys], dict[str, Any], str, Any, dict[str, Any]]


def fields(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


def rows(
    system: str, kind: type[Keys], table: str, around: dict[str, Any], *keys: Row
) -> Iterator[Case]:
    """Cases of keys that stand in `table` of a configuration like `around`."""
    for key, value, changes in keys:
        yield system, kind, around, f"{table}.{key}" if table else key, value, changes


def recipe(name: str, *keys: Row) -> Iterator[Case]:
    """Cases of a recipe of Transformer Engine's, in fields of FP8Recipe."""
    around = {"fp8_autocast": {"fp8_recipe": {"recipe": name}}}
    put = [
        (key, value, {f"fp8.{field}": to for field, to in changes.items()})
        for key, value, changes in keys
    ]
    return rows("smp", smp.RECIPES[name], "fp8_autocast.fp8_recipe", around, *put)


LATER_STD = dict.fromkeys(STDS.values(), 0.02) | {"shrink": "layer"}
INTERNLM_STD = {
    "embedding": 0.0052,
    "head": 0.0052,
    "qkv": 0.006,
    "output": 0.006,
    "up": 0.006,
    "down": 0.006,
}
ZERO = {"optimizer_config": {"zero_one_enabled": True}}
TORCH = {"fp16": {"mode": "TORCH"}}
PARALLEL = {"fp16": {"mode": "PARALLEL"}}
O1 = {"fp16": {"mode": "APEX"}}
O2 = {"fp16": {"mode": "APEX", "opt_level": "O2"}}
BF16_MIXED = {"precision": "bf16"}
FP16_MIXED = {"precision": "16"}
FP8 = {"precision": "bf16", "fp8": "hybrid"}
MX = {**FP8, "fp8_recipe": "mxfp8", "num_layers_at_start_in_bf16": 2}
FIRST = {**FP8, "fp8_recipe": "mxfp8", "first_last_layers_bf16": True}
AUTOCAST = {**BF16_MIXED, "autocast_enabled": True}
TORCH_SCALER: tuple[Row, ...] = (
    ("growth_factor", 4.0, {"scaling.growth_factor": 4.0}),
    ("backoff_factor", 0.25, {"scaling.backoff_factor": 0.25}),
    ("growth_interval", 7, {"scaling.growth_interval": 7}),
    ("init_scale", 8.0, {"scaling.initial": 8.0}),
    ("enabled", False, {"scaling": LossScaling()}),
)
ATTENTION: tuple[Row, ...] = (
    ("fp8_dpa", True, {"dot_product_attention": True}),
    ("fp8_mha", True, {"multi_head_attention": True}),
)


def halved(
    amax: torch.Tensor, scale: torch.Tensor, largest: torch.Tensor, recipe: FP8Recipe
) -> torch.Tensor:
    return largest / amax / 2


UNSCALED = {"scaling": LossScaling()}
HYBRID: dict[str, Any] = {"plugin": {"kind": "HybridParallelPlugin"}}
DDP: dict[str, Any] = {"plugin": {"kind": "TorchDDPPlugin"}, "mixed_precision": "fp16"}
PLUGIN: tuple[Row, ...] = (
    ("initial_scale", 4, {"scaling.initial": 4}),
    ("min_scale", 2, {"scaling.minimum": 2}),
    ("growth_factor", 3, {"scaling.growth_factor": 3}),
    ("backoff_factor", 0.1, {"scaling.backoff_factor": 0.1}),
    ("growth_interval", 9, {"scaling.growth_interval": 9}),
    ("hysteresis", 3, {"scaling.hysteresis": 3}),
    ("max_scale", 2.0**40, {"scaling.maximum": 2.0**40}),
    ("max_norm", 0.5, {"optimizer.clip": 0.5}),
    ("use_fp8", True, {"fp8": FP8Recipe("current")}),
    ("fp8_communication", True, {"notes": 1}),
)
V1: dict[str, Any] = {"v1": {"precision": "bf16", "megatron_amp_O2": True}}
CASES: list[Case] = [
    *rows(
        "nxd",
        nxd.MixedPrecisionConfig,
        "",
        ZERO,
        ("use_master_weights", False, fields("masters moments", BF16)),
        ("use_fp32_grad_acc", False, fields("gradients reduce", BF16)),
        ("use_master_weights_in_ckpt", True, {"masters_in_checkpoint": True}),
        ("precision_type", "fp32", fields("compute attention residual pipeline parameters", FP32)),
    ),
    *rows(
        "nxd",
        nxd.Environment,
        "environment",
        ZERO,
        ("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1", {"rounding": "stochastic"}),
        (
            "XLA_DOWNCAST_BF16",
            "1",
            {},
        ),  # what makes the masters FP32 there, and changes nothing here
    ),
    *rows(
        "nxd",
        nxd.OptimizerConfig,
        "optimizer_config",
        {},
        (
            "zero_one_enabled",
            True,
            fields("masters moments gradients reduce", FP32)
            | {"rounding": "nearest", "parallel.zero": True},
        ),
        ("grad_clipping", False, {"optimizer.clip": 0.0}),
        ("max_grad_norm", 0.5, {"optimizer.clip": 0.5}),
    ),
    *rows(
        "smp",
        smp.MixedPrecision,
        "mixed_precision",
        {"mixed_precision": {}},
        (
            "param_dtype",
            "bfloat16",
            fields("compute attention residual pipeline parameters reduce output", BF16),
        ),
        ("reduce_dtype", torch.bfloat16, {"reduce": BF16}),
        ("buffer_dtype", "torch.bfloat16", {"buffers": BF16}),
        ("cast_forward_inputs", True, {"cast_inputs": "all"}),
        ("cast_root_forward_inputs", False, {"cast_inputs": "none"}),
    ),
    *rows(
        "smp",
        smp.MixedPrecision,
        "mixed_precision",
        {"mixed_precision": {"param_dtype": "half"}},
        ("keep_low_precision_grads", True, {"gradients": FP16}),
    ),
    *rows(
        "smp",
        smp.MixedPrecisionPolicy,
        "mp_policy",
        {"mp_policy": {}},
        (
            "param_dtype",
            "half",
            fields("compute attention residual pipeline parameters reduce output", FP16)
            | {"notes": 1},
        ),
        ("reduce_dtype", "half", {"reduce": FP16}),
        ("output_dtype", "bfloat16", {"output": BF16}),
        ("cast_forward_inputs", False, {"cast_inputs": "none"}),
    ),
    *rows(
        "smp", smp.Smp, "", {"mixed_precision": {}}, ("max_grad_norm", 0.5, {"optimizer.clip": 0.5})
    ),
    *rows(
        "smp",
        smp.Smp,
        "",
        {"mixed_precision": {}},
        ("max_grad_norm", 0, {"optimizer.clip": 0, "notes": 1}),
    ),
    *rows("smp", TorchGradScaler, "grad_scaler", {"grad_scaler": {}}, *TORCH_SCALER),
    *rows(
        "smp",
        smp.Fp8Autocast,
        "fp8_autocast",
        {"fp8_autocast": {}},
        ("enabled", False, {"fp8": None}),
        (
            "fp8_group",
            "tsm.state.world_process_group",
            {},
        ),  # the default, the world, by its other name
        ("fp8_recipe", smp.DelayedScaling(amax_history_len=32), {"fp8.history_length": 32}),
    ),
    *rows(
        "smp",
        smp.Fp8Autocast,
        "fp8_autocast",
        {"fp8_autocast": {"enabled": False}},
        ("calibrating", True, {"fp8": FP8Recipe(calibrating=True)}),
    ),
    *recipe(
        "DelayedScaling",
        ("margin", 3, {"margin": 3}),
        ("interval", 1, {}),  # the only value of later releases
        ("fp8_format", smp.Format.E4M3, {"format": "e4m3"}),
        ("amax_history_len", 32, {"history_length": 32}),
        ("amax_compute_algo", "most_recent", {"amax_algo": "most_recent"}),
        ("scaling_factor_compute_algo", halved, {"scale_algo": halved}),
        ("reduce_amax", False, {"reduce_amax": False}),
        ("override_linear_precision", [False, False, True], {"weight_gradients": False}),
        *ATTENTION,
    ),
    *recipe(
        "Float8CurrentScaling",
        ("fp8_format", "Format.E4M3", {"format": "e4m3"}),
        ("use_power_2_scales", True, {"power_2_scales": True}),
        *ATTENTION,
    ),
    *recipe(
        "Float8BlockScaling",
        ("fp8_format", "HYBRID", {"format": "hybrid"}),
        ("use_f32_scales", True, {"power_2_scales": False}),
        *ATTENTION,
    ),
    *recipe("MXFP8BlockScaling", ("fp8_format", "HYBRID", {"format": "hybrid"}), *ATTENTION),
    *rows(
        "smp",
        smp.MXFP8BlockScaling,
        "fp8_autocast.fp8_recipe",
        {"fp8_autocast": {"fp8_recipe": {"recipe": "MXFP8BlockScaling"}}},
        ("margin", 1, {"notes": 1}),
    ),
    *rows("colossalai", colossalai.Torch, "fp16", TORCH, *TORCH_SCALER),
    *rows(
        "colossalai",
        colossalai.Apex,
        "fp16",
        O1,
        (
            "opt_level",
            "O2",
            fields("residual pipeline parameters reduce", FP16)
            | {"output": FP32, "keep_fp32": NORMS},
        ),
        ("patch_torch_functions", False, fields("compute attention output", FP32)),
    ),
    *rows(
        "colossalai",
        colossalai.Apex,
        "fp16",
        O2,
        (
            "enabled",
            False,
            fields("compute attention residual pipeline parameters reduce", FP32)
            | {"keep_fp32": (), "scaling": LossScaling()},
        ),
        (
            "cast_model_type",
            "bfloat16",
            fields("compute attention residual pipeline parameters reduce", BF16),
        ),
        ("keep_batchnorm_fp32", "False", {"keep_fp32": ()}),
        ("master_weights", False, fields("masters gradients", FP16)),
        ("loss_scale", 128.0, {"scaling": LossScaling("constant", 128.0)}),
        ("cast_model_outputs", "float16", {"output": FP16}),
        ("num_losses", 2, {"notes": 1}),
        ("min_loss_scale", 2.0, {"scaling.minimum": 2.0}),
        ("max_loss_scale", 1024.0, fields("scaling.maximum scaling.initial", 1024.0)),
    ),
    *rows(
        "colossalai",
        colossalai.Apex,
        "fp16",
        {"fp16": {**O2["fp16"], "num_losses": 2}},
        ("verbosity", 0, {"notes": 0}),
    ),
    *rows(
        "colossalai",
        colossalai.ColossalParallel,
        "fp16",
        PARALLEL,
        ("clip_grad", 1.0, {"optimizer.clip": 1.0}),
        ("log_num_zeros_in_grad", True, {"notes": 1}),
        ("initial_scale", 4, {"scaling.initial": 4}),
        ("min_scale", 2, {"scaling.minimum": 2}),
        ("growth_factor", 3, {"scaling.growth_factor": 3}),
        ("backoff_factor", 0.1, {"scaling.backoff_factor": 0.1}),
        ("growth_interval", 9, {"scaling.growth_interval": 9}),
        ("hysteresis", 3, {"scaling.hysteresis": 3}),
        ("max_scale", 2.0**40, {"scaling.maximum": 2.0**40}),
    ),
    *rows(
        "colossalai",
        colossalai.Naive,
        "fp16",
        {"fp16": {"mode": "NAIVE"}},
        ("dynamic_grad_scale", False, {"scaling": LossScaling("constant", 2.0**16)}),
        ("initial_scale", 4, {"scaling.initial": 4}),
        ("min_scale", 2, {"scaling.minimum": 2}),
        ("growth_factor", 3, {"scaling.growth_factor": 3}),
        ("backoff_factor", 0.1, {"scaling.backoff_factor": 0.1}),
        ("growth_interval", 9, {"scaling.growth_interval": 9}),
        ("hysteresis", 3, {"scaling.hysteresis": 3}),
        ("max_scale", 2.0**40, {"scaling.maximum": 2.0**40}),
        ("verbose", True, {}),  # prints more there
    ),
    *rows(
        "colossalai", colossalai.Config, "", TORCH, ("clip_grad_norm", 0.5, {"optimizer.clip": 0.5})
    ),
    *rows(
        "colossalai",
        colossalai.Config,
        "",
        {"plugin": {"kind": "TorchDDPPlugin"}},
        (
            "mixed_precision",
            "fp16",
            {
                "compute": FP16,
                "attention": FP16,
                "output": FP16,
                "scaling": LossScaling("dynamic", 2.0**16, FLOOR, 2.0, 0.5, 2000, 1),
            },
        ),
    ),
    *rows(
        "colossalai",
        plugins.TorchDDPPlugin,
        "plugin",
        DDP,
        ("fp8_communication", True, {"notes": 1}),
    ),
    *rows(
        "colossalai",
        plugins.HybridParallelPlugin,
        "plugin",
        HYBRID,
        (
            "precision",
            "bf16",
            fields("compute attention residual pipeline parameters gradients reduce", BF16)
            | UNSCALED,
        ),
        ("zero_stage", 1, {"parallel.zero": True}),
        ("tp_size", 2, {"parallel.tensor": 2}),
        ("pp_size", 2, {"parallel.pipeline": 2}),
        *PLUGIN,
    ),
    *rows(
        "colossalai",
        plugins.HybridParallelPlugin,
        "plugin",
        {"plugin": {"kind": "HybridParallelPlugin", "zero_stage": 1}},
        ("communication_dtype", "float32", {"reduce": FP32}),
    ),
    *rows(
        "colossalai",
        plugins.LowLevelZeroPlugin,
        "plugin",
        {"plugin": {"kind": "LowLevelZeroPlugin"}},
        (
            "precision",
            "bf16",
            fields("compute attention residual pipeline parameters gradients reduce", BF16)
            | UNSCALED,
        ),
        ("communication_dtype", "float32", {"reduce": FP32}),
        ("master_weights", False, {"masters": FP16}),
        ("cast_inputs", False, {"cast_inputs": "none"}),
        ("stage", 2, {}),  # who keeps gradients, not what they are
        ("norm_type", 2, {}),
        *PLUGIN,
    ),
    *rows(
        "colossalai",
        plugins.GeminiPlugin,
        "plugin",
        {"plugin": {"kind": "GeminiPlugin"}},
        (
            "precision",
            "bf16",
            fields("compute attention residual pipeline parameters gradients reduce output", BF16)
            | UNSCALED,
        ),
        ("master_weights", False, {"masters": FP16}),
        ("force_outputs_fp32", True, {"output": FP32}),
        ("tp_size", 2, {"parallel.tensor": 2}),
        ("norm_type", 2, {}),
        *PLUGIN,
    ),
    *rows(
        "internevo",
        internevo.Model,
        "",
        {"dtype": "torch.half", "hidden_size": 2048, "num_attention_heads": 16},
        (
            "dtype",
            "torch.tf32",
            fields("compute attention residual pipeline parameters gradients reduce buffers", FP32)
            | {"tf32": True, "scaling": LossScaling(), "attention": BF16},
        ),
        ("checkpoint", True, {"parallel.recompute": "full", "parallel.recompute_fraction": 1.0}),
        ("num_attention_heads", 4, {"model.heads": 4, "model.kv_heads": 4, "model.head_dim": 512}),
        ("embed_split_hidden", True, {"notes": 1}),
        ("vocab_size", 100, {"model.vocab": 100}),
        (
            "embed_grad_scale",
            0.1,
            {"model.embedding_grad_scale": 0.1, "model.head_grad_scale": 0.1},
        ),
        ("parallel_output", False, {"notes": 1}),
        ("hidden_size", 64, {"model.hidden": 64, "model.head_dim": 4, "model.ffn": 256}),
        ("num_layers", 3, {"model.layers": 3}),
        ("mlp_ratio", 8 / 3, {"model.ffn": 5632}),  # 5461 rounded up to 256s
        ("apply_post_layer_norm", True, {"notes": 1}),
        ("norm_type", "layernorm", {"model.norm": "layer"}),
        ("layer_norm_epsilon", 1e-6, {"model.norm_eps": 1e-6}),
        ("use_flash_attn", False, {"notes": 1, "scores": FP16}),
        ("num_chunks", 2, {"parallel.chunks": 2, "parallel.schedule": "interleaved"}),
        ("residual_in_fp32", True, fields("residual pipeline", FP32)),
        ("use_fp32_norm", True, {"keep_fp32": NORMS}),
        ("output_to_fp32", False, {"output": FP16}),
        ("drop_rate", 0.1, {"model.dropout": 0.1}),  # where it is dropped is settled by the model
        ("attn_drop_rate", 0.1, {"model.attention_dropout": 0.1}),
        ("dropout_selective_checkpoint", True, {"notes": 1}),
        ("rope_base", 500, {"model.rope_base": 500.0}),
        ("use_swiglu", False, {"model.mlp": "gelu"}),
        (
            "use_scaled_init",
            False,
            {"model.init": INTERNLM_STD | {"output": 0.0015, "down": 0.0015, "shrink": "none"}},
        ),
        (
            "use_dynamic_ntk_rope",
            True,
            {
                "model.rope_scaling": {"kind": "dynamic", "original_max_position_embeddings": 2048},
                "notes": 1,
            },
        ),
        (
            "model_type",
            "LLAMA2",
            {"model.init": LATER_STD, "notes": 1},
        ),
    ),
    *rows(
        "internevo",
        internevo.Model,
        "",
        {"use_dynamic_ntk_rope": True, "hidden_size": 2048},
        (
            "max_position_embeddings",
            64,
            {"model.rope_scaling": {"kind": "dynamic", "original_max_position_embeddings": 64}},
        ),
    ),
    *rows(
        "internevo",
        internevo.Model,
        "",
        {"model_type": "LLAMA2", "hidden_size": 2048},
        ("num_kv_attention_heads", 8, {"model.kv_heads": 8}),
        ("no_bias", True, {"model.qkv_bias": False, "model.output_bias": False}),
        ("adapt_hf", True, {"notes": 1}),
        *((key, 0.01, {"model.init": LATER_STD | {name: 0.01}}) for key, name in STDS.items()),
    ),
    *rows(
        "internevo",
        internevo.InternEvoGradScaler,
        "grad_scaler",
        {},
        ("growth_factor", 4, {"scaling.growth_factor": 4}),
        ("backoff_factor", 0.1, {"scaling.backoff_factor": 0.1}),
        ("max_scale", 2.0**20, {"scaling.maximum": 2.0**20}),
        ("hysteresis", 1, {"scaling.hysteresis": 1}),
    ),
    *rows(
        "internevo",
        internevo.Fp16,
        "grad_scaler.fp16",
        {},
        ("initial_scale", 8, {"scaling.initial": 8}),
        ("min_scale", 8, {"scaling.minimum": 8}),
        ("growth_interval", 8, {"scaling.growth_interval": 8}),
    ),
    *rows(
        "internevo",
        internevo.HybridZeroOptimizer,
        "hybrid_zero_optimizer",
        {"hybrid_zero_optimizer": {}},
        ("clip_grad_norm", 0.5, {"optimizer.clip": 0.5}),
        ("overlap_sync_grad", True, {"parallel.overlap": True}),
        ("overlap_sync_param", True, {"parallel.overlap": True}),
        ("reduce_bucket_size", 512 * 1024 * 1024, {"parallel.bucket": 2**29}),
    ),
    *rows(
        "internevo",
        internevo.InternEvoParallel,
        "parallel",
        {"parallel": {}},
        ("zero1", 1, {"parallel.zero": False}),
        ("zero1", {"size": 4}, {"parallel.zero_size": 4}),
        ("tensor", {"size": 2, "mode": "msp"}, {"parallel.tensor": 2, "parallel.sequence": True}),
        ("pipeline", 2, {"parallel.pipeline": 2}),
        ("weight", {"size": 1, "overlap": True, "memory_pool": True}, {"notes": 2}),
        ("sequence_parallel", True, {"parallel.sequence": True}),
    ),
    *rows(
        "nemo",
        nemo.MegatronMixedPrecision,
        "",
        BF16_MIXED,
        (
            "precision",
            16,
            fields("compute attention residual parameters", FP16)
            | {"pipeline": FP32, "scaling": LossScaling("dynamic", 2.0**32)},
        ),
        ("autocast_enabled", True, {"parameters": FP32, "residual": FP32, "notes": 1}),
        ("grad_reduce_in_fp32", False, fields("gradients reduce", BF16)),
    ),
    *rows(
        "nemo",
        nemo.MegatronMixedPrecision,
        "",
        {"recipe": "bf16_mixed"},
        (
            "recipe",
            "fp16_mixed",
            fields("compute attention residual parameters pipeline gradients reduce", FP16)
            | {"scaling": LossScaling("dynamic", 2.0**32)},
        ),
    ),
    *rows(
        "nemo",
        nemo.MegatronMixedPrecision,
        "",
        AUTOCAST,
        ("params_dtype", "bfloat16", fields("parameters residual", BF16)),
        ("autocast_dtype", "float32", fields("compute attention", FP32)),
    ),
    *rows(
        "nemo",
        nemo.MegatronMixedPrecision,
        "",
        FP16_MIXED,
        ("pipeline_dtype", "half", {"pipeline": FP16}),
        ("fp16_loss_scale", 64.0, {"scaling": LossScaling("constant", 64.0)}),
        ("fp16_initial_loss_scale", 4.0, {"scaling.initial": 4}),
        ("fp16_min_loss_scale", 4.0, {"scaling.minimum": 4}),
        ("fp16_loss_scale_window", 4, {"scaling.growth_interval": 4}),
        ("fp16_hysteresis", 4, {"scaling.hysteresis": 4}),
    ),
    *rows(
        "nemo",
        nemo.MegatronMixedPrecision,
        "",
        FP8,
        ("fp8", "e4m3", {"fp8.format": "e4m3"}),
        ("fp8_recipe", "tensorwise", {"fp8.kind": "current"}),
        ("fp8_margin", 2, {"fp8.margin": 2}),
        ("fp8_amax_history_len", 16, {"fp8.history_length": 16}),
        ("fp8_amax_compute_algo", "max", {"fp8.amax_algo": "max"}),
        ("fp8_wgrad", False, {"fp8.weight_gradients": False}),
        ("fp8_dot_product_attention", True, {"fp8.dot_product_attention": True}),
        ("fp8_multi_head_attention", True, {"fp8.multi_head_attention": True}),
        ("fp8_params", True, {"fp8.parameters": True}),
        ("fp8_param_gather", True, {"fp8.parameters": True}),
        ("reuse_grad_buf_for_mxfp8_param_ag", True, {"notes": 1}),
    ),
    *rows(
        "nemo",
        nemo.MegatronMixedPrecision,
        "",
        MX,
        ("first_last_layers_bf16", True, {"fp8.first_layers": 2}),
        ("fp8_margin", 2, {"notes": 2}),
    ),
    *rows(
        "nemo",
        nemo.MegatronMixedPrecision,
        "",
        BF16_MIXED,
        ("fp4", "e2m1", {"fp8": FP8Recipe(kind="nvfp4", reduce_over="stage")}),
    ),
    *rows(
        "nemo",
        nemo.MegatronMixedPrecision,
        "",
        {**BF16_MIXED, "fp4": "e2m1", "num_layers_at_end_in_bf16": 3},
        ("first_last_layers_bf16", True, {"fp8.last_layers": 3}),
        ("fp8_margin", 2, {"notes": 2}),
    ),
    *rows(
        "nemo",
        nemo.MegatronMixedPrecision,
        "",
        FIRST,
        ("num_layers_at_start_in_bf16", 1, {"fp8.first_layers": 1}),
        ("num_layers_at_end_in_bf16", 1, {"fp8.last_layers": 1}),
    ),
    *rows(
        "nemo",
        nemo.MegatronMixedPrecision,
        "",
        {**BF16_MIXED, "use_precision_aware_optimizer": True, "main_grads_dtype": "bfloat16"},
        ("use_precision_aware_optimizer", True, {}),  # by itself it changes nothing
        ("main_grads_dtype", "float32", {"gradients": FP32}),
    ),
    *rows(
        "nemo",
        nemo.MegatronMixedPrecision,
        "",
        {**BF16_MIXED, "use_precision_aware_optimizer": True, "exp_avg_dtype": "float32"},
        ("exp_avg_sq_dtype", "float32", {}),  # must be that of exp_avg_dtype
        ("clip_grad", 0.5, {"optimizer.clip": 0.5}),
        ("use_distributed_optimizer", False, {"parallel.zero": False}),
    ),
    *rows(
        "nemo",
        nemo.MegatronMixedPrecision,
        "",
        {**BF16_MIXED, "use_precision_aware_optimizer": True, "exp_avg_sq_dtype": "float32"},
        ("exp_avg_dtype", "float32", {}),
    ),
    *rows(
        "nemo",
        nemo_v1.Nemo1,
        "v1",
        V1,
        ("precision", 32, fields("compute attention residual pipeline parameters", FP32)),
        ("megatron_amp_O2", False, fields("parameters residual", FP32)),
        ("optim_name", "distributed_fused_adam", {"remainders": True, "parallel.zero": True}),
        ("grad_sync_dtype", "bf16", {"reduce": BF16}),
        ("gradient_clip_val", 0.5, {"optimizer.clip": 0.5}),
        ("fp32_residual_connection", True, {"residual": FP32}),
    ),
    *rows(
        "nemo",
        nemo_v1.Nemo1,
        "v1",
        {"v1": {**V1["v1"], "optim_name": "distributed_fused_adam", "grad_sync_dtype": "bf16"}},
        ("optim_dtype", "bf16", fields("masters moments", BF16) | {"remainders": False}),
    ),
    *rows(
        "nemo",
        nemo_v1.Nemo1,
        "v1",
        {"v1": {"precision": 16}},
        ("native_amp_init_scale", 4.0, {"scaling.initial": 4}),
        ("native_amp_growth_interval", 4, {"scaling.growth_interval": 4}),
        ("hysteresis", 4, {"scaling.hysteresis": 4}),
    ),
    *rows(
        "nemo",
        nemo_v1.Nemo1,
        "v1",
        {"v1": {**V1["v1"], "fp8_hybrid": True}},
        ("fp8", True, {"fp8": FP8Recipe(reduce_over="stage")}),
    ),
    *rows(
        "nemo",
        nemo_v1.Nemo1,
        "v1",
        {"v1": {**V1["v1"], "fp8": True, "fp8_hybrid": True}},
        ("fp8_e4m3", True, {"fp8.format": "e4m3"}),
        ("fp8_margin", 2, {"fp8.margin": 2}),
        ("fp8_interval", 1, {}),
        ("fp8_amax_history_len", 16, {"fp8.history_length": 16}),
        ("fp8_amax_compute_algo", "most_recent", {"fp8.amax_algo": "most_recent"}),
        ("fp8_params", True, {"fp8.parameters": True}),
        ("reduce_amax", False, {"fp8.reduce_amax": False}),
        ("fp8_wgrad", False, {"fp8.weight_gradients": False}),
    ),
    *rows(
        "nemo",
        nemo_v1.Nemo1,
        "v1",
        {"v1": {**V1["v1"], "fp8": True, "fp8_e4m3": True}},
        ("fp8_hybrid", True, {}),  # fp8_e4m3 wins
    ),
]


def with_key(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A deep copy of `config` with the value at the dotted `key`."""
    first, _, rest = key.partition(".")
    if not rest:
        return {**config, first: value}
    return {**config, first: with_key(config.get(first) or {}, rest, value)}


def said(resolved: Resolved) -> dict[str, Any]:
    return {key: decision.value for key, decision in resolved.settings.items()}


def read(resolved: Resolved, name: str) -> Any:
    """A field of the plan, a field of one of its fields, a setting, or the number of notes."""
    if name == "notes":
        return len(resolved.notes)
    first, _, rest = name.partition(".")
    if not hasattr(resolved.plan, first):
        return said(resolved).get(name)
    value = getattr(resolved.plan, first)
    return getattr(value, rest, None) if rest else value


@pytest.mark.parametrize(
    ("system", "_", "config", "key", "value", "changes"),
    CASES,
    ids=[f"{case[0]} {case[3]}" for case in CASES],
)
def test_a_key_changes_what_it_decides_and_nothing_else(
    system: str,
    _: type[Keys],
    config: dict[str, Any],
    key: str,
    value: Any,
    changes: dict[str, Any],
) -> None:
    resolve = DIALECTS[system].resolve
    before = resolve(config)
    after = resolve(with_key(config, key, value))
    for name, expected in changes.items():
        assert read(after, name) == expected, name
        assert read(before, name) != expected, f"{name} is {expected} already"
    fields = {line.partition(" = ")[0] for line in differences(before.plan, after.plan)}
    assert fields == {
        name.partition(".")[0] for name in changes if hasattr(after.plan, name.partition(".")[0])
    }
    settled = {name for name, value in said(after).items() if said(before).get(name) != value}
    assert settled == {
        name for name in changes if name.partition(".")[0] in ("model", "parallel", "optimizer")
    }


TABLES = {"kind", "environment", "plugin", "v1", "mp_policy", "fp8_autocast"}
TABLES |= {"mode", "optimizer_config", "grad_scaler", "hybrid_zero_optimizer", "parallel", "fp16"}
REFUSED = {
    "fp4_recipe",
    "fp4_param",
    "fp4_param_gather",
    "main_params_dtype",
    "XLA_USE_BF16",
    "norm_head",
    "is_reward",
    "output_tf32",
    "deepnorm",
    "init_type",
}
REFUSED |= {"num_experts", "moe_use_residual", "moe_type"}


IDLE = [
    ("nemo", BF16_MIXED, "fp16_initial_loss_scale", 4.0),
    ("nemo", BF16_MIXED, "fp16_hysteresis", 5),
    ("nemo", {"precision": "32"}, "fp16_loss_scale", 128.0),
    ("nemo", {"precision": "16", "fp16_loss_scale": 4.0}, "fp16_loss_scale_window", 7),
    ("nemo", BF16_MIXED, "params_dtype", "float32"),
    ("nemo", BF16_MIXED, "autocast_dtype", "float32"),
    ("nemo", {**FP8, "fp8_recipe": "tensorwise"}, "num_layers_at_end_in_bf16", 2),
    ("nemo", BF16_MIXED, "fp4_recipe", "mxfp4"),
    ("nemo", V1, "v1.native_amp_init_scale", 4.0),
    ("nemo", V1, "v1.fp8_amax_history_len", 16),
    *[
        ("smp", {"fp8_autocast": {"enabled": False}}, f"fp8_autocast.fp8_recipe.{key}", value)
        for key, value in (("margin", 2), ("amax_history_len", 16), ("reduce_amax", False))
    ],
    ("smp", {"fp8_autocast": {}}, "fp8_autocast.calibrating", True),
    (
        "colossalai",
        {"plugin": {"kind": "HybridParallelPlugin", "precision": "bf16"}},
        "plugin.initial_scale",
        4.0,
    ),
    (
        "colossalai",
        {"plugin": {"kind": "LowLevelZeroPlugin", "precision": "bf16"}},
        "plugin.hysteresis",
        4,
    ),
    ("colossalai", HYBRID, "plugin.communication_dtype", "float32"),
    ("colossalai", HYBRID, "clip_grad_norm", 0.5),
    ("colossalai", DDP, "clip_grad_norm", 0.5),
    ("colossalai", {"fp16": {**O2["fp16"], "loss_scale": 8.0}}, "fp16.max_loss_scale", 16.0),
    ("internevo", {"dtype": "torch.tf32"}, "grad_scaler.hysteresis", 4),
    ("internevo", {"dtype": "torch.float32"}, "grad_scaler.fp16.growth_interval", 4),
]


@pytest.mark.parametrize(
    ("system", "config", "key", "value"), IDLE, ids=[f"{case[0]} {case[2]}" for case in IDLE]
)
def test_a_key_that_changes_nothing_beside_the_others_is_noted_by_name(
    system: str, config: dict[str, Any], key: str, value: Any
) -> None:
    resolve = DIALECTS[system].resolve
    before = resolve(config)
    after = resolve(with_key(config, key, value))
    assert not [*differences(before.plan, after.plan)] and said(before) == said(after)
    (note,) = set(after.notes) - set(before.notes)
    assert key.removeprefix("v1.").rpartition(".")[2] in note and "changes nothing" in note


@pytest.mark.parametrize(
    ("system", "config", "key"),
    [
        ("nemo", {**FP8, "fp8_recipe": "mxfp8"}, "fp8_amax_history_len"),
        ("nemo", {**FP8, "fp8_amax_compute_algo": "most_recent"}, "fp8_amax_history_len"),
        (
            "nemo",
            {
                "v1": {
                    **V1["v1"],
                    "fp8": True,
                    "fp8_e4m3": True,
                    "fp8_amax_compute_algo": "most_recent",
                }
            },
            "v1.fp8_amax_history_len",
        ),
        (
            "smp",
            {"fp8_autocast": {"fp8_recipe": {"amax_compute_algo": "most_recent"}}},
            "fp8_autocast.fp8_recipe.amax_history_len",
        ),
    ],
)
def test_a_history_that_no_scale_looks_back_on_is_noted(
    system: str, config: dict[str, Any], key: str
) -> None:
    (note,) = DIALECTS[system].resolve(with_key(config, key, 16)).notes
    assert key.removeprefix("v1.") in note and "changes nothing" in note
    assert not DIALECTS[system].resolve(config).notes


@pytest.mark.parametrize(
    ("key", "value"), [("clip_grad", 0.5), ("fp8", "hybrid"), ("precision", "16")]
)
def test_the_plugins_keys_beside_nemo_1s_are_refused(key: str, value: Any) -> None:
    with pytest.raises(
        UserError, match=rf"precision.nemo.{key} = .*: v1, NeMo 1's YAML, is there too"
    ):
        nemo.resolve({**V1, key: value})


def test_every_key_of_every_class_is_tried() -> None:
    classes = {kind for _, kind, *_ in CASES}
    skipped = {(kind, key) for kind in classes for key in TABLES | REFUSED}
    skipped |= {(kind, "recipe") for kind in smp.RECIPES.values()} | {(smp.Smp, "mixed_precision")}
    known = {(kind, key) for kind in classes for key in kind.model_fields} - skipped
    assert known == {(kind, key.rpartition(".")[2]) for _, kind, _, key, *_ in CASES}
    systems = (nxd, smp, colossalai, plugins, internevo, nemo, nemo_v1)
    defined = {
        k for m in systems for k in vars(m).values() if isinstance(k, type) and issubclass(k, Keys)
    }
    assert defined - classes == {Keys, plugins.Plugin}  # what others are made from


@pytest.mark.parametrize("system", DIALECTS)
def test_an_unknown_key_is_answered_in_a_line_that_fits_a_screen(system: str) -> None:
    table = {"internevo": {"model": {"zzz": 1}}}.get(system, {"zzz": 1})
    with pytest.raises(UserError) as caught:
        DIALECTS[system].resolve(table)
    (line,) = [str(problem) for problem in caught.value.problems if "zzz" in str(problem)]
    assert "no such key; " in line and len(line) < 250
