"""Files as users of five systems write them, in files/, each with the plan that it comes to there.

Each entry was written from the system's own source, which the comment before it names, not from
what this project makes of the file. Fields of the plan that a file and its system's defaults leave
open are not in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from megaprec.precision.fp8_recipe import FP8Recipe, Kind
from megaprec.precision.plan import LossScaling

FP32 = torch.float32
BF16 = torch.bfloat16
FP16 = torch.float16
NORMS = ("*norm.weight", "*norm.bias")
NO_FLOOR = 2.0**-126


@dataclass(frozen=True)
class Expected:
    """file: in files/. plan: fields of PrecisionPlan. settings: run-file key -> value.
    notes: what must stand in some note, one each; quiet: there is none; unsaid: what stands in
    none, being about something else. A file that must be refused has
    refused: what must stand in the message; at: lines of the file, one of which it must name, any
        if empty.
    """

    file: str
    plan: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    quiet: bool = False
    unsaid: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    at: tuple[int, ...] = ()


def half(dtype: torch.dtype, sums: torch.dtype = FP32, **others: Any) -> dict[str, Any]:
    """Weights, products and what stages send in `dtype`, gradients in `sums`, the optimizer in
    FP32, no loss scale."""
    held = dict.fromkeys(("compute", "residual", "pipeline", "parameters"), dtype)
    optimizer = {"masters": FP32, "moments": FP32, "remainders": False, "rounding": "nearest"}
    kept = {"keep_fp32": (), "tf32": False, "scaling": LossScaling(), "fp8": None}
    return held | {"gradients": sums, "reduce": sums} | optimizer | kept | others


def autocast(dtype: torch.dtype, **others: Any) -> dict[str, Any]:
    """FP32 weights, gradients and optimizer; products in `dtype`."""
    held = dict.fromkeys(("parameters", "gradients", "reduce", "masters", "moments"), FP32)
    return (
        {"compute": dtype, "rounding": "nearest", "fp8": None, "scaling": LossScaling()}
        | held
        | others
    )


def neuron(masters: torch.dtype, gradients: torch.dtype, **others: Any) -> dict[str, Any]:
    """NxD: BF16 weights, with these masters and gradient sums."""
    saved = {
        "masters": masters,
        "moments": masters,
        "masters_in_checkpoint": False,
        "sensitive": FP32,
    }
    return half(BF16, gradients) | saved | others


def fsdp(
    dtype: torch.dtype, reduce: torch.dtype, buffers: torch.dtype, **others: Any
) -> dict[str, Any]:
    """FSDP1: FP32 weights are cast to `dtype` when they are gathered; only the root's inputs are
    cast."""
    return (
        half(dtype)
        | {"reduce": reduce, "buffers": buffers, "output": dtype, "cast_inputs": "root"}
        | others
    )


def dynamic(
    initial: float, minimum: float, interval: int, hysteresis: int, maximum: float | None
) -> LossScaling:
    """A loss scale that doubles and halves."""
    return LossScaling("dynamic", initial, minimum, 2.0, 0.5, interval, hysteresis, maximum)


def plugin_fp8(kind: Kind, form: Literal["hybrid", "e4m3"] = "hybrid", **others: Any) -> FP8Recipe:
    """FP8 of NeMo's and Bridge's plugins, whose own history is 1, the newest."""
    return FP8Recipe(
        kind, form, history_length=1, amax_algo="most_recent", reduce_over="stage", **others
    )


# torch/amp/grad_scaler.py: no floor, no cap, no hysteresis
TORCH_SCALE = dynamic(2.0**16, NO_FLOOR, 2000, 1, None)
INTERN_BESIDE = (
    "ckpt",
    "oss_snapshot_freq",
    "total_steps",
    "train_folder",
    "adam_beta2",
    "init_beta2",
    "alert",
)
INTERN_SCALE = dynamic(2.0**16, 1.0, 1000, 2, 2.0**24)

TABLE: tuple[Expected, ...] = (
    # NxD, neuronx_distributed/trainer/trainer.py neuronx_distributed_config: keys as the
    # documentation has them.
    Expected(
        "nxd_standard.py",
        neuron(FP32, FP32),
        {"parallel.zero": True, "optimizer.clip": 1.0},
        quiet=True,
    ),
    # There: use_master_weights is not given, so it is zero_one_enabled. Clips at max_grad_norm, as
    # documented.
    Expected(
        "nxd_call.py",
        neuron(FP32, FP32, masters_in_checkpoint=True),
        {"parallel.zero": True, "optimizer.clip": 0.5},
        quiet=True,
    ),
    # neuronx_distributed_training/lightning_modules/model/base.py _initialize_nxd_config:
    # "mixed_precision" has masters and FP32 sums; docs/general/config_overview.rst: the keys after
    # `type` count if it is "manual" only.
    Expected(
        "nxd_nxdt_llama3.yaml",
        neuron(FP32, FP32),
        {"parallel.zero": True, "optimizer.clip": 1.0},
        unsaid=(
            "model_parallel_size",
            "max_steps",
            "filename",
            "compiler_flags",
            "fusions",
            "kv_replicator",
        ),
    ),
    # optimizer_config is given without ZeRO, mixed_precision_config is None: all three are off.
    # XLA_USE_BF16 makes every float BF16, the variable of the runtime rounds stochastically.
    Expected(
        "nxd_legacy_none.py",
        neuron(BF16, BF16, rounding="stochastic"),
        {"parallel.zero": False, "optimizer.clip": 0.0},
        quiet=True,
    ),
    # The dict is what it is when it is handed over.
    Expected(
        "nxd_by_assignment.py",
        neuron(FP32, BF16, masters_in_checkpoint=True),
        {"parallel.zero": True, "optimizer.clip": 2.0},
        quiet=True,
    ),
    # examples/training/*/run_*.py: NEURON_RT_STOCHASTIC_ROUNDING_EN is what rounds, with masters
    # too.
    Expected(
        "nxd_rounding_on.py",
        neuron(FP32, FP32, rounding="stochastic"),
        {"parallel.zero": True, "optimizer.clip": 1.0},
        quiet=True,
    ),
    Expected(
        "nxd_legacy_nearest.py",
        neuron(BF16, BF16, rounding="nearest"),
        {"parallel.zero": True, "optimizer.clip": 1.0},
        quiet=True,
    ),
    # neuronx_distributed_config's order: tensor, pipeline, expert, context, pipeline_config,
    # optimizer_config.
    Expected(
        "nxd_positional.py",
        neuron(FP32, FP32),
        {"parallel.zero": True, "optimizer.clip": 1.0},
        quiet=True,
    ),
    Expected(
        "nxd_config.json",
        neuron(FP32, FP32, masters_in_checkpoint=True),
        {"parallel.zero": True, "optimizer.clip": 0.0},
        quiet=True,
    ),
    Expected(
        "nxd_llama_script.py",
        neuron(FP32, FP32),
        {"parallel.zero": True, "optimizer.clip": 1.0},
        quiet=True,
    ),
    # neuronx-distributed-training, examples/training_orchestrator.py process_config and base.py:
    # what a type sets. gradient_clip_val of null: grad_clipping is off.
    Expected(
        "nxd_nxdt_bf16sr.yaml",
        neuron(BF16, BF16, rounding="stochastic"),
        {"parallel.zero": True, "optimizer.clip": 0.0},
        quiet=True,
    ),
    Expected(
        "nxd_nxdt_manual.yaml",
        neuron(FP32, BF16, masters_in_checkpoint=True),
        {"parallel.zero": True, "optimizer.clip": 0.8},
        quiet=True,
    ),
    Expected("nxd_nxdt_fp32.yaml", half(FP32), {"parallel.zero": True, "optimizer.clip": 1.0}),
    # The documentation's spelling, "mixed_precisionSR"; zero1 is not given: on.
    Expected(
        "nxd_nxdt_rounded.yaml",
        neuron(FP32, FP32, rounding="stochastic", masters_in_checkpoint=True),
        {"parallel.zero": True, "optimizer.clip": 0.5},
        quiet=True,
    ),
    # hf_models/llama_model.py: autocast holds BF16 weights; base.py: no ZeRO, so no masters;
    # nothing rounds by chance.
    Expected(
        "nxd_nxdt_lora.yaml",
        neuron(BF16, BF16, rounding="nearest"),
        {"parallel.zero": False, "optimizer.clip": 1.0},
    ),
    # hf_models/llama_model.py reduce_dtype; neuronx_distributed/utils/adamw_fp32_optim_params.py:
    # moments are FP64, which XLA_DOWNCAST_BF16 makes FP32.
    Expected(
        "nxd_nxdt_reduced_wide.yaml",
        neuron(BF16, FP32, rounding="stochastic"),
        {"parallel.zero": True, "optimizer.clip": 1.0},
        notes=("parallel_layers_reduce_dtype = fp32", "model.optim.name = adamw_fp32OptState"),
    ),
    Expected("nxd_arguments.py", refused=("mixed_precision_config",), at=(8, 16, 20)),
    Expected("nxd_rounding_by_flag.py", refused=("NEURON_RT_STOCHASTIC_ROUNDING_EN",), at=(7,)),
    Expected("nxd_misspelt.py", refused=("use_master_weight", "use_master_weights"), at=(1, 2)),
    Expected("nxd_zero_for_large.py", refused=("zero_one_enabled",), at=(6, 7)),
    Expected("nxd_nxdt_from_outside.yaml", refused=("precision.type",)),
    # SMP, torch/distributed/fsdp/api.py MixedPrecision. Gradients are summed in FP32 here:
    # docs/migrating.md.
    Expected("smp_fsdp.py", fsdp(BF16, BF16, FP32), quiet=True),
    # transformer_engine/pytorch/quantization.py fp8_autocast: `enabled` is the first argument;
    # common/recipe.
    Expected("smp_fp8.py", fsdp(BF16, FP32, FP32, fp8=FP8Recipe(history_length=32)), quiet=True),
    Expected("smp_conditional_dtype.py", refused=("dtype",), at=(7, 9)),
    # fsdp/_fully_shard/_fsdp_api.py MixedPrecisionPolicy: inputs of every module are cast; one
    # policy, used twice.
    Expected("smp_fully_shard.py", half(BF16) | {"output": FP32, "cast_inputs": "all"}, quiet=True),
    # A key that one function sets of a dict of the module.
    Expected("smp_policy_kwargs.py", refused=("buffer_dtype", "mp_args"), at=(10,)),
    Expected(
        "smp_scaler_in_order.py",
        fsdp(
            FP16, FP16, FP32, scaling=LossScaling("dynamic", 2.0**14, NO_FLOOR, 4.0, 0.25, 100, 1)
        ),
        quiet=True,
    ),
    # transformer_engine/pytorch/quantization.py autocast(enabled, calibrating, recipe,
    # amax_reduction_group).
    Expected(
        "smp_te_autocast.py",
        half(BF16, fp8=FP8Recipe("current", "e4m3")) | {"output": BF16, "cast_inputs": "all"},
        quiet=True,
    ),
    # transformer_engine/common/recipe MXFP8BlockScaling: E4M3 both ways by default.
    Expected("smp_mxfp8.py", fsdp(BF16, BF16, BF16, fp8=FP8Recipe("mx", "e4m3")), quiet=True),
    Expected(
        "smp_config.json",
        fsdp(
            BF16,
            FP32,
            FP32,
            fp8=FP8Recipe(format="e4m3", history_length=16, amax_algo="most_recent"),
        ),
        notes=("amax_history_len",),
    ),
    # All six fields in order; keep_low_precision_grads with reductions in the dtype of the weights.
    Expected(
        "smp_fp8_off.py", fsdp(BF16, BF16, BF16, gradients=BF16, cast_inputs="all"), quiet=True
    ),
    Expected("smp_llama_script.py", fsdp(BF16, FP32, BF16), notes=("max_grad_norm",)),
    Expected("smp_tutorial_policies.py", refused=("MixedPrecision",), at=(18, 24)),
    Expected("smp_accelerate.yaml", refused=("a configuration of accelerate",)),
    # transformers' Trainer, which is not one of the five.
    Expected("smp_trainer.py", refused=("arguments of Hugging Face's Trainer",)),
    Expected("smp_hyperpod.yaml", refused=("a recipe of SageMaker HyperPod",)),
    # The attribute of a class of the file.
    Expected("smp_dtype_table.py", refused=("param_dtype", "Precision.param"), at=(13,)),
    Expected("smp_no_policy.py", refused=("mixed_precision",), at=(10, 11, 13, 14)),
    Expected("smp_two_policies.py", refused=("MixedPrecision",), at=(7, 8, 12, 13)),
    Expected("smp_misspelt.py", refused=("reduction_dtype", "reduce_dtype"), at=(4, 6)),
    # Colossal-AI, legacy/amp/naive_amp/__init__.py and
    # amp/naive_amp/grad_scaler/dynamic_grad_scaler.py: half weights, FP32 copies, neither floor nor
    # cap; legacy/initialize.py: clip_grad_norm at the top is the engine's.
    Expected(
        "colossalai_vit_naive.py",
        half(FP16, FP16, output=FP32, scaling=dynamic(2.0**14, NO_FLOOR, 1000, 1, None)),
        {"optimizer.clip": 1.0},
        quiet=True,
    ),
    # booster/plugin/hybrid_parallel_plugin.py: gradients stay in the dtype of the weights; no scale
    # for bf16.
    Expected(
        "colossalai_hybrid.py",
        half(BF16, BF16, cast_inputs="root"),
        {"parallel.zero": True, "optimizer.clip": 1.0},
        notes=("tp_size",),
    ),
    # apex/amp/frontend.py Properties: "True" is true, a loss_scale that is text is a number; O2
    # keeps norms in FP32.
    Expected(
        "colossalai_apex_o2.py",
        half(
            FP16,
            FP32,
            reduce=FP16,
            output=FP32,
            keep_fp32=NORMS,
            scaling=LossScaling("constant", 128.0),
        ),
        {"optimizer.clip": 0.5},
        quiet=True,
    ),
    # legacy/amp/torch_amp: FP32 weights under autocast, torch's scaler; `model` and `parallel` are
    # not InternEvo's.
    Expected(
        "colossalai_gpt2_torch.py",
        autocast(FP16, output=FP16, scaling=TORCH_SCALE),
        {"optimizer.clip": 1.0},
        notes=(
            "dtype = torch.half",
        ),  # of the model that the file builds, not of how it is trained
    ),
    Expected(
        "colossalai_launch_dict.py",
        autocast(
            FP16, output=FP16, scaling=LossScaling("dynamic", 2.0**11, NO_FLOOR, 2.0, 0.25, 2000, 1)
        ),
        {"optimizer.clip": 0.9},
        quiet=True,
    ),
    # Nothing says clip_grad_norm: legacy/initialize.py takes 0, no clipping.
    Expected(
        "colossalai_apex_o1.py",
        autocast(FP16, output=FP16, scaling=dynamic(2.0**16, NO_FLOOR, 2000, 1, 2.0**24)),
        {"optimizer.clip": 0.0},
        quiet=True,
    ),
    # v0.0.1-beta, nn/optimizer/fp16_optimizer.py: floor 1, cap 2^32.
    Expected(
        "colossalai_parallel.py",
        half(FP16, FP16, output=FP32, scaling=dynamic(2.0**20, 1.0, 500, 4, 2.0**32)),
        {"optimizer.clip": 1.0},
        quiet=True,
    ),
    # amp/naive_amp/grad_scaler/constant_grad_scaler.py.
    Expected(
        "colossalai_naive_constant.py",
        half(FP16, FP16, output=FP32, scaling=LossScaling("constant", 1024.0)),
        {"optimizer.clip": 0.0},
        quiet=True,
    ),
    Expected(
        "colossalai_settings.toml",
        half(
            FP16,
            FP16,
            output=FP32,
            scaling=LossScaling("dynamic", 2.0**16, NO_FLOOR, 4.0, 0.5, 1000, 2, 2.0**20),
        ),
        {"optimizer.clip": 1.0},
        quiet=True,
    ),
    # booster/plugin/low_level_zero_plugin.py: fp16 by default, clips at nothing; 2^32 unless told
    # otherwise.
    Expected(
        "colossalai_low_level_zero.py",
        half(FP16, FP16, cast_inputs="root", scaling=dynamic(2.0**5, 1.0, 1000, 2, 2.0**32)),
        {"parallel.zero": True, "optimizer.clip": 0.0},
        quiet=True,
    ),
    # zero/low_level/low_level_optim.py: without master_weights the optimizer has the BF16 weights
    # themselves.
    Expected(
        "colossalai_no_masters.py",
        half(BF16, BF16, masters=BF16, moments=BF16, cast_inputs="none"),
        {"parallel.zero": True, "optimizer.clip": 0.5},
        quiet=True,
    ),
    # The same file: gradients travel in communication_dtype.
    Expected(
        "colossalai_reduce_wide.py",
        half(BF16, BF16) | {"reduce": FP32, "cast_inputs": "root"},
        {"parallel.zero": True, "optimizer.clip": 1.0},
        quiet=True,
    ),
    # booster/plugin/gemini_plugin.py, zero/gemini/gemini_ddp.py: always sharded;
    # force_outputs_fp32.
    Expected(
        "colossalai_gemini.py",
        half(
            FP16,
            FP16,
            cast_inputs="root",
            output=FP32,
            scaling=dynamic(2.0**8, 2.0, 1000, 2, 2.0**32),
        ),
        {"parallel.zero": True, "optimizer.clip": 1.0},
        quiet=True,
    ),
    # booster/mixed_precision/fp16_torch.py: torch's autocast and scaler; clipping is left to the
    # script.
    Expected(
        "colossalai_ddp_fp16.py",
        autocast(FP16, scaling=TORCH_SCALE),
        {"optimizer.clip": 0.0},
        quiet=True,
    ),
    Expected(
        "colossalai_fp16_object.py",
        autocast(FP16, scaling=dynamic(2.0**10, NO_FLOOR, 250, 1, None)),
        {"optimizer.clip": 0.0},
        quiet=True,
    ),
    # A method may change any key of a dict.
    Expected(
        "colossalai_plugin_kwargs.py", refused=("plugin_kwargs", "plugin_kwargs.update"), at=(7, 12)
    ),
    # quantization/fp8.py linear_fp8: a scale per tensor from the tensor itself, E4M3 forward, E5M2
    # for gradients.
    Expected(
        "colossalai_hybrid_fp8.py",
        half(BF16, BF16, cast_inputs="root", fp8=FP8Recipe("current")),
        {"parallel.zero": True, "optimizer.clip": 0.0},
        notes=("fp8_communication",),
    ),
    Expected(
        "colossalai_hybrid_fp32.py",
        half(FP32),
        {"parallel.zero": False, "optimizer.clip": 1.0},
        unsaid=("pp_style",),
    ),
    # booster/plugin/moe_hybrid_parallel_plugin.py: ep_size is the third argument.
    Expected(
        "colossalai_moe.py",
        half(BF16, BF16, cast_inputs="root"),
        {"parallel.zero": True, "optimizer.clip": 1.0},
        unsaid=("ep_size",),
    ),
    # Comments and texts decide nothing.
    Expected(
        "colossalai_commented.py",
        half(FP16, FP16, output=FP32, scaling=dynamic(2.0**12, NO_FLOOR, 2000, 2, None)),
        {"optimizer.clip": 1.0},
        quiet=True,
    ),
    Expected("colossalai_unpacked.py", refused=("initial_scale", "scale"), at=(11,)),
    Expected("colossalai_choice.py", refused=("plugin",), at=tuple(range(16, 25))),
    Expected("colossalai_precision_argument.py", refused=("precision",), at=(12, 16)),
    Expected("colossalai_misspelt.py", refused=("growth_intervall", "growth_interval"), at=(4, 7)),
    Expected("colossalai_undecided.py", refused=("fp16",), at=(3,)),
    # InternEvo, solver/optimizer/hybrid_zero_optim.py: the scale is there for BF16 too;
    # model/modules/mlp.py: the width is rounded up to 256.
    Expected(
        "internevo_7B_sft.py",
        half(BF16, BF16, output=FP32, sensitive=FP32, scaling=INTERN_SCALE),
        {
            "model.heads": 32,
            "model.vocab": 103168,
            "model.hidden": 4096,
            "model.layers": 32,
            "model.ffn": 11008,
            "model.norm": "rms",
            "model.norm_eps": 1e-5,
            "optimizer.clip": 1.0,
            "parallel.overlap": True,
            "parallel.bucket": 512 * 1024 * 1024,
            "parallel.tensor": 1,
            "parallel.pipeline": 1,
            "parallel.zero": True,
        },
        unsaid=INTERN_BESIDE,
    ),
    # initialize/launch.py args_sanity_check: tf32 is FP32 with the two switches; zero1 of 1 is off.
    Expected(
        "internevo_tf32.py",
        half(FP32, output=FP32, tf32=True),
        {
            "model.heads": 16,
            "model.vocab": 50304,
            "model.hidden": 1024,
            "model.layers": 24,
            "model.ffn": 4096,
            "model.norm": "layer",
            "model.norm_eps": 1e-6,
            "parallel.recompute": "full",
            "parallel.recompute_fraction": 0.25,
            "optimizer.clip": 0.8,
            "parallel.overlap": False,
            "parallel.bucket": 64 * 1024 * 1024,
            "parallel.tensor": 1,
            "parallel.pipeline": 1,
            "parallel.zero": False,
        },
        quiet=True,
    ),
    # train/pipeline.py set_fp32_attr_for_model: use_fp32_norm stands at the top of the file;
    # model/modeling_internlm2.py build_model_with_cfg: num_kv_attention_heads.
    Expected(
        "internevo_internlm2.py",
        half(
            BF16, BF16, output=FP32, keep_fp32=NORMS, scaling=dynamic(2.0**14, 1.0, 500, 3, 2.0**20)
        ),
        {
            "model.heads": 32,
            "model.kv_heads": 8,
            "model.vocab": 92544,
            "model.hidden": 4096,
            "model.layers": 32,
            "model.ffn": 14336,
            "model.norm": "rms",
            "model.norm_eps": 1e-5,
            "model.qkv_bias": False,
            "model.output_bias": False,
            "parallel.recompute": "full",
            "parallel.recompute_fraction": 1.0,
            "optimizer.clip": 0.5,
            "parallel.overlap": True,
            "parallel.bucket": 256 * 1024 * 1024,
            "parallel.tensor": 2,
            "parallel.sequence": True,
            "parallel.pipeline": 2,
            "parallel.zero": True,
            "parallel.zero_size": 8,
        },
        quiet=True,
    ),
    Expected(
        "internevo_llama2_fp16.py",
        half(FP16, FP16, output=FP32, scaling=dynamic(2.0**18, 2.0, 2000, 1, 2.0**24)),
        {
            "model.heads": 32,
            "model.kv_heads": 32,
            "model.vocab": 32000,
            "model.hidden": 4096,
            "model.layers": 32,
            "model.ffn": 11008,
            "model.norm": "rms",
            "model.norm_eps": 1e-6,
            "model.qkv_bias": False,
            "model.output_bias": False,
            "parallel.recompute": "full",
            "parallel.recompute_fraction": 0.5,
            "parallel.schedule": "interleaved",
            "parallel.chunks": 2,
            "optimizer.clip": 1.0,
            "parallel.overlap": False,
            "parallel.bucket": 512 * 1024 * 1024,
            "parallel.tensor": 4,
            "parallel.sequence": True,
            "parallel.pipeline": 2,
            "parallel.zero": True,
        },
        unsaid=INTERN_BESIDE,
    ),
    # model/modeling_moe.py: GShard's gate drops tokens over a capacity, which no expert here does.
    Expected("internevo_moe.py", refused=("INTERNLM_MoE", "num_experts"), at=(2, 36)),
    Expected(
        "internevo_1B_clean.py",
        half(BF16, BF16, output=FP32, scaling=INTERN_SCALE),
        {
            "model.heads": 16,
            "model.vocab": 92544,
            "model.hidden": 2048,
            "model.layers": 24,
            "model.ffn": 5632,
            "model.norm": "rms",
            "model.norm_eps": 1e-5,
            "model.embedding_grad_scale": 0.1,
            "optimizer.clip": 1.0,
            "parallel.overlap": True,
            "parallel.bucket": 512 * 1024 * 1024,
            "parallel.tensor": 1,
            "parallel.pipeline": 1,
            "parallel.zero": True,
            "parallel.zero_size": 8,
        },
        quiet=True,
    ),
    # dict(earlier, key=...) is a copy with more keys.
    Expected(
        "internevo_20B.py",
        half(BF16, BF16, output=FP32, scaling=INTERN_SCALE),
        {
            "model.heads": 40,
            "model.vocab": 103168,
            "model.hidden": 5120,
            "model.layers": 60,
            "model.ffn": 13824,
            "model.norm": "rms",
            "model.norm_eps": 1e-5,
            "optimizer.clip": 1.0,
            "parallel.overlap": True,
            "parallel.bucket": 512 * 1024 * 1024,
            "parallel.tensor": 4,
            "parallel.sequence": True,
            "parallel.pipeline": 1,
            "parallel.zero": True,
            "parallel.zero_size": 8,
        },
        quiet=True,
    ),
    # model/modeling_internlm.py: the residual is cast after each norm; torch.half is float16.
    Expected(
        "internevo_residual_fp32.py",
        half(
            FP16,
            FP16,
            residual=FP32,
            pipeline=FP32,
            output=FP32,
            keep_fp32=NORMS,
            scaling=INTERN_SCALE,
        ),
        {
            "model.heads": 12,
            "model.vocab": 50304,
            "model.hidden": 768,
            "model.layers": 12,
            "model.norm": "layer",
            "model.dropout": 0.1,
            "model.attention_dropout": 0.0,
            "optimizer.clip": 1.0,
            "parallel.overlap": False,
            "parallel.bucket": 2**28,
            "parallel.tensor": 1,
            "parallel.pipeline": 1,
            "parallel.zero": True,
        },
        quiet=True,
    ),
    # initialize/launch.py args_sanity_check: no dtype is float16, with a warning; zero1 and tensor
    # may be numbers.
    Expected(
        "internevo_no_dtype.py",
        half(FP16, FP16, output=FP32, scaling=INTERN_SCALE),
        {
            "model.heads": 8,
            "model.vocab": 32000,
            "model.hidden": 512,
            "model.layers": 6,
            "model.norm": "rms",
            "optimizer.clip": 2.0,
            "parallel.overlap": False,
            "parallel.bucket": 2**26,
            "parallel.tensor": 1,
            "parallel.pipeline": 1,
            "parallel.zero": True,
            "parallel.zero_size": 4,
        },
        notes=("dtype",),
    ),
    # core/naive_amp.py NaiveAMPModel(model, output_to_fp32=True, parallel_mode, sync_buffer,
    # dtype=float16).
    Expected(
        "internevo_naive_amp.py",
        dict.fromkeys(("compute", "parameters", "gradients", "reduce", "output"), BF16)
        | {"masters": FP32},
    ),
    # There: a module that is marked stays FP32. Which parameters it has cannot be known from its
    # name.
    Expected(
        "internevo_fp32_head.py",
        dict.fromkeys(("compute", "parameters", "gradients", "reduce"), FP16)
        | {"masters": FP32, "output": FP32},
        notes=("set_fp32_attr_to_module",),
    ),
    # A value that is changed in place, and a dict that a method may change.
    Expected("internevo_overridden.py", refused=("clip_grad_norm", "model.update"), at=(23, 25)),
    Expected("internevo_by_cluster.py", refused=("dtype",), at=(5, 7, 8)),
    Expected("internevo_isp.py", refused=("isp", "tensor.mode")),
    Expected("internevo_star_import.py", refused=("configs._base_",), at=(4, 5)),
    Expected("internevo_bad_dtype.py", refused=("dtype", "torch.bfloat16")),
    # NeMo, collections/llm/recipes/llama3_8b.py trainer: plugins=bf16_mixed(), of which one field
    # is changed; lightning/pytorch/plugins/mixed_precision.py update_config_with_dtype_overrides:
    # the plugin's field counts.
    Expected("nemo_llama3_recipe.py", half(BF16, BF16), {"optimizer.clip": 0.5}, quiet=True),
    # collections/nlp/models/language_modeling/megatron_base_model.py configure_optimizers: O2 of
    # bf16 has FP32 main parameters and fp32_grad_accum; fp8 is off, whatever the keys after it say,
    # which every template has.
    Expected(
        "nemo_gpt_config.yaml",
        half(BF16),
        {"parallel.zero": False, "optimizer.clip": 0.5},
        quiet=True,
    ),
    # OmegaConf: ${...} of a whole value is that value. Hydra: other files are laid under this one,
    # but for overlap.
    Expected(
        "nemo_composed.yaml",
        half(BF16),
        {"parallel.zero": False, "optimizer.clip": 0.5},
        notes=("defaults: .@model: ",),
        unsaid=("tp_overlap", "_self_", "hydra/"),
    ),
    # Megatron-Bridge, training/mixed_precision.py: the name's fields over MixedPrecisionConfig's.
    Expected(
        "nemo_bridge_delayed.py",
        half(BF16, fp8=FP8Recipe(reduce_over="stage", parameters=True)),
        {"optimizer.clip": 0.25},
        quiet=True,
    ),
    # There: its fields have names of their own, and the window is a float.
    Expected(
        "nemo_bridge_scale.py",
        half(FP16, FP16, scaling=dynamic(2.0**16, 1.0, 500, 4, None)),
        quiet=True,
    ),
    # There: the recipe's plugin is replaced, then two fields of the new one are changed.
    Expected(
        "nemo_fp8_recipe.py",
        half(BF16, fp8=FP8Recipe(history_length=32, reduce_over="stage")),
        quiet=True,
    ),
    Expected("nemo_run_config.py", refused=("plugins", "precision()"), at=(36,)),
    # docs/source/features/mixed_precision.rst hands fp8_args to the trainer: fields of the plugin,
    # as documented.
    Expected(
        "nemo_trainer_fp8_args.py",
        half(BF16, fp8=FP8Recipe("delayed", "e4m3", 1, 64, "most_recent", reduce_over="stage")),
    ),
    # collections/llm/recipes/precision/mixed_precision.py: tensorwise, two layers at each end in
    # BF16.
    Expected(
        "nemo_nemotron_h.py",
        half(BF16, fp8=plugin_fp8("current", parameters=True, first_layers=2, last_layers=2)),
        {"optimizer.clip": 0.8},
        quiet=True,
    ),
    # There: current scaling by name, blockwise by fp8_recipe.
    Expected(
        "nemo_nano_v2.py",
        half(
            BF16,
            fp8=plugin_fp8(
                "blockwise", power_2_scales=True, parameters=True, first_layers=2, last_layers=2
            ),
        ),
        quiet=True,
    ),
    # collections/llm/recipes/mixtral_8x7b.py: run.Config(nl.MegatronMixedPrecision,
    # precision="bf16-mixed").
    Expected("nemo_mixtral_default.py", half(BF16), quiet=True),
    # collections/llm/recipes/qwen3.py: precision="16-mixed" chooses fp16_mixed().
    Expected(
        "nemo_qwen3_fp16.py",
        half(FP16, FP16, scaling=dynamic(2.0**32, 1.0, 1000, 2, None)),
        quiet=True,
    ),
    # MegatronMixedPrecision in order: precision, params, pipeline, autocast dtype, autocast,
    # grad_reduce_in_fp32.
    Expected(
        "nemo_trainer_positional.py",
        half(FP16, FP32, scaling=LossScaling("constant", 512.0)),
        quiet=True,
    ),
    Expected("nemo_fields_afterwards.py", refused=("cfg.fp8",), at=(17,)),
    Expected(
        "nemo_gpt_script.py",
        half(BF16),
        {"parallel.zero": True},
        notes=("bf16 = True", "grad_reduce_in_fp32"),  # which the plugin overwrites
    ),
    # examples/speechlm/conf: hydra's _target_ is the class; autocast_enabled of null is off.
    Expected(
        "nemo_speech.yaml", half(BF16), {"parallel.zero": True, "optimizer.clip": 0.7}, quiet=True
    ),
    # nemo_run's export of a recipe: _call_ of false is the thing itself; strategy.ddp is
    # overwritten by the plugin.
    Expected(
        "nemo_run_export.yaml",
        half(BF16, BF16, fp8=plugin_fp8("current", parameters=True, first_layers=1, last_layers=1)),
        {"parallel.zero": True, "optimizer.clip": 0.9},
        notes=(
            "grad_reduce_in_fp32",
        ),  # of DistributedDataParallelConfig, which the plugin overwrites
    ),
    # nemo_automodel/components/distributed/config.py FSDP2Config: mp_policy is FSDP2's.
    Expected(
        "nemo_automodel.yaml",
        half(BF16) | {"output": FP32, "cast_inputs": "all"},
        notes=("torch_dtype = float32",),
    ),
    # megatron_base_model.py build_model_parallel_config: without O2 autocast over FP32 weights,
    # stages send FP16; nlp_overrides.py GradScaler.update: every good step refills the hysteresis;
    # no floor.
    Expected(
        "nemo_gpt_16.yaml",
        autocast(
            FP16,
            pipeline=FP16,
            scaling=LossScaling("dynamic", 65536.0, NO_FLOOR, 2.0, 0.5, 800, 3, None, "good_step"),
        ),
        {"parallel.zero": False, "optimizer.clip": 1.0},
        quiet=True,
    ),
    # megatron_gpt_model.py setup_mcore_distributed_parallel: sums in FP32 only if grad_sync_dtype
    # is fp32; modules/common/megatron/transformer.py: delayed scaling, e4m3 before hybrid;
    # fp8_params are weights in FP8.
    Expected(
        "nemo_gpt_fp8.yaml",
        half(
            BF16,
            BF16,
            fp8=FP8Recipe(margin=2, history_length=128, reduce_over="stage", parameters=True),
        ),
        {"parallel.zero": True, "optimizer.clip": 1.0},
        quiet=True,
    ),
    # megatron_base_model.py setup_optimization: distributed_fused_adam with O2 stores the 16 bits
    # that BF16 lacks.
    Expected(
        "nemo_distributed_adam.yaml",
        half(BF16, remainders=True),
        {"parallel.zero": True, "optimizer.clip": 0.0},
        quiet=True,
    ),
    # There: optim_dtype is that of the model, so the optimizer has no masters beside the weights
    # and BF16 moments.
    Expected(
        "nemo_optimizer_dtype.yaml",
        half(BF16, reduce=BF16, masters=BF16, moments=BF16),
        {"parallel.zero": True, "optimizer.clip": 1.0},
        quiet=True,
    ),
    Expected(
        "nemo_gpt_32.yaml", half(FP32), {"parallel.zero": False, "optimizer.clip": 0.0}, quiet=True
    ),
    # Megatron-Bridge, MixedPrecisionConfig: fp8_recipe is tensorwise unless given; fp8_param is
    # fp8_param_gather.
    Expected(
        "nemo_bridge_config.py",
        half(BF16, BF16, fp8=plugin_fp8("current", parameters=True)),
        {"parallel.zero": True, "optimizer.clip": 1.0},
        quiet=True,
    ),
    # recipes/deepseek/h100/deepseek_v3.py sets these: moments of the precision-aware optimizer.
    Expected(
        "nemo_bridge_moments.py",
        half(BF16, BF16, moments=BF16),
        {"parallel.zero": True},
        quiet=True,
    ),
    # There, unlike in NeMo, bf16_with_mxfp8_mixed is E4M3.
    Expected("nemo_bridge_mxfp8.py", half(BF16, fp8=plugin_fp8("mx", "e4m3")), quiet=True),
    # There: hyphens are underscores; weights are not gathered in FP8; mixed_precision overwrites
    # ddp.
    Expected(
        "nemo_bridge_container.py",
        half(
            FP16,
            FP16,
            scaling=dynamic(2.0**32, 1.0, 1000, 2, None),
            fp8=plugin_fp8("blockwise", power_2_scales=True),
        ),
        {"parallel.zero": True, "optimizer.clip": 0.6},
    ),
    # What a run of Bridge writes beside its checkpoints: every field, most of them defaults; the
    # optimizer's dtypes count with use_precision_aware_optimizer only.
    Expected(
        "nemo_bridge_run_config.yaml",
        half(FP16, FP16, scaling=dynamic(2.0**16, 2.0, 400, 3, None)),
        {"parallel.zero": True, "optimizer.clip": 1.0},
        notes=(
            "grad_reduce_in_fp32",
        ),  # of DistributedDataParallelConfig, which mixed_precision overwrites
    ),
    Expected(
        "nemo_main_guard.py",
        half(BF16, fp8=plugin_fp8("current", parameters=True, first_layers=1, last_layers=2)),
        quiet=True,
    ),
    # megatron_gpt_model.py build_transformer_config raises: fp8 without a format.
    Expected("nemo_fp8_without_format.yaml", refused=("fp8_hybrid",)),
    Expected("nemo_bridge_nvfp4.py", refused=("bf16_with_nvfp4_mixed",), at=(4,)),
    # megatron_base_model.py configure_optimizers raises: FP16 has no O2. nlp/parts/nlp_overrides.py
    # NLPFSDPStrategy: a policy of PyTorch's in place of Megatron's optimizer.
    Expected("nemo_gpt_fsdp.yaml", refused=("fsdp = True",)),
    Expected("nemo_o2_fp16.yaml", refused=("megatron_amp_O2",)),
    Expected("nemo_precision_argument.py", refused=("precision",), at=(15, 16)),
    Expected("nemo_docs_two_trainers.py", refused=("fp16_mixed",), at=(10, 17)),
    Expected("nemo_either_plugin.py", refused=("plugin",), at=(7,)),
    Expected(
        "nemo_misspelt.py", refused=("fp8_amax_history_length", "fp8_amax_history_len"), at=(6,)
    ),
)
