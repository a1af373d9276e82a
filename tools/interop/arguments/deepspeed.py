"""Keys of DeepSpeed's JSON: those that are read, those that are refused, and those that are not
used here.

The names and defaults are those of deepspeed/runtime/config.py, precision_config.py, constants.py
and zero/config.py, of version 0.19.6 (August 2026). A key of a table within a table is written with
dots; the name of a table stands for all its keys.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

# key, kind of its value, the keys of a run file that it becomes
_READ = """
train_batch_size                             whole   train.global_batch
train_micro_batch_size_per_gpu               whole   train.micro_batch
gradient_accumulation_steps                  whole   train.global_batch
gradient_clipping                            number  optimizer.clip
steps_per_print                              whole   log.every
communication_data_type                      text    precision.reduce
data_types.grad_accum_dtype                  text    precision.gradients
fp16.enabled                                 bool    precision.compute
fp16.loss_scale                              number  precision.loss_scale
fp16.initial_scale_power                     whole   precision.initial_scale
fp16.loss_scale_window                       whole   precision.growth_interval
fp16.hysteresis                              whole   precision.hysteresis
fp16.min_loss_scale                          number  precision.min_scale
bf16.enabled                                 bool    precision.compute
zero_optimization.stage                      whole   parallel.zero
zero_optimization.overlap_comm               bool    parallel.overlap
zero_optimization.reduce_bucket_size         number  parallel.bucket
zero_optimization.mics_shard_size            whole   parallel.zero_size
zero_optimization.offload_optimizer.device   text    optimizer.offload
zero_optimization.cpu_offload                bool    optimizer.offload
optimizer.type                               text    optimizer.name
optimizer.params.lr                          number  lr.peak
optimizer.params.betas                       list    optimizer.betas
optimizer.params.eps                         number  optimizer.eps
optimizer.params.weight_decay                number  optimizer.weight_decay
optimizer.params.momentum                    number  optimizer.options
scheduler.type                               text    lr.schedule
scheduler.params.warmup_num_steps            whole   lr.warmup
scheduler.params.warmup_max_lr               number  lr.peak
scheduler.params.warmup_min_lr               number  lr.initial lr.final
scheduler.params.warmup_type                 text    lr.warmup
scheduler.params.total_num_steps             whole   lr.length
"""
# The way out, and the keys that are refused, each with its default as JSON, which is permitted.
_REFUSED = {
    (
        "weights stay on the device here: remove it; offload_optimizer becomes optimizer.offload, "
        "and parallel.zero=3 shards weights"
    ): """
        zero_optimization.offload_param.device="none" zero_optimization.cpu_offload_param=false
    """,
    "weights are not quantized for communication": """
        zero_optimization.zero_quantized_weights=false
    """,
    "gradients are not quantized: precision.reduce": """
        zero_optimization.zero_quantized_gradients=false
        zero_optimization.zeropp_loco_param=null
    """,
    "all gradients of a step are applied in it": "zero_optimization.zenflow=null",
    "weights have no second copy here: parallel.zero_size=N shards them over N ranks": """
        zero_optimization.zero_hpz_partition_size=1
    """,
    "the inputs of a model are token ids, which are not cast": "fp16.auto_cast=false",
    "master weights are FP32 here: remove it": "fp16.fp16_master_weights_and_grads=false",
    "give precision.masters=none beside the file": """
        bf16.bf16_master_weights_and_grads=false
    """,
    "give precision.moments=bf16 beside the file": """
        bf16.bf16_optimizer_states=false
    """,
    "give precision.on_nonfinite beside the file": """
        bf16.check_grad_overflow=true
    """,
    "give precision.hysteresis_refill=good_step beside the file": """
        fp16.consecutive_hysteresis=false
    """,
    "give precision.buffers beside the file": "data_types.buffer_dtype=null",
    "give precision.compute beside the file": "data_types.param_dtype=null",
    "weight decay is decoupled in adamw: optimizer.name=Adam adds it to the gradient": """
        optimizer.params.adam_w_mode=true
    """,
    "give optimizer.weight_decay beside the file": """
        optimizer.params.torch_adam=false
    """,
    "lr.initial is the rate that a warm-up begins with": "scheduler.params.warmup_min_ratio=0",
    "give lr.final beside the file": "scheduler.params.cos_min_ratio",
    "the loss is scaled with FP16 alone": "bf16.loss_scale=1",
    "gradients are accumulated after each micro-batch in any case": """
        bf16.immediate_grad_update=false
    """,
    "give precision.compute=fp16 beside the file": "amp.enabled=false",
    "adamw always corrects its bias": "optimizer.params.bias_correction=true",
    "there is no amsgrad here": "optimizer.params.amsgrad=false",
    "give optimizer.options = {momentum = ..., nesterov = true}": """
        optimizer.params.nesterov=false
    """,
    "there is no dampening here": "optimizer.params.dampening=0",
    "gradient_clipping is the key for it": "optimizer.params.max_grad_norm=0",
    "a schedule begins with the run, or goes on from a checkpoint": """
        scheduler.params.last_batch_iteration=-1
    """,
    "give precision.compute=bf16 beside the file": "torch_autocast.enabled=false",
    "communication_data_type is the key for it": "fp32_allreduce=false",
    "gradients are averaged over replicas here: remove it": 'gradient_allreduce_op="mean"',
    "an update follows all micro-batches of a step: remove it": """
        managed_gradient_accumulation=true
    """,
    "gradients are divided once: remove it": """
        gradient_predivide_factor=1.0 prescale_gradients=false
    """,
    "the embedding's gradient is dense here": "sparse_gradients=false",
    "attention is dense here, or has model.window": "sparse_attention",
    "layers are not dropped here": "progressive_layer_drop.enabled=false",
    "the sequence length is constant here: train.seq_length": """
        curriculum_learning.enabled=false
    """,
    "data is sampled uniformly here: data.blend has weights": "data_efficiency.enabled=false",
    "models are not compressed in training here": "compression_training",
    "there is no such quantization here: [fp8]": """
        quantize_training quantize_training.enabled=false eigenvalue.enabled=false
        weight_quantization
    """,
    "parallel.elastic trains in the layout that fits, with a constant batch": """
        elasticity.enabled=false
    """,
    "there is no engine for reinforcement learning here": "hybrid_engine.enabled=false",
    "parallel.pipeline and parallel.cuts say how layers become stages": "pipeline",
    "there is no sequence parallelism over replicas here: parallel.sequence": """
        sequence_parallel_size=1
    """,
    "parallel.expert is the number of expert-parallel ranks": "expert_parallel.enabled=false",
    "parallel.tensor is the number of tensor-parallel ranks": "tensor_parallel",
    "model.vocab is the key for it": "vocabulary_size",
}
_UNUSED_OF_ZERO = """
contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions
allgather_bucket_size load_from_fp32_weights elastic_checkpoint offload_param offload_optimizer
sub_group_size cpu_offload_use_pin_memory stage3_prefetch_bucket_size prefetch_bucket_size
stage3_param_persistence_threshold param_persistence_threshold
stage3_model_persistence_threshold model_persistence_threshold stage3_max_live_parameters
max_live_parameters stage3_max_reuse_distance max_reuse_distance
stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save
stage3_gather_fp16_weights_on_model_save stage3_use_all_reduce_for_fetch_params
use_all_reduce_for_fetch_params stage3_module_granularity_threshold module_granularity_threshold
ignore_unused_parameters legacy_stage1 round_robin_gradients zero_quantized_nontrainable_weights
mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint
allgather_sequential stage3_allgather_sequential save_muon_momentum_buffer_in_memory
override_module_apply log_trace_cache_warnings enable_sanity_checks leaf_module
"""
_UNUSED = """
zero_allow_untested_optimizer zero_force_ds_cpu_optimizer disable_allgather
seq_parallel_comm_data_type seq_parallel_communication_data_type graph_harvesting aio nebula
compile timers comms_config communication_data_size use_data_before_expert_parallelism
dataloader_drop_last datastates_ckpt activation_checkpointing optimizer.legacy_fusion
use_node_local_storage fp16.enable_overflow optimizer.params.fused optimizer.params.foreach
log_level wall_clock_breakdown memory_breakdown dump_state tensorboard wandb csv_monitor comet
comms_logger flops_profiler monitor_config autotuning checkpoint load_universal_checkpoint amp
progressive_layer_drop curriculum_learning data_efficiency eigenvalue elasticity hybrid_engine
torch_autocast expert_parallel
"""
_ROWS = [row.split() for row in _READ.strip().splitlines()]
READ: Mapping[str, tuple[str, ...]] = {key: tuple(ours) for key, _, *ours in _ROWS}
"""Keys that are read, and the keys of a run file that they become."""
KINDS: Mapping[str, str] = {key: kind for key, kind, *_ in _ROWS}
"""The kinds of the values of those that are read."""


# as transformers/integrations/deepspeed.py fills them in
AUTO: Mapping[str, str] = {
    "train_micro_batch_size_per_gpu": "--per_device_train_batch_size",
    "gradient_accumulation_steps": "--gradient_accumulation_steps",
    "train_batch_size": (
        "--per_device_train_batch_size x --gradient_accumulation_steps x the number of ranks"
    ),
    "gradient_clipping": "--max_grad_norm",
    "optimizer.params.lr": "--learning_rate",
    "optimizer.params.betas": "--adam_beta1 and --adam_beta2",
    "optimizer.params.eps": "--adam_epsilon",
    "optimizer.params.weight_decay": "--weight_decay",
    "scheduler.params.warmup_max_lr": "--learning_rate",
    "scheduler.params.warmup_num_steps": "--warmup_steps or --warmup_ratio",
    "scheduler.params.total_num_steps": "--max_steps or --num_train_epochs",
    "fp16.enabled": "--fp16",
    "bf16.enabled": "--bf16",
    "zero_optimization.reduce_bucket_size": "the hidden size, squared",
}
"""Where Hugging Face's Trainer takes the value of a key from that is "auto"."""


def _refused_keys() -> Iterator[tuple[str, str, str]]:
    """Yield each key that is refused, its default as JSON, "" for none, and the way out."""
    for way_out, entries in _REFUSED.items():
        for entry in entries.split():
            key, _, default = entry.partition("=")
            yield key, default, way_out


WHY: Mapping[str, str] = {key: way_out for key, _, way_out in _refused_keys()}
"""Keys that are refused, and the way out."""
PERMITTED: Mapping[str, Any] = {
    key: json.loads(default) for key, default, _ in _refused_keys() if default
}
"""The values that keys may have although they are refused."""
UNUSED = frozenset(_UNUSED.split()) | {
    f"zero_optimization.{key}" for key in _UNUSED_OF_ZERO.split()
}
"""Keys and tables that are not used here: logs, communication, memory, and tables that are off."""


def paths_to(key: str) -> list[str]:
    """Return a dotted key and the tables that hold it, the innermost first."""
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _tables() -> frozenset[str]:
    """Return the keys that hold further keys."""
    tables = set[str]()
    for key in (*READ, *WHY):
        _, *holders = paths_to(key)
        tables.update(holders)
    return frozenset(tables)


TABLES = _tables()
"""Keys that hold further keys."""


def is_unused(key: str) -> bool:
    """Return True if a dotted key, or a table that holds it, is not used here."""
    return not UNUSED.isdisjoint(paths_to(key))


def is_deepspeeds(name: str) -> bool:
    """Return True if DeepSpeed's configuration has the key or the table at its top."""
    return any(key.partition(".")[0] == name for key in (*READ, *WHY, *UNUSED))
