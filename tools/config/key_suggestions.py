"""Suggestions for unknown keys of a run file.

Users of other trainers try the names that they know, and the letters of `lr` are far from `lr.peak`. A name from the
settings of Megatron-LM, Hugging Face or DeepSpeed is therefore answered with the key that has its meaning, and any
other unknown key with the known key that is spelled most like it.
"""

import difflib
from collections.abc import Collection, Iterator, Mapping

from megaprec.errors import did_you_mean
from tools.console.toml import Given, toml

ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "model.layers": ("num_layers", "num_hidden_layers", "n_layer"),
    "model.hidden": ("hidden_size", "n_embd", "d_model"),
    "model.heads": ("num_attention_heads", "n_head"),
    "model.kv_heads": ("num_query_groups", "num_key_value_heads"),
    "model.ffn": ("ffn_hidden_size", "intermediate_size"),
    "model.max_positions": ("max_position_embeddings",),
    "model.rope_base": ("rope_theta", "rotary_base"),
    "model.rotary_fraction": ("rotary_percent",),
    "model.tied": ("tie_word_embeddings",),
    "model.experts": ("num_experts", "num_local_experts"),
    "model.experts_per_token": ("moe_router_topk", "num_experts_per_tok"),
    "model.router_aux_loss": ("moe_aux_loss_coeff", "router_aux_loss_coef"),
    "model.router_z_loss": ("moe_z_loss_coeff",),
    "model.init_std": ("init_method_std", "initializer_range"),
    "data.source": ("data_path", "dataset", "train_data"),
    "data.tokenizer": ("tokenizer_model", "tokenizer_path"),
    "parallel.tensor": ("tensor_model_parallel_size", "tensor_parallel_size", "tensor_parallel_degree", "tp"),
    "parallel.pipeline": ("pipeline_model_parallel_size", "pipeline_parallel_size", "pipeline_parallel_degree", "pp"),
    "parallel.data": ("data_parallel_size", "data_parallel_degree", "dp"),
    "parallel.sequence": ("sequence_parallel", "sequence_parallel_enabled"),
    "parallel.chunks": ("virtual_pipeline_model_parallel_size", "num_model_chunks"),
    "parallel.recompute": ("recompute_granularity", "gradient_checkpointing", "activation_checkpointing"),
    "parallel.zero": ("use_distributed_optimizer", "zero_stage", "zero_optimization"),
    "parallel.overlap": ("overlap_grad_reduce", "overlap_param_gather", "overlap_comm"),
    "parallel.bucket": ("reduce_bucket_size", "ddp_bucket_size"),
    "precision.compute": ("bf16", "fp16", "dtype", "mixed_precision"),
    "precision.gradients": ("grad_dtype", "accumulate_allreduce_grads_in_fp32"),
    "precision.reduce": ("reduce_dtype", "grad_reduce_in_fp32"),
    "precision.initial_scale": ("initial_loss_scale", "init_scale", "initial_scale_power"),
    "precision.min_scale": ("min_loss_scale",),
    "precision.growth_interval": ("loss_scale_window",),
    "fp8.kind": ("recipe", "fp8_recipe"),
    "fp8.format": ("fp8_format",),
    "fp8.margin": ("fp8_margin",),
    "fp8.history_length": ("fp8_amax_history_len", "amax_history_len"),
    "fp8.amax_algo": ("fp8_amax_compute_algo", "amax_compute_algo"),
    "fp8.parameters": ("fp8_params", "fp8_param_gather"),
    "optimizer.betas": ("adam_beta1", "adam_beta2"),
    "optimizer.eps": ("adam_eps", "adam_epsilon"),
    "optimizer.clip": ("clip_grad", "gradient_clipping", "max_grad_norm", "grad_clip"),
    "lr.peak": ("lr", "learning_rate", "max_lr"),
    "lr.final": ("min_lr",),
    "lr.warmup": ("lr_warmup_iters", "lr_warmup_steps", "warmup_steps", "warmup_iters"),
    "lr.decay": ("lr_decay_iters", "lr_decay_steps"),
    "lr.schedule": ("lr_decay_style", "lr_scheduler_type"),
    "train.steps": ("train_iters", "max_steps", "max_iters", "num_steps"),
    "train.micro_batch": ("micro_batch_size", "per_device_train_batch_size", "train_micro_batch_size_per_gpu"),
    "train.global_batch": ("global_batch_size", "train_batch_size", "batch_size"),
    "train.seq_length": ("max_seq_len", "block_size", "context_length"),
    "train.folder": ("save", "output_dir"),
    "train.eval_every": ("eval_interval", "eval_steps"),
    "train.eval_batches": ("eval_iters",),
    "checkpoint.every": ("save_interval", "save_steps"),
    "checkpoint.keep": ("save_total_limit",),
    "checkpoint.resume": ("load", "resume_from_checkpoint"),
    "log.every": ("log_interval", "logging_steps"),
    "log.to": ("tensorboard", "tensorboard_dir", "wandb", "wandb_project", "report_to", "loggers"),
}
"""Our keys, and the words for them elsewhere."""


def unknown(given: Mapping[str, Given], known: Collection[str]) -> Iterator[str]:
    """Yield one line for each unknown key, and a single line for all keys of an unknown table.

    known: all keys, as "table.name"; of two that are equally similar, the first is suggested.
    """
    tables, reported = dict.fromkeys(key.partition(".")[0] for key in known), set[str]()
    for key, entry in given.items():
        table, dot, name = key.partition(".")
        if not dot and table in tables:
            hint = f"a table, not a key; give keys of it, as {_of(table, known)[0]}"
            yield f"{key} = {toml(entry.value)} ({entry.origin}): {hint}"
        elif dot and table not in tables:
            if table not in reported:
                yield f"[{table}] ({entry.origin}): no such table{did_you_mean(table, tables, '[{}]')}"
            reported.add(table)
        elif key not in known:
            yield f"{key} = {toml(entry.value)} ({entry.origin}): no such key{_meant(table, name or key, known)}"


def _of(table: str, known: Collection[str]) -> list[str]:
    return [key for key in known if key.startswith(f"{table}.")]


def _meant(table: str, name: str, known: Collection[str]) -> str:
    """Return a hint at the key that `name` means elsewhere, otherwise at the most similar key, preferably of
    `table`.
    """
    word = name.partition(".")[0]
    keys = {key.partition(".")[2]: key for key in (*known, *_of(table, known))}
    means = {there: key for key, words in ELSEWHERE.items() for there in words} | keys
    if word not in means:
        close = difflib.get_close_matches(word, keys, n=1)
        return f"; did you mean {keys[close[0]]}?" if close else ""
    return f"; did you mean {means[word]}?"
