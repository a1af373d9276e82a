"""The small model that stands for a published one has its positions, however they are spelled."""

from collections.abc import Iterator
from typing import Any

import pytest

from megaprec.errors import UserError
from models.config import ModelConfig
from tests.other_systems import CONFIGS
from tests.refusals import raises
from tools.convert.hf.config import config_of, from_hugging_face
from tools.convert.hf.families import FAMILIES
from tools.convert.hf.rope import BY_LAYER
from tools.convert.probe import check_config, reduced

SMALL = {kind: CONFIGS[kind] for kind in FAMILIES} | {"nemotron_h": CONFIGS["nemotron_h-experts"]}
# Lengths as published: a small model has others.
LONGEST = {"max_position_embeddings": 65536}
ORIGINAL = {"original_max_position_embeddings": 8192}
BASE = {"rope_theta": 500000.0}
YARN = {"rope_type": "yarn", "factor": 8.0, **ORIGINAL}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 8.0},
    "yarn": YARN,
    "yarn with factors": {**YARN, "attention_factor": 1.2, "beta_fast": 32.0, "beta_slow": 1.0},
    "yarn without a factor": {**YARN, "factor": None},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **ORIGINAL,
    },
}
# Keys of positions that configs have, which a spelling replaces.
GEMMA4 = ("gemma4_text", "gemma4_unified_text")
POSITIONS = ("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq")


def spellings(kind: str, scaling: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The keys of a config.json that say one kind of positions: for transformers 4, for 5, for
    both."""
    base = {"rotary_emb_base": BASE["rope_theta"]} if kind == "gpt_neox" else BASE
    older = {**base, "rope_scaling": scaling}
    flat = {"rope_parameters": {**scaling, **BASE}}
    nested = {
        "rope_parameters": {
            "full_attention": {**scaling, **BASE},
            "sliding_attention": {"rope_type": "default", **BASE},
        }
    }
    newer = nested if kind in BY_LAYER else flat
    if kind in GEMMA4:
        # Its class reads rope_parameters alone.
        yield newer
        return
    outside = {key: value for key, value in scaling.items() if key not in ORIGINAL}
    yield older
    yield newer
    yield {**older, **newer}
    yield {**base, "rope_scaling": outside, **ORIGINAL}
    yield {**older, **newer, **ORIGINAL}


def read(config: dict[str, Any]) -> ModelConfig | None:
    """The model of a config.json; None if it is refused."""
    try:
        return from_hugging_face(config)
    except UserError:
        return None


def assert_same_positions(config: dict[str, Any], where: object) -> None:
    """The small config.json has every position setting of the large one but its lengths."""
    large = from_hugging_face(config)
    small = from_hugging_face(reduced(config))
    lengths = dict.fromkeys((*ORIGINAL, "factor"), 1)
    assert small.rope_scaling.model_copy(update=lengths) == large.rope_scaling.model_copy(
        update=lengths
    ), where
    assert (small.rope_base, small.positions) == (large.rope_base, large.positions), where


@pytest.mark.parametrize("kind", [*FAMILIES])
def test_every_spelling_of_positions_stays_one_in_the_small_model(kind: str) -> None:
    without = {key: value for key, value in SMALL[kind].items() if key not in POSITIONS}
    tried = 0
    for name, scaling in SCALINGS.items():
        if kind == "ministral3":
            # without which its class makes no model
            scaling = {**scaling, "llama_4_scaling_beta": 0.1}
        for number, spelling in enumerate(spellings(kind, scaling)):
            config = {**without, **LONGEST, **spelling}
            model = read(config)
            if model is None:
                continue
            tried += 1
            where = (name, number)
            assert_same_positions(config, where)
            assert_same_positions(config_of(model, "float32"), (*where, "exported"))
    turns = from_hugging_face(SMALL[kind]).positions == "rope"
    # of Phi-3 only those without a scaling are read, of Gemma 4 one spelling of each
    least = 5 if kind in ("phi3", *GEMMA4) else 10
    assert tried >= least or not turns


@pytest.mark.parametrize("rope_type", ["longrope", "su", "yarn"])
def test_long_ropes_of_phi3_are_refused_by_their_name(rope_type: str) -> None:
    factors = {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    config = {**SMALL["phi3"], "rope_scaling": {"type": rope_type, **factors}}
    with raises("convert.hf_only_value", key="rope_type", value=repr(rope_type)):
        from_hugging_face(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (kind, number)
        for kind in (*BY_LAYER, "gpt_oss")
        for number in range(1 if kind in GEMMA4 else 3)
    ],
)
def test_a_published_yarn_is_the_model_of_transformers(kind: str, number: int) -> None:
    without = {key: value for key, value in SMALL[kind].items() if key not in POSITIONS}
    spelling = [*spellings(kind, YARN)][number]
    config = {**without, **LONGEST, **spelling}
    assert "computes what" in check_config(config, "read")
    written = config_of(from_hugging_face(config), "float32")
    assert "computes what" in check_config(written, "written")


def test_a_base_that_the_class_does_not_read_is_not_that_of_the_tables() -> None:
    """GPT-NeoX's class reads rotary_emb_base, and of two tables rope_scaling."""
    tables = {"rope_scaling": YARN, "rope_parameters": {**YARN, **BASE}}
    with raises("convert.rope_tables_differ"):
        from_hugging_face({**SMALL["gpt_neox"], **tables, **BASE})


@pytest.mark.cases(0, sample=3)
@pytest.mark.parametrize("kind", [*FAMILIES])
def test_scaled_positions_of_every_family_are_those_of_transformers(kind: str) -> None:
    """Or the file is refused."""
    without = {key: value for key, value in SMALL[kind].items() if key not in POSITIONS}
    for name, scaling in SCALINGS.items():
        beta = {"llama_4_scaling_beta": 0.1} if kind == "ministral3" else {}
        config = {**without, **LONGEST, **[*spellings(kind, {**scaling, **beta})][-1]}
        if read(config) is not None:
            assert "computes what" in check_config(config, name)


def test_a_rotary_factor_that_norms_undo_is_refused() -> None:
    """NanoChat's norms of queries and keys follow the rotation."""
    scaled = {**SMALL["nanochat"], "rope_scaling": YARN}
    with raises("convert.rope_factor_undone", kind="nanochat"):
        from_hugging_face(scaled)
    without_factor = {**scaled, "rope_scaling": {**YARN, "attention_factor": 1.0}}
    assert "computes what" in check_config(without_factor, "it")
