"""Reading NeMo 2's checkpoints: a folder of two, weights/ and context/.

    weights/    a distributed checkpoint of Megatron-core's (torch_dist), every tensor's name with
                `module.` before it (the first versions have its files in the folder itself)
    context/    model.yaml, which says what the model is; io.json, the tokenizer's files

(nemo/lightning/ckpt_utils.py, nemo/lightning/io/pl.py, nemo/lightning/megatron_parallel.py.)
Weights are read, the optimizer's state is not. YAML is read by a loader that makes plain values
only; no pickle is opened in this process (`tools.convert.core.untrusted`).

model.yaml has all fields of NeMo's GPTConfig, a subclass of Megatron-core's TransformerConfig,
defaults included. Each is read, or known not to change what weights compute, or must have the one
supported value; any other is refused. Missing fields have no substitute.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaprec.errors import Problem, UserError
from models.config import ModelConfig
from tools.convert.core.chunks import Chunked
from tools.convert.core.names import megatron
from tools.convert.core.rules import Match, matches
from tools.convert.core.source import Facts, Source
from tools.convert.core.yaml_files import read_yaml
from tools.convert.hf.folder import hf_tokenizer, origins_of
from tools.convert.hf.other_files import require_fetched
from tools.convert.megatron.distributed import DistributedContents, merge_chunks, read_chunked
from tools.convert.megatron.kinds import KINDS, NUMBER, SIZE, WORD, is_of
from tools.convert.megatron.order import EMBEDDING
from tools.saved.model_fields import make_model, problems_of_keys

WEIGHTS = "weights"
CONTEXT = "context"
MODEL = "model.yaml"
TOKENIZER = "nemo_tokenizer"
# of an unpacked .nemo
OLDER = "model_config.yaml"
OLDER_PARTS = ("model_weights", "mp_rank_", "tp_rank_")
PREFIX = "module."
# Ends the name of a file beside the folder, as long as it is being saved.
UNFINISHED = "-unfinished"
ADAPTER = "adapter_metadata.json"
EXPORT = "NeMo's llm.export_ckpt(path, target='hf') makes a Hugging Face folder of it"


def find_nemo(path: Path) -> Path | None:
    """Return the checkpoint's folder: `path`, or the one above, if it is its `weights`."""
    folders = (path, path.parent) if path.name == WEIGHTS else (path,)
    for folder in folders:
        has_weights = (folder / WEIGHTS).is_dir() or (folder / ".metadata").is_file()
        if has_weights and (folder / CONTEXT).is_dir():
            return folder
    return None


def refuse_older(path: Path, holds_others: bool = False) -> None:
    """Raise UserError if a path is an archive of NeMo 1 (.nemo), the folder that it unpacks to, or
    a folder of one.

    holds_others: the folder has another format, beside which an archive is some other file.
    """
    folders = (path, path.parent) if path.name.startswith(OLDER_PARTS) else (path,)
    older = [folder / OLDER for folder in folders if (folder / OLDER).is_file()]
    if not holds_others:
        if path.is_dir():
            older += sorted(path.glob("*.nemo"))
        elif path.suffix == ".nemo":
            older.append(path)
    if older:
        raise UserError.of("convert.nemo1", older=older[0])


def open_nemo(checkpoint: Path, vocab: int | None = None) -> Source:
    """Open a checkpoint's folder. UserError for what is missing, surplus or not known.

    vocab: tokens without padding; None: what model.yaml says.
    """
    file = checkpoint / CONTEXT / MODEL
    folder = checkpoint / WEIGHTS if (checkpoint / WEIGHTS).is_dir() else checkpoint
    _check_complete(checkpoint, folder)
    if not (folder / ".metadata").is_file():
        raise UserError.of(
            "convert.nemo_not_distributed", folder=folder / ".metadata", export=EXPORT
        )
    config = read_yaml(file).get("config")
    if not isinstance(config, dict):
        raise UserError.of("convert.nemo_no_config", file=file, export=EXPORT)
    model = model_of(config, vocab, str(file))
    contents = read_chunked(folder)
    tensors = _with_megatron_names(folder, contents)
    _check_rows(folder, tensors, config["vocab_size"])
    expected = _expected(tensors, model, bool(config["rotary_interleaved"]))
    weights = merge_chunks(folder, expected, tensors, model)
    layout = {}
    for axis in ("tensor", "pipeline"):
        # It decides nothing: a distributed checkpoint has whole tensors.
        ranks = config.get(f"{axis}_model_parallel_size")
        if isinstance(ranks, int):
            layout[axis] = ranks
    notes = tuple(_notes_on_padding(config, model.vocab, tensors))
    facts = Facts(layout=layout, unread=_unread(folder, contents), notes=notes)
    tokenizer = hf_tokenizer(checkpoint / CONTEXT / TOKENIZER) or hf_tokenizer(checkpoint / CONTEXT)
    origins = origins_of(expected, weights, model)
    return Source(checkpoint, "nemo", model, origins, facts, tokenizer)


def _check_complete(checkpoint: Path, folder: Path) -> None:
    """Raise UserError if the checkpoint was not saved or fetched whole, or holds an adapter
    alone. folder: of its weights."""
    absolute = checkpoint.absolute()
    mark = absolute.with_name(f"{absolute.name}{UNFINISHED}")
    if mark.exists():
        raise UserError.of("convert.nemo_not_whole", path=checkpoint, mark=mark)
    # A pointer of Git LFS in place of a file would be taken for a damaged one.
    for part in (folder, checkpoint / CONTEXT):
        require_fetched(part)
    if (folder / ADAPTER).is_file():
        raise UserError.of("convert.nemo_adapter", folder=folder / ADAPTER)


def _with_megatron_names(folder: Path, contents: DistributedContents) -> dict[str, Chunked]:
    """Return the weights by Megatron-core's names."""
    tensors: dict[str, Chunked] = {}
    for tensor_name, tensor in contents.by_kind["weight"].items():
        if not tensor_name.startswith(PREFIX):
            raise UserError.of(
                "convert.nemo_name", folder=folder, name=tensor_name, prefix=PREFIX, export=EXPORT
            )
        megatron_name = tensor_name.removeprefix(PREFIX)
        tensors[megatron_name] = replace(tensor, name=megatron_name)
    return tensors


def _check_rows(folder: Path, tensors: Mapping[str, Chunked], vocab: int | None) -> None:
    """Raise UserError if the embedding has not as many rows as model.yaml says."""
    embedding = tensors.get(EMBEDDING)
    # NeMo pads the tokenizer's vocabulary, but takes a vocab_size that is set as it is
    # (GPTConfig.configure_model).
    if vocab and embedding and embedding.shape[0] != vocab:
        raise UserError.of(
            "convert.nemo_vocab", folder=folder, shape=embedding.shape[0], model=MODEL, vocab=vocab
        )


def _notes_on_padding(
    config: Mapping[str, Any], vocab: int, tensors: Mapping[str, Chunked]
) -> Iterator[str]:
    """Yield a note if NeMo would have padded a vocabulary of --vocab N to another number of
    rows."""
    divisor = config.get("make_vocab_size_divisible_by")
    tp = config.get("tensor_model_parallel_size")
    if not isinstance(divisor, int) or not isinstance(tp, int) or divisor * tp < 1:
        return
    if config["vocab_size"] is not None or EMBEDDING not in tensors:
        return
    rows = tensors[EMBEDDING].shape[0]
    unit = divisor * tp
    padded = -(-vocab // unit) * unit
    if rows != padded:
        yield (
            f"--vocab {vocab} is {padded} rows with NeMo's padding (make_vocab_size_divisible_by = "
            f"{divisor}, tensor_model_parallel_size = {tp}), but the embedding has {rows}: the "
            f"first {vocab} were read"
        )


def _expected(names: Mapping[str, Any], model: ModelConfig, interleaved: bool) -> list[Match]:
    """Return the tensors that the model has, by the names that these have."""
    # Transformer Engine makes a norm part of the linear layer after it, and names it so.
    fused = any(".linear_qkv.layer_norm_" in tensor_name for tensor_name in names)
    return matches(megatron(fused, interleaved, model), model)


def _unread(folder: Path, contents: DistributedContents) -> str:
    """Return the files that are ignored: those beside the weights."""
    unread = []
    if contents.flat or any(kind != "weight" for kind in contents.by_kind):
        unread.append("the optimizer's state")
    if (folder / "common.pt").is_file():
        unread.append("common.pt")
    return ", ".join(unread)


MODULE = "nemo.collections.llm.gpt.model."
# whose classes add nothing unsaid
MODULES = tuple(f"{MODULE}{name}." for name in ("base", "llama", "qwen2", "qwen3"))
SPEC = "transformer_layer_spec"  # who makes a layer: these do it as the other keys say
LAYERS = (
    "default_layer_spec",
    "local_layer_spec",
    "transformer_engine_layer_spec",
    "transformer_engine_full_layer_spec",
)
REQUIRED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "normalization",
    "layernorm_epsilon",
    "add_bias_linear",
    "add_qkv_bias",
    "gated_linear_unit",
    "activation_func",
    "bias_activation_fusion",
    "qk_layernorm",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "seq_length",
    "share_embeddings_and_output_weights",
    "vocab_size",
    "hidden_dropout",
    "attention_dropout",
    "init_method_std",
)
# Keys that Megatron-LM's arguments lack, or call otherwise; the kinds of the others are those
# there.
_KINDS = {
    "normalization": WORD,
    "layernorm_epsilon": NUMBER,
    "position_embedding_type": WORD,
    "scale_factor": NUMBER,
    "low_freq_factor": NUMBER,
    "high_freq_factor": NUMBER,
    "old_context_len": SIZE,
}
MAY_BE_NULL = ("num_query_groups", "kv_channels", "ffn_hidden_size", "vocab_size")
# what NeMo's configurations name
ACTIVATIONS = {
    "torch.nn.functional.silu": "silu",
    "torch.nn.functional.gelu": "gelu",
    "torch._C._nn.gelu": "gelu",
}
# of Llama 3.1: NeMo's key -> ours
SCALING = {
    "scale_factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "old_context_len": "original_max_position_embeddings",
}
STRETCHED = re.compile(r"\.Llama3[1-9]Config")  # classes that stretch rotary positions
# Keys that have to have a value that changes nothing.
ONLY: dict[str, Any] = {
    "activation_func_clamp_value": None,
    "apply_residual_connection_post_layernorm": False,
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "fp4_param": False,
    "fp8_param": False,
    "glu_linear_offset": 0.0,
    "heterogeneous_block_specs": False,
    "is_hybrid_model": False,
    "layernorm_zero_centered_gamma": False,
    "linear_attention_freq": None,
    "mrope_section": None,
    "mtp_num_layers": None,
    "multi_latent_attention": False,
    "no_rope_freq": None,
    "num_moe_experts": None,
    "qk_l2_norm": False,
    "quant_recipe": None,
    "seq_len_interpolation_factor": None,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "use_te_activation_func": False,
    "window_attn_skip_freq": None,
    "window_size": None,
}
# Of what is off when the keys above are so, and of precision, memory and communication in training.
UNIMPORTANT_STARTS = (
    "cpu_offloading",
    "cuda_graph_",
    "dsa_",
    "fp4",
    "fp8",
    "init_",
    "inference_",
    "kitchen_",
    "linear_",
    "mamba_",
    "moe_",
    "mtp_",
    "qk_clip",
    "recompute_",
    "tp_comm_",
)
UNIMPORTANT = """
    _cpu_offloading_context _target_ account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split activation_func_fp8_input_store apply_query_key_layer_scaling
    apply_rope_fusion async_tensor_model_parallel_allreduce attention_backend
    attention_softmax_in_fp32 autocast_dtype barrier_with_L1_time batch_invariant_mode
    batch_p2p_comm batch_p2p_sync bf16 bias_dropout_add_fusion bias_dropout_fusion
    calculate_per_token_loss clone_scatter_output_in_embedding config_logger_dir
    context_parallel_size cp_comm_type cross_entropy_fusion_impl cross_entropy_loss_fusion
    data_step_fn deallocate_pipeline_outputs defer_embedding_wgrad_compute delay_wgrad_compute
    deterministic_mode disable_bf16_reduced_precision_matmul disable_parameter_transpose_cache
    distribute_saved_activations embedding_init_method embedding_init_method_std enable_autocast
    enable_cuda_graph ep_overlap_early_attn_memory_release expert_model_parallel_size
    expert_tensor_parallel_size external_cuda_graph finalize_model_grads_func
    fine_grained_activation_offloading first_last_layers_bf16 flash_decode forward_step_fn fp16
    fp16_lm_cross_entropy fp32_residual_connection fused_single_qkv_rope generation_config
    grad_scale_func grad_sync_func gradient_accumulation_fusion hetereogenous_dist_checkpoint
    hierarchical_context_parallel_sizes hybrid_context_parallel log_max_attention_logit
    make_vocab_size_divisible_by masked_softmax_fusion max_seqlen_per_dp_cp_rank
    memory_efficient_layer_norm microbatch_group_size_per_vp_stage min_offloaded_tensor_size
    mlp_chunks_for_prefill no_sync_func num_layers_at_end_in_bf16 num_layers_at_start_in_bf16
    num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
    num_microbatches_with_partial_activation_checkpoints offload_modules output_layer_init_method
    overlap_moe_expert_parallel_comm overlap_p2p_comm overlap_p2p_comm_warmup_flush parallel_output
    param_sync_func params_dtype perform_initialization persist_layer_norm pipeline_dtype
    pipeline_model_parallel_comm_backend pipeline_model_parallel_layout pipeline_model_parallel_size
    scatter_embedding_sequence_parallel sequence_parallel symmetric_ar_type
    tensor_model_parallel_size test_mode timers tp_only_amax_red transformer_impl
    use_cpu_initialization use_fused_weighted_squared_relu use_inference_optimized_layers
    use_kitchen use_kitchen_attention use_mamba_mem_eff_path use_ring_exchange_p2p
    use_te_rng_tracker use_transformer_engine_full_layer_spec use_transformer_engine_op_fuser
    variable_seq_lengths virtual_pipeline_model_parallel_size wgrad_deferral_limit
"""


def model_of(config: Mapping[str, Any], vocab: int | None, origin: str) -> ModelConfig:
    """Return the model that `config` of a model.yaml describes.

    vocab: tokens without padding; None: its vocab_size.
    origin: the file, for messages.
    Raises UserError that names the key in `origin` that is missing or not known.
    """
    _refuse_others(config, origin)
    learned = config["position_embedding_type"] == "learned_absolute"
    gated = bool(config["gated_linear_unit"])
    heads = config["num_attention_heads"]
    hidden = config["hidden_size"]
    bias = bool(config["add_bias_linear"])
    tokens = vocab or config["vocab_size"]
    if not tokens:
        raise UserError.of("convert.nemo_vocab_null", origin=origin)
    fields = {
        "family": "gpt2" if learned else "llama",
        "layers": config["num_layers"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config["num_query_groups"] or heads,
        "head_dim": config["kv_channels"] or hidden // heads,
        "mlp": _mlp(config, gated, origin),
        "ffn": config["ffn_hidden_size"] or 4 * hidden,
        "vocab": tokens,
        "max_positions": config["seq_length"],
        "norm": _norm(config, origin),
        "norm_eps": float(config["layernorm_epsilon"]),
        "positions": "learned" if learned else "rope",
        "rope_base": float(config["rotary_base"]),
        "rotary_fraction": 1.0 if learned else float(config["rotary_percent"]),
        "rope_scaling": _scaling(config, origin),
        "qkv_bias": bias or bool(config["add_qkv_bias"]),
        "output_bias": bias,
        "mlp_bias": bias,
        "qk_norm": bool(config["qk_layernorm"]),
        "tied": bool(config["share_embeddings_and_output_weights"]),
        "dropout": float(config["hidden_dropout"]),
        "attention_dropout": float(config["attention_dropout"]),
        "init_std": float(config["init_method_std"]),
    }
    return make_model(fields, origin)


def _refuse_others(config: Mapping[str, Any], origin: str) -> None:
    """Raise UserError for a model that is not known here, with a line for each key that says so."""
    target = config.get("_target_")
    if not isinstance(target, str) or not target.startswith(MODULES):
        raise UserError.of(
            "convert.nemo_class", origin=origin, target=target, modules=", ".join(MODULES)
        )
    only = {key: (supported,) for key, supported in ONLY.items()}
    starts = {key for key in config if str(key).startswith(UNIMPORTANT_STARTS)}
    known = {*SCALING, SPEC, *UNIMPORTANT.split(), *starts}
    problems = [*problems_of_keys(config, origin, REQUIRED, only, known)]
    problems += _problems_of_kinds(config, origin)
    positions = config.get("position_embedding_type")
    if positions not in ("learned_absolute", "rope"):
        problems.append(Problem.of("convert.nemo_positions", origin=origin, positions=positions))
    problems += _problems_of_layers(config.get(SPEC), origin)
    if problems:
        raise UserError(*problems)


def _problems_of_kinds(config: Mapping[str, Any], origin: str) -> Iterator[Problem]:
    """Yield a line for each value of another kind: Python takes the text "False" for true."""
    for setting, kind in (KINDS | _KINDS).items():
        # Only these are read; the others have to have one value, or any.
        if setting not in config or setting not in (*REQUIRED, *SCALING):
            continue
        value = config[setting]
        may_be_missing = value is None and setting in MAY_BE_NULL
        if not may_be_missing and not is_of(kind, value):
            yield Problem.of(
                "convert.nemo_value_kind", origin=origin, key=setting, value=value, kind=kind
            )


def _function_name(function: Any) -> Any:
    """Return the name of a function as NeMo dumps it; what else it dumps, such as one with
    arguments, is returned as it is."""
    if not isinstance(function, Mapping):
        return function
    if function.keys() <= {"_target_", "_call_"} and not function.get("_call_"):
        return function.get("_target_")
    return function


def _problems_of_layers(spec: Any, origin: str) -> Iterator[Problem]:
    """Yield a line if layers are made by a function that NeMo does not have: nothing says what it
    makes."""
    function_name = _function_name(spec)
    known_names = [f"{MODULE}base.{layer}" for layer in LAYERS]
    if function_name is not None and function_name not in known_names:
        yield Problem.of(
            "convert.nemo_layer_spec",
            origin=origin,
            key=SPEC,
            value=function_name,
            layers=", ".join(LAYERS),
        )


def _norm(config: Mapping[str, Any], origin: str) -> str:
    """Return the kind of norm. Raises UserError for another."""
    norms = {"RMSNorm": "rms", "LayerNorm": "layer"}
    if config["normalization"] not in norms:
        raise UserError.of(
            "convert.nemo_norm",
            origin=origin,
            normalization=config["normalization"],
            norms=", ".join(norms),
        )
    return norms[config["normalization"]]


def _mlp(config: Mapping[str, Any], gated: bool, origin: str) -> str:
    """Return the kind of feed-forward. Megatron-core's fused GELU is the tanh approximation, the
    other is not (fusions/)."""
    function_name = _function_name(config["activation_func"])
    # A function with arguments is dumped as a table, which no key of ACTIVATIONS is.
    activation = ACTIVATIONS.get(function_name) if isinstance(function_name, str) else None
    if (activation, gated) == ("silu", True):
        return "swiglu"
    if (activation, gated) == ("gelu", False):
        return "gelu" if config["bias_activation_fusion"] else "gelu_exact"
    gate = "a gate" if gated else "no gate"
    raise UserError.of("convert.nemo_activation", origin=origin, name=function_name, gate=gate)


def _scaling(config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the scaling of rotary positions: the four keys of Llama 3.1, all or none."""
    settings = {ours: config[key] for key, ours in SCALING.items() if key in config}
    # Classes of Llama 3.1 and newer stretch positions also where the file has no key of it.
    if not settings and not STRETCHED.search(config["_target_"]):
        return {}
    if len(settings) < len(SCALING):
        raise UserError.of("convert.nemo_rope", origin=origin, scaling=", ".join(SCALING))
    return {"kind": "llama3", **settings}
