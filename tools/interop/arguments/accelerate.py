"""Keys of the configuration of Hugging Face's accelerate: those that are read, those that are
refused, and those that are not used here.

The names are those of accelerate's ClusterConfig and of its questions (0.20 to 1.15). Keys of
`fsdp_config` are those of the Trainer's (`tools.interop.importing.trainer_fsdp`).
"""

import json
from collections.abc import Mapping
from typing import Any

from tools.interop.arguments.deepspeed import paths_to

# key, the keys of a run file that it becomes
_READ = """
distributed_type parallel.zero
num_processes parallel.data
mixed_precision precision.compute
fsdp_config parallel.zero parallel.zero_size parallel.recompute
deepspeed_config.deepspeed_config_file parallel.zero
deepspeed_config.zero_stage parallel.zero
deepspeed_config.gradient_accumulation_steps train.global_batch
deepspeed_config.gradient_clipping optimizer.clip
deepspeed_config.offload_optimizer_device optimizer.offload
deepspeed_config.offload_param_device optimizer.offload
parallelism_config.parallelism_config_dp_replicate_size parallel.data parallel.zero_size
parallelism_config.parallelism_config_dp_shard_size parallel.data parallel.zero
parallelism_config.parallelism_config_tp_size parallel.tensor parallel.sequence
parallelism_config.parallelism_config_cp_size parallel.context
"""
# The way out, and the keys that are refused, each with its default as JSON, which is permitted.
_REFUSED = {
    "products in FP8 are [fp8] here: fp8.kind=... beside gives them": "fp8_config={}",
    "give Megatron-LM's arguments as --tensor-model-parallel-size and so on": """
        megatron_lm_config={}
    """,
    "parallel.context cuts sequences here, by a ring or by gathering keys": """
        parallelism_config.parallelism_config_sp_size=1
    """,
}
_UNUSED = """
compute_environment debug use_cpu num_machines machine_rank same_network main_process_ip
main_process_port main_training_function rdzv_backend rdzv_conf gpu_ids enable_cpu_affinity
max_restarts monitor_interval downcast_bf16 dynamo_config dynamo_backend mpirun_config tpu_name
tpu_zone tpu_use_cluster tpu_use_sudo tpu_env tpu_vm command_file commands ipex_config
num_cpu_threads_per_process deepspeed_hostfile fp16 use_fsdp use_deepspeed
deepspeed_config.zero3_init_flag deepspeed_config.zero3_save_16bit_model
deepspeed_config.deepspeed_multinode_launcher deepspeed_config.deepspeed_hostfile
deepspeed_config.deepspeed_exclusion_filter deepspeed_config.deepspeed_inclusion_filter
deepspeed_config.deepspeed_moe_layer_cls_names deepspeed_config.offload_optimizer_nvme_path
deepspeed_config.offload_param_nvme_path
parallelism_config.parallelism_config_cp_backend
parallelism_config.parallelism_config_cp_comm_strategy
parallelism_config.parallelism_config_sp_backend
parallelism_config.parallelism_config_sp_seq_length
parallelism_config.parallelism_config_sp_seq_length_is_variable
parallelism_config.parallelism_config_sp_attn_implementation
"""
READ: Mapping[str, tuple[str, ...]] = {
    key: tuple(ours) for key, *ours in (row.split() for row in _READ.strip().splitlines())
}
"""Keys that are read, and the keys of a run file that they become."""
WHY: Mapping[str, str] = {
    entry.partition("=")[0]: why for why, entries in _REFUSED.items() for entry in entries.split()
}
"""Keys that are refused, and the way out."""
PERMITTED: Mapping[str, Any] = {
    entry.partition("=")[0]: json.loads(entry.partition("=")[2])
    for entries in _REFUSED.values()
    for entry in entries.split()
}
"""The values that keys may have although they are refused."""
UNUSED = frozenset(_UNUSED.split())
"""Keys that are not used here: launchers, machines, kernels, and what the file format keeps."""
TABLES = ("fsdp_config", "deepspeed_config", "parallelism_config")


def class_of(key: str) -> str:
    """Return the class of a dotted key, "read", "refused" or "unused"; "" if it is not known."""
    for name, keys in (("read", READ), ("refused", WHY), ("unused", UNUSED)):
        if any(path in keys for path in paths_to(key)):
            return name
    return ""
