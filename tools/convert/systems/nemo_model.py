"""The model that the context/model.yaml of a NeMo 2 checkpoint describes.

NeMo writes all fields of its GPTConfig, a subclass of Megatron-core's TransformerConfig, defaults
included. Each is read, or known not to change what weights compute, or must have the one supported
value; any other is refused. Missing fields have no substitute.
"""

import re
from collections.abc import Mapping
from typing import Any

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.hf.config import make_model
from tools.convert.megatron.kinds import KINDS, NUMBER, SIZE, WORD, is_of

MODULE = "nemo.collections.llm.gpt.model."
# whose classes add nothing unsaid
MODULES = tuple(f"{MODULE}{name}." for name in ("base", "llama", "qwen2", "qwen3"))
SPEC = "transformer_layer_spec"  # who makes a layer: these do it as the other keys say
LAYERS = [
    f"{kind}_layer_spec"
    for kind in ("default", "local", "transformer_engine", "transformer_engine_full")
]
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
    _cpu_offloading_context _target_ account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    activation_func_fp8_input_store apply_query_key_layer_scaling apply_rope_fusion
    async_tensor_model_parallel_allreduce attention_backend attention_softmax_in_fp32 autocast_dtype
    barrier_with_L1_time batch_invariant_mode batch_p2p_comm batch_p2p_sync bf16 bias_dropout_add_fusion
    bias_dropout_fusion calculate_per_token_loss clone_scatter_output_in_embedding config_logger_dir
    context_parallel_size cp_comm_type cross_entropy_fusion_impl cross_entropy_loss_fusion data_step_fn
    deallocate_pipeline_outputs defer_embedding_wgrad_compute delay_wgrad_compute deterministic_mode
    disable_bf16_reduced_precision_matmul disable_parameter_transpose_cache distribute_saved_activations
    embedding_init_method embedding_init_method_std enable_autocast enable_cuda_graph
    ep_overlap_early_attn_memory_release expert_model_parallel_size expert_tensor_parallel_size external_cuda_graph
    finalize_model_grads_func fine_grained_activation_offloading first_last_layers_bf16 flash_decode forward_step_fn
    fp16 fp16_lm_cross_entropy fp32_residual_connection fused_single_qkv_rope generation_config grad_scale_func
    grad_sync_func gradient_accumulation_fusion hetereogenous_dist_checkpoint hierarchical_context_parallel_sizes
    hybrid_context_parallel log_max_attention_logit make_vocab_size_divisible_by masked_softmax_fusion
    max_seqlen_per_dp_cp_rank memory_efficient_layer_norm microbatch_group_size_per_vp_stage
    min_offloaded_tensor_size mlp_chunks_for_prefill no_sync_func num_layers_at_end_in_bf16
    num_layers_at_start_in_bf16 num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
    num_microbatches_with_partial_activation_checkpoints offload_modules output_layer_init_method
    overlap_moe_expert_parallel_comm overlap_p2p_comm overlap_p2p_comm_warmup_flush parallel_output param_sync_func
    params_dtype perform_initialization persist_layer_norm pipeline_dtype pipeline_model_parallel_comm_backend
    pipeline_model_parallel_layout pipeline_model_parallel_size scatter_embedding_sequence_parallel
    sequence_parallel symmetric_ar_type tensor_model_parallel_size test_mode timers tp_only_amax_red
    transformer_impl use_cpu_initialization use_fused_weighted_squared_relu
    use_inference_optimized_layers use_kitchen use_kitchen_attention use_mamba_mem_eff_path use_ring_exchange_p2p
    use_te_rng_tracker use_transformer_engine_full_layer_spec use_transformer_engine_op_fuser variable_seq_lengths
    virtual_pipeline_model_parallel_size wgrad_deferral_limit
"""


def model_of(said: Mapping[str, Any], vocab: int | None, origin: str) -> ModelConfig:
    """The model that `config` of a model.yaml describes. vocab: tokens without padding; None: its
    vocab_size.

    Raises UserError that names the key in `origin` that is missing or not known.
    """
    _refuse(said, origin)
    learned = said["position_embedding_type"] == "learned_absolute"
    gated = bool(said["gated_linear_unit"])
    heads = said["num_attention_heads"]
    hidden = said["hidden_size"]
    bias = bool(said["add_bias_linear"])
    tokens = vocab or said["vocab_size"]
    if not tokens:
        raise UserError(
            f"{origin}: vocab_size is null, so NeMo took the tokenizer's: give its tokens as "
            "--vocab N"
        )
    fields = {
        "family": "gpt2" if learned else "llama",
        "layers": said["num_layers"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": said["num_query_groups"] or heads,
        "head_dim": said["kv_channels"] or hidden // heads,
        "mlp": _mlp(said, gated, origin),
        "ffn": said["ffn_hidden_size"] or 4 * hidden,
        "vocab": tokens,
        "max_positions": said["seq_length"],
        "norm": _norm(said, origin),
        "norm_eps": float(said["layernorm_epsilon"]),
        "positions": "learned" if learned else "rope",
        "rope_base": float(said["rotary_base"]),
        "rotary_fraction": 1.0 if learned else float(said["rotary_percent"]),
        "rope_scaling": _scaling(said, origin),
        "qkv_bias": bias or bool(said["add_qkv_bias"]),
        "output_bias": bias,
        "mlp_bias": bias,
        "qk_norm": bool(said["qk_layernorm"]),
        "tied": bool(said["share_embeddings_and_output_weights"]),
        "dropout": float(said["hidden_dropout"]),
        "attention_dropout": float(said["attention_dropout"]),
        "init_std": float(said["init_method_std"]),
    }
    return make_model(fields, origin)


def _refuse(said: Mapping[str, Any], origin: str) -> None:
    target = said.get("_target_")
    if not isinstance(target, str) or not target.startswith(MODULES):
        raise UserError(
            f"{origin}: the class {target!r} is not known: those of {', '.join(MODULES)} are"
        )
    problems = [
        f"{origin} lacks {key}, which says what the model is" for key in REQUIRED if key not in said
    ]
    problems += [
        f"{origin}: {key} = {said[key]!r} cannot be converted: only {known!r} can"
        for key, known in ONLY.items()
        if said.get(key, known) != known
    ]
    known = {*REQUIRED, *SCALING, *ONLY, SPEC, *UNIMPORTANT.split()}
    problems += [
        f"{origin}: the key {key!r} is not known, so it is not known what the model is"
        for key in said
        if key not in known and not str(key).startswith(UNIMPORTANT_STARTS)
    ]
    problems += _of_other_kinds(said, origin)
    if said.get("position_embedding_type") not in ("learned_absolute", "rope"):
        problems.append(
            f"{origin}: position_embedding_type = {said.get('position_embedding_type')!r} is "
            "not known"
        )
    problems += _odd_layers(said.get(SPEC), origin)
    if problems:
        raise UserError(*problems)


def _of_other_kinds(said: Mapping[str, Any], origin: str) -> list[str]:
    """A problem for each value of another kind: Python takes the text "False" for true."""
    kinds = {key: kind for key, kind in (KINDS | _KINDS).items() if key in (*REQUIRED, *SCALING)}
    return [
        f"{origin}: {key} = {said[key]!r} is not {kind}"
        for key, kind in kinds.items()
        if key in said
        and not (is_of(kind, said[key]) or (said[key] is None and key in MAY_BE_NULL))
    ]


def _named(function: Any) -> Any:
    """The name of a function as NeMo dumps it; what else it dumps, such as one with arguments, is
    returned as it is."""
    alone = (
        isinstance(function, Mapping)
        and function.keys() <= {"_target_", "_call_"}
        and not function.get("_call_")
    )
    return function.get("_target_") if alone else function


def _odd_layers(spec: Any, origin: str) -> list[str]:
    """A problem, if layers are made by a function that NeMo does not have: nothing says what it
    makes."""
    name = _named(spec)
    known = (None, *(f"{MODULE}base.{layer}" for layer in LAYERS))
    if name in known:
        return []
    return [f"{origin}: {SPEC} = {name!r} is not known: {', '.join(LAYERS)} are"]


def _norm(said: Mapping[str, Any], origin: str) -> str:
    norms = {"RMSNorm": "rms", "LayerNorm": "layer"}
    if said["normalization"] not in norms:
        raise UserError(
            f"{origin}: normalization = {said['normalization']!r} is not known: "
            f"{', '.join(norms)} are"
        )
    return norms[said["normalization"]]


def _mlp(said: Mapping[str, Any], gated: bool, origin: str) -> str:
    """The feed-forward. Megatron-core's fused GELU is the tanh approximation, the other is not
    (fusions/)."""
    name = _named(said["activation_func"])
    kind = ACTIVATIONS.get(name) if isinstance(name, str) else None
    if (kind, gated) == ("silu", True):
        return "swiglu"
    if (kind, gated) == ("gelu", False):
        return "gelu" if said["bias_activation_fusion"] else "gelu_exact"
    gate = "a gate" if gated else "no gate"
    raise UserError(
        f"{origin}: activation_func {name!r} with {gate} is not known: torch's silu with one "
        "and gelu without are"
    )


def _scaling(said: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the scaling of rotary positions: the four keys of Llama 3.1, all or none."""
    given = {ours: said[key] for key, ours in SCALING.items() if key in said}
    if not given and not STRETCHED.search(said["_target_"]):
        return {}
    if len(given) < len(SCALING):
        raise UserError(
            f"{origin} lacks some of {', '.join(SCALING)}: all of them say how rotary "
            "positions are stretched"
        )
    return {"kind": "llama3", **given}
