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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.formats import WITH_CONFIG, format_of
from tools.convert.hf.config import from_hugging_face
from tools.convert.hf.defaults import ALIASES, DEFAULTS
from tools.convert.hf.folder import CONFIG, open_hf, read_config
from tools.convert.quiet import if_untested, quiet_transformers, why_missing
from tools.convert.verify import load_stage

BOUND = 1e-9  # of the largest difference, relative to the largest logit
LAYERS = 4
HEAD = 16
FFN = 48
VOCAB = 64
EXPERTS = 4
LENGTH = 48
ORIGINAL = "original_max_position_embeddings"
# of the published ones, not of the model computed
OF_WEIGHTS = (
    "quantization_config",
    "initial_context_length",
)
CORRECTION = "e_score_correction_bias"
Json = Mapping[str, Any]


def check_config(config: Json, name: str) -> str:
    """Return a line on the difference of both models. Raises UserError if they are not the same;
    `name` names the config.

    Without transformers the line says that nothing was compared, and why.
    """
    try:
        theirs = parameters(json.dumps(_without_weights(config)))
        apart = difference(json.dumps(reduced(config)))
    except ImportError as problem:
        return f"{name} was not compared with transformers, which {why_missing(problem)}"
    except UserError as error:
        raise UserError(*(f"{name}: {problem}" for problem in error.problems)) from error
    ours = from_hugging_face(config).alone.num_parameters
    if theirs != ours:
        raise UserError(
            f"{name}: transformers makes another model of it: it has {theirs:,} parameters, "
            f"and ours {ours:,}"
            f"{if_untested()}; --no-verify goes on all the same"
        )
    if not apart <= BOUND:
        raise UserError(
            f"{name}: transformers computes another model: the logits of a small one differ "
            f"by {apart:.3g} of the "
            f"largest{if_untested()}; --no-verify goes on all the same"
        )
    return (
        f"{name}: a small model of this kind computes what that of transformers does (float64, "
        f"within {apart:.1g})"
    )


def verify_initial(folder: Path) -> str:
    """Return a line on the check of the folder's config.json; empty for formats that have none.
    Raises UserError if models differ.
    """
    kind, found = format_of(folder)
    if kind in WITH_CONFIG:
        return check_config(read_config(found), f"train.init_from: {found / CONFIG}")
    return ""


def reduced(config: Json) -> dict[str, Any]:
    """Return the config.json of a small model of the same kind, with only sizes changed."""
    model = from_hugging_face(config)
    names = ALIASES["gpt2"] if config["model_type"] == "gpt2" else {}
    small = {key: value for key, value in _without_weights(config).items() if key not in names}
    for key, value in (_sizes(config, model) | _lengths(config, model)).items():
        small[names.get(key, key)] = value
    return small | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


def _without_weights(config: Json) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in OF_WEIGHTS}


def _hidden(model: ModelConfig, heads: int, head_dim: int) -> int:
    """Return a small number of features: as many as all heads have, another multiple of heads, or
    none, as `model`."""
    if model.hidden == model.heads * model.head_dim:
        return heads * head_dim
    other = heads * (head_dim + 2)
    return other if model.hidden % model.heads == 0 or heads == 1 else other + 1


def _sizes(config: Json, model: ModelConfig) -> dict[str, Any]:
    """Return small numbers of features, layers, heads and experts. Missing keys stay missing if
    that has a meaning."""
    grouped = config.get("num_key_value_heads") is not None
    kv_heads = min(model.kv_heads, 2)
    heads = kv_heads * min(model.heads // model.kv_heads, 2)
    if model.kv_heads != model.heads and not grouped:
        heads = model.heads  # of which the family's default is a part
    head_dim = next(d for d in count(HEAD, 2) if turns(model, d))
    sizes = {
        "hidden_size": _hidden(model, heads, head_dim),
        "num_attention_heads": heads,
        "vocab_size": min(model.vocab, VOCAB),
        "num_hidden_layers": min(model.layers, LAYERS),
        ("n_inner" if config["model_type"] == "gpt2" else "intermediate_size"): FFN,
    }
    sizes |= {"num_key_value_heads": kv_heads} if grouped else {}
    sizes |= {"head_dim": head_dim} if config.get("head_dim") is not None else {}
    sizes |= _latents(config, model) if model.latent else {}
    return sizes | (_expert_sizes(config, model) if model.experts else {})


def _expert_sizes(config: Json, model: ModelConfig) -> dict[str, Any]:
    """Return small numbers of experts, in groups of the same number, and layers without experts of
    each kind."""
    keys = ("num_local_experts", "n_routed_experts", "num_experts")
    first_k = "first_k_dense_replace" in DEFAULTS[config["model_type"]]
    usual = "n_routed_experts" if first_k else "num_experts"
    key = next((key for key in keys if config.get(key) is not None), usual)
    least = max(EXPERTS, model.experts_per_token + 1)
    sizes: dict[str, Any] = {
        key: min(model.experts, model.router.at_least(least, model.experts_per_token))
    }
    if "moe_intermediate_size" in DEFAULTS[config["model_type"]]:
        sizes["moe_intermediate_size"] = FFN
    kinds = _spread(
        [n in model.dense_layers for n in range(model.layers)], min(model.layers, LAYERS)
    )
    dense = [n for n, one in enumerate(kinds) if one]
    if first_k:
        sizes["first_k_dense_replace"] = len(dense)
    elif model.dense_layers:
        sizes |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}
    return sizes


def _latents(config: Json, model: ModelConfig) -> dict[str, Any]:
    """Return small latents, and the widths that follow from them where the file states them."""
    sizes = model.latent
    turning = min(sizes.rope_dim, HEAD // 2)
    still = min(sizes.nope_dim, HEAD // 2)
    follow = {"head_dim": turning, "qk_head_dim": turning + still}
    return {
        "q_lora_rank": min(sizes.query_rank, HEAD) or None,
        "kv_lora_rank": min(sizes.kv_rank, HEAD),
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": still,
        "v_head_dim": min(sizes.value_dim, HEAD),
        **{key: value for key, value in follow.items() if config.get(key) is not None},
    }


def turns(model: ModelConfig, head_dim: int) -> bool:
    """Return True if rotary positions work with heads of this width."""
    turning = int(head_dim * model.rotary_fraction)
    return model.positions != "rope" or (turning > 2 and turning % 2 == 0)


def _lengths(config: Json, model: ModelConfig) -> dict[str, Any]:
    """Return lengths in tokens, all reduced alike, and the layers with a window."""
    longest = min(model.max_positions, LENGTH)
    layers = min(model.layers, LAYERS)

    def shrunk(length: int, least: int) -> int:
        return min(length, max(least, length * longest // model.max_positions))

    lengths: dict[str, Any] = {"max_position_embeddings": longest}
    for key in ("rope_scaling", "rope_parameters"):
        if config.get(key):
            original = config[key].get(ORIGINAL)
            lengths[key] = dict(config[key]) | ({ORIGINAL: shrunk(original, 8)} if original else {})
    if config.get(ORIGINAL):
        lengths[ORIGINAL] = shrunk(config[ORIGINAL], 8)
    if model.window:
        lengths["sliding_window"] = shrunk(model.window, 5)
    if types := config.get("layer_types"):
        lengths["layer_types"] = _spread(types, layers)
    elif (
        model.window
        and config.get("use_sliding_window")
        and not config["model_type"].endswith("_moe")
    ):
        has = [not model.window_layers or n in model.window_layers for n in range(model.layers)]
        lengths["max_window_layers"] = _spread(has, layers).index(True)
    return lengths


def _spread(kinds: list[Any], layers: int) -> list[Any]:
    """Return the kinds of so many layers, spread as `kinds` are, with the kinds that would be
    missing at the end."""
    chosen = [kinds[n * len(kinds) // layers] for n in range(layers)]
    missing = [kind for kind in dict.fromkeys(kinds) if kind not in chosen]
    return chosen[: layers - len(missing)] + missing


@cache
def parameters(config: str) -> int:
    """Return the number of parameters of transformers' model of a config.json, made of tensors
    without memory.

    Corrections of routers count, which are buffers there. Raises UserError if its class makes no
    model of it, and ImportError without transformers.
    """
    with quiet_transformers() as transformers:
        try:
            settings = transformers.AutoConfig.for_model(**json.loads(config))
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(
                    settings, attn_implementation="eager"
                )
        except Exception as error:  # whatever a configuration can provoke there is its fault
            raise _no_model(error) from error
    corrections = [one for name, one in model.named_buffers() if name.endswith(CORRECTION)]
    return sum(one.numel() for one in (*model.parameters(), *corrections))


def _no_model(error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:300]
    return UserError(
        f"transformers makes no model of config.json ({type(error).__name__}: "
        f"{reason}){if_untested()}; "
        "--no-verify goes on all the same"
    )


@cache
def difference(config: str) -> float:
    """Return the largest difference of float64 logits, relative to the largest logit. ImportError
    without transformers.
    """
    given = json.loads(config)
    model = from_hugging_face(given)
    length = model.max_positions if model.positions == "learned" else model.max_positions * 3 // 2
    threads = torch.get_num_threads()
    ids = torch.randint(model.vocab, (2, length), generator=torch.Generator().manual_seed(0))
    try:
        torch.set_num_threads(1)  # more only wait for each other in so small a model
        with TemporaryDirectory(prefix="megaprec_probe_") as name:
            folder = Path(name)
            theirs = _theirs(given, folder, ids)
            (folder / CONFIG).write_text(config)
            ours = load_stage(open_hf(folder), "fp64")(ids.t()).transpose(0, 1).detach()
    finally:
        torch.set_num_threads(threads)
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@torch.no_grad()
def _theirs(config: Json, folder: Path, ids: Tensor) -> Tensor:
    """Return float64 logits [b, s, vocab] of transformers' model with random weights, which it
    saves in `folder`."""
    with quiet_transformers() as transformers, _float32_is_float64():
        try:
            model = _made(transformers, config)
            logits = model(ids).logits
        except Exception as error:  # whatever a configuration can provoke there is its fault
            raise _no_model(error) from error
        try:
            model.save_pretrained(folder)
        except Exception as error:  # the library of safetensors has one of its own for a full disk
            raise UserError(
                f"a small model cannot be written to {folder} ({error}); --no-verify needs none"
            ) from error
    return logits


def _made(transformers: Any, config: Json) -> Any:
    settings = transformers.AutoConfig.for_model(**config)
    settings._experts_implementation = "eager"  # others have no float64
    model = transformers.AutoModelForCausalLM.from_config(
        settings, attn_implementation="eager", dtype=torch.float64
    ).eval()
    _draw(model)
    return model


def _draw(model: Any) -> None:
    """Draw weights such that every tensor matters; embeddings are small, so that the epsilon of
    norms matters too."""
    dice = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=dice, dtype=torch.float64)
        embeds = any(part in name for part in ("embed_in", "embed_tokens", "wte", "wpe"))
        parameter.copy_((0.02 if embeds else 0.25) * noise + float("norm" in name or "ln_" in name))
    for name, buffer in model.named_buffers():
        if name.endswith(CORRECTION):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=dice, dtype=torch.float64))


@contextmanager
def _float32_is_float64() -> Iterator[None]:
    """Within the context torch.float32 is float64, for transformers computes norms, angles and
    softmax in torch.float32.
    """
    before = torch.float32, torch.float, torch.Tensor.float, torch.get_default_dtype()
    torch.float32 = torch.float = torch.float64  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.float = torch.Tensor.double  # pyright: ignore[reportAttributeAccessIssue]
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = before[:3]  # pyright: ignore[reportAttributeAccessIssue]
        torch.set_default_dtype(before[3])
