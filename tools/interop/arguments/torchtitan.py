"""Keys of torchtitan's TOML: those that are read, those that are refused, and those that are not
used here.

The names and defaults are those of torchtitan/config/job_config.py from March 2025 to February
2026, after which torchtitan has no TOML. A key of a table within a table is written with dots; the
name of a table stands for all its keys.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tools.interop.arguments.deepspeed import paths_to

# key, kind of its value, its default as JSON, the keys of a run file that it becomes
_READ = """
job.dump_folder                               text   "./outputs"  train.folder
metrics.log_freq                              whole  10           log.every
metrics.enable_tensorboard                    bool   false        log.to
metrics.enable_wandb                          bool   false        log.to
model.name                                    text   "llama3"     model.preset
model.flavor                                  text   "debugmodel" model.preset
optimizer.name                                text   "AdamW"      optimizer.name
optimizer.lr                                  number 8e-4         lr.peak
optimizer.beta1                               number 0.9          optimizer.betas
optimizer.beta2                               number 0.95         optimizer.betas
optimizer.eps                                 number 1e-8         optimizer.eps
optimizer.weight_decay                        number 0.1          optimizer.weight_decay
lr_scheduler.warmup_steps                     whole  200          lr.warmup lr.initial
lr_scheduler.total_steps                      whole  null         lr.length
lr_scheduler.decay_ratio                      number null         lr.decay
lr_scheduler.decay_type                       text   "linear"     lr.wsd_decay
lr_scheduler.min_lr_factor                    number 0.0          lr.final
lr_scheduler.lr_min                           number 0.0          lr.final
training.dataset                              text   "c4_test"    data.source
training.dataset_path                         text   null         data.source
training.local_batch_size                     whole  8            train.micro_batch
training.batch_size                           whole  null         train.micro_batch
training.global_batch_size                    whole  -1           train.global_batch
training.seq_len                              whole  2048         train.seq_length
training.max_norm                             number 1.0          optimizer.clip
training.steps                                whole  10000        train.steps
training.dtype                                text   "float32"    precision.parameters
training.mixed_precision_param                text   "bfloat16"   precision.compute
training.mixed_precision_reduce               text   "float32"    precision.reduce
training.seed                                 whole  null         train.seed
debug.seed                                    whole  null         train.seed
training.deterministic                        bool   false        train.deterministic
debug.deterministic                           bool   false        train.deterministic
parallelism.data_parallel_replicate_degree    whole  1            parallel.data parallel.zero_size
parallelism.data_parallel_shard_degree        whole  -1           parallel.data parallel.zero
parallelism.fsdp_reshard_after_forward        text   "default"    parallel.zero
parallelism.tensor_parallel_degree            whole  1            parallel.tensor parallel.sequence
parallelism.enable_async_tensor_parallel      bool   false        parallel.async_tensor
parallelism.pipeline_parallel_degree          whole  1            parallel.pipeline
parallelism.pipeline_parallel_schedule        text   "1F1B"       parallel.schedule
parallelism.pipeline_parallel_microbatch_size whole  1            train.micro_batch
parallelism.context_parallel_degree           whole  1            parallel.context
parallelism.expert_parallel_degree            whole  1            parallel.expert
parallelism.expert_tensor_parallel_degree     whole  1            parallel.expert_tensor
checkpoint.enable                             bool   false        checkpoint.every
checkpoint.enable_checkpoint                  bool   false        checkpoint.every
checkpoint.interval                           whole  500          checkpoint.every
checkpoint.keep_latest_k                      whole  10           checkpoint.keep
activation_checkpoint.mode                    text   "selective"  parallel.recompute
activation_checkpoint.selective_ac_option     text   "2"          parallel.recompute_fraction
"""
# The way out, and the keys that are refused, each with its default as JSON, which is permitted.
_REFUSED = {
    "products in FP8 are [fp8] here: fp8.kind=... beside gives them": "model.converters=[]",
    "the norm follows from the model here: model.norm": 'model.norm_type="rmsnorm"',
    "an update follows all gradients of a step here, and clipping needs them: remove it": """
        optimizer.early_step_in_backward=false
    """,
    (
        "weights stay on the device here: remove it, and give optimizer.offload=host for masters "
        "and moments in host memory"
    ): "training.enable_cpu_offload=false",
    "first weights are train.init_from=FOLDER, after megaprec convert": """
        checkpoint.initial_load_path=null checkpoint.initial_load_in_hf=false
    """,
    "parallel.cuts says how layers become stages": """
        parallelism.pipeline_parallel_split_points=[] parallelism.module_fqns_per_model_part=null
    """,
    "parallel.chunks=N beside says how many stages a rank has": """
        parallelism.pipeline_parallel_layers_per_stage=null
    """,
    "give parallel.schedule_file=FILE beside": 'parallelism.pipeline_parallel_schedule_csv=""',
    "tokens go to the experts that the router chooses here": """
        training.debug_moe_force_load_balance=false debug.moe_force_load_balance=false
    """,
    "ranks that are lost are parallel.elastic here": "fault_tolerance.enable=false",
    "no other program is imported here": """
        experimental.custom_import="" experimental.custom_args_module="" job.custom_config_module=""
    """,
}
_UNUSED = """
job profiling comm compile memory_estimation float8 mx quantize validation fault_tolerance
metrics.disable_color_printing metrics.save_for_all_ranks metrics.save_tb_folder
model.hf_assets_path model.tokenizer_path model.print_after_conversion optimizer.implementation
training.compile training.gc_debug training.gc_freq training.dataloader
debug.deterministic_warn_only
parallelism.disable_loss_parallel parallelism.enable_compiled_autograd
parallelism.context_parallel_load_balancer parallelism.context_parallel_rotate_method
parallelism.expert_parallel_comm_backend parallelism.pipeline_parallel_expert_parallel_overlap
parallelism.pipeline_parallel_first_stage_less_layers
parallelism.pipeline_parallel_last_stage_less_layers
checkpoint.async_mode checkpoint.create_seed_checkpoint checkpoint.enable_first_step_checkpoint
checkpoint.enable_ft_dataloader_checkpoints checkpoint.exclude_from_loading checkpoint.export_dtype
checkpoint.folder checkpoint.initial_load_in_hf_quantized checkpoint.initial_load_model_only
checkpoint.initial_load_model_weights_only checkpoint.last_save_in_hf
checkpoint.last_save_in_safetensors_format checkpoint.last_save_model_only
checkpoint.last_save_model_weights_only checkpoint.load_only checkpoint.load_step
checkpoint.model_weights_only
activation_checkpoint.debug activation_checkpoint.determinism_check
activation_checkpoint.early_stop activation_checkpoint.memory_budget
activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns
activation_checkpoint.preserve_rng_state activation_checkpoint.visualize_memory_budget_pareto
"""


CONFIG_FILE = "job.config_file"
"""The option that names the TOML file."""


class Row(NamedTuple):
    """A key that is read. keys: of a run file, that it becomes."""

    kind: str
    default: Any
    keys: tuple[str, ...]


def _rows() -> Iterator[tuple[str, Row]]:
    for line in _READ.strip().splitlines():
        key, kind, default, *keys = line.split()
        yield key, Row(kind, json.loads(default), tuple(keys))


def _refused_keys() -> Iterator[tuple[str, Any, str]]:
    """Yield each key that is refused, its default, and the way out."""
    for way_out, entries in _REFUSED.items():
        for entry in entries.split():
            key, _, default = entry.partition("=")
            yield key, json.loads(default), way_out


READ: Mapping[str, Row] = dict(_rows())
"""Keys that are read."""
WHY: Mapping[str, str] = {key: way_out for key, _, way_out in _refused_keys()}
"""Keys that are refused, and the way out."""
PERMITTED: Mapping[str, Any] = {key: default for key, default, _ in _refused_keys()}
"""The values that keys may have although they are refused."""
UNUSED = frozenset(_UNUSED.split())
"""Keys and tables that are not used here: logs, profiles, kernels, formats of checkpoints, and
tables that a refused key switches on."""


def is_unused(key: str) -> bool:
    """Return True if a dotted key, or a table that holds it, is not used here."""
    is_of_another_class = key in READ or key in WHY
    return not is_of_another_class and not UNUSED.isdisjoint(paths_to(key))
