"""All keys of a Hugging Face config.json: read, or why they do not matter.

A key is one of four things: read; known not to change what a model computes (`FREE`, each with the
reason); known to change it, and accepted with few values only (`ONLY`); or unknown. An unknown key
is refused unless it is null, for its meaning is not known. The default of a missing key is that of
its family (`defaults`).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megaprec.errors import UserError
from tools.convert.hf.defaults import ALIASES, DEFAULTS
from tools.convert.hf.kinds import nulls, short, wrong_kinds

Json = Mapping[str, Any]

_LABELS = "of classifiers"
_GENERATION_KEYS = (
    "max_length min_length do_sample early_stopping num_beams num_beam_groups "
    "diversity_penalty temperature "
    "top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size "
    "bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id "
    "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens epsilon_cutoff eta_cutoff encoder_repetition_penalty "
    "num_assistant_tokens "
    "num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind "
    "target_lookbehind "
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
            "summary_activation",
            "summary_proj_to_labels",
            "summary_first_dropout",
        ),
        _LABELS,
    ),
    **dict.fromkeys(
        (
            "use_cache",
            "output_attentions",
            "output_hidden_states",
            "output_router_logits",
            "return_dict",
            "torchscript",
            "output_past",
            "tie_last_hidden_states",
        ),
        _OUTPUTS,
    ),
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
            "ep_size",
        ),
        "how the same is computed",
    ),
    "_sliding_window_pattern": "transformers writes it and reads layer_types",
    "cache_implementation": "of generation, after the model has computed",
    "is_decoder": "all models here are decoders",
    **dict.fromkeys(_GENERATION_KEYS.split(), "of generation, after the model has computed"),
}
_NO = (False, None)
_NONE = (0, 0.0, None)
# Keys that make it another model, or would if transformers read them: the values that leave it as
# it is.
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
            "use_bidirectional_attention",
        ),
        _NO,
    ),
    **dict.fromkeys(
        (
            "resid_pdrop",
            "embd_pdrop",
            "attn_pdrop",
            "hidden_dropout",
            "attention_dropout",
            "router_jitter_noise",
            "embedding_dropout",
        ),
        _NONE,
    ),
}
# Of some families, further values.
ONLY_OF: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt2": {"attention_bias": (True, None), "mlp_bias": (True, None)},
    "gpt_neox": {"mlp_bias": (True, None)},
    "qwen2": {"qkv_bias": (True, None)},
    "deepseek_v2": {
        "scoring_func": ("softmax", None),
        "moe_layer_freq": (1, None),
        "seq_aux": (True, None),
    },
    "deepseek_v3": {
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
        "moe_layer_freq": (1, None),
        "seq_aux": (True, None),
    },
}
# What to say of a key besides that it is not known.
WHY: dict[str, str] = {
    "compression_config": (
        "its weights are quantized or sparse: convert the folder that they were made from"
    ),
    "per_layer_config": "layers of several kinds cannot be converted",
    "rope_theta": "rope_parameters and rope_scaling say another",
}


class Keys:
    """The keys of a config.json, missing ones with the default of the family. Records which were
    read.

    stated: the keys that the file itself has, by their usual names.
    """

    def __init__(self, config: Json, kind: str) -> None:
        self.kind = kind
        self.stated = dict(config)
        self._read = set[str]()
        if problems := list(wrong_kinds(config, kind)):
            raise UserError(*problems)
        for alias, name in ALIASES.get(kind, {}).items():
            if alias in config:
                self._rename(alias, name)

    def _rename(self, alias: str, name: str) -> None:
        """Take the value of `alias` for that of `name`."""
        value = self.stated.pop(alias)
        if self.stated.setdefault(name, value) != value:
            raise UserError.of(
                "convert.hf_alias_differs",
                alias=alias,
                value=value,
                name=name,
                stated=self.stated[name],
            )

    def __getitem__(self, key: str) -> Any:
        self.mark_read(key)
        return self.stated[key] if key in self.stated else DEFAULTS[self.kind][key]

    def mark_read(self, key: str) -> None:
        """Record that a key was read, or need not be."""
        self._read.add(key)

    def has(self, key: str) -> bool:
        """Return True if the file itself has the key, and not null."""
        return self.stated.get(key) is not None

    def nulls(self) -> list[str]:
        """Return a line for each null that was read though its key has to have a value."""
        return list(nulls(self.stated, self.kind, self._read))

    def unread(self) -> Iterator[str]:
        """Return a line for each key that was not read and may change what the model computes."""
        for key in sorted(self.stated.keys() - self._read - FREE.keys()):
            if problem := self._problem(key, self.stated[key]):
                yield problem

    def _problem(self, key: str, value: Any) -> str:
        """Return why a key that was not read cannot be ignored; "" if it can."""
        setting = f"config.json has {key} = {short(value)}"
        if key in WHY:
            return f"{setting}: {WHY[key]}" if value is not None else ""
        allowed = ONLY_OF.get(self.kind, {}).get(key) or ONLY.get(key)
        if allowed:
            if _is_among(value, allowed):
                return ""
            return f"{setting}, of which only {_alternatives(allowed)} is known"
        if value is None:
            return ""
        return (
            f"{setting}, which is not known of a {self.kind} model: take it out if the model "
            "computes the same without"
        )


def require(value: Any, key: str, allowed: tuple[Any, ...]) -> Any:
    """Return `value`. Raises UserError that names `key` if it is not one of `allowed`."""
    if not _is_among(value, allowed):
        raise UserError.of(
            "convert.hf_only_value",
            key=key,
            short=short(value),
            alternatives=_alternatives(allowed),
        )
    return value


def _is_among(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Return True if `value` is in `allowed`, where 1 is not True."""
    return any(
        value == candidate and isinstance(value, bool) == isinstance(candidate, bool)
        for candidate in allowed
    )


def _alternatives(values: tuple[Any, ...]) -> str:
    return " or ".join("null" if value is None else repr(value) for value in values)
