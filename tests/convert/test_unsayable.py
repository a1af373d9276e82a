"""A model that no Hugging Face family says: the line names what would have to be otherwise, and no
more."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from megaprec.errors import UserError
from models.config import ModelConfig
from models.equivalence import TRAINING_ONLY_KEYS, with_idle_keys_reset
from tests.models.drawn import CHOICES, FAMILIES, SCALINGS
from tests.other_systems import CONFIGS
from tests.refusals import raises, sentence
from tools.convert.core.names import HUGGING_FACE
from tools.convert.core.rules import has_module_rules
from tools.convert.hf.config import (
    config_of,
    from_hugging_face,
    model_type_of,
    omitted_settings,
)
from tools.convert.megatron.args import args_of
from tools.convert.megatron.args import omitted_fields as unsaid_by_args

SIZES = {"layers": 3, "hidden": 16, "heads": 4, "ffn": 24, "vocab": 53, "max_positions": 16}
LATENT = {
    "latent": {"query_rank": 9, "kv_rank": 7, "rope_dim": 4, "nope_dim": 3, "value_dim": 5},
    "experts": 4,
}
DELTA_NET = {
    "rotary_fraction": 0.5,
    "delta_net": {"key_heads": 2, "value_heads": 4, "key_dim": 3, "value_dim": 5},
    "delta_layers": (0, 2),
}
SAYABLE: dict[str, dict[str, Any]] = {  # what a family needs besides sizes
    "gpt_neox": {"rotary_fraction": 0.5},
    "glm4_moe": {"experts": 4, "shared_experts": 24},
    "deepseek_v2": {**LATENT, "shared_experts": 24, "norm_topk": False},
    "deepseek_v3": {**LATENT, "shared_experts": 24},
    "nemotron_h": {
        "layers": 4,
        "hybrid_pattern": "ME*-",
        "mamba": {"heads": 4, "head_dim": 3, "state_dim": 5, "groups": 2},
        "experts": 4,
        "shared_experts": 24,
    },
    "qwen3_next": {**DELTA_NET, "experts": 4, "shared_experts": 24, "shared_gate": True},
    "qwen3_5": DELTA_NET,
    "olmoe": {"experts": 4, "experts_per_token": 2},
    "cohere2": {"window": 3, "window_layers": (0, 1), "nope_layers": (2,)},
    "ministral3": {
        "rope_scaling": {
            "kind": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 8,
            "query_beta": 0.1,
        }
    },
    "minimax_m2": {"experts": 4, "experts_per_token": 2, "rotary_fraction": 1.0},
    "dots1": {"experts": 4, "shared_experts": 24},
    "solar_open": {"experts": 4, "shared_experts": 24},
    "glm4_moe_lite": {**LATENT, "shared_experts": 24},
    "youtu": {"latent": LATENT["latent"]},
    "kimi_linear": {
        **LATENT,
        "delta_net": {
            "key_heads": 2,
            "value_heads": 2,
            "key_dim": 3,
            "value_dim": 3,
            "gate_rank": 3,
        },
        "delta_layers": (0, 2),
        "shared_experts": 24,
    },
}
OTHERS: dict[str, tuple[Any, ...]] = {
    "experts": (0, 4),
    "rope_scaling": SCALINGS,
    "router": (
        {"score": "softmax", "scale": 2.5},
        {"score": "softmax", "groups": 2, "groups_per_token": 2, "group_best": 1},
        {
            "score": "sigmoid",
            "correction": True,
            "groups": 2,
            "groups_per_token": 2,
            "group_best": 1,
        },
        {"score": "sigmoid", "correction": True, "groups": 2},
    ),
    "window_layers": ((), (0,), (0, 1, 2)),
    "dropout": (0.1,),
    "dropout_at": ("stream",),
    "embedding_dropout": (0.2,),
    "attention_dropout": (0.1,),
    "init_std": (0.5,),
    "init": ({"qkv": 0.1}, {"shrink": "none"}),
    **{f"router_{key}": (0.3,) for key in ("aux_loss", "z_loss", "correction_speed")},
    "mtp_loss_weight": (0.1,),
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"family": "deepseek_v3", "shared_experts": 25, **LATENT},
            sentence(
                "convert.hf_not_expressible",
                own_kind="deepseek_v3",
                remedies=re.compile("^shared_experts = 25: 24 wo"),
            ),
        ),
        (
            {"family": "deepseek_v2", "shared_experts": 24, **LATENT},
            sentence(
                "convert.hf_not_expressible",
                own_kind="deepseek_v2",
                remedies="norm_topk = true: false would do",
            ),
        ),
        (
            {"family": "gpt2", "bias": True, "norm_bias": False},
            re.escape("norm_bias = false: true would do"),
        ),
        (
            {"family": "glm4_moe", "experts": 4, "shared_experts": 70},
            "shared_experts = 70: 72 would do",
        ),
        (
            {"family": "deepseek_v2", "shared_experts": 24, "norm_topk": False, **LATENT}
            | {"dense_layers": (1,)},
            re.escape("dense_layers = [1]: [] would do"),
        ),
        (
            {"family": "qwen3", "attention_softcap": 3.0, "final_softcap": 2.0, "rope_base": 5e5},
            sentence(
                "convert.hf_no_family", settings="attention_softcap = 3.0, final_softcap = 2.0"
            ),
        ),
        (
            {"family": "llama", "rope_scaling": {"kind": "proportional", "fraction": 0.5}},
            re.escape(
                'llama cannot say rope_scaling = {kind = "proportional", fraction = 0.5}: {} would do'
            ),
        ),
        (
            {"family": "llama", "norm": "layer", "attention_softcap": 3.0},
            sentence("convert.hf_no_family", settings='norm = "layer", attention_softcap = 3.0'),
        ),
    ],
)
def test_a_model_that_no_family_says_is_refused_by_what_makes_it_so(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError) as refused:
        config_of(ModelConfig.model_validate(SIZES | changes), "float32")
    (line,) = refused.value.problems
    assert re.search(said, line) and len(line) < 250


def sayable(model: ModelConfig) -> str:
    """What refuses a model; nothing if a config.json says it. Modules for which a family has no
    place are left out."""
    try:
        kind = model_type_of(model)
        omitted_settings(model if has_module_rules(HUGGING_FACE[kind]) else model.without_mtp)
    except UserError as refused:
        return "; ".join(refused.problems)
    return ""


def changed(base: dict[str, Any]) -> Iterator[tuple[str, Any, ModelConfig]]:
    """Each model with one key changed, with the key and the value."""
    for key, values in {**CHOICES, **OTHERS}.items():
        for value in values:
            try:
                yield key, value, ModelConfig.model_validate(base | {key: value})
            except ValidationError:
                continue


@pytest.mark.cases(3, sample=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_refusal_names_the_key_that_was_changed(family: str) -> None:
    base = SIZES | {"family": family} | SAYABLE.get(family, {})
    plain = ModelConfig.model_validate(base)
    assert not sayable(plain)
    for key, value, model in changed(base):
        differing = {
            name
            for name in ModelConfig.model_fields
            if getattr(model, name) != getattr(plain, name)
        }
        within = {*value} if isinstance(value, dict) else set[str]()
        said = sayable(model)
        assert not said or any(name in said for name in differing | within), (key, value, said)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_changes_no_result_hinders_no_export(family: str) -> None:
    base = SIZES | {"family": family, "router_z_loss": 0.25} | SAYABLE.get(family, {})
    plain = with_idle_keys_reset(ModelConfig.model_validate(base))
    for key, value, model in changed(base):
        same = with_idle_keys_reset(model).model_copy(
            update={name: getattr(plain, name) for name in TRAINING_ONLY_KEYS}
        )
        if same == plain:
            assert not sayable(model), (key, value)


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "mistral", "qwen2", "qwen3", "mixtral", "deepseek_v3"]
)
def test_a_key_that_changes_no_result_does_not_keep_a_model_from_megatron(family: str) -> None:
    latent = {"latent": {**LATENT["latent"], "norm_eps": 1e-5}, "experts": 4}
    base = SIZES | {"family": family} | (latent if family == "deepseek_v3" else {})
    plain = with_idle_keys_reset(ModelConfig.model_validate(base))
    for key, value, model in changed(base):
        same = with_idle_keys_reset(model).model_copy(
            update={name: getattr(plain, name) for name in TRAINING_ONLY_KEYS}
        )
        if same == plain:
            found = unsaid_by_args(model, args_of(model, 53, 1, 1, False, torch.float32))
            assert not found or key in TRAINING_ONLY_KEYS, (key, value, found)


def test_a_cohere2_whose_layers_all_turn_is_a_cohere() -> None:
    model = ModelConfig.model_validate(SIZES | {"family": "cohere2"})
    assert model_type_of(model) == "cohere"


def test_a_cohere2_without_a_window_is_refused_by_what_its_class_would_do() -> None:
    with raises("convert.hf_no_positions_at_all", window="null"):
        from_hugging_face({**CONFIGS["cohere2"], "sliding_window": None})
