"""The keys of a Hugging Face config.json: kinds of values, defaults, and keys that are left over.

A key is one of four things: read; known not to change what a model computes (`FREE`, each with the
reason); known to change it, and accepted with few values only (`ALLOWED`); or unknown. An unknown
key is refused unless it is null, for its meaning is not known. The default of a missing key is that
of its family.

Python would take much that transformers does not: text as a number, any text as true. So a value of
another kind than the default of its key is refused by the name of the key before anything is read.
Null is not judged there, since some keys may be null: if no model can be made, `ConfigKeys.nulls`
names those that may not.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from megaprec.errors import Problem, UserError
from models.config import ModelConfig
from models.latent import LARGEST_SIZE

Json = Mapping[str, Any]
Fields = dict[str, Any]  # of a ModelConfig

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Kinds of values that the default does not tell: it is null in some family, or a whole number where
# others may have a fraction.
_KIND_OF_KEY: dict[str, type] = {
    "head_dim": int,
    "n_inner": int,
    "qk_head_dim": int,
    "q_lora_rank": int,
    "num_key_value_heads": int,
    "sliding_window": int,
    "n_group": int,
    "topk_group": int,
    "num_experts_per_tok": int,
    "original_max_position_embeddings": int,
    "initial_context_length": int,
    "experts_per_token": int,
    "moe_latent_size": int,
    "rotary_dim": int,
    "num_global_key_value_heads": int,
    "per_layer_config": dict,
    "n_routed_experts": int,
    "n_shared_experts": int,
    "embedding_initializer_range": float,
    "initializer_range": float,
    "mlp_layer_types": list,
    "no_rope_layers": list,
    "attn_type_list": list,
    "rope_theta": float,
    "partial_rotary_factor": float,
    "query_pre_attn_scalar": float,
    "layer_types": list,
    "layers_block_type": list,
    "hybrid_override_pattern": str,
    "time_step_limit": list,
    "mlp_only_layers": list,
    "rope_parameters": dict,
    "rope_scaling": dict,
    "linear_attn_config": dict,
}
_MAY_BE_NULL = (
    "num_key_value_heads",
    "sliding_window",
    "head_dim",
    "q_lora_rank",
    "num_mtp_layers",
    "mtp_num_hidden_layers",
    "partial_rotary_factor",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "router_jitter_noise",
)
_ABOVE_ZERO = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_global_key_value_heads",
    "head_dim",
    "global_head_dim",
    "max_position_embeddings",
    "n_embd",
    "n_layer",
    "n_head",
    "n_positions",
    "decoder_sparse_step",
    "full_attention_interval",
    "no_rope_layer_interval",
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "logit_scale",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "initializer_range",
    "query_pre_attn_scalar",
    "swiglu_alpha",
    "swiglu_limit",
    "time_step_min",
    "rope_local_base_freq",
)
_NUMBERS_OF_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
)
MOST_LAYERS = 4096  # as `model.layers`; layers are listed before a model is made
MOST_SHOWN = 60  # characters of a value that is shown in a line
_DESCRIPTIONS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number, 0 or more",
    float: "a number, 0 or more",
    str: "text",
    list: "a list",
    dict: "a table",
}

_GENERATION_KEYS = (
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty "
    "temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores "
    "return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values "
    "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens epsilon_cutoff "
    "eta_cutoff encoder_repetition_penalty num_assistant_tokens num_assistant_tokens_schedule "
    "assistant_confidence_threshold assistant_lookbehind target_lookbehind decoder_start_token_id "
    "sep_token_id cls_token_id prefix max_new_tokens cache_implementation"
)
_REASONS = {
    "of generation, after the model has computed": _GENERATION_KEYS,
    "tensors have the dtype that their files say": "dtype torch_dtype",
    "where the folder came from": (
        "_name_or_path name_or_path _commit_hash transformers_version unsloth_fixed "
        "unsloth_version is_llama_config transformers.js_config finetuning_task "
        "task_specific_params tokenizer_class"
    ),
    "of classifiers": (
        "id2label label2id num_labels problem_type classifier_dropout summary_type "
        "summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout"
    ),
    "what else is handed out": (
        "use_cache output_attentions output_hidden_states output_router_logits return_dict "
        "torchscript output_past tie_last_hidden_states"
    ),
    "how the same is computed": (
        "attn_implementation _attn_implementation _attn_implementation_autoset "
        "experts_implementation _experts_implementation use_bfloat16 tf_legacy_loss "
        "reorder_and_upcast_attn chunk_size_feed_forward pretraining_tp gradient_checkpointing "
        "ep_size"
    ),
    "read before all others": "model_type",
    "model_type says it": "architectures",
    "code of the folder's own is not run": "auto_map",
    "transformers writes it and reads layer_types": "_sliding_window_pattern",
    "all models here are decoders": "is_decoder",
    # Kimi's class has it as another name of max_position_embeddings, which is read
    "how long a text its tokenizer takes": "model_max_length",
}
# Keys that do not change what a model computes, and why.
FREE: dict[str, str] = {key: reason for reason, keys in _REASONS.items() for key in keys.split()}
_OFF = (False, None)
_ZERO = (0, 0.0, None)
# Keys that make it another model, or would if transformers read them: the values that leave it as
# it is.
ALLOWED: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "scale_attn_weights": (True,),
    "norm_topk_prob": (True, None),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    "pruned_heads": ({}, None),
    "sliding_window": (None,),
    "head_dim": (None,),
    "attention_bias": _OFF,
    "mlp_bias": _OFF,
    "use_sliding_window": _OFF,
    "scale_attn_by_inverse_layer_idx": _OFF,
    "add_cross_attention": _OFF,
    "is_encoder_decoder": _OFF,
    "tie_encoder_decoder": _OFF,
    "rope_interleaved": _OFF,
    "use_mrope": _OFF,
    "use_qk_norm": _OFF,
    "qkv_bias": _OFF,
    "use_bidirectional_attention": _OFF,
    "resid_pdrop": _ZERO,
    "embd_pdrop": _ZERO,
    "attn_pdrop": _ZERO,
    "hidden_dropout": _ZERO,
    "attention_dropout": _ZERO,
    "router_jitter_noise": _ZERO,
    "embedding_dropout": _ZERO,
    "num_experts": _ZERO,
    "num_local_experts": _ZERO,
    "n_routed_experts": _ZERO,
    "n_shared_experts": _ZERO,
    "num_experts_per_tok": _ZERO,
    "num_mtp_layers": _ZERO,
    "num_nextn_predict_layers": _ZERO,
    "mtp_num_hidden_layers": _ZERO,
}
# What to say of a key besides that it is not known.
_WHY: dict[str, str] = {
    "compression_config": (
        "its weights are quantized or sparse: convert the folder that they were made from"
    ),
    "per_layer_config": "layers of several kinds cannot be converted",
    "rope_theta": "rope_parameters and rope_scaling say another",
}


@dataclass(frozen=True)
class Entry:
    """Keys of a config.json and fields of a model that say the same, in both directions.

    read: returns the fields that keys say; an entry may only check its keys. Raises UserError.
    write: returns the keys that say the fields of a model.
    """

    read: Callable[["ConfigKeys"], Fields] = lambda keys: {}
    write: Callable[[ModelConfig], Json] = lambda model: {}


@dataclass(frozen=True)
class Family:
    """A model_type of transformers.

    ours: `ModelConfig.family` of its models.
    architecture: the class that transformers makes of it.
    defaults: key -> what its class takes if the key is missing. Keys that only published files have
        stand there too.
    entries: all keys that are read. Of two entries for one key or field the later one counts.
    aliases: another name of a key -> the key; transformers takes both.
    allowed: further keys of `ALLOWED`, or others of their values.
    requires: what else the class asks of a model, which no key says.
    beyond_transformers_4: what of a model transformers 4 refuses or computes otherwise.
    """

    ours: str
    architecture: str
    defaults: Json
    entries: Sequence[Entry]
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    requires: Callable[[ModelConfig], bool] = lambda model: True
    beyond_transformers_4: Callable[[ModelConfig], Iterable[str]] = lambda model: ()


def same(key: str, *fields: str) -> Entry:
    """Return the entry of a key whose value is that of each of these fields, as it stands."""
    return Entry(
        lambda config: dict.fromkeys(fields, config[key]),
        lambda model: {key: getattr(model, fields[-1])},
    )


def always(**fields: Any) -> Entry:
    """Return the entry of fields that all models of a family have, and that no key says."""
    return Entry(lambda config: fields)


def only(key: str, *values: Any) -> Entry:
    """Return the entry of a key that may have these values alone, of which the first is written."""

    def read(config: ConfigKeys) -> Fields:
        require(config[key], key, values)
        return {}

    return Entry(read, lambda model: {key: values[0]})


class ConfigKeys:
    """The keys of a config.json, missing ones with the default of the family. Records which were
    read.

    stated: the keys that the file itself has, by their usual names.
    Raises UserError for values of another kind, and for two names of a key that differ.
    """

    def __init__(self, config: Json, family: Family) -> None:
        self.model_type: str = config["model_type"]
        self.family = family
        self.stated = dict(config)
        self._read = set[str]()
        self._stated_names = dict[str, str]()  # of the file: the usual name -> the one that it has
        if problems := list(_wrong_kinds(config, family)):
            raise UserError(*problems)
        for alias, name in family.aliases.items():
            if alias in config:
                self._rename(alias, name)

    def _rename(self, alias: str, name: str) -> None:
        """Take the value of `alias` for that of `name`."""
        # transformers takes either name, but a file with both must say one thing.
        stated_value = self.stated.pop(alias)
        self._stated_names.setdefault(name, alias)
        if self.stated.setdefault(name, stated_value) != stated_value:
            raise UserError.of(
                "convert.hf_alias_differs",
                alias=alias,
                value=stated_value,
                name=name,
                stated=self.stated[name],
            )

    def __getitem__(self, key: str) -> Any:
        self.mark_read(key)
        return self.stated[key] if key in self.stated else self.family.defaults[key]

    def as_stated(self, key: str) -> str:
        """Return the name by which the file has a key."""
        return self._stated_names.get(key, key)

    def read(self, entry: Entry) -> tuple[Fields, frozenset[str]]:
        """Return the fields of an entry, and the keys that it read for them."""
        earlier = self._read
        self._read = set()
        try:
            fields = entry.read(self)
            return fields, frozenset(self._read)
        finally:
            self._read |= earlier

    def above_zero(self, key: str) -> Any:
        """Return the value of a key. Raises UserError if it is 0."""
        value = self[key]
        if value == 0:
            raise UserError(wrong_value(self.as_stated(key), value, "above 0"))
        return value

    def mark_read(self, *keys: str) -> None:
        """Record that keys were read, or need not be."""
        self._read.update(keys)

    @property
    def read_so_far(self) -> frozenset[str]:
        """Return the keys that were read, or need not be."""
        return frozenset(self._read)

    def has(self, key: str) -> bool:
        """Return True if the file itself has the key, and not null."""
        return self.stated.get(key) is not None

    def nulls(self) -> list[Problem]:
        """Return a line for each null that was read though its key has to have a value."""
        problems = []
        for key in sorted(self._read - {*_MAY_BE_NULL, *IDS}):
            is_null = key in self.stated and self.stated[key] is None
            if is_null and self.family.defaults.get(key) is not None:
                problems.append(Problem.of("convert.hf_null", key=key))
        return problems

    def unread(self) -> Iterator[Problem]:
        """Yield a line for each key that was not read and may change what the model computes."""
        for key in sorted(self.stated.keys() - self._read - FREE.keys()):
            stated_value = self.stated[key]
            # A family may take other values than most.
            allowed = self.family.allowed.get(key) or ALLOWED.get(key)
            if key in _WHY:
                if stated_value is not None:
                    yield Problem.of(
                        "convert.hf_key_why", key=key, value=short(stated_value), why=_WHY[key]
                    )
            elif allowed:
                if not _is_among(stated_value, allowed):
                    yield _not_allowed(key, stated_value, allowed)
            elif stated_value is not None:
                yield Problem.of(
                    "convert.hf_key_unread",
                    key=key,
                    value=short(stated_value),
                    kind=self.model_type,
                )


def require(value: Any, key: str, allowed: tuple[Any, ...]) -> Any:
    """Return `value`. Raises UserError that names `key` if it is not one of `allowed`."""
    if not _is_among(value, allowed):
        raise UserError(_not_allowed(key, value, allowed))
    return value


def _not_allowed(key: str, value: Any, allowed: tuple[Any, ...]) -> Problem:
    """Return the problem with a key whose value is none of those that are read."""
    alternatives = ("null" if other is None else repr(other) for other in allowed)
    return Problem.of(
        "convert.hf_only_value",
        key=key,
        value=short(value),
        alternatives=" or ".join(alternatives),
    )


def _is_among(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Return True if `value` is in `allowed`, where 1 is not True."""
    is_bool = isinstance(value, bool)
    # Python takes True for 1, and JSON does not.
    return any(
        value == candidate and is_bool == isinstance(candidate, bool) for candidate in allowed
    )


def _wrong_kinds(config: Json, family: Family) -> Iterator[Problem]:
    """Yield a line for each value in a config.json that is of another kind than its key."""
    for key, value in config.items():
        if value is None:
            continue
        remedy = _remedy_of_ids(value) if key in IDS else _remedy_of_kind(key, value, family)
        if remedy:
            yield wrong_value(key, value, remedy)


def wrong_value(key: str, value: Any, remedy: str) -> Problem:
    """Return the line about a value that must be another. remedy: what it must be."""
    return Problem.of("convert.hf_value_kind", key=key, value=short(value), remedy=remedy)


def _remedy_of_ids(value: Any) -> str:
    """Return what the id of a special token must be; "" if it is."""
    ids = value if isinstance(value, list) else [value]
    return "" if all(type(token_id) is int for token_id in ids) else "the number of a token"


def _remedy_of_kind(key: str, value: Any, family: Family) -> str:
    """Return what the value of a key must be; "" if it is, or if the key is none of the family."""
    name = family.aliases.get(key, key)
    if name not in family.defaults:
        return ""
    kind = _KIND_OF_KEY.get(name, type(family.defaults[name]))
    if kind not in _DESCRIPTIONS:
        return ""
    if not _is_of_kind(value, kind):
        return _DESCRIPTIONS[kind]
    if name in _ABOVE_ZERO and not value:
        return "above 0"
    if kind is int and name in _NUMBERS_OF_LAYERS and value > MOST_LAYERS:
        return f"at most {MOST_LAYERS}"
    if kind is int and value > LARGEST_SIZE:
        return f"at most {LARGEST_SIZE}"
    return ""


def _is_of_kind(value: Any, kind: type) -> bool:
    """Return True if a value is of a kind; true is no number, and no number is below 0."""
    if kind in (bool, str, list, dict):
        return isinstance(value, kind)
    # A whole number may stand for one with a fraction, as JSON writers abbreviate 1.0.
    number_types = (int,) if kind is int else (int, float)
    return type(value) in number_types and isfinite(value) and value >= 0


def short(value: Any) -> str:
    """Return a value as it is shown in a line."""
    printed = repr(value)
    return printed if len(printed) <= MOST_SHOWN else f"{printed[: MOST_SHOWN - 3]}..."
