"""Megatron's arguments as a checkpoint holds them: those that a model is read from, those with few
permitted values, and those that do not matter.

They follow from the table that command lines are read by (`tools.interop.arguments.megatron`). What
else megatron-core's `TransformerConfig` and `GPTModel` have stands here; `ALIASES` are fields that
only have another name. A value that `ALLOWED_VALUES` does not list is refused. An argument that no
table has is named in a note, unless it is off.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megaprec.errors import Problem, UserError
from tools.interop.arguments.megatron import (
    ANOTHER_MODEL,
    READ,
    REFUSED,
    UNUSED,
    UNUSED_SUBJECTS,
)

Args = Mapping[str, Any]
ALIASES = {
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "rope_scaling": "use_rope_scaling",
    "max_sequence_length": "max_position_embeddings",
    "yarn_rotary_scaling_factor": "rotary_scaling_factor",
    "yarn_mscale": "mscale",
    "yarn_mscale_all_dim": "mscale_all_dim",
}
# a list of one value stands for the value
LISTS = (
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
)
OFF = (None, False, 0, 0.0)
AS_IT_IS = (None, False, 0)  # of arguments that change how the same weights are stored
_OF_MODEL = [row for row in READ.values() if row.keys[0].startswith("model.")]
# Arguments that make it another model: the values that leave it as it is.
ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    **{
        row.kept: (*(word for word in row.choices if word not in row.foreign), None)
        for row in _OF_MODEL
        if row.choices
    },
    # without a word for these two nobody knows what the model is
    "position_embedding_type": ("learned_absolute", "rope", "yarn", "none"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "activation_func": ("gelu", "silu", "quick_gelu", "squared_relu", None),
    "add_position_embedding": (True, False, None),
    "mla_down_proj_fusion": AS_IT_IS,
    "moe_mlp_glu_interleave_size": AS_IT_IS,
    "moe_shared_expert_glu_interleave_size": AS_IT_IS,
    **dict.fromkeys(ANOTHER_MODEL, OFF),
    "enable_gpt_oss": OFF,
    "moe_router_topk_limited_devices": OFF,
    "moe_token_dropping": OFF,
    "heterogeneous_block_specs": OFF,
    # its logits are multiplied
    "use_mup": AS_IT_IS,
}
# of [model] on a command line; no weight of a checkpoint depends on them
_NO_WEIGHTS = {
    "embedding_init_method_std",
    "moe_grouped_gemm",
    "mup_attn_scale_power",
    "mup_base_head_dim",
    "mup_base_hidden_size",
    "use_mup",
}
# Fields that a model is read from besides, and the progress of a training.
_ALSO_READ = """
gated_linear_unit bias_activation_fusion softmax_scale share_embeddings_and_output_weights
original_max_position_embeddings beta_fast beta_slow
seq_length consumed_train_samples data_parallel_size iteration
"""
READ_ARGUMENTS = frozenset(_ALSO_READ.split()).union(
    row.kept for row in _OF_MODEL if row.kept not in _NO_WEIGHTS
)
# Fields of megatron-core and attributes of a training program, of which no argument has the name.
_FIELDS = """
_cpu_offloading_context activation_func_fp8_input_store apply_rope_fusion autocast_dtype
barrier_with_L1_time batch_p2p_comm batch_p2p_sync bos_token_id check_for_nan_in_loss
check_weight_hash consumed_valid_samples cpu_offloading ddp deallocate_pipeline_outputs
decoder_num_layers deprecated_use_mcore_models dist embedding_init_method enable_autocast
enable_one_logger eos_token_id filter_warnings finalize_model_grads_func fp4 fully_parallel_load
fully_parallel_save fused_single_qkv_rope grad_scale_func grad_sync_func
hetereogenous_dist_checkpoint hybrid_context_parallel init_method is_hybrid_mtp logger
logit_dtype metadata_path microbatch_group_size_per_vp_stage modules_to_filter most_recent_k
mtp_block_spec mtp_standalone no_sync_func num_layers_in_first_pipeline_stage
num_layers_in_last_pipeline_stage num_microbatches_with_partial_activation_checkpoints
offset_sampling_seed_by_dp_rank output_layer_init_method pad_token_id parallel_output
param_sync_func params_dtype perform_initialization pg_collection pipeline_dtype post_process
pre_process profiling quant_recipe rank return_log_probs rng runtime_time_unit
scatter_embedding_sequence_parallel set_level_for_all_loggers skip_prompt_log_probs
skipped_train_samples special_tokens straggler throughput_window_size timers tokenizer
torch_fsdp2_reshard_after_forward tp_only_amax_red transformer_layer_spec
transformer_pipeline_model_parallel_size use_dist_ckpt_deprecated use_flashinfer_fused_rope
use_gloo_process_groups use_inference_optimized_layers use_kitchen use_legacy_models
use_mamba_mem_eff_path use_nsys_profiler use_te_rng_tracker validation variable_seq_lengths
virtual_pipeline_model_parallel_size vp_stage wd_incr_steps world_size
"""
# of arguments of one subject in all versions
_PREFIXES = """
adam_ ckpt_ cpu_offloading_ data_ ddp_ deepspeed_ disable_ eval_ exit_ fim_ fp4_ fp8_ ft_ hf_
kitchen_ load_ log_ logits_ lr_ memory_ moe_deepep_ nccl_ no_load_ no_save_ optimizer_
overlap_ recompute_ rerun_ retro_bert_ retro_gpt_ save_ sgd_ tensorboard_ tokenizer_ wandb_ wsd_
"""
FREE_PREFIXES = (*UNUSED_SUBJECTS, *_PREFIXES.split())
# Arguments that do not change what a model computes. A flag that turns something off is kept under
# the name of what it turns off.
FREE = frozenset(
    {
        *_FIELDS.split(),
        *_NO_WEIGHTS,
        *(row.kept for row in READ.values() if row not in _OF_MODEL),
        *(row.name for row in READ.values() if row.name != row.kept),
        *(name for name, refused in REFUSED.items() if "another model" not in refused.why),
        *UNUSED,
        *(name.removeprefix("no_").removeprefix("disable_") for name in UNUSED),
    }
).difference(ALLOWED_VALUES, READ_ARGUMENTS, ALIASES)


def canonical_names(args: Args) -> dict[str, Any]:
    """Return the arguments by the names of Megatron-LM's args. Raises UserError if two names of one
    disagree."""
    canonical = {name: value for name, value in args.items() if name not in ALIASES}
    for name in LISTS:
        values = canonical.get(name)
        if isinstance(values, list | tuple) and len(values) == 1:
            canonical[name] = values[0]
    for alias, name in ALIASES.items():
        value = args.get(alias)
        if value is None:
            continue
        if canonical.get(name) in (None, value):
            canonical[name] = value
        elif canonical[name] is not True:  # rope_scaling is a number in some
            raise UserError.of(
                "convert.megatron_args_differ",
                alias=alias,
                value=value,
                name=name,
                canonical=canonical[name],
            )
    return canonical


def argument_or(args: Args, key: str, default: Any) -> Any:
    """Return an argument. The default is Megatron's own; its args say None where nothing was
    given."""
    value = args.get(key)
    return default if value is None else value


def query_groups(args: Args) -> int | None:
    """Return the number of groups of queries that share a key; None: as many as heads."""
    # Without group_query_attention Megatron-LM ignores the number of groups.
    if args.get("group_query_attention", True):
        return args.get("num_query_groups")
    return None


def refuse_others(args: Args) -> None:
    """Raise UserError for an argument that makes it a model that none of ours is."""
    problems: list[Problem] = []
    for key, allowed in ALLOWED_VALUES.items():
        if key in args and not _is_allowed(args[key], allowed):
            problems.append(
                Problem.of(
                    "convert.megatron_argument_only",
                    key=key,
                    value=args[key],
                    allowed=_describe_allowed(allowed),
                )
            )
    if problems:
        raise UserError(*problems)


def unknown_arguments(args: Args) -> Iterator[str]:
    """Yield key = value of arguments that no table here has, unless they are off."""
    known = {*ALLOWED_VALUES, *READ_ARGUMENTS, *ALIASES, *FREE}
    # A file of others may have keys of several kinds, which Python does not sort.
    for key in sorted(args, key=str):
        is_known = key in known or str(key).startswith(FREE_PREFIXES)
        if not is_known and not _is_off(args[key]):
            yield f"{key} = {args[key]!r}"


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _is_allowed(value: Any, allowed: tuple[Any, ...]) -> bool:
    # An empty list is what an argument of several values has if none was given.
    return value in allowed or value == []


def _describe_allowed(allowed: tuple[Any, ...]) -> str:
    """Return the values that an argument may have, as a remedy."""
    if allowed in (OFF, AS_IT_IS):
        return "it must be off"
    values = [value for value in allowed if value is not None]
    return f"only {', '.join(map(str, dict.fromkeys(values)))} can"
