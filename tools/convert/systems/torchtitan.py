"""The names and the order of rows of torchtitan's models in its checkpoints, which are PyTorch's
distributed ones.

Three of its models are read, which names distinguish (torchtitan/models/*/state_dict_adapter.py):

    deepseek_v3    has attention.wkv_a; rotary partners are neighbours, as in DeepSeek's own files
    qwen3          has attention.q_norm; rotary partners are halves of a head
    llama3         has neither; rotary partners are neighbours

Versions differ in names: `output` was the head before `lm_head`, and queries, keys and values were
in `attention` before they were in `attention.qkv_linear`. Experts of a layer are one tensor each
for w1 (gate), w3 (up) and w2 (down), whose names got the letters of their dimensions in 2026.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.core.rules import NameRule, tensors_without_rule
from tools.convert.core.shards import TensorSource
from tools.convert.core.transforms import (
    EXPERTS_STACKED,
    INTERLEAVED,
    LATENT_DOWN,
    LATENT_QUERY,
    LATENT_UP,
    SAME,
)

EMBEDDING = "tok_embeddings.weight"
HEADS = ("lm_head.weight", "output.weight")
MODULES = "mtp_layers."
OWN_EPS = {"llama3": 1e-5, "qwen3": 1e-6, "deepseek_v3": 1e-5}
# What computes positions or counts tokens, of which nothing has to be kept.
_BUFFERS = re.compile(r"freqs_cis|rope\.cache|rope_cache|.*\.tokens_per_expert(?:_E)?")
_EXPERTS = re.compile(r"layers\.\d+\.(moe\.(?:\w+\.)*\w*experts)\.w1(_EFD)?")
_BIAS = re.compile(r"layers\.\d+\.moe\.(expert_bias(?:_E)?)")
_GPT_OSS = re.compile(r".*experts\.mlp1_weight(?:_EGD)?")
_LAYER = "layers.N"
_MOE = f"{_LAYER}.moe"
_ATTENTION = "layers.N.attention"  # there and here
_MLP = "layers.N.mlp"
_PARTS = {"w1": "gate", "w2": "down", "w3": "up"}


@dataclass(frozen=True)
class VersionSpelling:
    """The names of a version, and the model that they are of.

    model: torchtitan's name of it.
    head: of the output head.
    projections: the module of queries, keys and values, with a dot if there is one.
    experts: the module of experts, and `suffixes` after its tensors' names.
    bias: of the correction of the router's choice.
    """

    model: str
    head: str
    projections: str
    experts: str
    suffixes: Mapping[str, str]
    bias: str

    @classmethod
    def of(cls, names: Collection[str]) -> "VersionSpelling":
        """Return the spelling of a checkpoint with these names."""
        head = next((head for head in HEADS if head in names), HEADS[0])
        has_module = any(".attention.qkv_linear." in name for name in names)
        experts = _first_match(_EXPERTS, names)
        bias = _first_match(_BIAS, names)
        suffixes = dict.fromkeys(_PARTS, "")
        # the dimensions of experts, features out and in: E, F and D
        if experts and experts[2]:
            suffixes = {"w1": "_EFD", "w2": "_EDF", "w3": "_EFD"}
        return cls(
            model=_model_name(names),
            head=head,
            projections="qkv_linear." if has_module else "",
            experts=experts[1] if experts else "moe.experts",
            suffixes=suffixes,
            bias=bias[1] if bias else "expert_bias",
        )


def _first_match(pattern: re.Pattern[str], names: Iterable[str]) -> re.Match[str] | None:
    """Return the match of the first name that matches a pattern as a whole; None if none does."""
    for name in names:
        if match := pattern.fullmatch(name):
            return match
    return None


def _model_name(names: Collection[str]) -> str:
    """Return torchtitan's name of the model that has tensors of these names."""

    def has(part: str) -> bool:
        return any(part in name for name in names)

    if any(map(_GPT_OSS.fullmatch, names)):
        return "gpt_oss"
    if has(".attention.wkv_a."):
        return "deepseek_v3"
    if has(".attention.q_norm."):
        return "qwen3"
    # Experts without norms of queries are those of llama4, whose attention is none of ours.
    return "llama4" if has(".moe.") else "llama3"


def with_titan_norms(model: ModelConfig) -> ModelConfig:
    """Return the model of a config.json with norms of latents as torchtitan computes them: with the
    epsilon of all others, and not with 1e-6 as transformers does."""
    if not model.latent:
        return model
    latent = model.latent.model_copy(update={"norm_eps": model.norm_eps})
    return model.model_copy(update={"latent": latent})


def notes_on_norms(model: ModelConfig, spelling: VersionSpelling) -> Iterator[str]:
    """Yield a note if the epsilon of norms is not that of torchtitan's own configurations."""
    own = OWN_EPS[spelling.model]
    if model.norm_eps != own:
        yield (
            f"norms have an epsilon of {model.norm_eps:g}, as was said; torchtitan's own "
            f"{spelling.model} has {own:g}"
        )


def titan_rules(checkpoint: Path, model: ModelConfig, spelling: VersionSpelling) -> list[NameRule]:
    """Return the rules of torchtitan's model. Raises UserError if it is not read, or has no place
    for what `model` has."""
    if spelling.model in ("gpt_oss", "llama4"):
        raise UserError.of("convert.titan_model_unread", path=checkpoint, model=spelling.model)
    rules = [
        NameRule(EMBEDDING, ("embedding.weight",)),
        NameRule(f"{_LAYER}.attention_norm.weight", ("layers.N.attention_norm.weight",)),
        *(_latent_projections() if spelling.model == "deepseek_v3" else _projections(spelling)),
        NameRule(f"{_ATTENTION}.wo.weight", (f"{_ATTENTION}.output.weight",)),
        NameRule(f"{_LAYER}.ffn_norm.weight", ("layers.N.mlp_norm.weight",)),
        *_feed_forward(f"{_LAYER}.feed_forward", _MLP),
        *_experts(spelling),
        NameRule("norm.weight", ("final_norm.weight",)),
        NameRule(spelling.head, ("head.weight",)),
    ]
    if lacking := tensors_without_rule(rules, model):
        raise UserError.of(
            "convert.titan_model_differs", path=checkpoint, model=spelling.model, name=lacking[0]
        )
    return rules


def _projections(spelling: VersionSpelling) -> list[NameRule]:
    """Return the rules of queries, keys and values."""
    turned = INTERLEAVED if spelling.model == "llama3" else SAME
    module = f"{_ATTENTION}.{spelling.projections}"
    return [
        NameRule(f"{module}wq.weight", (f"{_ATTENTION}.query.weight",), turned),
        NameRule(f"{module}wk.weight", (f"{_ATTENTION}.key.weight",), turned),
        NameRule(f"{module}wv.weight", (f"{_ATTENTION}.value.weight",)),
        NameRule(f"{_ATTENTION}.q_norm.weight", (f"{_ATTENTION}.query_norm.weight",)),
        NameRule(f"{_ATTENTION}.k_norm.weight", (f"{_ATTENTION}.key_norm.weight",)),
    ]


def _latent_projections() -> list[NameRule]:
    """Return the rules of queries, keys and values of DeepSeek's multi-head latent attention."""
    down = (f"{_ATTENTION}.key_value_down.weight", f"{_ATTENTION}.key_rope.weight")
    up = (f"{_ATTENTION}.key_up.weight", f"{_ATTENTION}.value_up.weight")
    return [
        NameRule(f"{_ATTENTION}.wq.weight", (f"{_ATTENTION}.query.weight",), LATENT_QUERY),
        NameRule(f"{_ATTENTION}.wq_a.weight", (f"{_ATTENTION}.query_down.weight",)),
        NameRule(f"{_ATTENTION}.q_norm.weight", (f"{_ATTENTION}.query_down_norm.weight",)),
        NameRule(f"{_ATTENTION}.wq_b.weight", (f"{_ATTENTION}.query_up.weight",), LATENT_QUERY),
        NameRule(f"{_ATTENTION}.wkv_a.weight", down, LATENT_DOWN),
        NameRule(f"{_ATTENTION}.kv_norm.weight", (f"{_ATTENTION}.key_value_down_norm.weight",)),
        NameRule(f"{_ATTENTION}.wkv_b.weight", up, LATENT_UP),
    ]


def _feed_forward(module: str, logical: str) -> list[NameRule]:
    rules = []
    for theirs, ours in _PARTS.items():
        rules.append(NameRule(f"{module}.{theirs}.weight", (f"{logical}.{ours}.weight",)))
    return rules


def _experts(spelling: VersionSpelling) -> list[NameRule]:
    """Return the rules of experts, their router, and shared ones."""
    rules = [
        NameRule(f"{_MOE}.router.gate.weight", (f"{_MLP}.router.weight",)),
        NameRule(f"{_MOE}.{spelling.bias}", (f"{_MLP}.router.correction",)),
        *_feed_forward(f"{_MOE}.shared_experts", f"{_MLP}.shared"),
    ]
    for theirs, ours in _PARTS.items():
        name = f"{_LAYER}.{spelling.experts}.{theirs}{spelling.suffixes[theirs]}"
        rules.append(NameRule(name, (f"{_MLP}.experts.E.{ours}.weight",), EXPERTS_STACKED))
    return rules


def titan_weights(
    checkpoint: Path,
    tensors: Mapping[str, TensorSource],
    model: ModelConfig,
    spelling: VersionSpelling,
) -> dict[str, TensorSource]:
    """Return the tensors of the model by their names, without buffers and modules of multi-token
    prediction.

    Raises UserError for a correction of routers that counts and that `model` does not have, and for
    experts of which their shape does not tell how they lie.
    """
    weights: dict[str, TensorSource] = {}
    for name, tensor in tensors.items():
        if _BUFFERS.fullmatch(name) or name.startswith(MODULES):
            continue
        if _BIAS.fullmatch(name) and not model.router.correction:
            # torchtitan has one in every model with experts; one that no training moved is zero.
            if tensor.read().any():
                raise UserError.of("convert.titan_correction", path=checkpoint, name=name)
            continue
        _require_order_known(checkpoint, name, tensor)
        weights[name] = tensor
    return weights


def _require_order_known(checkpoint: Path, name: str, tensor: TensorSource) -> None:
    """Raise UserError for square experts of a version whose names do not say the dimensions: in
    2025 their order changed."""
    experts = _EXPERTS.fullmatch(name)
    if experts and not experts[2] and tensor.shape[-1] == tensor.shape[-2]:
        raise UserError.of(
            "convert.titan_experts_square", path=checkpoint, name=name, shape=list(tensor.shape)
        )
