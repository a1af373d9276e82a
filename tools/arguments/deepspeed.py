"""Keys of DeepSpeed's JSON: those that are read, those that are refused, and those without a
meaning here.

The names and defaults are those of deepspeed/runtime/config.py, precision_config.py, constants.py
and zero/config.py, of version 0.19.6 (August 2026). A key of a table within a table is written with
dots; the name of a table stands for all its keys.
"""

from collections.abc import Mapping
from typing import Any

READ: Mapping[str, tuple[str, ...]] = {
    "train_batch_size": ("train.global_batch",),
    "train_micro_batch_size_per_gpu": ("train.micro_batch",),
    "gradient_accumulation_steps": ("train.global_batch",),
    "gradient_clipping": ("optimizer.clip",),
    "steps_per_print": ("log.every",),
    "communication_data_type": ("precision.reduce",),
    "data_types.grad_accum_dtype": ("precision.gradients",),
    "fp16.enabled": ("precision.compute",),
    "fp16.loss_scale": ("precision.loss_scale",),
    "fp16.initial_scale_power": ("precision.initial_scale",),
    "fp16.loss_scale_window": ("precision.growth_interval",),
    "fp16.hysteresis": ("precision.hysteresis",),
    "fp16.consecutive_hysteresis": ("precision.hysteresis_refill",),
    "fp16.min_loss_scale": ("precision.min_scale",),
    "bf16.enabled": ("precision.compute",),
    "bf16.check_grad_overflow": ("precision.on_nonfinite",),
    "bf16.bf16_master_weights_and_grads": ("precision.masters",),
    "bf16.bf16_optimizer_states": ("precision.moments",),
    "bfloat16.enabled": ("precision.compute",),
    "data_types.param_dtype": ("precision.compute",),
    "zero_optimization.stage": ("parallel.zero",),
    "zero_optimization.overlap_comm": ("parallel.overlap",),
    "zero_optimization.reduce_bucket_size": ("parallel.bucket",),
    "optimizer.type": ("optimizer.name",),
    "optimizer.params.lr": ("lr.peak",),
    "optimizer.params.betas": ("optimizer.betas",),
    "optimizer.params.eps": ("optimizer.eps",),
    "optimizer.params.weight_decay": ("optimizer.weight_decay",),
    "optimizer.params.momentum": ("optimizer.options",),
    "optimizer.params.torch_adam": ("optimizer.weight_decay",),
    "optimizer.params.adam_w_mode": ("optimizer.name",),
    "scheduler.type": ("lr.schedule",),
    "scheduler.params.warmup_num_steps": ("lr.warmup",),
    "scheduler.params.warmup_min_lr": ("lr.warmup",),
    "scheduler.params.warmup_max_lr": ("lr.peak",),
    "scheduler.params.warmup_type": ("lr.warmup",),
    "scheduler.params.total_num_steps": ("lr.length",),
    "scheduler.params.warmup_min_ratio": ("lr.warmup",),
    "scheduler.params.cos_min_ratio": ("lr.final",),
}
"""Keys that are read, and the keys of a run file that they become."""

REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "zero_optimization.offload_optimizer.device": (
        ("none", None),
        "nothing is offloaded here: remove it",
    ),
    "zero_optimization.offload_param.device": (
        ("none", None),
        "nothing is offloaded here: remove it",
    ),
    "zero_optimization.cpu_offload": ((False,), "nothing is offloaded here: remove it"),
    "zero_optimization.cpu_offload_param": ((False,), "nothing is offloaded here: remove it"),
    "zero_optimization.zero_quantized_weights": (
        (False,),
        "weights are not quantized for communication",
    ),
    "zero_optimization.zero_quantized_gradients": (
        (False,),
        "gradients are not quantized: precision.reduce",
    ),
    "zero_optimization.zeropp_loco_param": (
        (None,),
        "gradients are not quantized: precision.reduce",
    ),
    "zero_optimization.zenflow": ((None,), "all gradients of a step are applied in it"),
    "zero_optimization.mics_shard_size": (
        (-1,),
        "parallel.zero_size shards the optimizer's state over some replicas",
    ),
    "zero_optimization.zero_hpz_partition_size": (
        (1,),
        "weights are not sharded over replicas here",
    ),
    "fp16.auto_cast": ((False,), "the inputs of a model are token ids, which are not cast"),
    "fp16.fp16_master_weights_and_grads": ((False,), "master weights are FP32 here: remove it"),
    "data_types.buffer_dtype": ((None,), "remove it, and give precision.buffers beside the file"),
    "bf16.immediate_grad_update": (
        (False,),
        "gradients are accumulated after each micro-batch in any case",
    ),
    "amp.enabled": ((False,), "remove it, and give precision.compute=fp16 beside the file"),
    "optimizer.params.bias_correction": ((True,), "adamw always corrects its bias"),
    "optimizer.params.amsgrad": ((False,), "there is no amsgrad here"),
    "optimizer.params.nesterov": (
        (False,),
        "give optimizer.options = {momentum = ..., nesterov = true}",
    ),
    "optimizer.params.dampening": ((0,), "there is no dampening here"),
    "optimizer.params.max_grad_norm": ((0, 0.0), "gradient_clipping is the key for it"),
    "scheduler.params.last_batch_iteration": (
        (-1,),
        "a schedule begins with the run, or goes on from a checkpoint",
    ),
    "torch_autocast.enabled": (
        (False,),
        "remove it, and give precision.compute=bf16 beside the file",
    ),
    "fp32_allreduce": ((False,), "communication_data_type is the key for it"),
    "gradient_allreduce_op": (("mean",), "gradients are averaged over replicas here: remove it"),
    "managed_gradient_accumulation": (
        (True,),
        "an update follows all micro-batches of a step: remove it",
    ),
    "gradient_predivide_factor": ((1.0, 1), "gradients are divided once: remove it"),
    "prescale_gradients": ((False,), "gradients are divided once: remove it"),
    "sparse_gradients": ((False,), "the embedding's gradient is dense here"),
    "sparse_attention": ((), "attention is dense here, or has model.window"),
    "progressive_layer_drop.enabled": ((False,), "layers are not dropped here"),
    "curriculum_learning.enabled": (
        (False,),
        "the sequence length is constant here: train.seq_length",
    ),
    "data_efficiency.enabled": ((False,), "data is sampled uniformly here: data.blend has weights"),
    "compression_training": ((), "models are not compressed in training here"),
    "quantize_training": ((), "there is no such quantization here: [fp8]"),
    "quantize_training.enabled": ((False,), "there is no such quantization here: [fp8]"),
    "eigenvalue.enabled": ((False,), "there is no such quantization here: [fp8]"),
    "elasticity.enabled": (
        (False,),
        "parallel.elastic trains in the layout that fits, with a constant batch",
    ),
    "hybrid_engine.enabled": ((False,), "there is no engine for reinforcement learning here"),
    "pipeline": ((), "parallel.pipeline and parallel.cuts say how layers become stages"),
    "sequence_parallel_size": (
        (1,),
        "there is no sequence parallelism over replicas here: parallel.sequence",
    ),
    "expert_parallel.enabled": ((False,), "parallel.expert is the number of expert-parallel ranks"),
    "weight_quantization": ((), "there is no such quantization here: [fp8]"),
    "tensor_parallel": ((), "parallel.tensor is the number of tensor-parallel ranks"),
    "vocabulary_size": ((), "model.vocab is the key for it"),
}
"""Keys that are refused unless they have one of these values, and the way out."""

_ZERO = (
    "contiguous_gradients", "reduce_scatter", "use_multi_rank_bucket_allreduce", "allgather_partitions",
    "allgather_bucket_size", "load_from_fp32_weights", "elastic_checkpoint", "offload_param", "offload_optimizer",
    "sub_group_size", "cpu_offload_use_pin_memory", "stage3_prefetch_bucket_size", "prefetch_bucket_size",
    "stage3_param_persistence_threshold", "param_persistence_threshold", "stage3_model_persistence_threshold",
    "model_persistence_threshold", "stage3_max_live_parameters", "max_live_parameters", "stage3_max_reuse_distance",
    "max_reuse_distance", "stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save", "stage3_use_all_reduce_for_fetch_params",
    "use_all_reduce_for_fetch_params", "stage3_module_granularity_threshold", "module_granularity_threshold",
    "ignore_unused_parameters", "legacy_stage1", "round_robin_gradients", "zero_quantized_nontrainable_weights",
    "mics_hierarchical_params_gather", "memory_efficient_linear", "pipeline_loading_checkpoint",
    "allgather_sequential", "stage3_allgather_sequential", "save_muon_momentum_buffer_in_memory",
    "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks", "leaf_module",
)  # fmt: skip
TABLES = frozenset(
    key[:end] for key in (*READ, *REFUSED) for end, letter in enumerate(key) if letter == "."
)
"""Keys that hold further keys."""

_MEMORY = "it concerns communication and memory: the results are the same without it"
_LOGGING = (
    "it concerns logging: a run writes its own records and pictures to train.folder (docs/runs.md)"
)
_OFF = "it belongs to a table whose key `enabled` is refused"
IDLE: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *(f"zero_optimization.{key}" for key in _ZERO),
            "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "disable_allgather",
            "seq_parallel_comm_data_type", "seq_parallel_communication_data_type",
            "graph_harvesting", "aio", "nebula", "compile", "timers", "comms_config",
            "communication_data_size", "use_data_before_expert_parallelism", "dataloader_drop_last", "datastates_ckpt",
            "activation_checkpointing", "optimizer.legacy_fusion", "use_node_local_storage", "fp16.enable_overflow",
            "optimizer.params.fused", "optimizer.params.foreach",
        ),
        _MEMORY,
    ),
    **dict.fromkeys(
        (
            "log_level",
            "wall_clock_breakdown", "memory_breakdown", "dump_state", "tensorboard", "wandb", "csv_monitor", "comet",
            "comms_logger", "flops_profiler", "monitor_config", "autotuning",
        ),
        _LOGGING,
    ),
    **dict.fromkeys(("checkpoint", "load_universal_checkpoint"), "checkpoints load into any layout here"),
    **dict.fromkeys(
        (
            "amp", "progressive_layer_drop", "curriculum_learning", "data_efficiency", "eigenvalue", "elasticity",
            "hybrid_engine", "torch_autocast", "expert_parallel",
        ),
        _OFF,
    ),
}  # fmt: skip
"""Keys and tables without a meaning here, each with the reason."""


def idle(path: str) -> str:
    """Return the reason why a dotted key has no meaning here; "" if it has one or is not known."""
    parts = path.split(".")
    tables = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((IDLE[table] for table in tables if table in IDLE), "")


def is_deepspeeds(name: str) -> bool:
    """Return True if DeepSpeed's configuration has the key or the table at its top."""
    return any(key.partition(".")[0] == name for key in (*READ, *REFUSED, *IDLE))
