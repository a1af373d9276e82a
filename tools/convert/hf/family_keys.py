"""The odd keys of Hugging Face's families, read and written by functions, and what a model needs
transformers 5 for."""

import math
from collections.abc import Callable, Iterable, Iterator

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.hf.keys import (
    IDS,
    ConfigKeys,
    Entry,
    Fields,
    Json,
    require,
)

# swiglu_alpha and swiglu_limit of gpt-oss, which transformers 4 has in its code
PUBLISHED_CLAMP = (1.702, 7.0)
TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh")
EXACT_GELU = ("gelu", "gelu_python")


def skip_ids(config: ConfigKeys) -> Fields:
    """Mark the ids of special tokens as read."""
    config.mark_read(*IDS)  # they are of no model: `special_ids` returns them
    return {}


def gelu_of(key: str) -> Entry:
    """Return the entry of an activation function that is one of the two GELUs."""

    def read(config: ConfigKeys) -> Fields:
        name = require(config[key], key, TANH_GELU + EXACT_GELU)
        return {"mlp": "gelu_exact" if name in EXACT_GELU else "gelu"}

    return Entry(read, lambda model: {key: "gelu" if model.mlp == "gelu_exact" else "gelu_new"})


def read_kv_heads(config: ConfigKeys) -> Fields:
    """Return the number of key and value heads, by default that of heads."""
    kv_heads = config["num_key_value_heads"]
    return {"kv_heads": config["num_attention_heads"] if kv_heads is None else kv_heads}


def read_heads(config: ConfigKeys) -> Fields:
    """Return the heads of attention and their width."""
    heads = config["num_attention_heads"]
    head_dim = config["head_dim"]
    return {
        **read_kv_heads(config),
        "head_dim": config["hidden_size"] // heads if head_dim is None else head_dim,
    }


def write_heads(model: ModelConfig) -> Json:
    """Return the keys of `read_heads` beside the number of heads."""
    return {"num_key_value_heads": model.kv_heads, "head_dim": model.head_dim}


def require_default_width(config: ConfigKeys, hidden: int, heads: int) -> Fields:
    """Return no fields. Raises UserError for a head_dim in a family whose class does not read it,
    unless it changes nothing."""
    config.mark_read("head_dim")
    require(config.stated.get("head_dim"), "head_dim", (hidden // heads, None))
    return {}


def read_gpt2_ffn(config: ConfigKeys) -> Fields:
    """Return the width of GPT-2's feed-forward, by default four times hidden."""
    inner = config["n_inner"]
    return {"ffn": 4 * config["n_embd"] if inner is None else inner}


def read_latent_attention(config: ConfigKeys) -> Fields:
    """Return the widths of latents, as `read_latents`. Raises UserError for another head_dim than
    the width that turns, which their classes put there."""
    require(config["head_dim"], "head_dim", (config["qk_rope_head_dim"], None))
    return read_latents(config)


def read_latents(config: ConfigKeys) -> Fields:
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


def write_latent_attention(model: ModelConfig) -> Json:
    """Return the keys of `read_latent_attention`."""
    return {
        "num_key_value_heads": model.heads,
        "q_lora_rank": model.latent.query_rank or None,
        "kv_lora_rank": model.latent.kv_rank,
        "qk_rope_head_dim": model.latent.rope_dim,
        "qk_nope_head_dim": model.latent.nope_dim,
        "v_head_dim": model.latent.value_dim,
    }


def read_no_mtp_layers(config: ConfigKeys) -> Fields:
    """Mark the number of modules that a file may name and never has as read."""
    config.mark_read("num_mtp_layers")  # `notes` says that there are none
    return {}


def read_kinds_of_minimax(config: ConfigKeys) -> Fields:
    """Return no fields. Raises UserError for layers of lightning attention, which MiniMax-M1
    has."""
    for kind in config["attn_type_list"] or ():
        require(kind, "attn_type_list", (1,))
    return {}


def read_biases_of_internlm3(config: ConfigKeys) -> Fields:
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


def read_first_weights_of_youtu(config: ConfigKeys) -> Fields:
    """Return the standard deviations of first weights, which follow from hidden_size and each
    other where the file does not say them."""
    std = config["initializer_range"]
    if std is None:
        std = 2.0 / (5.0 * config["hidden_size"]) ** 0.5
    embedding_std = config["embedding_initializer_range"] or 2.0 * std
    return {"init_std": std, "init": {"embedding": embedding_std}}


def write_first_weights_of_youtu(model: ModelConfig) -> Json:
    """Return the keys of `read_first_weights_of_youtu`."""
    return {
        "initializer_range": model.init_std,
        "embedding_initializer_range": model.init.embedding or model.init_std,
    }


def softcap_of(key: str, field: str) -> Entry:
    """Return the entry of a soft cap; null there is 0 here."""

    def read(config: ConfigKeys) -> Fields:
        cap = config[key]
        if cap is not None and not cap > 0:
            raise UserError.of("convert.hf_softcap_zero", key=key, cap=cap)
        return {field: float(cap or 0)}

    return Entry(read, lambda model: {key: getattr(model, field) or None})


def number_in(key: str, field: str) -> Entry:
    """Return the entry of a number with a fraction, which JSON may write without one."""
    return Entry(
        lambda config: {field: float(config[key])}, lambda model: {key: getattr(model, field)}
    )


def factor_of_scores(model: ModelConfig) -> float:
    """Return what scores are multiplied by, so that it is read back as the same
    attention_scalar."""
    factor = model.attention_scalar**-0.5
    # the root is rounded: a neighbour of it may be the number that is read back exactly
    neighbours = (factor, math.nextafter(factor, 0.0), math.nextafter(factor, math.inf))
    exact = (near for near in neighbours if near**-2 == model.attention_scalar)
    return next(exact, factor)


def scale_of_logits(key: str) -> Entry:
    """Return the entry of what logits are multiplied by; ours are divided."""

    def write(model: ModelConfig) -> Json:
        # Read back as the same logit_divisor: of such numbers the shortest.
        scale = 1.0 / model.logit_divisor
        neighbours = (scale, math.nextafter(scale, 0.0), math.nextafter(scale, math.inf))
        exact = [near for near in neighbours if 1.0 / near == model.logit_divisor]
        return {key: min(exact or [scale], key=lambda number: len(repr(number)))}

    return Entry(lambda config: {"logit_divisor": 1.0 / config[key]}, write)


def read_repeated_experts_per_token(config: ConfigKeys) -> Fields:
    """Return no fields. Raises UserError for two numbers of experts per token that differ."""
    # Published files of gpt-oss have it, and transformers ignores it.
    per_token = config["num_experts_per_tok"]
    require(config["experts_per_token"], "experts_per_token", (per_token, None))
    return {}


def require_heads_of_hidden(config: ConfigKeys) -> Fields:
    """Return nothing; refuse heads that do not divide hidden."""
    return require_default_width(config, config["hidden_size"], config["num_attention_heads"])


def read_parallel_branches(config: ConfigKeys) -> Fields:
    """Return whether both branches read one norm, as those of StableLM do where they are
    parallel."""
    is_parallel = config["use_parallel_residual"]
    return {"parallel_residual": is_parallel, "shared_norm": is_parallel}


def read_scores_of_hyperclova(config: ConfigKeys) -> Fields:
    """Return what HyperCLOVA's scores are divided by."""
    factor = config["attention_multiplier"]
    if factor is None:
        heads = read_heads(config)
        return {"attention_scalar": float(heads["head_dim"])}
    return {"attention_scalar": float(factor) ** -2}


def heads_fill_hidden(model: ModelConfig) -> bool:
    """Return True if the heads together are as wide as the features."""
    return model.hidden == model.heads * model.head_dim


def heads_divide_hidden(model: ModelConfig) -> bool:
    """Return True if the heads divide the features, which some classes of transformers require
    without using it."""
    return model.hidden % model.heads == 0


def with_experts(model: ModelConfig) -> bool:
    """Return True if there are experts, without which some classes of transformers make no
    layer."""
    return model.experts > 0


def qwen2_moe_beyond_4(model: ModelConfig) -> Iterator[str]:
    """Yield what transformers 4 cannot do with a qwen2_moe model."""
    if not heads_divide_hidden(model):
        yield (
            f"make a qwen2_moe model whose hidden_size = {model.hidden} is no multiple of its "
            f"{model.heads} heads"
        )


def apertus_beyond_4(model: ModelConfig) -> Iterator[str]:
    """Yield what transformers 4 cannot do with an apertus model."""
    yield f"hold the numbers of the activation of an {model.family} model in more than bf16"


def granitemoe_beyond_4(model: ModelConfig) -> Iterator[str]:
    """Yield what transformers 4 cannot do with a granitemoe model."""
    if model.heads * model.head_dim != model.hidden:
        yield (
            f"make a granitemoe model whose {model.heads} heads of {model.head_dim} features are "
            f"not hidden_size = {model.hidden} together"
        )


def gpt_oss_beyond_4(model: ModelConfig) -> Iterator[str]:
    """Yield what transformers 4 cannot do with a gpt-oss model."""
    if (model.swiglu_alpha, model.swiglu_limit) != PUBLISHED_CLAMP:
        yield (
            f"use swiglu_alpha = {model.swiglu_alpha:g} and swiglu_limit = "
            f"{model.swiglu_limit:g}, but 1.702 and 7 alone"
        )


def newer_than_4(model: ModelConfig) -> Iterator[str]:
    """Yield that transformers 4 has no such model."""
    yield f"make a {model.family} model"


def unknown_to_4(model_type: str) -> Callable[[ModelConfig], Iterable[str]]:
    """Return the note of a model_type that transformers 4 lacks, if it has others of our
    family."""
    return lambda model: (f"make a {model_type} model",)


def nemotron_h_beyond_4(model: ModelConfig) -> Iterator[str]:
    """Yield what transformers 4 cannot do with a nemotron_h model."""
    yield "make a nemotron_h model without the code of a published folder"
