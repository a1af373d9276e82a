"""Arguments of Megatron-LM that are known and have no meaning here, each with the reason.

The names are those of its parser, megatron/training/arguments.py, from version 2.5 to August 2026.
"""

from collections.abc import Mapping

from tools.arguments.forms import Shape, shapes

_GROUPS: tuple[tuple[str, str], ...] = (
    (
        "it stops a job early, to be resumed: a signal does, and the state is saved (docs/runs.md)",
        "exit_duration_in_mins= exit_interval=",
    ),
    (
        "the loss of a step is the mean over all its tokens in any case",
        "calculate_per_token_loss",
    ),
    (
        (
            "parallel.expert and parallel.expert_tensor cut experts; another cut gives the same "
            "results"
        ),
        "moe_extended_tp",
    ),
    (
        "it concerns reinforcement learning, which --perform-rl-step turns on",
        "grpo_clamp_eps_lower= grpo_clamp_eps_upper= grpo_entropy_term_weight= "
        "grpo_filter_groups_with_same_reward "
        "grpo_group_size= grpo_iterations= grpo_kl_beta= grpo_prompts_per_step= langrl_env_config= "
        "langrl_external_server langrl_inference_server_conversation_template= "
        "langrl_inference_server_type= "
        "no_langrl_external_server no_rl_inference_logprobs_is_correction "
        "no_rl_offload_inference_model_weights_when_idle no_rl_offload_kv_cache_during_training "
        "no_rl_partial_rollouts no_rl_persist_cuda_graphs no_rl_remove_kv_cache_during_training "
        "no_rl_reset_cuda_graphs no_rl_skip_bos_token no_rl_training_cuda_graphs "
        "no_rl_use_sequence_packing "
        "no_rl_verify_model_weights_swap refit_method= rl_consumption_granularity= "
        "rl_default_temperature= "
        "rl_default_top_k= rl_default_top_p= rl_durable_rollout_bank rl_generation_lag= "
        "rl_importance_sampling_truncation_coef= rl_inference_expert_model_parallel_size= "
        "rl_inference_expert_tensor_model_parallel_size= rl_inference_logprobs_is_correction "
        "rl_inference_model_unified_memory_level= rl_inference_parsers* "
        "rl_inference_pipeline_model_parallel_size= "
        "rl_inference_tensor_model_parallel_size= rl_kv_cache_management_mode= "
        "rl_max_inflight_requests= "
        "rl_offload_inference_model_weights_when_idle rl_offload_kv_cache_during_training "
        "rl_offload_optimizer_during_inference rl_parallel_generation_tasks= rl_partial_rollouts "
        "rl_persist_cuda_graphs rl_profile rl_profile_dir= rl_prompts_per_eval= "
        "rl_remove_kv_cache_during_training "
        "rl_reset_cuda_graphs rl_rollout_bank_dir= rl_rollout_bank_max_bytes= "
        "rl_sequence_packing_algo= "
        "rl_sequence_packing_max_sequences_per_bin= rl_skip_bos_token rl_submission_granularity= "
        "rl_training_cuda_graphs rl_use_sequence_packing rl_verify_model_weights_swap",
    ),
    (
        "it concerns generation, not training",
        "bert_embedder_type= cache_mla_latents decode_only_cuda_graphs "
        "disable_chunked_prefill enable_chunked_prefill "
        "flash_decode inference_batch_times_seqlen_threshold= inference_coordinator_port= "
        "inference_cuda_graph_all_prefills inference_cuda_graph_max_tokens= "
        "inference_cuda_graph_scope= "
        "inference_disable_ep_consensus inference_disable_triton_nvls_kernels "
        "inference_dynamic_batching "
        "inference_dynamic_batching_async_sched_mode= inference_dynamic_batching_block_size= "
        "inference_dynamic_batching_buffer_guaranteed_fraction= "
        "inference_dynamic_batching_buffer_overflow_factor= "
        "inference_dynamic_batching_buffer_size_gb= "
        "inference_dynamic_batching_cuda_graph_max_tokens= "
        "inference_dynamic_batching_cuda_graph_mixed_prefill_count= "
        "inference_dynamic_batching_cuda_graph_sizing_distribution= "
        "inference_dynamic_batching_logprobs_mode= "
        "inference_dynamic_batching_mamba_memory_ratio= inference_dynamic_batching_max_requests= "
        "inference_dynamic_batching_max_requests_override= inference_dynamic_batching_max_tokens= "
        "inference_dynamic_batching_max_tokens_override= "
        "inference_dynamic_batching_num_cuda_graphs= "
        "inference_dynamic_batching_paused_buffer_size_gb= "
        "inference_dynamic_batching_prefix_caching "
        "inference_dynamic_batching_prefix_caching_coordinator_policy= "
        "inference_dynamic_batching_prefix_caching_eviction_policy= "
        "inference_dynamic_batching_prefix_caching_mamba_gb= "
        "inference_dynamic_batching_prefix_caching_routing_alpha= "
        "inference_dynamic_batching_sampling_backend= "
        "inference_dynamic_batching_track_generated_token_events "
        "inference_dynamic_batching_track_paused_request_events "
        "inference_dynamic_batching_unified_memory_level= "
        "inference_fuse_tp_communication inference_grouped_gemm_backend= "
        "inference_logging_step_interval= "
        "inference_max_batch_size= inference_max_requests= inference_max_seq_length= "
        "inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type= "
        "inference_rng_tracker "
        "inference_shards= inference_text_gen_server_logging "
        "inference_use_synchronous_zmq_collectives "
        "inference_wandb_logging mamba_inference_conv_states_dtype= "
        "mamba_inference_ssm_states_dtype= "
        "max_tokens_to_oom= mlp_chunks_for_prefill= nccl_all_reduce_for_prefill "
        "no_inference_disable_ep_consensus "
        "no_inference_dynamic_batching_prefix_caching no_inference_text_gen_server_logging "
        "no_inference_use_synchronous_zmq_collectives no_inference_wandb_logging "
        "num_speculative_tokens= "
        "output_bert_embeddings symmetric_ar_type= use_legacy_static_engine",
    ),
    (
        "it concerns other models: BERT, T5, retrieval or vision",
        "bert_load= bert_no_binary_head biencoder_projection_dim= "
        "biencoder_shared_query_context_model "
        "block_data_path= classes_fraction= data_per_class_fraction= decoder_seq_length= "
        "dino_bottleneck_size= "
        "dino_freeze_last_layer= dino_head_hidden_size= dino_local_crops_number= "
        "dino_local_img_size= "
        "dino_norm_last_layer dino_teacher_temp= dino_warmup_teacher_temp= "
        "dino_warmup_teacher_temp_epochs= "
        "embedding_path= evidence_data_path= ict_head_size= ict_load= img_dim= img_h= img_w= "
        "indexer_batch_size= "
        "indexer_log_interval= iter_per_epoch= mask_factor= mask_prob= mask_type= "
        "num_channels= num_classes= "
        "patch_dim= query_in_block_prob= retriever_report_topk_accuracies* retriever_score_scaling "
        "retriever_seq_length= sample_rate= short_seq_prob= swin_backbone_type= "
        "titles_data_path= use_one_sent_docs "
        "vision_backbone_type= vision_pretraining vision_pretraining_type=",
    ),
    (
        "it concerns kinds of layers that other arguments turn on, which are refused",
        "disable_dsa_indexer_rotate_activation disable_dsa_indexer_scoring_relu "
        "disable_mamba_mem_eff_path "
        "dsa_indexer_head_dim= dsa_indexer_k_norm_epsilon= dsa_indexer_k_norm_fp32 "
        "dsa_indexer_loss_coeff= "
        "dsa_indexer_n_heads= dsa_indexer_rope_interleaved dsa_indexer_skip_topk_offset= "
        "dsa_indexer_topk= "
        "dsa_indexer_topk_freq= dsa_indexer_use_sparse_loss dsa_kernel_backend= "
        "linear_conv_kernel_dim= "
        "linear_key_head_dim= linear_num_key_heads= linear_num_value_heads= "
        "linear_value_head_dim= mamba_head_dim= "
        "mamba_num_groups= mamba_num_heads= mamba_state_dim= "
        "mamba_training_ssm_states_dtype= mla_down_proj_fusion "
        "mrope_section* no_dsa_indexer_rotate_activation no_dsa_indexer_scoring_relu "
        "relative_attention_max_distance= relative_attention_num_buckets=",
    ),
    (
        "it concerns optimizers that --optimizer turns on, which are refused",
        "lion_beta1= lion_beta2= muon_coefficient_type= muon_extra_scale_factor= "
        "muon_fp32_matmul_prec= "
        "muon_momentum= muon_nesterov muon_no_split_qkv muon_num_ns_steps= "
        "muon_scalar_optimizer= muon_scale_mode= "
        "muon_tp_mode= muon_use_nesterov muon_use_syrk",
    ),
    (
        (
            "it concerns logging: a run writes its own records and pictures to train.folder "
            "(docs/runs.md)"
        ),
        "app_tag_run_name= app_tag_run_version= config_logger_dir= "
        "disable_log_loss_scale_to_tensorboard "
        "dump_param_to_param_group_map= log_batch_size_to_tensorboard log_device_memory_used "
        "log_energy "
        "log_max_attention_logit log_memory_interval= log_memory_to_tensorboard "
        "log_num_zeros_in_grad log_params_norm "
        "log_progress log_straggler log_throughput log_timers_to_tensorboard "
        "log_validation_ppl_to_tensorboard "
        "log_world_size_to_tensorboard logging_level= memory_snapshot_path= moe_per_layer_logging "
        "moe_routing_trace_capture_hidden_states moe_routing_trace_capture_logits "
        "moe_routing_trace_dump_weights "
        "moe_routing_trace_max_training_iters= moe_routing_trace_path= "
        "no_barrier_with_level_1_timing "
        "no_log_learnig_rate_to_tensorboard no_log_loss_scale_to_tensorboard no_one_logger "
        "one_logger_async "
        "one_logger_project= one_logger_run_name= otel_enabled otel_service_name= "
        "otel_span_groups= "
        "record_memory_history save_activations_interval= save_dgrads_interval= "
        "save_params_interval= "
        "save_tokens_per_expert_interval= save_wgrads_interval= tensorboard_log_interval= "
        "tensorboard_queue_size= timing_log_level= timing_log_option= wandb_entity= "
        "wandb_exp_name= "
        "wandb_save_dir=",
    ),
    (
        "it concerns profiling: log.timeline records the timeline of a step",
        "nvtx_ranges profile profile_ranks* profile_step_end= profile_step_start= "
        "pytorch_profiler_collect_callstack "
        "pytorch_profiler_collect_chakra pytorch_profiler_collect_shapes record_shapes "
        "run_workload_inspector_server "
        "use_pytorch_profiler",
    ),
    (
        (
            "it concerns restarts, stragglers, hangs and checks, which a run has in its own way "
            "(docs/faults.md)"
        ),
        "adlr_autoresume adlr_autoresume_interval= calc_ft_timeouts check_for_large_grads "
        "check_for_spiky_loss "
        "check_weight_hash_across_dp_replicas_interval= disable_flight_recorder_dump_on_timeout "
        "disable_flight_recorder_extra_dump_on_exec disable_flight_recorder_include_only_active "
        "disable_straggler_on_startup distributed_timeout_minutes= "
        "distributed_timeout_seconds_after_init= "
        "enable_ft_package error_injection_rate= error_injection_type= "
        "exit_on_missing_checkpoint exit_signal= "
        "exit_signal_handler exit_signal_handler_for_dataloader "
        "exit_signal_handler_for_training fake_process_group "
        "fault_injector_delay_start_iteration= fault_injector_fault_delay= "
        "fault_injector_fault_probabilities= "
        "fault_injector_fault_types= fault_injector_mtti_seconds= fault_injector_num_ranks= "
        "fault_injector_offset_seconds= fault_injector_ranks= fault_injector_seed= "
        "flight_recorder_dump_path= "
        "flight_recorder_include_stack_trace flight_recorder_trace_buffer_size= "
        "ft_num_warmup_iters= "
        "gpu_sniff_test_interval= inprocess_active_world_size= inprocess_barrier_timeout= "
        "inprocess_completion_timeout= inprocess_empty_cuda_cache inprocess_granularity= "
        "inprocess_hard_timeout= "
        "inprocess_heartbeat_interval= inprocess_heartbeat_timeout= inprocess_last_call_wait= "
        "inprocess_max_iterations= inprocess_monitor_process_interval= "
        "inprocess_monitor_thread_interval= "
        "inprocess_progress_watchdog_interval= inprocess_restart inprocess_soft_timeout= "
        "inprocess_termination_grace_time= no_flight_recorder_dump_on_timeout "
        "no_flight_recorder_extra_dump_on_exec "
        "no_flight_recorder_include_only_active replication replication_factor= "
        "replication_jump= rerun_mode= "
        "result_rejected_tracker_filename= straggler_ctrlr_port= straggler_minmax_count= test_mode",
    ),
    (
        (
            "it concerns the format and the saving of checkpoints: here they load into any "
            "layout (docs/checkpoints.md)"
        ),
        "async_ckpt_cpu_priority= async_ckpt_io_priority= async_ckpt_use_cpu_shm async_save "
        "async_strategy= "
        "auto_detect_ckpt_format ckpt_assume_constant_structure ckpt_convert_format= "
        "ckpt_convert_save= "
        "ckpt_convert_update_legacy_dist_opt_format ckpt_drop_redundant_extra_state ckpt_format= "
        "ckpt_fully_parallel_load ckpt_fully_parallel_load_exchange_algo= "
        "ckpt_fully_parallel_load_per_rank_objects "
        "ckpt_fully_parallel_load_process_group= ckpt_fully_parallel_save "
        "ckpt_fully_parallel_save_process_group= "
        "ckpt_pg_tensors_cache_create ckpt_pg_tensors_cache_path= create_all_gather_group "
        "disable_ckpt_fully_parallel_save disable_ckpt_load_validate_sharding_integrity "
        "disable_msc "
        "disable_save_tokenizer_assets disable_strict_fsdp_dtensor_load "
        "disable_use_tokenizer_model_from_checkpoint_args dist_ckpt_format= "
        "dist_ckpt_optim_fully_reshardable "
        "dist_ckpt_save_pre_mcore_014 dist_ckpt_strictness= dist_ckpt_workers= "
        "distrib_optim_fully_reshardable_mem_efficient enable_msc no_ckpt_fully_parallel_save "
        "no_ckpt_load_validate_sharding_integrity no_load_rng no_save_optim no_save_rng "
        "no_save_tokenizer_assets "
        "no_strict_fsdp_dtensor_load no_use_tokenizer_model_from_checkpoint_args "
        "non_persistent_ckpt_type= "
        "non_persistent_global_ckpt_dir= non_persistent_local_ckpt_algo= "
        "non_persistent_local_ckpt_dir= "
        "non_persistent_save_interval= object_storage_cache_path= override_lr_scheduler "
        "override_opt_param_scheduler "
        "s3_cache_path= use_dist_ckpt use_persistent_ckpt_worker verify_integrity",
    ),
    (
        "it chooses kernels or memory for the same mathematics",
        "apply_query_key_layer_scaling attention_backend= attention_softmax_in_fp32 "
        "batch_invariant_backend= "
        "batch_invariant_mode cross_entropy_fusion_impl= cross_entropy_loss_fusion "
        "cuda_graph_impl= "
        "cuda_graph_modules* cuda_graph_scope* cuda_graph_warmup_steps= deterministic_mode "
        "disable_bf16_reduced_precision_matmul disable_jit_fuser disable_manual_gc_eval "
        "disable_symmetric_registration empty_unused_memory_level= enable_cuda_graph "
        "enable_experimental "
        "external_cuda_graph flash_attention_version= fp8_interval= fused_residual_rmsnorm "
        "init_model_with_meta_device keep_fp8_transpose_cache "
        "keep_fp8_transpose_cache_when_using_custom_fsdp "
        "legacy_tokenizer manual_gc manual_gc_interval= mlp_chunks_for_training= "
        "moe_combine_bwd_dtype= "
        "moe_deepep_num_sms= moe_dispatch_fwd_dtype= moe_enable_deepep "
        "moe_flex_dispatcher_backend= "
        "moe_flex_dispatcher_num_sms= moe_hybridep_num_blocks_permute= "
        "moe_hybridep_num_blocks_unpermute= moe_hybridep_num_sms= "
        "moe_hybridep_num_sms_preprocessing= "
        "moe_hybridep_pad_uneven_dispatch_inputs moe_mlp_glu_interleave_size= moe_ncclep_zero_copy "
        "moe_pad_experts_for_cuda_graph_inference moe_paged_stash "
        "moe_paged_stash_buffer_size_factor_cpu= "
        "moe_paged_stash_buffer_size_factor_cuda= moe_paged_stash_page_size= moe_permute_fusion "
        "moe_permute_fusion_into_hybridep moe_router_dtype= moe_router_fusion "
        "moe_router_padding_for_fp8 moe_router_padding_for_quantization "
        "moe_shared_expert_glu_interleave_size= "
        "moe_shared_expert_overlap moe_single_grouped_bias moe_single_grouped_weight "
        "moe_token_dispatcher_type= "
        "moe_token_drop_policy= moe_upcycling_granularity= moe_use_grouped_tensor "
        "moe_use_legacy_grouped_gemm "
        "no_bias_dropout_fusion no_bias_swiglu_fusion no_gradient_accumulation_fusion "
        "no_gradient_reduce_div_fusion "
        "no_manual_gc_eval no_masked_softmax_fusion no_persist_layer_norm "
        "no_query_key_layer_scaling no_rope_fusion "
        "optimizer_cuda_graph reuse_grad_buf_for_mxfp8_param_ag te_rng_tracker transformer_impl= "
        "use_cpu_initialization use_flash_attn use_fused_weighted_squared_relu "
        "use_grouped_gemm_for_dense_mlp "
        "use_grouped_gemm_for_shared_expert use_mcore_models use_transformer_engine_op_fuser",
    ),
    (
        "it concerns communication and memory: the results are the same without it",
        "DDP_impl= activation_offload_fraction= cpu_offloading_retain_pinned_cpu_buffers "
        "data_parallel_sharding_strategy= ddp_average_in_collective ddp_num_buckets= "
        "ddp_pad_buckets_for_high_nccl_busbw ddp_reduce_scatter_with_fp32_accumulation "
        "defer_embedding_wgrad_compute "
        "delay_offload_until_cuda_graph delay_param_gather delay_wgrad_compute "
        "delta_offload_bytes_across_pp_ranks= "
        "disable_align_grad_reduce disable_async_tensor_model_parallel_allreduce "
        "disable_clone_scatter_output_in_embedding disable_gloo_process_groups "
        "disable_tp_comm_bulk_dgrad "
        "disable_tp_comm_bulk_wgrad disable_tp_comm_overlap_ag disable_tp_comm_overlap_rs "
        "disable_tp_comm_split_ag "
        "disable_tp_comm_split_rs distribute_checkpointed_activations distribute_saved_activations "
        "distributed_backend= enable_full_sharding_in_hsdp ep_overlap_early_attn_memory_release "
        "fine_grained_offloading_max_inflight_offloads= "
        "fsdp_db_use_persist_buf_on_alloc_fail fsdp_double_buffer "
        "fsdp_manual_registration gtp_expert_remat_nccl_ub gtp_remat_nccl_ub "
        "gtp_remat_opt_in_modules* "
        "gtp_remat_reduce_scatter_with_fp32_accumulation high_priority_a2a_comm_stream "
        "high_priority_stream_groups* "
        "lazy_mpu_init local_rank= max_seqlen_per_dp_cp_rank= "
        "megatron_fsdp_enable_fine_grained_param_gather "
        "megatron_fsdp_grad_comm_dtype= megatron_fsdp_main_grads_dtype= "
        "megatron_fsdp_main_params_dtype= "
        "megatron_fsdp_max_pool_double_buffer megatron_fsdp_version= "
        "microbatch_group_size_per_virtual_pipeline_stage= min_offloaded_tensor_size= "
        "moe_layer_recompute "
        "nccl_communicator_config_path= no_align_grad_reduce no_align_param_gather "
        "no_async_tensor_model_parallel_allreduce no_clone_scatter_output_in_embedding "
        "no_delay_grad_reduce "
        "no_overlap_p2p_communication no_pin_cpu_grads no_pin_cpu_params "
        "no_scatter_gather_tensors_in_pipeline "
        "no_tp_comm_bulk_dgrad no_tp_comm_bulk_wgrad no_tp_comm_overlap_ag "
        "no_tp_comm_overlap_rs no_tp_comm_split_ag "
        "no_tp_comm_split_rs no_use_layer_wise_param_layout offload_modules* "
        "optimizer_offload_fraction= "
        "outer_dp_sharding_strategy= overlap_cpu_optimizer_d2h_h2d "
        "overlap_dispatch_backward_with_experts_wgrad "
        "overlap_moe_expert_parallel_comm overlap_p2p_communication_warmup_flush "
        "overlap_param_gather_with_optimizer_step pipeline_model_parallel_comm_backend= "
        "sharp_enabled_group= "
        "suggested_communication_unit_size= torch_fsdp2_no_reshard_after_forward "
        "tp_comm_bootstrap_backend= "
        "tp_comm_overlap tp_comm_overlap_cfg= tp_comm_overlap_rs_dgrad train_sync_interval= "
        "use_contiguous_buffers_in_ddp use_nccl_ub use_ring_exchange_p2p use_sharp "
        "use_torch_optimizer_for_cpu_offload use_tp_pp_dp_mapping wgrad_deferral_limit=",
    ),
    (
        (
            "it concerns reading data: data sets, tokens and padding rows are handled without it "
            "(docs/from-megatron.md)"
        ),
        "allow_ambiguous_pad_tokens chat_template= data_cache_path= data_impl= "
        "dataloader_defer_npy_index_mmap "
        "dataloader_fast_cache_load disable_pad_vocab_size "
        "disable_tokenizer_sentencepiece_ignore_extra_whitespaces "
        "eval_global_batch_size= eval_micro_batch_size= full_validation "
        "make_vocab_size_divisible_by= "
        "mid_level_dataset_surplus= mmap_warmup no_create_attention_mask_in_dataloader "
        "no_mmap_bin_files "
        "no_pad_vocab_size no_tokenizer_sentencepiece_ignore_extra_whitespaces "
        "null_tokenizer_eod_id= "
        "null_tokenizer_pad_id= num_dataset_builder_threads= num_workers= "
        "per_dataset_sequences_path= "
        "start_eval_at_iter= tiktoken_num_special_tokens= tiktoken_pattern= "
        "tiktoken_special_tokens* "
        "tokenizer_hf_include_special_tokens tokenizer_hf_no_include_special_tokens "
        "tokenizer_hf_no_use_fast "
        "tokenizer_hf_use_fast tokenizer_metadata= tokenizer_sentencepiece_legacy "
        "trust_remote_code use_gigatoken use_same_sampling_seed_across_dp_ranks",
    ),
)
SHAPES: Mapping[str, Shape] = {name: shape for _, names in _GROUPS for name, shape in shapes(names)}
"""The shapes of the arguments without a meaning."""
WHY: Mapping[str, str] = {name: why for why, names in _GROUPS for name, _ in shapes(names)}
"""The reasons why they have none."""
