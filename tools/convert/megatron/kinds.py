"""The kind of value that each argument of Megatron has, so that none of another kind is taken for
something else.

Python takes the text "False" for true and True for 1. A checkpoint's args are written by many
programs, and one that wrote text where Megatron-LM has a switch or a number would become another
model without a word.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megaprec.errors import UserError
from megaprec.kinds import is_number

SWITCH = "True or False"
SIZE = "a whole number from 1 on"
COUNT = "a whole number from 0 on"
NUMBER = "a number"
WORD = "a word"
_NAMES = {
    SWITCH: (
        "group_query_attention rotary_interleaved use_rope_scaling swiglu gated_linear_unit "
        "bias_gelu_fusion "
        "bias_activation_fusion use_te_activation_func add_bias_linear add_qkv_bias "
        "qk_layernorm quick_geglu "
        "untie_embeddings_and_output_weights share_embeddings_and_output_weights "
        "moe_router_pre_softmax "
        "moe_grouped_gemm moe_router_enable_expert_bias moe_shared_expert_gate "
        "multi_latent_attention "
        "use_rotary_position_embeddings yarn_correction_range_round_to_int fp16 bf16"
    ),
    SIZE: (
        "num_layers hidden_size num_attention_heads num_query_groups kv_channels "
        "ffn_hidden_size moe_ffn_hidden_size "
        "vocab_size padded_vocab_size max_position_embeddings seq_length moe_router_topk "
        "kv_lora_rank qk_head_dim "
        "qk_pos_emb_head_dim v_head_dim original_max_position_embeddings "
        "yarn_original_max_position_embeddings "
        "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size "
        "expert_tensor_parallel_size data_parallel_size"
    ),
    COUNT: (
        "num_experts moe_router_num_groups moe_router_group_topk "
        "moe_shared_expert_intermediate_size q_lora_rank "
        "mtp_num_layers consumed_train_samples iteration num_steps"
    ),
    WORD: "optimizer transformer_impl tokenizer_type lr_decay_style moe_token_dispatcher_type",
    NUMBER: (
        "norm_epsilon rotary_base rotary_percent rotary_seq_len_interpolation_factor "
        "rope_scaling_factor "
        "softmax_scale moe_router_topk_scaling_factor moe_router_bias_update_rate "
        "rotary_scaling_factor beta_fast "
        "beta_slow mscale mscale_all_dim yarn_beta_fast yarn_beta_slow glu_linear_offset "
        "activation_func_clamp_value "
        "moe_aux_loss_coeff moe_z_loss_coeff mtp_loss_scaling_factor hidden_dropout "
        "attention_dropout init_method_std"
    ),
}
KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}


def require_kinds(args: Mapping[str, Any]) -> None:
    """Raise UserError for each argument whose value is of another kind; None is no value."""
    if problems := [*_wrong_kinds(args)]:
        raise UserError(*problems)


def _wrong_kinds(args: Mapping[str, Any]) -> Iterator[str]:
    for key, value in args.items():
        if value is not None and key in KINDS and not is_of(KINDS[key], value):
            yield (
                f"Megatron's {key} = {value!r} is not {KINDS[key]}: these args are not as "
                "Megatron-LM writes them"
            )


def is_of(kind: str, value: Any) -> bool:
    """Return True for a value of a kind of this module."""
    if kind == WORD:
        return isinstance(value, str)
    if kind == SWITCH:
        return isinstance(value, int) and value in (0, 1)
    if kind == NUMBER:
        return is_number(value)
    smallest = 1 if kind == SIZE else 0
    return isinstance(value, int) and not isinstance(value, bool) and value >= smallest
