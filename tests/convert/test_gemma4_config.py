"""The config.json of Gemma 4: heads of layers without the window, and parts that are not known."""

from typing import Any

import pytest
from pydantic import ValidationError

from megaprec.errors import UserError
from models.config import ModelConfig
from tests.other_systems import CONFIGS
from tests.refusals import raises
from tools.convert.hf.config import config_of, from_hugging_face
from tools.convert.hf.text_models import text_config

SMALL = CONFIGS["gemma4_text"]
# as transformers writes them: the fourth layer has no window
OWN_HEADS = {"head_dim": 10, "num_key_value_heads": 1}
WITHOUT = ("global_head_dim", "num_global_key_value_heads")


def by_layer(**changes: Any) -> dict[str, Any]:
    """The small config.json with per_layer_config in place of keys of its own."""
    kept = {key: value for key, value in SMALL.items() if key not in WITHOUT}
    return kept | {"per_layer_config": {"3": {**OWN_HEADS, **changes}}}


def test_heads_by_layer_are_those_that_published_keys_say() -> None:
    assert from_hugging_face(by_layer()) == from_hugging_face(SMALL)


def test_fewer_keys_than_values_are_written_by_layer_where_its_class_reads_no_other_key() -> None:
    model = from_hugging_face(SMALL).model_copy(update={"global_key_as_value": False})
    config = config_of(model, "float32")
    assert config["per_layer_config"] == {"3": OWN_HEADS}
    assert from_hugging_face(config) == model


def test_a_number_of_keys_is_not_read_without_keys_as_values() -> None:
    config = {**SMALL, "attention_k_eq_v": False}
    assert from_hugging_face(config).global_kv_heads == 0


def test_heads_that_are_those_of_all_layers_are_not_said_twice() -> None:
    model = from_hugging_face({**SMALL, "global_head_dim": SMALL["head_dim"]})
    assert model.global_head_dim == 0


@pytest.mark.parametrize(
    "value",
    [
        {"2": OWN_HEADS},
        {"2": OWN_HEADS, "3": OWN_HEADS},
        {"3": {**OWN_HEADS, "intermediate_size": 3}},
    ],
)
def test_other_settings_by_layer_are_refused(value: dict[str, Any]) -> None:
    with raises("convert.hf_gemma4_per_layer", layers=[3]):
        from_hugging_face(by_layer() | {"per_layer_config": value})


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "8", True])
def test_a_width_by_layer_that_no_head_has_is_refused_by_its_key(wrong: Any) -> None:
    with pytest.raises(UserError, match=r"per_layer_config\.head_dim"):
        from_hugging_face(by_layer(head_dim=wrong))


def test_heads_that_two_keys_say_differently_are_refused() -> None:
    with raises("convert.hf_only_value", key="global_head_dim"):
        from_hugging_face(by_layer() | {"global_head_dim": 8})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size_per_layer_input", 6),
        ("num_kv_shared_layers", 1),
        ("enable_moe_block", True),
        ("use_bidirectional_attention", "all"),
    ],
)
def test_a_part_that_is_not_known_is_refused_by_name(key: str, value: Any) -> None:
    with raises("convert.hf_gemma4_part", key=key):
        from_hugging_face({**SMALL, key: value})


def test_embeddings_that_each_layer_reads_are_there_unless_the_file_says_not() -> None:
    config = {key: value for key, value in SMALL.items() if key != "hidden_size_per_layer_input"}
    with raises("convert.hf_gemma4_part", key="hidden_size_per_layer_input"):
        from_hugging_face(config)
    unified = {**config, "model_type": "gemma4_unified_text"}
    assert from_hugging_face(unified) == from_hugging_face(SMALL)


@pytest.mark.parametrize(("key", "wrong"), [("partial_rotary_factor", 0), ("factor", 0.5)])
def test_proportional_positions_that_no_model_has_are_refused(key: str, wrong: float) -> None:
    full = {"rope_type": "proportional", "rope_theta": 50.0, key: wrong}
    tables = {"full_attention": full, "sliding_attention": {"rope_theta": 7.0}}
    with pytest.raises(UserError, match=str(wrong)):
        from_hugging_face({**SMALL, "rope_parameters": tables})


def test_a_last_layer_with_the_window_is_refused_for_its_class_gives_it_none() -> None:
    with raises("convert.hf_gemma4_last_layer", layer=3):
        from_hugging_face({**SMALL, "layer_types": ["sliding_attention"] * 4})


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_the_text_model_inside_one_of_several_inputs_is_read(kind: str) -> None:
    inner = {key: value for key, value in SMALL.items() if not key.endswith("token_id")}
    outer = {
        "model_type": kind,
        "text_config": {**inner, "model_type": f"{kind}_text"},
        "vision_config": {"hidden_size": 8},
        "audio_config": None,
        "image_token_id": 128,
        "boa_token_id": 127,
    }
    assert from_hugging_face(text_config(outer)) == from_hugging_face(SMALL)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"window_layers": [0, 1]}, "model.global_heads_unused"),
        ({"window_layers": [], "window": 0}, "model.global_heads_unused"),
        ({"window_rope_base": 0.0}, "model.global_heads_rope"),
        ({"global_kv_heads": 3}, "model.global_kv_heads"),
        ({"global_head_dim": 7}, "model.global_head_dim_rope"),
        ({"mup_base_hidden": 12}, "model.global_heads_beside"),
        (
            {"global_head_dim": 0, "global_kv_heads": 0, "window_layers": []},
            "model.global_value_unused",
        ),
    ],
)
def test_heads_of_layers_without_the_window_that_no_model_has_are_refused(
    changes: dict[str, Any], code: str
) -> None:
    fields = {
        "family": "gemma4",
        "layers": 2,
        "hidden": 24,
        "heads": 4,
        "kv_heads": 2,
        "window": 4,
        "window_layers": [0],
        "window_rope_base": 50.0,
        "global_head_dim": 8,
        "global_kv_heads": 1,
        "global_key_as_value": True,
    }
    assert ModelConfig(**fields)
    with pytest.raises(ValidationError) as caught:
        ModelConfig(**{**fields, **changes})
    (error,) = caught.value.errors()
    problems = error.get("ctx", {})["error"].problems
    assert code in [problem.code for problem in problems]
