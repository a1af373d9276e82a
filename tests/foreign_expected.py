"""Files as users of five systems write them, in foreign_files/, each with the plan that it comes to there.

Each entry was written from the system's own source, which the comment before it names, not from what this project
makes of the file. Fields of the plan that a file and its system's defaults leave open are not in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megaprec.fp8.recipe import FP8Recipe
from megaprec.plan import LossScaling

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NORMS = ("*norm.weight", "*norm.bias")
NO_FLOOR = 2.0**-126


@dataclass(frozen=True)
class Expected:
    """file: in foreign_files/. plan: fields of PrecisionPlan. settings: run-file key -> value.
    notes: what must stand in some note, one each; quiet: there is none. A file that must be refused has
    refused: what must stand in the message; at: lines of the file, one of which it must name, any if empty.
    """

    file: str
    plan: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    quiet: bool = False
    refused: tuple[str, ...] = ()
    at: tuple[int, ...] = ()


def half(dtype: torch.dtype, sums: torch.dtype = FP32, **others: Any) -> dict[str, Any]:
    """Weights, products and what stages send in `dtype`, gradients in `sums`, the optimizer in FP32, no loss scale."""
    held = dict.fromkeys(("compute", "residual", "pipeline", "parameters"), dtype)
    optimizer = {"masters": FP32, "moments": FP32, "remainders": False, "rounding": "nearest"}
    kept = {"keep_fp32": (), "tf32": False, "scaling": LossScaling(), "fp8": None}
    return held | {"gradients": sums, "reduce": sums} | optimizer | kept | others


def autocast(dtype: torch.dtype, **others: Any) -> dict[str, Any]:
    """FP32 weights, gradients and optimizer; products in `dtype`."""
    held = dict.fromkeys(("parameters", "gradients", "reduce", "masters", "moments"), FP32)
    return {"compute": dtype, "rounding": "nearest", "fp8": None, "scaling": LossScaling()} | held | others


def neuron(masters: torch.dtype, gradients: torch.dtype, **others: Any) -> dict[str, Any]:
    """NxD: BF16 weights, with these masters and gradient sums."""
    saved = {"masters": masters, "moments": masters, "masters_in_checkpoint": False, "sensitive": FP32}
    return half(BF16, gradients) | saved | others


def fsdp(dtype: torch.dtype, reduce: torch.dtype, buffers: torch.dtype, **others: Any) -> dict[str, Any]:
    """FSDP1: FP32 weights are cast to `dtype` when they are gathered; only the root's inputs are cast."""
    return half(dtype) | {"reduce": reduce, "buffers": buffers, "output": dtype, "cast_inputs": "root"} | others


def dynamic(initial: float, minimum: float, interval: int, hysteresis: int, maximum: float | None) -> LossScaling:
    """A loss scale that doubles and halves."""
    return LossScaling("dynamic", initial, minimum, 2.0, 0.5, interval, hysteresis, maximum)


TORCH_SCALE = dynamic(2.0**16, NO_FLOOR, 2000, 1, None)  # torch/amp/grad_scaler.py: no floor, no cap, no hysteresis
INTERN_SCALE = dynamic(2.0**16, 1.0, 1000, 2, 2.0**24)

TABLE: tuple[Expected, ...] = (
    # NxD, neuronx_distributed/trainer/trainer.py neuronx_distributed_config: keys as the documentation has them.
    Expected(
        "nxd_standard.py",
        neuron(FP32, FP32),
        {"parallel.zero": True, "optimizer.clip": 1.0},
        quiet=True,
    ),
    # There: use_master_weights is not given, so it is zero_one_enabled. Clips at max_grad_norm, as documented.
    Expected(
        "nxd_call.py",
        neuron(FP32, FP32, masters_in_checkpoint=True),
        {"parallel.zero": True, "optimizer.clip": 0.5},
        quiet=True,
    ),
    # neuronx_distributed_training/lightning_modules/model/base.py _initialize_nxd_config: "mixed_precision" has
    # masters and FP32 sums; docs/general/config_overview.rst: the keys after `type` count if it is "manual" only.
    Expected("nxd_nxdt_llama3.yaml", neuron(FP32, FP32), {"parallel.zero": True, "optimizer.clip": 1.0}),
    # SMP, torch/distributed/fsdp/api.py MixedPrecision. Gradients are summed in FP32 here: docs/migrating.md.
    Expected("smp_fsdp.py", fsdp(BF16, BF16, FP32), quiet=True),
    # transformer_engine/pytorch/quantization.py fp8_autocast: `enabled` is the first argument; common/recipe.
    Expected("smp_fp8.py", fsdp(BF16, FP32, FP32, fp8=FP8Recipe(history_length=32)), quiet=True),
    Expected("smp_conditional_dtype.py", refused=("dtype",), at=(7, 9)),
    # Colossal-AI, legacy/amp/naive_amp/__init__.py and amp/naive_amp/grad_scaler/dynamic_grad_scaler.py: half weights,
    # FP32 copies, neither floor nor cap; legacy/initialize.py: clip_grad_norm at the top is the engine's.
    Expected(
        "colossalai_vit_naive.py",
        half(FP16, FP16, output=FP32, scaling=dynamic(2.0**14, NO_FLOOR, 1000, 1, None)),
        {"optimizer.clip": 1.0},
        quiet=True,
    ),
    # booster/plugin/hybrid_parallel_plugin.py: gradients stay in the dtype of the weights; no scale for bf16.
    Expected(
        "colossalai_hybrid.py",
        half(BF16, BF16, cast_inputs="root"),
        {"parallel.zero": True, "optimizer.clip": 1.0},
        quiet=True,
    ),
    # apex/amp/frontend.py Properties: "True" is true, a loss_scale that is text is a number; O2 keeps norms in FP32.
    Expected(
        "colossalai_apex_o2.py",
        half(FP16, FP32, reduce=FP16, output=FP32, keep_fp32=NORMS, scaling=LossScaling("constant", 128.0)),
        {"optimizer.clip": 0.5},
        quiet=True,
    ),
    # InternEvo, solver/optimizer/hybrid_zero_optim.py: the scale is there for BF16 too; model/modules/mlp.py: the
    # width is rounded up to 256.
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
        half(BF16, BF16, output=FP32, keep_fp32=NORMS, scaling=dynamic(2.0**14, 1.0, 500, 3, 2.0**20)),
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
    # NeMo, collections/llm/recipes/llama3_8b.py trainer: plugins=bf16_mixed(), of which one field is changed;
    # lightning/pytorch/plugins/mixed_precision.py update_config_with_dtype_overrides: the plugin's field counts.
    Expected("nemo_llama3_recipe.py", half(BF16, BF16), {"optimizer.clip": 0.5}, quiet=True),
    # collections/nlp/models/language_modeling/megatron_base_model.py configure_optimizers: O2 of bf16 has FP32 main
    # parameters and fp32_grad_accum; fp8 is off, whatever the keys after it say, which every template has.
    Expected(
        "nemo_gpt_config.yaml",
        half(BF16),
        {"parallel.zero": False, "optimizer.clip": 0.5},
        quiet=True,
    ),
    # Megatron-Bridge, training/mixed_precision.py: the name's fields over MixedPrecisionConfig's.
    Expected(
        "nemo_bridge_delayed.py",
        half(BF16, fp8=FP8Recipe(reduce_over="stage", parameters=True)),
        {"optimizer.clip": 0.25},
        quiet=True,
    ),
)
