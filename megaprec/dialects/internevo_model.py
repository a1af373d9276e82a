"""Translation of InternEvo's `model = dict(...)` to run-file keys of [model], and back.

A dict with one of SIZES describes a whole model. Keys that it omits have InternEvo's defaults,
never megaprec's, and no key of [model] may contradict them. A dict without any of SIZES leaves the
architecture to the run file's [model]: keys about training are allowed, keys that describe a model
are refused.

Three model types are supported, as `internlm/model/modeling_internlm.py`, `modeling_internlm2.py`
and `modeling_llama.py` at c628a8c build them: INTERNLM, whose attention always has biases and as
many key/value heads as heads, INTERNLM2_PUBLIC and LLAMA2. In all three, rotary positions apply to
whole heads, a norm precedes each branch, the feed-forward has no biases, its gated width is rounded
up to a multiple of 256 (`modules/mlp.py`), and embedding and head are not tied.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field

from megaprec.dialects.reading import UNKNOWN, Decision, Keys, Reading, name_of
from megaprec.errors import did_you_mean
from megaprec.precision.plan import PrecisionPlan

DTYPES = ("float16", "half", "bfloat16", "float32", "tf32")
FFN_MULTIPLE = 256  # the width of a gated feed-forward is rounded up to this
SIZES = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
"""Keys any of which makes a dict the description of a whole model."""


def _dtype(value: object) -> object:
    """Return the name of a dtype, without "torch."; a text, for tf32 is no dtype of torch's."""
    name = name_of(value) if isinstance(value, torch.dtype) else value
    if isinstance(name, str):
        name = name.removeprefix("torch.")
        if name not in DTYPES:
            names = ", ".join(f'"torch.{known}"' for known in DTYPES)
            raise ValueError(f"no such dtype: use {names}{did_you_mean(name, DTYPES, 'torch.{}')}")
    return name


def _model_type(value: object) -> object:
    """Return a model type. Raises ValueError if it is not among the supported ones."""
    if isinstance(value, str) and value not in LACKS:
        raise ValueError(f"not supported: of InternEvo's model types there are {', '.join(LACKS)}")
    return value


def _recomputed_fraction(value: object) -> object:
    """Return `checkpoint`, a fraction of the layers, or True for all and False for none."""
    return float(value) if isinstance(value, bool) else value


class Model(Keys):
    """Keys of `model = dict(...)` with InternEvo's defaults, and keys of other tables that concern
    the model."""

    model_type: Annotated[str, BeforeValidator(_model_type)] = "INTERNLM"
    dtype: Annotated[str, BeforeValidator(_dtype)] = "float16"
    num_layers: int = Field(default=48, gt=0)
    hidden_size: int = Field(default=2048, gt=0)
    num_attention_heads: int = Field(default=32, gt=0)
    num_kv_attention_heads: int | None = Field(default=None, ge=0)
    vocab_size: int = Field(default=50304, gt=0)
    mlp_ratio: float = Field(default=4.0, gt=0)
    use_swiglu: bool = True
    use_flash_attn: bool = True
    norm_type: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    layer_norm_epsilon: float = Field(default=1e-5, gt=0)
    apply_post_layer_norm: bool = False
    no_bias: bool = False
    rope_base: float = Field(default=10000, gt=1)
    use_dynamic_ntk_rope: bool = False
    max_position_embeddings: int = Field(default=2048, gt=0)
    adapt_hf: bool | None = None
    checkpoint: Annotated[float, BeforeValidator(_recomputed_fraction), Field(ge=0, le=1)] = 0.0
    dropout_selective_checkpoint: bool = True
    num_chunks: int = Field(default=1, gt=0)
    residual_in_fp32: bool = False
    use_fp32_norm: bool = False
    embed_grad_scale: float = Field(default=1, gt=0, le=1)
    drop_rate: float = Field(default=0, ge=0, lt=1)
    attn_drop_rate: float = Field(default=0, ge=0, lt=1)
    use_scaled_init: bool = True
    embedding_init_std: float = Field(default=0.02, gt=0)
    attn_wqkv_init_std: float = Field(default=0.02, gt=0)
    attn_other_init_std: float = Field(default=0.02, gt=0)
    ffn_uplayer_init_std: float = Field(default=0.02, gt=0)
    ffn_other_init_std: float = Field(default=0.02, gt=0)
    out_head_init_std: float = Field(default=0.02, gt=0)
    init_type: Literal["normal", "uniform"] = "normal"
    embed_split_hidden: bool = False
    parallel_output: bool = True
    norm_head: bool = False
    is_reward: bool = False
    output_tf32: bool = False
    output_to_fp32: bool = True
    deepnorm: bool = False
    num_experts: Any = None
    moe_use_residual: Any = None
    moe_type: Any = None
    grad_scaler: Any = None
    hybrid_zero_optimizer: Any = None
    parallel: Any = None


# key -> key of model.init
STDS = {
    "embedding_init_std": "embedding",
    "out_head_init_std": "head",
    "attn_wqkv_init_std": "qkv",
    "attn_other_init_std": "output",
    "ffn_uplayer_init_std": "up",
    "ffn_other_init_std": "down",
}
# keys that INTERNLM, the first model type, does not have
_ONLY_LATER = {"num_kv_attention_heads", "no_bias", "adapt_hf", "deepnorm", "init_type", *STDS}
LACKS = {
    "INTERNLM": _ONLY_LATER | {"norm_head"},
    "INTERNLM2_PUBLIC": set[str](),
    "LLAMA2": {"norm_head", "max_position_embeddings", "use_dynamic_ntk_rope"},
}
"""Model type -> keys that its `build_model_with_cfg` does not take."""
DESCRIBING = (
    "num_kv_attention_heads",
    "mlp_ratio",
    "use_swiglu",
    "norm_type",
    "layer_norm_epsilon",
    "no_bias",
    "rope_base",
    "use_dynamic_ntk_rope",
    "max_position_embeddings",
    "adapt_hf",
    "apply_post_layer_norm",
    "use_scaled_init",
    *STDS,
    "init_type",
)
"""Keys that describe a model, in addition to SIZES."""
NUMERIC = ("model_type", "dtype", "use_flash_attn", "residual_in_fp32", "use_fp32_norm")
"""Keys whose values must be known to make a plan."""
# key -> why it is refused if it is true
REFUSED = {
    "norm_head": "a head whose rows are normalised is not supported",
    "output_tf32": "a head in FP32 with TF32 products in a 16-bit model is not supported",
    "is_reward": "a reward model has no vocabulary to be trained on",
    "deepnorm": "InternEvo refuses it too",
}
EXPERTS = ("num_experts", "moe_use_residual", "moe_type")
NORMS = {"rmsnorm": "rms", "layernorm": "layer"}
ALWAYS: Mapping[str, Any] = {
    "family": "llama",
    "positions": "rope",
    "rotary_fraction": 1.0,
    "qk_norm": False,
    "parallel_residual": False,
    "window": 0,
    "bias": False,
    "mlp_bias": False,
    "tied": False,
    "experts": 0,
    "init_std": 0.02,
    "factory": "",
}
"""Keys of [model] that are fixed in InternEvo; init_std has no effect because `model.init` sets
every initial std."""


def model_settings(reading: Reading, model: Model) -> dict[str, Decision]:
    """Return the keys of [model] that the dict decides. Adds problems to `reading`."""
    _refuse_keys(reading, model)
    settings = _training_settings(reading, model)
    if describes(reading):
        settings |= _architecture_settings(reading, model)
    return settings


def describes(reading: Reading) -> bool:
    """Return True if a size is set, so that the dict describes a whole model."""
    return any(is_set(reading, key) for key in SIZES)


def is_set(reading: Reading, key: str) -> bool:
    """Return True if the user set a key, to a known or unknown value."""
    return f"{reading.prefix}.{key}" in reading.set_keys | reading.unknown_keys


def is_unknown(reading: Reading, *keys: str) -> bool:
    """Return True if the user set one of the keys to an unknown value."""
    return any(f"{reading.prefix}.{key}" in reading.unknown_keys for key in keys)


def gated(model: Model) -> bool:
    """Return True if the feed-forward has three matrices, as it always has in InternEvo without
    flash attention."""
    return model.use_swiglu or not model.use_flash_attn


def _refuse_keys(reading: Reading, model: Model) -> None:
    """Refuse keys that the model type lacks, that no model here supports, or that describe only
    part of a model."""
    for key in NUMERIC:
        if is_unknown(reading, key):
            reading.refuse(key, UNKNOWN, f"numbers depend on it: set {reading.prefix}.{key} = ...")
    for key in Model.model_fields:
        if is_set(reading, key):
            why = _why_refused(reading, model, key)
            if why:
                reading.refuse(key, getattr(model, key), why)
    if model.apply_post_layer_norm and model.model_type != "INTERNLM":
        reading.refuse("apply_post_layer_norm", True, "norms after each branch are not supported")
    if model.init_type != "normal":
        reading.refuse("init_type", model.init_type, "initial weights are normal here")
    _refuse_heads(reading, model)


def _why_refused(reading: Reading, model: Model, key: str) -> str:
    """Return why a key that is set cannot be; empty if it can."""
    if key in EXPERTS:
        return "mixtures of experts, model type INTERNLM_MoE, are not supported"
    if key in LACKS[model.model_type]:
        types = ", ".join(name for name, lacks in LACKS.items() if key not in lacks)
        return f"model type {model.model_type} has no such key in InternEvo, only {types}"
    if key in DESCRIBING and not describes(reading):
        return (
            f"describes a model, but none of {', '.join(SIZES)} is set beside it: set it in "
            "[model], or describe the whole model here"
        )
    if key in REFUSED and getattr(model, key):
        return REFUSED[key]
    return ""


def _refuse_heads(reading: Reading, model: Model) -> None:
    """Refuse numbers of heads that do not divide what they must, if all of them are known."""
    heads = model.num_attention_heads
    kv_heads = model.num_kv_attention_heads or heads
    if not describes(reading) or is_unknown(reading, *SIZES, "num_kv_attention_heads"):
        return
    if model.hidden_size % heads:
        reading.refuse("num_attention_heads", heads, f"must divide hidden_size {model.hidden_size}")
    if heads % kv_heads:
        reading.refuse(
            "num_kv_attention_heads", kv_heads, f"must divide num_attention_heads {heads}"
        )


def _training_settings(reading: Reading, model: Model) -> dict[str, Decision]:
    """Return the keys of [model] about training, which any dict may set, by run-file key."""
    settings: dict[str, Decision] = {}
    if model.embed_grad_scale != 1:
        scale = reading.decided_by(float(model.embed_grad_scale), "embed_grad_scale")
        settings |= {"model.embedding_grad_scale": scale, "model.head_grad_scale": scale}
    if f"{reading.prefix}.attn_drop_rate" in reading.set_keys:
        settings["model.attention_dropout"] = reading.decided_by(
            float(model.attn_drop_rate), "attn_drop_rate"
        )
    if f"{reading.prefix}.drop_rate" in reading.set_keys:
        settings["model.dropout"] = reading.decided_by(float(model.drop_rate), "drop_rate")
        settings["model.dropout_at"] = reading.decided_by("stream", "drop_rate")
    return settings


def _architecture_settings(reading: Reading, model: Model) -> dict[str, Decision]:
    """Return a whole model, by run-file key, without keys that depend on unknown values; the run
    file sets those."""
    settings: dict[str, Decision] = {}
    for key, value in ALWAYS.items():
        # such a dict describes the whole model, what InternEvo fixes too: [model] contradicts none
        settings[f"model.{key}"] = replace(reading.always(value), by_user=True)
    for name, (value, keys) in _architecture(model).items():
        if not is_unknown(reading, *keys):
            settings[f"model.{name}"] = _decided_by_dict(reading, value, keys)
    # where InternEvo drops, also if no key sets a probability
    settings["model.dropout_at"] = reading.always("stream")
    if not is_unknown(reading, "use_scaled_init", "use_swiglu", *STDS):
        settings["model.init"] = reading.decided_by(initial(model), "use_scaled_init", *STDS)
    return settings


def _decided_by_dict(reading: Reading, value: Any, keys: tuple[str, ...]) -> Decision:
    """Return a decision that no key of [model] may contradict.

    Its origin also names the first key's default, if only other keys are set.
    """
    first = reading.decided_by(value, keys[0])
    decision = reading.decided_by(value, *keys)
    origin = decision.origin
    if decision.by_user and not first.by_user:
        origin = f"{first.origin}, {origin}"
    return Decision(value, origin, by_user=True)


def _architecture(model: Model) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Return key of [model] -> its value, and the keys that determine it."""
    heads = model.num_attention_heads
    ffn = int(model.hidden_size * model.mlp_ratio)
    if gated(model):
        ffn = -(-ffn // FFN_MULTIPLE) * FFN_MULTIPLE
    rope_scaling: dict[str, Any] = {}
    if model.use_dynamic_ntk_rope:
        rope_scaling = {
            "kind": "dynamic",
            "original_max_position_embeddings": model.max_position_embeddings,
        }
    if model.model_type == "INTERNLM":
        biases = (True, ("model_type",))
    else:
        biases = (not model.no_bias, ("no_bias", "model_type"))
    return {
        "layers": (model.num_layers, ("num_layers",)),
        "hidden": (model.hidden_size, ("hidden_size",)),
        "heads": (heads, ("num_attention_heads",)),
        "kv_heads": (
            model.num_kv_attention_heads or heads,
            ("num_attention_heads", "num_kv_attention_heads"),
        ),
        "head_dim": (model.hidden_size // heads, ("hidden_size", "num_attention_heads")),
        "mlp": ("swiglu" if gated(model) else "gelu", ("use_swiglu", "use_flash_attn")),
        "ffn": (ffn, ("mlp_ratio", "hidden_size", "use_swiglu", "use_flash_attn")),
        "vocab": (model.vocab_size, ("vocab_size",)),
        "norm": (NORMS[model.norm_type], ("norm_type",)),
        "norm_eps": (float(model.layer_norm_epsilon), ("layer_norm_epsilon",)),
        "rope_base": (float(model.rope_base), ("rope_base",)),
        "rope_scaling": (rope_scaling, ("use_dynamic_ntk_rope", "max_position_embeddings")),
        "qkv_bias": biases,
        "output_bias": biases,
    }


def initial(model: Model) -> dict[str, Any]:
    """Return the key model.init that reproduces `reset_parameters` of the model type."""
    if model.model_type == "INTERNLM":
        last = 0.006 if model.use_scaled_init else 0.0015  # of the last matrix of each branch
        stds = {
            "embedding": 0.0052,
            "head": 0.0052,
            "qkv": 0.006,
            "output": last,
            "up": 0.006,
            "down": last,
        }
    else:
        stds = {name: float(getattr(model, key)) for key, name in STDS.items()}
    if gated(model) and not model.use_swiglu:
        # without flash attention InternEvo does not tell the matrices apart by name
        stds["up"] = stds["down"]
    return stds | {"shrink": "layer" if model.use_scaled_init else "none"}


def model_notes(reading: Reading, model: Model) -> Iterator[str]:
    """Yield notes about ambiguous keys of the model and about differences from InternEvo."""
    described = describes(reading)
    if not described and is_set(reading, "model_type"):
        yield "model_type: no size is given, so the run file's [model] decides the model"
    if not model.use_flash_attn:
        yield (
            "use_flash_attn: without it InternEvo adds -10000 to masked scores; here they are "
            "excluded exactly"
        )
    if model.model_type != "INTERNLM":
        yield from _notes_of_later_types(model, described)
    if model.use_dynamic_ntk_rope:
        yield (
            "use_dynamic_ntk_rope: InternEvo scales by the longest document of a batch, here by "
            "the whole sequence"
        )
    if gated(model) and not model.use_swiglu and model.use_scaled_init and described:
        yield (
            "use_swiglu: without flash attention InternEvo reduces the initial std of all "
            "matrices of the feed-forward by depth, megaprec only that of the last"
        )
    if model.apply_post_layer_norm:
        yield (
            "apply_post_layer_norm: InternEvo accepts it and normalises before each layer all "
            "the same"
        )


def _notes_of_later_types(model: Model, described: bool) -> Iterator[str]:
    """Yield notes about model types other than INTERNLM. described: the dict has sizes."""
    model_type = model.model_type
    adapts = model.adapt_hf
    if adapts is None:  # each type has a default of its own
        adapts = model_type == "INTERNLM2_PUBLIC"
    if described and not adapts:
        yield (
            "adapt_hf is not set: InternEvo rotates neighbouring features of a head, "
            "megaprec features of its two halves; the same model with rows of query and key in "
            "another order"
        )
    if 0 < model.checkpoint < 1:
        yield (
            f"checkpoint: model type {model_type} rounds the number of layers up, here down; the "
            "same numbers either way"
        )
    if model.residual_in_fp32 and not model.use_fp32_norm:
        yield (
            "residual_in_fp32: InternEvo rounds the residual stream before the norm of "
            "attention, megaprec does not"
        )


def express_model(plan: PrecisionPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dict nearest to the keys of [model] in `settings`; it describes no model if there
    are no sizes."""
    config = _express_training(settings)
    model = {
        name.removeprefix("model."): value
        for name, value in settings.items()
        if name.startswith("model.")
    }
    if not any(model.get(_ARCHITECTURE[key]) for key in SIZES):
        return config
    for key, name in _ARCHITECTURE.items():
        if model.get(name):
            config[key] = model[name]
    if model.get("norm"):
        norm_types = {norm: norm_type for norm_type, norm in NORMS.items()}
        config["norm_type"] = norm_types[model["norm"]]
    if model.get("mlp", "swiglu") != "swiglu":
        config["use_swiglu"] = False
    if model.get("ffn") and model.get("hidden"):
        config["mlp_ratio"] = _mlp_ratio(model["ffn"], model["hidden"])
    sizes = Model.model_construct(**config, use_flash_attn=has_flash(plan))
    return config | _express_type(model, sizes)


def _express_training(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of dropout and of the embedding's gradient."""
    config: dict[str, Any] = {}
    for key, name in _TRAINED.items():
        if name in settings:
            config[key] = settings[name]
    if settings.get("model.embedding_grad_scale", 1) != 1:
        config["embed_grad_scale"] = settings["model.embedding_grad_scale"]
    return config


def _mlp_ratio(ffn: int, hidden: int) -> float:
    """Return a ratio of which InternEvo computes this width: it rounds the product down."""
    ratio = ffn / hidden
    if int(hidden * ratio) == ffn:
        return ratio
    # the product was a little less than the width, by rounding
    return (ffn + 0.5) / hidden


# InternEvo's key -> run-file key, about training
_TRAINED = {"drop_rate": "model.dropout", "attn_drop_rate": "model.attention_dropout"}
# InternEvo's key -> key of [model] of the same value
_ARCHITECTURE = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "vocab_size": "vocab",
    "layer_norm_epsilon": "norm_eps",
    "rope_base": "rope_base",
}


def _express_type(model: Mapping[str, Any], sizes: Model) -> dict[str, Any]:
    """Return the nearest model type and the keys that depend on it. model: keys of [model]."""
    rope_scaling = dict(model.get("rope_scaling") or {})
    init = dict(model.get("init") or {})
    config: dict[str, Any] = {}
    if rope_scaling.get("kind") == "dynamic":
        config["use_dynamic_ntk_rope"] = True
        config["max_position_embeddings"] = rope_scaling["original_max_position_embeddings"]
    is_scaled = init.get("shrink", "model") != "none"  # "model" is megaprec's default
    if not is_scaled:
        config["use_scaled_init"] = False
    has_groups = model.get("kv_heads", model.get("heads")) != model.get("heads")
    has_biases = model.get("qkv_bias", True) and model.get("output_bias", True)
    # the default type will do if it has these biases, heads and initial weights
    internlm = sizes.model_copy(update={"use_scaled_init": is_scaled})
    if has_biases and not has_groups and init in ({}, initial(internlm)):
        return config
    config |= {"model_type": "INTERNLM2_PUBLIC", "no_bias": not has_biases}
    if has_groups:
        config["num_kv_attention_heads"] = model["kv_heads"]
    default_std = model.get("init_std", 0.02)
    for key, name in STDS.items():
        config[key] = init.get(name) or default_std  # 0 is the default too
    return config


def has_flash(plan: PrecisionPlan) -> bool:
    """Return True if the attention of a plan is that of `use_flash_attn` in the plan's dtype."""
    if plan.compute == torch.float32:
        return plan.attention != plan.compute
    return plan.scores == plan.sensitive
