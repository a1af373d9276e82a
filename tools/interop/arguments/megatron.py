"""The arguments of Megatron-LM: those that are read, those that are refused, and those that are not
used here.

The names, kinds and defaults are those of its parser, megatron/training/arguments.py, of version
core_v0.16; names of versions from 2.5 to August 2026 are there too, and muon_split_qkv_per_head of
pull request 6326. A name is written as it is typed, with `_` for `-` and without the dashes.
Command lines are read by this table, and so are the arguments that a log or a checkpoint keeps
(`tools.convert.megatron.keys`).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Form = Literal["flag", "value", "values"]

# Each row: the name; its kind and default; the keys of a run file that it becomes.
#   name>kept      the parser keeps the value under another name, its `dest`
#   switch, off    a flag that sets True, or False; with `?` None is kept if neither of two is given
#   size, count    a whole number from 1 on, or from 0 on; in a checkpoint too
#   int, number, text
#   one|two|(no)   words to choose from, of which the first is the default, or none with `|one|two`;
#                  no model here has those in parentheses
#   kind*          several values
_READ = """
num_layers                                 size                   model.layers
encoder_num_layers>num_layers              size                   model.layers
hidden_size                                size                   model.hidden
num_attention_heads                        size                   model.heads
group_query_attention                      switch                 model.kv_heads
num_query_groups                           size=1                 model.kv_heads
kv_channels                                size                   model.head_dim
ffn_hidden_size                            size                   model.ffn model.dense_ffn
moe_ffn_hidden_size                        size                   model.ffn
max_position_embeddings                    size                   model.max_positions
normalization                              LayerNorm|RMSNorm      model.norm
norm_epsilon                               number=1e-05           model.norm_eps
layernorm_epsilon>norm_epsilon             number=1e-05           model.norm_eps
position_embedding_type learned_absolute|rope|yarn|none|(mrope)|(relative) model.positions
use_rotary_position_embeddings             switch                 model.positions
no_position_embedding>add_position_embedding off                    model.positions
rotary_base                                int=10000              model.rope_base
rotary_percent                             number=1.0             model.rotary_fraction
rotary_interleaved                         switch                 model.positions
hybrid_layer_pattern                       text            model.hybrid_pattern model.layers
hybrid_override_pattern                    text            model.hybrid_pattern model.layers
hybrid_attention_ratio                     number=0.0             model.hybrid_pattern
hybrid_mlp_ratio                           number=0.0             model.hybrid_pattern
is_hybrid_model                            switch                 model.hybrid_pattern
spec                                       text*                  model.hybrid_pattern
mamba_num_heads                            size                   model.mamba
mamba_head_dim                             size=64                model.mamba
mamba_state_dim                            size=128               model.mamba
mamba_num_groups                           size=8                 model.mamba
experimental_attention_variant |gated_delta_net|gdn|(gdn2)|(dsa) model.delta_net
linear_attention_freq                      text                   model.delta_layers
linear_num_key_heads                       size=16                model.delta_net
linear_num_value_heads                     size=32                model.delta_net
linear_key_head_dim                        size=128               model.delta_net
linear_value_head_dim                      size=128               model.delta_net
linear_conv_kernel_dim                     size=4                 model.delta_net
attention_output_gate                      switch                 model.attention_gate
multi_latent_attention                     switch                 model.latent
q_lora_rank                                count                  model.latent
kv_lora_rank                               size=32                model.latent
qk_head_dim                                size=128               model.latent
qk_pos_emb_head_dim                        size=64                model.latent
v_head_dim                                 size=128               model.latent
rope_type                                  |rope|yarn             model.rope_scaling
rotary_scaling_factor                      number=1.0             model.rope_scaling
mscale                                     number=1.0             model.rope_scaling
mscale_all_dim number=0.0 model.rope_scaling model.attention_scalar
yarn_original_max_position_embeddings      size                   model.rope_scaling
yarn_beta_fast                             number                 model.rope_scaling
yarn_beta_slow                             number                 model.rope_scaling
yarn_correction_range_round_to_int         switch?                model.rope_scaling
no_yarn_correction_range_round_to_int>yarn_correction_range_round_to_int off? model.rope_scaling
softmax_type                               vanilla|learnable|(off-by-one) model.attention_sinks
rotary_seq_len_interpolation_factor        int                    model.rope_scaling
use_rope_scaling                           switch                 model.rope_scaling
rope_scaling_factor                        number=8.0             model.rope_scaling
no_rope_freq                               text                   model.positions
swiglu                                     switch                 model.mlp
quick_geglu                                switch                 model.mlp
squared_relu                               switch                 model.mlp
moe_grouped_gemm                           switch                 model.mlp
glu_linear_offset                          number=0.0             model.mlp
activation_func_clamp_value                number                 model.swiglu_limit
no_bias_gelu_fusion>bias_gelu_fusion       off                    model.mlp
use_te_activation_func                     switch                 model.mlp
disable_bias_linear>add_bias_linear off model.bias model.qkv_bias model.mlp_bias
    model.output_bias model.expert_bias model.router_bias
add_qkv_bias                               switch                 model.qkv_bias
qk_layernorm                               switch                 model.qk_norm
window_size                                text                   model.window
window_attn_skip_freq                      text                   model.window_layers
untie_embeddings_and_output_weights        switch                 model.tied
num_experts                                count                  model.experts
moe_layer_freq                             text=1                 model.dense_layers
moe_shared_expert_intermediate_size        count                  model.shared_experts
moe_shared_expert_gate                     switch                 model.shared_gate
moe_router_topk                            size=2                 model.experts_per_token
moe_router_pre_softmax                     switch                 model.norm_topk
moe_router_load_balancing_type
    aux_loss|seq_aux_loss|global_aux_loss|none|(sinkhorn)|(quantile_balancing)*
    model.router_aux_loss
moe_router_score_function                  softmax|sigmoid|(sqrtsoftplus) model.router
moe_router_topk_scaling_factor             number                 model.router
moe_router_num_groups                      count                  model.router
moe_router_group_topk                      count                  model.router
moe_router_enable_expert_bias              switch                 model.router
moe_router_bias_update_rate                number=0.001           model.router_correction_speed
moe_aux_loss_coeff                         number*=0.0            model.router_aux_loss
moe_z_loss_coeff                           number                 model.router_z_loss
mtp_num_layers                             count                  model.mtp_layers
mtp_loss_scaling_factor                    number=0.1             model.mtp_loss_weight
hidden_dropout                             number=0.1             model.dropout
attention_dropout                          number=0.1             model.attention_dropout
init_method_std                            number=0.02            model.init_std
use_mup                                    switch                 model.mup_base_hidden
mup_base_hidden_size                       size                   model.mup_base_hidden
mup_base_head_dim                          number                 model.mup_base_head_dim
mup_attn_scale_power                       number=1.0             model.mup_base_head_dim
embedding_init_method_std                  number                 model.init
vocab_size                                 size                   model.vocab
padded_vocab_size                          size                   model.vocab
micro_batch_size                           int                    train.micro_batch
batch_size>micro_batch_size                int                    train.micro_batch
global_batch_size                          int                    train.global_batch
rampup_batch_size                          text*                  train.batch_schedule
step_batch_size_schedule                   text                   train.batch_schedule
decrease_batch_size_if_needed              switch     train.global_batch train.batch_schedule
seq_length                                 size                   train.seq_length
encoder_seq_length>seq_length              size                   train.seq_length
train_iters                                int                    train.steps
train_samples                              int                    train.steps
lr                                         number                 lr.peak
min_lr                                     number=0.0             lr.final
decoupled_lr                               number                 lr.peak
decoupled_min_lr                           number                 lr.final
lr_decay_style linear|constant|cosine|inverse-square-root|WSD lr.schedule
lr_decay_iters                             int                    lr.length
lr_decay_samples                           int                    lr.length lr.unit
lr_warmup_fraction                         number                 lr.warmup
warmup>lr_warmup_fraction                  number                 lr.warmup
lr_warmup_iters                            int=0                  lr.warmup
lr_warmup_samples                          int=0                  lr.warmup lr.unit
lr_warmup_init                             number=0.0             lr.initial
lr_wsd_decay_iters                         int                    lr.decay
lr_wsd_decay_samples                       int                    lr.decay lr.unit
lr_wsd_decay_style                         exponential|linear|cosine|minus_sqrt lr.wsd_decay
seed                                       int=1234               train.seed
eval_interval                              int=1000               train.eval_every
eval_iters                                 int=100                train.eval_batches
log_interval                               int=100                log.every
tensorboard_dir                            text                   log.to
wandb_project                              text                   log.to
save                                       text                   train.folder
load                                       text train.init_from train.branch_from checkpoint.resume
save_interval                              int                    checkpoint.every
persistent_save_interval>save_interval     int                    checkpoint.every
save_retain_interval                       int          checkpoint.keep checkpoint.keep_every
finetune                                   switch                 train.init_from
pretrained_checkpoint                      text                   train.init_from
tensor_model_parallel_size                 size=1                 parallel.tensor
model_parallel_size>tensor_model_parallel_size size               parallel.tensor
pipeline_model_parallel_size               size=1                 parallel.pipeline
account_for_embedding_in_pipeline_split    switch                 parallel.cuts
account_for_loss_in_pipeline_split         switch                 parallel.cuts
expert_model_parallel_size                 size=1                 parallel.expert
expert_tensor_parallel_size                size                   parallel.expert_tensor
context_parallel_size                      size=1                 parallel.context
cp_comm_type                               text*=p2p              parallel.context_by
num_layers_per_virtual_pipeline_stage      int                    parallel.chunks parallel.schedule
num_virtual_stages_per_pipeline_rank       int                    parallel.chunks parallel.schedule
sequence_parallel                          switch                 parallel.sequence
use_distributed_optimizer                  switch                 parallel.zero
use_megatron_fsdp                          switch                 parallel.zero
use_custom_fsdp                            switch                 parallel.zero
data_parallel_sharding_strategy optim_grads_params|no_shard|optim|optim_grads parallel.zero
use_torch_fsdp2                            switch                 parallel.zero
torch_fsdp2_no_reshard_after_forward>torch_fsdp2_reshard_after_forward off parallel.zero
deterministic_mode                         switch                 train.deterministic
overlap_grad_reduce                        switch                 parallel.overlap
overlap_param_gather                       switch                 parallel.overlap
ddp_bucket_size                            int                    parallel.bucket
recompute_activations                      switch                 parallel.recompute
checkpoint_activations                     switch                 parallel.recompute
recompute_granularity                      |full|selective        parallel.recompute
recompute_method                           |uniform|block         parallel.recompute_layers
recompute_num_layers                       int                    parallel.recompute_layers
recompute_modules                          text*                  parallel.recompute_modules
bf16                                       switch                 precision.compute
fp16                                       switch                 precision.compute
loss_scale                                 number                 precision.loss_scale
initial_loss_scale                         number=4294967296.0    precision.initial_scale
min_loss_scale                             number=1.0             precision.min_scale
loss_scale_window                          number=1000            precision.growth_interval
hysteresis                                 int=2                  precision.hysteresis
accumulate_allreduce_grads_in_fp32         switch                 precision.gradients
grad_reduce_in_bf16                        switch                 precision.gradients
fp32_residual_connection                   switch                 precision.residual
fp8_format>fp8                             |e4m3|hybrid           fp8.format fp8.kind
fp4_format>fp4                             |e2m1                  fp8.kind
fp4_recipe                                 nvfp4|(custom)         fp8.kind
fp8_recipe                                 delayed|tensorwise|mxfp8|blockwise|custom fp8.kind
fp8_margin                                 int=0                  fp8.margin
fp8_amax_history_len                       int=1                  fp8.history_length
fp8_amax_compute_algo                      most_recent|max        fp8.amax_algo
fp8_param_gather                           switch                 fp8.parameters
no_fp8_wgrad>fp8_wgrad                     off                    fp8.weight_gradients
disable_fp8_wgrad>fp8_wgrad                off                    fp8.weight_gradients
first_last_layers_bf16                     switch                 fp8.first_layers fp8.last_layers
num_layers_at_start_in_bf16                int=1                  fp8.first_layers
num_layers_at_end_in_bf16                  int=1                  fp8.last_layers
use_precision_aware_optimizer              switch                 precision.moments
main_grads_dtype                           fp32|bf16              precision.gradients
main_params_dtype                          fp32|fp16              precision.masters
exp_avg_dtype                              fp32|fp16|bf16|fp8     precision.moments
exp_avg_sq_dtype                           fp32|fp16|bf16|fp8     precision.moments
no_check_for_nan_in_loss_and_grad>check_for_nan_in_loss_and_grad off precision.on_nonfinite
optimizer adam|sgd|muon|dist_muon|lion|soap|adaptive_muon optimizer.name
adam_beta1                                 number=0.9             optimizer.betas
adam_beta2                                 number=0.999           optimizer.betas
adam_eps                                   number=1e-08           optimizer.eps
sgd_momentum                               number=0.9             optimizer.options
lion_beta1                                 number=0.95            optimizer.options
lion_beta2                                 number=0.98            optimizer.options
muon_split_qkv_per_head                    switch                 optimizer.options
weight_decay                               number=0.01            optimizer.weight_decay
start_weight_decay                         number                 optimizer.weight_decay
end_weight_decay                           number                 optimizer.weight_decay
weight_decay_incr_style                    constant|linear|cosine optimizer.weight_decay
clip_grad                                  number=1.0             optimizer.clip
qk_clip                                    switch                 optimizer.qk_clip
qk_clip_threshold                          number=100             optimizer.qk_clip
qk_clip_alpha                              number=0.5             optimizer.qk_clip_alpha
optimizer_cpu_offload                      switch                 optimizer.offload
optimizer_offload_fraction                 number=1.0             optimizer.offload
data_path                                  text*                  data.source data.blend
train_data_path                            text*                  data.source data.blend
mock_data                                  switch                 data.source
data_args_path                             text                   data.source
per_split_data_args_path                   text                   data.source
split                                      text=969,30,1          data.held_out
tokenizer_type                             text                   data.tokenizer
tokenizer_model                            text                   data.tokenizer
reset_position_ids                         switch                 data.reset_position_ids
reset_attention_mask                       switch                 data.reset_attention_mask
eod_mask_loss                              switch                 data.eod_mask_loss
no_load_optim                              switch                 train.init_from
"""

# Names in a table of refused arguments: `name` is a flag, `name=` takes a value and `name*`
# several; what stands after the sign is Megatron-LM's default, which is permitted. Those that make
# another model are refused in a checkpoint too.
_ANOTHER_MODEL = """
apply_layernorm_1p apply_residual_connection_post_layernorm
heterogeneous_layers_config_encoded_json= heterogeneous_layers_config_path=
moe_apply_probs_on_input moe_enable_routing_replay
moe_expert_capacity_factor= moe_input_jitter_eps= moe_latent_size=
moe_pad_expert_input_to_capacity moe_router_force_biased= moe_router_force_load_balancing
mtp_detach_heads mtp_hsm mtp_hybrid_override_pattern= mtp_use_repeated_layer onnx_safe=
openai_gelu qk_l2_norm retro_add_retriever
"""
_REFUSED: Mapping[str, str] = {
    "it makes another model than those of model.family": _ANOTHER_MODEL
    + """
        decoder_num_layers= enable_mhc_connections gdp_cutedsl_kernel
        gdp_num_chunk_states_to_recompute=2 gdp_num_householder=3 hybrid_context_parallel
        mhc_init_gating_factor=0.01 mhc_num_residual_streams=4 mhc_recompute_layer_num=
        mhc_sinkhorn_iterations=20 moe_expert_rank_capacity_factor=
        moe_router_quantile_balancing_ema=0.0
        mtp_standalone retro_attention_gate=1 retro_cyclic_train_iters=
        retro_encoder_attention_dropout=0.1 retro_encoder_hidden_dropout=0.1
        retro_encoder_layers=2 retro_no_verify_neighbor_count retro_num_neighbors=2
        retro_num_retrieved_chunks=2 retro_project_dir= use_legacy_models
    """,
    (
        "muP is that of --mup-base-hidden-size alone: model.embedding_scale multiplies embeddings"
        " that have no learned positions, and the width and the factor of logits follow from the"
        " hidden sizes"
    ): "mup_embedding_mult=1.0 mup_output_mult=1.0 mup_width_mult=1.0",
    (
        "the ranks of parallel.context are one group here, in which keys and values go round,"
        " or are gathered: parallel.context_by"
    ): "hierarchical_context_parallel_sizes*",
    (
        "each phase is a process with --data-path of its own there: give the weights of all phases "
        "by samples in data.blend, or each phase a run that begins with train.branch_from"
    ): "phase_transition_iterations=",
    (
        "activations stay on the device here: parallel.recompute and parallel.tensor lower their "
        "memory, and optimizer.offload that of masters and moments"
    ): "cpu_offloading_num_layers=0 fine_grained_activation_offloading",
    "parallel.zero_size is the number of replicas that share the optimizer's state": """
        num_distributed_optimizer_instances=1
    """,
    "write the layers of each stage as parallel.cuts": """
        decoder_first_pipeline_num_layers= decoder_last_pipeline_num_layers=
        encoder_pipeline_model_parallel_size=0 encoder_tensor_model_parallel_size=0
        expert_tensor_parallel_num_weight_shards= pipeline_model_parallel_layout=
        pipeline_model_parallel_split_rank= standalone_embedding_stage
        tensor_parallel_num_weight_shards=
    """,
    (
        "weight decay is constant here, and applied to parameters of two or more dimensions: "
        "optimizer.groups changes it by name"
    ): """
        apply_wd_to_qk_layernorm no_weight_decay_cond_type=
    """,
    (
        "the learning rate is one schedule for all parameters: optimizer.groups has factors by name"
    ): "head_lr_mult=1.0",
    "there is no such quantization here: [fp8] and [precision] have what there is": """
        fp4_param_gather fp4_quantizer_factory= fp8_output_proj
        fp8_quantizer_factory= te_precision_config_file=
    """,
    "there are no kernels of Kitchen here": """
        kitchen_attention_backend=sdpa use_kitchen_attention
    """,
    "states of Mamba-2 mixers are in FP32 here": "mamba_training_ssm_states_dtype=",
    "the loss is computed in FP32 from logits of precision.output": """
        ddp_param_name_patterns_for_fp32_local_accumulation* fp16_lm_cross_entropy
        output_logit_dtype=
    """,
    (
        "initial weights are normal, of model.init_std and model.init; train.init_from takes "
        "them from a checkpoint"
    ): """
        data_parallel_random_init init_method_xavier_uniform moe_use_upcycling no_initialization
    """,
    "samples are not cut and moved to fill in the middle (FIM) here": """
        fim_data fim_eod_token=<|endoftext|> fim_fragment_rate= fim_middle_token=<fim_middle>
        fim_no_prefix= fim_pad_token=<fim_pad> fim_prefix_token=<fim_prefix> fim_rate=0.5
        fim_split_sample= fim_spm_rate=0.5 fim_suffix_token=<fim_suffix>
    """,
    "logits are neither saved nor loaded here: a model learns from its tokens alone": """
        logits_load_decode_threads=4 logits_load_dir= logits_load_ignore_errors
        logits_load_kd_loss_alpha=1.0 logits_load_msc_prefetch_depth=2
        logits_load_prefetch_factor=3 logits_save_dir= logits_save_dtype=fp16 logits_save_top_k=
        logits_save_top_p= logits_save_top_p_min_k=1
    """,
    (
        "all tokens of the batch are predicted alike and all layers trained: no supervised "
        "fine-tuning (SFT), no reinforcement learning (RL), no layers that freeze"
    ): "freeze_all_layers perform_rl_step sft sft_tokenizer_prompt_format=nemotron-h-aligned",
    "the data loader here shuffles samples in each epoch, which all replicas share": """
        dataloader_inter_document_masking dataloader_type=single no_data_sharding
    """,
    (
        "no iterations are skipped: leave it out, or begin a run behind them by train.branch_from"
    ): "iterations_to_skip*",
    "there is one set for validation, which data.held_out takes from the training data": """
        multiple_validation_sets validation_set_names*
    """,
    (
        "it adds tokens to the vocabulary: leave it out, and give a tokenizer.json that has "
        "them (data.tokenizer) or the number of all tokens (model.vocab)"
    ): "tokenizer_special_tokens* vocab_extra_ids=0",
    "give the YAML file itself to megaprec import-args": "yaml_cfg=",
    (
        "a run is described by its run file: write the model out, or give train.init_from to "
        "take it from a checkpoint"
    ): """
        ckpt_step= load_main_params_from_ckpt override_ckpt_iteration= use_checkpoint_args
        use_mp_args_from_checkpoint_args
    """,
    (
        "the schedule of the learning rate is that of the run file, and a run that resumes goes on "
        "with its own: leave it out if no other checkpoint is loaded"
    ): "use_checkpoint_lr_scheduler use_checkpoint_opt_param_scheduler",
    "a run ends after train.steps; a signal stops it earlier, with its state saved": """
        skip_train
    """,
}
# Subjects that change no number of a run: what their arguments begin with, behind `no_` and
# `disable_`.
_SUBJECTS = """
adlr_ app_tag_ async_ bert_ biencoder_ cuda_graph_ dino_ dist_ckpt_ dsa_ error_injection_
exit_signal_ fault_injector_ flight_recorder_ fsdp_ grpo_ gtp_ ict_ inference_ inprocess_ langrl_
mamba_inference_ megatron_fsdp_ moe_hybridep_ moe_paged_stash moe_routing_trace_ muon_
non_persistent_ null_tokenizer_ one_logger_ otel_ profile_ pytorch_profiler_ retriever_ rl_
straggler_ tiktoken_ tokenizer_hf_ tp_comm_ vision_
"""
_UNUSED = """
activation_offload_fraction= allow_ambiguous_pad_tokens apply_query_key_layer_scaling
attention_backend= attention_softmax_in_fp32 auto_detect_ckpt_format batch_invariant_backend=
batch_invariant_mode block_data_path= cache_mla_latents calc_ft_timeouts calculate_per_token_loss
chat_template= check_for_large_grads checkpoint_num_layers= check_for_spiky_loss
check_weight_hash_across_dp_replicas_interval= ckpt_assume_constant_structure ckpt_convert_format=
ckpt_convert_save= ckpt_convert_update_legacy_dist_opt_format ckpt_drop_redundant_extra_state
ckpt_format= ckpt_fully_parallel_load ckpt_fully_parallel_load_exchange_algo=
ckpt_fully_parallel_load_per_rank_objects ckpt_fully_parallel_load_process_group=
ckpt_fully_parallel_save ckpt_fully_parallel_save_process_group= ckpt_pg_tensors_cache_create
ckpt_pg_tensors_cache_path= classes_fraction= config_logger_dir=
cpu_offloading_retain_pinned_cpu_buffers create_all_gather_group cross_entropy_fusion_impl=
cross_entropy_loss_fusion data_cache_path= data_impl=
data_per_class_fraction= dataloader_defer_npy_index_mmap dataloader_fast_cache_load
ddp_average_in_collective DDP_impl= ddp_num_buckets= ddp_pad_buckets_for_high_nccl_busbw
ddp_reduce_scatter_with_fp32_accumulation decode_only_cuda_graphs decoder_seq_length=
defer_embedding_wgrad_compute delay_offload_until_cuda_graph delay_param_gather
delay_wgrad_compute delta_offload_bytes_across_pp_ranks= disable_bf16_reduced_precision_matmul
disable_chunked_prefill disable_gloo_process_groups disable_jit_fuser disable_mamba_mem_eff_path
disable_msc disable_symmetric_registration distrib_optim_fully_reshardable_mem_efficient
distribute_checkpointed_activations distribute_saved_activations distributed_backend=
distributed_timeout_minutes= distributed_timeout_seconds_after_init=
dump_param_to_param_group_map= embedding_path= empty_unused_memory_level= enable_chunked_prefill
enable_cuda_graph enable_experimental enable_ft_package enable_full_sharding_in_hsdp enable_msc
ep_overlap_early_attn_memory_release eval_global_batch_size= eval_micro_batch_size=
evidence_data_path= exit_duration_in_mins= exit_interval= exit_on_missing_checkpoint exit_signal=
external_cuda_graph fake_process_group fine_grained_offloading_max_inflight_offloads=
flash_attention_version= flash_decode fp8_interval= ft_num_warmup_iters= full_validation
fused_residual_rmsnorm gpu_sniff_test_interval= high_priority_a2a_comm_stream
high_priority_stream_groups* img_dim= img_h= img_w= indexer_batch_size= indexer_log_interval=
init_model_with_meta_device iter_per_epoch= keep_fp8_transpose_cache
keep_fp8_transpose_cache_when_using_custom_fsdp lazy_mpu_init legacy_tokenizer local_rank=
log_batch_size_to_tensorboard log_device_memory_used log_energy log_max_attention_logit
log_memory_interval= log_memory_to_tensorboard log_num_zeros_in_grad log_params_norm log_progress
log_straggler log_throughput log_timers_to_tensorboard log_validation_ppl_to_tensorboard
log_world_size_to_tensorboard logging_level= make_vocab_size_divisible_by= manual_gc
manual_gc_interval= mask_factor= mask_prob= mask_type= max_seqlen_per_dp_cp_rank=
max_tokens_to_oom= memory_snapshot_path= merge_file=
microbatch_group_size_per_virtual_pipeline_stage= mid_level_dataset_surplus=
min_offloaded_tensor_size= mla_down_proj_fusion mlp_chunks_for_prefill= mlp_chunks_for_training=
mmap_warmup moe_combine_bwd_dtype= moe_deepep_num_sms= moe_dispatch_fwd_dtype= moe_enable_deepep
moe_extended_tp moe_flex_dispatcher_backend= moe_flex_dispatcher_num_sms= moe_layer_recompute
moe_mlp_glu_interleave_size= moe_ncclep_zero_copy moe_pad_experts_for_cuda_graph_inference
moe_per_layer_logging moe_permute_fusion moe_permute_fusion_into_hybridep moe_router_dtype=
moe_router_fusion moe_router_padding_for_fp8 moe_router_padding_for_quantization
moe_shared_expert_glu_interleave_size= moe_shared_expert_overlap moe_single_grouped_bias
moe_single_grouped_weight moe_token_dispatcher_type= moe_token_drop_policy=
moe_upcycling_granularity= moe_use_grouped_tensor moe_use_legacy_grouped_gemm mrope_section*
nccl_all_reduce_for_prefill nccl_communicator_config_path= no_align_grad_reduce
no_align_param_gather no_barrier_with_level_1_timing no_bias_dropout_fusion no_bias_swiglu_fusion
no_ckpt_fully_parallel_save no_ckpt_load_validate_sharding_integrity
no_clone_scatter_output_in_embedding no_create_attention_mask_in_dataloader no_delay_grad_reduce
no_gradient_accumulation_fusion no_gradient_reduce_div_fusion no_load_rng
no_log_learnig_rate_to_tensorboard no_log_loss_scale_to_tensorboard no_manual_gc_eval
no_masked_softmax_fusion no_mmap_bin_files no_one_logger no_overlap_p2p_communication
no_pad_vocab_size no_persist_layer_norm no_pin_cpu_grads no_pin_cpu_params
no_query_key_layer_scaling no_rope_fusion no_save_optim no_save_rng no_save_tokenizer_assets
no_scatter_gather_tensors_in_pipeline no_strict_fsdp_dtensor_load
no_tokenizer_sentencepiece_ignore_extra_whitespaces no_use_layer_wise_param_layout
no_use_tokenizer_model_from_checkpoint_args num_channels= num_classes=
num_dataset_builder_threads= num_speculative_tokens= num_workers= nvtx_ranges
object_storage_cache_path= offload_modules* optimizer_cuda_graph
outer_dp_sharding_strategy= output_bert_embeddings overlap_cpu_optimizer_d2h_h2d
overlap_dispatch_backward_with_experts_wgrad overlap_moe_expert_parallel_comm
overlap_p2p_communication_warmup_flush overlap_param_gather_with_optimizer_step
override_lr_scheduler override_opt_param_scheduler patch_dim= per_dataset_sequences_path=
pipeline_model_parallel_comm_backend= profile query_in_block_prob= record_memory_history
record_shapes refit_method= relative_attention_max_distance= relative_attention_num_buckets=
replication replication_factor= replication_jump= rerun_mode= result_rejected_tracker_filename=
reuse_grad_buf_for_mxfp8_param_ag run_workload_inspector_server s3_cache_path= sample_rate=
save_activations_interval= save_dgrads_interval= save_params_interval=
save_tokens_per_expert_interval= save_wgrads_interval= sharp_enabled_group= short_seq_prob=
start_eval_at_iter= suggested_communication_unit_size= swin_backbone_type= symmetric_ar_type=
te_rng_tracker tensorboard_log_interval= tensorboard_queue_size= test_mode timing_log_level=
timing_log_option= titles_data_path= tokenizer_metadata= tokenizer_sentencepiece_legacy
train_sync_interval= transformer_impl= trust_remote_code
test_data_path* valid_data_path*
use_contiguous_buffers_in_ddp use_cpu_initialization use_dist_ckpt use_flash_attn
use_fused_weighted_squared_relu use_gigatoken use_grouped_gemm_for_dense_mlp
use_grouped_gemm_for_shared_expert use_legacy_static_engine use_mcore_models use_nccl_ub
use_one_sent_docs use_persistent_ckpt_worker use_pytorch_profiler use_ring_exchange_p2p
use_same_sampling_seed_across_dp_ranks use_sharp use_torch_optimizer_for_cpu_offload
use_tp_pp_dp_mapping use_transformer_engine_op_fuser verify_integrity vocab_file= wandb_entity=
wandb_exp_name= wandb_save_dir= wgrad_deferral_limit=
"""

# Arguments of other programs that go on from Megatron-LM, and of Megatron-LM before version 2.5,
# which are read: rows as above.
_READ_OF_OTHERS = """
num_microbatches_in_minibatch              size=1                 train.global_batch
attention_head_type                        multihead|multiquery   model.kv_heads
no_scaled_init                             switch                 model.init
pp_partition_method                        text                   parallel.cuts
"""
# Names of other programs that change no number of a run either.
_OF_OTHERS = """
abort_on_unmet_fused_kernel_constraints apply_rope_fusion barrier_with_L1_time batch_p2p_comm
batch_p2p_sync disable_last_saving enable_primus_turbo log_avg_reset_interval=
log_avg_skip_iterations= cpu_offloading_activations enable_one_logger
activations_checkpoint_granularity= activations_checkpoint_method=
activations_checkpoint_num_layers= codecarbon_dir=
kill_switch_path= pad_vocab_size_to= structured_logs structured_logs_dir=
stderr_sink_level= sync_tp_duplicated_parameters tokenizer_file= tokenizer_name_or_path=
tokenizer_path= train_weighted_split_paths_path=
use_fused_rmsnorm use_fused_rotary_pos_emb use_fused_swiglu use_mpi
valid_num_workers= valid_weighted_split_paths_path= wandb_entity_name= wandb_project_name=
"""

_SIGNS: Mapping[str, Form] = {"": "flag", "=": "value", "*": "values"}
_FLAGS = {"switch": True, "off": False}
NUMBERS: Mapping[str, type] = {"size": int, "count": int, "int": int, "number": float}
"""The types of the kinds that are numbers."""


@dataclass(frozen=True)
class Argument:
    """An argument that is read: a row of the table.

    name: as it is typed. kept: the name under which Megatron-LM's parser keeps the value. default:
    what it keeps if nothing is given; a tuple if there may be several values.
    keys: of a run file. choices: the words that may be given. foreign: those no model here has.
    """

    name: str
    kept: str
    kind: str
    form: Form
    default: Any
    keys: tuple[str, ...]
    choices: tuple[str, ...]
    foreign: tuple[str, ...]

    @property
    def sets(self) -> bool:
        """Return what a flag sets."""
        return _FLAGS[self.kind]


@dataclass(frozen=True)
class Refused:
    """An argument that is refused. permitted: the value that may be given; None: there is none."""

    form: Form
    permitted: str | None
    why: str


def _argument(row: str) -> Argument:
    """Return the argument that a row of the tables above describes: its name, its kind with the
    default, and the keys of a run file."""
    names, described, *keys = row.split()
    name, _, kept = names.partition(">")
    kept = kept or name
    form: Form = "values" if "*" in described else "value"
    kind, _, text = described.replace("*", "").partition("=")
    flag = kind.rstrip("?")
    if flag in _FLAGS:
        default = None if kind.endswith("?") else not _FLAGS[flag]
        return Argument(name, kept, flag, "flag", default, tuple(keys), choices=(), foreign=())
    choices = tuple[str, ...]()
    foreign = tuple[str, ...]()
    default: Any = NUMBERS.get(kind, str)(text) if text else None
    if "|" in kind:
        words = kind.split("|")
        choices = tuple(word.strip("()") for word in words if word)
        foreign = tuple(word.strip("()") for word in words if word.startswith("("))
        default = words[0] or None
        kind = "text"
    if form == "values" and default is not None:
        default = (default,)
    return Argument(name, kept, kind, form, default, tuple(keys), choices, foreign)


def _shapes(names: str) -> Iterator[tuple[str, Form, str | None]]:
    """Yield name, form and permitted value of the words of a table."""
    for name, sign, permitted in re.findall(r"(\w+)([=*]?)(\S*)", names):
        yield name, _SIGNS[sign], permitted or None


_ROWS = [_argument(row) for row in _READ.replace("\n    ", " ").strip().splitlines()]
READ: Mapping[str, Argument] = {row.name: row for row in _ROWS}
"""The arguments that are read, by the name that is typed."""
READ_OF_OTHERS: Mapping[str, Argument] = {
    row.name: row for row in map(_argument, _READ_OF_OTHERS.strip().splitlines())
}
"""Arguments that Megatron-LM does not have, or no longer, and that are read too."""
DEFAULTS: Mapping[str, Any] = {
    row.kept: row.default for row in reversed([*_ROWS, *READ_OF_OTHERS.values()])
}
"""Megatron-LM's defaults, by the name under which its parser keeps a value."""
REFUSED: Mapping[str, Refused] = {
    name: Refused(form, permitted, why)
    for why, names in _REFUSED.items()
    for name, form, permitted in _shapes(names)
}
ANOTHER_MODEL = frozenset(name for name, _, _ in _shapes(_ANOTHER_MODEL))
"""Those of the refused arguments that make another model of a checkpoint."""
UNUSED_SUBJECTS = tuple(_SUBJECTS.split())
"""What the names of arguments begin with that are not used here, whatever follows."""
UNUSED_FORMS: Mapping[str, Form] = {name: form for name, form, _ in _shapes(_UNUSED)}
"""The forms of further arguments that are not used here, for they change no number of a run."""
UNUSED = frozenset(UNUSED_FORMS)
OF_OTHERS: Mapping[str, Form] = {name: form for name, form, _ in _shapes(_OF_OTHERS)}
"""The forms of arguments of programs that go on from Megatron-LM, which are not used here."""


def is_unused(name: str) -> bool:
    """Return True for an argument that is not used here."""
    if name in READ:  # also one of a subject whose others change nothing
        return False
    if name in OF_OTHERS:
        return True
    subject = name.removeprefix("no_").removeprefix("disable_")
    other_name = name.replace("disable_", "no_", 1)
    return subject.startswith(UNUSED_SUBJECTS) or name in UNUSED or other_name in UNUSED


def form_of(name: str) -> Form | None:
    """Return the form of an argument; None if Megatron-LM has none of this name. One that is not
    used may have any."""
    if is_unused(name):
        return "values"
    known = READ.get(name) or READ_OF_OTHERS.get(name) or REFUSED.get(name)
    return known.form if known else None


def option(name: str) -> str:
    """Return an argument as it is typed."""
    return f"--{name.replace('_', '-')}"
