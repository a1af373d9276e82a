"""Every argument of Megatron: those that are read, those with one permitted value, and those that
do not matter.

Names are those of Megatron-LM's args, which a checkpoint holds; the fields of megatron-core's
`TransformerConfig` and the arguments of its `GPTModel` that are called otherwise are `ALIASES` of
them. A value of `ONLY` that is not among those listed is refused. An argument that no table has is
named in a note, unless it is off.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megaprec.errors import UserError

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
# Arguments that make it another model: the values that leave it as it is.
ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("learned_absolute", "rope", "yarn"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "softmax_type": ("vanilla", "learnable", None),
    "activation_func": ("gelu", "silu", "quick_gelu", None),
    "moe_router_score_function": ("softmax", "sigmoid", None),
    "rope_type": ("rope", "yarn", None),
    "mla_down_proj_fusion": AS_IT_IS,
    "moe_mlp_glu_interleave_size": AS_IT_IS,
    "moe_shared_expert_glu_interleave_size": AS_IT_IS,
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "none", None),
    "add_position_embedding": (True, False, None),
    **dict.fromkeys(
        (
            "squared_relu",
            "openai_gelu",
            "onnx_safe",
            "enable_gpt_oss",
            "apply_layernorm_1p",
            "mtp_use_repeated_layer",
            "mtp_hybrid_override_pattern",
            "mtp_hsm",
            "mtp_detach_heads",
            "apply_residual_connection_post_layernorm",
            "qk_l2_norm",
            "attention_output_gate",
            "experimental_attention_variant",
            "linear_attention_freq",
            "moe_enable_routing_replay",
            "moe_router_topk_limited_devices",
            "moe_router_force_load_balancing",
            "moe_router_force_biased",
            "moe_input_jitter_eps",
            "moe_token_dropping",
            "moe_expert_capacity_factor",
            "moe_pad_expert_input_to_capacity",
            "moe_apply_probs_on_input",
            "moe_latent_size",
            "is_hybrid_model",
            "hybrid_layer_pattern",
            "hybrid_override_pattern",
            "heterogeneous_block_specs",
            "heterogeneous_layers_config_path",
            "heterogeneous_layers_config_encoded_json",
            "retro_add_retriever",
            "spec",
        ),
        OFF,
    ),
}
READ_ARGUMENTS = (
    "num_layers hidden_size num_attention_heads group_query_attention num_query_groups "
    "kv_channels ffn_hidden_size "
    "moe_ffn_hidden_size vocab_size padded_vocab_size max_position_embeddings norm_epsilon "
    "rotary_base rotary_percent "
    "rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling "
    "rope_scaling_factor no_rope_freq swiglu "
    "gated_linear_unit bias_gelu_fusion bias_activation_fusion use_te_activation_func "
    "add_bias_linear add_qkv_bias "
    "qk_layernorm softmax_scale window_size window_attn_skip_freq "
    "untie_embeddings_and_output_weights "
    "share_embeddings_and_output_weights num_experts moe_layer_freq moe_router_topk "
    "moe_router_pre_softmax "
    "moe_router_score_function moe_router_topk_scaling_factor moe_router_num_groups "
    "moe_router_group_topk "
    "moe_router_enable_expert_bias moe_router_bias_update_rate moe_shared_expert_intermediate_size "
    "moe_shared_expert_gate "
    "multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim "
    "v_head_dim rope_type "
    "rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale "
    "mscale_all_dim "
    "yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow "
    "yarn_correction_range_round_to_int "
    "softmax_type quick_geglu glu_linear_offset activation_func_clamp_value "
    "moe_aux_loss_coeff moe_z_loss_coeff hidden_dropout attention_dropout init_method_std "
    "mtp_num_layers mtp_loss_scaling_factor "
    "use_rotary_position_embeddings seq_length consumed_train_samples data_parallel_size iteration"
)
_CORE = {
    "how ranks share the work": (
        "tensor_model_parallel_size pipeline_model_parallel_size "
        "virtual_pipeline_model_parallel_size "
        "sequence_parallel context_parallel_size hierarchical_context_parallel_sizes "
        "max_seqlen_per_dp_cp_rank "
        "hybrid_context_parallel expert_model_parallel_size expert_tensor_parallel_size "
        "moe_extended_tp "
        "cp_comm_type num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage "
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers "
        "pipeline_model_parallel_layout "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split mtp_standalone "
        "pipeline_model_parallel_comm_backend pipeline_dtype variable_seq_lengths "
        "batch_p2p_comm batch_p2p_sync "
        "use_ring_exchange_p2p deallocate_pipeline_outputs defer_embedding_wgrad_compute "
        "wgrad_deferral_limit "
        "microbatch_group_size_per_vp_stage async_tensor_model_parallel_allreduce "
        "delay_wgrad_compute "
        "ep_overlap_early_attn_memory_release barrier_with_L1_time moe_token_dispatcher_type "
        "moe_enable_deepep "
        "moe_flex_dispatcher_backend moe_shared_expert_overlap scatter_embedding_sequence_parallel "
        "parallel_output clone_scatter_output_in_embedding finalize_model_grads_func "
        "no_sync_func grad_sync_func "
        "param_sync_func timers pg_collection vp_stage pre_process post_process "
    ),
    "how the same is computed, and how precisely": (
        "fp16 bf16 params_dtype transformer_impl attention_backend attention_softmax_in_fp32 "
        "apply_query_key_layer_scaling disable_bf16_reduced_precision_matmul masked_softmax_fusion "
        "persist_layer_norm memory_efficient_layer_norm bias_dropout_fusion "
        "bias_swiglu_fusion apply_rope_fusion "
        "fused_single_qkv_rope use_fused_weighted_squared_relu fp32_residual_connection fp8 "
        "fp4 tp_only_amax_red "
        "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 use_kitchen "
        "use_kitchen_attention quant_recipe activation_func_fp8_input_store moe_router_dtype "
        "moe_router_fusion "
        "moe_permute_fusion moe_grouped_gemm moe_use_legacy_grouped_gemm moe_layer_recompute "
        "moe_router_padding_for_quantization moe_router_padding_for_fp8 "
        "distribute_saved_activations "
        "num_microbatches_with_partial_activation_checkpoints cpu_offloading "
        "_cpu_offloading_context "
        "fine_grained_activation_offloading offload_modules min_offloaded_tensor_size "
        "enable_cuda_graph "
        "external_cuda_graph disable_parameter_transpose_cache deterministic_mode "
        "batch_invariant_mode "
        "enable_autocast autocast_dtype gradient_accumulation_fusion cross_entropy_loss_fusion "
        "cross_entropy_fusion_impl use_te_rng_tracker symmetric_ar_type "
        "use_inference_optimized_layers "
        "use_mamba_mem_eff_path hetereogenous_dist_checkpoint transformer_layer_spec "
        "fp16_lm_cross_entropy "
    ),
    "of training, not of the model's result": (
        "calculate_per_token_loss grad_scale_func qk_clip qk_clip_alpha qk_clip_threshold "
        "log_max_attention_logit "
        "moe_per_layer_logging test_mode config_logger_dir "
        "moe_token_drop_policy "
    ),
    "of initial weights": (
        "perform_initialization use_cpu_initialization init_model_with_meta_device init_method "
        "output_layer_init_method embedding_init_method embedding_init_method_std "
        "init_method_xavier_uniform "
    ),
    "of generation": (
        "flash_decode inference_rng_tracker inference_sampling_seed mlp_chunks_for_prefill "
    ),
    "of generation, or of what is refused": (
        "cache_mla_latents mrope_section mtp_block_spec is_hybrid_mtp"
    ),
}
# What a training program has besides.
_TRAINING = (
    "accumulate_allreduce_grads_in_fp32 align_grad_reduce align_param_gather "
    "allow_ambiguous_pad_tokens "
    "apply_rope_fusion apply_wd_to_qk_layernorm attention_backend attention_softmax_in_fp32 "
    "auto_detect_ckpt_format barrier_with_L1_time batch_size bf16 bias_dropout_fusion "
    "bias_swiglu_fusion "
    "block_data_path calc_ft_timeouts chat_template check_for_large_grads check_for_nan_in_loss "
    "check_for_nan_in_loss_and_grad check_for_spiky_loss check_weight_hash "
    "check_weight_hash_across_dp_replicas_interval checkpoint_activations classes_fraction "
    "clip_grad "
    "consumed_train_samples consumed_valid_samples cp_comm_type create_all_gather_group "
    "create_attention_mask_in_dataloader cross_entropy_fusion_impl cross_entropy_loss_fusion "
    "data_parallel_size "
    "dataloader_defer_npy_index_mmap dataloader_fast_cache_load "
    "dataloader_inter_document_masking dataloader_type "
    "ddp decode_only_cuda_graphs decoder_seq_length decoupled_lr decoupled_min_lr "
    "decrease_batch_size_if_needed "
    "delay_grad_reduce delay_param_gather deprecated_use_mcore_models deterministic_mode dist "
    "distrib_optim_fully_reshardable_mem_efficient distribute_saved_activations "
    "distributed_backend "
    "distributed_timeout_minutes distributed_timeout_seconds_after_init "
    "dump_param_to_param_group_map "
    "embedding_path empty_unused_memory_level enable_chunked_prefill enable_experimental "
    "enable_ft_package "
    "enable_full_sharding_in_hsdp enable_msc enable_one_logger encoder_seq_length "
    "end_weight_decay eod_mask_loss "
    "evidence_data_path exp_avg_dtype exp_avg_sq_dtype fake_process_group filter_warnings "
    "finetune fp16 "
    "fp16_lm_cross_entropy freeze_all_layers full_validation fully_parallel_load "
    "fully_parallel_save "
    "global_batch_size gpu_sniff_test_interval grad_reduce_in_bf16 gradient_accumulation_fusion "
    "gradient_reduce_div_fusion head_lr_mult high_priority_stream_groups hysteresis img_h img_w "
    "indexer_batch_size indexer_log_interval init_method_xavier_uniform initial_loss_scale "
    "iter_per_epoch "
    "iteration iterations_to_skip keep_fp8_transpose_cache lazy_mpu_init load local_rank "
    "logger logging_level "
    "logit_dtype loss_scale loss_scale_window lr main_grads_dtype main_params_dtype "
    "make_vocab_size_divisible_by "
    "manual_gc manual_gc_eval manual_gc_interval mask_factor mask_prob mask_type "
    "masked_softmax_fusion "
    "max_tokens_to_oom merge_file metadata_path micro_batch_size mid_level_dataset_surplus "
    "min_loss_scale min_lr "
    "mmap_bin_files mock_data model_parallel_size modules_to_filter "
    "moe_upcycling_granularity moe_use_upcycling "
    "most_recent_k multiple_validation_sets no_persist_layer_norm no_weight_decay_cond_type "
    "null_tokenizer_eod_id "
    "null_tokenizer_pad_id num_channels num_classes num_dataset_builder_threads "
    "num_distributed_optimizer_instances num_layers_per_virtual_pipeline_stage "
    "num_speculative_tokens "
    "num_virtual_stages_per_pipeline_rank num_workers nvtx_ranges object_storage_cache_path "
    "offset_sampling_seed_by_dp_rank onnx_safe optimizer outer_dp_sharding_strategy "
    "output_bert_embeddings "
    "override_ckpt_iteration override_opt_param_scheduler pad_vocab_size params_dtype patch_dim "
    "per_dataset_sequences_path per_split_data_args_path perform_rl_step persist_layer_norm "
    "phase_transition_iterations pin_cpu_grads pin_cpu_params pretrained_checkpoint "
    "profiling query_in_block_prob "
    "rampup_batch_size rank record_memory_history record_shapes refit_method replication "
    "replication_factor "
    "replication_jump reset_attention_mask reset_position_ids "
    "result_rejected_tracker_filename return_log_probs "
    "reuse_grad_buf_for_mxfp8_param_ag rng run_workload_inspector_server runtime_time_unit "
    "s3_cache_path "
    "sample_rate save seed seq_length sequence_parallel set_level_for_all_loggers "
    "sft_tokenizer_prompt_format "
    "sharp_enabled_group short_seq_prob skip_prompt_log_probs skip_train "
    "skipped_train_samples special_tokens "
    "split start_eval_at_iter start_weight_decay step_batch_size_schedule straggler "
    "strict_fsdp_dtensor_load "
    "suggested_communication_unit_size swin_backbone_type te_precision_config_file "
    "te_rng_tracker test_data_path "
    "test_mode throughput_window_size tiktoken_num_special_tokens tiktoken_pattern "
    "timing_log_level "
    "timing_log_option titles_data_path tokenizer tokenizer_type torch_fsdp2_reshard_after_forward "
    "train_data_path train_iters train_samples train_sync_interval transformer_impl "
    "transformer_pipeline_model_parallel_size trust_remote_code use_checkpoint_args "
    "use_checkpoint_opt_param_scheduler use_cpu_initialization use_dist_ckpt "
    "use_dist_ckpt_deprecated "
    "use_distributed_optimizer use_flash_attn use_flashinfer_fused_rope use_gigatoken "
    "use_gloo_process_groups "
    "use_layer_wise_param_layout use_legacy_models use_legacy_static_engine use_mcore_models "
    "use_megatron_fsdp "
    "use_mp_args_from_checkpoint_args use_nsys_profiler use_one_sent_docs "
    "use_persistent_ckpt_worker "
    "use_precision_aware_optimizer use_pytorch_profiler use_ring_exchange_p2p use_sharp "
    "use_tokenizer_model_from_checkpoint_args use_torch_fsdp2 use_torch_optimizer_for_cpu_offload "
    "use_tp_pp_dp_mapping valid_data_path validation validation_set_names verify_integrity "
    "vocab_extra_ids "
    "vocab_file warmup wd_incr_steps weight_decay weight_decay_incr_style world_size yaml_cfg "
    "encoder_num_layers decoder_num_layers relative_attention_num_buckets "
    "relative_attention_max_distance "
    "bos_token_id eos_token_id pad_token_id"
)
_PREFIXES = (
    "adam_ adlr_ app_tag_ async_ bert_ biencoder_ ckpt_ cpu_offloading_ cuda_graph_ data_ "
    "ddp_ deepspeed_ dino_ "
    "disable_ dist_ckpt_ dsa_ enable_ckpt error_injection_ eval_ exit_ fim_ flight_recorder_ "
    "fp4_ fp8_ fsdp_ ft_ "
    "grpo_ gtp_ hf_ ict_ inference_ inprocess_ kitchen_ langrl_ linear_ lion_ load_ log_ "
    "logits_ lr_ mamba_ "
    "megatron_fsdp_ memory_ moe_deepep_ moe_hybridep_ moe_routing_trace_ muon_ nccl_ "
    "no_load_ no_save_ "
    "non_persistent_ one_logger_ optimizer_ otel_ overlap_ profile_ pytorch_profiler_ "
    "recompute_ rerun_ "
    "retriever_ retro_bert_ retro_gpt_ rl_ save_ sgd_ straggler_ tensorboard_ tokenizer_ "
    "tp_comm_ vision_ wandb_ "
    "wsd_ "
)
# Arguments that do not change what a model computes, and why.
FREE: dict[str, str] = {name: why for why, names in _CORE.items() for name in names.split()}
FREE |= dict.fromkeys(_TRAINING.split(), "of training, data, logs or checkpoints")
FREE_PREFIXES = tuple(_PREFIXES.split())


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
        if value is not None and canonical.get(name) in (None, value):
            canonical[name] = value
        elif value is not None and canonical[name] is not True:  # rope_scaling is a number in some
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


def refuse_others(args: Args) -> None:
    """Raise UserError for an argument that makes it a model that none of ours is."""
    problems = [
        f"Megatron's {key} = {args[key]!r} cannot be converted; {_describe_allowed(key)}"
        for key in ALLOWED_VALUES
        if key in args and not _is_allowed(args[key], ALLOWED_VALUES[key])
    ]
    if problems:
        raise UserError(*problems)


def unknown_arguments(args: Args) -> Iterator[str]:
    """Yield key = value of arguments that no table here has, unless they are off."""
    known = {*ALLOWED_VALUES, *READ_ARGUMENTS.split(), *ALIASES, *FREE}
    for key, value in sorted(args.items(), key=lambda item: str(item[0])):
        if key not in known and not str(key).startswith(FREE_PREFIXES) and not _is_off(value):
            yield f"{key} = {value!r}"


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _is_allowed(value: Any, allowed: tuple[Any, ...]) -> bool:
    return any(value == one for one in allowed) or value == []


def _describe_allowed(key: str) -> str:
    """Return the values that an argument may have, as a remedy."""
    values = [value for value in ALLOWED_VALUES[key] if value is not None]
    if ALLOWED_VALUES[key] in (OFF, AS_IT_IS):
        return "it must be off"
    return f"only {', '.join(map(str, dict.fromkeys(values)))} can"
