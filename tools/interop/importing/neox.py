"""The configuration of GPT-NeoX as arguments of Megatron-LM, of which GPT-NeoX is a fork, and keys
of a run file for what Megatron-LM cannot say.

Names and defaults are those of megatron/neox_arguments at commit ea7aefd8, whose examples are in
`configs`. Several files are one table there, without a name in two of them. A dash in a name is an
underscore. What a file does not say is GPT-NeoX's default, not Megatron-LM's.
"""

from collections.abc import Mapping
from math import floor, sqrt
from typing import Any

from tools.interop.importing.renamed import Renamed

SYSTEM = "GPT-NeoX"
# names of GPT-NeoX: the argument of Megatron-LM with the same meaning, and GPT-NeoX's default
SAME: Mapping[str, tuple[str, Any]] = {
    "num_layers": ("num_layers", None),
    "hidden_size": ("hidden_size", None),
    "num_attention_heads": ("num_attention_heads", None),
    "seq_length": ("seq_length", None),
    "max_position_embeddings": ("max_position_embeddings", None),
    "rotary_pct": ("rotary_percent", 1.0),
    "rotary_emb_base": ("rotary_base", 10000),
    "attention_dropout": ("attention_dropout", 0.0),
    "hidden_dropout": ("hidden_dropout", 0.0),
    "weight_decay": ("weight_decay", 0.1),
    "gradient_clipping": ("clip_grad", 1.0),
    "sequence_parallel": ("sequence_parallel", False),
    "train_iters": ("train_iters", None),
    "min_lr": ("min_lr", 0.0),
    "lr_decay_style": ("lr_decay_style", "linear"),
    "warmup": ("lr_warmup_fraction", 0.01),
    "eval_interval": ("eval_interval", 1000),
    "eval_iters": ("eval_iters", 100),
    "log_interval": ("log_interval", 100),
    "seed": ("seed", 1234),
    "split": ("split", "969,30,1"),
    "save": ("save", None),
    "checkpoint_factor": ("save_interval", None),
    "data_path": ("data_path", None),
    "eod_mask_loss": ("eod_mask_loss", False),
    "padded_vocab_size": ("padded_vocab_size", None),
}
POSITIONS = {"rotary": "rope", "learned": "learned_absolute", "none": "none"}
NORMS = {
    "layernorm": ("LayerNorm", "layernorm_epsilon"),
    "rmsnorm": ("RMSNorm", "rms_norm_epsilon"),
}
EPSILONS = {"layernorm_epsilon": 1e-5, "rms_norm_epsilon": 1e-8}
OF_DEEPSPEED = ("zero_optimization", "fp16", "bf16", "data_types")
"""Tables that DeepSpeed reads by itself."""
DTYPES = {"fp32": "", "fp16": "fp16", "bfloat16": "bf16"}
# names whose value must be one of these
ONLY: Mapping[str, tuple[Any, ...]] = {
    "gpt_j_tied": (False,),
    "use_qk_layernorm": (False,),
    "moe_num_experts": (1,),
    "num_unique_layers": (None,),
    "soft_prompt_tuning": (None, {}),
    "use_mup": (False,),
    "checkpoint_scale": ("linear",),
    "use_bnb_optimizer": (False,),
    "output_layer_parallelism": ("column",),
    "train_impl": ("normal",),
    "train_epochs": (None,),
    "apply_query_key_layer_scaling": (False,),
    "dataset_impl": ("gpt2",),
    "sparsity_config": (None, {}),
    "label_data_paths": (None,),
}
# read by functions here, beside those above
_READ = """
activation attention_config bf16 bias_gelu_fusion checkpoint_activations checkpoint_num_layers
data_types expansion_factor finetune fp16 gpt_j_residual gradient_accumulation_steps init_method
init_method_std intermediate_size keep_last_n_checkpoints layernorm_epsilon lr_decay_fraction
lr_decay_iters make_vocab_size_divisible_by mlp_multiple_of model_parallel_size no_weight_tying
norm num_kv_heads optimizer output_layer_init_method pipe_parallel_size pos_emb precision
rms_norm_epsilon sliding_window_width train_batch_size train_data_paths train_data_weights
train_micro_batch_size_per_gpu use_bias_in_attn_linear use_bias_in_mlp use_bias_in_norms
zero_optimization
"""
# where and how fast the same numbers are computed, and what is written beside a run
_UNUSED = """
allow_chopped attention_softmax_in_fp32 bias_dropout_fusion checkpoint_in_cpu
checkpoint_validation_with_forward_pass comment config_files contiguous_checkpointing data_impl
deepspeed deepspeed_activation_checkpointing deepspeed_extra_args deepspeed_mpi deepspeed_slurm
distributed_backend do_test do_train do_valid dump_state eval_results_prefix eval_tasks
extra_save_iters fp32_allreduce git_hash hostfile include iteration launcher layernorm_fusion load
log_dir log_grad_norm log_grad_pct_zeros log_gradient_noise_scale log_optimizer_states
log_param_norm make_vocab_size_divisible_by maximum_tokens memory_profiling merge_file mmap_warmup
no_load_optim no_load_rng no_save_optim no_save_rng num_gpus num_nodes num_samples num_workers
onnx_safe pack_impl partition_activations pipe_partition_method profile override_lr_scheduler
profile_backward profile_step_start profile_step_stop recompute rmsnorm_fusion rope_fusion
rotary_save_freqs_buffer s3_path sample_input_file sample_output_file save_base_shapes
scaled_masked_softmax_fusion scaled_upper_triang_masked_softmax_fusion steps_per_print
synchronize_each_layer temperature tensorboard_dir text_gen_type tokenizer_type top_k top_p
use_checkpoint_lr_scheduler use_cpu_initialization use_flashattn_swiglu use_shared_fs use_wandb
vocab_file wall_clock_breakdown wandb_group wandb_host wandb_init_all_ranks wandb_project
wandb_run_name wandb_team weight_by_num_documents zero_allow_untested_optimizer test_data_paths
test_data_weights valid_data_paths valid_data_weights opt_pos_emb_offset
"""
UNUSED = frozenset(_UNUSED.split())
KNOWN = frozenset((*SAME, *ONLY, *_READ.split(), *UNUSED))
LARGEST = 1 << 40  # of a size that is computed with


def from_neox(values: Mapping[str, Any], ranks: int | None) -> Renamed:
    """Return the arguments of Megatron-LM, and keys of a run file beside them.

    values: of all files. ranks: how many there are; None if that is not known.
    """
    made = Renamed(SYSTEM, {name.replace("-", "_"): value for name, value in values.items()})
    made.refuse_unknown(KNOWN)
    made.note_unused(UNUSED)
    made.require_only(ONLY)
    made.rename(SAME)
    _add_layout(made, ranks)
    _add_model(made)
    _add_feed_forward(made)
    _add_first_weights(made)
    _add_optimizer(made)
    _add_rate(made)
    _add_precision(made)
    _add_data(made)
    return made


def _add_layout(made: Renamed, ranks: int | None) -> None:
    """Add parallel sizes, where 0 is 1, the batch and recomputation."""
    tensor = made.whole("model_parallel_size", 1) or 1
    pipeline = made.whole("pipe_parallel_size", 0) or 1
    made.give("tensor_model_parallel_size", tensor)
    made.give("pipeline_model_parallel_size", pipeline)
    replicas = ranks // (tensor * pipeline) if ranks else None
    _add_batch(made, replicas)
    kept = made.whole("keep_last_n_checkpoints", None)
    if kept:
        made.keys["checkpoint.keep"] = kept
    if made.get("checkpoint_activations", False):
        made.give("recompute_granularity", "full")
        made.give("recompute_method", "uniform")
        made.give("recompute_num_layers", made.whole("checkpoint_num_layers", 1))


def _add_batch(made: Renamed, replicas: int | None) -> None:
    """Add batch and micro-batch: batch = micro x steps x replicas, where one of them is not given.
    replicas: None if their number is not known."""
    batch = made.whole("train_batch_size", None)
    micro = made.whole("train_micro_batch_size_per_gpu", None)
    steps = made.whole("gradient_accumulation_steps", None) or 1
    if micro is None and batch and replicas:
        micro = batch // (replicas * steps)
    if batch is None and micro and replicas:
        batch = micro * steps * replicas
    if batch is None and micro is None:
        why = "neither train_batch_size nor train_micro_batch_size_per_gpu is in a file"
        made.ask("train.global_batch", f"{why}: give train.global_batch=N train.micro_batch=N")
    elif batch is None:
        made.ask("train.global_batch", "the batch depends on the number of ranks: give --ranks N")
    made.give("micro_batch_size", micro)
    made.give("global_batch_size", batch)


def _add_model(made: Renamed) -> None:
    """Add positions, norms, heads, biases and residuals."""
    positions = made.choice("pos_emb", "learned", POSITIONS)
    made.give("position_embedding_type", positions)
    _add_norm(made)
    heads = made.whole("num_kv_heads", None)
    if heads and heads != made.get("num_attention_heads", None):
        made.give("group_query_attention", True)
        made.give("num_query_groups", heads)
    is_untied = made.get("no_weight_tying", False)
    made.give("untie_embeddings_and_output_weights", is_untied)
    _add_window(made)
    attention_bias = made.get("use_bias_in_attn_linear", True)
    made.keys |= {
        "model.qkv_bias": attention_bias,
        "model.output_bias": attention_bias,
        "model.mlp_bias": made.get("use_bias_in_mlp", True),
        "model.tied": not is_untied,
        "model.parallel_residual": made.get("gpt_j_residual", False),
    }
    if positions == "rope":
        made.keys["model.positions"] = "rope"
        fraction = made.number("rotary_pct", 1.0)
        if fraction is not None:
            made.keys["model.rotary_fraction"] = float(fraction)
    if made.arguments.get("normalization") == "LayerNorm":
        # by this name Hugging Face's folders are written
        made.keys["model.family"] = "gpt_neox"
        made.keys["model.norm"] = "layer"


def _add_norm(made: Renamed) -> None:
    """Add the kind of norms, their epsilon and their bias."""
    norm = made.choice("norm", "layernorm", NORMS)
    if norm is None:
        return
    kind, epsilon = norm
    made.give("normalization", kind)
    made.give("norm_epsilon", made.get(epsilon, EPSILONS[epsilon]))
    if kind == "LayerNorm":
        made.keys["model.norm_bias"] = made.get("use_bias_in_norms", True)


def _add_window(made: Renamed) -> None:
    """Add the window of attention, or a problem with its kinds."""
    kinds = _kinds_of_attention(made.get("attention_config", None))
    if not kinds <= {"flash", "global"}:
        made.refuse("attention_config", "global and flash attention are read")
    window = made.whole("sliding_window_width", None)
    if window and kinds == {"flash"}:
        # so many tokens before, and the token itself
        made.keys["model.window"] = window + 1
    elif window:
        made.refuse("sliding_window_width", "only layers with flash attention have it there")


def _kinds_of_attention(config: Any) -> set[str]:
    """Return the kinds of attention of the layers, as [[["flash"], 24]] says them."""
    if config is None:
        return {"global"}
    kinds = set[str]()
    for entry in config if isinstance(config, list) else [config]:
        # the kinds of some layers in turn, and behind them how often these repeat
        in_turn = entry[0] if isinstance(entry, list) and entry else entry
        kinds |= {str(kind) for kind in (in_turn if isinstance(in_turn, list) else [in_turn])}
    return kinds


def _add_feed_forward(made: Renamed) -> None:
    """Add kind and width of the feed-forward, as ParallelMLP computes it: with a gate a third of
    the width goes to it."""
    hidden = made.whole("hidden_size", None)
    if hidden is None or not 0 < hidden < LARGEST:
        return
    width = made.whole("intermediate_size", None)
    factor = made.number("expansion_factor", 4.0) or 4.0
    if not 0 < factor < LARGEST:
        made.refuse("expansion_factor", "give a number above 0, or leave it out")
        return
    if width is None:
        width = int(factor * hidden)
    multiple = made.whole("mlp_multiple_of", 1) or 1
    kind = made.choice("activation", "gelu", {"gelu": "gelu", "swiglu": "swiglu"})
    if kind == "swiglu":
        made.give("swiglu", True)
        # gate and up together have two thirds of the width
        width = int(width * 2 / 3) // 2
        made.keys["model.mlp"] = "swiglu"
    else:
        # the fused kernel is the tanh approximation
        fused = made.get("bias_gelu_fusion", False)
        made.keys["model.mlp"] = "gelu" if fused else "gelu_exact"
    rounded_up = -(-width // multiple) * multiple
    made.give("ffn_hidden_size", rounded_up)


def _add_first_weights(made: Renamed) -> None:
    """Add the standard deviations of initial weights (megatron/model/init_functions.py)."""
    hidden = made.whole("hidden_size", None) or 0
    layers = made.whole("num_layers", None) or 0
    if min(hidden, layers) < 1 or max(hidden, layers) >= LARGEST:
        return
    usual = made.number("init_method_std", 0.02) or 0.02
    small = sqrt(2 / (5 * hidden))
    stds = {"normal": usual, "small_init": small}
    std = made.choice("init_method", "normal", stds)
    outputs = {
        "scaled_normal": usual / sqrt(2 * layers),
        "single_residual_scaled_normal": usual / sqrt(layers),
        "wang_init": 2 / layers / sqrt(hidden),
        **stds,
    }
    output = made.choice("output_layer_init_method", "scaled_normal", outputs)
    if std is not None and output is not None:
        made.keys["model.init_std"] = std
        made.keys["model.init"] = {"output": output, "down": output, "shrink": "none"}


def _add_optimizer(made: Renamed) -> None:
    """Add the peak rate and Adam's numbers, which stand in a table as DeepSpeed has it."""
    optimizer = made.table("optimizer")
    kind = str(optimizer.get("type", "Adam")).lower()
    if kind not in ("adam", "adamw"):
        made.refuse("optimizer", f"its type {kind} is not read, but Adam: give optimizer.name=...")
    params = optimizer.get("params")
    params = params if isinstance(params, dict) else {}
    betas = params.get("betas", [0.9, 0.999])
    if not isinstance(betas, list) or len(betas) != 2:
        made.refuse("optimizer", "betas are two numbers")
        return
    made.give("lr", params.get("lr", 0.001))
    made.give("adam_beta1", betas[0])
    made.give("adam_beta2", betas[1])
    made.give("adam_eps", params.get("eps", 1e-8))
    strange = [*params.keys() - {"lr", "betas", "eps"}]
    if strange:
        made.refuse("optimizer", f"{', '.join(sorted(strange))}: not read")


def _add_rate(made: Renamed) -> None:
    """Add the length of the schedule, and what differs of its shape."""
    iterations = made.whole("train_iters", None)
    length = made.whole("lr_decay_iters", None)
    fraction = made.number("lr_decay_fraction", None)
    if fraction is not None and not 0 < fraction < LARGEST:
        made.refuse("lr_decay_fraction", "give a number above 0, or leave it out")
    elif fraction is not None and length is not None:
        made.notes.append(f"lr_decay_fraction: {SYSTEM} takes lr_decay_iters where both are given")
    elif fraction is not None and iterations:
        # a decay of no steps has one there
        length = max(1, floor(iterations * fraction))
    made.give("lr_decay_iters", length)
    style = made.get("lr_decay_style", "linear")
    least = made.get("min_lr", 0.0)
    if style == "linear" and least:
        why = (
            "a linear decay goes to 0 there and stops at min_lr, here it goes to lr.final: give "
            "lr.schedule=... or lr.final=0.0"
        )
        made.ask("lr.final", why, f"--min_lr {least}")
    made.notes.append(
        f"lr.warmup: {SYSTEM} takes the first step of the warm-up twice: its first rate is that of "
        "the second step here, whose first rate is 0"
    )


def _add_precision(made: Renamed) -> None:
    """Add the dtype, and keep the tables that are DeepSpeed's, with its defaults."""
    tables = {name: dict(made.table(name)) for name in OF_DEEPSPEED}
    dtype = made.choice("precision", "fp32", DTYPES)
    for half in ("fp16", "bf16"):
        # Pythia's files have the name once more in the table, where DeepSpeed does not know it
        tables[half].pop(half, None)
    if tables["fp16"].get("enabled"):
        dtype = "fp16"
    elif tables["bf16"].get("enabled"):
        dtype = "bf16"
    if dtype:
        made.give(dtype, True)
        tables[dtype]["enabled"] = True
    made.deepspeed = tables


def _add_data(made: Renamed) -> None:
    """Add the texts with their weights, and the vocabulary."""
    paths = made.get("train_data_paths", None)
    weights = made.get("train_data_weights", None)
    if isinstance(paths, list) and paths:
        weights = weights if isinstance(weights, list) else [1.0] * len(paths)
        if len(weights) != len(paths):
            made.refuse("train_data_weights", "give one for each of train_data_paths")
            return
        # a weight and a path in turn
        words = list[str]()
        for weight, path in zip(weights, paths, strict=True):
            words += [str(weight), str(path)]
        made.give("data_path", words)
    elif made.get("data_path", None) is None:
        made.ask("data.source", "data_path is in no file: give data.source=PREFIX")
    if made.get("finetune", False):
        made.ask("train.init_from", "give train.init_from=FOLDER", "--finetune True")
    if made.get("padded_vocab_size", None) is None:
        made.ask(
            "model.vocab",
            "the vocabulary is not in the file, but in the tokenizer's, padded to a multiple of "
            f"{made.get('make_vocab_size_divisible_by', 128)}: give model.vocab=N",
        )
