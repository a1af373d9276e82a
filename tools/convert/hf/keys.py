"""All keys of a Hugging Face config.json: their defaults, or why they do not matter.

A key is one of four things: read; known not to change what a model computes (`FREE`, each with the reason); known to
change it, and accepted with few values only (`ONLY`); or unknown. An unknown key is refused unless it is null, for its
meaning is not known. Defaults are those of each family's class in transformers (5.x), which define the meaning of a
missing key.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megaprec.errors import UserError

Json = Mapping[str, Any]

_SHARED: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "head_dim": None,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "partial_rotary_factor": None,
    "original_max_position_embeddings": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "layer_types": None,
}
_LLAMA = _SHARED | {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
}
_MISTRAL = _SHARED | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN2 = _LLAMA | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "bos_token_id": None,
    "eos_token_id": None,
}
_EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.001}
# By model_type: what a key is that config.json lacks.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "pad_token_id": None,
        "layer_types": None,
    },
    "gpt_neox": {
        **_SHARED,
        "vocab_size": 50432,
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "hidden_act": "gelu",
        "hidden_dropout": 0.0,
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "attention_bias": True,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000.0,
        "rope_theta": None,
        "bos_token_id": 0,
    },
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "mixtral": _MISTRAL
    | _EXPERTS
    | {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "router_jitter_noise": 0.0,
    },
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | {"head_dim": 128},
    "qwen3_moe": _QWEN2
    | _EXPERTS
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "max_window_layers": 0,  # no key of its class
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
}
# Other names of a key, by model_type: transformers takes both.
ALIASES: dict[str, dict[str, str]] = {
    "gpt2": {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "n_ctx": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
}

_LABELS = "of classifiers"
_GENERATION_KEYS = (
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature "
    "top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
    "bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id "
    "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens epsilon_cutoff eta_cutoff encoder_repetition_penalty num_assistant_tokens "
    "num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind target_lookbehind "
    "decoder_start_token_id sep_token_id cls_token_id prefix max_new_tokens"
)
_OUTPUTS = "what else is handed out"
_ORIGIN = "where the folder came from"
_DTYPE = "tensors have the dtype that their files say"
# Keys that do not change what a model computes, and why.
FREE: dict[str, str] = {
    "model_type": "read before all others",
    "architectures": "model_type says it",
    "auto_map": "code of the folder's own is not run",
    "dtype": _DTYPE,
    "torch_dtype": _DTYPE,
    **dict.fromkeys(
        (
            "_name_or_path",
            "name_or_path",
            "_commit_hash",
            "transformers_version",
            "unsloth_fixed",
            "unsloth_version",
            "is_llama_config",
            "transformers.js_config",
            "finetuning_task",
            "task_specific_params",
            "tokenizer_class",
        ),
        _ORIGIN,
    ),
    **dict.fromkeys(
        (
            "id2label",
            "label2id",
            "num_labels",
            "problem_type",
            "classifier_dropout",
            "summary_type",
            "summary_use_proj",
        ),
        _LABELS,
    ),
    **dict.fromkeys(("summary_activation", "summary_proj_to_labels", "summary_first_dropout"), _LABELS),
    **dict.fromkeys(
        (
            "use_cache",
            "output_attentions",
            "output_hidden_states",
            "output_router_logits",
            "return_dict",
            "torchscript",
        ),
        _OUTPUTS,
    ),
    **dict.fromkeys(("output_past", "tie_last_hidden_states"), _OUTPUTS),
    **dict.fromkeys(
        (
            "attn_implementation",
            "_attn_implementation",
            "_attn_implementation_autoset",
            "experts_implementation",
            "_experts_implementation",
            "use_bfloat16",
            "tf_legacy_loss",
            "reorder_and_upcast_attn",
            "chunk_size_feed_forward",
            "pretraining_tp",
            "gradient_checkpointing",
        ),
        "how the same is computed",
    ),
    "is_decoder": "all models here are decoders",
    **dict.fromkeys(_GENERATION_KEYS.split(), "of generation, after the model has computed"),
}
_NO = (False, None)
_NONE = (0, 0.0, None)
# Keys that make it another model, or would if transformers read them: the values that leave it as it is.
ONLY: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "scale_attn_weights": (True,),
    "attention_bias": _NO,
    "mlp_bias": _NO,
    "norm_topk_prob": (True, None),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    "pruned_heads": ({}, None),
    "use_sliding_window": _NO,
    "sliding_window": (None,),
    "head_dim": (None,),
    **dict.fromkeys(
        (
            "scale_attn_by_inverse_layer_idx",
            "add_cross_attention",
            "is_encoder_decoder",
            "tie_encoder_decoder",
            "rope_interleaved",
            "use_mrope",
            "use_qk_norm",
            "qkv_bias",
        ),
        _NO,
    ),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "attention_dropout"), _NONE),
    **dict.fromkeys(("router_jitter_noise", "embedding_dropout"), _NONE),
}
# Of some families, further values.
ONLY_OF: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt2": {"attention_bias": (True, None), "mlp_bias": (True, None)},
    "gpt_neox": {"mlp_bias": (True, None)},
    "qwen2": {"qkv_bias": (True, None)},
}
# What to say of a key besides that it is not known.
WHY: dict[str, str] = {
    "quantization_config": "its weights are quantized: convert those that they were made from",
    "per_layer_config": "layers of several kinds cannot be converted",
    "rope_theta": "rope_parameters and rope_scaling say another",
}


class Keys:
    """The keys of a config.json, missing ones with the default of the family. Records which were read."""

    def __init__(self, given: Json, kind: str) -> None:
        self.kind, self.asked = kind, set[str]()
        self.given = dict(given)
        for other, name in ALIASES.get(kind, {}).items():
            if other in given:
                self._alias(other, name)

    def _alias(self, other: str, name: str) -> None:
        value = self.given.pop(other)
        if self.given.setdefault(name, value) != value:
            raise UserError(f"config.json has {other} = {value!r}, but {name} = {self.given[name]!r}: one is wrong")

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return self.given[key] if key in self.given else DEFAULTS[self.kind][key]

    def has(self, key: str) -> bool:
        """Return True if the file itself has the key, and not null."""
        return self.given.get(key) is not None

    def unread(self) -> Iterator[str]:
        """Return a line for each key that was not read and may change what the model computes."""
        for key in sorted(self.given.keys() - self.asked - FREE.keys()):
            if problem := self._problem(key, self.given[key]):
                yield problem

    def _problem(self, key: str, value: Any) -> str:
        said = f"config.json has {key} = {_short(value)}"
        if key in WHY:
            return f"{said}: {WHY[key]}" if value is not None else ""
        if known := ONLY_OF.get(self.kind, {}).get(key) or ONLY.get(key):
            return "" if _among(value, known) else f"{said}, of which only {_or(known)} is known"
        if value is None:
            return ""
        return f"{said}, which is not known of a {self.kind} model: take it out if the model computes the same without"


def require(value: Any, key: str, known: tuple[Any, ...]) -> Any:
    """Return `value`. Raises UserError that names `key` if it is not one of `known`."""
    if not _among(value, known):
        raise UserError(f"config.json has {key} = {_short(value)}, of which only {_or(known)} is known")
    return value


def notes(config: Json, architecture: str) -> list[str]:
    """Return notes on settings of a config.json that are ignored though users may expect otherwise."""
    said = config.get("architectures")
    family = architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel").lower()
    others = [name for name in said if not str(name).lower().startswith(family)] if isinstance(said, list) else []
    found = [f"architectures = {others}: it is read as {architecture}, as model_type says"] if others else []
    if config.get("auto_map"):
        found.append(f"auto_map: code of the folder's own is not run; it is read as {architecture}")
    return [f"config.json has {note}" for note in found]


def _among(value: Any, known: tuple[Any, ...]) -> bool:
    """Return True if `value` is in `known`, where 1 is not True."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in known)


def _or(values: tuple[Any, ...]) -> str:
    return " or ".join("null" if value is None else repr(value) for value in values)


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
