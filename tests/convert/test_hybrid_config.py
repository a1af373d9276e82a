"""Every key of Nemotron-H's config.json is used, checked, or refused by name."""

from typing import Any

import pytest

from megaprec.errors import UserError
from models.config import ModelConfig
from models.presets import preset
from tests.refusals import sentence
from tools.convert.hf.config import config_of, from_hugging_face

# As published for the 8B model, with a shorter pattern.
PUBLISHED: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_head_dim": 128,
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": 128,
    "hidden_dropout": 0.0,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M*-",
    "initializer_range": 0.02,
    "intermediate_size": 21504,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rms_norm_eps": 1e-05,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "time_step_rank": 256,
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}
MODEL = ModelConfig(
    family="nemotron_h",
    layers=5,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn=21504,
    vocab=131072,
    max_positions=8192,
    hybrid_pattern="M-M*-",
    mamba={
        "heads": 128,
        "head_dim": 64,
        "state_dim": 128,
        "groups": 8,
        "least_step": 0.001,
    },  # type: ignore[arg-type]
)


# As published for Nemotron 3 Nano, where it differs from the 8B model.
WITH_EXPERTS: dict[str, Any] = {key: PUBLISHED[key] for key in PUBLISHED if "rank" not in key} | {
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "mamba_num_heads": 64,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
}


def test_a_published_config_with_experts_is_read_and_written() -> None:
    """It is the preset, but for what only training goes by and the least time step, which
    transformers has of the first ones."""
    model = from_hugging_face(WITH_EXPERTS)
    named = preset("nemotron-3-nano-30b-a3b")
    mamba = named.mamba.model_copy(update={"least_step": 0.001})
    assert model == named.model_copy(update={"mamba": mamba, "router_aux_loss": 0.0})
    assert from_hugging_face(config_of(model, "bfloat16")) == model


def test_a_published_config_is_read_and_written() -> None:
    assert from_hugging_face(PUBLISHED) == MODEL
    assert from_hugging_face(config_of(MODEL, "bfloat16")) == MODEL


@pytest.mark.parametrize("names", ["layers_block_type", "layer_types"])
def test_kinds_of_layers_may_be_named(names: str) -> None:
    config = {key: value for key, value in PUBLISHED.items() if key != "hybrid_override_pattern"}
    newer = ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"]
    older = ["mamba", "mlp", "mamba", "attention", "mlp"]
    for kinds in (newer, older):
        assert from_hugging_face(config | {names: kinds}) == MODEL


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_bias", True),
        ("attention_head_dim", 64),
        ("hidden_dropout", 0.1),
        ("hybrid_override_pattern", "M-X*-"),
        ("layers_block_type", ["mamba", "mlp", "conv", "attention", "mlp"]),
        ("mamba_hidden_act", "gelu"),
        ("mamba_proj_bias", True),
        ("mlp_hidden_act", "silu"),
        ("num_nextn_predict_layers", 1),
        ("rms_norm_eps", 1e-3),
        ("sliding_window", 128),
        ("tie_word_embeddings", True),
        ("time_step_limit", [0.0, 0.5]),
        ("use_bias", True),
        ("use_conv_bias", False),
    ],
)
def test_a_key_of_another_model_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=sentence("convert.hf_only_value", key=key)):
        from_hugging_face(PUBLISHED | {key: value})


@pytest.mark.parametrize(
    ("changes", "code", "fields"),
    [
        ({"moe_latent_size": 1024}, "convert.hf_latent_experts", {"size": 1024}),
        ({"n_shared_experts": 2}, "convert.hf_only_value", {"key": "n_shared_experts"}),
        ({"mlp_bias": True}, "convert.hf_only_value", {"key": "mlp_bias"}),
        (
            {"moe_shared_expert_intermediate_size": 0},
            "convert.hf_shared_expert_zero",
            {"key": "moe_shared_expert_intermediate_size"},
        ),
        ({"n_group": 3}, "convert.hf_groups_uneven", {"groups": 3}),
        ({"num_nextn_predict_layers": 1}, "convert.hf_only_value", {}),
    ],
)
def test_experts_of_another_model_are_refused_by_name(
    changes: dict[str, Any], code: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=sentence(code, **fields)):
        from_hugging_face(WITH_EXPERTS | changes)


def test_a_pattern_that_differs_from_the_names_is_refused() -> None:
    kinds = ["mamba", "mlp", "mamba", "mlp", "mlp"]
    said = sentence("convert.hf_only_value", key="hybrid_override_pattern")
    with pytest.raises(UserError, match=said):
        from_hugging_face(PUBLISHED | {"layers_block_type": kinds})


def test_layers_of_no_kind_are_refused() -> None:
    config = {key: value for key, value in PUBLISHED.items() if key != "hybrid_override_pattern"}
    with pytest.raises(UserError, match=sentence("convert.hf_no_hybrid_pattern")):
        from_hugging_face(config)


def test_another_number_of_layers_is_refused() -> None:
    with pytest.raises(UserError, match=sentence("convert.hf_layer_types", num_types=5)):
        from_hugging_face(PUBLISHED | {"num_hidden_layers": 6})


@pytest.mark.parametrize(
    ("changes", "code", "fields"),
    [
        ({"hybrid_pattern": "M-M*"}, "model.hybrid_layers", {"kinds": 4}),
        ({"hybrid_pattern": "--*-*"}, "model.mamba_unused", {}),
        ({"mamba": {}}, "model.mamba_missing", {}),
        ({"mamba": {"heads": 6, "state_dim": 4}}, "model.mamba_key_missing", {"name": "head_dim"}),
        ({"mamba": {"groups": 2}}, "model.mamba_key_unused", {"name": "groups"}),
        (
            {"mamba": {"heads": 6, "head_dim": 4, "state_dim": 4, "groups": 4}},
            "model.mamba_groups",
            {"groups": 4},
        ),
        ({"norm_at": "after"}, "model.hybrid_needs", {"key": "norm_at"}),
        ({"parallel_residual": True}, "model.hybrid_needs", {"key": "parallel_residual"}),
        ({"dropout": 0.1, "dropout_at": "stream"}, "model.hybrid_needs", {"key": "dropout_at"}),
        (
            {"hybrid_pattern": "M-M", "attention_gate": True},
            "model.hybrid_unused",
            {"key": "attention_gate"},
        ),
        ({"experts": 4}, "model.hybrid_experts_unused", {"experts": 4}),
        ({"hybrid_pattern": "M-E*-"}, "model.hybrid_experts_missing", {"pattern": "M-E*-"}),
        (
            {"hybrid_pattern": "MEM*E", "experts": 4, "dense_ffn": 32},
            "model.dense_ffn_unused",
            {"dense_ffn": 32},
        ),
        ({"dense_layers": (1,)}, "model.not_beside", {"other": "dense_layers"}),
        ({"window": 4}, "model.not_beside", {"other": "window"}),
        ({"mup_base_hidden": 4096}, "model.not_beside", {"other": "mup_base_hidden"}),
        (
            {"positions": "rope", "nope_layers": (0,)},
            "model.nope_layers_unused",
            {"nope_layers": [0]},
        ),
    ],
)
def test_a_hybrid_that_cannot_be_is_refused_by_what_makes_it_so(
    changes: dict[str, Any], code: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=sentence(code, **fields)):
        ModelConfig.model_validate(MODEL.model_dump() | changes)


def test_biases_of_a_hybrid_without_attention_are_those_of_what_it_has() -> None:
    """`bias` alone was refused, by the name of a key that nobody had given."""
    given = {"layers": 3, "hidden": 64, "heads": 4, "mamba": MODEL.mamba}
    model = ModelConfig.model_validate(given | {"hybrid_pattern": "M-M", "bias": True})
    assert (model.qkv_bias, model.output_bias, model.mlp_bias) == (False, False, True)
    model = ModelConfig.model_validate(given | {"hybrid_pattern": "M*-", "bias": True})
    assert (model.qkv_bias, model.output_bias, model.mlp_bias) == (True, True, True)
