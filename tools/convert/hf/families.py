"""The table of Hugging Face's families: a config.json's keys, our fields, and the defaults.

A family is one `Family`: the defaults of its keys are those of its class in transformers 5, and its
entries read and write. Whether a family can say all of a model needs no table of its own: what is
written is read back (`tools.convert.hf.config`).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.hf.delta_layers import DELTA_LAYERS, OTHER_KEYS_OF_QWEN3_5
from tools.convert.hf.experts import (
    EXPERTS_OF_DEEPSEEK_V2,
    EXPERTS_OF_DEEPSEEK_V3,
    EXPERTS_OF_DOTS1,
    EXPERTS_OF_GLM4,
    EXPERTS_OF_GLM4_LITE,
    EXPERTS_OF_OLMOE,
    EXPERTS_OF_QWEN3_5,
    EXPERTS_OF_SOLAR,
    LOCAL_EXPERTS,
    experts_of_qwen,
)
from tools.convert.hf.gemma4_layers import GEMMA4_LAYERS, GEMMA4_PARTS
from tools.convert.hf.hybrid_layers import (
    FEED_FORWARDS_OF_HYBRIDS,
    HYBRID_LAYERS,
    OTHER_KEYS_OF_HYBRIDS,
)
from tools.convert.hf.keys import (
    IDS,
    ConfigKeys,
    Entry,
    Family,
    Fields,
    Json,
    always,
    only,
    require,
    same,
)
from tools.convert.hf.kimi_layers import ALIASES as ALIASES_OF_KIMI
from tools.convert.hf.kimi_layers import ALLOWED as ALLOWED_OF_KIMI
from tools.convert.hf.kimi_layers import EXPERTS_OF_KIMI, KIMI_LAYERS, OTHER_KEYS_OF_KIMI
from tools.convert.hf.rope import (
    NOPE_LAYERS,
    ROPE,
    ROPE_OF_APERTUS,
    ROPE_OF_CWM,
    ROPE_OF_GPT_NEOX,
    ROPE_OF_GPT_OSS,
    ROPE_OF_MINIMAX,
    ROPE_OF_MINISTRAL3,
    ROPE_OF_NANOCHAT,
    ROPE_OF_OLMO2,
    ROPE_OF_PHI3,
    ROPE_OF_QWEN3_5,
    ROPE_OF_SOME_FEATURES,
    by_layer_beyond_transformers_4,
    olmo2_beyond_transformers_4,
    rope_by_layer,
)
from tools.convert.hf.windows import (
    NO_WINDOW,
    WINDOW_OF_ALL_LAYERS,
    WINDOW_OF_QWEN3_MOE,
    WINDOWS_OF_COHERE2,
    WINDOWS_OF_CWM,
    WINDOWS_OF_DOTS1,
    WINDOWS_OF_EXAONE4,
    WINDOWS_OF_MINISTRAL,
    WINDOWS_OF_QWEN,
    WINDOWS_OF_QWEN2_MOE,
    WINDOWS_OF_SMOLLM3,
    by_layer_type,
    require_layers_alike,
)

# swiglu_alpha and swiglu_limit of gpt-oss, which transformers 4 has in its code
PUBLISHED_CLAMP = (1.702, 7.0)
TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh")
EXACT_GELU = ("gelu", "gelu_python")


def keys_of(config: Json) -> ConfigKeys:
    """Return the keys of a config.json, whose model_type must be known."""
    return ConfigKeys(config, FAMILIES[config["model_type"]])


def _skip_ids(config: ConfigKeys) -> Fields:
    config.mark_read(*IDS)  # they are of no model: `special_ids` returns them
    return {}


def _gelu(key: str) -> Entry:
    """Return the entry of an activation function that is one of the two GELUs."""

    def read(config: ConfigKeys) -> Fields:
        name = require(config[key], key, TANH_GELU + EXACT_GELU)
        return {"mlp": "gelu_exact" if name in EXACT_GELU else "gelu"}

    return Entry(read, lambda model: {key: "gelu" if model.mlp == "gelu_exact" else "gelu_new"})


def _read_kv_heads(config: ConfigKeys) -> Fields:
    kv_heads = config["num_key_value_heads"]
    return {"kv_heads": config["num_attention_heads"] if kv_heads is None else kv_heads}


def _read_heads(config: ConfigKeys) -> Fields:
    heads = config["num_attention_heads"]
    head_dim = config["head_dim"]
    return {
        **_read_kv_heads(config),
        "head_dim": config["hidden_size"] // heads if head_dim is None else head_dim,
    }


def _write_heads(model: ModelConfig) -> Json:
    return {"num_key_value_heads": model.kv_heads, "head_dim": model.head_dim}


def _require_default_width(config: ConfigKeys, hidden: int, heads: int) -> Fields:
    """Return no fields. Raises UserError for a head_dim in a family whose class does not read it,
    unless it changes nothing."""
    config.mark_read("head_dim")
    require(config.stated.get("head_dim"), "head_dim", (hidden // heads, None))
    return {}


def _read_gpt2_ffn(config: ConfigKeys) -> Fields:
    inner = config["n_inner"]
    return {"ffn": 4 * config["n_embd"] if inner is None else inner}


def _read_latent_attention(config: ConfigKeys) -> Fields:
    """Return the widths of latents, as `_read_latents`. Raises UserError for another head_dim than
    the width that turns, which their classes put there."""
    require(config["head_dim"], "head_dim", (config["qk_rope_head_dim"], None))
    return _read_latents(config)


def _read_latents(config: ConfigKeys) -> Fields:
    """Return the widths of latents. Raises UserError for those with which there is no latent
    attention."""
    rope_dim = config["qk_rope_head_dim"]
    nope_dim = config["qk_nope_head_dim"]
    for key in (
        "q_lora_rank",
        "kv_lora_rank",
        "qk_rope_head_dim",
        "qk_nope_head_dim",
        "v_head_dim",
    ):
        # Queries may have no latent.
        if config[key] == 0 or (config[key] is None and key != "q_lora_rank"):
            raise UserError.of("convert.hf_no_latent", key=key, keys=config[key])
    if rope_dim % 2:
        raise UserError.of("convert.hf_rotary_odd", qk_rope_head_dim=rope_dim)
    # Every head has keys and values of its own, made of the shared latent.
    heads = config["num_attention_heads"]
    require(config["num_key_value_heads"], "num_key_value_heads", (heads, None))
    require(config["qk_head_dim"], "qk_head_dim", (rope_dim + nope_dim, None))
    latent = {
        "kv_rank": config["kv_lora_rank"],
        "query_rank": config["q_lora_rank"] or 0,
        "rope_dim": rope_dim,
        "nope_dim": nope_dim,
        "value_dim": config["v_head_dim"],
    }
    return {"latent": latent}


def _write_latent_attention(model: ModelConfig) -> Json:
    return {
        "num_key_value_heads": model.heads,
        "q_lora_rank": model.latent.query_rank or None,
        "kv_lora_rank": model.latent.kv_rank,
        "qk_rope_head_dim": model.latent.rope_dim,
        "qk_nope_head_dim": model.latent.nope_dim,
        "v_head_dim": model.latent.value_dim,
    }


def _read_no_mtp_layers(config: ConfigKeys) -> Fields:
    config.mark_read("num_mtp_layers")  # `notes` says that there are none
    return {}


def _read_kinds_of_minimax(config: ConfigKeys) -> Fields:
    """Return no fields. Raises UserError for layers of lightning attention, which MiniMax-M1
    has."""
    for kind in config["attn_type_list"] or ():
        require(kind, "attn_type_list", (1,))
    return {}


def _read_biases_of_internlm3(config: ConfigKeys) -> Fields:
    """Return the biases of InternLM3. Raises UserError unless all layers have some or none, which
    its class requires."""
    has_biases = config["attention_bias"]
    if config["mlp_bias"] != has_biases:
        raise UserError.of(
            "convert.hf_some_biases",
            qkv_key=config.as_stated("attention_bias"),
            qkv_bias=has_biases,
            key=config.as_stated("mlp_bias"),
            value=config["mlp_bias"],
        )
    return dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), has_biases)


def _read_first_weights_of_youtu(config: ConfigKeys) -> Fields:
    """Return the standard deviations of first weights, which follow from hidden_size and each
    other where the file does not say them."""
    std = config["initializer_range"]
    if std is None:
        std = 2.0 / (5.0 * config["hidden_size"]) ** 0.5
    embedding_std = config["embedding_initializer_range"] or 2.0 * std
    return {"init_std": std, "init": {"embedding": embedding_std}}


def _write_first_weights_of_youtu(model: ModelConfig) -> Json:
    return {
        "initializer_range": model.init_std,
        "embedding_initializer_range": model.init.embedding or model.init_std,
    }


def _softcap(key: str, field: str) -> Entry:
    """Return the entry of a soft cap; null there is 0 here."""

    def read(config: ConfigKeys) -> Fields:
        cap = config[key]
        if cap is not None and not cap > 0:
            raise UserError.of("convert.hf_softcap_zero", key=key, cap=cap)
        return {field: float(cap or 0)}

    return Entry(read, lambda model: {key: getattr(model, field) or None})


def _number(key: str, field: str) -> Entry:
    """Return the entry of a number with a fraction, which JSON may write without one."""
    return Entry(
        lambda config: {field: float(config[key])}, lambda model: {key: getattr(model, field)}
    )


def _factor_of_scores(model: ModelConfig) -> float:
    """Return what scores are multiplied by, so that it is read back as the same
    attention_scalar."""
    factor = model.attention_scalar**-0.5
    neighbours = (factor, math.nextafter(factor, 0.0), math.nextafter(factor, math.inf))
    exact = (near for near in neighbours if near**-2 == model.attention_scalar)
    return next(exact, factor)


def _scale_of_logits(key: str) -> Entry:
    """Return the entry of what logits are multiplied by; ours are divided."""

    def write(model: ModelConfig) -> Json:
        # Read back as the same logit_divisor: of such numbers the shortest.
        scale = 1.0 / model.logit_divisor
        neighbours = (scale, math.nextafter(scale, 0.0), math.nextafter(scale, math.inf))
        exact = [near for near in neighbours if 1.0 / near == model.logit_divisor]
        return {key: min(exact or [scale], key=lambda number: len(repr(number)))}

    return Entry(lambda config: {"logit_divisor": 1.0 / config[key]}, write)


def _read_repeated_experts_per_token(config: ConfigKeys) -> Fields:
    # Published files of gpt-oss have it, and transformers ignores it.
    per_token = config["num_experts_per_tok"]
    require(config["experts_per_token"], "experts_per_token", (per_token, None))
    return {}


def _require_heads_of_hidden(config: ConfigKeys) -> Fields:
    return _require_default_width(config, config["hidden_size"], config["num_attention_heads"])


def _read_parallel_branches(config: ConfigKeys) -> Fields:
    """Return whether both branches read one norm, as those of StableLM do where they are
    parallel."""
    is_parallel = config["use_parallel_residual"]
    return {"parallel_residual": is_parallel, "shared_norm": is_parallel}


def _read_scores_of_hyperclova(config: ConfigKeys) -> Fields:
    factor = config["attention_multiplier"]
    if factor is None:
        heads = _read_heads(config)
        return {"attention_scalar": float(heads["head_dim"])}
    return {"attention_scalar": float(factor) ** -2}


def _heads_fill_hidden(model: ModelConfig) -> bool:
    """Return True if the heads together are as wide as the features."""
    return model.hidden == model.heads * model.head_dim


def _heads_divide_hidden(model: ModelConfig) -> bool:
    """Return True if the heads divide the features, which some classes of transformers require
    without using it."""
    return model.hidden % model.heads == 0


def _has_experts(model: ModelConfig) -> bool:
    """Return True if there are experts, without which some classes of transformers make no
    layer."""
    return model.experts > 0


def _qwen2_moe_beyond_4(model: ModelConfig) -> Iterator[str]:
    if not _heads_divide_hidden(model):
        yield (
            f"make a qwen2_moe model whose hidden_size = {model.hidden} is no multiple of its "
            f"{model.heads} heads"
        )


def _apertus_beyond_4(model: ModelConfig) -> Iterator[str]:
    yield f"hold the numbers of the activation of an {model.family} model in more than bf16"


def _granitemoe_beyond_4(model: ModelConfig) -> Iterator[str]:
    if model.heads * model.head_dim != model.hidden:
        yield (
            f"make a granitemoe model whose {model.heads} heads of {model.head_dim} features are "
            f"not hidden_size = {model.hidden} together"
        )


def _gpt_oss_beyond_4(model: ModelConfig) -> Iterator[str]:
    if (model.swiglu_alpha, model.swiglu_limit) != PUBLISHED_CLAMP:
        yield (
            f"use swiglu_alpha = {model.swiglu_alpha:g} and swiglu_limit = "
            f"{model.swiglu_limit:g}, but 1.702 and 7 alone"
        )


def _newer_than_4(model: ModelConfig) -> Iterator[str]:
    yield f"make a {model.family} model"


def _unknown_to_4(model_type: str) -> Callable[[ModelConfig], Iterable[str]]:
    """Return the note of a model_type that transformers 4 lacks, if it has others of our
    family."""
    return lambda model: (f"make a {model_type} model",)


def _nemotron_h_beyond_4(model: ModelConfig) -> Iterator[str]:
    yield "make a nemotron_h model without the code of a published folder"


# Of every family; entries that only check a key return no fields.
_COMMON = (
    same("vocab_size", "vocab"),
    same("tie_word_embeddings", "tied"),
    same("initializer_range", "init_std"),
    Entry(_skip_ids),
)
_WITHOUT_DROPOUT = (
    *_COMMON,
    same("num_hidden_layers", "layers"),
    same("hidden_size", "hidden"),
    same("num_attention_heads", "heads"),
    same("max_position_embeddings", "max_positions"),
)
_ROTARY = (*_WITHOUT_DROPOUT, same("attention_dropout", "attention_dropout"))
_WIDTH = same("intermediate_size", "ffn")
_MTP_LAYERS = Entry(
    lambda config: {"mtp_layers": config["num_mtp_layers"] or 0},
    # as published files call it; transformers 5 takes both names
    lambda model: {"num_nextn_predict_layers": model.mtp_layers},
)
_HEADS = Entry(_read_heads, _write_heads)
_SILU = only("hidden_act", "silu", "swish")
_TANH_GELU = only("hidden_activation", *TANH_GELU)
# Published files of Gemma 2 have the older name too, which its class does not read.
_OLDER_TANH_GELU = {"hidden_act": TANH_GELU}
_ATTENTION_BIAS = same("attention_bias", "qkv_bias", "output_bias")
# What the families after Llama share.
_OF_SOME_WIDTH = (*_ROTARY, _HEADS, same("rms_norm_eps", "norm_eps"))
_LLAMA = (*_OF_SOME_WIDTH, _WIDTH)
_GEMMA = (
    *_LLAMA,
    _TANH_GELU,
    _ATTENTION_BIAS,
    Entry(
        lambda config: {"attention_scalar": float(config["query_pre_attn_scalar"])},
        # Its class takes whole numbers alone. A fraction is lost, and refused when it is read back.
        lambda model: {"query_pre_attn_scalar": int(model.attention_scalar)},
    ),
)
_GEMMA2 = (
    *_GEMMA,
    ROPE,
    by_layer_type(pattern=2, unused_window=4096),
    _softcap("attn_logit_softcapping", "attention_softcap"),
    _softcap("final_logit_softcapping", "final_softcap"),
)
_QWEN3_5 = (
    *_OF_SOME_WIDTH,
    _SILU,
    ROPE_OF_QWEN3_5,
    _ATTENTION_BIAS,
    DELTA_LAYERS,
    OTHER_KEYS_OF_QWEN3_5,
)
_DEEPSEEK = (
    *_ROTARY,
    _WIDTH,
    Entry(_read_latent_attention, _write_latent_attention),
    _SILU,
    ROPE,
    same("rms_norm_eps", "norm_eps"),
    _ATTENTION_BIAS,
)

_SCALED_BRANCHES = (
    *_LLAMA,
    _SILU,
    ROPE,
    _ATTENTION_BIAS,
    _number("embedding_multiplier", "embedding_scale"),
    _number("residual_multiplier", "branch_scale"),
    NO_WINDOW,
)
_GRANITE = (
    *_SCALED_BRANCHES,
    _number("logits_scaling", "logit_divisor"),
    Entry(
        lambda config: {"attention_scalar": float(config["attention_multiplier"]) ** -2},
        lambda model: {"attention_multiplier": _factor_of_scores(model)},
    ),
)
# One norm for both branches, as wide as the heads together.
_COHERE = (
    *_ROTARY,
    _HEADS,
    # Its class divides the features among the heads, whatever head_dim says.
    Entry(_require_heads_of_hidden),
    same("layer_norm_eps", "norm_eps"),
    _WIDTH,
    _SILU,
    ROPE,
    _ATTENTION_BIAS,
    _scale_of_logits("logit_scale"),
)
_GLM = (
    *_LLAMA,
    _SILU,
    ROPE_OF_SOME_FEATURES,
    same("attention_bias", "qkv_bias"),
    always(output_bias=False),
    NO_WINDOW,
)

# A family states its own defaults over those of the one that it was made of.
_DEFAULTS: dict[str, Any] = {
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
_LLAMA_DEFAULTS = _DEFAULTS | {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
}
_MISTRAL_DEFAULTS = _DEFAULTS | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN2_DEFAULTS = _LLAMA_DEFAULTS | {
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
_OLMO2_DEFAULTS = _LLAMA_DEFAULTS | {
    "vocab_size": 50304,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": 50279,
}
_GEMMA_DEFAULTS = _LLAMA_DEFAULTS | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_EXPERTS_DEFAULTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.001}
_DELTA_NET_DEFAULTS = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "bos_token_id": None,
    "eos_token_id": None,
}
_QWEN3_5_DEFAULTS = (
    _LLAMA_DEFAULTS
    | _DELTA_NET_DEFAULTS
    | {
        "vocab_size": 248320,
        # no keys of its class, but of published files
        "attn_output_gate": None,
        "output_gate_type": None,
        "mtp_num_hidden_layers": 0,
    }
)
_DEEPSEEK_DEFAULTS = _LLAMA_DEFAULTS | {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "qk_head_dim": None,  # no key of their classes: the sum of the two before
    "v_head_dim": 128,
    "aux_loss_alpha": 0.0,  # neither: transformers has no such loss
    "num_mtp_layers": 0,
}

_GRANITE_DEFAULTS = _LLAMA_DEFAULTS | {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}

_COHERE_DEFAULTS = _LLAMA_DEFAULTS | {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "logit_scale": 0.0625,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 5,
    "eos_token_id": 255001,
    "pad_token_id": 0,
}
_GLM_DEFAULTS = _LLAMA_DEFAULTS | {
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 0.00000015625,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 151329,
}
_SOFTCAPS = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}

_NO_CLIPPING: dict[str, tuple[Any, ...]] = {"clip_qkv": (None,)}
# of published files of Cohere 2, which its class does not read
_KEYS_OF_COHERE: dict[str, tuple[Any, ...]] = {
    "order_of_interleaved_layers": ("local_attn_first",),
    "position_embedding_type": ("rope_gptj",),
    "rotary_pct": (1.0, 1),
    "use_embedding_sharing": (True,),
    "use_gated_activation": (True,),
    "use_parallel_block": (True,),
    # how ranks share the table
    "use_parallel_embedding": (True, False),
    "layer_switch": (4,),
}
# what DeepSeek-V3's routers may be said to be
_SIGMOID_ROUTING = {
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
    "moe_layer_freq": (1, None),
}
_ROUTED_ALIASES = {
    "num_local_experts": "n_routed_experts",
    "num_nextn_predict_layers": "num_mtp_layers",
}


# By model_type. A model whose own family cannot say all of it is written as the first that can.
def _gemma4(architecture: str, **defaults: Any) -> Family:
    """Return a text model of Gemma 4. defaults: of its class where they are not Gemma 4's."""
    return Family(
        ours="gemma4",
        architecture=architecture,
        defaults=_GEMMA_DEFAULTS
        | {
            "vocab_size": 262_144,
            "num_hidden_layers": 30,
            "max_position_embeddings": 131_072,
            "rope_theta": 1_000_000.0,
            "final_logit_softcapping": None,
            "attention_k_eq_v": False,
            "global_head_dim": 512,
            "num_global_key_value_heads": None,
            "per_layer_config": None,
            "sliding_window": 512,
            "hidden_size_per_layer_input": 256,
            "num_kv_shared_layers": 0,
            "enable_moe_block": False,
            "use_bidirectional_attention": None,
        }
        | defaults,
        entries=(
            GEMMA4_PARTS,
            *_LLAMA,
            _TANH_GELU,
            _ATTENTION_BIAS,
            _softcap("final_logit_softcapping", "final_softcap"),
            GEMMA4_LAYERS,
        ),
        beyond_transformers_4=_newer_than_4,
    )


FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        ours="gpt2",
        architecture="GPT2LMHeadModel",
        defaults={
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
        entries=(
            *_COMMON,
            same("n_layer", "layers"),
            same("n_embd", "hidden"),
            same("n_head", "heads"),
            _gelu("activation_function"),
            Entry(_read_gpt2_ffn, lambda model: {"n_inner": model.ffn}),
            same("n_positions", "max_positions"),
            same("layer_norm_epsilon", "norm_eps"),
            same("resid_pdrop", "dropout"),
            same("embd_pdrop", "embedding_dropout"),
            same("attn_pdrop", "attention_dropout"),
            Entry(
                lambda config: _require_default_width(config, config["n_embd"], config["n_head"])
            ),
            Entry(lambda config: require_layers_alike(config, 0, config["n_layer"])),
        ),
        aliases={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "n_ctx": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        allowed={"attention_bias": (True, None), "mlp_bias": (True, None)},
    ),
    "gpt_neox": Family(
        ours="gpt_neox",
        architecture="GPTNeoXForCausalLM",
        defaults={
            **_DEFAULTS,
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
            "rope_theta": None,  # its class goes by rotary_emb_base
            "bos_token_id": 0,
        },
        entries=(
            *_ROTARY,
            _WIDTH,
            ROPE_OF_GPT_NEOX,
            _gelu("hidden_act"),
            same("layer_norm_eps", "norm_eps"),
            _ATTENTION_BIAS,
            same("use_parallel_residual", "parallel_residual"),
            same("hidden_dropout", "dropout"),
            Entry(
                lambda config: _require_default_width(
                    config, config["hidden_size"], config["num_attention_heads"]
                )
            ),
            NO_WINDOW,
        ),
        allowed={"mlp_bias": (True, None)},
    ),
    "llama": Family(
        ours="llama",
        architecture="LlamaForCausalLM",
        defaults=_LLAMA_DEFAULTS,
        entries=(*_LLAMA, _SILU, ROPE, _ATTENTION_BIAS, same("mlp_bias", "mlp_bias"), NO_WINDOW),
        # as files of the first Llama have it, which transformers does not read
        aliases={"max_sequence_length": "max_position_embeddings"},
        requires=_heads_divide_hidden,
    ),
    "qwen2": Family(
        ours="qwen2",
        architecture="Qwen2ForCausalLM",
        defaults=_QWEN2_DEFAULTS,
        entries=(*_LLAMA, _SILU, ROPE, always(qkv_bias=True), WINDOWS_OF_QWEN),
        allowed={"qkv_bias": (True, None)},
    ),
    "qwen2_moe": Family(
        ours="qwen2",
        architecture="Qwen2MoeForCausalLM",
        defaults=_QWEN2_DEFAULTS
        | _EXPERTS_DEFAULTS
        | {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        requires=_has_experts,
        entries=(
            *_LLAMA,
            _SILU,
            ROPE,
            same("qkv_bias", "qkv_bias"),
            WINDOWS_OF_QWEN2_MOE,
            experts_of_qwen(shared=True),
        ),
        beyond_transformers_4=_qwen2_moe_beyond_4,
    ),
    "qwen3": Family(
        ours="qwen3",
        architecture="Qwen3ForCausalLM",
        defaults=_QWEN2_DEFAULTS | {"head_dim": 128},
        entries=(*_LLAMA, _SILU, ROPE, _ATTENTION_BIAS, WINDOWS_OF_QWEN),
    ),
    "qwen3_moe": Family(
        ours="qwen3",
        architecture="Qwen3MoeForCausalLM",
        defaults=_QWEN2_DEFAULTS
        | _EXPERTS_DEFAULTS
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
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        entries=(
            *_LLAMA,
            _SILU,
            ROPE,
            _ATTENTION_BIAS,
            WINDOW_OF_QWEN3_MOE,
            experts_of_qwen(shared=False),
        ),
        aliases={"num_local_experts": "num_experts"},
    ),
    "qwen3_next": Family(
        ours="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        defaults=_LLAMA_DEFAULTS
        | _EXPERTS_DEFAULTS
        | _DELTA_NET_DEFAULTS
        | {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 48,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        entries=(
            *_LLAMA,
            _SILU,
            ROPE_OF_SOME_FEATURES,
            _ATTENTION_BIAS,
            DELTA_LAYERS,
            experts_of_qwen(shared=True),
        ),
        aliases={"num_local_experts": "num_experts"},
    ),
    "qwen3_5_text": Family(
        ours="qwen3_5",
        architecture="Qwen3_5ForCausalLM",
        defaults=_QWEN3_5_DEFAULTS
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "num_key_value_heads": 4,
        },
        entries=(*_QWEN3_5, _WIDTH),
        beyond_transformers_4=_newer_than_4,
    ),
    "qwen3_5_moe_text": Family(
        ours="qwen3_5",
        architecture="Qwen3_5MoeForCausalLM",
        defaults=_QWEN3_5_DEFAULTS
        | _EXPERTS_DEFAULTS
        | {
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
        requires=_has_experts,
        entries=(*_QWEN3_5, EXPERTS_OF_QWEN3_5),
        aliases={"num_local_experts": "num_experts"},
        beyond_transformers_4=_newer_than_4,
    ),
    "deepseek_v2": Family(
        ours="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        defaults=_DEEPSEEK_DEFAULTS
        | {
            "vocab_size": 102400,
            "first_k_dense_replace": 0,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": None,
            "moe_intermediate_size": 1407,
            "n_group": None,
            "topk_group": None,
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
        },
        entries=(
            *_DEEPSEEK,
            same("mlp_bias", "mlp_bias"),
            Entry(_read_no_mtp_layers, lambda model: {"num_nextn_predict_layers": 0}),
            EXPERTS_OF_DEEPSEEK_V2,
        ),
        aliases={
            "num_experts": "n_routed_experts",
            "num_nextn_predict_layers": "num_mtp_layers",
        },
        allowed={
            "scoring_func": ("softmax", None),
            "moe_layer_freq": (1, None),
            "seq_aux": (True, None),
        },
        requires=_heads_divide_hidden,
    ),
    "deepseek_v3": Family(
        ours="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        defaults=_DEEPSEEK_DEFAULTS
        | {
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "max_position_embeddings": 4096,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "rope_interleave": True,
            "first_k_dense_replace": 3,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "num_mtp_layers": 1,
        },
        entries=(
            *_DEEPSEEK,
            # the order of rows, by which they are read
            only("rope_interleave", True, False),
            _MTP_LAYERS,
            EXPERTS_OF_DEEPSEEK_V3,
        ),
        aliases=_ROUTED_ALIASES,
        allowed=_SIGMOID_ROUTING | {"seq_aux": (True, None)},
    ),
    "olmo2": Family(
        ours="olmo2",
        architecture="Olmo2ForCausalLM",
        defaults=_OLMO2_DEFAULTS,
        entries=(*_LLAMA, _SILU, ROPE_OF_OLMO2, _ATTENTION_BIAS, NO_WINDOW),
        beyond_transformers_4=olmo2_beyond_transformers_4,
    ),
    "olmo3": Family(
        ours="olmo3",
        architecture="Olmo3ForCausalLM",
        defaults=_OLMO2_DEFAULTS | {"rope_theta": 500000.0, "sliding_window": 4096},
        entries=(
            *_LLAMA,
            _SILU,
            _ATTENTION_BIAS,
            rope_by_layer(by_layer_type(pattern=4, unused_window=4096)),
        ),
        beyond_transformers_4=by_layer_beyond_transformers_4("olmo3"),
    ),
    "gemma2": Family(
        ours="gemma2",
        architecture="Gemma2ForCausalLM",
        defaults=_GEMMA_DEFAULTS
        | _SOFTCAPS
        | {"vocab_size": 256000, "max_position_embeddings": 8192},
        entries=_GEMMA2,
        requires=_heads_divide_hidden,
        allowed=_OLDER_TANH_GELU,
    ),
    "gemma3_text": Family(
        ours="gemma3",
        architecture="Gemma3ForCausalLM",
        defaults=_GEMMA_DEFAULTS
        | {
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "sliding_window_pattern": 6,
        },
        entries=(
            *_GEMMA,
            rope_by_layer(
                by_layer_type(pattern="sliding_window_pattern", unused_window=4096),
                window_base_key="rope_local_base_freq",
            ),
        ),
        requires=_heads_divide_hidden,
        allowed=_OLDER_TANH_GELU,
        beyond_transformers_4=by_layer_beyond_transformers_4("gemma3_text"),
    ),
    "gemma4_text": _gemma4("Gemma4ForCausalLM"),
    # of the size without image towers: it computes the same, and is written as the other
    "gemma4_unified_text": _gemma4(
        "Gemma4UnifiedForCausalLM",
        hidden_size_per_layer_input=0,  # no key of its class, whose models have none
        max_position_embeddings=262_144,
        sliding_window=1024,
        use_bidirectional_attention="vision",
    ),
    "glm4_moe": Family(
        ours="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        defaults=_LLAMA_DEFAULTS
        | {
            "vocab_size": 151552,
            "intermediate_size": 10944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": False,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "num_mtp_layers": 1,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        entries=(
            *_LLAMA,
            _SILU,
            ROPE_OF_SOME_FEATURES,
            same("attention_bias", "qkv_bias"),
            always(output_bias=False),
            same("use_qk_norm", "qk_norm"),
            EXPERTS_OF_GLM4,
            _MTP_LAYERS,
            NO_WINDOW,
        ),
        aliases=_ROUTED_ALIASES,
    ),
    "gpt_oss": Family(
        ours="gpt_oss",
        architecture="GptOssForCausalLM",
        defaults=_DEFAULTS
        | {
            "num_hidden_layers": 36,
            "num_local_experts": 128,
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "head_dim": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "router_aux_loss_coef": 0.001,
            "attention_bias": True,
            "bos_token_id": None,
            "eos_token_id": None,
            "initial_context_length": None,  # no key of its class, but of the published files
            "experts_per_token": None,
        },
        requires=_has_experts,
        entries=(
            *_LLAMA,
            _SILU,
            ROPE_OF_GPT_OSS,
            by_layer_type(pattern=2, unused_window=128),
            _ATTENTION_BIAS,
            *LOCAL_EXPERTS,
            Entry(_read_repeated_experts_per_token),
            same("swiglu_alpha", "swiglu_alpha"),
            same("swiglu_limit", "swiglu_limit"),
        ),
        aliases={"num_experts": "num_local_experts"},
        beyond_transformers_4=_gpt_oss_beyond_4,
    ),
    "nemotron_h": Family(
        ours="nemotron_h",
        architecture="NemotronHForCausalLM",
        defaults=_LLAMA_DEFAULTS
        | {
            "vocab_size": 131072,
            "intermediate_size": 21504,
            "num_hidden_layers": None,  # it counts the kinds of layers
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_head_dim": None,  # no key of its class, but of published files
            "max_position_embeddings": 4096,
            "layer_norm_epsilon": 1e-5,
            "rms_norm_eps": None,
            "norm_eps": None,
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "layers_block_type": None,
            "hybrid_override_pattern": None,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "time_step_min": 0.001,
            "time_step_limit": None,
            "use_conv_bias": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "moe_intermediate_size": 7688,
            "moe_latent_size": None,
            "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": 7688,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "pad_token_id": 0,
        },
        entries=(
            *_COMMON,
            same("hidden_size", "hidden"),
            same("num_attention_heads", "heads"),
            same("max_position_embeddings", "max_positions"),
            same("attention_dropout", "attention_dropout"),
            _HEADS,
            HYBRID_LAYERS,
            FEED_FORWARDS_OF_HYBRIDS,
            same("layer_norm_epsilon", "norm_eps"),
            only("mlp_hidden_act", "relu2"),
            only("mamba_hidden_act", "silu", "swish"),
            # Its head is never the embedding.
            only("tie_word_embeddings", False),
            only("use_conv_bias", True),
            OTHER_KEYS_OF_HYBRIDS,
        ),
        aliases={
            "layer_types": "layers_block_type",
            "num_local_experts": "n_routed_experts",
            "mamba_n_groups": "n_groups",
            "mamba_d_conv": "conv_kernel",
            "mamba_expand": "expand",
            "mamba_dt_min": "time_step_min",
            "mamba_dt_max": "time_step_max",
            "mamba_dt_limit": "time_step_limit",
            "mamba_dt_init_floor": "time_step_floor",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_chunk_size": "chunk_size",
        },
        allowed={
            "use_bias": (False, None),
            "mamba_proj_bias": (False, None),
            "num_nextn_predict_layers": (0, None),
        },
        beyond_transformers_4=_nemotron_h_beyond_4,
    ),
    "mistral": Family(
        ours="mistral",
        architecture="MistralForCausalLM",
        defaults=_MISTRAL_DEFAULTS,
        entries=(*_LLAMA, _SILU, ROPE, WINDOW_OF_ALL_LAYERS),
    ),
    "mixtral": Family(
        ours="mixtral",
        architecture="MixtralForCausalLM",
        defaults=_MISTRAL_DEFAULTS
        | _EXPERTS_DEFAULTS
        | {
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "num_local_experts": 8,
            "router_jitter_noise": 0.0,
        },
        requires=_has_experts,
        entries=(*_LLAMA, _SILU, ROPE, WINDOW_OF_ALL_LAYERS, *LOCAL_EXPERTS),
        aliases={"num_experts": "num_local_experts"},
    ),
    "iquestcoder": Family(
        ours="llama",
        architecture="LlamaForCausalLM",
        defaults=_LLAMA_DEFAULTS
        | {
            "vocab_size": 76800,
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "num_hidden_layers": 80,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
        },
        entries=(*_LLAMA, _SILU, ROPE, _ATTENTION_BIAS, same("mlp_bias", "mlp_bias"), NO_WINDOW),
        allowed=_NO_CLIPPING,
        requires=_heads_divide_hidden,
    ),
    "internlm3": Family(
        ours="llama",
        architecture="LlamaForCausalLM",
        defaults=_LLAMA_DEFAULTS
        | {
            "vocab_size": 128512,
            "intermediate_size": 10240,
            "num_hidden_layers": 48,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "pad_token_id": 2,
        },
        entries=(
            *_LLAMA,
            _SILU,
            ROPE,
            Entry(
                _read_biases_of_internlm3,
                lambda model: {"attention_bias": model.qkv_bias, "mlp_bias": model.mlp_bias},
            ),
            NO_WINDOW,
        ),
        aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
        requires=_heads_divide_hidden,
    ),
    "seed_oss": Family(
        ours="seed_oss",
        architecture="SeedOssForCausalLM",
        defaults=_LLAMA_DEFAULTS
        | {
            "vocab_size": 155136,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
            "attention_out_bias": False,
            "attention_dropout": 0.1,
            "residual_dropout": 0.1,
            "bos_token_id": 0,
            "pad_token_id": 1,
        },
        entries=(
            *_LLAMA,
            _SILU,
            ROPE,
            same("attention_bias", "qkv_bias"),
            same("attention_out_bias", "output_bias"),
            same("mlp_bias", "mlp_bias"),
            same("residual_dropout", "dropout"),
            always(embedding_dropout=0.0),
            NO_WINDOW,
        ),
    ),
    "smollm3": Family(
        ours="smollm3",
        architecture="SmolLM3ForCausalLM",
        defaults=_LLAMA_DEFAULTS
        | {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "rope_theta": 2_000_000.0,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "pad_token_id": 128004,
        },
        entries=(
            *_LLAMA,
            _SILU,
            ROPE,
            NOPE_LAYERS,
            _ATTENTION_BIAS,
            same("mlp_bias", "mlp_bias"),
            WINDOWS_OF_SMOLLM3,
        ),
    ),
    "exaone4": Family(
        ours="exaone4",
        architecture="Exaone4ForCausalLM",
        defaults=_LLAMA_DEFAULTS
        | {
            "vocab_size": 102400,
            "intermediate_size": 16384,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        entries=(*_LLAMA, _SILU, ROPE, WINDOWS_OF_EXAONE4),
    ),
    "ernie4_5": Family(
        ours="ernie4_5",
        architecture="Ernie4_5ForCausalLM",
        defaults=_LLAMA_DEFAULTS
        | {
            "vocab_size": 103424,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 18,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
            "use_bias": False,
            "pad_token_id": 0,
        },
        entries=(
            *_WITHOUT_DROPOUT,
            _HEADS,
            same("rms_norm_eps", "norm_eps"),
            _WIDTH,
            _SILU,
            ROPE,
            same("use_bias", "qkv_bias", "output_bias", "mlp_bias"),
            NO_WINDOW,
        ),
    ),
    "phi3": Family(
        ours="phi3",
        architecture="Phi3ForCausalLM",
        defaults=_LLAMA_DEFAULTS
        | {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "original_max_position_embeddings": 4096,
            "sliding_window": None,
            "resid_pdrop": 0.0,
            "eos_token_id": 32000,
            "pad_token_id": 32000,
        },
        entries=(
            *_LLAMA,
            _SILU,
            ROPE_OF_PHI3,
            same("resid_pdrop", "dropout"),
            # Its class does not read embd_pdrop.
            always(embedding_dropout=0.0),
            WINDOW_OF_ALL_LAYERS,
        ),
    ),
    "cohere2": Family(
        ours="cohere2",
        architecture="Cohere2ForCausalLM",
        defaults=_COHERE_DEFAULTS | {"sliding_window": 4096, "sliding_window_pattern": 4},
        entries=(*_COHERE, WINDOWS_OF_COHERE2),
        allowed=_KEYS_OF_COHERE,
        requires=_heads_fill_hidden,
    ),
    "nanochat": Family(
        ours="nanochat",
        architecture="NanoChatForCausalLM",
        defaults=_LLAMA_DEFAULTS
        | {
            "vocab_size": 50304,
            "hidden_size": 768,
            "intermediate_size": 8192,
            "num_hidden_layers": 12,
            "num_attention_heads": 6,
            "hidden_act": "relu2",
            "final_logit_softcapping": 15.0,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 1,
        },
        entries=(
            *_LLAMA,
            only("hidden_act", "relu2"),
            ROPE_OF_NANOCHAT,
            _ATTENTION_BIAS,
            _softcap("final_logit_softcapping", "final_softcap"),
            NO_WINDOW,
        ),
        beyond_transformers_4=_newer_than_4,
    ),
    "apertus": Family(
        ours="apertus",
        architecture="ApertusForCausalLM",
        defaults=_LLAMA_DEFAULTS
        | {
            "vocab_size": 131072,
            "intermediate_size": 14336,
            "hidden_act": "xielu",
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-5,
            "rope_theta": 12_000_000.0,
            "pad_token_id": 3,
        },
        entries=(*_LLAMA, only("hidden_act", "xielu"), ROPE_OF_APERTUS, _ATTENTION_BIAS, NO_WINDOW),
        # of published files, which its class does not read
        allowed={"qk_norm": (True,), "post_norm": (False,)},
        beyond_transformers_4=_apertus_beyond_4,
    ),
    "ministral3": Family(
        ours="ministral3",
        architecture="Ministral3ForCausalLM",
        defaults=_MISTRAL_DEFAULTS
        | {
            "vocab_size": 131072,
            "num_hidden_layers": 34,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "pad_token_id": 11,
        },
        entries=(*_LLAMA, _SILU, ROPE_OF_MINISTRAL3, WINDOW_OF_ALL_LAYERS),
        beyond_transformers_4=_newer_than_4,
    ),
    "granite": Family(
        ours="granite",
        architecture="GraniteForCausalLM",
        defaults=_GRANITE_DEFAULTS,
        entries=(*_GRANITE, same("mlp_bias", "mlp_bias")),
    ),
    "granitemoe": Family(
        ours="granite",
        architecture="GraniteMoeForCausalLM",
        defaults=_GRANITE_DEFAULTS | _EXPERTS_DEFAULTS | {"num_local_experts": 8},
        entries=(*_GRANITE, *LOCAL_EXPERTS),
        aliases={"num_experts": "num_local_experts"},
        requires=_has_experts,
        beyond_transformers_4=_granitemoe_beyond_4,
    ),
    "arcee": Family(
        ours="arcee",
        architecture="ArceeForCausalLM",
        defaults=_LLAMA_DEFAULTS
        | {
            "hidden_size": 2560,
            "intermediate_size": 18432,
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        entries=(
            *_LLAMA,
            only("hidden_act", "relu2"),
            always(mlp="relu2"),
            ROPE,
            _ATTENTION_BIAS,
            same("mlp_bias", "mlp_bias"),
            NO_WINDOW,
        ),
        requires=_heads_divide_hidden,
    ),
    "olmoe": Family(
        ours="olmoe",
        architecture="OlmoeForCausalLM",
        defaults=_OLMO2_DEFAULTS
        | _EXPERTS_DEFAULTS
        | {
            "hidden_size": 2048,
            "intermediate_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "max_position_embeddings": 4096,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.01,
        },
        entries=(
            *_LLAMA,
            # Its norms of queries and keys are as wide as if heads filled the features.
            Entry(_require_heads_of_hidden),
            _SILU,
            ROPE,
            _ATTENTION_BIAS,
            EXPERTS_OF_OLMOE,
            NO_WINDOW,
        ),
        aliases={"num_local_experts": "num_experts"},
        allowed=_NO_CLIPPING,
        requires=lambda model: _has_experts(model) and _heads_fill_hidden(model),
    ),
    "minimax_m2": Family(
        ours="minimax_m2",
        architecture="MiniMaxM2ForCausalLM",
        defaults=_DEFAULTS
        | _EXPERTS_DEFAULTS
        | {
            "vocab_size": 200064,
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_hidden_layers": 62,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "rope_theta": 5_000_000.0,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "router_jitter_noise": 0.0,
            "bos_token_id": 200034,
            "eos_token_id": 200020,
            # no keys of its class, but of published files
            "rotary_dim": None,
            "num_mtp_layers": 0,
            "attn_type_list": None,
        },
        entries=(
            *_LLAMA,
            _SILU,
            ROPE_OF_MINIMAX,
            *LOCAL_EXPERTS,
            always(router={"score": "sigmoid", "correction": True}),
            Entry(_read_no_mtp_layers),
            Entry(_read_kinds_of_minimax),
            NO_WINDOW,
        ),
        aliases={"num_experts": "num_local_experts", "num_mtp_modules": "num_mtp_layers"},
        # what published files say of code that they bring with them
        allowed={
            "scoring_func": ("sigmoid", None),
            "use_routing_bias": (True, None),
            "use_qk_norm": (True, None),
            "qk_norm_type": ("per_layer", None),
            "shared_intermediate_size": (0, None),
            "use_mtp": (True, False, None),
            "mtp_transformer_layers": (1, 0, None),
        },
        requires=_has_experts,
        beyond_transformers_4=_newer_than_4,
    ),
    "dots1": Family(
        ours="dots1",
        architecture="Dots1ForCausalLM",
        defaults=_LLAMA_DEFAULTS
        | {
            "vocab_size": 152064,
            "hidden_size": 4608,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 62,
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "n_shared_experts": None,
            "n_routed_experts": None,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": None,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "aux_loss_alpha": 0.0,  # no key of its class, which has no such loss
            "sliding_window": 4096,
            "max_window_layers": 62,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        entries=(*_LLAMA, _SILU, ROPE, _ATTENTION_BIAS, WINDOWS_OF_DOTS1, EXPERTS_OF_DOTS1),
        aliases={"num_local_experts": "n_routed_experts"},
        allowed={
            "scoring_func": ("sigmoid", "noaux_tc", None),
            "topk_method": ("noaux_tc", None),
            "moe_layer_freq": (1, None),
            "use_qk_norm": (True, None),
        },
    ),
    "solar_open": Family(
        ours="solar_open",
        architecture="SolarOpenForCausalLM",
        defaults=_LLAMA_DEFAULTS
        | {
            "vocab_size": 196608,
            "hidden_size": 4096,
            "num_hidden_layers": 48,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "moe_intermediate_size": 1280,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        entries=(
            *_OF_SOME_WIDTH,
            _SILU,
            ROPE,
            same("attention_bias", "qkv_bias"),
            always(output_bias=False),
            EXPERTS_OF_SOLAR,
            NO_WINDOW,
        ),
        aliases={"num_local_experts": "n_routed_experts"},
        allowed={"first_k_dense_replace": (0, None)},
        requires=_has_experts,
        beyond_transformers_4=_newer_than_4,
    ),
    "glm4_moe_lite": Family(
        ours="glm4_moe_lite",
        architecture="Glm4MoeLiteForCausalLM",
        defaults=_DEEPSEEK_DEFAULTS
        | {
            "vocab_size": 154880,
            "hidden_size": 2048,
            "intermediate_size": 10240,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 47,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "rope_interleave": True,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.8,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "mlp_layer_types": None,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        entries=(
            *_DEEPSEEK,
            only("rope_interleave", True, False),
            _MTP_LAYERS,
            EXPERTS_OF_GLM4_LITE,
            NO_WINDOW,
        ),
        aliases=_ROUTED_ALIASES,
        allowed=_SIGMOID_ROUTING,
        beyond_transformers_4=_newer_than_4,
    ),
    "youtu": Family(
        ours="youtu",
        architecture="YoutuForCausalLM",
        defaults=_DEEPSEEK_DEFAULTS
        | {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_position_embeddings": 131072,
            "initializer_range": None,
            "embedding_initializer_range": None,
            "rope_interleave": True,
            "tie_word_embeddings": True,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        entries=(
            *_DEEPSEEK,
            only("rope_interleave", True, False),
            Entry(_read_first_weights_of_youtu, _write_first_weights_of_youtu),
            NO_WINDOW,
        ),
        beyond_transformers_4=_newer_than_4,
    ),
    "kimi_linear": Family(
        ours="kimi_linear",
        architecture="KimiLinearForCausalLM",
        defaults=_DEEPSEEK_DEFAULTS
        | {
            "vocab_size": 163840,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "moe_intermediate_size": 1024,
            "num_hidden_layers": 27,
            "num_key_value_heads": 32,
            "max_position_embeddings": 1048576,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": None,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.446,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "mlp_layer_types": None,
            "linear_attn_config": None,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "linear_conv_kernel_dim": 4,
            "first_k_dense_replace": 1,
            "pad_token_id": 163839,
            "bos_token_id": 163584,
            "eos_token_id": 163586,
        },
        entries=(
            *_ROTARY,
            # Its head is never the embedding.
            only("tie_word_embeddings", False),
            _WIDTH,
            Entry(_read_latents, _write_latent_attention),
            _SILU,
            same("rms_norm_eps", "norm_eps"),
            _ATTENTION_BIAS,
            KIMI_LAYERS,
            EXPERTS_OF_KIMI,
            OTHER_KEYS_OF_KIMI,
        ),
        aliases=ALIASES_OF_KIMI,
        allowed=ALLOWED_OF_KIMI,
        beyond_transformers_4=_newer_than_4,
    ),
    "gemma": Family(
        ours="gemma2",
        architecture="GemmaForCausalLM",
        defaults=_LLAMA_DEFAULTS
        | {
            "vocab_size": 256000,
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": 2,
        },
        entries=(
            *_LLAMA,
            # Published files say gelu and mean the approximation, as its class takes it.
            only("hidden_act", *TANH_GELU, "gelu"),
            always(norm_at="before", attention_softcap=0.0, final_softcap=0.0),
            ROPE,
            _ATTENTION_BIAS,
            NO_WINDOW,
        ),
        allowed={"hidden_activation": (*TANH_GELU, None)},
    ),
    "vaultgemma": Family(
        ours="gemma2",
        architecture="VaultGemmaForCausalLM",
        defaults=_GEMMA_DEFAULTS
        | _SOFTCAPS
        | {"vocab_size": 256000, "max_position_embeddings": 8192},
        entries=(*_GEMMA2, always(norm_at="before")),
        requires=_heads_divide_hidden,
    ),
    "cohere": Family(
        ours="cohere2",
        architecture="CohereForCausalLM",
        defaults=_COHERE_DEFAULTS | {"rope_theta": 500_000.0},
        entries=(*_COHERE, NO_WINDOW),
        requires=_heads_fill_hidden,
    ),
    "glm4": Family(
        ours="glm4",
        architecture="Glm4ForCausalLM",
        defaults=_GLM_DEFAULTS,
        entries=_GLM,
    ),
    "glm": Family(
        ours="glm4",
        architecture="GlmForCausalLM",
        defaults=_GLM_DEFAULTS,
        entries=(*_GLM, always(norm_at="before")),
    ),
    "ministral": Family(
        ours="mistral",
        architecture="MinistralForCausalLM",
        defaults=_MISTRAL_DEFAULTS,
        entries=(*_LLAMA, _SILU, ROPE, WINDOWS_OF_MINISTRAL),
    ),
    "cwm": Family(
        ours="mistral",
        architecture="CwmForCausalLM",
        defaults=_LLAMA_DEFAULTS
        | {
            "vocab_size": 128256,
            "hidden_size": 6144,
            "intermediate_size": 21504,
            "num_hidden_layers": 64,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": 8192,
            "bos_token_id": 128000,
            "eos_token_id": None,
        },
        entries=(*_LLAMA, _SILU, ROPE_OF_CWM, same("mlp_bias", "mlp_bias"), WINDOWS_OF_CWM),
        requires=_heads_divide_hidden,
        beyond_transformers_4=_unknown_to_4("cwm"),
    ),
    "hyperclovax": Family(
        ours="granite",
        architecture="HyperCLOVAXForCausalLM",
        defaults=_GRANITE_DEFAULTS | {"attention_multiplier": None, "use_post_norm": True},
        entries=(
            *_SCALED_BRANCHES,
            same("mlp_bias", "mlp_bias"),
            Entry(
                lambda config: {"norm_at": "around" if config["use_post_norm"] else "before"},
                lambda model: {"use_post_norm": model.norm_at == "around"},
            ),
            _scale_of_logits("logits_scaling"),
            Entry(
                _read_scores_of_hyperclova,
                lambda model: {"attention_multiplier": _factor_of_scores(model)},
            ),
        ),
        requires=_heads_divide_hidden,
        beyond_transformers_4=_unknown_to_4("hyperclovax"),
    ),
    "starcoder2": Family(
        ours="gpt_neox",
        architecture="Starcoder2ForCausalLM",
        defaults=_DEFAULTS
        | {
            "vocab_size": 49152,
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_hidden_layers": 30,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "initializer_range": 0.018042,
            "norm_epsilon": 1e-5,
            "sliding_window": None,
            "residual_dropout": 0.0,
            "embedding_dropout": 0.0,
            "use_bias": True,
            "tie_word_embeddings": True,
            "bos_token_id": 50256,
            "eos_token_id": 50256,
        },
        entries=(
            *_ROTARY,
            _HEADS,
            _WIDTH,
            same("norm_epsilon", "norm_eps"),
            _gelu("hidden_act"),
            ROPE,
            WINDOW_OF_ALL_LAYERS,
            same("use_bias", "qkv_bias", "output_bias", "mlp_bias"),
            same("residual_dropout", "dropout"),
            same("embedding_dropout", "embedding_dropout"),
            always(parallel_residual=False),
        ),
        # of published files, which its class does not read
        allowed={
            "activation_function": ("gelu", None),
            "mlp_type": ("default",),
            "norm_type": ("layer_norm",),
        },
    ),
    "stablelm": Family(
        ours="gpt_neox",
        architecture="StableLmForCausalLM",
        defaults=_DEFAULTS
        | {
            "vocab_size": 50304,
            "hidden_size": 2560,
            "intermediate_size": 6912,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "use_qkv_bias": False,
            "qk_layernorm": False,
            "use_parallel_residual": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        entries=(
            *_ROTARY,
            Entry(_read_kv_heads, lambda model: {"num_key_value_heads": model.kv_heads}),
            Entry(_require_heads_of_hidden),
            _WIDTH,
            same("layer_norm_eps", "norm_eps"),
            _SILU,
            always(mlp="swiglu", output_bias=False, mlp_bias=False),
            ROPE_OF_SOME_FEATURES,
            NO_WINDOW,
            same("use_qkv_bias", "qkv_bias"),
            only("qk_layernorm", False),
            Entry(
                _read_parallel_branches,
                lambda model: {"use_parallel_residual": model.parallel_residual},
            ),
        ),
        requires=_heads_fill_hidden,
    ),
    "jais2": Family(
        ours="gpt_neox",
        architecture="Jais2ForCausalLM",
        defaults=_DEFAULTS
        | {
            "vocab_size": 150272,
            "hidden_size": 3328,
            "intermediate_size": 26624,
            "num_hidden_layers": 32,
            "num_attention_heads": 26,
            "num_key_value_heads": None,
            "hidden_act": "relu2",
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "attention_bias": True,
            "mlp_bias": True,
            "bos_token_id": 0,
            "eos_token_id": 150024,
        },
        entries=(
            *_ROTARY,
            _HEADS,
            _WIDTH,
            same("layer_norm_eps", "norm_eps"),
            only("hidden_act", "relu2"),
            always(mlp="relu2", parallel_residual=False),
            ROPE,
            NO_WINDOW,
            _ATTENTION_BIAS,
            same("mlp_bias", "mlp_bias"),
        ),
        requires=_heads_divide_hidden,
        beyond_transformers_4=_unknown_to_4("jais2"),
    ),
}
