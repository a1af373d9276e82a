"""The check that a config.json was understood: the model of transformers and megaprec's compute the
same logits.

Real weights would show it too (`verify`), but take long for a large model. Here a config.json is
made small first: fewer layers, heads and features, windows and lengths reduced alike, layers of
each kind kept, and what divides what in the sizes of attention. Both models get the same random
weights, through a folder that transformers writes, and the same tokens, more than any window or
length. In float64 two models that compute the same differ by rounding alone; the effect of a single
misread key is far larger.

The config.json as it is, with all its sizes, is given to transformers' own class too, which makes a
model of tensors without memory: it must accept the sizes, and have as many parameters as ours.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaprec.durable import put_text
from megaprec.errors import UserError
from megaprec.scratch import scratch_folder
from models.config import ModelConfig
from models.parameter_counts import num_parameters
from models.spread_layers import spread
from tools.convert.formats import WITH_CONFIG, format_of
from tools.convert.hf.config import from_hugging_face
from tools.convert.hf.delta_layers import layer_types
from tools.convert.hf.families import FAMILIES
from tools.convert.hf.folder import CONFIG, open_hf, read_config
from tools.convert.hf.hybrid_layers import LETTERS
from tools.convert.transformers_package import if_untested, quiet_transformers, why_missing
from tools.convert.verify import load_stage

BOUND = 1e-9  # of the largest difference, relative to the largest logit
# Sizes of the small model, of which the model that is checked may have fewer.
LAYERS = 4
HEAD = 16
FFN = 48
VOCAB = 64
EXPERTS = 4
LENGTH = 48
LEAST_ORIGINAL = 8  # tokens of an original length
LEAST_WINDOW = 5
ORIGINAL = "original_max_position_embeddings"
ROPE_TABLES = ("rope_scaling", "rope_parameters")
# of the published ones, not of the model computed
OF_WEIGHTS = ("quantization_config", "initial_context_length")
# Scales of random weights, such that every tensor changes the logits.
EMBEDDING_SCALE = 0.02
WEIGHT_SCALE = 0.25
CORRECTION_SCALE = 0.1
MOST_REASON = 300  # characters of an error of transformers that are shown
CORRECTION = "e_score_correction_bias"
LAYER_SCALAR = ".layer_scalar"  # buffers of Gemma 4
EMBEDDINGS = ("embed_in", "embed_tokens", "wte", "wpe")  # parts of names in transformers
Json = Mapping[str, Any]


def check_config(config: Json, config_name: str) -> str:
    """Return a line on the difference of both models. Raises UserError if they are not the same;
    `config_name` names the config.

    Without transformers the line says that nothing was compared, and why.
    """
    try:
        their_count = parameters(json.dumps(_without_weights(config)))
        logit_difference = difference(json.dumps(reduced(config)))
    except ImportError as problem:
        return f"{config_name} was not compared with transformers, which {why_missing(problem)}"
    except UserError as error:
        raise UserError(
            *(problem.within(f"{config_name}: ") for problem in error.problems)
        ) from error
    our_count = num_parameters(from_hugging_face(config).without_mtp)
    if their_count != our_count:
        raise UserError.of(
            "convert.probe_size",
            name=config_name,
            their_count=their_count,
            our_count=our_count,
            if_untested=if_untested(),
        )
    if not logit_difference <= BOUND:  # true of NaN too
        raise UserError.of(
            "convert.probe_logits",
            name=config_name,
            logit_difference=logit_difference,
            if_untested=if_untested(),
        )
    return (
        f"{config_name}: a small model of this kind computes what that of transformers does "
        f"(float64, within {logit_difference:.1g})"
    )


def verify_initial(folder: Path) -> str:
    """Return a line on the check of the folder's config.json; empty for formats that have none.
    Raises UserError if models differ.
    """
    kind, checkpoint = format_of(folder)
    if kind in WITH_CONFIG:
        return check_config(read_config(checkpoint), f"train.init_from: {checkpoint / CONFIG}")
    return ""


def reduced(config: Json) -> dict[str, Any]:
    """Return the config.json of a small model of the same kind, with only sizes changed."""
    our_model = from_hugging_face(config)
    names = FAMILIES["gpt2"].aliases if config["model_type"] == "gpt2" else {}
    small: dict[str, Any] = {}
    for config_key, value in _without_weights(config).items():
        if config_key not in names:
            small[config_key] = value
    reduced_values = _sizes(config, our_model) | _lengths(config, our_model)
    for config_key, value in reduced_values.items():
        small[names.get(config_key, config_key)] = value
    # No token is padding, whose embedding would be 0; a class may require the first one.
    return small | {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": None}


def _without_weights(config: Json) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in OF_WEIGHTS}


def _hidden(model: ModelConfig, heads: int, head_dim: int) -> int:
    """Return a small number of features: as many as all heads have, another multiple of heads, or
    none, as `model`."""
    if model.hidden == model.heads * model.head_dim:
        return heads * head_dim
    multiple = heads * (head_dim + 2)
    if model.hidden % model.heads == 0 or heads == 1:
        return multiple
    return multiple + 1


def _sizes(config: Json, model: ModelConfig) -> dict[str, Any]:
    """Return small numbers of features, layers, heads and experts. Missing keys stay missing if
    that has a meaning."""
    states_kv_heads = config.get("num_key_value_heads") is not None
    kv_heads = min(model.kv_heads, 2)
    # At most two groups of at most two heads.
    heads = kv_heads * min(model.heads // model.kv_heads, 2)
    if model.kv_heads != model.heads and not states_kv_heads:
        heads = model.heads  # of which the family's default is a part
    head_dim = next(width for width in count(HEAD, 2) if turns(model, width))
    ffn_key = "n_inner" if config["model_type"] == "gpt2" else "intermediate_size"
    sizes: dict[str, Any] = {
        "hidden_size": _hidden(model, heads, head_dim),
        "num_attention_heads": heads,
        "vocab_size": min(model.vocab, VOCAB),
        "num_hidden_layers": min(model.layers, LAYERS),
        ffn_key: FFN,
    }
    if states_kv_heads:
        sizes["num_key_value_heads"] = kv_heads
    if config.get("head_dim") is not None:
        sizes["head_dim"] = head_dim
    if "global_head_dim" in FAMILIES[config["model_type"]].defaults:
        sizes |= _global_heads(config, model, kv_heads)
    if model.latent:
        sizes |= _latents(config, model)
    if model.delta_net:
        sizes |= _delta_net_sizes(model)
    if model.mamba:
        sizes |= _mamba_sizes(model)
    if model.experts:
        sizes |= _expert_sizes(config, model)
    return sizes


def _global_heads(config: Json, model: ModelConfig, kv_heads: int) -> dict[str, Any]:
    """Return wider heads, and one key and value head, of layers without the window where they have
    heads of their own."""
    head_dim = next(width for width in count(HEAD, 2) if turns(model, width))
    own = {
        "head_dim": 2 * head_dim if model.global_head_dim else head_dim,
        "num_key_value_heads": 1 if model.global_kv_heads else kv_heads,
    }
    if config.get("per_layer_config") is None:
        return {
            "global_head_dim": own["head_dim"],
            "num_global_key_value_heads": own["num_key_value_heads"],
        }
    kinds = _layer_kinds(config, model)["layer_types"]
    without_window = [str(n) for n, kind in enumerate(kinds) if kind == "full_attention"]
    return {"per_layer_config": dict.fromkeys(without_window, own)}


def _delta_net_sizes(model: ModelConfig) -> dict[str, Any]:
    """Return small heads of gated delta nets, each head of keys of at most two heads of values."""
    sizes = model.delta_net
    key_heads = min(sizes.key_heads, 2)
    if sizes.gate_rank:
        return {
            "linear_num_heads": key_heads,
            "linear_head_dim": min(sizes.key_dim, HEAD),
            "linear_conv_kernel_dim": sizes.kernel,
            # of a published file, which has the sizes too
            "linear_attn_config": {},
        }
    group = sizes.value_heads // sizes.key_heads
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * min(group, 2),
        "linear_key_head_dim": min(sizes.key_dim, HEAD),
        "linear_value_head_dim": min(sizes.value_dim, HEAD),
        "linear_conv_kernel_dim": sizes.kernel,
    }


def _mamba_sizes(model: ModelConfig) -> dict[str, Any]:
    """Return small heads of Mamba-2 mixers, each group of at most two heads."""
    sizes = model.mamba
    groups = min(sizes.groups, 2)
    group_size = sizes.heads // sizes.groups
    return {
        "mamba_num_heads": groups * min(group_size, 2),
        "mamba_head_dim": min(sizes.head_dim, HEAD),
        "ssm_state_size": min(sizes.state_dim, HEAD),
        "n_groups": groups,
        "conv_kernel": sizes.kernel,
    }


def _expert_sizes(config: Json, model: ModelConfig) -> dict[str, Any]:
    """Return small numbers of experts, in groups of the same number, and layers with and without
    experts."""
    defaults = FAMILIES[config["model_type"]].defaults
    names = ("num_local_experts", "n_routed_experts", "num_experts")
    stated_names = [name for name in names if config.get(name) is not None]
    usual_name = "n_routed_experts" if "n_routed_experts" in defaults else "num_experts"
    # Kimi Linear's class has another name for it than its relatives.
    if "linear_attn_config" in defaults:
        usual_name = "num_experts"
    least = max(EXPERTS, model.experts_per_token + 1)
    experts = min(model.experts, model.router.at_least(least, model.experts_per_token))
    sizes: dict[str, Any] = dict.fromkeys(stated_names or [usual_name], experts)
    if "moe_intermediate_size" in defaults:
        sizes["moe_intermediate_size"] = FFN
    return sizes | _dense_layers(config, model)


def _dense_layers(config: Json, model: ModelConfig) -> dict[str, Any]:
    """Return which of the few layers of the probe have no experts, in the family's spelling."""
    defaults = FAMILIES[config["model_type"]].defaults
    sizes: dict[str, Any] = {}
    is_dense = [layer in model.dense_layers for layer in range(model.layers)]
    is_dense_in_probe = spread(is_dense, min(model.layers, LAYERS))
    dense_layers = [layer for layer, dense in enumerate(is_dense_in_probe) if dense]
    if "mlp_layer_types" in defaults:
        sizes["mlp_layer_types"] = ["dense" if dense else "sparse" for dense in is_dense_in_probe]
        if config.get("first_k_dense_replace") is not None:
            sizes["first_k_dense_replace"] = len(dense_layers)
    elif "first_k_dense_replace" in defaults:
        sizes["first_k_dense_replace"] = len(dense_layers)
    elif model.dense_layers:
        sizes |= {"mlp_only_layers": dense_layers, "decoder_sparse_step": 1}
    return sizes


def _latents(config: Json, model: ModelConfig) -> dict[str, Any]:
    """Return small latents, and the widths that follow from them where the file states them."""
    latent = model.latent
    rope_dim = min(latent.rope_dim, HEAD // 2)
    nope_dim = min(latent.nope_dim, HEAD // 2)
    sizes = {
        "q_lora_rank": min(latent.query_rank, HEAD) or None,
        "kv_lora_rank": min(latent.kv_rank, HEAD),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": nope_dim,
        "v_head_dim": min(latent.value_dim, HEAD),
    }
    for config_key, width in (("head_dim", rope_dim), ("qk_head_dim", rope_dim + nope_dim)):
        if config.get(config_key) is not None:
            sizes[config_key] = width
    return sizes


def turns(model: ModelConfig, head_dim: int) -> bool:
    """Return True if rotary positions work with heads of this width."""
    rotary_dims = int(head_dim * model.rotary_fraction)
    return model.positions != "rope" or (rotary_dims > 2 and rotary_dims % 2 == 0)


def _lengths(config: Json, model: ModelConfig) -> dict[str, Any]:
    """Return lengths in tokens, all reduced alike, and the kinds of few layers."""
    longest = min(model.max_positions, LENGTH)

    def reduced_length(length: int, least: int) -> int:
        return min(length, max(least, length * longest // model.max_positions))

    lengths: dict[str, Any] = {"max_position_embeddings": longest}
    for alias, key in FAMILIES[config["model_type"]].aliases.items():
        if key in lengths and alias in config:
            lengths[alias] = longest

    def with_reduced_originals(table: Json) -> dict[str, Any]:
        """Return rope parameters, of all layers or in a table for each kind of layers."""
        reduced_table = dict(table)
        for key, value in table.items():
            if isinstance(value, Mapping):
                reduced_table[key] = with_reduced_originals(value)
            elif key == ORIGINAL and value:
                reduced_table[key] = reduced_length(value, LEAST_ORIGINAL)
        return reduced_table

    # All places that may say an original length are reduced alike: they must agree.
    stated = {key: config[key] for key in (*ROPE_TABLES, ORIGINAL) if config.get(key)}
    lengths |= with_reduced_originals(stated)
    if model.window:
        lengths["sliding_window"] = reduced_length(model.window, LEAST_WINDOW)
    return lengths | _layer_kinds(config, model)


def _layer_kinds(config: Json, model: ModelConfig) -> dict[str, Any]:
    """Return the kinds of few layers, under the keys by which the file states them; none if all
    layers are alike."""
    layers = min(model.layers, LAYERS)
    if model.hybrid_pattern:
        return _hybrid_layers(config, model.hybrid_pattern, layers)
    says_turns = "no_rope_layers" in FAMILIES[config["model_type"]].defaults
    if model.nope_layers and says_turns:
        return _turning_layers(config, model, layers)
    if types := config.get("layer_types"):
        return {"layer_types": _with_last(types, spread(types, layers))}
    if model.delta_net:
        # A file may say them by their distance, in which few layers would be of one kind.
        return {"layer_types": spread(layer_types(model), layers)}
    if model.window and _has_first_window_layer(config):
        window_layers = model.window_layers or range(model.layers)
        has_window = [layer in window_layers for layer in range(model.layers)]
        return {"max_window_layers": spread(has_window, layers).index(True)}
    return {}


def _turning_layers(config: Json, model: ModelConfig, layers: int) -> dict[str, Any]:
    """Return for so many layers whether rotary positions turn them, and their types if the file
    states these too."""
    turns = [int(number not in model.nope_layers) for number in range(model.layers)]
    kinds: dict[str, Any] = {"no_rope_layers": spread(turns, layers)}
    if types := config.get("layer_types"):
        kinds["layer_types"] = spread(types, layers)
    return kinds


def _with_last(types: Sequence[str], types_of_few: list[str]) -> list[str]:
    """Return the types of few layers, the last of which is as that of all: the last layer of a
    Gemma 4 must have no window."""
    last = types[-1]
    if types_of_few[-1] == last:
        return types_of_few
    others = list(types_of_few)
    others.remove(last)
    return [*others, last]


def _hybrid_layers(config: Json, pattern: str, layers: int) -> dict[str, Any]:
    """Return the kinds of so many layers with one branch, under all keys that state them."""
    letters = spread(pattern, layers)
    kinds: dict[str, Any] = {"hybrid_override_pattern": "".join(letters)}
    names = {letter: name for name, letter in reversed(LETTERS.items())}
    for key in ("layers_block_type", "layer_types"):
        if config.get(key) is not None:
            kinds[key] = [names[letter] for letter in letters]
    return kinds


def _has_first_window_layer(config: Json) -> bool:
    """Return True for families that say by max_window_layers from which layer on there is a
    window."""
    return bool(config.get("use_sliding_window")) and not config["model_type"].endswith("_moe")


def _values(config: str) -> dict[str, Any]:
    """Return the values of a config.json, in which transformers writes infinity as a table."""
    return json.loads(config, object_hook=_float_or_table)


def _float_or_table(table: dict[str, Any]) -> Any:
    return float(table["__float__"]) if [*table] == ["__float__"] else table


@cache
def parameters(config: str) -> int:
    """Return the number of parameters of transformers' model of a config.json, made of tensors
    without memory.

    Corrections of routers and numbers of layers count, which are buffers there. Raises UserError if
    its class makes no model of it, and ImportError without transformers.
    """
    with quiet_transformers() as transformers:
        try:
            settings = transformers.AutoConfig.for_model(**_values(config))
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(
                    settings, attn_implementation="eager"
                )
        except Exception as error:  # whatever a configuration can provoke there is its fault
            raise _no_model(error) from error
    buffers = [
        buffer
        for name, buffer in model.named_buffers()
        if name.endswith((CORRECTION, LAYER_SCALAR))
    ]
    return sum(tensor.numel() for tensor in (*model.parameters(), *buffers))


def _no_model(error: Exception) -> UserError:
    """Return the error for a folder that transformers cannot load."""
    reason = " ".join(str(error).split())[:MOST_REASON]
    return UserError.of(
        "convert.probe_no_model",
        kind=type(error).__name__,
        reason=reason,
        if_untested=if_untested(),
    )


@cache
def difference(config: str) -> float:
    """Return the largest difference of float64 logits, relative to the largest logit. ImportError
    without transformers.
    """
    settings = _values(config)
    our_model = from_hugging_face(settings)
    length = our_model.max_positions
    if our_model.positions != "learned":
        length = our_model.max_positions * 3 // 2  # more than any window or length
    threads = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(our_model.vocab, (2, length), generator=generator)
    try:
        torch.set_num_threads(1)  # more only wait for each other in so small a model
        with scratch_folder("probe") as name:
            folder = Path(name)
            theirs = _logits_of_transformers(settings, folder, token_ids)
            put_text(folder / CONFIG, config)
            # Our model reads the weights that transformers has saved: names and layouts are tried
            # too.
            stage = load_stage(open_hf(folder), "fp64")
            ours = stage(token_ids.t()).transpose(0, 1).detach()
    finally:
        torch.set_num_threads(threads)
    largest_difference = (ours - theirs).abs().max()
    return (largest_difference / theirs.abs().max()).item()


@torch.no_grad()
def _logits_of_transformers(config: Json, folder: Path, token_ids: Tensor) -> Tensor:
    """Return float64 logits [b, s, vocab] of transformers' model with random weights, which it
    saves in `folder`."""
    with (
        quiet_transformers() as transformers,
        float32_is_float64(transformers, config["model_type"]),
    ):
        try:
            model = _make_model(transformers, config)
            # A cache would need a layer with attention.
            logits = model(token_ids, use_cache=False).logits
        except Exception as error:  # whatever a configuration can provoke there is its fault
            raise _no_model(error) from error
        try:
            model.save_pretrained(folder)
        except Exception as error:  # the library of safetensors has one of its own for a full disk
            raise UserError.of("convert.probe_folder", folder=folder, error=error) from error
    return logits


def _make_model(transformers: Any, config: Json) -> Any:
    """Return transformers' model of a config.json in float64, with random weights."""
    settings = transformers.AutoConfig.for_model(**config)
    settings._experts_implementation = "eager"  # others have no float64
    model = transformers.AutoModelForCausalLM.from_config(
        settings, attn_implementation="eager", dtype=torch.float64
    ).eval()
    _draw_weights(model)
    return model


def _draw_weights(model: Any) -> None:
    """Draw weights such that every tensor matters; embeddings are small, so that the epsilon of
    norms matters too."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        is_embedding = any(module in name for module in EMBEDDINGS)
        is_norm = "norm" in name or "ln_" in name
        scale = EMBEDDING_SCALE if is_embedding else WEIGHT_SCALE
        mean = 1.0 if is_norm else 0.0
        parameter.copy_(scale * noise + mean)
    for name, buffer in model.named_buffers():
        if name.endswith(CORRECTION):
            noise = torch.randn(buffer.shape, generator=generator, dtype=torch.float64)
            buffer.copy_(CORRECTION_SCALE * noise)
        if name.endswith(LAYER_SCALAR):
            buffer.copy_(0.5 + torch.rand(1, generator=generator, dtype=torch.float64))


@contextmanager
def float32_is_float64(transformers: Any, model_type: str) -> Iterator[None]:
    """Context manager in which torch.float32 is float64, for transformers computes norms, angles
    and softmax in torch.float32.

    model_type: of the model that is to be computed.
    """
    # Its class imports torch's compiler, whose tables would keep float64 for float32.
    with suppress(Exception):  # a type that it does not know is told where the model is made
        settings = transformers.AutoConfig.for_model(model_type)
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
    names_before = torch.float32, torch.float, torch.Tensor.float
    default_before = torch.get_default_dtype()
    torch.float32 = torch.float = torch.float64  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.float = torch.Tensor.double  # pyright: ignore[reportAttributeAccessIssue]
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = names_before  # pyright: ignore[reportAttributeAccessIssue]
        torch.set_default_dtype(default_before)
