"""The classes, functions, dicts and variables of five systems whose keys say a precision.

A name of a table of settings is that of a run file without "precision.", such as
"smp.mixed_precision" or "nemo". The arguments and their order are those of the systems' own source:
torch/distributed/fsdp/api.py, transformer_engine/pytorch/fp8.py,
neuronx_distributed/trainer/trainer.py, colossalai/booster, internlm/core/naive_amp.py,
nemo/lightning/pytorch/plugins/mixed_precision.py and megatron/bridge/training/mixed_precision.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megaprec.dialects import nemo, nxd, smp
from tools.interop.foreign.plain import PlainDict, Symbol

SMP_POLICY = "smp.mixed_precision"
SMP_POLICY2 = "smp.mp_policy"
SMP_SCALER = "smp.grad_scaler"
SMP_FP8 = "smp.fp8_autocast"
NXD = "nxd"
NXD_OPTIMIZER = "nxd.optimizer_config"
NXD_ENVIRONMENT = "nxd.environment"
NEMO = "nemo"
COLOSSALAI = "colossalai"
FP16 = "colossalai.fp16"
PLUGIN = "colossalai.plugin"
INTERNEVO = "internevo"

FSDP = ("torch", "fairscale")
TRANSFORMER_ENGINE = ("transformer_engine",)
NXD_PACKAGES = ("neuronx_distributed", "neuronx_distributed_training")
NEMO_PACKAGES = ("nemo", "megatron")
BRIDGE = "megatron.bridge"


@dataclass(frozen=True)
class Maker:
    """A class or function of a system.

    table: whose keys its arguments are; empty if it only holds tables. order: parameters by
    position. packages: modules that it is imported from. keys: argument -> key, where the names
    differ. unrelated: arguments that do not concern precision. adds: keys that the call implies.
    tables: arguments that are tables themselves. strict: any other argument is passed on as a key.
    completes: its keys complete those of another call for the same table.
    """

    table: str
    order: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    unrelated: frozenset[str] = frozenset()
    adds: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, str] = field(default_factory=dict)
    strict: bool = True
    completes: bool = False


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


TORCH_SCALER = _words("init_scale growth_factor backoff_factor growth_interval enabled")
SHARDED_SCALER = _words(
    "device init_scale backoff_factor growth_factor growth_interval enabled process_group"
)
FP8_AUTOCAST = _words("enabled calibrating fp8_recipe fp8_group _graph")
AUTOCAST = _words("enabled calibrating recipe amax_reduction_group _graph")
POLICY = _words(
    "param_dtype reduce_dtype buffer_dtype keep_low_precision_grads cast_forward_inputs "
    "cast_root_forward_inputs _module_classes_to_ignore"
)
POLICY2 = _words("param_dtype reduce_dtype output_dtype cast_forward_inputs")
FSDP_ORDER = _words(
    "module process_group sharding_strategy cpu_offload auto_wrap_policy backward_prefetch "
    "mixed_precision"
)
NXD_CONFIG = _words(
    "tensor_parallel_size pipeline_parallel_size expert_parallel_size context_parallel_size "
    "pipeline_config optimizer_config activation_checkpoint_config pad_model sequence_parallel "
    "model_init_config lora_config mixed_precision_config"
)
MEGATRON_PLUGIN = _words(
    "precision params_dtype pipeline_dtype autocast_dtype autocast_enabled grad_reduce_in_fp32 "
    "fp8 fp8_recipe first_last_layers_bf16 fp8_margin fp8_amax_history_len fp8_amax_compute_algo "
    "fp8_wgrad fp8_dot_product_attention fp8_multi_head_attention fp8_params fp8_param_gather fp4 "
    "fp4_recipe fp16_loss_scale fp16_initial_loss_scale fp16_min_loss_scale "
    "fp16_loss_scale_window fp16_hysteresis num_layers_at_start_in_bf16 "
    "num_layers_at_end_in_bf16 reuse_grad_buf_for_mxfp8_param_ag"
)
HYBRID_PLUGIN = _words(
    "tp_size pp_size sp_size precision zero_stage enable_all_optimization "
    "enable_fused_normalization enable_flash_attention enable_jit_fused "
    "enable_sequence_parallelism sequence_parallelism_mode parallel_output num_microbatches "
    "microbatch_size initial_scale min_scale growth_factor backoff_factor growth_interval "
    "hysteresis max_scale max_norm broadcast_buffers ddp_bucket_cap_mb find_unused_parameters "
    "check_reduction gradient_as_bucket_view static_graph zero_bucket_size_in_m cpu_offload "
    "communication_dtype overlap_communication custom_policy pp_style num_model_chunks "
    "scheduler_nodes num_layers_per_stage gradient_checkpoint_config enable_metadata_cache "
    "make_vocab_size_divisible_by dp_outside overlap_p2p overlap_allgather fp8_communication "
    "use_fp8 inner_ring_size"
)
MOE_PLUGIN = (*HYBRID_PLUGIN[:2], "ep_size", *HYBRID_PLUGIN[2:])
ZERO_PLUGIN = _words(
    "stage precision initial_scale min_scale growth_factor backoff_factor growth_interval "
    "hysteresis max_scale max_norm norm_type reduce_bucket_size_in_m communication_dtype "
    "overlap_communication overlap_allgather cpu_offload master_weights verbose cast_inputs "
    "fp8_communication use_fp8 extra_dp_size"
)
GEMINI_PLUGIN = _words(
    "chunk_config_dict chunk_init_device placement_policy enable_gradient_accumulation "
    "max_prefetch shard_param_frac offload_optim_frac offload_param_frac "
    "warmup_non_model_data_ratio steady_cuda_cap_ratio precision master_weights pin_memory "
    "force_outputs_fp32 strict_ddp_mode search_range_m hidden_dim min_chunk_size_m memstats "
    "gpu_margin_mem_ratio initial_scale min_scale growth_factor backoff_factor growth_interval "
    "hysteresis max_scale max_norm norm_type tp_size extra_dp_size enable_all_optimization "
    "enable_fused_normalization enable_flash_attention enable_sequence_parallelism "
    "enable_jit_fused enable_async_reduce use_fp8 verbose fp8_communication"
)
DDP_PLUGIN = _words(
    "broadcast_buffers bucket_cap_mb find_unused_parameters check_reduction "
    "gradient_as_bucket_view static_graph fp8_communication"
)
PRECISION_OF_PLUGINS = frozenset(
    _words(
        "precision initial_scale min_scale growth_factor backoff_factor growth_interval "
        "hysteresis max_scale max_norm norm_type zero_stage stage communication_dtype "
        "master_weights cast_inputs force_outputs_fp32 use_fp8 fp8_communication tp_size pp_size"
    )
)
BRIDGE_KEYS = {
    "fp8_param": "fp8_params",
    "loss_scale": "fp16_loss_scale",
    "initial_loss_scale": "fp16_initial_loss_scale",
    "min_loss_scale": "fp16_min_loss_scale",
    "loss_scale_window": "fp16_loss_scale_window",
    "hysteresis": "fp16_hysteresis",
}
# Fields of NeMo's plugin that say the dtype; a trainer has others of these names
WHOLE_FIELDS = ("precision", "recipe", "v1")
# Arguments of Megatron's OptimizerConfig that bear on precision and are read
OPTIMIZER_KEYS = _words(
    "clip_grad use_distributed_optimizer use_precision_aware_optimizer main_grads_dtype "
    "main_params_dtype exp_avg_dtype exp_avg_sq_dtype"
)


def _plugin(kind: str, order: tuple[str, ...]) -> Maker:
    # the layout besides tp_size and pp_size, and schedules, are the run file's
    unrelated = frozenset(order) - PRECISION_OF_PLUGINS | {"moe_dp_outside"}
    return Maker(PLUGIN, order, ("colossalai",), unrelated=unrelated, adds={"kind": kind})


def _scaler(order: tuple[str, ...], packages: tuple[str, ...]) -> Maker:
    return Maker(
        SMP_SCALER, order, packages, unrelated=frozenset({"device", "process_group", "_graph"})
    )


def _holder(order: tuple[str, ...], packages: tuple[str, ...], tables: Mapping[str, str]) -> Maker:
    return Maker("", order, packages, tables=tables, strict=False)


def _with_fields(*keys: str) -> Maker:
    """Return a maker of which only some arguments are keys of NeMo's plugin."""
    same = {key: key for key in keys}
    return Maker(NEMO, packages=NEMO_PACKAGES, keys=same, strict=False, completes=True)


_WRAPPER = _holder(FSDP_ORDER, (*FSDP, "colossalai"), {"mixed_precision": SMP_POLICY})
_NXD_CONFIG = _holder(
    NXD_CONFIG, NXD_PACKAGES, {"mixed_precision_config": NXD, "optimizer_config": NXD_OPTIMIZER}
)
# NeMo's documentation hands fields of the plugin to the trainer
_TRAINER = Maker(
    NEMO,
    packages=("nemo", "nl", "lightning", "pytorch_lightning"),
    keys={key: key for key in nemo.MegatronMixedPrecision.model_fields if key not in WHOLE_FIELDS},
    tables={"plugins": NEMO},
    strict=False,
    completes=True,
)
_GRAPH = frozenset({"_graph"})

# Classes and functions by the last part of their name, the first that fits its import
MAKERS: Mapping[str, tuple[Maker, ...]] = {
    "MixedPrecision": (Maker(SMP_POLICY, POLICY, FSDP),),
    "MixedPrecisionPolicy": (Maker(SMP_POLICY2, POLICY2, FSDP),),
    "ShardedGradScaler": (_scaler(SHARDED_SCALER, FSDP),),
    "GradScaler": (
        _scaler(TORCH_SCALER, ("torch.cuda",)),
        _scaler(("device", *TORCH_SCALER), FSDP),
    ),
    "fp8_autocast": (Maker(SMP_FP8, FP8_AUTOCAST, TRANSFORMER_ENGINE, unrelated=_GRAPH),),
    "autocast": (
        Maker(
            SMP_FP8,
            AUTOCAST,
            TRANSFORMER_ENGINE,
            keys={"recipe": "fp8_recipe", "amax_reduction_group": "fp8_group"},
            unrelated=_GRAPH,
        ),
    ),
    "FullyShardedDataParallel": (_WRAPPER,),
    "FSDP": (_WRAPPER,),
    "TorchFSDPPlugin": (_WRAPPER,),
    "fully_shard": (_holder(("module",), FSDP, {"mp_policy": SMP_POLICY2}),),
    "neuronx_distributed_config": (_NXD_CONFIG,),
    "training_config": (_NXD_CONFIG,),
    "HybridParallelPlugin": (_plugin("HybridParallelPlugin", HYBRID_PLUGIN),),
    "MoeHybridParallelPlugin": (_plugin("MoeHybridParallelPlugin", MOE_PLUGIN),),
    "LowLevelZeroPlugin": (_plugin("LowLevelZeroPlugin", ZERO_PLUGIN),),
    "GeminiPlugin": (_plugin("GeminiPlugin", GEMINI_PLUGIN),),
    "TorchDDPPlugin": (_plugin("TorchDDPPlugin", DDP_PLUGIN),),
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
            completes=True,
        ),
    ),
    "NaiveAMPModel": (
        Maker(
            INTERNEVO,
            _words("model output_to_fp32 parallel_mode sync_buffer dtype"),
            ("internlm", "internevo", "megaprec"),
            # models here have no buffers that ranks could differ in
            unrelated=frozenset({"model", "parallel_mode", "sync_buffer"}),
        ),
    ),
    "MegatronMixedPrecision": (Maker(NEMO, MEGATRON_PLUGIN, NEMO_PACKAGES),),
    "MixedPrecisionConfig": (
        Maker(NEMO, (), ("megatron",), BRIDGE_KEYS, adds={"library": "bridge"}),
    ),
    **{name: (Maker(NEMO, (), NEMO_PACKAGES, adds={"recipe": name}),) for name in nemo.RECIPES},
    "get_mixed_precision_config": (
        Maker(NEMO, ("recipe",), ("megatron",), adds={"library": "bridge"}),
    ),
    "Trainer": (_TRAINER,),
    "ConfigContainer": (_holder((), ("megatron",), {"mixed_precision": NEMO}),),
    "DistributedDataParallelConfig": (_with_fields("use_distributed_optimizer"),),
    "OptimizerConfig": (_with_fields(*OPTIMIZER_KEYS),),
    "distributed_fused_adam_with_cosine_annealing": (_with_fields(*OPTIMIZER_KEYS),),
}

# Dicts by the name that their system gives them
TABLES: Mapping[str, str] = {
    "mixed_precision_config": NXD,
    "optimizer_config": NXD_OPTIMIZER,
    "fp16": FP16,
    "model": INTERNEVO,
    "grad_scaler": "internevo.grad_scaler",
    "zero": "colossalai.zero",
    "hybrid_zero_optimizer": "internevo.hybrid_zero_optimizer",
    "parallel": "internevo.parallel",
    "mixed_precision": SMP_POLICY,
    "mp_policy": SMP_POLICY2,
    "fp8_autocast": SMP_FP8,
}
# Of dicts whose names mean other things elsewhere, keys of which one must be there
MARKS: Mapping[str, frozenset[str]] = {
    "model": frozenset({"dtype", "num_attention_heads", "embed_grad_scale"}),
    "parallel": frozenset({"zero1"}),
    "mixed_precision": frozenset(smp.MixedPrecision.model_fields),
    "optimizer_config": frozenset(nxd.OptimizerConfig.model_fields),
    # that of Colossal-AI before its plugins, which its dialect refuses
    "zero": frozenset({"model_config", "optimizer_config", "level", "tensor_placement_policy"}),
}
# Variables that belong to a system's configuration, where they stand beside a dict of it
LOOSE: Mapping[str, tuple[str, ...]] = {
    COLOSSALAI: ("clip_grad_norm",),
    INTERNEVO: ("use_fp32_norm", "model_type", "output_tf32"),
}
# What of a system says the dtype; its other tables and classes alone do not say the precision
WITH_DTYPE: Mapping[str, str] = {
    INTERNEVO: "InternEvo's `model = dict(...)`",
    NEMO: "NeMo's precision plugin or recipe",
}
NXD_MASTERS = frozenset({"use_master_weights", "use_fp32_grad_acc", "use_master_weights_in_ckpt"})
ENVIRONMENT = _words("NEURON_RT_STOCHASTIC_ROUNDING_EN XLA_USE_BF16 XLA_DOWNCAST_BF16")


def maker_of(function: Symbol) -> tuple[Maker | None, str]:
    """Return the maker that a function is, and the package that a function of this name is imported
    from if it is another.
    """
    makers = MAKERS.get(function.last, ())
    if not makers:
        return None, ""
    if not function.imported:
        return makers[0], ""
    for maker in makers:
        if function.name.startswith(maker.packages):
            return maker, ""
    return None, function.name.rpartition(".")[0]


def table_of(name: str, content: PlainDict, beside: Mapping[str, Any]) -> str:
    """Return the table of settings that a dict of this name is; empty if it is none.

    beside: the dicts and values that stand beside it, by name.
    """
    keys = set(content.entries)
    if name not in TABLES or (name == "model" and _is_no_internevo(content)):
        return ""
    if name == "grad_scaler" and {"mixed_precision", "mp_policy"} & set(beside):
        return SMP_SCALER
    is_nxds = name == "optimizer_config" and "mixed_precision_config" in beside
    is_marked = name not in MARKS or bool(keys & MARKS[name])
    return TABLES[name] if is_marked or is_nxds else ""


def _is_no_internevo(model: PlainDict) -> bool:
    """Return True for a `model` of Colossal-AI before its plugins, which has a type, and for one
    with a dtype alone whose text is not InternEvo's "torch.bfloat16"."""
    dtype = model.get("dtype")
    other_marks = MARKS["model"] - {"dtype"}
    has_dtype_alone = other_marks.isdisjoint(model.entries)
    is_other_text = isinstance(dtype, str) and not dtype.startswith("torch.")
    return "type" in model.entries or (has_dtype_alone and is_other_text)
