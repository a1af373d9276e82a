"""Arguments of Megatron-LM that are refused, each with what to do instead.

Their default is permitted. The names are those of its parser, megatron/training/arguments.py, from
version 2.5 to August 2026.
"""

from collections.abc import Mapping

from tools.arguments.forms import Shape, shapes

_GROUPS: tuple[tuple[str, str], ...] = (
    (
        "it makes another model than those of model.family",
        "apply_layernorm_1p apply_residual_connection_post_layernorm "
        "attention_output_gate decoder_num_layers= enable_mhc_connections "
        "experimental_attention_variant= "
        "gdp_cutedsl_kernel gdp_num_chunk_states_to_recompute=2 gdp_num_householder=3 "
        "heterogeneous_layers_config_encoded_json= heterogeneous_layers_config_path= "
        "hybrid_attention_ratio=0.0 "
        "hybrid_context_parallel hybrid_layer_pattern= hybrid_mlp_ratio=0.0 "
        "hybrid_override_pattern= is_hybrid_model "
        "linear_attention_freq= mhc_init_gating_factor=0.01 mhc_num_residual_streams=4 "
        "mhc_recompute_layer_num= "
        "mhc_sinkhorn_iterations=20 moe_apply_probs_on_input moe_enable_routing_replay "
        "moe_expert_capacity_factor= "
        "moe_expert_rank_capacity_factor= moe_input_jitter_eps= moe_latent_size= "
        "moe_pad_expert_input_to_capacity "
        "moe_router_force_biased= moe_router_force_load_balancing "
        "moe_router_quantile_balancing_ema=0.0 "
        "mtp_detach_heads "
        "mtp_hsm mtp_hybrid_override_pattern= mtp_standalone "
        "mtp_use_repeated_layer mup_attn_scale_power=1.0 mup_base_head_dim= "
        "mup_base_hidden_size= mup_embedding_mult=1.0 mup_output_mult=1.0 mup_width_mult=1.0 "
        "onnx_safe= openai_gelu "
        "qk_l2_norm retro_add_retriever retro_attention_gate=1 retro_cyclic_train_iters= "
        "retro_encoder_attention_dropout=0.1 retro_encoder_hidden_dropout=0.1 "
        "retro_encoder_layers=2 "
        "retro_no_verify_neighbor_count retro_num_neighbors=2 retro_num_retrieved_chunks=2 "
        "retro_project_dir= "
        "spec* squared_relu use_legacy_models use_mup",
    ),
    (
        "the ranks of parallel.context are one group here, in which keys and values go "
        "round, or are gathered: "
        "parallel.context_by",
        "hierarchical_context_parallel_sizes*",
    ),
    (
        "the batch of a run is constant: give --global-batch-size alone, or run in parts "
        "that resume with "
        "another train.global_batch and train.steps, all with lr.unit=samples and "
        "lr.length=N, the samples of the "
        "whole run",
        (
            "decrease_batch_size_if_needed phase_transition_iterations= rampup_batch_size* "
            "step_batch_size_schedule="
        ),
    ),
    (
        "weights are not sharded over replicas here: --use-distributed-optimizer "
        "(parallel.zero) shards the "
        "optimizer's state",
        "use_custom_fsdp use_megatron_fsdp use_torch_fsdp2",
    ),
    (
        "nothing is offloaded to the host here: parallel.zero, parallel.recompute and "
        "parallel.tensor lower "
        "the memory of a rank",
        "cpu_offloading_num_layers=0 fine_grained_activation_offloading optimizer_cpu_offload",
    ),
    (
        "write the layers of each stage as parallel.cuts",
        "encoder_pipeline_model_parallel_size=0 encoder_tensor_model_parallel_size=0 "
        "expert_tensor_parallel_num_weight_shards= pipeline_model_parallel_layout= "
        "pipeline_model_parallel_split_rank= standalone_embedding_stage "
        "tensor_parallel_num_weight_shards=",
    ),
    (
        "weight decay is constant here, and applied to parameters of two or more dimensions: "
        "optimizer.groups "
        "changes it by name",
        "apply_wd_to_qk_layernorm end_weight_decay= no_weight_decay_cond_type= start_weight_decay= "
        "weight_decay_incr_style=constant",
    ),
    (
        (
            "the learning rate is one schedule for all parameters: optimizer.groups has factors "
            "by name"
        ),
        "decoupled_lr= decoupled_min_lr= head_lr_mult=1.0 lr_warmup_init=0.0 qk_clip "
        "qk_clip_alpha=0.5 "
        "qk_clip_threshold=100",
    ),
    (
        "there is no such quantization here: [fp8] has the recipes that there are",
        "fp4_format= fp4_param_gather fp4_quantizer_factory= fp4_recipe=nvfp4 "
        "fp8_output_proj fp8_quantizer_factory= "
        "kitchen_attention_backend=sdpa te_precision_config_file= use_kitchen_attention",
    ),
    (
        "the loss is computed in FP32 from logits of precision.output",
        (
            "ddp_param_name_patterns_for_fp32_local_accumulation* fp16_lm_cross_entropy "
            "output_logit_dtype="
        ),
    ),
    (
        (
            "initial weights are normal, of model.init_std and model.init; train.init_from takes "
            "them from a checkpoint"
        ),
        "data_parallel_random_init init_method_xavier_uniform moe_use_upcycling no_initialization",
    ),
    (
        "training is next-token prediction with the mean over all tokens of the batch",
        "fim_data fim_eod_token=<|endoftext|> fim_fragment_rate= "
        "fim_middle_token=<fim_middle> fim_no_prefix= "
        "fim_pad_token=<fim_pad> fim_prefix_token=<fim_prefix> fim_rate=0.5 "
        "fim_split_sample= fim_spm_rate=0.5 "
        "fim_suffix_token=<fim_suffix> freeze_all_layers logits_load_decode_threads=4 "
        "logits_load_dir= "
        "logits_load_ignore_errors logits_load_kd_loss_alpha=1.0 logits_load_msc_prefetch_depth=2 "
        "logits_load_prefetch_factor=3 logits_save_dir= logits_save_dtype=fp16 "
        "logits_save_top_k= logits_save_top_p= "
        "logits_save_top_p_min_k=1 perform_rl_step sft "
        "sft_tokenizer_prompt_format=nemotron-h-aligned",
    ),
    (
        (
            "data.source or data.blend name the training data, and data.held_out what is held "
            "out of it"
        ),
        "data_args_path= dataloader_inter_document_masking dataloader_type=single "
        "iterations_to_skip* mock_data "
        "multiple_validation_sets no_data_sharding per_split_data_args_path= test_data_path* "
        "train_data_path* "
        "valid_data_path* validation_set_names*",
    ),
    (
        "it adds tokens to the vocabulary: leave it out, and give a tokenizer.json that has "
        "them (data.tokenizer) or "
        "the number of all tokens (model.vocab)",
        "tokenizer_special_tokens* vocab_extra_ids=0",
    ),
    (
        "give the YAML file itself to megaprec import-args",
        "yaml_cfg=",
    ),
    (
        (
            "a run is described by its run file: write the model out, or give train.init_from to "
            "take it from a checkpoint"
        ),
        "ckpt_step= load_main_params_from_ckpt override_ckpt_iteration= use_checkpoint_args "
        "use_checkpoint_lr_scheduler use_checkpoint_opt_param_scheduler "
        "use_mp_args_from_checkpoint_args",
    ),
    (
        "a run ends after train.steps; a signal stops it earlier, with its state saved",
        "skip_train",
    ),
    (
        "Megatron-LM itself refuses it: use --micro-batch-size, --lr-warmup-fraction, "
        "--tensor-model-parallel-size or --recompute-granularity",
        "batch_size= checkpoint_activations checkpoint_num_layers=1 model_parallel_size= warmup=",
    ),
)
SHAPES: Mapping[str, Shape] = {name: shape for _, names in _GROUPS for name, shape in shapes(names)}
"""The shapes of the refused arguments, with the values that are permitted."""
WHY: Mapping[str, str] = {name: why for why, names in _GROUPS for name, _ in shapes(names)}
"""The reasons and the ways out."""
