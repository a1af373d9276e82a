"""Numbers of a config.json that no model can have: one line that names the key and the value."""

from collections.abc import Iterator
from typing import Any

import pytest

from megaprec.errors import UserError
from tests.other_systems import CONFIGS
from tests.refusals import raises
from tools.convert.hf.config import from_hugging_face
from tools.convert.hf.families import FAMILIES
from tools.convert.hf.keys import FREE

KINDS = tuple(FAMILIES)
# with layers of all kinds
SMALL = {kind: CONFIGS[kind] for kind in KINDS} | {"nemotron_h": CONFIGS["nemotron_h-experts"]}
NO_SIZE = "query_pre_attn_scalar"  # a number that may have a fraction
# 0 is none of them, or changes nothing in a model of that kind
MAY_BE_ZERO = {
    "first_k_dense_replace",
    "hidden_size_per_layer_input",
    "max_window_layers",
    "mtp_num_hidden_layers",
    "num_mtp_layers",
    "num_mtp_modules",
    "num_nextn_predict_layers",
    "num_kv_shared_layers",
}
IDLE_AT_ZERO = {
    ("qwen2_moe", "num_experts"),
    ("qwen3_moe", "num_experts"),
    ("qwen3_moe", "num_local_experts"),
    ("qwen3_next", "num_experts"),
    ("qwen3_next", "num_local_experts"),
    ("exaone4", "sliding_window_pattern"),
    ("cohere2", "sliding_window_pattern"),
    ("phi3", "original_max_position_embeddings"),
    *((kind, "sliding_window") for kind in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")),
    *((kind, "intermediate_size") for kind in ("qwen2_moe", "qwen3_moe", "qwen3_next")),
    *((kind, "intermediate_size") for kind in ("qwen3_5_moe_text", "deepseek_v2", "solar_open")),
}


def sizes(kind: str) -> Iterator[str]:
    """The names of the whole numbers of a family's config.json that it reads, other names too."""
    family = FAMILIES[kind]
    numbers = {**family.defaults, **SMALL[kind]}
    for name in (*numbers, *family.aliases):
        value = numbers.get(family.aliases.get(name, name))
        is_other = name in FREE or name == NO_SIZE or name.endswith("token_id")
        if type(value) is int and not is_other:
            yield name


def without_other_names(kind: str, key: str) -> dict[str, Any]:
    """A small config.json without the other names of a key."""
    aliases = FAMILIES[kind].aliases
    usual = aliases.get(key, key)
    return {name: value for name, value in SMALL[kind].items() if aliases.get(name, name) != usual}


@pytest.mark.parametrize("wrong", [0, -1, 2**70])
@pytest.mark.parametrize("kind", KINDS)
def test_a_size_that_no_model_has_is_one_line_of_its_key(kind: str, wrong: int) -> None:
    keys = [*sizes(kind)]
    assert len(keys) > 5
    for key in keys:
        config = {**without_other_names(kind, key), key: wrong}
        try:
            from_hugging_face(config)
        except UserError as error:
            (line,) = error.problems
            assert f" {key} = {wrong}" in line, (key, line)
        else:
            may_be_zero = key in MAY_BE_ZERO or (kind, key) in IDLE_AT_ZERO
            assert wrong == 0 and may_be_zero, key


@pytest.mark.parametrize(
    ("kind", "key", "wrong"),
    [
        ("gpt_neox", "rotary_pct", 3.5),
        ("gpt_neox", "rotary_emb_base", 0),
        ("llama", "rope_theta", 0.5),
        ("llama", "attention_dropout", 1.0),
        ("gpt2", "embd_pdrop", 3),
        ("gemma3_text", "rope_local_base_freq", 0),
        ("nemotron_h", "mamba_dt_min", 0),
        ("nemotron_h", "mamba_dt_limit", 3.5),
        ("deepseek_v3", "routed_scaling_factor", 0),
    ],
)
def test_a_number_that_no_model_has_is_one_line_of_its_key(
    kind: str, key: str, wrong: float
) -> None:
    config = {**without_other_names(kind, key), "rope_parameters": None, key: wrong}
    with pytest.raises(UserError) as caught:
        from_hugging_face(config)
    (line,) = caught.value.problems
    assert f" {key} = {wrong}" in line


@pytest.mark.parametrize(
    ("kind", "experts"),
    [
        ("mixtral", "num_local_experts"),
        ("gpt_oss", "num_local_experts"),
        ("qwen2_moe", "num_experts"),
        ("qwen3_next", "num_experts"),
        ("qwen3_5_moe_text", "num_experts"),
        ("glm4_moe", "n_routed_experts"),
        ("deepseek_v2", "n_routed_experts"),
        ("deepseek_v3", "n_routed_experts"),
        ("nemotron_h", "n_routed_experts"),
    ],
)
def test_more_experts_of_a_token_than_there_are_is_said_of_their_key(
    kind: str, experts: str
) -> None:
    config = SMALL[kind]
    count = config[experts]
    with raises("convert.hf_experts_per_token", per_token=99, experts_key=experts, experts=count):
        from_hugging_face({**config, "num_experts_per_tok": 99})


def test_experts_without_the_number_of_a_token_are_refused_by_that_key() -> None:
    config = SMALL["deepseek_v2"]
    for change in ({}, {"num_experts_per_tok": None}):
        without = {key: config[key] for key in config if key != "num_experts_per_tok"}
        with raises("convert.hf_missing", key="num_experts_per_tok"):
            from_hugging_face(without | change)


# of families without experts and without multi-token prediction
NUMBERS_OF_NONE = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "num_mtp_layers",
    "num_nextn_predict_layers",
)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama", "qwen3", "olmo2", "gemma2"])
def test_no_experts_are_none_where_a_family_has_no_word_for_them(kind: str) -> None:
    model = from_hugging_face(SMALL[kind])
    for key in NUMBERS_OF_NONE:
        assert from_hugging_face({**SMALL[kind], key: 0}) == model
        with raises("convert.hf_only_value", key=key):
            from_hugging_face({**SMALL[kind], key: 2})


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe", "qwen3_next"])
def test_no_experts_of_a_token_are_none_where_no_layer_has_experts(kind: str) -> None:
    dense = {**SMALL[kind], "num_experts": 0}
    model = from_hugging_face(dense)
    assert model.experts == 0
    assert from_hugging_face({**dense, "num_experts_per_tok": 0}) == model


def test_the_older_name_of_the_longest_text_is_read() -> None:
    config = SMALL["llama"]
    older = {key: value for key, value in config.items() if key != "max_position_embeddings"}
    longest = config["max_position_embeddings"]
    model = from_hugging_face(config)
    assert from_hugging_face({**config, "max_sequence_length": longest}) == model
    assert from_hugging_face({**older, "max_sequence_length": longest}) == model
    with raises("convert.hf_alias_differs", alias="max_sequence_length"):
        from_hugging_face({**config, "max_sequence_length": longest + 1})


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("wrong", [0, False, "", []])
def test_positions_that_are_no_table_are_refused(kind: str, key: str, wrong: object) -> None:
    with raises("convert.hf_value_kind", key=key, remedy="a table"):
        from_hugging_face({**SMALL[kind], key: wrong})


def test_the_base_of_windows_in_a_table_is_above_one() -> None:
    table = {"sliding_attention": {"rope_type": "default", "rope_theta": 0}}
    config = {**SMALL["gemma3_text"], "rope_parameters": table}
    config.pop("rope_local_base_freq", None)
    with raises("convert.hf_value_kind", key="rope_parameters.sliding_attention.rope_theta"):
        from_hugging_face(config)


# As published for Gemma 2 2B: the activation has two names, of which its class reads the newer one.
GEMMA_2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "transformers_version": "4.42.4",
    "use_cache": True,
    "vocab_size": 256000,
}


def test_an_activation_with_two_names_is_read_if_both_say_the_same() -> None:
    model = from_hugging_face(GEMMA_2)
    assert model == from_hugging_face({**GEMMA_2, "hidden_act": "gelu_new"})
    with raises("convert.hf_only_value", key="hidden_act"):
        from_hugging_face({**GEMMA_2, "hidden_act": "silu"})


@pytest.mark.parametrize("kind", sorted(SMALL))
def test_how_long_a_text_a_tokenizer_takes_is_no_size_of_a_model(kind: str) -> None:
    """Of Kimi's it is another name of one."""
    config = without_other_names(kind, "model_max_length")
    named = FAMILIES[kind].aliases.get("model_max_length")
    expected = {**config, named: 4096} if named else config
    assert from_hugging_face({**config, "model_max_length": 4096}) == from_hugging_face(expected)


def test_all_keys_that_may_say_a_wrong_number_are_named() -> None:
    """Llama 3.1's file with a base of 1, which is also its right factor of low frequencies."""
    config = {
        **CONFIGS["llama"],
        "rope_theta": 1.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    with raises("convert.hf_value_kind", key="rope_scaling.low_freq_factor or rope_theta"):
        from_hugging_face(config)
