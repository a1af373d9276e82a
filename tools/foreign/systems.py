"""The classes, functions, dicts and variables of the five systems that set precision.

Positional orders are those of the systems' sources: torch/distributed/fsdp,
transformer_engine/common/recipe and pytorch/quantization.py,
neuronx_distributed/trainer/trainer.py, colossalai/booster, internlm/core/naive_amp.py,
nemo/lightning/pytorch/plugins/mixed_precision.py and megatron/bridge/training/mixed_precision.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megaprec.dialects import nemo, nxd, smp
from tools.foreign.values import External

Spot = tuple[str, str]
"""A system and the dotted table of its dialect; "" is the whole."""


@dataclass(frozen=True)
class Maker:
    """A class or function of a system.

    spot: the table whose keys its arguments are; None if it only holds tables. order: parameters by
    position. packages: modules that it is imported from. keys: argument -> key, where the names
    differ. unrelated: arguments that do not concern precision. remarks: arguments that are
    understood but not used, and why. adds: keys that the call implies.
    tables: arguments that are tables themselves. strict: any other argument is passed on as a key.
    single: its keys complete those of another call for the same table.
    """

    spot: Spot | None
    order: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    unrelated: frozenset[str] = frozenset()
    remarks: Mapping[str, str] = field(default_factory=dict)
    adds: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, Spot] = field(default_factory=dict)
    strict: bool = True
    single: bool = False


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SMP_POLICY = ("smp", "mixed_precision")
SMP_POLICY2 = ("smp", "mp_policy")
SMP_SCALER = ("smp", "grad_scaler")
SMP_FP8 = ("smp", "fp8_autocast")
NXD = ("nxd", "")
NXD_OPTIMIZER = ("nxd", "optimizer_config")
NEMO = ("nemo", "")
COLOSSALAI = ("colossalai", "")
FP16 = ("colossalai", "fp16")
PLUGIN = ("colossalai", "plugin")
INTERNEVO = ("internevo", "")
FSDP = ("torch", "fairscale")
TE = ("transformer_engine",)
NXD_PACKAGES = ("neuronx_distributed", "neuronx_distributed_training")
NEMO_PACKAGES = ("nemo", "megatron")
BRIDGE = "megatron.bridge"

SCALER = _words("init_scale backoff_factor growth_factor growth_interval enabled")
TORCH_SCALER = _words("init_scale growth_factor backoff_factor growth_interval enabled")
FP8_SETTINGS = _words("enabled calibrating fp8_recipe fp8_group _graph")
NEMO_ORDER = _words(
    "precision params_dtype pipeline_dtype autocast_dtype autocast_enabled "
    "grad_reduce_in_fp32 fp8 fp8_recipe "
    "first_last_layers_bf16 fp8_margin fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad "
    "fp8_dot_product_attention "
    "fp8_multi_head_attention fp8_params fp8_param_gather fp4 fp4_recipe fp16_loss_scale "
    "fp16_initial_loss_scale "
    "fp16_min_loss_scale fp16_loss_scale_window fp16_hysteresis num_layers_at_start_in_bf16 "
    "num_layers_at_end_in_bf16 "
    "reuse_grad_buf_for_mxfp8_param_ag"
)
HYBRID_ORDER = _words(
    "tp_size pp_size sp_size precision zero_stage enable_all_optimization "
    "enable_fused_normalization "
    "enable_flash_attention enable_jit_fused enable_sequence_parallelism "
    "sequence_parallelism_mode parallel_output "
    "num_microbatches microbatch_size initial_scale min_scale growth_factor backoff_factor "
    "growth_interval hysteresis "
    "max_scale max_norm broadcast_buffers ddp_bucket_cap_mb find_unused_parameters check_reduction "
    "gradient_as_bucket_view static_graph zero_bucket_size_in_m cpu_offload "
    "communication_dtype overlap_communication "
    "custom_policy pp_style num_model_chunks scheduler_nodes num_layers_per_stage "
    "gradient_checkpoint_config "
    "enable_metadata_cache make_vocab_size_divisible_by dp_outside overlap_p2p "
    "overlap_allgather fp8_communication "
    "use_fp8 inner_ring_size"
)
MOE_ORDER = (*HYBRID_ORDER[:2], "ep_size", *HYBRID_ORDER[2:])
ZERO_ORDER = _words(
    "stage precision initial_scale min_scale growth_factor backoff_factor growth_interval "
    "hysteresis max_scale "
    "max_norm norm_type reduce_bucket_size_in_m communication_dtype overlap_communication "
    "overlap_allgather "
    "cpu_offload master_weights verbose cast_inputs fp8_communication use_fp8 extra_dp_size"
)
GEMINI_ORDER = _words(
    "chunk_config_dict chunk_init_device placement_policy enable_gradient_accumulation "
    "max_prefetch shard_param_frac "
    "offload_optim_frac offload_param_frac warmup_non_model_data_ratio steady_cuda_cap_ratio "
    "precision master_weights "
    "pin_memory force_outputs_fp32 strict_ddp_mode search_range_m hidden_dim "
    "min_chunk_size_m memstats "
    "gpu_margin_mem_ratio initial_scale min_scale growth_factor backoff_factor "
    "growth_interval hysteresis max_scale "
    "max_norm norm_type tp_size extra_dp_size enable_all_optimization enable_fused_normalization "
    "enable_flash_attention enable_sequence_parallelism enable_jit_fused enable_async_reduce "
    "use_fp8 verbose "
    "fp8_communication"
)
PRECISION_OF_PLUGINS = frozenset(
    _words(
        "precision initial_scale min_scale growth_factor backoff_factor growth_interval "
        "hysteresis max_scale max_norm "
        "norm_type zero_stage stage communication_dtype master_weights cast_inputs "
        "force_outputs_fp32 use_fp8 "
        "fp8_communication tp_size pp_size"
    )
)


LAYOUT_OF_PLUGINS = _words(
    "sp_size ep_size enable_sequence_parallelism sequence_parallelism_mode pp_style "
    "num_model_chunks num_microbatches "
    "microbatch_size num_layers_per_stage"
)


def _plugin(kind: str, order: tuple[str, ...]) -> Maker:
    remarks = dict.fromkeys(
        LAYOUT_OF_PLUGINS,
        "the layout besides tp_size and pp_size, and schedules, are the run file's",
    )
    unrelated = frozenset(order) - PRECISION_OF_PLUGINS - set(remarks) | {"moe_dp_outside"}
    return Maker(
        PLUGIN, order, ("colossalai",), unrelated=unrelated, remarks=remarks, adds={"kind": kind}
    )


FSDP_ORDER = _words(
    "module process_group sharding_strategy cpu_offload auto_wrap_policy backward_prefetch "
    "mixed_precision"
)
_IGNORED_CLASSES = {"_module_classes_to_ignore": "norms compute in FP32 in any case"}
_POLICY = Maker(
    SMP_POLICY,
    _words(
        "param_dtype reduce_dtype buffer_dtype keep_low_precision_grads cast_forward_inputs "
        "cast_root_forward_inputs "
        "_module_classes_to_ignore"
    ),
    FSDP,
    remarks=_IGNORED_CLASSES,
)
_SCALER_AFTER_DEVICE = frozenset({"device", "process_group"})
BRIDGE_KEYS = {
    "fp8_param": "fp8_params",
    "loss_scale": "fp16_loss_scale",
    "initial_loss_scale": "fp16_initial_loss_scale",
    "min_loss_scale": "fp16_min_loss_scale",
    "loss_scale_window": "fp16_loss_scale_window",
    "hysteresis": "fp16_hysteresis",
}
OPTIMIZER_KEYS = _words(
    "clip_grad use_distributed_optimizer use_precision_aware_optimizer main_grads_dtype "
    "main_params_dtype "
    "exp_avg_dtype exp_avg_sq_dtype"
)
"""Arguments of Megatron's OptimizerConfig that bear on precision and are read."""

MAKERS: Mapping[str, tuple[Maker, ...]] = {
    "MixedPrecision": (_POLICY,),
    "MixedPrecisionPolicy": (
        Maker(
            SMP_POLICY2, _words("param_dtype reduce_dtype output_dtype cast_forward_inputs"), FSDP
        ),
    ),
    "ShardedGradScaler": (
        Maker(
            SMP_SCALER, ("device", *SCALER, "process_group"), FSDP, unrelated=_SCALER_AFTER_DEVICE
        ),
    ),
    "GradScaler": (
        Maker(SMP_SCALER, TORCH_SCALER, ("torch.cuda",)),
        Maker(SMP_SCALER, ("device", *TORCH_SCALER), FSDP, unrelated=_SCALER_AFTER_DEVICE),
    ),
    "fp8_autocast": (Maker(SMP_FP8, FP8_SETTINGS, TE, unrelated=frozenset({"_graph"})),),
    "autocast": (
        Maker(
            SMP_FP8,
            ("enabled", "calibrating", "recipe", "amax_reduction_group", "_graph"),
            TE,
            {"recipe": "fp8_recipe", "amax_reduction_group": "fp8_group"},
            frozenset({"_graph"}),
        ),
    ),
    **dict.fromkeys(
        ("FullyShardedDataParallel", "FSDP", "TorchFSDPPlugin"),
        (
            Maker(
                None,
                FSDP_ORDER,
                (*FSDP, "colossalai"),
                tables={"mixed_precision": SMP_POLICY},
                strict=False,
            ),
        ),
    ),
    "fully_shard": (
        Maker(None, ("module",), FSDP, tables={"mp_policy": SMP_POLICY2}, strict=False),
    ),
    **dict.fromkeys(
        ("neuronx_distributed_config", "training_config"),
        (
            Maker(
                None,
                _words(
                    "tensor_parallel_size pipeline_parallel_size expert_parallel_size "
                    "context_parallel_size "
                    "pipeline_config optimizer_config activation_checkpoint_config pad_model "
                    "sequence_parallel "
                    "model_init_config lora_config mixed_precision_config"
                ),
                NXD_PACKAGES,
                tables={"mixed_precision_config": NXD, "optimizer_config": NXD_OPTIMIZER},
                strict=False,
            ),
        ),
    ),
    "HybridParallelPlugin": (_plugin("HybridParallelPlugin", HYBRID_ORDER),),
    "MoeHybridParallelPlugin": (_plugin("MoeHybridParallelPlugin", MOE_ORDER),),
    "LowLevelZeroPlugin": (_plugin("LowLevelZeroPlugin", ZERO_ORDER),),
    "GeminiPlugin": (_plugin("GeminiPlugin", GEMINI_ORDER),),
    "TorchDDPPlugin": (
        _plugin(
            "TorchDDPPlugin",
            _words(
                "broadcast_buffers bucket_cap_mb find_unused_parameters check_reduction "
                "gradient_as_bucket_view "
                "static_graph fp8_communication"
            ),
        ),
    ),
    "FP16TorchMixedPrecision": (
        Maker(FP16, TORCH_SCALER[:4], ("colossalai",), adds={"mode": "TORCH"}),
    ),
    "Booster": (
        Maker(
            COLOSSALAI,
            ("device", "mixed_precision", "plugin"),
            ("colossalai",),
            unrelated=frozenset({"device"}),
            tables={"plugin": PLUGIN, "mixed_precision": FP16},
            single=True,
        ),
    ),
    "NaiveAMPModel": (
        Maker(
            INTERNEVO,
            _words("model output_to_fp32 parallel_mode sync_buffer dtype"),
            ("internlm", "internevo", "megaprec"),
            unrelated=frozenset({"model"}),
            remarks={
                "parallel_mode": "the trainer's models have no buffers that ranks could differ in",
                "sync_buffer": "the trainer's models have no buffers that ranks could differ in",
            },
        ),
    ),
    "MegatronMixedPrecision": (Maker(NEMO, NEMO_ORDER, NEMO_PACKAGES),),
    "MixedPrecisionConfig": (
        Maker(NEMO, (), ("megatron",), BRIDGE_KEYS, adds={"library": "bridge"}),
    ),
    **{name: (Maker(NEMO, (), NEMO_PACKAGES, adds={"recipe": name}),) for name in nemo.RECIPES},
    "get_mixed_precision_config": (
        Maker(NEMO, ("recipe",), ("megatron",), adds={"library": "bridge"}),
    ),
    "Trainer": (
        Maker(
            None,
            (),
            ("nemo", "nl", "lightning", "pytorch_lightning"),
            tables={"plugins": NEMO},
            strict=False,
        ),
    ),
    "ConfigContainer": (
        Maker(None, (), ("megatron",), tables={"mixed_precision": NEMO}, strict=False),
    ),
    "DistributedDataParallelConfig": (
        Maker(
            NEMO,
            (),
            NEMO_PACKAGES,
            {OPTIMIZER_KEYS[1]: OPTIMIZER_KEYS[1]},
            strict=False,
            single=True,
        ),
    ),
    **dict.fromkeys(
        ("OptimizerConfig", "distributed_fused_adam_with_cosine_annealing"),
        (
            Maker(
                NEMO,
                (),
                NEMO_PACKAGES,
                {key: key for key in OPTIMIZER_KEYS},
                strict=False,
                single=True,
            ),
        ),
    ),
}
"""Classes and functions by the last part of their name, the first that fits its import."""

VALUES: Mapping[str, tuple[str, ...]] = {
    "DelayedScaling": _words(
        "margin fp8_format amax_history_len amax_compute_algo scaling_factor_compute_algo "
        "reduce_amax fp8_dpa fp8_mha"
    ),
    "Float8CurrentScaling": _words("use_power_2_scales fp8_format"),
    "Float8BlockScaling": _words("use_f32_scales fp8_format"),
    "MXFP8BlockScaling": _words("margin fp8_format fp8_dpa fp8_mha"),
    "NVFP4BlockScaling": (),
    "CustomRecipe": (),
}
"""Recipes of Transformer Engine, values of `fp8_recipe`, with their parameters by position."""

TABLES: Mapping[str, Spot] = {
    "mixed_precision_config": NXD,
    "optimizer_config": NXD_OPTIMIZER,
    "fp16": FP16,
    "model": INTERNEVO,
    "grad_scaler": ("internevo", "grad_scaler"),
    "hybrid_zero_optimizer": ("internevo", "hybrid_zero_optimizer"),
    "parallel": ("internevo", "parallel"),
    "mixed_precision": SMP_POLICY,
    "mp_policy": SMP_POLICY2,
    "fp8_autocast": SMP_FP8,
}
"""Dicts by the name that their system gives them."""
MARKS: Mapping[str, frozenset[str]] = {
    "model": frozenset({"dtype", "num_attention_heads", "embed_grad_scale"}),
    "parallel": frozenset({"zero1"}),
    "mixed_precision": frozenset(smp.MixedPrecision.model_fields),
    "optimizer_config": frozenset(nxd.OptimizerConfig.model_fields),
}
"""Of dicts whose names mean other things elsewhere, keys of which one must be there."""
BESIDE: Mapping[str, str] = {"optimizer_config": "mixed_precision_config"}
"""What may stand beside such a dict instead."""
LEGACY = frozenset({"type"})
"""Keys of a `model` that make it another system's."""
LOOSE: Mapping[str, Mapping[str, str]] = {
    "colossalai": {"clip_grad_norm": "clip_grad_norm"},
    "internevo": {
        "use_fp32_norm": "use_fp32_norm",
        "model_type": "model_type",
        "output_tf32": "output_tf32",
    },
}
"""Variables at the top of a file that belong to a system's configuration, where the file has one: name -> key."""
WITH_DTYPE: Mapping[Spot, str] = {
    INTERNEVO: "InternEvo's `model = dict(...)`",
    NEMO: "NeMo's precision plugin or recipe",
}
"""What of a system says the dtype; its other tables and classes alone do not say what the precision is."""
ENVIRONMENT = _words("NEURON_RT_STOCHASTIC_ROUNDING_EN XLA_USE_BF16 XLA_DOWNCAST_BF16")
WORLD_GROUPS = ("world_process_group", "group.WORLD", "GroupMember.WORLD")
"""Endings of names that mean the world's process group, under any alias."""


def maker_of(function: External) -> tuple[Maker | None, str]:
    """Return the maker that a function is, and the package that a function of this name is imported
    from if it is another.
    """
    found = MAKERS.get(function.last, ())
    if not function.imported:
        return (found[0] if found else None), ""
    fitting = next((m for m in found if function.name.startswith(m.packages)), None)
    return fitting, "" if fitting or not found else function.name.rpartition(".")[0]
