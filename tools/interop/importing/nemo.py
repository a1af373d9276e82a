"""The configuration of a pre-training with NeMo 1 (megatron_gpt_config.yaml, and those of NeMo's
launcher) as arguments of Megatron-LM, on which NeMo is built.

Names of settings have a dot between a table and what is in it. What a file does not say is NeMo's
default. Precision is not read here but as `megaprec precision show` reads it.
"""

import re
from collections.abc import Mapping
from typing import Any

from tools.interop.importing.renamed import NotKnown, Renamed

SYSTEM = "NeMo"
# names of NeMo: the argument of Megatron-LM with the same meaning, and NeMo's default
SAME: Mapping[str, tuple[str, Any]] = {
    "model.num_layers": ("num_layers", None),
    "model.hidden_size": ("hidden_size", None),
    "model.num_attention_heads": ("num_attention_heads", None),
    "model.kv_channels": ("kv_channels", None),
    "model.encoder_seq_length": ("seq_length", None),
    "model.max_position_embeddings": ("max_position_embeddings", None),
    "model.init_method_std": ("init_method_std", 0.02),
    "model.hidden_dropout": ("hidden_dropout", 0.1),
    "model.attention_dropout": ("attention_dropout", 0.1),
    "model.layernorm_epsilon": ("norm_epsilon", 1e-5),
    "model.rotary_percentage": ("rotary_percent", 1.0),
    "model.rotary_base": ("rotary_base", 10000),
    "model.tensor_model_parallel_size": ("tensor_model_parallel_size", 1),
    "model.pipeline_model_parallel_size": ("pipeline_model_parallel_size", 1),
    "model.virtual_pipeline_model_parallel_size": ("num_virtual_stages_per_pipeline_rank", None),
    "model.context_parallel_size": ("context_parallel_size", 1),
    "model.sequence_parallel": ("sequence_parallel", False),
    "model.micro_batch_size": ("micro_batch_size", None),
    "model.global_batch_size": ("global_batch_size", None),
    "model.rampup_batch_size": ("rampup_batch_size", None),
    "model.activations_checkpoint_granularity": ("recompute_granularity", None),
    "model.activations_checkpoint_method": ("recompute_method", None),
    "model.activations_checkpoint_num_layers": ("recompute_num_layers", None),
    "model.seed": ("seed", 1234),
    "model.qkv_bias": ("add_qkv_bias", False),
    "model.num_moe_experts": ("num_experts", None),
    "model.moe_router_topk": ("moe_router_topk", None),
    "model.moe_aux_loss_coeff": ("moe_aux_loss_coeff", None),
    "model.moe_router_load_balancing_type": ("moe_router_load_balancing_type", None),
    "model.expert_model_parallel_size": ("expert_model_parallel_size", 1),
    "model.data.splits_string": ("split", "900,50,50"),
    "model.data.eod_mask_loss": ("eod_mask_loss", False),
    "model.data.reset_position_ids": ("reset_position_ids", False),
    "model.data.reset_attention_mask": ("reset_attention_mask", False),
    "model.optim.lr": ("lr", None),
    "model.optim.eps": ("adam_eps", 1e-8),
    "trainer.max_steps": ("train_iters", None),
    "trainer.val_check_interval": ("eval_interval", None),
    "trainer.limit_val_batches": ("eval_iters", None),
    "trainer.log_every_n_steps": ("log_interval", 50),
    "trainer.gradient_clip_val": ("clip_grad", 0.0),
}
NORMS = {"layernorm": "LayerNorm", "layernorm1p": "LayerNorm", "rmsnorm": "RMSNorm"}
POSITIONS = {"learned_absolute": "learned_absolute", "rope": "rope", "none": "none"}
ACTIVATIONS = {
    "gelu": "gelu",
    "swiglu": "swiglu",
    "fast-swiglu": "swiglu",
    "squared-relu": "relu2",
}
# optimizers: whether they are sharded over the replicas
OPTIMIZERS = {
    "adamw": False,
    "fused_adam": False,
    "megatron_fused_adam": False,
    "distributed_fused_adam": True,
    "mcore_distributed_optim": True,
}
ONLY: Mapping[str, tuple[Any, ...]] = {
    "model.transformer_block_type": ("pre_ln",),
    "model.attention_type": ("multihead",),
    "model.headscale": (False,),
    "model.normalize_attention_scores": (True,),
    "model.ffn_dropout": (0.0, 0),
    "model.use_scaled_init_method": (True,),
    "model.do_layer_norm_weight_decay": (False,),
    "model.seq_len_interpolation_factor": (None,),
    "model.fsdp": (False,),
    "model.peft": (None,),
    "model.data.fim": (False,),
    "model.data.mock_dataset": (False,),
    "model.data.data_impl": ("mmap",),
    "model.data.dataloader_type": ("single",),
    "model.optim.sched.name": ("CosineAnnealing",),
    "restore_from_path": (None,),
    "trainer.accumulate_grad_batches": (1,),
}
_READ = """
model.window_size model.optim.sched exp_manager.explicit_log_dir
exp_manager.checkpoint_callback_params.every_n_train_steps model.activation model.bias
model.bias_activation_fusion model.bias_gelu_fusion model.data.data_prefix model.data.seq_length
model.ffn_hidden_size model.make_vocab_size_divisible_by model.normalization
model.num_query_groups model.openai_gelu model.optim.betas model.optim.name
model.optim.weight_decay
model.optim.sched.constant_steps model.optim.sched.min_lr model.optim.sched.warmup_ratio
model.optim.sched.warmup_steps model.position_embedding_type
model.share_embeddings_and_output_weights trainer.devices trainer.num_nodes
"""
# read with the precision
OF_PRECISION = re.compile(
    r"trainer\.(precision|plugins\..*)|model\.(precision|megatron_amp_O2|native_amp_.*|hysteresis"
    r"|fp8.*|fp32_residual_connection|grad_allreduce_chunk_size_mb|optim\.grad_sync_dtype"
    r"|fp16_lm_cross_entropy|optim\.(exp_avg|master).*)"
)
# where and how fast the same numbers are computed, what is logged, and the launcher's own
UNUSED = re.compile(
    r"name|defaults|hydra\..*|run\..*|cluster.*|exp_manager\..*|trainer\.(accelerator|logger"
    r"|enable_checkpointing|use_distributed_sampler|replace_sampler_ddp|max_epochs|max_time"
    r"|limit_test_batches|benchmark|enable_model_summary|num_sanity_val_steps)"
    r"|model\.(mcore_gpt|pre_process|post_process|persist_layer_norm|apply_query_key_layer_scaling"
    r"|use_cpu_initialization|onnx_safe|apex_transformer_log_level|gradient_as_bucket_view"
    r"|grad_div_ar_fusion|gradient_accumulation_fusion|sync_batch_comm|batch_p2p_comm"
    r"|overlap_p2p_comm|.*_fusion|transformer_engine|ub_tp_comm_overlap.*|use_flash_attention"
    r"|moe_token_dispatcher_type|moe_grouped_gemm|defer_embedding_wgrad_compute"
    r"|wgrad_deferral_limit|gc_interval|nsys_profile\..*|sharp|resume_from_checkpoint|tokenizer\..*|nccl_.*"
    r"|num_micro_batches_with_partial_activation_checkpoints|deterministic_mode|use_emha"
    r"|activations_checkpoint_layers_per_pipeline|layernorm_zero_centered_gamma|fsdp_.*"
    r"|reduce_amax|use_te_rng_tracker|tp_comm_.*|dist_ckpt_.*|pipeline_model_parallel_split_rank"
    r"|make_vocab_size_divisible_by|data\.(index_mapping_dir|skip_warmup|num_workers|shuffle_documents"
    r"|validation_drop_last|no_seqlen_plus_one_input_tokens|pad_samples_to_global_batch_size"
    r"|exchange_indices_distributed|delay_data_.*|legacy_dataset)"
    r"|optim\.(bucket_cap_mb|overlap_.*|contiguous_.*|sched\.max_steps))"
)
PRODUCT = re.compile(r"\$\{multiply: ?(\d{1,4}), ?\$\{([\w.]+)\}\}")
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
LARGEST = 1 << 40  # of a size that is computed with


def from_nemo(values: Mapping[str, Any], ranks: int | None) -> Renamed:
    """Return the arguments of Megatron-LM, and keys of a run file beside them. ranks: those of the
    user; the file says its own."""
    made = Renamed(SYSTEM, {name: _followed(name, value, values) for name, value in values.items()})
    known = (*SAME, *ONLY, *_READ.split())
    for name, value in [*made.values.items()]:
        if name in known or OF_PRECISION.fullmatch(name):
            continue
        if UNUSED.fullmatch(name):
            made.unused[name] = f"{name} = {value!r}"
            continue
        made.refuse_unknown_name(name, known)
    made.require_only(ONLY)
    made.rename(SAME)
    _add_ranks(made, ranks)
    _add_model(made)
    _add_optimizer(made)
    _add_rate(made)
    _add_data(made)
    return made


def _followed(name: str, value: Any, values: Mapping[str, Any]) -> Any:
    """Return a value; in place of a reference to another setting, or of a whole multiple of one,
    what that comes to. A value that stays open is returned as it is."""
    if not isinstance(value, NotKnown):
        return value
    table, _, _ = name.rpartition(".")
    product = PRODUCT.fullmatch(value.text)
    reference = REFERENCE.fullmatch(value.text)
    if product:
        target = product[2]
    elif reference:
        target = reference[1]
    else:
        return value
    # NeMo's launcher has the whole file as its table `training`
    target = target.removeprefix("training.")
    is_beside = target.startswith(".")  # in the same table
    referred = values.get(f"{table}{target}" if is_beside else target, value)
    if product is None:
        return referred
    is_small = type(referred) is int and referred < LARGEST
    return int(product[1]) * referred if is_small else value


def _add_ranks(made: Renamed, ranks: int | None) -> None:
    """Add the number of ranks that the file says its launcher starts."""
    devices = made.get("trainer.devices", None)
    nodes = made.get("trainer.num_nodes", 1)
    if ranks is None and type(devices) is int and type(nodes) is int and devices > 0:
        made.ranks = devices * nodes
    # where this run is kept need not be known
    folder = made.values.get("exp_manager.explicit_log_dir")
    if not isinstance(folder, str):
        folder = f"nemo_experiments/{made.values.get('exp_manager.name') or 'default'}"
    made.give("save", folder)
    every = made.get("exp_manager.checkpoint_callback_params.every_n_train_steps", None)
    every = every or made.get("trainer.val_check_interval", None)
    if type(every) is int and every > 0:
        made.give("save_interval", every)


def _add_model(made: Renamed) -> None:
    """Add norms, positions, heads, biases and the feed-forward."""
    norm = made.get("model.normalization", "layernorm")
    made.give("normalization", made.choice("model.normalization", "layernorm", NORMS))
    if norm == "layernorm1p":
        made.notes.append(
            "model.normalization = layernorm1p: it keeps the weight of a norm less 1, which "
            "computes the same; checkpoints have other values"
        )
    positions = "learned_absolute"
    made.give(
        "position_embedding_type",
        made.choice("model.position_embedding_type", positions, POSITIONS),
    )
    heads = made.whole("model.num_query_groups", None)
    if heads and heads != made.get("model.num_attention_heads", None):
        made.give("group_query_attention", True)
        made.give("num_query_groups", heads)
    made.give("disable_bias_linear", not made.get("model.bias", True))
    window = made.get("model.window_size", None)
    if window is not None:
        words = window if isinstance(window, list) else [window]
        made.give("window_size", ",".join(map(str, words)))
    shared = made.get("model.share_embeddings_and_output_weights", True)
    made.give("untie_embeddings_and_output_weights", not shared)
    made.give("ffn_hidden_size", made.whole("model.ffn_hidden_size", None))
    kind = made.choice("model.activation", "gelu", ACTIVATIONS)
    if kind == "swiglu":
        made.give("swiglu", True)
    elif kind == "relu2":
        made.give("squared_relu", True)
    elif kind == "gelu":
        # the fused kernel and OpenAI's are the tanh approximation
        fused = made.get("model.bias_activation_fusion", made.get("model.bias_gelu_fusion", True))
        is_tanh = fused or made.get("model.openai_gelu", False)
        made.keys["model.mlp"] = "gelu" if is_tanh else "gelu_exact"


def _add_optimizer(made: Renamed) -> None:
    """Add Adam's betas, and whether its state is sharded over the replicas."""
    is_sharded = made.choice("model.optim.name", "fused_adam", OPTIMIZERS)
    if is_sharded:
        made.give("use_distributed_optimizer", True)
    # torch's own AdamW decays by itself
    usual = 0.01 if made.values.get("model.optim.name") == "adamw" else 0.0
    made.give("weight_decay", made.get("model.optim.weight_decay", usual))
    betas = made.get("model.optim.betas", [0.9, 0.999])
    if isinstance(betas, list) and len(betas) == 2:
        made.give("adam_beta1", betas[0])
        made.give("adam_beta2", betas[1])
    else:
        made.refuse("model.optim.betas", "give two numbers")


def _add_rate(made: Renamed) -> None:
    """Add NeMo's CosineAnnealing, which ends with constant_steps at the least rate. Without them
    the first step of its warm-up has the rate peak / (warmup + 1), otherwise 0. Without a schedule
    the rate is constant."""
    if not any(name.startswith("model.optim.sched.") for name in made.values):
        made.give("lr_decay_style", "constant")
        return
    steps = made.whole("trainer.max_steps", None)
    constant = made.whole("model.optim.sched.constant_steps", 0) or 0
    warmup = _warmup_steps(made, steps or 0)
    peak = made.number("model.optim.lr", None)
    made.give("lr_decay_style", "cosine")
    made.give("min_lr", made.get("model.optim.sched.min_lr", 0.0))
    made.give("lr_warmup_iters", warmup)
    if constant and steps:
        if constant + warmup >= steps:
            made.refuse("model.optim.sched.constant_steps", "they leave no step for the decay")
            return
        made.give("lr_decay_iters", steps - constant)
    elif warmup and peak:
        made.give("lr_warmup_init", peak / (warmup + 1))


def _warmup_steps(made: Renamed, steps: int) -> int:
    """Return the steps of the warm-up, which may be given as a fraction of those of the run, or add
    a problem. steps: of the run; 0: not known."""
    warmup = made.whole("model.optim.sched.warmup_steps", None)
    ratio = made.number("model.optim.sched.warmup_ratio", None)
    if ratio is None:
        return warmup or 0
    if not 0 <= ratio < 1:
        made.refuse("model.optim.sched.warmup_ratio", "give a fraction of the run below 1")
        return 0
    if warmup is not None:
        made.refuse("model.optim.sched.warmup_ratio", "give it or model.optim.sched.warmup_steps")
    return int(ratio * steps)


def _add_data(made: Renamed) -> None:
    """Add the texts with their weights, and the vocabulary."""
    prefix = made.values.get("model.data.data_prefix")
    if isinstance(prefix, list) and prefix:
        made.give("data_path", [str(word) for word in prefix])
    else:
        why = "model.data.data_prefix is no list of weights and prefixes: give data.source=PREFIX"
        made.ask("data.source", why)
    length = made.get("model.data.seq_length", None)
    if length is not None and length != made.get("model.encoder_seq_length", None):
        made.refuse("model.data.seq_length", "it is another than model.encoder_seq_length")
    multiple = made.get("model.make_vocab_size_divisible_by", 128)
    made.ask(
        "model.vocab",
        "the vocabulary is not in the file, but in the tokenizer's, padded to a multiple of "
        f"{multiple} x tensor ranks: give model.vocab=N",
    )
